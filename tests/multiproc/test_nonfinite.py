"""Each policy of `nonfinite` on a gradient that is not finite: its result, and the origin that it reports."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import no_gradient
from tests.support.distance import problems
from tests.support.faults import Fault, differences, injected, state_of, weights
from tests.support.parity import Case, Gradient, Rig

if TYPE_CHECKING:
    from megaaccum.step.result import StepResult

PIPELINE = "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 --nonfinite skip "
DDP = PIPELINE + "--backend ddp --params_dtype fp64 "
FOUR = "--num_layers 4 "
NAN = float("nan")


def attempt(rig: Rig, faults: list[Fault]) -> tuple[Gradient, StepResult]:
    """One step with `faults` in it: the gradient that the optimizer receives, none if it is skipped, and the result."""
    with injected(faults, rig.chunks):
        return rig.watched(step=1)


def attempts(cases: list[Case], faults: list[Fault]) -> list[tuple[Gradient, StepResult]]:
    return [attempt(Rig.of(case), faults) for case in cases]


# --- drop_microbatch -------------------------------------------------------------------------------------------------

# Micro-batch m of data-parallel rank r is sequence 2 * m + r: these are sequences 3 and 12. Rank 1 is stage 0.
DROPPED = [Fault(1, 1, value=NAN), Fault(2, 6)]
REST = tuple(index for index in range(16) if index not in (3, 12))


def test_a_step_without_the_bad_microbatches_is_the_step_on_the_rest():
    drop = "--nonfinite drop_microbatch "
    cases = [Case(4, PIPELINE + drop + f"--zero_stage {stage}", FOUR) for stage in (1, 2, 3)]
    cases += [
        Case(4, PIPELINE + drop + backend, FOUR)
        for backend in (
            "--sync streaming",
            "--backend fsdp2",
            "--backend fsdp2 --sync streaming --data_parallel_replicas 2",
            "--backend megatron",
        )
    ]
    cases += [
        Case(4, PIPELINE + drop, FOUR, "fp64"),
        Case(4, PIPELINE + drop + "--schedule zb-h1", FOUR, "fp64"),
        Case(4, PIPELINE + drop + "--flush per_round --virtual_pipeline_model_parallel_size 2", lane="fp64"),
        Case(4, PIPELINE + drop, FOUR + "--loss_norm microbatch", "fp64"),
    ]
    by_rank = run_ranks(attempts, 4, cases, DROPPED, timeout=150)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        gradients, results = zip(*ranks, strict=True)
        assert problems(case, list(gradients), REST) == [], str(case)
        for result in results:
            assert (result.skipped, result.sanitized) == (False, 2)
            assert "micro-batch 1 of data-parallel rank 1: first in the backward of stage 0 (rank 1)" in result.note
            assert "micro-batch 6 of data-parallel rank 0: first in the backward of" in result.note


def test_where_the_backward_is_split():
    """In a V rank 0 of two holds stages 0 and 3; weight gradients come in other passes than their micro-batch's I."""
    layout = PIPELINE + "--schedule zbv --nonfinite drop_microbatch "
    streaming = layout + "--sync streaming "
    cases = [Case(4, each, FOUR) for each in (layout, streaming, streaming + "--reproducible layout")]
    faults = [Fault(0, 6, value=NAN, chunk=1), Fault(1, 1, value=NAN)]
    by_rank = run_ranks(attempts, 4, cases, faults, timeout=100)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        gradients, results = zip(*ranks, strict=True)
        assert problems(case, list(gradients), REST) == []
        for result in results:
            assert (result.skipped, result.sanitized) == (False, 2)
            assert "micro-batch 1 of data-parallel rank 1: first in the backward of stage 0 (rank 1)" in result.note
            assert "micro-batch 6 of data-parallel rank 0: first in the backward of stage 3 (rank 0)" in result.note


def without_correction(case: Case) -> Gradient:
    """The mistake: the bad micro-batches are left out, and their tokens stay in the divisor."""
    from megaaccum.step.world_sums import divisor_of

    whole = []

    def keeping_tokens(*args, **kwargs):
        whole.append(divisor_of(*args, **kwargs)())
        return lambda: whole[0]

    with patch("megaaccum.step.world_sums.divisor_of", keeping_tokens):
        return attempt(Rig.of(case), DROPPED)[0]


def test_a_divisor_that_still_counts_the_bad_microbatches_is_seen():
    case = Case(4, PIPELINE + "--nonfinite drop_microbatch ", FOUR)
    assert any("error" in problem for problem in problems(case, run_ranks(without_correction, 4, case), REST))


