"""Every backend and sync mode x every kind of schedule x pp 1, 2 x dp 2, 4: the gradient of one process on the whole
batch, whose sequences have different numbers of tokens. Embeddings are tied: with pp 2 there are two copies, on two
ranks or, in a V, on one."""

from tests.support.distance import cells
from tests.support.parity import REPLICAS, SYNC_MODES, Case

MODEL = "--num_layers 4 "
SCHEDULES = {
    "none": "",
    "1f1b": "--pipeline_model_parallel_size 2 ",
    "interleaved": "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 ",
    "dualpipev": "--pipeline_model_parallel_size 2 --schedule dualpipev ",
}


def cell(mode: str, schedule: str, dp: int) -> Case:
    """In float64 where the backend can."""
    flags = (SYNC_MODES | REPLICAS)[mode]
    lane = "fp64" if "fsdp2" in flags or "ddp" in flags else "fp32"
    precision = "--params_dtype fp64 " if lane == "fp64" else ""
    ranks = dp * (1 if schedule == "none" else 2)
    return Case(ranks, f"--pp_microbatches 4 {flags}{precision}{SCHEDULES[schedule]}", MODEL, lane)


PIPELINED = ("1f1b", "interleaved", "dualpipev")


@cells(*(cell(mode, "none", dp) for dp in (2, 4) for mode in (*SYNC_MODES, *(REPLICAS if dp == 4 else ()))))
def test_without_a_pipeline(case, parity):
    parity(case)


@cells(*(cell(mode, "1f1b", 2) for mode in SYNC_MODES))
def test_one_cell_per_backend(case, parity):
    """The part of the table that `make quick` runs."""
    parity(case)


@cells(*(cell(mode, schedule, 2) for mode in SYNC_MODES for schedule in PIPELINED if schedule != "1f1b"))
def test_two_stages_by_two(case, parity):
    parity(case)


@cells(*(cell(mode, schedule, 4) for schedule in PIPELINED for mode in (*SYNC_MODES, *REPLICAS)))
def test_two_stages_by_four(case, parity):
    """Eight ranks."""
    parity(case)
