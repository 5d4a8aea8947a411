"""Coefficients of auxiliary losses mean the same at any split: MoE balancing and z-loss, multi-token prediction.

The reference of the MoE losses is one process on the same micro-batches: the balancing loss is a product of batch
statistics, not a sum over tokens.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.bank import on_ranks
from tests.multiproc.test_nonfinite import attempts
from tests.support.distance import cells, one_process_reference, problems, problems_with, relative_error
from tests.support.engines import Calls, all_in_calls, engine_of
from tests.support.faults import Fault
from tests.support.parity import Case, Rig, gradients

# Coefficients large enough that a wrong one is far outside of rounding.
MOE = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 --moe_router_dtype fp64 "
)
LAYOUTS = [
    "--grad_accum_steps 1 --pp_microbatches 8",
    "--grad_accum_steps 2 --pp_microbatches 4",
    "--grad_accum_steps 2 --pp_microbatches 4 --flush per_round",
    "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4",
]
ACCUMULATED = "--grad_accum_steps 2 --pp_microbatches 4"
PIPELINE = "--pipeline_model_parallel_size 2 --pp_microbatches 8"
TP, EP = "--tensor_model_parallel_size 2 --sequence_parallel", "--expert_model_parallel_size 2"


TWO = MOE.replace(
    "--moe_aux_loss_coeff 0.1",
    "--moe_router_load_balancing_type aux_loss seq_aux_loss --moe_aux_loss_coeff 0.1 0.3",
)


def test_two_balancing_losses_are_two():
    """Leaving one of them out is another gradient."""
    plan, alone = (Case(1, "", flags).plan().config.model for flags in (TWO, MOE))
    assert (plan.moe_router_load_balancing_type, plan.moe_aux_loss_coeff) == (["aux_loss", "seq_aux_loss"], [0.1, 0.3])
    both, one = (one_process_reference(flags, 1, "fp64").gradient for flags in (TWO, MOE))
    assert alone.moe_aux_loss_coeff == 0.1
    name = next(name for name in one.parts if "router" in name)
    assert relative_error(both.parts[name], one.parts[name]) > 1e-3


@cells(
    *(Case(2, layout, MOE) for layout in LAYOUTS),
    *(Case(2, layout, MOE, "fp64") for layout in LAYOUTS[1:]),
    *(Case(2, layout, TWO, "fp64") for layout in LAYOUTS[2:]),
)
def test_experts_on_two_ranks(case, parity):
    parity(case)


@cells(
    Case(4, "--pipeline_model_parallel_size 2 --pp_microbatches 8", MOE),
    Case(4, "--tensor_model_parallel_size 2 --sequence_parallel --pp_microbatches 8", MOE),
    Case(
        4,
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel --pp_microbatches 8",
        MOE,
    ),
)
def test_experts_on_four_ranks(case, parity):
    parity(case)


def test_dropping_a_microbatch_drops_its_side_losses_too():
    # Sequence 2 * m + r is micro-batch m of data-parallel rank r: 3 and 12 are left out.
    rest = tuple(index for index in range(16) if index not in (3, 12))
    case = Case(4, "--pipeline_model_parallel_size 2 --pp_microbatches 8 --nonfinite drop_microbatch", MOE)
    ranks = [rank[0] for rank in run_ranks(attempts, 4, [case], [Fault(1, 1), Fault(2, 6)], timeout=60)]
    assert all(result.sanitized == 2 for _, result in ranks)
    assert problems(case, [gradient for gradient, _ in ranks], rest) == []


GLOBAL = MOE.replace("--moe_aux_loss_coeff", "--moe_router_load_balancing_type global_aux_loss --moe_aux_loss_coeff")


def test_global_balancing_weighs_the_same_at_any_data_parallel_size():
    """Its statistics cover all ranks' tokens, so with one micro-batch on each rank it is the full global batch's."""
    layouts = [
        "", "--backend ddp", "--expert_model_parallel_size 4", "--micro_batch_size 2 --context_parallel_size 2",
        f"--micro_batch_size 2 {TP}", f"--micro_batch_size 2 {TP} {EP} --expert_tensor_parallel_size 1",
        f"--micro_batch_size 2 {PIPELINE} {EP} --allow_underfilled_pipeline --pp_microbatches 1",
    ]  # fmt: skip
    cases = [Case(4, "--pp_microbatches 1 " + layout, GLOBAL) for layout in layouts]
    exact, near = (one_process_reference(GLOBAL + "--micro_batch_size 4 ", 4, lane) for lane in ("fp64", "fp32"))
    by_rank = run_ranks(gradients, 4, cases, timeout=60)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert problems_with(case, list(ranks), exact, near) == []


MTP = "--num_layers 4 --position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 "


@cells(
    *(
        Case(2, layout, MTP, lane)
        for lane in ("fp32", "fp64")
        for layout in (
            ACCUMULATED,
            PIPELINE,
            PIPELINE + " --pipeline_model_parallel_layout Etttt|mL",
            "--tensor_model_parallel_size 2 --sequence_parallel --pp_microbatches 8",
        )
    )
)
def test_multi_token_prediction(case, parity):
    parity(case)


@cells(
    *(
        Case(2, layout, MTP + "--loss_norm microbatch ", lane)
        for lane in ("fp32", "fp64")
        for layout in (ACCUMULATED, PIPELINE, PIPELINE + " --schedule zb-h1")
    )
)
def test_multi_token_prediction_of_a_mean_over_microbatches(case, parity):
    """Its loss is a mean over a micro-batch's tokens then, as the main loss is, whatever their number."""
    parity(case)


