"""The run's log: journal, progress line, services, summary, and what happens in a bad place or with a bad file."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import types
from pathlib import Path

import pytest

from megaaccum.config.batch import BatchPlan
from megaaccum.config.batch_ramp import BatchRamp
from megaaccum.config.schema import Config, ModelConfig, RunConfig
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.pretrain.metrics import journal
from megaaccum.pretrain.metrics.goodput import Goodput
from megaaccum.pretrain.metrics.run_log import RunLog, check
from megaaccum.pretrain.metrics.speed import Speed
from megaaccum.units import duration, rounded


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def planned(folder: Path, **run) -> types.SimpleNamespace:
    """A Plan, as far as the log reads one: 4096 tokens per step on 4 ranks."""
    keys = dict(train_iters=20, log_interval=5, output_dir=str(folder))
    config = Config(model=ModelConfig(num_layers=2, hidden_size=64), run=RunConfig(**(keys | run)))
    batch = BatchPlan(
        micro_batch_size=2, pp_microbatches=8, grad_accum_steps=1, data_parallel_size=2, pipeline_model_parallel_size=2,
        seq_length=128, flush="merged", loss_norm="token",
    )  # fmt: skip
    layout = types.SimpleNamespace(world_size=4, tp=1, cp=1, pp=2, ep=1, dp=2)
    return types.SimpleNamespace(config=config, batch=batch, ramp=BatchRamp.constant(batch), layout=layout)


def opened(folder: Path, *, start_step=0, peak_flops=None, clock=None, **run) -> RunLog:
    clock = clock or Clock()
    return RunLog(
        planned(folder, **run), is_writer=True, flops_per_step=8e12, peak_flops=peak_flops,
        start_step=start_step, clock=clock, now=clock,
    )  # fmt: skip


def step(number: int, **values) -> dict:
    usual = dict(step=number, loss=8.0 / number, grad_norm=1.25, lr=1e-3, seconds_per_step=2.0, skipped=False)
    return usual | values


def lines(folder: Path) -> list[dict]:
    """All of the journal but the begin of its first start."""
    first, *rest = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert (first["kind"], first["step"]) == ("start", 0)
    return rest


# The journal


def test_every_step_is_one_line_with_its_rates(tmp_path):
    log = opened(tmp_path, peak_flops=10e12)
    log.step(step(1, consumed_samples=32))
    (line,) = lines(tmp_path)  # readable before anything is closed
    assert line == {
        "kind": "train", "step": 1, "loss": 8.0, "grad_norm": 1.25, "lr": 1e-3, "seconds_per_step": 2.0,
        "skipped": False, "consumed_samples": 32,
        "tokens_per_second": 2048.0, "tflops_per_second_per_rank": 1.0, "mfu": 0.1, "time": 0.0, "goodput": 0.0,
    }  # fmt: skip


def test_tensors_become_the_numbers_they_hold(tmp_path):
    import torch

    log = opened(tmp_path)
    log.step(step(1, loss=torch.tensor(1 / 3), grad_norm=torch.tensor([0.5], dtype=torch.bfloat16)))
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"]) == (torch.tensor(1 / 3).item(), 0.5)


def test_what_is_not_finite_is_null_in_strict_json_and_named(tmp_path):
    log = opened(tmp_path)
    log.step(step(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    (line,) = lines(tmp_path)
    assert (line["loss"], line["grad_norm"]) == (None, None)
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}


def test_a_resume_appends_and_steps_taken_again_count_once(tmp_path):
    log = opened(tmp_path)
    log.evaluation(dict(step=0, loss=8.0))
    for number in range(1, 8):
        log.step(step(number))
    log.evaluation(dict(step=7, loss=5.0))
    resumed = opened(tmp_path, start_step=5)
    for number in range(6, 9):
        resumed.step(step(number, loss=1.0))
    first = [("valid", 0), *[("train", n) for n in range(1, 8)], ("valid", 7)]
    again = [("start", 5), ("train", 6), ("train", 7), ("train", 8)]
    assert [(r["kind"], r["step"]) for r in lines(tmp_path)] == first + again
    records = journal.read(tmp_path / "log.jsonl")
    assert [(r["kind"], r["step"]) for r in records] == [("valid", 0), *[("train", n) for n in range(1, 9)]]
    assert [r["loss"] for r in records][-3:] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("torn", [b'{"kind": "train", "st', b'{"kind": "train", "step": 4}', b"\0" * 500, b"\0\n\0\n"])
def test_a_torn_end_is_cut_off(tmp_path, torn):
    log = opened(tmp_path)
    for number in range(1, 4):
        log.step(step(number))
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(torn)
    assert [r["step"] for r in journal.read(tmp_path / "log.jsonl")] == [1, 2, 3]
    opened(tmp_path, start_step=3).step(step(4))
    assert [r["step"] for r in journal.read(tmp_path / "log.jsonl")] == [1, 2, 3, 4]
    assert [r["kind"] for r in lines(tmp_path)] == ["train", "train", "train", "start", "train"]


@pytest.mark.parametrize("damage", ["garbage", '{"kind": "train"}', '{"step": 2}', "[1]", ""])
def test_damage_in_the_middle_is_an_error_that_names_the_line_and_loses_nothing(tmp_path, damage):
    log = opened(tmp_path)
    log.step(step(1))
    path = tmp_path / "log.jsonl"
    good = path.read_text().splitlines(keepends=True)
    path.write_text(good[0] + damage + "\n" + good[1])
    before = path.read_bytes()
    with pytest.raises(MegaaccumError, match=r"log\.jsonl is damaged: line 2"):
        opened(tmp_path, start_step=1)
    assert path.read_bytes() == before


def test_a_journal_that_was_killed_before_its_first_record_is_continued(tmp_path):
    log = opened(tmp_path)
    log.step(step(1))
    path = tmp_path / "log.jsonl"
    path.rename(tmp_path / "log.jsonl.1")
    path.touch()
    opened(tmp_path, start_step=1).step(step(2))
    assert [r["step"] for r in journal.read(path)] == [1, 2]


def test_a_note_that_repeats_is_printed_once_and_counted(tmp_path, capsys):
    log = opened(tmp_path)
    for number, note in enumerate(["", "holds 12 nan", "holds 3 nan", "holds 1e+3 nan", "another", "", "another"], 1):
        log.step_note(number, note)
    log.step_note(8, "another")
    log.step(step(8))
    log.close()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert told == [
        "step 2: holds 12 nan",
        "step 4: the same, for 2 more steps in a row",
        "step 5: another",
        "step 7: another",
        "step 8: the same, for 1 more step in a row",
    ]


def test_a_fresh_start_moves_an_earlier_journal_aside(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        opened(tmp_path).step(step(1, loss=loss))
    assert [r["loss"] for r in lines(tmp_path)] == [3.0]
    asides = [json.loads((tmp_path / f"log.{n}.jsonl").read_text().splitlines()[1])["loss"] for n in (1, 2)]
    assert asides == [1.0, 2.0]


# Long runs


def long_journal(folder: Path, steps: int) -> tuple[RunLog, Clock]:
    """A run of `steps` steps of two seconds, with a resume after a third of them, and the goodput that it says."""
    clock = Clock()
    for start, end in ((0, steps // 2), (steps // 3, steps)):
        log = opened(folder, start_step=start, clock=clock, train_iters=steps, log_interval=steps)
        for number in range(start + 1, end + 1):
            clock.now += 2.0
            log.step(step(number, seconds_forward_backward=1.5, seconds_data=0.25, skipped=number % 7 == 0))
    return log, clock


def test_a_resume_reads_the_end_of_the_journal_and_knows_the_goodput_of_all(tmp_path, monkeypatch):
    _, clock = long_journal(tmp_path, 6000)
    parse, parsed = journal.parse, []
    monkeypatch.setattr(journal, "parse", lambda line: (parsed.append(1), parse(line))[1])
    resumed = opened(tmp_path, start_step=5500, clock=clock)
    assert len(parsed) < 3 * 1100
    whole = Goodput(journal.lines(tmp_path / "log.jsonl"))
    assert len(parsed) > 8000
    assert resumed._goodput.seconds == pytest.approx(whole.seconds)
    assert (resumed._goodput.num_starts, whole.num_starts) == (3, 3)
    assert whole.seconds["repeated"] == 1.75 * (1000 + 500)


def test_totals_that_a_later_start_takes_back_are_not_begun_from(tmp_path):
    """Totals of step 3000 count steps that the next start repeats."""
    _, clock = long_journal(tmp_path, 6000)
    resumed = opened(tmp_path, start_step=2500, clock=clock)
    again = opened(tmp_path, start_step=2500, clock=clock)
    whole = Goodput(journal.lines(tmp_path / "log.jsonl"))
    assert again._goodput.seconds == pytest.approx(whole.seconds)
    assert resumed._goodput.seconds["repeated"] == whole.seconds["repeated"] == 1.75 * (1000 + 3500)


def test_a_journal_without_totals_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("megaaccum.pretrain.metrics.run_log.TOTALS_EVERY", 10**9)
    monkeypatch.setattr(journal, "MOST_AT_ONCE", 100)
    _, clock = long_journal(tmp_path, 600)
    resumed = opened(tmp_path, start_step=600, clock=clock)
    assert resumed._goodput.seconds == pytest.approx(Goodput(journal.lines(tmp_path / "log.jsonl")).seconds)


def test_a_thinned_journal_holds_what_is_looked_for_and_the_goodput_of_every_step(tmp_path):
    """Beside every tenth step the first and last of a start, saved ones, the one before an evaluation, a bad one."""
    goodputs = []
    for interval in (1, 10):
        folder, clock = tmp_path / str(interval), Clock()
        keys = dict(train_iters=60, record_interval=interval, save_interval=25, clock=clock)
        for start, end in ((0, 47), (25, 60)):
            log = opened(folder, start_step=start, **keys)
            for number in range(start + 1, end + 1):
                clock.now += 2.0
                bad = dict(skipped=True, note="not finite") if number == 33 else {}
                log.step(step(number, seconds_forward_backward=1.5, seconds_data=0.25, **bad))
                if number == 44:
                    log.evaluation({"step": 44, "loss": 3.0})
            log.close()
        steps = [each["step"] for each in lines(folder) if each["kind"] == "train"]
        resumed = opened(folder, start_step=25, **keys)
        whole = Goodput(journal.lines(folder / "log.jsonl"))
        assert resumed._goodput.seconds == pytest.approx(whole.seconds)
        goodputs.append(whole.seconds)
    assert steps == [1, 10, 20, 25, 30, 33, 40, 44, 47, 26, 30, 33, 40, 44, 50, 60]
    assert goodputs[1] == pytest.approx(goodputs[0])
    assert goodputs[0]["repeated"] == 1.75 * (22 + 35)


def test_a_thinned_journal_has_every_skipped_step(tmp_path, capsys):
    """An overflow by which FP16 finds its scale has no note."""
    log = opened(tmp_path, record_interval=10)
    for number in range(1, 21):
        log.step(step(number, skipped=number in (2, 3)))
    log.close()
    assert [each["step"] for each in lines(tmp_path) if each["kind"] == "train"] == [1, 2, 3, 10, 20]
    assert "20, 2 of them skipped" in capsys.readouterr().out


def test_the_picture_of_a_long_run_has_points_enough(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megaaccum.pretrain.metrics.plots.MOST_POINTS", 100)
    drawn = []
    monkeypatch.setattr("megaaccum.pretrain.metrics.plots.draw", lambda records, *_, **__: drawn.extend(records))
    log, _ = long_journal(tmp_path, 900)
    log.close()
    steps = [each["step"] for each in drawn]
    assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (1, 900)
    assert len(steps) < 100 + 900 // 7
    assert f"{900 // 7} of them skipped" in capsys.readouterr().out


def test_a_large_journal_is_continued_in_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "PART_BYTES", 2000)
    log, clock = long_journal(tmp_path, 60)
    log._journal.close()
    for stray in ("log.jsonl.bak", "log.jsonl.2.gz"):  # a user's copies
        (tmp_path / stray).write_text("no record\n")
    names = [path.name for path in journal.parts(tmp_path / "log.jsonl")]
    assert len(names) >= 10 and names[:2] == ["log.jsonl.1", "log.jsonl.2"] and names[-1] == "log.jsonl"
    assert all((tmp_path / name).stat().st_size < 2600 for name in names)
    assert [each["step"] for each in journal.read(tmp_path / "log.jsonl")] == list(range(1, 61))
    (tmp_path / "log.jsonl").write_bytes((tmp_path / "log.jsonl").read_bytes() + b'{"kind"')
    opened(tmp_path, start_step=40, clock=clock).step(step(41))
    assert [each["step"] for each in journal.read(tmp_path / "log.jsonl")] == list(range(1, 42))
    damaged = tmp_path / "log.jsonl.2"
    damaged.write_bytes(b"x\n" + damaged.read_bytes())
    with pytest.raises(MegaaccumError, match=r"log\.jsonl\.2 is damaged: line 1"):
        journal.read(tmp_path / "log.jsonl")
    damaged.write_bytes(damaged.read_bytes()[2:])
    opened(tmp_path)  # a fresh run
    assert [each["step"] for each in journal.read(tmp_path / "log.1.jsonl")] == list(range(1, 42))
    assert [path.name for path in journal.parts(tmp_path / "log.jsonl")] == ["log.jsonl"]


def test_a_planted_journal_is_set_aside(tmp_path):
    (precious := tmp_path / "precious").write_text("precious")
    for start_step in (0, 3):
        (folder := tmp_path / f"run{start_step}").mkdir()
        (folder / "log.jsonl").symlink_to(precious)
        opened(folder, start_step=start_step)
        assert not (folder / "log.jsonl").is_symlink()
    assert precious.read_text() == "precious"


@pytest.mark.parametrize(
    "write",
    [
        lambda log: log.step(step(1)),
        lambda log: log.evaluation({"step": 1, "loss": 2.0, "consumed_samples": 8}),
        lambda log: log.add_text("sample", {"step": 1, "prompt": "a", "text": "b"}, "sample"),
    ],
    ids=["step", "evaluation", "text"],
)
def test_a_full_disk_is_one_clear_message(tmp_path, write):
    log = opened(tmp_path)
    log._journal._file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    write(log)  # raises on no rank: `problem` ends the run before the next step, on every rank
    assert re.match(r".*log\.jsonl cannot be written: No space left on device.*output_dir", str(log.problem))
    with pytest.raises(MegaaccumError, match="No space left on device"):
        log.close()


def test_only_the_writing_rank_has_files_and_words(tmp_path, capsys):
    folder = tmp_path / "never"
    log = RunLog(planned(folder), is_writer=False, flops_per_step=1.0, peak_flops=None)
    log.step(step(1))
    log.evaluation(dict(step=1, loss=1.0))
    log.note("hello")
    log.close()
    assert not folder.exists()
    assert capsys.readouterr().out == ""


# The progress line


def test_the_line_says_all_there_is(tmp_path, capsys):
    clock = Clock()
    log = opened(tmp_path, peak_flops=2e12, clock=clock)
    for number in range(1, 6):
        clock.now += 100.0 if number == 1 else 3.0
        log.step(step(number, loss=2.5, grad_norm=0.5, lr=2e-3, seconds_per_step=1.0 if number == 5 else 2.0))
    first, fifth = capsys.readouterr().out.splitlines()
    assert first == (
        "step  1/20 | loss 2.5000 | grad norm 0.5 | lr 2.00e-03 | 2,048 tokens/s | 1 TFLOP/s per rank | MFU 50.0%"
    )
    # Rates over the steps since the line before (2 + 2 + 2 + 1 seconds); 15 steps of 3 seconds are left by the clock.
    assert fifth == (
        "step  5/20 | loss 2.5000 | grad norm 0.5 | lr 2.00e-03 | 2,341 tokens/s | 1.14 TFLOP/s per rank | MFU 57.1%"
        " | ETA 0:45"
    )


def test_without_a_known_peak_there_is_no_mfu(tmp_path, capsys):
    opened(tmp_path).step(step(1))
    assert "MFU" not in capsys.readouterr().out
    assert "mfu" not in lines(tmp_path)[0]


@pytest.mark.parametrize(
    ("run", "start_step", "expected"),
    [
        (dict(), 0, [1, 5, 10, 15, 20]),
        (dict(), 7, [8, 10, 15, 20]),
        (dict(max_steps=3), 7, [8, 10]),
        (dict(log_interval=0), 0, [1, 20]),
        (dict(log_interval=1, max_steps=2), 0, [1, 2]),
    ],
)
def test_lines_at_the_first_step_every_interval_and_the_last(tmp_path, capsys, run, start_step, expected):
    log = opened(tmp_path, start_step=start_step, **run)
    last = min(20, start_step + run.get("max_steps", 20))
    for number in range(start_step + 1, last + 1):
        log.step(step(number))
    printed = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step")) for line in printed] == expected


def test_skipped_steps_since_the_last_line_are_counted(tmp_path, capsys):
    log = opened(tmp_path)
    for number in range(1, 11):
        log.step(step(number, skipped=number in (2, 4), **(dict(grad_norm=math.nan) if number == 5 else {})))
    first, fifth, tenth = capsys.readouterr().out.splitlines()
    assert "2 skipped" in fifth
    assert "grad norm nan" in fifth
    assert "skipped" not in first + tenth


def test_an_evaluation_is_told_at_once_and_recorded(tmp_path, capsys):
    log = opened(tmp_path)
    log.evaluation(dict(step=0, loss=math.log(50.0), seconds=1.5))
    log.evaluation(dict(step=10, loss=1e9))
    assert capsys.readouterr().out.splitlines() == [
        "step  0/20 | validation loss 3.9120 | perplexity 50.00",
        "step 10/20 | validation loss 1000000000.0000",
    ]
    assert lines(tmp_path)[0] == {"kind": "valid", "step": 0, "loss": math.log(50.0), "seconds": 1.5, "time": 0.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (3 * 86400 + 61, "3 d 0:01:01")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(640, "640"), (999.4, "999"), (999.6, "1K"), (7_241_732_096, "7.24B"), (999_812_096, "1B"), (1.2e15, "1.2e+03T")],
)
def test_numbers_of_three_digits(number, text):
    assert rounded(number) == text


def test_a_model_whose_flops_are_unknown_has_no_rate_of_them(tmp_path, capsys):
    log = RunLog(planned(tmp_path), is_writer=True, flops_per_step=None, peak_flops=1e13, clock=Clock(), now=Clock())
    log.step(step(1))
    (line,) = lines(tmp_path)
    assert not {"tflops_per_second_per_rank", "mfu"} & line.keys()
    said = capsys.readouterr().out
    assert "2,048 tokens/s" in said and "FLOP/s" not in said and "MFU" not in said


def test_a_step_of_a_smaller_batch_has_the_rates_of_its_own_tokens(tmp_path, capsys):
    log = opened(tmp_path, log_interval=1)
    log.step(step(1, seconds_per_step=2.0, global_batch_size=8))  # a quarter of the batch
    log.step(step(2, seconds_per_step=2.0))
    small, whole = lines(tmp_path)
    assert small["tokens_per_second"] == whole["tokens_per_second"] / 4 == 512
    assert small["tflops_per_second_per_rank"] == whole["tflops_per_second_per_rank"] / 4
    assert "512 tokens/s" in capsys.readouterr().out


def test_no_rate_of_a_step_without_duration():
    speed = Speed(tokens_per_step=1, flops_per_step=1.0, world_size=1, peak_flops=None)
    with pytest.raises(AssertionError, match="0 seconds"):
        speed.rates(0)


# The end


def test_the_end_draws_a_picture_and_sums_up_the_whole_run(tmp_path, capsys):
    log = opened(tmp_path)
    log.evaluation(dict(step=0, loss=8.0))
    for number in range(1, 4):
        log.step(step(number))
    log.close()
    clock = Clock()
    resumed = opened(tmp_path, start_step=3, clock=clock)
    resumed.step(step(4, skipped=True))
    resumed.evaluation(dict(step=4, loss=4.0))
    clock.now += 62.0
    capsys.readouterr()
    resumed.close("Stopped by SIGTERM")
    resumed.close()
    assert capsys.readouterr().out.splitlines() == [
        "Stopped by SIGTERM:",
        "  steps            4, 1 of them skipped",
        "  training loss    8.0000 -> 2.0000",
        "  validation loss  8.0000 -> 4.0000 (50.0% of its start)",
        "  time             1:02 in this start",
        "  goodput          0.0% of 1:02 in 2 starts (other 100.0%)",
        f"  log              {tmp_path}/log.jsonl",
        f"  picture          {tmp_path}/loss.png",
        f"  receipt          {tmp_path}/receipts/start_2.json",
    ]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, capsys):
    log = opened(tmp_path)
    log.step(step(1))
    (tmp_path / "loss.png").mkdir()
    log.close()
    assert "not drawn" in capsys.readouterr().out


def test_a_run_without_steps_ends_in_one_line(tmp_path, capsys):
    opened(tmp_path).close()
    assert capsys.readouterr().out == "Done: no step was taken.\n"
    assert not (tmp_path / "loss.png").exists()


# Bad places and missing packages


def test_an_output_folder_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir '.*file/run' cannot be written: Not a directory"):
        check(planned(tmp_path / "file" / "run").config)
    with pytest.raises(ConfigError, match="output_dir"):
        opened(tmp_path / "file" / "run")


def test_missing_packages_are_all_named_before_the_run_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = planned(tmp_path, wandb_project="mine", tensorboard_dir=str(tmp_path / "tb")).config
    with pytest.raises(ConfigError) as error:
        check(config)
    assert [text.split(" ")[0] for text in error.value.problems] == ["tensorboard_dir", "wandb_project"]
    assert "pip install wandb" in str(error.value)


def test_services_that_nobody_asked_for_are_not_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check(planned(tmp_path, csv_dir=str(tmp_path / "csv")).config)


# Services


def test_the_log_needs_neither_torch_nor_deepspeed_nor_matplotlib_to_be_imported():
    import subprocess

    heavy = {"torch", "deepspeed", "matplotlib", "megatron"}
    code = f"import sys, megaaccum.pretrain.metrics.run_log; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
