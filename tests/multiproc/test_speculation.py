"""A step that updates before its verdict: weights, moments, counters, scale and random states are to the bit those of
the steps that wait for it, whether the update is confirmed or taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.faults import differences, state_of
from tests.support.parity import VOCAB, Case, microbatches

STEPS = 7
ZBV = (
    "--pipeline_model_parallel_size 2 --pp_microbatches 4 --schedule zbv --num_layers 4 --hidden_dropout 0.1 "
    "--lr 1e-2 --clip_grad 8 --nonfinite skip "
)
SPECULATIVE = "--speculative_step "


@dataclass(frozen=True)
class Poison:
    """Multiply by `factor` the gradient of what rank 0's first chunk makes of micro-batch 2 of step `step`: it is that
    of stage 0 alone, so that the other stages' parts of the norm are those of a good step."""

    step: int
    factor: float


CLIPPED = Poison(6, 1e4)
POISONS = (Poison(3, float("nan")), CLIPPED)


def poisoned(groups: Any, loss_norm: str):
    """A forward step that spoils the micro-batches that say so."""
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    class Poisoned(GptForwardStep):
        def __call__(self, data_iterator, chunk, **more):
            microbatch = next(data_iterator)
            output, loss_func = super().__call__(iter([microbatch]), chunk, **more)
            spoils = "poison" in microbatch and bool(microbatch["loss_mask"].any())  # no stand-in of weight zero
            if spoils and torch.distributed.get_rank() == 0 and not chunk.post_process:
                output.register_hook(lambda grad: grad * microbatch["poison"].factor)
            return output, loss_func

    return Poisoned(groups, loss_norm)


@dataclass
class Run:
    """Reports of each step and this rank's state after it; at the end, the random states of the process. early: steps
    that ended before their verdict. restored: updates that this rank took back."""

    reports: list[tuple] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    early: int = 0
    restored: int = 0


def run(case: Case, poisons: Sequence[Poison], between: Callable[..., Any] | None = None) -> Run:
    """STEPS steps. between: called with (engine, step, the step's micro-batches, those of the next) before each;
    returns what differs in the arguments of train_step."""
    from megaaccum.distributed import groups, rng
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS
    from megaaccum.step import speculation
    from megaaccum.step.speculation import SpeculativeTrainStep

    plan = case.plan()
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    torch.manual_seed(7)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    step_func = poisoned(built, plan.batch.loss_norm)
    engine = initialize(plan, chunks, groups=built, forward_step_func=step_func, reports=REPORTS)

    def batch(step: int) -> list[dict[str, Any]]:
        found = microbatches(plan, built.dp.rank(), step * plan.batch.global_batch_size)
        if case.model:  # all micro-batches weigh the same
            found = [each | {"loss_mask": torch.ones_like(each["loss_mask"])} for each in found]
        for poison in poisons:
            if poison.step == step:
                found[2] = found[2] | {"poison": poison}
        return found

    seen, following = Run(), batch(1)
    end, undo_of = SpeculativeTrainStep.end_early, speculation._undo

    def ended(self, *args, **more):
        seen.early += 1
        return end(self, *args, **more)

    def counted(*args):
        undo = undo_of(*args)

        def restored():
            seen.restored += 1
            undo()

        return restored

    with patch.object(SpeculativeTrainStep, "end_early", ended), patch.object(speculation, "_undo", counted):
        for step in range(1, STEPS + 1):
            now, following = following, batch(step + 1)
            arguments: dict[str, Any] = {"microbatches": now, "upcoming": following if step < STEPS else None}
            if between is not None:
                arguments |= between(engine, step, now, following)
            result = engine.train_step(**arguments)
            report = (result.step, result.loss, result.grad_norm, result.skipped, result.loss_scale, result.lr)
            seen.reports.append((*report, result.num_tokens, result.stop, engine.consumed_samples, str(engine.state())))
            seen.states.append(state_of(engine.backend))
    seen.states.append(rng.snapshot())
    return seen