def one_short(case: Case) -> list:
    """The gradients of a step of which the last data-parallel rank lacks a micro-batch, which one of its own replaces:
    the format is a user's own, (batch,)."""
    rig = Rig.of(case)
    inner = rig.train_step.forward_step_func
    rig.train_step.forward_step_func = lambda data, chunk: inner(iter(next(data)), chunk)
    batch = [(each,) for each in rig.microbatches()]
    return rig.watched(batch[: len(batch) - rig.groups.dp.rank()])[0]


def test_a_stand_in_has_no_prediction_loss_either():
    case = Case(2, f"{ACCUMULATED} --short_batch pad", MTP, "fp64")
    assert problems(case, run_ranks(one_short, 2, case, timeout=60), tuple(range(15))) == []


SEQUENCE = MOE.replace("--moe_aux_loss_coeff", "--moe_router_load_balancing_type seq_aux_loss --moe_aux_loss_coeff")
SPREAD = {
    "zbv": f"{PIPELINE} --schedule zbv {EP}",
    "dualpipev": f"{PIPELINE} --schedule dualpipev {EP} --context_parallel_size 2",
    "interleaved": f"{PIPELINE} --virtual_pipeline_model_parallel_size 2 {TP} --backend megatron",
    "zb-h1": f"{PIPELINE} --schedule zb-h1 {TP} {EP} --expert_tensor_parallel_size 1 --backend fsdp2",
}


def test_a_coefficient_means_the_same_if_the_divisor_comes_last():
    """With `expected_tokens` that are those of a micro-batch on average, under every way to spread experts."""
    late = Calls((4, 4), known="expected")
    cells = [(Case(4, way, model), late) for way, model in zip(SPREAD.values(), (MOE, SEQUENCE, TWO, MOE), strict=True)]
    by_rank = run_ranks(all_in_calls, 4, cells, timeout=120)
    for (case, _), ranks in zip(cells, zip(*by_rank, strict=True), strict=True):
        assert problems(case, list(ranks)) == []


def with_an_evaluation(case: Case) -> str:
    """The note of a step with an evaluation between its calls, whose micro-batches have the weight that is expected."""
    from megaaccum.step import evaluation

    rig = Rig.of(case)
    inner, steps = rig.train_step.forward_step_func, rig.train_step
    steps.forward_step_func = lambda *args, **keys: inner(*args, **keys)  # which does not know weights
    batches = [batch | {"loss_mask": batch["loss_mask"] * 0 + 1} for batch in rig.microbatches()]
    for half in (batches[:4], batches[4:]):
        steps.forward_backward(steps.batch_of(half))
        evaluation.forward(steps, steps.batch_of(half))
    return steps.optim_step().note


def test_an_evaluation_in_an_open_step_has_no_part_in_its_note():
    assert run_ranks(with_an_evaluation, 2, Case(2, ACCUMULATED, MOE), timeout=60) == [""] * 2


