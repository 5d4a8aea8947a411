"""Forward and backward of experts interleaved layer by layer (Megatron's combined 1F1B): the same gradient."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.search.profile import LayerCost, Profile
from megaaccum.lab.search.search import search_order
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import build, write_csv
from megaaccum.schedule.actions import Item, Pair
from megaaccum.schedule.pass_numbers import Problem
from tests.support.distance import check
from tests.support.parity import Case, Rig, gradient

MODEL = (
    "--num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 --moe_router_dtype fp64 "
)
EP = "--expert_model_parallel_size 2 --grad_accum_steps 2 "
LAYOUTS = {
    "none": EP + "--pp_microbatches 2 ",
    "dualpipev": EP + "--pp_microbatches 4 --pipeline_model_parallel_size 2 --schedule dualpipev ",
    "interleaved": EP
    + "--pp_microbatches 4 --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 ",
}
OVERLAP = "--overlap_moe_expert_parallel_comm "


def case(schedule: str, *, overlap: bool = True, layers: int = 8) -> Case:
    layout = LAYOUTS[schedule] + (OVERLAP if overlap else "")
    return Case(2 if schedule == "none" else 4, layout, f"--num_layers {layers} {MODEL}", "bf16")


def test_gradients_of_one_process():
    tied = case("none", layers=4)  # a piece of its own for the embedding and for the head, which share a weight
    check(
        [
            tied,
            replace(tied, layout=tied.layout + "--backend ddp "),
            replace(tied, layout=tied.layout + "--backend megatron "),
        ]
    )
    check([case("dualpipev"), case("interleaved")])


def test_dense_layers_first_and_prediction_at_the_end_of_a_v():
    """DeepSeek-V3's shape at toy size: three dense layers, then experts, and a prediction layer beside the head."""
    model = f"--num_layers 10 --moe_layer_freq [0]*3+[1]*7 {MODEL}"
    model += "--position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 --loss_norm token "
    model = model.replace("--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 ", "")
    layout = LAYOUTS["dualpipev"] + "--pipeline_model_parallel_layout Ettt|ttt|ttt|tmL "
    check([Case(4, layout + OVERLAP, model, "bf16")])


def test_a_dense_layer_last():
    """Megatron's plans apply the final norm after a last layer with experts alone. Tokens go to all experts: rounding
    would change which they go to."""
    model = f"--num_layers 8 --moe_layer_freq 2 {MODEL}".replace("topk 2", "topk 4")
    check([replace(case("none"), model=model)])
    check([replace(case(schedule), model=model) for schedule in ("dualpipev", "interleaved")])