def compared(case: Case, poisons: Sequence[Poison], between: Callable[..., Any] | None = None) -> tuple[int, int, bool]:
    """(steps that ended early, updates that this rank took back, whether step 3 was skipped). Raises AssertionError
    where a step is another than without `speculative_step`."""
    plain = run(case, poisons, between)
    early = run(replace(case, layout=case.layout + SPECULATIVE), poisons, between)
    for step, (one, other) in enumerate(zip(plain.reports, early.reports, strict=True), 1):
        assert repr(one) == repr(other), f"step {step}: {one} without, {other} with speculative_step"
    for step, (one, other) in enumerate(zip(plain.states, early.states, strict=True), 1):
        assert not differences(one, other), f"step {step}: {differences(one, other)}"
    assert plain.early == plain.restored == 0
    return early.early, early.restored, plain.reports[2][3]


CASES = [
    Case(2, ZBV + "--backend ddp"),
    Case(4, ZBV + "--zero_stage 1", lane="bf16"),
    Case(
        4, ZBV + "--zero_stage 2 --initial_loss_scale 1024 --loss_scale_window 2 --skipped_samples retried", lane="fp16"
    ),
    Case(4, ZBV + "--zero_stage 3"),
    Case(4, ZBV + "--zero_stage 3 --rng megatron --nonfinite drop_microbatch", lane="bf16"),
    Case(4, ZBV + "--backend fsdp2"),
    Case(4, ZBV + "--backend megatron"),
    Case(4, ZBV + "--zero_stage 3 --optimizer muon"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_with_a_value_that_is_not_finite_and_one_that_is_clipped_are_taken_back(case):
    by_rank = run_ranks(compared, case.world_size, case, POISONS, timeout=120)
    assert {early for early, _, _ in by_rank} == {4}  # steps 2, 3, 5 and 6: after each that was confirmed
    assert {restored for _, restored, _ in by_rank} == {2}
    assert {skipped for _, _, skipped in by_rank} == {"drop_microbatch" not in case.layout}


def test_without_clipping_every_step_but_the_first_and_the_last_ends_early():
    assert run_ranks(compared, 2, CASES[0], (), timeout=90) == [(5, 0, False)] * 2


SIDE = (
    "--num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 --moe_aux_loss_coeff 0.1 "
    "--mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 --position_embedding_type rope "
)
SIDE_CASES = [
    Case(2, ZBV + "--backend ddp --clip_grad 0", SIDE),
    Case(2, ZBV + "--backend ddp --clip_grad 0 --initial_loss_scale 1024 --loss_scale_window 2", SIDE, "fp16"),
]


@pytest.mark.parametrize("case", SIDE_CASES, ids=str)
def test_side_losses_of_a_step_that_begins_early_have_the_scale_of_one_that_waits(case):
    """Also if its loss scale is another than when it began."""
    assert run_ranks(compared, 2, case, (), timeout=90) == [(5, 0, False)] * 2


def in_pairs(case: Case) -> tuple[int, int, bool]:
    """`compared`, with the sums in pairs that larger worlds make."""
    from megaaccum.distributed import sums

    with patch.object(sums, "RING_UP_TO", 1):
        return compared(case, POISONS)


def test_sums_in_pairs_are_the_same_steps():
    assert run_ranks(in_pairs, 2, CASES[0], timeout=90) == [(4, 2, True)] * 2


def otherwise(engine, step: int, now: list, following: list) -> dict[str, Any]:
    """Actions that a loop may take between the early start of a step and its call, and outcomes of the next step."""
    rank = torch.distributed.get_rank()
    if step == 3:
        engine.evaluate(now)
    if step == 4:
        return {"microbatches": [*now]}
    if step == 5:
        return {"upcoming": following[: 4 - rank], "stop": rank == 1}
    return {}


def test_whatever_comes_between_ends_the_step_that_has_begun():
    """An evaluation, another list, a rank that has too few micro-batches, and one that asks to stop."""
    assert run_ranks(compared, 2, CASES[0], (), otherwise, timeout=90) == [(5, 0, False)] * 2


def refused(engine, step: int, now: list, following: list) -> dict[str, Any]:
    """A call that a problem of one rank keeps from being taken, and which is then made once more."""
    from megaaccum.errors import StepError

    if step == 3:
        problem = StepError("no disk") if torch.distributed.get_rank() else None
        with pytest.raises(StepError, match="no disk"):
            engine.train_step(now, problem=problem)
    return {}


def test_a_call_that_is_refused_leaves_the_step_that_has_begun():
    assert run_ranks(compared, 2, CASES[0], (), refused, timeout=90) == [(5, 0, False)] * 2


def with_a_tp_rank_that_would_clip() -> tuple[int, int, bool]:
    """`compared`, where one tp rank's own part of the norm, in an early end alone, is far above the others'."""
    from megaaccum.step import grad_norm

    own_square = grad_norm.own_square

    def square(backend, groups):
        return own_square(backend, groups) * (1e12 if groups.tp.rank() else 1.0)

    with patch.object(grad_norm, "own_square", square):
        return compared(Case(4, ZBV + "--tensor_model_parallel_size 2 --zero_stage 1 --optimizer muon"), ())


def test_tp_ranks_update_early_together_or_not_at_all():
    """Muon's update is a collective over them."""
    for early, restored, _ in run_ranks(with_a_tp_rank_that_would_clip, 4, timeout=120):
        assert early == restored == 3  # steps 2, 4 and 6: after each that waited


def tried(engine, step: int, now: list, following: list) -> dict[str, Any]:
    if step == 3:
        with engine.trial(now):
            pass
    return {}


def test_a_trial_ends_the_step_that_has_begun():
    assert run_ranks(compared, 2, CASES[0], (), tried, timeout=90) == [(5, 0, False)] * 2


def saved(folder: str, by_saver: bool) -> list[bool]:
    """Whether each random state of a checkpoint, the engine's or that of a training run, is the one without
    `speculative_step`, where ranks draw on."""
    from megaaccum.checkpoint import save_load
    from megaaccum.pretrain.training.saver import Saver

    def save(engine, step: int, now: list, following: list) -> dict[str, Any]:
        if step == 3:
            if by_saver:
                checkpoint = Path(Saver(engine, SimpleNamespace(state=lambda consumed: {})).save())
            else:
                checkpoint = engine.save(f"{folder}/{engine.plan.config.step.speculative_step}")
            reader = save_load.CheckpointReader(checkpoint, save_load.read_progress(checkpoint).metadata_sha256)
            read.append(reader.read([key for key in reader.stored if key.startswith("rng/")]))
        return {}

    read: list[dict[str, torch.Tensor]] = []
    compared(Case(2, ZBV + f"--backend ddp --rng megatron --save {folder}/run"), (), save)
    return [torch.equal(each, read[1][key]) for key, each in read[0].items()]


@pytest.mark.parametrize("by_saver", [False, True])
def test_a_checkpoint_has_the_random_states_of_before_the_step_that_has_begun(tmp_path, by_saver):
    for equal in run_ranks(saved, 2, str(tmp_path), by_saver, timeout=90):
        assert len(equal) >= 4
        assert all(equal)


def mutated(name: str) -> str:
    """The result of `compared` if a rule is broken."""
    from megaaccum.step.speculation import SpeculativeTrainStep

    mistakes = {
        "the update stays": patch("megaaccum.step.speculation._state", lambda backend: []),
        "clipping is missed": patch.object(SpeculativeTrainStep, "is_unclipped", lambda self, norm: True),
    }
    with mistakes[name]:
        try:
            compared(CASES[0], (CLIPPED,))
        except AssertionError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("name", ["the update stays", "clipping is missed"])
def test_a_mistake_is_seen(name):
    assert {text.split(":")[0] for text in run_ranks(mutated, 2, name, timeout=90)} <= {"step 6", "step 7"}
