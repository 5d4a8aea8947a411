"""Receipts: what each start of a run leaves, how it is read again, and what is said of files that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaaccum.errors import MegaaccumError
from megaaccum.observe.expert_loads import ExpertLoads
from megaaccum.pretrain.metrics import receipts
from megaaccum.pretrain.metrics.goodput import Goodput
from tests.support.configs import plan
from tests.unit.pretrain.metrics.test_run_log import Clock, opened, step


def written(folder: Path, number: int = 1) -> dict:
    return receipts.read(folder / "receipts" / f"start_{number}.json")


def test_a_start_writes_what_is_known_of_it_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_API_KEY", "sesame")
    monkeypatch.setenv(receipts.LAUNCHED, "12.5")
    of = plan(2, pipeline_model_parallel_size=2)
    opening = receipts.opening(
        of, data_digest="abc", vocab_size=100, ranks=[receipts.this_rank("H100", 8e10)], predicted={}, start_step=0
    )
    receipts.Receipt(tmp_path, opening)
    found = written(tmp_path)
    assert (found["number"], found["first_step"], found["launched"], found["outcome"]) == (1, 1, 12.5, None)
    assert found["environment"]["NCCL_DEBUG"] == "INFO" and "sesame" not in json.dumps(found)
    keys = found["configuration"]
    assert keys["model"]["num_layers"] == {"value": 8, "from": "test.yaml"}
    assert keys["batch"]["global_batch_size"] == {"value": 16, "from": "derived"}
    assert keys["optimizer"]["weight_decay"] == {"value": of.config.optimizer.weight_decay, "from": "default"}
    assert found["plan"]["digest"] == of.digest()
    assert found["plan"]["batch"]["num_microbatches"] == 16
    assert found["ranks"][0]["device"] == "H100"
    assert found["versions"]["torch"] and len(found["code"]["digest"]) == 16


def test_a_relative_path_is_one_of_the_folder_in_which_the_run_was_started(tmp_path, monkeypatch):
    started, elsewhere = tmp_path / "started", tmp_path / "elsewhere"
    for folder in (started / "model", elsewhere):
        folder.mkdir(parents=True)
    (started / "corpus.idx").touch()
    paths = dict(init_from="model", load="lost", data_path=["0.3", "corpus", "0.7", str(tmp_path / "other")])
    receipt = {"folder": str(started), "megatron": {}, "configuration": plan_configuration(**paths)}
    monkeypatch.chdir(elsewhere)
    config = receipts.config_of(receipt, Path("run"))
    assert (config.run.init_from, config.run.load) == (str(started / "model"), "lost")
    assert config.data.data_path == ["0.3", str(started / "corpus"), "0.7", str(tmp_path / "other")]
    (elsewhere / "model").mkdir()
    assert receipts.config_of(receipt, Path("run")).run.init_from == "model", "what has moved with the run is here"


def plan_configuration(**keys: object) -> dict:
    of = plan(1, **keys)
    opening = receipts.opening(of, data_digest="", vocab_size=100, ranks=[], predicted={}, start_step=0)
    return opening["configuration"]


def test_facts_of_ranks_are_written_out_once(tmp_path):
    """A receipt is written every minute, while thousands of ranks wait for the one that writes."""
    read: list[int] = []

    class Facts(dict):
        def items(self):
            read.append(self["rank"])
            return super().items()

    ranks = [Facts(receipts.this_rank("H100", 8e10), rank=rank) for rank in range(1000)]
    receipt = receipts.Receipt(tmp_path, {"first_step": 1, "ranks": ranks})
    receipt.event("skip", 2, "a value is not finite")
    receipt.write()
    receipt.close("completed", 3, 12.0)
    assert read == list(range(1000))
    found = written(tmp_path)
    assert len(found["ranks"]) == 1000 and found["ranks"][-1]["rank"] == 999
    assert [event["step"] for event in found["events"]] == [2] and found["outcome"]["step"] == 3
    assert list(found)[:3] == ["schema", "version", "number"]


def test_the_code_is_named_by_its_commit_only_in_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "megaaccum"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr("megaaccum.__file__", str(package / "__init__.py"))
    plain = receipts.code()
    assert (plain["commit"], plain["dirty"]) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = receipts.code()
    assert len(clean["commit"]) == 40 and clean["dirty"] is False and clean["digest"] == plain["digest"]
    (package / "__init__.py").write_text("changed = 1")
    changed = receipts.code()
    assert changed["dirty"] is True and changed["digest"] != plain["digest"] and changed["commit"] == clean["commit"]


def test_steps_events_and_the_end_are_in_it(tmp_path):
    clock = Clock()
    log = opened(tmp_path, clock=clock)
    for number in range(1, 5):
        clock.now += 2.0
        log.step(
            step(number, seconds_per_step=9.0 if number == 1 else number, seconds_data=0.5, bytes_all_gather_dp=10.0,
                 memory_gradients_bytes=100 * (number % 3), skipped=number == 3, note="overflow" * (number == 3))
        )  # fmt: skip
    log.event("alarm", 4, "too much")
    log.close("Stopped")
    found = written(tmp_path)
    measured = found["measured"]
    assert (measured["num_steps"], measured["seconds_of_first_step"], measured["seconds_per_step"]) == (4, 9.0, 3.0)
    assert (measured["bytes"], measured["memory"]) == ({"all_gather_dp": 10.0}, {"gradients": 200})
    assert measured["seconds"] == {"data": 0.5}
    assert [(each["kind"], each["step"], each["text"]) for each in found["events"]] == [
        ("skip", 3, "overflow"), ("alarm", 4, "too much"),
    ]  # fmt: skip
    assert found["outcome"] == {"text": "Stopped", "step": 4, "time": 8.0}


def test_seconds_that_are_compared_with_the_plan_are_of_its_batch(tmp_path):
    """Steps of a batch warm-up are shorter."""
    receipt = receipts.Receipt(tmp_path, {"plan": {"batch": {"global_batch_size": 32}}})
    for number in range(1, 11):
        size = 8 if number < 8 else 32
        receipt.step(step(number, seconds_per_step=size / 8.0, global_batch_size=size), Goodput())
    receipt.close("Done", 10, 0.0)
    assert written(tmp_path)["measured"]["seconds_per_step"] == 4.0


def test_the_loads_of_experts_are_logged_printed_and_kept(tmp_path, capsys):
    loads = ExpertLoads({1: 1.25, 4: 1.5}, rank_imbalance=1.1, dropped=0.125)
    log = opened(tmp_path)
    log.step(step(1, **loads.record()))
    log.close()
    assert "experts 1.50x the mean | 12.5% of tokens dropped" in capsys.readouterr().out
    assert written(tmp_path)["measured"]["experts"] == {
        "imbalance": 1.5, "rank_imbalance": 1.1, "dropped_share": 0.125, "imbalance_layer_1": 1.25,
        "imbalance_layer_4": 1.5,
    }  # fmt: skip


def test_what_a_step_left_out_is_in_it(tmp_path):
    log = opened(tmp_path)
    log.step(step(1))
    log.step(step(2, sanitized=1, note="not finite: micro-batch 3 of data-parallel rank 0"))
    log.close()
    (event,) = written(tmp_path)["events"]
    assert event == {"kind": "drop", "step": 2, "text": "not finite: micro-batch 3 of data-parallel rank 0"}


def test_the_program_that_started_a_rank_is_in_it_without_its_arguments_and_a_shell_is_none(tmp_path):
    code = "from megaaccum.pretrain.metrics.receipts import _launcher; print(_launcher())"
    by_python = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    told = subprocess.run(by_python, capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(by_python[:1])
    script = tmp_path / "start.py"
    script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])")
    by_script = [sys.executable, "-u", str(script), "--api-key", "sesame", "https://user:sesame@host"]
    told = subprocess.run(by_script, capture_output=True, text=True, check=True).stdout
    assert told.strip() == str([sys.executable, str(script)])
    by_module = [sys.executable, "-m", "timeit", "-n1", "-r1", by_python[2], "sesame"]
    told = subprocess.run(by_module, capture_output=True, text=True, check=False).stdout
    assert told.splitlines()[0] == str([sys.executable, "timeit"])
    by_a_shell = ["sh", "-c", f'{sys.executable} -c "{code}"; true']
    assert subprocess.run(by_a_shell, capture_output=True, text=True, check=True).stdout.strip() == "[]"


SECRETS = {
    "NCCL_API_KEY": "sesame", "TORCH_HUB_CRED": "sesame", "DS_AUTH": "sesame", "MASTER_PASSPHRASE": "sesame",
    "MEGAACCUM_PASSWD": "sesame", "SLURM_JWT": "sesame", "CUDA_PAT": "sesame", "TRITON_BEARER": "sesame",
    "WANDB_API_KEY": "sesame", "NVTE_SESSION": "sesame", "MASTER_ADDR": "https://user:sesame@host",
    "NCCL_NET": "hf_sesamesesamesesame",
}  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_of_the_environment_the_command_or_the_configuration_is_in_it(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, SECRETS[name])
    monkeypatch.setattr(sys, "argv", ["train", f"--{name.lower()}=x", "s3://key:sesame@bucket/x", "?token=sesame"])
    of = plan(2, pipeline_model_parallel_size=2, data_path=["https://user:sesame@host/corpus"], mock_data=None)
    opening = receipts.opening(of, data_digest="", vocab_size=1, ranks=[], predicted={}, start_step=0)
    receipts.Receipt(tmp_path, opening)
    text = (tmp_path / "receipts" / "start_1.json").read_text()
    assert "sesame" not in text and "@bucket/x" in text and "@host/corpus" in text


def test_a_killed_start_leaves_its_first_steps_and_what_was_written_each_minute(tmp_path):
    clock = Clock()
    log = opened(tmp_path, clock=clock)
    seen = []
    for number in range(1, 9):
        clock.now += 20.0
        log.step(step(number))
        seen.append(written(tmp_path)["measured"].get("num_steps", 0))
    assert seen == [0, 0, 3, 4, 4, 4, 7, 7]


def test_every_start_has_its_own_and_a_fresh_run_begins_again(tmp_path):
    opened(tmp_path)
    opened(tmp_path, start_step=5).failed(ValueError("no"))
    first, second = receipts.read_all(tmp_path)
    assert (first["number"], second["number"]) == (1, 2)
    assert second["events"] == [{"kind": "restart", "step": 5, "text": "continues after step 5"}]
    assert second["outcome"]["text"] == "ValueError: no"
    opened(tmp_path)
    assert [each["number"] for each in receipts.read_all(tmp_path)] == [1]
    assert sorted(path.name for path in (tmp_path / "receipts.1").iterdir()) == ["start_1.json", "start_2.json"]


def test_what_is_not_finite_is_strict_json(tmp_path):
    receipt = receipts.Receipt(tmp_path, {"a": [float("nan")], "b": {"c": float("inf")}})
    receipt.step({"step": 1, "seconds_per_step": 1.0}, Goodput())
    assert (written(tmp_path)["a"], written(tmp_path)["b"]) == (["nan"], {"c": "inf"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '{"schema": "megaaccum receipt", "version": 2, "code": {"version": "9.1"}}',
            ["version 2", "up to version 1", "9.1"],
        ),
        ('{"schema": "megaaccum receipt"}', ["no receipt"]),
        ("[1]", ["no receipt"]),
        ('{"schema": "megaac', ["cannot be read"]),
        (None, ["holds no receipts", "output_dir"]),
    ],
)
def test_files_that_are_no_receipts_are_one_clear_error(tmp_path, text, words):
    if text is not None:
        (tmp_path / "receipts").mkdir()
        (tmp_path / "receipts" / "start_1.json").write_text(text)
    with pytest.raises(MegaaccumError) as error:
        receipts.read_all(tmp_path)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_receipt_that_cannot_be_written_ends_the_run_as_a_journal_does(tmp_path):
    log = opened(tmp_path)
    (tmp_path / "receipts").rename(tmp_path / "gone")
    (tmp_path / "receipts").write_text("a file")
    for number in range(1, 4):
        log.step(step(number))
    log.step(step(4))
    assert "start_1.json cannot be written" in str(log.problem)


def test_reading_receipts_needs_no_torch():
    code = "import sys; from megaaccum.pretrain.metrics import receipts, goodput; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
