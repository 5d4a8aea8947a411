"""Speed as it is: a loader that is slow shows in tokens per second, in the phase `data` and in goodput, over restarts.

The clock moves only where the run is made slow, so every figure is exact.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from megaaccum.pretrain.metrics import journal, receipts
from megaaccum.pretrain.metrics.goodput import Goodput
from megaaccum.pretrain.metrics.step_record import BETWEEN_STEPS, OF_A_STEP
from tests.support.whole_runs import FORWARD, LAUNCH, READ, SAVE, START_UP, make_data, train

MICROBATCHES, TOKENS = 4, 4 * 16
STEP = MICROBATCHES * (READ + FORWARD)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Steps 1 to 3 of 8 with a checkpoint after the second; killed as it were; then from 2 on to the end."""
    folder = tmp_path_factory.mktemp("slow")
    make_data(folder)
    slowly = dict(worker="reads_slowly", num_workers=0, save_interval=2)
    first = train(folder, **slowly, max_steps=3, save_at_end=False)
    again = train(folder, **slowly, max_steps=4, env={"TEST_LAUNCHED": str(LAUNCH + 500)})
    assert (first.code, again.code) == (0, 0), first.output + again.output
    return folder / "run", again.output


def test_the_wait_for_data_is_in_the_step_and_its_rate(run):
    folder, _ = run
    steps = [each for each in journal.read(folder / "log.jsonl") if each["kind"] == "train"]
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
    for each in steps:
        assert each["seconds_data"] == MICROBATCHES * READ
        assert each["seconds_forward_backward"] == MICROBATCHES * FORWARD
        assert each["seconds_per_step"] == STEP
        assert each["tokens_per_second"] == TOKENS / STEP


def test_phases_add_up_to_the_time_between_records(run):
    folder, _ = run
    lines = journal.lines(folder / "log.jsonl")
    for before, each in pairwise(lines):
        if each["kind"] != "start":
            spent = sum(each.get(f"seconds_{phase}", 0.0) for phase in OF_A_STEP + BETWEEN_STEPS)
            assert spent == each["time"] - before["time"], each


def test_goodput_counts_every_start(run):
    folder, output = run
    goodput = Goodput(journal.lines(folder / "log.jsonl"))
    first_end = LAUNCH + START_UP + 3 * STEP + SAVE
    assert goodput.seconds == {
        "productive": 6 * MICROBATCHES * FORWARD, "start_up": 2 * START_UP, "data": 6 * MICROBATCHES * READ,
        "evaluation": 0.0, "checkpoint": 3 * SAVE, "skipped": 0.0, "repeated": STEP,
        "idle": LAUNCH + 500 - first_end, "other": 0.0,
    }  # fmt: skip
    assert f"goodput        {goodput.line()}" in output
    last = receipts.read_all(folder)[-1]
    assert last["measured"]["goodput"]["seconds"]["repeated"] == STEP
    assert [each["kind"] for each in last["events"]] == ["restart"]
    assert journal.read(folder / "log.jsonl")[-1]["goodput"] == pytest.approx(goodput.share, rel=0.05)
