"""Results of a candidate's run: medians, dropped lanes, and the end of one that hangs. The runs are stand-ins that
write what a run of `megaaccum train` writes; tests/multiproc/test_tune.py has real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaaccum.config import resolve
from megaaccum.lab.planner import layout_config
from megaaccum.lab.planner.fallbacks import FAILED, HANGS, MEASURED, NOT_FINITE, OUT_OF_MEMORY, UNSTEADY, Candidate
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.trial import Trials, candidates_of
from megaaccum.lab.planner.workload import make_workload
from megaaccum.pretrain.interop.load import load
from megaaccum.units import GIB

RUN = """
import json, os, sys, time
import yaml
with open(sys.argv[1]) as file:
    keys = yaml.safe_load(file)["run"]
folder, steps = keys["output_dir"], {steps}
os.makedirs(folder + "/receipts")
with open(folder + "/log.jsonl", "w") as log:
    print(json.dumps(dict(kind="start", step=0)), file=log)
    for number, (seconds, norm, *more) in enumerate(steps, start=1):
        record = dict(kind="train", step=number, seconds_per_step=seconds, grad_norm=norm, **dict(*more))
        print(json.dumps(record), file=log)
memory = dict(parameters=3, activations=4, host=9)
receipt = dict(schema="megaaccum receipt", version=1, number=1, measured=dict(memory=memory))
with open(folder + "/receipts/start_1.json", "w") as file:
    json.dump(receipt, file)
{more}
"""
OVERFLOW = dict(skipped=True, loss_scale=65536.0)
STEADY = [(9.0, 2.0), (1.0, 2.1), (1.2, 1.9), (1.1, 2.0)]


@pytest.fixture(scope="module")
def trials_and_candidate() -> tuple[Trials, Candidate]:
    words = "--global_batch_size 8 --num_layers 4 --hidden_size 32 --num_attention_heads 4 --seq_length 16 --lr 1e-3"
    words += " --train_iters 8 --vocab_size 64 --save_interval 2 --sample_every 1 --text_comparisons_every 2"
    more = "--exit_interval 2"
    config = load(None, [*words.split(), *more.split(), "--nproc_per_node", "4", "--rampup_batch_size", "4", "4", "16"])
    workload = make_workload(config, world_size=2, hardware=load_hardware("h100"))
    ranked = search(workload)
    candidate = Candidate(row=1, axes=ranked.name_of(0), seconds=1.0, bytes=1.0)
    return Trials(workload=workload, folder=Path(), command=[], time_limit=20.0), candidate


def outcome_of(
    made: tuple[Trials, Candidate], folder: Path, steps: object, more: str = "", trial_steps: int = 4, **changes: object
):
    trials, candidate = made
    folder.mkdir(exist_ok=True)
    script = folder / "run.py"
    script.write_text(RUN.replace("{steps}", repr(steps)).replace("{more}", more))
    changed = replace(trials, folder=folder, command=[sys.executable, str(script)], steps=trial_steps, **changes)
    return changed.run(candidate)


def test_predicted_bytes_are_those_that_a_run_measures(trials_and_candidate) -> None:
    """Not the context of CUDA and a margin besides, 5.25 GiB of them on an H100."""
    ranked = search(trials_and_candidate[0].workload)
    kinds = ranked.memory.by_kind
    for at, each in enumerate(candidates_of(ranked)):
        beside = float(kinds["runtime"][at] + kinds["margin"][at])
        assert beside > 5.25 * GIB
        assert each.bytes == pytest.approx(float(ranked.memory.total[at]) - beside, abs=1.0)


def test_the_median_of_steps_one_to_three(trials_and_candidate, tmp_path: Path) -> None:
    found = outcome_of(trials_and_candidate, tmp_path, [*STEADY])
    assert found.verdict == MEASURED
    assert found.seconds == 1.1  # and not 1.15, which step 0 would make it
    assert found.bytes == 7
    assert Path(found.receipt).exists()


def test_the_run_saves_nothing_and_evaluates_nothing(trials_and_candidate, tmp_path: Path) -> None:
    trials, candidate = trials_and_candidate
    run = trials.config(candidate, tmp_path).run
    assert (run.save_interval, run.save_at_end, run.eval_interval, run.max_steps) == (0, False, 0, 4)
    assert (run.sample_every, run.text_comparisons_every, run.exit_interval) == (0, 0, None)
    assert run.nproc_per_node == 2  # the ranks that the layout was planned for, and not the configuration's 4
    assert run.train_iters == 8  # the learning rate's schedule stays


def test_a_run_that_is_shorter_than_a_trial_is_made_as_long(trials_and_candidate, tmp_path: Path) -> None:
    """Otherwise every layout would end before its steps, and count as failed."""
    trials, candidate = trials_and_candidate
    run = replace(trials, steps=50).config(candidate, tmp_path).run
    assert (run.max_steps, run.train_iters) == (50, 50)


def test_all_steps_of_a_run_that_warms_its_batch_up_have_the_batch_that_was_priced(
    trials_and_candidate, tmp_path: Path
) -> None:
    trials, candidate = trials_and_candidate
    written = trials.config(candidate, tmp_path)
    assert written.batch.rampup_batch_size is None
    assert resolve(written, world_size=2).ramp.is_constant
    planned = layout_config.planned_config(trials.workload, dict(candidate.axes))
    assert planned.batch.rampup_batch_size == [4, 4, 16]  # the winner's configuration keeps it


def test_an_overflow_that_finds_the_loss_scale_drops_no_layout(trials_and_candidate, tmp_path: Path) -> None:
    first = [(9.0, None, OVERFLOW), (1.0, None, OVERFLOW)]
    assert outcome_of(trials_and_candidate, tmp_path, first + STEADY[2:]).verdict == MEASURED
    found = outcome_of(trials_and_candidate, tmp_path / "all", [(1.0, None, OVERFLOW)] * 4)
    assert found.verdict == NOT_FINITE


def test_rows_of_another_ranking_have_folders_of_their_own(trials_and_candidate, tmp_path: Path) -> None:
    """`--fix` ranks other layouts, which begin at row 1 again: receipts and logs of the first tuning stay."""
    trials, first = trials_and_candidate
    other = replace(first, axes=search(trials.workload).name_of(1))
    outcomes = [outcome_of((trials, each), tmp_path, STEADY) for each in (first, other)]
    assert [each.verdict for each in outcomes] == [MEASURED, MEASURED]
    assert all(Path(each.receipt).is_file() for each in outcomes)
    assert outcomes[0].receipt != outcomes[1].receipt


def test_a_longer_run_settles(trials_and_candidate, tmp_path: Path) -> None:
    """The fifth step's norm is far from the average of those before it; four steps do not show it."""
    assert outcome_of(trials_and_candidate, tmp_path, STEADY).verdict == MEASURED
    longer = [*STEADY, (1.0, 9.0), (1.0, 2.0)]
    found = outcome_of(trials_and_candidate, tmp_path / "longer", longer, trial_steps=6)
    assert found.verdict == UNSTEADY
    assert "in step 4" in found.text


