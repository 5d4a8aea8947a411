"""Experts with ranks of their own on every backend and sync mode: spread (ep), whole beside dense matrices that are cut
(etp 1), and both (etp = tp). The gradient of every parameter is that of one process."""

from __future__ import annotations

from tests.support.distance import cells
from tests.support.parity import Case

MODEL = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_z_loss_coeff 0.01 --moe_router_dtype fp64 "
)
MODES = {
    "ZeRO-1": "--zero_stage 1 ",
    "ZeRO-2": "--zero_stage 2 ",
    "ZeRO-3 resident": "",
    "ZeRO-3 streaming": "--sync streaming ",
    "FSDP2 resident": "--backend fsdp2 ",
    "FSDP2 streaming": "--backend fsdp2 --sync streaming ",
    "Megatron": "--backend megatron ",
    "DDP": "--backend ddp ",
}
EP = "--expert_model_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
WHOLE = TP + "--expert_tensor_parallel_size 1 "
PP = "--pipeline_model_parallel_size 2 "


def cell(mode: str, ranks: int, layout: str, model: str = "", *, exact: bool = True) -> Case:
    """exact: in float64 if the backend can."""
    flags = MODES[mode]
    lane = "fp64" if exact and ("fsdp2" in flags or "ddp" in flags) else "fp32"
    precision = "--params_dtype fp64 " if lane == "fp64" else ""
    return Case(ranks, f"--pp_microbatches 4 {flags}{precision}{layout}", MODEL + model, lane)


@cells(*(cell(mode, 2, EP) for mode in MODES), *(cell(mode, 2, WHOLE) for mode in MODES))
def test_two_ranks(case, parity):
    """Half of the experts on each; all of them on both, beside cut dense matrices."""
    parity(case)


@cells(*(cell(mode, 4, EP + TP) for mode in MODES), *(cell(mode, 4, EP + WHOLE) for mode in MODES))
def test_spread_under_tensor_parallelism(case, parity):
    parity(case)
