"""Every backend and policy x every kind of schedule x pp 1, 2 x dp 2, 4: the gradient of one process on the whole
batch, whose sequences have different numbers of tokens. Embeddings are tied: with pp 2 there are two copies, on two
ranks or, in a V, on one."""

import pytest

from tests.support.distance import check
from tests.support.parity import Case

MODEL = "--num_layers 4 "
SYNC_MODES = {
    "ZeRO-3 resident": "",
    "ZeRO-3 streaming": "--sync streaming ",
    "FSDP2 resident": "--backend fsdp2 ",
    "FSDP2 streaming": "--backend fsdp2 --sync streaming ",
    "Megatron": "--backend megatron ",
    "DDP": "--backend ddp ",
}
REPLICAS = {
    "HSDP resident": "--backend fsdp2 --data_parallel_replicas 2 ",
    "HSDP streaming": "--backend fsdp2 --data_parallel_replicas 2 --sync streaming ",
}
"""2 x 2, so with dp 4."""
SCHEDULES = {
    "none": "",
    "1f1b": "--pipeline_model_parallel_size 2 ",
    "interleaved": "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 ",
    "dualpipev": "--pipeline_model_parallel_size 2 --schedule dualpipev ",
}


def case(policy: str, schedule: str, dp: int) -> Case:
    """In float64 where the backend can."""
    flags = (SYNC_MODES | REPLICAS)[policy]
    lane = "fp64" if "fsdp2" in flags or "ddp" in flags else "fp32"
    precision = "--params_dtype fp64 " if lane == "fp64" else ""
    ranks = dp * (1 if schedule == "none" else 2)
    return Case(ranks, f"--pp_microbatches 4 {flags}{precision}{SCHEDULES[schedule]}", MODEL, lane)


PIPELINED = ("1f1b", "interleaved", "dualpipev")


@pytest.mark.parametrize("dp", [2, 4])
def test_without_a_pipeline(dp):
    check([case(policy, "none", dp) for policy in (*SYNC_MODES, *(REPLICAS if dp == 4 else ()))])


def test_two_stages_by_two():
    check([case(policy, schedule, 2) for policy in SYNC_MODES for schedule in PIPELINED])


def test_two_stages_by_four():
    """Eight ranks."""
    for schedule in PIPELINED:
        check([case(policy, schedule, 4) for policy in (*SYNC_MODES, *REPLICAS)])
