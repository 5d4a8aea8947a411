"""What is tested of FP8 inside ranks that see Transformer Engine (te_on_cpu.py): two ranks, one function per case.

Each returns plain data, which tests/multiproc/test_fp8.py looks at. The model has four layers; histories are longer than
a run, so that they hold the largest values of every micro-batch in order, and two runs with equal histories had equal
scales throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from tests.multiproc.faults import Fault, differences, injected, state_of
from tests.multiproc.parity import Case, assemble, make, stack

ROWS, MICROBATCHES = 40, 6
MODEL = "--num_layers 4 --transformer_impl transformer_engine --clip_grad 1"
FP8 = f"--fp8_format hybrid --fp8_amax_history_len {ROWS} --fp8_amax_compute_algo max"
SERIAL = f"--num_chunks {MICROBATCHES}"
PP2 = SERIAL + " --pp 2"
Tensors = dict[str, torch.Tensor]


def case(layout: str, model: str = FP8) -> Case:
    return Case(2, layout, f"{MODEL} {model}", "bf16")


@dataclass
class Run:
    """A model in training. `gradients`: of each step that was taken, by name, whole."""

    of: Case
    gradients: list[Tensors] = field(default_factory=list)

    def __post_init__(self):
        self.plan, self.groups, self.chunks, self.boundary, self.stepper = make(self.of)
        self.fp8 = self.stepper._fp8
        optimizer_step = self.boundary.step

        def step() -> None:
            self.gradients.append(assemble(self.boundary, self.groups, self.chunks))
            optimizer_step()

        self.boundary.step = step

    def train(self, *numbers: int, **keys):
        """Steps, each on the same sequences whatever the layout: ranks of dp see the same ones."""
        count = self.plan.batch.num_microbatches
        for number in numbers:
            batch = [stack([number * count + index]) for index in range(count)]
            result = self.stepper.train(batch, step=number, **keys)
        return result

    def evaluate(self) -> None:
        self.stepper.evaluate([stack([100 + index]) for index in range(self.plan.batch.num_microbatches)])

    def state(self) -> Tensors:
        """Copies of scales and histories."""
        return {name: tensor.clone() for name, tensor in self.fp8.tensors.items()}

    def rows(self) -> dict[str, int]:
        """{history: rows in which the input (forward) or the output's gradient (backward) was noted}."""
        return {name: int((t[:, 0] > 0).sum()) for name, t in self.fp8.tensors.items() if "amax" in name}


def trained(of: Case, *steps: int) -> Run:
    run = Run(of)
    run.train(*(steps or (0, 1)))
    return run


def equal(run: Run, reference: Run) -> dict:
    """How far a rank's scales, histories and gradients are from those of the reference, by name."""
    own, all_of_it = run.state(), reference.state()
    wrong = [name for name in own if not torch.equal(own[name], all_of_it[name])]
    grads = [
        float((mine[name] - whole[name]).norm() / whole[name].norm())
        for mine, whole in zip(run.gradients, reference.gradients, strict=True)
        for name in mine
    ]
    return {"tensors": len(own), "wrong": wrong, "worst_gradient": max(grads), "rows": sorted(set(run.rows().values()))}


_serial: dict[str, Run] = {}


def serial(model: str = FP8) -> Run:
    """Accumulation without a pipeline, two steps: each rank has the whole model and the same micro-batches."""
    if model not in _serial:
        _serial[model] = trained(case(SERIAL, model))
    return _serial[model]


@contextmanager
def without_us() -> Iterator[None]:
    """Histories as Transformer Engine moves them by itself."""
    from megaaccum import private_te
    from megaaccum.precision import fp8

    private_te.give_back_updates()
    with (
        patch.object(fp8.Fp8, "_update", lambda self, forward: None, create=True),
        patch.object(private_te, "take_over_updates", lambda: lambda forward: None),
        patch.object(private_te.Histories, "use", lambda self: None),
        patch.object(private_te, "begin_recompute", lambda like: None),
        patch.object(private_te, "use_recompute", lambda queues: None),
    ):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        yield
    FP8GlobalStateManager.reset()


# --- cases -----------------------------------------------------------------------------------------------------------


def one_chunk_per_rank() -> dict:
    return equal(trained(case(PP2)), serial())
