"""Random states of this process: copied before a step, restored if it does not count, and seeded."""

from __future__ import annotations

import torch

from megaaccum.platform import cpu


def snapshot() -> dict[str, torch.Tensor]:
    """Copies of every state that dropout draws from, uint8 on the CPU: torch's ("cpu"), the device's ("cuda", if
    there is one) and those of Megatron's tracker by their names. Waits for no kernel."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"cpu": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if cpu.has_accelerator():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def restore(states: dict[str, torch.Tensor]) -> None:
    """Restore the states of `snapshot`; an empty one changes nothing."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    if not states:
        return
    own = {name: state.clone() for name, state in states.items()}
    cuda = own.pop("cuda", None)
    if cuda is not None and cpu.has_accelerator():
        torch.cuda.set_rng_state(cuda)
    torch.set_rng_state(own.pop("cpu"))
    get_cuda_rng_tracker().set_states(own)


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU and of this rank's device. torch.manual_seed formats the stack for each kind of
    device that is not there, in milliseconds."""
    torch.default_generator.manual_seed(seed)
    if cpu.has_accelerator():
        torch.cuda.manual_seed(seed)
