"""Agreement of all ranks, before they begin, on the call that they make and on its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from megaaccum.distributed.agreement import Agreed, check_agreement, raise_on_all_ranks, raise_together
from megaaccum.errors import ConfigError, MegaaccumError, RankDisagreement, StepError, listed, nearest_multiples
from megaaccum.model import names
from megaaccum.platform import cpu
from megaaccum.step import short_batch
from megaaccum.step.microbatches import Microbatches, shapes_of
from megaaccum.upstream import pytorch

if TYPE_CHECKING:
    from megaaccum.config import Plan
    from megaaccum.step.train_step import TrainStep

_CALLS = ("train_step", "forward_backward", "optim_step", "evaluate", "forward", "trial", "the end of a forward")
_TRAINING = ("train_step", "forward_backward", "optim_step")
_CALL = f"call ({', '.join(f'{n} {name}' for n, name in enumerate(_CALLS))})"
_LENGTH = "seq_length of micro-batches, which only variable_seq_lengths lets differ"
_LONGEST = 2**40
MORE_THAN_RANKS = 2**20
"""Weight of a second kind of ranks in a sum that counts two."""


def on_step(
    steps: TrainStep,
    microbatches: Sequence[Any],
    *,
    step: int,
    stop: bool,
    problem: MegaaccumError | None,
    weights: Sequence[float] | None = None,
) -> tuple[bool, str, float | None]:
    """Whether some rank asks to stop, which ranks have fewer micro-batches than planned, and the step's weight, if
    every rank has as many and all `weights` are whole numbers; nan if some rank has none. weights: of this rank's
    sequences, the same on each rank that has these.

    Collective over the world. Raises RankDisagreement if ranks would not do the same thing, what short_batch.too_few
    raises, and a `problem` of any rank.
    """
    plan, batch = steps.plan, steps.batch
    planned = (batch.micro_batch_size, batch.seq_length)
    shapes = [] if plan.config.batch.variable_seq_lengths else shapes_of(microbatches)
    rows, length = next((shape for shape in shapes if shape != planned), planned)
    agreed = on_call(
        "train_step", steps, stop=stop, problem=problem, given=(len(microbatches), batch.num_microbatches),
        add=_whole_number(weights), step=step, micro_batch_size=rows, **{_LENGTH: length},
    )  # fmt: skip
    if (rows, length) != planned:
        raise RankDisagreement(
            f"every rank has micro-batches of {rows} x {length} tokens, but the plan says micro_batch_size"
            f" {planned[0]} x seq_length {planned[1]}: set these keys, or give such micro-batches, or set"
            " variable_seq_lengths to true."
        )
    if {*agreed.told.get("given", ())} <= {batch.num_microbatches}:  # every rank has as many as are planned
        total, unknown = agreed.sums
        if unknown >= MORE_THAN_RANKS:  # some rank has no weights
            return agreed.stop, "", math.nan
        copies = torch.distributed.get_world_size() // steps.groups.dp.size()
        return agreed.stop, "", None if unknown else total / copies
    counts, dp_ranks = agreed.told["given"], agreed.told["dp_rank"]
    policy = plan.config.step.short_batch
    note = short_batch.too_few(counts, dp_ranks, wanted=batch.num_microbatches, policy=policy, step=step)
    return agreed.stop, note, None


def _whole_number(weights: Sequence[float] | None) -> tuple[int, int]:
    """(the sum of weights, 0), (0, 1) for no whole numbers, which are added up as they are, or (0, MORE_THAN_RANKS)."""
    if weights is None:
        return 0, MORE_THAN_RANKS
    total = math.fsum(weights)
    return (int(total), 0) if total.is_integer() and abs(total) < 2**40 else (0, 1)


def no_list(given: object) -> StepError:
    """The error for micro-batches of a whole step in something else than a list."""
    return StepError(
        f"train_step takes a list of micro-batches, but a {type(given).__name__} was given: give list(...), or call"
        " forward_backward, which takes iterators, and optim_step"
    )


def on_call(
    call: str,
    steps: TrainStep,
    *,
    calls: int = 0,
    stop: bool = False,
    problem: Exception | None = None,
    given: tuple[int, int] = (0, 0),
    add: tuple[int, int] = (0, 0),
    **facts: int,
) -> Agreed:
    """All ranks make the same `call` with the same `facts`. Collective over the world.

    Every call compares as many numbers, so that ranks that make different calls disagree instead of hanging. calls: of
    forward_backward since the last optim_step. given: micro-batches that this rank has, which may differ, and as many
    as the step takes. add: added up over the ranks.
    """
    plain = {"step": 0, "num_microbatches": 0, _LENGTH: 0, "micro_batch_size": 0, "total_weight": 0}
    agreed = check_agreement(
        steps.digest,
        details=steps.plan.facts,
        tell={"given": given[0], "dp_rank": steps.groups.dp.rank(), "written": call in _TRAINING and is_written(steps)},
        usual={"given": given[1], "written": False},
        stop=stop,
        problem=steps.failure or problem or _changed(steps),
        add=add,
        **{_CALL: _CALLS.index(call), "calls since the last optim_step": calls},
        **(plain | facts),
    )
    if any(agreed.told.get("written", ())):
        refuse_edits(steps)
    return agreed


def _changed(steps: TrainStep) -> StepError | None:
    """An error if the model is another than the optimizer and the reductions were built for: it would be trained as it
    was, and nothing would show it. Frozen parameters that are new may be the user's affair."""
    if pytorch.held_by(steps.modules) == steps.held:
        return None
    _, was = steps.held
    shards = {id(whole): shard for shard, whole in steps.backend.gathered_parameters()}
    held = [(shards.get(id(each), each), each) for chunk in steps.chunks for each in chunk.parameters()]
    now = {id(param): (each.requires_grad, param.dtype, pytorch.loses_hooks(param)) for param, each in held}
    changed = {key for key in was | now if was.get(key) != now.get(key) and (key in was or now[key][0])}
    if not changed:
        return None
    named = [*steps.parameters, *names.named_parameters(steps.chunks)]
    hooked = {key for key in changed & was.keys() & now.keys() if was[key][:2] == now[key][:2]}
    whose = listed(dict.fromkeys(name for name, param in named if id(param) in (hooked or changed)))
    if hooked:
        return StepError(
            f"a hook on {whose} is never called: under fsdp2 gradients come to other tensors than the parameters that"
            " it shards. Remove the hook, or set backend to deepspeed, megatron or ddp"
        )
    return StepError(
        f"presence, dtype or requires_grad of {whose} has changed since initialize, which built the optimizer and the"
        " reductions for what it was: set it back, or initialize another engine on a new model"
    )