def notes_of(case: Case) -> list[str]:
    """Notes of steps whose micro-batches have as many tokens as they weigh: the second rank expects three times as
    many; a call gives N, and two of the plan's eight micro-batches are missing; the second rank lacks two."""
    engine = engine_of(case)
    rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    batches = [batch | {"loss_mask": batch["loss_mask"] * 0 + 1} for batch in rig.microbatches()]
    tokens, ranks, rank = batches[0]["tokens"].numel(), engine.groups.dp.size(), engine.groups.dp.rank()
    engine.forward_backward(batches, expected_tokens=tokens * 3**rank)
    notes = [engine.optim_step().note]
    engine.forward_backward(batches[:6], total_weight=6 * tokens * ranks)
    notes.append(engine.optim_step().note)
    return [*notes, engine.train_step(batches[: 8 - 2 * rank]).note]


@pytest.mark.parametrize("layout", ["", "--pipeline_model_parallel_size 2 "])
def test_a_note_on_coefficients_is_of_all_ranks(layout):
    """Each rank compared its own micro-batches with the mean of all: one had a note, another none, and both a wrong one
    if some lacked micro-batches."""
    case = Case(4 if layout else 2, layout + "--pp_microbatches 8 --short_batch pad", MOE)
    first, *others = run_ranks(notes_of, case.world_size, case, timeout=60)
    assert all(notes == first for notes in others)
    expected, told, padded = first
    assert "weighed 2 times" in expected and "weighed 0.75 times" in told and "weighed" not in padded


def with_another_scale(cases: list[Case], factor: float) -> list:
    """Gradients with side losses that are scaled by `factor` too much."""
    from megaaccum.step.side_losses import SideLosses

    balance, prediction = SideLosses.balance_scale, SideLosses.prediction_scale
    with (
        patch.object(SideLosses, "balance_scale", lambda *args: factor * balance(*args)),
        patch.object(SideLosses, "prediction_scale", lambda *args: factor * prediction(*args)),
    ):
        return gradients(cases)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_coefficient_is_seen(factor):
    cases = [Case(2, "--grad_accum_steps 2 --pp_microbatches 4", model) for model in (MOE, MTP)]
    by_rank = run_ranks(with_another_scale, 2, cases, factor, timeout=60)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert any("error" in problem for problem in problems(case, list(ranks)))


def balanced() -> dict[str, object]:
    """The states of routers with statistics over a step in three steps, the second of them skipped."""
    import torch

    from tests.support.faults import injected

    bias = MOE + "--moe_router_score_function sigmoid --moe_router_enable_expert_bias "
    seen: dict[str, object] = {"biases": [], "counts": []}
    rig = Rig.of(Case(2, "--pp_microbatches 4 --nonfinite skip", bias))
    routers = [module for module in rig.chunks[0].modules() if getattr(module, "expert_bias", None) is not None]
    for faults in ([], [Fault(0, 1)], []):
        with injected(faults, rig.chunks):
            rig.train(step=1)
        seen["biases"].append(torch.stack([router.expert_bias.clone() for router in routers]))
    tracked = MOE.replace(
        "--moe_aux_loss_coeff", "--moe_router_load_balancing_type global_aux_loss --moe_aux_loss_coeff"
    )
    rig = Rig.of(Case(2, "--pp_microbatches 4 --nonfinite skip", tracked))
    routers = [module for module in rig.chunks[0].modules() if getattr(module, "ga_steps", None) is not None]
    for step in range(2):
        rig.train(step=step)
        seen["counts"].append([int(router.ga_steps) for router in routers])
    return seen


def test_statistics_over_a_step_begin_with_it_and_the_bias_moves_with_the_weights():
    one, other = run_ranks(balanced, 2, timeout=60)
    first, skipped, last = one["biases"]
    assert all(mine.equal(theirs) for mine, theirs in zip(one["biases"], other["biases"], strict=True))
    assert first.abs().max() == pytest.approx(1e-3)
    assert skipped.equal(first)
    assert not last.equal(first)
    assert one["counts"] == [[4] * 4] * 2


def test_padding_counts_nowhere_however_a_sequence_is_cut():
    """Ranks that share a sequence have different numbers of tokens beside its padding, and one balancing loss."""
    cases = [f"experts, padded, {cut}" for cut in ("tensor parallel", "context parallel", "of sequences")]
    for name, compared in zip(cases, on_ranks.compared([("", each) for each in cases]), strict=True):
        assert compared.failed == [], name
        assert any(row.kind == "gradient" for row in compared.rows)
