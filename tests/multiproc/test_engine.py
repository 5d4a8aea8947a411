"""The public engine over chunks that a user built, with Megatron's forward_step_func: the gradient of one process on
the whole batch, whatever the calls that bring it, and whenever its divisor is known."""

from __future__ import annotations

import traceback

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import problems
from tests.support.engines import Calls, all_in_calls
from tests.support.parity import Case, Rig

BACKENDS = {
    "zero1": "--zero_stage 1 ",
    "zero3": "",
    "streaming": "--sync streaming ",
    "fsdp2": "--backend fsdp2 ",
    "fsdp2 streaming": "--backend fsdp2 --sync streaming ",
    "megatron": "--backend megatron ",
    "ddp": "--backend ddp ",
}
PP2 = "--pipeline_model_parallel_size 2 --pp_microbatches 8 "
SCHEDULES = {
    "none": "--pp_microbatches 8 ",
    "1f1b": PP2,
    "interleaved": PP2 + "--virtual_pipeline_model_parallel_size 2 ",
    "zb-h1": PP2 + "--schedule zb-h1 ",
    "zbv": PP2 + "--schedule zbv ",
    "dualpipev": PP2 + "--schedule dualpipev ",
}
SIZES = {"interleaved": (2, 4, 2)}
"""Of the calls; Megatron's interleaved schedule takes multiples of pp."""


def check(cells: list[tuple[Case, Calls]], ranks: int = 4) -> None:
    by_rank = run_ranks(all_in_calls, ranks, cells, timeout=60 + 10 * len(cells))
    found = [
        f"{case} {calls}: {problem}"
        for (case, calls), gradients in zip(cells, zip(*by_rank, strict=True), strict=True)
        for problem in problems(case, list(gradients))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_calls_and_a_divisor_that_is_known_last(schedule):
    """3 + 4 + 1 micro-batches in three calls, the last of which fills the plan's number."""
    calls = Calls(SIZES.get(schedule, (3, 4, 1)))
    check([(Case(4, SCHEDULES[schedule] + backend), calls) for backend in BACKENDS.values()])


@pytest.mark.parametrize("lane", ["fp64", "bf16", "fp16"])
def test_other_precisions(lane):
    backends = ["--backend ddp ", "--backend fsdp2 "] if lane == "fp64" else ["", "--sync streaming "]
    cells = [
        (Case(4, SCHEDULES[schedule] + backend, lane=lane), Calls((5, 3)))
        for backend in backends
        for schedule in ("none", "1f1b", "zbv")
    ]
    check(cells)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_after_the_one_that_seemed_the_last(backend):
    """A call that fills the plan's micro-batches reduces in its backward; the step may go on all the same."""
    layout = "--grad_accum_steps 1 --pp_microbatches 4 --pipeline_model_parallel_size 2 " + BACKENDS[backend]
    whole = Case(4, layout.replace("--grad_accum_steps 1", "--grad_accum_steps 2"))
    by_rank = run_ranks(all_in_calls, 4, [(whole, Calls((8,))), (whole, Calls((4, 4)))], timeout=90)
    for gradients in zip(*by_rank, strict=True):
        assert problems(whole, list(gradients)) == []


@pytest.mark.parametrize("known", ["weights", "total", "iterators"])
def test_what_is_known_in_advance(known):
    calls = Calls((3, 5), known="" if known == "iterators" else known, iterators=known == "iterators")
    check([(Case(4, SCHEDULES[schedule]), calls) for schedule in ("none", "1f1b", "zbv")])


MOE = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --disable_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 "
)
MTP = "--num_layers 4 --position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 "


@pytest.mark.parametrize("known", ["total", "expected"])
def test_side_losses_of_several_calls(known):
    """Balancing losses are exact where N is known, or where the expected tokens are those that come on average;
    multi-token prediction is a sum over tokens either way."""
    layouts = [SCHEDULES["none"], SCHEDULES["1f1b"], SCHEDULES["zb-h1"]]
    check([(Case(4, layout, model), Calls((3, 5), known=known)) for layout in layouts for model in (MOE, MTP)])


def test_fp16_at_four_million_tokens():
    """Sums of millions of tokens would drive the loss scale to its floor; a power of two near 1 / N stops that."""
    calls = Calls((3, 5), known="expected", unit=4e6 / 140)
    check([(Case(4, SCHEDULES[schedule], lane="fp16"), calls) for schedule in ("none", "1f1b", "zbv")])


def frames_before_the_schedule(case: Case) -> list[str]:
    """Names of the functions from TrainStep.train to the one that calls the schedule."""
    rig = Rig.of(case)
    found = []
    schedule = rig.train_step.schedule

    def noting(**keys):
        found.extend(frame.name for frame in traceback.extract_stack()[:-1])
        return schedule(**keys)

    rig.train_step.schedule = noting
    rig.train_step.train(rig.microbatches(), step=1)
    return found[found.index("train") :]


def test_at_most_four_frames_from_the_step_to_the_schedule():
    (frames,) = run_ranks(frames_before_the_schedule, 1, Case(1, "--pp_microbatches 2"))
    assert len(frames) <= 4, frames
