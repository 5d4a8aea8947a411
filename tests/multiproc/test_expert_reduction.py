"""Gradients of experts are reduced inside the last backward, at the same place on every rank."""

from __future__ import annotations

from unittest.mock import patch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.expert_table import MODES, SCHEDULES, WHOLE
from tests.support.on_their_way import Sent, sent_of_each
from tests.support.parity import Case

MODEL = (
    "--num_layers 8 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_router_dtype fp64 "
)
LAYERS = 4
"""Layers of a stage, each with experts."""


def case(mode: str, schedule: str) -> Case:
    return Case(4, f"--pp_microbatches 4 {WHOLE}{SCHEDULES[schedule]}{MODES[mode]}", MODEL)


def test_on_their_way_before_the_last_weight_gradient():
    """Counted in calls, without a clock. The experts of a stage's first layer too: its attention comes after them."""
    schedules = ("zbv", "interleaved", "dualpipev", "1f1b")
    cells = {(mode, schedules[number % 4]): 1.0 for number, mode in enumerate(MODES)}
    cells[("Megatron", "zbv")] = cells[("DDP", "dualpipev")] = cells[("FSDP2 resident", "zbv")] = 1.0
    cells[("ZeRO-3 streaming", "zbv")] = 15 / 16  # the first layer goes out after the last W, of 4 times 4 in a step
    cases = {case(*cell): share for cell, share in cells.items()}
    by_rank = run_ranks(sent_of_each, 4, list(cases), timeout=60 + 10 * len(cases))
    for (at, share), ranks in zip(cases.items(), zip(*by_rank, strict=True), strict=True):
        assert [each.share for each in ranks] == [share] * 4, at
        if "zero_stage" in str(at):
            assert {len(each.calls) for each in ranks} == {LAYERS}, f"{at}: a call of its own for each layer's experts"


def sent_without_turns(cases: list[Case]) -> list[Sent]:
    from megaaccum.sharding.expert_turns import ExpertTurns

    with patch.object(ExpertTurns, "finish_before", lambda self, param: None):
        return sent_of_each(cases)


def test_without_turns_they_wait_for_the_end():
    (ranks,) = zip(*run_ranks(sent_without_turns, 4, [case("ZeRO-3 resident", "zbv")]), strict=True)
    assert [each.share for each in ranks] == [0.0] * 4
