"""More layouts of a model are that of one process, to the bit, than tests/multiproc/test_layouts.py tries."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import layouts
from tests.multiproc.test_layouts import (
    BF16,
    COLUMNS,
    CP2,
    CUT,
    EP2,
    EP4,
    EXPERTS,
    HALF,
    MTP,
    OWN,
    PP,
    RMS,
    SHARED,
    STEPS,
    TP2,
    TWELVE,
    alone,
    row,
)
from tests.support.layouts import Outcome, outcomes_by_case
from tests.support.parity import Case

TP4, CP4 = "--tensor_model_parallel_size 4 ", "--context_parallel_size 4 "
FOURS = "--reproducible_tensor_blocks 4 --reproducible_context_blocks 4 --make_vocab_size_divisible_by 32 "
ROWS = [
    row(4, "--pp_microbatches 4 --zero_stage 1 "),
    row(4, "--pp_microbatches 3 ", TWELVE),
    row(4, "--pp_microbatches 4 --backend megatron ", BF16),
    row(4, "--pp_microbatches 4 --backend ddp ", BF16),
    row(4, "--pp_microbatches 4 ", EXPERTS),
    row(4, "--pp_microbatches 4 --backend ddp ", RMS),
    row(4, PP + "--schedule zbv --pp_microbatches 8 --backend fsdp2 --sync streaming ", RMS),
    row(4, PP + "--schedule zb-h1 --pp_microbatches 8 --backend megatron ", RMS),
    row(4, "--pp_microbatches 4 --sync streaming ", MTP),
    row(4, "--pp_microbatches 4 --backend fsdp2 --sync streaming ", MTP + BF16),
    row(4, PP + "--schedule zb-h1 --pp_microbatches 8 --sync streaming ", MTP + BF16),
    row(4, "--pp_microbatches 4 --zero_stage 1 " + EP2, EXPERTS),
    row(4, "--pp_microbatches 4 --zero_stage 2 " + EP4, EXPERTS),
    row(4, "--pp_microbatches 3 " + EP2, EXPERTS + TWELVE),
    row(4, PP + "--schedule dualpipev --pp_microbatches 8 " + EP2, EXPERTS + BF16),
    row(4, PP + "--pp_microbatches 8 --recompute_granularity full " + EP2, EXPERTS + BF16),
    row(4, "--pp_microbatches 4 " + EP2, EXPERTS + "--moe_expert_capacity_factor 1.0 "),
    row(4, "--pp_microbatches 4 " + EP4, EXPERTS + HALF),
    row(4, "--pp_microbatches 8 --backend megatron " + TP2, CUT),
    row(4, "--pp_microbatches 8 --backend ddp " + CP2, CUT),
    row(4, "--pp_microbatches 8 --backend fsdp2 " + CP2, CUT),
    row(4, PP + "--schedule dualpipev --pp_microbatches 16 " + TP2, CUT + BF16),
    row(4, PP + "--schedule zb-h1 --pp_microbatches 16 " + CP2, CUT + BF16),
    row(4, "--pp_microbatches 4 --backend megatron ", CUT + BF16),
    row(4, "--pp_microbatches 4 --backend fsdp2 ", CUT + BF16),
    row(4, "--pp_microbatches 3 --zero_stage 1 ", CUT + TWELVE),
    row(4, "--pp_microbatches 16 " + CP4, FOURS),
    row(4, "--pp_microbatches 16 " + TP4, FOURS),
    row(4, "--pp_microbatches 8 " + CP2, FOURS),
    row(4, PP + "--schedule zbv --pp_microbatches 8 --backend fsdp2 --sync streaming ", COLUMNS),
]
ROWS += [
    row(4, "--pp_microbatches 16 " + TP2 + CP2 + EP2, CUT + EXPERTS),
    row(4, PP + "--schedule zbv --pp_microbatches 16 " + EP2 + CP2, CUT + EXPERTS + SHARED + BF16),
    row(4, "--pp_microbatches 8 --zero_stage 1 " + TP2, CUT + EXPERTS + SHARED + BF16),
    row(4, "--pp_microbatches 8 --sync streaming " + TP2, COLUMNS + EXPERTS + "--moe_ffn_hidden_size 64 "),
    row(4, "--pp_microbatches 8 " + EP2 + CP2, CUT + EXPERTS + HALF),
    row(4, "--pp_microbatches 4 " + EP4, FOURS + EXPERTS),
    row(4, "--pp_microbatches 16 --recompute_granularity full " + CP4 + EP2, FOURS + EXPERTS),
]
OWN_ROWS = [
    row(4, "--pp_microbatches 4 ", OWN + BF16),
    row(4, "--pp_microbatches 4 --backend fsdp2 --sync streaming ", OWN + BF16),
    row(4, PP + "--pp_microbatches 8 --backend fsdp2 ", OWN + BF16),
    row(4, PP + "--schedule zbv --pp_microbatches 8 --sync streaming ", OWN + BF16),
    row(4, PP + "--virtual_pipeline_model_parallel_size 2 --pp_microbatches 8 --backend ddp ", OWN + BF16),
]
THREE = [
    row(3, "--pp_microbatches 4 --sync streaming ", TWELVE),
    row(3, "--pp_microbatches 2 --grad_accum_steps 2 --zero_stage 1 ", TWELVE + BF16),
    row(3, "--pp_microbatches 4 --backend fsdp2 ", TWELVE),
]


@pytest.fixture(scope="module")
def measured() -> dict[Case, Outcome]:
    one_process = [alone(model) for model in dict.fromkeys(case.model for case in ROWS + OWN_ROWS + THREE)]
    return outcomes_by_case([(4, ROWS), (4, OWN_ROWS), (3, THREE), (1, one_process)], STEPS)


@pytest.mark.parametrize("case", ROWS + OWN_ROWS + THREE, ids=str)
def test_every_layout_is_one_process_to_the_bit(case, measured):
    assert measured[case] == measured[alone(case.model)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_digest_over_every_kind_of_ranks(precision, tmp_path):
    """Experts over ep 1, 2 and 4, tp 1 and 2, cp 1 and 2, with dropout; every row but the first of its number begins
    in the middle, with the first one's checkpoint."""
    args = Namespace(mode="layout", steps=4, resumed=True, only="")
    rows = list(layouts.measured("all", precision, args, str(tmp_path)))
    for count, least in ((16, 20), (12, 3)):
        found = [row for row in rows if row.num_microbatches == count]
        assert len(found) >= least and [row.layout for row in found if not layouts.same(row, found[0])] == []
