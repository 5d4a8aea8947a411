"""Gradients under the executor's schedules are those of one process on the whole batch: both lanes, ZeRO-3 resident."""

from pathlib import Path

import pytest

from megaaccum.lab.search.search import search_order
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import Costs, build, write_csv
from megaaccum.schedule.actions import stage_map
from megaaccum.schedule.pass_numbers import Problem
from megaaccum.schedule.validate import receives
from tests.support.distance import cells, check, one_process_reference, problems
from tests.support.parity import SYNC_MODES, Case, Rig

OWN = ("gpipe", "zb-h1", "zbv", "dualpipev")
IN_A_V = ("zbv", "dualpipev", "v-half", "v-min")
UNTIED = "--untie_embeddings_and_output_weights "
RECOMPUTE = "--recompute_granularity full "
VARIANTS = {
    2: [(4, "", ""), (5, UNTIED, RECOMPUTE), (7, "", RECOMPUTE), (8, UNTIED, "")],
    4: [(8, "", RECOMPUTE), (9, UNTIED, ""), (15, "", ""), (16, UNTIED, RECOMPUTE)],
}
"""By pp: micro-batches from 2 * pp to 4 * pp, tied or untied embeddings, with and without recompute."""


def cell(
    schedule: str, pp: int, m: int, flags: str = "", *, model: str = "", lane: str = "fp32", ranks: int = 1
) -> Case:
    layout = f"--pipeline_model_parallel_size {pp} --grad_accum_steps 1 --num_chunks {m} --schedule {schedule} {flags}"
    num_layers = 2 * pp if schedule in IN_A_V else max(4, pp)
    return Case(pp * ranks, layout, f"--num_layers {num_layers} {model}", lane)


@cells(
    *(
        cell(name, pp, m, flags, model=model, lane=lane)
        for lane in ("fp64", "fp32")
        for pp in VARIANTS
        for name in OWN
        for m, model, flags in VARIANTS[pp]
    )
)
def test_every_schedule(case, parity):
    parity(case)


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_tables_of_megatrons_schedules(lane, tmp_path: Path):
    """1F1B and interleaved by the executor, from files."""
    cases = []
    for name, m in (("1f1b", 5), ("interleaved", 8)):
        write_csv(build(name, pp=2, num_microbatches=m), tmp_path / f"{name}.csv")
        cases.append(cell(str(tmp_path / f"{name}.csv"), 2, m, lane=lane))
    check(cases)


def test_a_searched_table_of_a_loop(tmp_path: Path):
    """Two chunks in a loop share a channel, on which messages are asked for in another order than they are sent."""
    stages, m = stage_map("loop", pp=2, chunks=2), 5
    costs = Costs(forward=(1, 3, 1, 2), input_grad=(2, 1, 1, 3), weight_grad=(1, 1, 2, 1))
    searched = search_order(Problem(costs, stages=stages, num_microbatches=m), iterations=3000).schedule
    wanted = [(stages[1][chunk] - 1, mb) for kind, chunk, mb in searched.actions(1) if kind == "F"]
    assert wanted != receives(searched, 1)[0, 1, "F"], "else this table needs no keeping: choose other costs"
    write_csv(searched, tmp_path / "loop.csv")
    check([cell(str(tmp_path / "loop.csv"), 2, m, lane=lane) for lane in ("fp64", "fp32")])


SPLIT = ("zb-h1", "zbv", "dualpipev")


@cells(
    *(cell(name, 2, 4, lane="fp64", ranks=2) for name in SPLIT),
    *(
        cell(name, 2, 4, f"--zero_stage {stage} ", lane=lane, ranks=2)
        for lane in ("fp32", "bf16")
        for name in SPLIT
        for stage in (1, 2, 3)
    ),
)
def test_with_data_parallel_ranks(case, parity):
    """Gradients are reduced once, when they are final, in chunks that end at different times."""
    parity(case)


def at_one_stage(at: Case):
    """The gradient under ZB-H1 of a pipeline of one, which a configuration would not ask for."""
    from megaaccum import get_forward_backward_func

    rig = Rig.of(at)
    rig.train_step.schedule = get_forward_backward_func("zb-h1", own=True)
    return rig.watched()[0]


def test_embedding_and_head_on_one_stage():
    """A tied matrix has one gradient in I and one in W of the same micro-batch."""
    at = Case(2, "--grad_accum_steps 1 --num_chunks 4 ", "--num_layers 4 ")
    assert problems(at, run_ranks(at_one_stage, 2, at)) == []


PER_ROUND = "--grad_accum_steps 2 --num_chunks 4 --flush per_round "