def in_three_stages(read: str) -> tuple[str, int]:
    """Note and dropped micro-batches of a step of a user's own model whose second micro-batch is not finite. The stage
    in the middle reads nothing, and has an empty list; read: what the last stage is given."""
    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups
    from tests.multiproc.test_engine_inputs import batches, chunk_of

    def forward_step(data_iterator, chunk):
        batch = next(data_iterator) if chunk.pre_process or chunk.post_process else None
        factor = NAN if chunk.post_process and batch[0, 0, 0] == 0 else 1.0
        return chunk(batch), lambda out: (out.square().sum() * factor, out.new_tensor(4.0), {})

    groups.destroy()
    batch = dict(micro_batch_size=1, seq_length=16, pp_microbatches=6)
    plan = Plan.of(layout=dict(pp=3), batch=batch, step=dict(nonfinite="drop_microbatch"), world_size=3)
    rank = torch.distributed.get_rank()
    keys = dict(forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    engine = initialize(plan, [chunk_of(rank, 3)], **keys)
    data = batches(6)
    data[1][0, 0, 0] = 0
    given = [data, [], iter(data) if read == "iterator" else data][rank]
    engine.forward_backward(given, num_microbatches=6)
    result = engine.optim_step()
    return result.note, result.sanitized


@pytest.mark.parametrize(
    ("read", "words", "dropped"),
    [("list", "micro-batch 1 of data-parallel rank 0", 1), ("iterator", "its micro-batches came from an iterator", 0)],
)
def test_stages_that_read_in_other_ways_look_for_the_bad_microbatches_together_or_not(read, words, dropped):
    """Ranks with a list ran the step again, and waited for the one with an iterator, which did not."""
    for note, sanitized in run_ranks(in_three_stages, 3, read, timeout=40):
        assert words in note and sanitized == dropped


def test_a_fault_that_does_not_come_back_drops_nothing():
    once = [Fault(1, 1, value=NAN, times=1)]
    cases = [Case(4, PIPELINE + "--nonfinite drop_microbatch ", FOUR), Case(4, PIPELINE, FOUR)]
    clean = run_ranks(attempts, 4, cases[1:], [])
    for rank, ((dropped, result), (skipped, its_result)) in enumerate(run_ranks(attempts, 4, cases, once, timeout=60)):
        assert (result.skipped, result.sanitized) == (False, 0)
        assert differences(dropped.parts, clean[rank][0][0].parts) == []
        assert its_result.skipped
        assert skipped.parts == {}
        assert "every micro-batch is finite when it runs again" in its_result.note


def refused(case: Case) -> list[str]:
    """Random states that a step has moved which ends the run."""
    from megaaccum.distributed import rng
    from megaaccum.errors import StepError

    rig = Rig.of(case)
    before = {name: state.clone() for name, state in rng.snapshot().items()}
    with injected([Fault(1, 1)], rig.chunks), pytest.raises(StepError, match="not finite"):
        rig.train(step=1)
    return [name for name, state in rng.snapshot().items() if not torch.equal(state, before[name])]


def test_a_step_that_ends_the_run_leaves_random_states_as_they_were():
    drawn = PIPELINE.replace("skip", "raise") + "--rng megatron --hidden_dropout 0.1"
    assert run_ranks(refused, 4, Case(4, drawn, FOUR)) == [[]] * 4


def without_a_token(case: Case, masked: bool, faults: list[Fault]) -> tuple[list[str], list[object]]:
    """The changes by a step in which no token counts, after one that is taken, and both results."""
    rig = Rig.of(case)
    results: list[object] = [rig.train(step=1)]
    before = state_of(rig.backend) | weights(rig.backend, rig.chunks)
    batches = rig.microbatches()
    if masked:
        batches = [{**each, "loss_mask": torch.zeros_like(each["loss_mask"])} for each in batches]
    with injected(faults, rig.chunks):
        results.append(rig.train_step.train(batches, step=2))
    return differences(before, state_of(rig.backend) | weights(rig.backend, rig.chunks)), results


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "dropped"])
def test_a_step_without_a_token_changes_nothing(masked):
    """Weight decay and Adam's moments would else move the weights; also where no finite micro-batch is left."""
    case = Case(2, "--pp_microbatches 2 --nonfinite drop_microbatch")
    faults = [] if masked else [Fault(rank, index, value=NAN) for rank in range(2) for index in range(2)]
    for changed, (taken, empty) in run_ranks(without_a_token, 2, case, masked, faults):
        assert not taken.skipped
        assert (changed, empty.skipped, empty.num_tokens) == ([], True, 0)
        assert ("every token of the step is masked" if masked else "not finite") in empty.note