def is_written(steps: TrainStep) -> bool:
    """Whether this rank's weights have been written to in place since the last step or load."""
    return steps.weight_versions() != steps.versions


def refuse_edits(steps: TrainStep) -> None:
    """Raise StepError on every rank if the user has changed weights in place where a step would lose that, or on some
    of the ranks that share them. Collective over the world; some rank's weights are written to, as they also are when a
    program has put other weights in for an evaluation, and the old ones back."""
    apart = [name for name, param in steps.parameters if _is_apart(param, names.dp_group(param, steps.groups))]
    why = "on some ranks alone, so that data-parallel ranks have other weights: make the change on every rank"
    if lost := list(dict.fromkeys(steps.backend.edited())):
        why = (
            "since the last step or load, which the next step loses: its optimizer has another copy. Set it back, or"
            " load weights before initialize, or by engine.load_weights (after wrap, by load_state_dict of the wrapped"
            " chunk)"
        )
    changed = lost or apart
    raise_together(StepError(f"{listed(changed)} changed in place {why}") if changed else None)
    steps.versions = steps.weight_versions()


def _is_apart(param: torch.Tensor, group: torch.distributed.ProcessGroup) -> bool:
    """Whether this rank has other weights than the first of `group`, if these are whole on its ranks."""
    if isinstance(param, DTensor) or not param.untyped_storage().nbytes():
        return False
    first = param.detach().clone(memory_format=torch.contiguous_format)
    torch.distributed.broadcast(first, group=group, group_src=0)
    return not torch.allclose(first, param, rtol=0, atol=0, equal_nan=True)


def with_lengths(batch: Microbatches, plan: Plan, pp: torch.distributed.ProcessGroup) -> Microbatches:
    """`batch` with the lengths that some stage of this pipeline knows. Collective over the world, where lengths vary;
    raises ConfigError or RankDisagreement on every rank."""
    return raise_on_all_ranks(_agreed_lengths, batch, plan, pp) if plan.config.batch.variable_seq_lengths else batch


def _agreed_lengths(batch: Microbatches, plan: Plan, pp: torch.distributed.ProcessGroup) -> Microbatches:
    known = [0] * len(batch) if batch.lengths is None else list(batch.lengths)
    limits = torch.tensor([known, [-length if length else -_LONGEST for length in known]], device=cpu.device())
    torch.distributed.all_reduce(limits, op=torch.distributed.ReduceOp.MAX, group=pp)
    most, least = limits[0].tolist(), (-limits[1]).tolist()
    longest = plan.batch.seq_length
    if 0 in most and pp.size() == 1:  # nothing is received
        return batch
    if 0 in most:
        raise ConfigError(
            "variable_seq_lengths: no stage of the pipeline knows the lengths: give micro-batches with tokens or"
            " input_ids, or call with lengths="
        )
    if most != least:
        raise RankDisagreement(f"stages of a pipeline have other lengths: {least} and {most}")
    if max(most) > longest:
        raise ConfigError(f"a micro-batch has {max(most)} tokens, but seq_length is {longest}: raise it")
    for key, pieces in (cuts := _cuts_of_sequences(plan)).items():
        if uneven := [length for length in most if length % pieces]:
            padded = nearest_multiples(uneven[0], math.lcm(*cuts.values()))[-1]
            raise ConfigError(
                f"a micro-batch has {uneven[0]} tokens, which {key} cuts into {pieces} equal pieces: pad it to {padded}"
            )
    return replace(batch, lengths=most, tokens=[plan.batch.micro_batch_size * length for length in most])


def _cuts_of_sequences(plan: Plan) -> dict[str, int]:
    """The keys that cut a sequence, with their values, and into how many equal pieces."""
    parallel, blocks = plan.config.parallel, plan.config.sharding.reproducible_context_blocks or 1
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    cuts = {f"reproducible_context_blocks {blocks}": 2 * blocks} if blocks > 1 else {}
    cuts |= {f"context_parallel_size {cp}": 2 * cp} if cp > 1 else {}
    return cuts | ({f"sequence_parallel of {tp} * {cp} ranks": tp * cp} if parallel.sequence_parallel else {})
