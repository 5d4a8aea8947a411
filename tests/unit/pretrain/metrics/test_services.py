"""Services that the run's log writes to: TensorBoard, CSV files and W&B."""

from __future__ import annotations

import csv
import json
import math
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megaaccum.errors import ConfigError
from megaaccum.pretrain.metrics.run_log import RunLog
from megaaccum.pretrain.metrics.services import configured_services
from tests.unit.pretrain.metrics.test_run_log import Clock, opened, planned, step


def test_a_deepspeed_json_names_the_folder_of_its_job(tmp_path):
    plan = planned(tmp_path, csv_dir=str(tmp_path / "csv"))
    for block, folder in (({}, "csv"), ({"job_name": "job"}, "csv/job"), ({"enabled": True}, "csv/DeepSpeedJobName")):
        plan.config.deepspeed = {"csv_monitor": block}
        log = RunLog(plan, is_writer=True, flops_per_step=8e12, peak_flops=None, clock=Clock())
        log.step(step(1))
        log.close()
        assert (tmp_path / folder / "train_loss.csv").read_text().split() == ["step,loss", "1,8.0"]


def test_a_block_that_is_off_stays_off(tmp_path):
    config = planned(tmp_path).config
    config.deepspeed = {"csv_monitor": {"enabled": False, "output_path": "csv"}}
    assert configured_services(config) == []


def test_tensorboard_and_csv_hold_each_step_once_after_a_resume(tmp_path):
    """Seven steps, a kill after the checkpoint of step 5, and the resumed rest."""
    places = dict(tensorboard_dir=str(tmp_path / "tb"), csv_dir=str(tmp_path / "csv"), log_interval=1)
    killed = opened(tmp_path, **places)
    for number in range(1, 8):
        killed.step(step(number, loss=100.0 if number > 5 else float(number)))
    resumed = opened(tmp_path, start_step=5, **places)
    for number in range(6, 9):
        resumed.step(step(number, loss=float(number)))
    resumed.evaluation(dict(step=8, loss=0.5))
    resumed.close()
    with (tmp_path / "csv" / "train_loss.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["step", "loss"], *[[str(n), str(float(n))] for n in range(1, 9)]]
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(n, float(n)) for n in range(1, 9)]
    assert [(e.step, e.value) for e in events.Scalars("valid/loss")] == [(8, 0.5)]
    assert "train/tokens_per_second" in events.Tags()["scalars"]


def test_tensorboard_holds_each_step_once_of_a_run_that_was_killed_before_its_first_checkpoint(tmp_path):
    for loss in (1.0, 2.0):
        log = opened(tmp_path, tensorboard_dir=str(tmp_path / "tb"), log_interval=1)
        log.evaluation(dict(step=0, loss=loss))
        log.step(step(1, loss=loss))
    log.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [[(e.step, e.value) for e in events.Scalars(f"{kind}/loss")] for kind in ("valid", "train")] == [
        [(0, 2.0)],
        [(1, 2.0)],
    ]


class FakeRun:
    """W&B itself needs an account; this takes its calls, and drops rows as W&B does: those of a step below the last."""

    def __init__(self, rows: list[dict]):
        self.rows, self.axes, self.ends = rows, {}, 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict, step: int | None = None) -> None:
        following = self.rows[-1]["_step"] + 1 if self.rows else 0
        if step is None or step >= following:
            self.rows.append(data | {"_step": following if step is None else step})

    def finish(self) -> None:
        self.ends += 1


@pytest.fixture
def inits(monkeypatch) -> list[dict]:
    """The keys of each wandb.init; what it returned is under "run". A run of the same id has the rows of before."""
    found: list[dict] = []

    def init(**keys):
        earlier = [each["run"].rows for each in found if each["id"] == keys["id"]]
        found.append(keys | {"run": FakeRun(earlier[0] if earlier else [])})
        return found[-1]["run"]

    fake = types.ModuleType("wandb")
    fake.init, fake.__spec__ = init, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return found


