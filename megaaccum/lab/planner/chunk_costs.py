"""`megaaccum.calibrate`: measured costs of a user's own pipeline chunks, as a profile."""

from __future__ import annotations

import statistics
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megaaccum.config import Plan
from megaaccum.distributed import groups, start
from megaaccum.errors import ConfigError
from megaaccum.executor.wgrad import install
from megaaccum.lab.planner import layer_costs
from megaaccum.lab.planner.layer_costs import COSTS, NAMES, Piece, PieceTimer
from megaaccum.lab.search.profile import DENSE, EMBEDDING, HEAD, LayerCost, Profile, write_profile
from megaaccum.platform import cpu
from megaaccum.step.loss import ForwardStepFunc

Shapes = Counter[tuple[torch.Size, torch.dtype]]
LETTERS = string.ascii_lowercase
LEAST = 1e-9
"""Seconds of a part that takes no longer than the measurement's noise: a profile wants some time of every layer."""


def calibrate(
    plan: Plan,
    build: Callable[[int, int], Any],
    forward_step_func: ForwardStepFunc,
    microbatch: Any = None,
    *,
    stages: int | None = None,
    repeats: int = 10,
    path: str | Path | None = None,
) -> Profile:
    """Measure the pipeline chunks of a user's model on this process's device: a profile of what each takes and holds.

    Chunks are built, measured and dropped one after another, so that the device holds one at a time. The ranks are
    those that share a chunk (tp, cp, ep), by torchrun if there are several; the plan's pipeline and data parallelism do
    not run.

    Where the chunks between the first and the last are alike, and both ends hold as much and more, the profile is
    that of `calibrate --layers`, E, T for each chunk, and L: the ends cost what they take over a chunk between them.
    With a chunk for each layer `megaaccum plan --profile` takes it too. Otherwise each kind of chunk has a letter.

    Args:
        plan: of the model, `Plan.of(...)`: who shares a chunk, and by which backend its state is held.
        build: `(stage, stages) -> chunk`, as `verify` takes it.
        forward_step_func: as `initialize` takes it.
        microbatch: what its data iterator yields; default: random `tokens`, `labels`, `position_ids` and `loss_mask` of
            the plan's micro_batch_size, seq_length and vocab_size.
        stages: the number of chunks that the model is built in, at least as many as a schedule is to have. A cut can
            be searched for if there are more. Default: the plan's.
        repeats: passes that are timed for each chunk, after one that warms up; a duration is the median.
        path: write the profile to this file, for `--profile` of `megaaccum schedule` and `megaaccum plan`.

    Returns the profile. Raises ConfigError if other ranks run than share a chunk, if a chunk takes no input, or if
    there is no micro-batch."""
    at, count = plan.layout, plan.layout.num_stages if stages is None else stages
    if count < 1 or repeats < 1:
        raise ConfigError(f"calibrate: stages is {count} and repeats {repeats}; both are at least 1")
    ranks = layer_costs.sharing_ranks(at.tp, at.cp, at.ep, at.etp)
    if microbatch is None:
        if plan.config.model.vocab_size is None:
            raise ConfigError("calibrate: give it a micro-batch, or the plan a vocab_size to draw tokens from")
        microbatch = layer_costs.microbatch_of(plan, plan.config.model.vocab_size)
    start.start_process_group(plan)
    each = layer_costs.bytes_per_element(plan, at.dp * at.cp)
    costs, shapes, received = [], [], None
    with _groups_of(plan, ranks):
        for stage in range(count):
            chunk = build(stage, count)
            if count > 1 and not hasattr(chunk, "set_input_tensor"):
                raise ConfigError(
                    f"chunk {stage} ({type(chunk).__name__}) has no set_input_tensor(tensor), by which a pipeline gives"
                    " a stage its input: add it, or measure the whole model with stages=1"
                )
            is_last = stage == count - 1
            timed, received = _timed(chunk, forward_step_func, microbatch, received, repeats, is_last=is_last)
            medians = {name: statistics.median(piece.cost[name] for piece in timed) for name in COSTS}
            costs.append(
                LayerCost(name=f"chunk {stage} of {count}", state=layer_costs.elements(chunk) * each, **medians)
            )
            shapes.append(Shapes((param.shape, param.dtype) for param in chunk.parameters()))
            del chunk  # before the next one is built
    profile = profile_of(costs, shapes)
    if path is not None and torch.distributed.get_rank() == 0:
        device = torch.cuda.get_device_name() if cpu.has_accelerator() else "a CPU"
        write_profile(profile, path, source=f"{count} chunks of {getattr(build, '__name__', build)}, on {device}")
    return profile