def watched(at: Case) -> tuple[dict[str, torch.Tensor], list[tuple[bool, bool]]]:
    """The gradient, and of every layer that a plan ran whether it ran forward, and backward."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan as Plan

    seen: list[tuple[bool, bool]] = []
    run = Plan.run

    def watch(f_layer, b_layer, *args, **kwargs):
        seen.append((f_layer is not None, b_layer is not None))
        return run(f_layer, b_layer, *args, **kwargs)

    with patch.object(Plan, "run", staticmethod(watch)):
        return gradient(at).parts, seen


def test_pairs_of_the_table_are_interleaved_and_change_no_bit():
    table = build("dualpipev", pp=2, num_microbatches=8)
    apart = run_ranks(watched, 4, case("dualpipev", overlap=False), timeout=60)
    together = run_ranks(watched, 4, case("dualpipev"), timeout=60)
    for rank, ((plain, unseen), (interleaved, seen)) in enumerate(zip(apart, together, strict=True)):
        pairs = sum(isinstance(item, Pair) for item in table.items[rank // 2])
        assert pairs and not unseen
        assert seen.count((True, True)) == pairs * 2, "two layers in every chunk"
        assert seen.count((True, False)) == seen.count((False, True)) == (16 - pairs) * 2
        assert all(torch.equal(plain[name], interleaved[name]) for name in plain)


def test_a_searched_table_with_the_all_to_all_in_it(tmp_path):
    """A search that knows the exchanges pairs passes, and its table, also with weight gradients after their pair, has
    the gradient of one process."""
    table = build("dualpipev", pp=2, num_microbatches=8)
    layer = LayerCost(forward=4.0, input_grad=4.0, weight_grad=2.0, exchange=0.5)
    costs = Profile(pattern="X" * 8, kinds={"X": layer}).costs((2, 2, 2, 2))
    problem = Problem(costs, stages=table.stages, num_microbatches=8)
    found = search_order(problem, start=[table], iterations=1000).schedule
    rows = [[part for item in rank for part in split(item)] for rank in found.items]
    pairs = [item for rank in rows for item in rank if isinstance(item, Pair)]
    assert len(pairs) > 8
    assert {pair.backward.kind for pair in pairs} == {"I"}
    path = tmp_path / "searched.csv"
    write_csv(replace(found, items=tuple(map(tuple, rows))), path)
    at = case("dualpipev")
    check([replace(at, layout=at.layout.replace("dualpipev", str(path)))])


def split(item: Item) -> list[Item]:
    """A pair, with the weight gradient of its backward after it."""
    if not isinstance(item, Pair) or item.backward.kind == "I":
        return [item]
    back = item.backward
    return [item._replace(backward=back._replace(kind="I")), back._replace(kind="W")]


def unlike(at: Case) -> dict[str, torch.Tensor]:
    """The gradient of a step whose micro-batches have lengths of their own, or of which one rank lacks the last."""
    rig = Rig.of(at)
    batch = rig.microbatches()
    if rig.plan.config.batch.variable_seq_lengths:
        for chunk in rig.chunks:
            chunk.config.variable_seq_lengths = True  # as `initialize` sets it
        lengths = [4 * (1 + (number + rig.groups.dp.rank()) % 4) for number in range(len(batch))]
        batch = [
            {name: each[:, :length].contiguous() for name, each in made.items()}
            for made, length in zip(batch, lengths, strict=True)
        ]
    else:
        batch = batch[: len(batch) - rig.groups.dp.rank()]
    return rig.watched(batch)[0].parts


@pytest.mark.parametrize("schedule", LAYOUTS)
@pytest.mark.parametrize("key", ["--variable_seq_lengths", "--short_batch pad"])
def test_each_micro_batch_has_the_scale_of_its_own_side_losses(schedule, key):
    """Also where ranks that exchange tokens lack different micro-batches: their passes interleave alike."""
    at, apart = case(schedule, layers=4), case(schedule, layers=4, overlap=False)
    by_rank = [
        run_ranks(unlike, each.world_size, replace(each, layout=f"{each.layout} {key}"), timeout=60)
        for each in (at, apart)
    ]
    for together, alone in zip(*by_rank, strict=True):
        assert together and all(torch.equal(together[name], each) for name, each in alone.items())


def interleaving_flushes(at: Case) -> list[bool]:
    """Whether a step interleaves, one with a dummy micro-batch, and an evaluation."""
    from megaaccum.executor import executor
    from megaaccum.step import evaluation

    rig = Rig.of(replace(at, layout=at.layout + " --short_batch pad"))
    seen: list[bool] = []
    choose = executor.choose_passes

    def watch(call, **keys):
        passes = choose(call, **keys)
        seen.append(isinstance(passes, executor.PlanPasses))
        return passes

    rig.backend.step = lambda: None
    batch = rig.microbatches()
    with patch.object(executor, "choose_passes", watch):
        rig.train_step.train(batch, step=0)
        rig.train_step.train(batch[:-1], step=1)
        evaluation.evaluate(rig.train_step, batch)
    return seen


def test_who_looks_at_single_micro_batches_has_them_run_one_by_one():
    assert run_ranks(interleaving_flushes, 4, case("dualpipev", layers=4), timeout=60) == [[True, True, False]] * 4