def test_wandb_is_given_project_names_and_steps(tmp_path, inits):
    log = opened(tmp_path, wandb_project="mine")
    log.step(dict(step=1, loss=2.0, grad_norm=math.inf, lr=1e-3, seconds_per_step=2.0))
    log.close()
    run = inits[0]["run"]
    (data,) = run.rows
    assert (inits[0]["project"], inits[0]["group"], inits[0]["entity"]) == ("mine", None, None)
    assert (data["train/loss"], data[run.axes["*"]]) == (2.0, 1)
    assert "train/grad_norm" not in data  # it was infinite
    assert run.ends == 1


def test_wandb_can_filter_runs_by_their_configuration(tmp_path, inits):
    """Resolved, as in the receipt, and like it without credentials."""
    plan = planned(tmp_path, wandb_project="mine")
    plan.config.optimizer.lr, plan.config.data.data_path = 2e-3, ["s3://me:hidden@host/text"]
    plan.config.parallel.pipeline_model_parallel_size, plan.config.megatron = 4, {"moe_shared_expert_gate": True}
    RunLog(plan, is_writer=True, flops_per_step=8e12, peak_flops=None, clock=Clock())
    given = inits[0]["config"]
    assert (given["lr"], given["pipeline_model_parallel_size"], given["moe_shared_expert_gate"]) == (2e-3, 4, True)
    assert given["data_path"] == ["s3://***@host/text"]
    assert json.loads(json.dumps(given)) == given


def test_wandb_has_the_steps_that_a_resume_repeats(tmp_path, inits):
    """W&B's own step only rises: rows of steps 3 and 4 would be dropped where an attempt that was killed had logged 4,
    and those up to step 1000 where `load_step` goes back from there."""
    for start_step, losses in ((0, {1: 5.0, 2: 4.0, 3: 3.0, 4: 9.0}), (2, {3: 2.5, 4: 2.0, 5: 1.0})):
        log = opened(tmp_path, start_step=start_step, wandb_project="mine")
        for number, loss in losses.items():
            log.step(step(number) | {"loss": loss})
    run = inits[1]["run"]
    shown = {row[run.axes.get("*", "_step")]: row["train/loss"] for row in run.rows}
    assert shown == {1: 5.0, 2: 4.0, 3: 2.5, 4: 2.0, 5: 1.0}


def test_wandb_goes_on_with_the_run_that_is_resumed_and_no_other(tmp_path, inits, monkeypatch):
    for start_step in (0, 5, 0):
        opened(tmp_path, start_step=start_step, wandb_project="mine")
    monkeypatch.setenv("WANDB_RUN_ID", "own")
    opened(tmp_path, start_step=5, wandb_project="mine")
    first, resumed, fresh, own = (keys["id"] for keys in inits)
    assert first == resumed != fresh
    assert own == "own"
    assert {keys["resume"] for keys in inits} == {"allow"}


def test_a_service_that_refuses_is_a_config_error(tmp_path, inits, monkeypatch):
    def refuse(**keys):
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match="wandb could not be opened: RuntimeError: no API key configured"):
        opened(tmp_path, wandb_project="mine")


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_service_that_fails_later_ends_no_run(tmp_path, inits, monkeypatch, capsys, method):
    """An error on the writing rank alone would end it while the others wait for it in the next step."""

    def fail(*_args, **_keys):
        raise RuntimeError("no connection")

    monkeypatch.setattr(FakeRun, method, fail)
    log = opened(tmp_path, wandb_project="mine", csv_dir=str(tmp_path / "csv"))
    for number in range(1, 4):
        log.step(step(number))
    log.close()
    told = "wandb is written no more: RuntimeError: no connection"
    assert capsys.readouterr().out.count(told) == 1
    assert len((tmp_path / "csv" / "train_loss.csv").read_text().split()) == 4
    receipt = json.loads((tmp_path / "receipts" / "start_1.json").read_text())
    assert [event["text"] for event in receipt["events"] if event["kind"] == "output"] == [told]
    assert receipt["outcome"]["text"] == "Done"


def test_a_fresh_start_moves_earlier_csv_files_aside(tmp_path):
    for loss in (1.0, 2.0):
        log = opened(tmp_path, csv_dir=str(tmp_path / "csv"))
        log.step(step(1, loss=loss))
    assert (tmp_path / "csv" / "train_loss.csv").read_text().split() == ["step,loss", "1,2.0"]
    assert (tmp_path / "csv" / "train_loss.1.csv").read_text().split() == ["step,loss", "1,1.0"]
