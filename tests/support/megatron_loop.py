"""Megatron's own loop on ranks: its `train_step` unmodified, over its own objects or over those of `wrap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.engines import forward_step, stacked
from tests.support.parity import SEQ, VOCAB, Case, Gradient, Rig


@dataclass(frozen=True)
class Loop:
    """How Megatron's loop runs a case. finalize: `ours` (wrap's) or `theirs` (Megatron's own); per_token: its
    calculate_per_token_loss; flushes: calls of the schedule before optimizer.step()."""

    case: Case
    finalize: str = "ours"
    per_token: bool = True
    flushes: int = 1


def globals_of(plan) -> None:
    """Set the globals that Megatron's train_step reads."""
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.training import global_vars

    from megaaccum.pretrain.interop.megatron import parser

    args = SimpleNamespace(**parser.defaults())
    args.seq_length, args.micro_batch_size = plan.batch.seq_length, plan.batch.micro_batch_size
    args.data_parallel_size, args.decoder_seq_length, args.gtp_weight_remat_size = plan.layout.dp, None, 1
    global_vars._GLOBAL_ARGS, global_vars._GLOBAL_TIMERS = args, global_vars.Timers(0, "minmax")
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode("disabled"))
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, plan.batch.global_batch_size, plan.batch.micro_batch_size, plan.layout.dp
    )


@dataclass
class LoopRig(Rig):
    """A rank of a model that Megatron's train_step trains."""

    optimizer: Any = None
    wrapped: Any = None
    forward_backward_func: Any = None

    @classmethod
    def of_loop(cls, loop: Loop):
        from megatron.core.distributed import finalize_model_grads

        from megaaccum.distributed import groups
        from megaaccum.loop import get_forward_backward_func, wrap
        from megaaccum.pretrain.model import gpt

        plan = loop.case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        for chunk in chunks:
            chunk.config.calculate_per_token_loss = loop.per_token
            chunk.config.tensor_model_parallel_size = plan.layout.tp
        wrapped, optimizer = wrap(chunks, built.collection, plan)
        if loop.finalize == "theirs":
            chunks[0].config.finalize_model_grads_func = finalize_model_grads
        globals_of(plan)
        step = optimizer._step
        return cls(
            loop.case, plan, built, chunks, step.backend, step.train_steps, optimizer, wrapped,
            get_forward_backward_func(plan),
        )  # fmt: skip

    def megatrons_step(self, forward, flushes: int = 1) -> tuple[dict[str, torch.Tensor], int, float]:
        """(losses, whether it was skipped, gradient norm) of Megatron's train_step; with more flushes than one, of a
        worker's own loop."""
        from megatron.training.training import train_step

        batches, chunks = self.microbatches(), len(self.chunks)
        if flushes > 1:
            return self.flushes(forward, [batches[i::flushes] for i in range(flushes)])
        data = [iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches)
        scheduler = SimpleNamespace(step=lambda increment: None)
        losses, skipped, _, _, _, norm, *_ = train_step(
            forward, data, self.wrapped, self.optimizer, scheduler, self.chunks[0].config, self.forward_backward_func,
            iteration=0,
        )  # fmt: skip
        return losses, skipped, norm

    def step_of(self, *, spoil: bool) -> tuple[int, bool]:
        """(whether a train_step was skipped, whether weights changed)"""
        before = [piece.tensors["param"].clone() for piece in self.backend.state()]
        _, skipped, _ = self.megatrons_step(partial(as_megatron_has_it, per_token=True, spoil=spoil))
        after = [piece.tensors["param"] for piece in self.backend.state()]
        return skipped, not all(map(torch.equal, before, after))

    def flushes(self, forward, parts) -> tuple[dict[str, torch.Tensor], int, float]:
        self.optimizer.zero_grad()
        reports = []
        for part in parts:
            reports += self.forward_backward_func(
                forward_step_func=forward, data_iterator=[iter(part) for _ in self.chunks], model=self.wrapped,
                num_microbatches=len(part), seq_length=SEQ, micro_batch_size=1,
            )  # fmt: skip
        success, norm, _ = self.optimizer.step()
        found = [each["lm loss"].double() for each in reports]
        sums = sum(found, torch.zeros(2, dtype=torch.float64))
        torch.distributed.all_reduce(sums)
        return {"lm loss": sums[0] / sums[1]}, int(not success), norm


def as_megatron_has_it(data_iterator, chunk, *, per_token: bool, spoil: bool = False):
    """Tokens are an int, and the report has one value or two; of means, the mean of this micro-batch."""
    output, loss_func = forward_step(data_iterator, chunk)

    def losses(output):
        total, tokens, reports = loss_func(output)
        mean = (total / tokens.clamp(min=1)).detach()
        report = reports["lm loss"] if per_token else mean.reshape(1)
        return total * (float("nan") if spoil else 1.0), tokens.to(torch.int), {"lm loss": report.clone()}

    return output, losses


def loop_gradient(loop: Loop) -> Gradient:
    """The gradient of one train_step, at the moment when the optimizer would read it."""
    rig = LoopRig.of_loop(loop)
    seen: dict[str, torch.Tensor] = {}
    rig.backend.step = lambda: seen.update(rig.assemble())  # type: ignore[method-assign]
    losses, skipped, norm = rig.megatrons_step(partial(as_megatron_has_it, per_token=loop.per_token), loop.flushes)
    assert not skipped
    everyone: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, losses)
    found = [float(each["lm loss"]) for each in everyone if each]
    tokens = sum(int(batch["loss_mask"].sum()) for batch in stacked(rig))
    return Gradient(seen, norm, sum(found) / len(found), tokens, rig.groups.tp.rank())


def loop_gradients(loops: Sequence[Loop]) -> list[Gradient]:
    return [loop_gradient(loop) for loop in loops]


def spoiled(loop: Loop, *, alone: bool = False) -> tuple[int, bool, int, bool]:
    """(whether the step was skipped, whether weights changed) of a train_step in which the loss of data-parallel rank 1
    is not a number, and of the next one. alone: rank 1 makes its own verdict, by mistake."""
    rig = LoopRig.of_loop(loop)
    recovery = rig.train_step.recovery
    if alone and torch.distributed.get_rank() == 1:
        judge = recovery.judge
        recovery.judge = lambda *args, **keys: replace(judge(*args, **keys), skip=True)  # type: ignore[method-assign]
    return *rig.step_of(spoil=not alone and rig.groups.dp.rank() == 1), *rig.step_of(spoil=False)