class GivesNone(torch.autograd.Function):
    """Uses a parameter and gives it no gradient."""

    @staticmethod
    def forward(ctx, hidden, param):
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def with_a_parameter_that_is_given_none(case: Case, faults: list[Fault]) -> tuple[Gradient, StepResult]:
    def use(chunks) -> None:
        layer = chunks[0].decoder.layers[0]
        layer.given_none = torch.nn.Parameter(torch.ones(3))
        layer.register_forward_hook(lambda _m, _a, out: (GivesNone.apply(out[0], layer.given_none), *out[1:]))

    no_gradient.changed(use)
    return attempt(Rig.of(case), faults)


def test_a_parameter_that_a_function_gives_no_gradient():
    """torch calls the hooks of its gradient all the same, with none."""
    for backend in ("deepspeed", "ddp"):
        case = Case(1, f"--pp_microbatches 2 --backend {backend} --nonfinite drop_microbatch")
        ((gradient, result),) = run_ranks(with_a_parameter_that_is_given_none, 1, case, [Fault(0, 1)])
        assert (result.skipped, result.sanitized) == (False, 1)
        assert gradient.parts["decoder.layers.0.given_none"].tolist() == [0.0, 0.0, 0.0]


# --- zero ------------------------------------------------------------------------------------------------------------


def one_element(cases: list[Case]) -> list[tuple[list[int], int, bool, str]]:
    """For each case with one element of a parameter's gradient not finite in one micro-batch of rank 1: the positions
    that differ from the clean gradient, the number of elements counted, whether all is finite, and the note."""
    return [_one_element(case) for case in cases]


NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def _one_element(case: Case) -> tuple[list[int], int, bool, str]:
    from megaaccum.observe import nonfinite

    clean, _ = attempt(Rig.of(case), [])
    rig = Rig.of(case)
    param = dict(nonfinite.whole_parameters(rig.chunks)).get(NAME)
    if param is not None and torch.distributed.get_rank() == 1:
        backwards: list[int] = []

        def spoil(grad):
            backwards.append(1)
            return (
                torch.where(torch.arange(grad.numel()).view_as(grad) == 7, NAN, grad) if len(backwards) == 4 else grad
            )

        param.register_hook(spoil)
    got, result = attempt(rig, [])
    assert not result.skipped
    changed = [i for name in got.parts for i in _where(got.parts[name], clean.parts[name])]
    finite = all(bool(torch.isfinite(part).all()) for part in got.parts.values())
    return changed, result.sanitized, finite, result.note


