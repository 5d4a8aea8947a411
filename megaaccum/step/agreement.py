"""Agreement of all ranks, before they begin, on the call that they make and on its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from megaaccum.distributed.agreement import Agreed, check_agreement
from megaaccum.errors import ConfigError, MegaaccumError, RankDisagreement
from megaaccum.platform import cpu
from megaaccum.step import short_batch
from megaaccum.step.microbatches import Microbatches, shapes_of

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.config.batch import BatchPlan
    from megaaccum.distributed.groups import Groups

_CALLS = ("train_step", "forward_backward", "optim_step", "evaluate")
_LONGEST = 2**40


class StepAgreement:
    """Compares, over the world, the calls of one run. Both methods are collective."""

    def __init__(self, plan: Plan, groups: Groups):
        self._plan, self._groups, self._digest = plan, groups, plan.digest()

    def on_step(
        self,
        step: int,
        microbatches: Sequence[Any],
        batch: BatchPlan,
        *,
        calls: int,
        stop: bool,
        problem: MegaaccumError | None,
    ) -> tuple[bool, str]:
        """Whether some rank wishes to stop, and which ranks have fewer micro-batches than `batch`, in words. Raises
        RankDisagreement where ranks would not do the same thing, what short_batch.too_few raises, and a `problem` of
        any rank."""
        planned = (batch.micro_batch_size, batch.seq_length)
        shapes = [] if self._plan.config.batch.variable_seq_lengths else shapes_of(microbatches)
        rows, length = next((shape for shape in shapes if shape != planned), planned)
        agreed = self.on_call(
            "train_step",
            calls=calls,
            stop=stop,
            problem=problem,
            given=len(microbatches),
            usual=batch.num_microbatches,
            step=step,
            seq_length=length,
            micro_batch_size=rows,
        )
        if (rows, length) != planned:
            raise RankDisagreement(
                f"every rank has micro-batches of {rows} x {length} tokens, and the plan says micro_batch_size"
                f" {planned[0]} x seq_length {planned[1]}: set these keys, or give such micro-batches."
            )
        if not agreed.told:  # every rank has as many as are planned
            return agreed.stop, ""
        counts, dp_ranks = agreed.told["given"], agreed.told["dp_rank"]
        return agreed.stop, short_batch.too_few(
            counts, dp_ranks, wanted=batch.num_microbatches, policy=self._plan.config.step.short_batch, step=step
        )

    def on_call(
        self,
        call: str,
        *,
        calls: int,
        stop: bool = False,
        problem: MegaaccumError | None = None,
        given: int = 0,
        usual: int = 0,
        **facts: int,
    ) -> Agreed:
        """All ranks make the same `call`, with the same `facts`. It compares as many numbers in each of them, so that
        ranks that make different calls disagree and do not hang. calls: of forward_backward since the last optim_step.
        given: micro-batches that each rank has, not compared; usual: as many as the step takes."""
        plain = {"step": 0, "num_microbatches": 0, "seq_length": 0, "micro_batch_size": 0, "total_weight": 0}
        return check_agreement(
            self._digest,
            details=self._plan.facts,
            tell={"given": given, "dp_rank": self._groups.dp.rank()},
            usual={"given": usual},
            stop=stop,
            problem=problem,
            **{f"call ({', '.join(f'{n} {name}' for n, name in enumerate(_CALLS))})": _CALLS.index(call)},
            **{"calls since the last optim_step": calls},
            **(plain | facts),
        )


def with_lengths(
    batch: Microbatches, plan: Plan, pp: torch.distributed.ProcessGroup
) -> tuple[Microbatches, MegaaccumError | None]:
    """`batch` with the lengths that some stage of this pipeline knows, or why there are none. Collective over the
    pipeline, where lengths vary."""
    if not plan.config.batch.variable_seq_lengths:
        return batch, None
    known = [0] * len(batch) if batch.lengths is None else list(batch.lengths)
    limits = torch.tensor([known, [-length if length else -_LONGEST for length in known]], device=cpu.device())
    torch.distributed.all_reduce(limits, op=torch.distributed.ReduceOp.MAX, group=pp)
    most, least = limits[0].tolist(), (-limits[1]).tolist()
    longest = plan.batch.seq_length
    if 0 in most:
        return batch, ConfigError("variable_seq_lengths: no stage of the pipeline knows the lengths: give lengths=")
    if most != least:
        return batch, RankDisagreement(f"stages of a pipeline have other lengths: {least} and {most}")
    if max(most) > longest:
        return batch, ConfigError(f"a micro-batch has {max(most)} tokens, and seq_length is {longest}: raise it")
    tokens = [plan.batch.micro_batch_size * length for length in most]
    return replace(batch, lengths=most, tokens=tokens), None
