"""Random states of this process: copied before a step, restored if it does not count, and seeded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megaaccum.platform import cpu


def snapshot() -> dict[str, torch.Tensor]:
    """Copies of every state that dropout draws from, uint8 on the CPU: torch's ("cpu"), the device's ("cuda", if
    there is one) and those of Megatron's tracker by their names. Waits for no kernel."""
    states = {"cpu": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if cpu.has_accelerator():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def restore(states: dict[str, torch.Tensor]) -> None:
    """Restore the states of `snapshot`; an empty one changes nothing."""
    if not states:
        return
    own = {name: state.clone() for name, state in states.items()}
    if (cuda := own.pop("cuda", None)) is not None and cpu.has_accelerator():
        torch.cuda.set_rng_state(cuda)
    torch.set_rng_state(own.pop("cpu"))
    get_cuda_rng_tracker().set_states(own)


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU and of this rank's device. torch.manual_seed formats the stack for each kind of
    device that is not there, in milliseconds."""
    torch.default_generator.manual_seed(seed)
    if cpu.has_accelerator():
        torch.cuda.manual_seed(seed)


def seed_streams(key: str, current: str, names: Sequence[str], *, tp_rank: int) -> None:
    """Let torch's own generator draw from the stream `current`, and Megatron's tracker, which has these `names`, each
    from its own. A stream begins as a generator that is seeded by `key` and the stream's name."""
    if names:
        get_cuda_rng_tracker().set_states(_Streams(names, key, tp_rank))
    seed_generators(_number(key, current, tp_rank))


@contextmanager
def branched(*, part: str = "", tp_rank: int | None = None) -> Iterator[None]:
    """Context in which the streams that `seed_streams` has seeded start over: for a part of what they were seeded for,
    or, only those of Megatron's tracker, as tp rank `tp_rank` has them. If it has seeded none, nothing changes."""
    tracker = get_cuda_rng_tracker()
    before = tracker.states_
    if isinstance(before, _Streams):
        key, tp_rank = f"{before.key}/{part}" if part else before.key, before.tp_rank if tp_rank is None else tp_rank
        tracker.set_states(_Streams(list(before), key, tp_rank))
        if part:
            seed_generators(_number(key, "default", tp_rank))
    try:
        yield
    finally:
        tracker.set_states(before)


class _Streams(dict[str, Any]):
    """The states of Megatron's tracker by their names, each created at its first use: most layers draw from none."""

    def __init__(self, names: Sequence[str], key: str, tp_rank: int):
        super().__init__(dict.fromkeys(names))
        self.key, self.tp_rank = key, tp_rank

    def __getitem__(self, name: str) -> torch.Tensor:
        if super().__getitem__(name) is None:
            self[name] = torch.Generator(cpu.device()).manual_seed(_number(self.key, name, self.tp_rank)).get_state()
        return cast("torch.Tensor", super().__getitem__(name))


_SAME_OVER_TP = ("default", "data-parallel-rng")


def _number(key: str, stream: str, tp_rank: int) -> int:
    """A seed of 63 bits."""
    text = f"{key}/{stream}/{0 if stream in _SAME_OVER_TP else tp_rank}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
