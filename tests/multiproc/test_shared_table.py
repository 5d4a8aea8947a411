"""A run with a searched table: ranks compare it before anything else, and run the one that rank 0 has sent."""

import os
from pathlib import Path

import pytest

from megaaccum.errors import MegaaccumError
from megaaccum.lab.search.search import search_order
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.schedule import Costs, Schedule, build, write_csv
from megaaccum.schedule.actions import stage_map
from megaaccum.schedule.pass_numbers import Problem
from tests.support.parity import Case, Rig

LAYOUT = "--pipeline_model_parallel_size 2 --grad_accum_steps 1 --num_chunks 6 --schedule table.csv"


def searched() -> Schedule:
    costs = Costs(forward=(1, 2), input_grad=(3, 1), weight_grad=(2, 2))
    problem = Problem(costs, stages=stage_map("loop", pp=2, chunks=1), num_microbatches=6)
    return search_order(problem, iterations=500).schedule


def run_in_own_folder(folder: str, *, damage: bool) -> tuple[str, Schedule | None]:
    """(what the start ended with, the table that this rank runs then). Every rank has a folder with a table of its
    own; damage: and loses it as soon as all have agreed."""
    import torch.distributed as dist

    from megaaccum.distributed.start import start_together

    os.chdir(f"{folder}/{dist.get_rank()}")
    rig = Rig.of(Case(4, LAYOUT))
    try:
        start_together(rig.plan)
    except MegaaccumError as error:
        return f"{type(error).__name__}: {error}", None
    if damage:
        Path("table.csv").write_text("lost")
        build.cache_clear()
    rig.train_step.train(rig.microbatches(), step=1)
    return "went on", build("table.csv", pp=2, num_microbatches=6)


def folders(tmp_path: Path, tables: list[Schedule]) -> str:
    for rank, table in enumerate(tables):
        (tmp_path / str(rank)).mkdir()
        write_csv(table, tmp_path / str(rank) / "table.csv")
    return str(tmp_path)


def test_every_rank_runs_the_table_that_rank_0_sent(tmp_path):
    table = searched()
    ended = run_ranks(run_in_own_folder, 4, folders(tmp_path, [table] * 4), damage=True)
    assert all(text == "went on" and ran is not None and ran.items == table.items for text, ran in ended)


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_with_another_table_ends_all_with_one_message(tmp_path, odd):
    tables = [build("zb-h1", pp=2, num_microbatches=6) if rank == odd else searched() for rank in range(4)]
    assert tables[0].items != tables[3].items
    texts = {text for text, _ in run_ranks(run_in_own_folder, 4, folders(tmp_path, tables), damage=False, timeout=60)}
    (text,) = texts
    assert text.startswith("RankDisagreement") and "schedule table" in text