@contextmanager
def _groups_of(plan: Plan, ranks: int) -> Iterator[None]:
    """Context in which Megatron's parallel_state holds groups of the ranks that share a chunk, or those that it has."""
    if parallel_state.model_parallel_is_initialized():
        yield
        return
    at, dp = plan.layout, ranks // (plan.layout.tp * plan.layout.cp)
    alone = replace(at, world_size=ranks, pp=1, vpp=1, dp=dp, schedule="none", placement="loop")
    groups.build(alone, timeout_minutes=plan.config.parallel.distributed_timeout_minutes)
    try:
        yield
    finally:
        groups.destroy()


def _timed(
    chunk: Any, forward_step: ForwardStepFunc, microbatch: Any, received: torch.Tensor | None, repeats: int,
    *, is_last: bool,
) -> tuple[list[Piece], torch.Tensor | None]:  # fmt: skip
    """The timed passes of a chunk, and what it sends on."""
    splitting, made = install(chunk), []
    for _ in range(repeats + 1):
        timer, given = PieceTimer(splitting), None if received is None else received.clone().requires_grad_()
        timer.begin("", given, chunk)
        if hasattr(chunk, "set_input_tensor"):
            chunk.set_input_tensor([given])
        output, loss_func = forward_step(iter([microbatch]), chunk)
        sent, *_ = loss_func(output) if is_last else (output,)
        timer.end(sent)
        (piece,) = timer.made
        timer.backward(piece, None if is_last else torch.ones_like(sent))
        chunk.zero_grad(set_to_none=True)
        made.append(piece)
    return made[1:], None if is_last else sent.detach()


def profile_of(costs: Sequence[LayerCost], shapes: Sequence[Shapes]) -> Profile:
    """The profile of chunks with these costs and shapes of parameters, in model order (`calibrate`)."""
    between, count = shapes[1:-1], len(costs)
    if between and all(each == between[0] and each <= shapes[0] and each <= shapes[-1] for each in between):
        layer = _median(costs[1:-1], NAMES[DENSE])
        ends = {EMBEDDING: _over(costs[0], layer, EMBEDDING), HEAD: _over(costs[-1], layer, HEAD)}
        return Profile(pattern=EMBEDDING + DENSE * count + HEAD, kinds={**ends, DENSE: layer})
    keys = [(frozenset(each.items()), number == 0, number == count - 1) for number, each in enumerate(shapes)]
    kinds = list(dict.fromkeys(keys))
    if len(kinds) > len(LETTERS):
        raise ConfigError(f"{len(kinds)} kinds of chunks, but a profile has letters for {len(LETTERS)}: lower stages")
    pattern = "".join(LETTERS[kinds.index(key)] for key in keys)
    alike = {letter: [cost for cost, each in zip(costs, pattern, strict=True) if each == letter] for letter in pattern}
    return Profile(pattern=pattern, kinds={letter: _median(some, some[0].name) for letter, some in alike.items()})


def _median(costs: Sequence[LayerCost], name: str) -> LayerCost:
    values = {each: statistics.median(getattr(cost, each) for cost in costs) for each in (*COSTS, "state")}
    return LayerCost(name=name, **values)


def _over(end: LayerCost, layer: LayerCost, kind: str) -> LayerCost:
    """The costs of an end over those of one layer."""
    more = {name: max(0.0, value - getattr(layer, name)) for name, value in asdict(end).items() if name != "name"}
    return LayerCost(name=NAMES[kind], **more | {"forward": max(LEAST, more["forward"])})