@pytest.mark.parametrize(
    ("steps", "more", "verdict", "text"),
    [
        ([*STEADY[:2], (1.0, None), *STEADY[3:]], "", NOT_FINITE, "None"),
        ([*STEADY[:2], (1.0, 2.0, dict(sanitized=3, note="set to 0")), *STEADY[3:]], "", NOT_FINITE, "None"),
        ([(1.0, 0.0, dict(sanitized=9, skipped=True, note="set to 0"))] * 4, "", NOT_FINITE, "None"),
        (STEADY[:2], "", FAILED, "exit code 0"),
        (STEADY, "sys.exit('the corpus is gone')", FAILED, "the corpus is gone"),
        (STEADY, "time.sleep(60)", HANGS, "had not ended after 1.5 s"),
        (STEADY[:1] * 3 + [(1.0, 9.0)], "", UNSTEADY, "norm is 9 in step 3, and its moving average 2"),
        ([], "os.kill(os.getpid(), 9)", OUT_OF_MEMORY, ""),
        ([], "sys.exit(-9)", OUT_OF_MEMORY, ""),  # as DeepSpeed's launcher does after a rank that was killed
        ([], "sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate')", OUT_OF_MEMORY, "Tried"),
    ],
    ids=["nan", "zeroed", "all zeroed", "short", "failed", "hangs", "spike", "killed", "killed elsewhere", "cuda"],
)
def test_dropped(trials_and_candidate, tmp_path: Path, steps: object, more: str, verdict: str, text: str) -> None:
    limit = 1.5 if verdict == HANGS else 20.0
    found = outcome_of(trials_and_candidate, tmp_path, steps, more, time_limit=limit)
    assert found.verdict == verdict
    assert text in found.text
    assert found.seconds is None


def test_a_real_allocation_failure(trials_and_candidate, tmp_path: Path) -> None:
    more = "import resource, numpy; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); numpy.ones(2**31)"
    found = outcome_of(trials_and_candidate, tmp_path, STEADY, more)
    assert found.verdict == OUT_OF_MEMORY
    assert "MemoryError" in found.text
