"""More layouts of a model are that of one process, to the bit, than tests/multiproc/test_layouts.py tries."""

from __future__ import annotations

import pytest

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
    STEPS,
    TP2,
    TWELVE,
    one_process,
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
    row(4, "--pp_microbatches 4 --backend fsdp2 ", MTP + BF16),
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
    return outcomes_by_case([(4, ROWS), (4, OWN_ROWS), (3, THREE)], STEPS)


@pytest.mark.parametrize("case", ROWS + OWN_ROWS + THREE, ids=str)
def test_every_layout_is_one_process_to_the_bit(case, measured):
    assert measured[case] == one_process(case.model)