@cells(*(Case(4, PER_ROUND + "--pp 2 --schedule dualpipev", "--num_layers 4 ", lane) for lane in ("fp64", "fp32")))
def test_one_flush_per_round(case, parity):
    parity(case)


TP = "--tensor_model_parallel_size 2 "
LLAMA = "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "


@cells(
    *(
        cell(name, 2, m, TP + flags, model=model, lane=lane, ranks=2)
        for lane in ("fp64", "fp32")
        for name, m, flags, model in (
            ("zbv", 4, "", ""),
            ("dualpipev", 5, "--sequence_parallel", LLAMA),
            ("zb-h1", 4, "--sequence_parallel", ""),
        )
    )
)
def test_with_tensor_and_sequence_parallel(case, parity):
    parity(case)


@cells(cell("zbv", 4, 8, "--decoder_last_pipeline_num_layers 2", lane="fp64"))
def test_stages_of_different_sizes_in_a_v(case, parity):
    """A short last stage: layers keep their numbers, and with them their weights."""
    parity(case)


def test_a_stage_without_layers():
    """A rank's first chunk may have no parameter."""
    layout = "--pp 2 --pp_microbatches 8 --schedule v-half --pipeline_model_parallel_layout Ett||ttt|tttL "
    check([Case(2, layout + SYNC_MODES[name]) for name in ("ZeRO-3 resident", "FSDP2 resident")])


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_layouts_in_a_v_and_on_one_chunk(lane):
    """Stages of any size, listed in model order: where they lie is the schedule's matter."""
    layouts = [("zbv", "Et|ttt|ttt|tL", ""), ("dualpipev", "Ettt|tt|t|ttL", ""), ("v-half", "Ettt|tt|ttt|L", UNTIED)]
    layouts += [("v-min", "Et|tt|ttt|ttL", ""), ("zb-h1", "Etttttt|ttL", ""), ("gpipe", "Etttttt|ttL", UNTIED)]
    check(
        [
            cell(name, 2, 4, f"--pipeline_model_parallel_layout {layout}", model="--num_layers 8 " + model, lane=lane)
            for name, layout, model in layouts
        ]
    )


PREDICTS = "--num_layers 4 --position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 "


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_multi_token_prediction_in_a_v(lane):
    """Its stage lies on the rank that holds the embedding, of which it has a copy, tied to the head or not."""
    layout = "--pipeline_model_parallel_layout Et|tt|t|mL"
    check(
        [
            cell("zbv", 2, 4, model=PREDICTS, lane=lane),
            cell("dualpipev", 2, 4, layout, model=PREDICTS, lane=lane),
            cell("zbv", 2, 4, layout, model=PREDICTS + UNTIED, lane=lane),
        ]
    )


def losses(case: Case) -> list[float]:
    """Validation loss, and the loss of a step after it."""
    from megaaccum.step import evaluation

    rig = Rig.of(case)
    batch = rig.microbatches()
    rig.backend.step = lambda: None
    return [evaluation.evaluate(rig.train_step, batch)[0], rig.train_step.train(batch, step=0).loss]


def test_evaluation_in_a_v():
    each = cell("dualpipev", 2, 4, lane="fp64")
    exact = one_process_reference(each.model, 4, "fp64").gradient.loss
    for found in run_ranks(losses, 2, each):
        assert found == pytest.approx([exact, exact], rel=1e-12)


def in_lanes(case: Case) -> tuple:
    """The gradient of a first step, whose messages go through host memory as over NCCL, and losses and norms of it and
    of the same over lanes; and where the messages of both are counted."""
    from functools import partial
    from unittest.mock import patch

    from megaaccum.executor import entry

    with patch.object(entry, "PipelineChannels", partial(entry.PipelineChannels, separate=True)):
        rig = Rig.of(case)
        rig.backend.step = lambda: None
        got, first = rig.watched()
        second = rig.train(0)
    sent = [{lane.split("/")[1] for lane in each.traffic if lane.startswith("send/")} for each in (first, second)]
    return got, (first.loss, second.loss), (first.grad_norm, second.grad_norm), sent


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
@pytest.mark.parametrize(("name", "pp", "ranks"), [("zbv", 2, 1), ("dualpipev", 2, 2), ("zb-h1", 4, 1)])
def test_lanes_as_over_nccl(name, pp, ranks, lane):
    case = cell(name, pp, 8, lane=lane, ranks=ranks)
    found = run_ranks(in_lanes, pp * ranks, case)
    assert not problems(case, [got for got, *_ in found])
    for _, losses, norms, sent in found:
        assert losses[0] == losses[1] and norms[0] == norms[1], "the way of a message changes no bit"
        assert sent == [{"pp"}] * 2