def _where(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    return (one != other).view(-1).nonzero().view(-1).tolist()


def test_zero_changes_the_elements_that_are_not_finite_and_no_other():
    zero = "--nonfinite zero --untie_embeddings_and_output_weights "
    layouts = [*(f"--zero_stage {stage}" for stage in (1, 2, 3)), "--sync streaming", "--backend megatron"]
    layouts += ["--backend megatron --schedule zbv", "--backend fsdp2", "--backend fsdp2 --sync streaming"]
    layouts += ["--backend fsdp2 --schedule zbv", "--backend ddp --schedule zbv"]
    cases = [Case(4, PIPELINE + zero + layout, FOUR) for layout in layouts]
    cases += [Case(4, PIPELINE + zero, FOUR, "fp64"), Case(4, PIPELINE + zero + "--backend ddp", FOUR, "bf16")]
    for rank, seen in enumerate(run_ranks(one_element, 4, cases, timeout=150)):
        for case, (changed, counted, finite, note) in zip(cases, seen, strict=True):
            assert changed == ([7] if rank < 2 else []), case  # stage 0 is ranks 0 and 1
            assert (counted, finite) == (1, True), case
            assert note == f"set to 0 before the reduction: 1 of {NAME} on rank 1"


def zeroed_in_fp16(layout: str) -> list[tuple[float, bool, bool]]:
    """(loss scale, whether it was skipped, whether weights changed) of steps that overflow in one micro-batch, and of
    one in which nothing is left."""
    rig = Rig.of(Case(4, PIPELINE + layout, FOUR + "--initial_loss_scale 8 --min_loss_scale 2", "fp16"))
    seen = []
    everywhere = [Fault(2 + dp, index) for dp in range(2) for index in range(8)]
    for number, faults in enumerate([[Fault(3, 5)], [Fault(3, 5)], [Fault(3, 5)], everywhere]):
        before = state_of(rig.backend)
        with injected(faults, rig.chunks):
            result = rig.train(step=number)
        seen.append((result.loss_scale, result.skipped, bool(differences(state_of(rig.backend), before))))
    return seen


def test_zero_with_fp16_skips_while_the_loss_scale_can_go_down():
    """At its floor the elements that overflow are 0 and the step counts; where all of them do, it is none."""
    for layout in ("--nonfinite zero", "--nonfinite zero --backend ddp"):
        for seen in run_ranks(zeroed_in_fp16, 4, layout, timeout=60):
            assert [(scale, skipped) for scale, skipped, _ in seen] == [
                (8.0, True),
                (4.0, True),
                (2.0, False),
                (2.0, True),
            ]
            assert [changed for *_, changed in seen][::3] == [False, False]
            assert seen[2][2]


# --- skip, raise, off, limits ----------------------------------------------------------------------------------------


def policies() -> dict[str, object]:
    """Results of the other policies for the same fault on this rank."""
    from megaaccum.errors import StepError

    seen: dict[str, object] = {}
    rig = Rig.of(Case(4, PIPELINE + "--nonfinite raise", FOUR))
    before = state_of(rig.backend)
    try:
        with injected([Fault(1, 4, value=NAN, forward=True)], rig.chunks):
            rig.train(step=9)
    except StepError as error:
        seen["raise"] = str(error)
    seen["changed by raise"] = differences(state_of(rig.backend), before)
    rig = Rig.of(Case(4, PIPELINE + "--max_bad_steps_in_a_row 2", FOUR))
    try:
        for number, faults in enumerate([[Fault(1, 0)], [], [Fault(1, 0)], [Fault(1, 0)]], start=1):
            with injected(faults, rig.chunks):
                seen["last good"] = rig.train(step=number).note or number
    except StepError as error:
        seen["limit"] = str(error)
    rig = Rig.of(Case(4, PIPELINE + "--nonfinite off", FOUR))
    with injected([Fault(1, 0, value=NAN)], rig.chunks):
        seen["off"] = rig.train(step=1).skipped
    seen["not finite with off"] = any(
        not bool(torch.isfinite(w).all()) for w in weights(rig.backend, rig.chunks).values()
    )
    return seen


def test_raise_off_and_the_limits():
    by_rank = run_ranks(policies, 4, timeout=90)
    assert all(rank["raise"] == by_rank[0]["raise"] for rank in by_rank)
    for seen in by_rank:
        assert "step 9: the gradient is not finite: micro-batch 4 of data-parallel rank 1" in seen["raise"]
        assert "first in the forward of stage 0 (rank 1), its output holds" in seen["raise"]
        assert seen["changed by raise"] == []
        assert "step 4 is bad, number 2 in a row (max_bad_steps_in_a_row 2)" in seen["limit"]
        assert "micro-batch 0 of data-parallel rank 1" in seen["limit"]
        assert seen["off"] is False
        assert seen["not finite with off"] is True


# --- the guard of the norm -------------------------------------------------------------------------------------------


def guarded(action: str) -> list[tuple[bool, str]]:
    """Five ordinary steps, then one whose gradient is 100 times as large, then an ordinary one."""
    from megaaccum.errors import StepError

    flags = f"--grad_norm_guard {action} --grad_norm_guard_window 4 --grad_norm_guard_deviations 20 --lr 1e-4"
    rig = Rig.of(Case(4, PIPELINE, FOUR + flags))
    seen, before = [], {}
    for number in range(7):
        before = state_of(rig.backend)
        with patch.object(rig.backend, "reduction_divisor", 200 if number == 5 else 2):
            try:
                result = rig.train(step=number, first=16 * number)
            except StepError as error:
                return [*seen, (not differences(state_of(rig.backend), before), str(error))]
        seen.append((not differences(state_of(rig.backend), before), result.note))
    return seen


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_the_guard(action):
    by_rank = run_ranks(guarded, 4, action, timeout=60)
    assert all(rank == by_rank[0] for rank in by_rank)
    unchanged, notes = zip(*by_rank[0], strict=True)
    assert notes[:5] == ("",) * 5
    assert not any(unchanged[:5])
    assert "gradient norm" in notes[5]
    assert "is above" in notes[5]
    assert unchanged[5] == (action != "warn")
    assert len(notes) == (6 if action == "stop" else 7)
    if action != "stop":
        assert notes[6] == ""
        assert not unchanged[6]
