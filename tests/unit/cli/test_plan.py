"""`megaaccum plan` and `megaaccum calibrate` from the command line."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaaccum import cli
from megaaccum.config import resolve
from megaaccum.config.schema import ModelConfig, ParallelConfig
from megaaccum.lab.planner import calibration
from megaaccum.lab.planner.candidates import AXES, Limits
from megaaccum.lab.planner.cut import predicted_profile
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.search import search
from megaaccum.lab.planner.stages import layers_of_stages
from megaaccum.lab.planner.workload import make_workload
from megaaccum.lab.search.profile import LayerCost, Profile, write_profile
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics import receipts
from tests.support.configs import SMALL

LLAMA = str(Path(__file__).parents[3] / "configs" / "llama3_8b.yaml")
PLAN = ["plan", LLAMA, "--gpus", "64", "--gpu", "h100", "--max-cp", "1"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *PLAN, "--top", "3")
    assert code == 0
    assert "legal layouts" in out
    assert "64 x h100 (989.5 TFLOP/s, 79 GiB)" in out
    assert [line.split()[0] for line in out.splitlines() if "dp" in line] == ["1", "2", "3"]
    assert max(map(len, out.splitlines()[:-1])) <= 80  # the last names the sources
    assert "NVIDIA H100 SXM datasheet" in out


def test_the_wide_table_has_every_axis_and_kind(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--top", "3", "--wide")
    assert {"vpp", "dbs", "sync", "opt", "bubble", "tokens/s"} <= set(out.replace("┃", " ").split())
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│")] == ["1", "2", "3"]


def test_json_holds_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--json", "--top", "2", "--rank", "time")
    told: dict[str, Any] = json.loads(out)
    assert [row["rank"] for row in told["layouts"]] == [1, 2]
    first = told["layouts"][0]
    assert sum(first["memory_bytes"].values()) == pytest.approx(first["memory_total_bytes"])
    assert sum(first["seconds_by_part"].values()) == pytest.approx(first["seconds_per_step"])
    assert first["headroom_bytes"] == pytest.approx(told["hbm_bytes"] - first["memory_total_bytes"])
    assert 0.1 < first["mfu"] < 0.7
    assert first["tokens_per_second"] == pytest.approx(told["tokens_per_step"] / first["seconds_per_step"])


def test_explain_writes_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--explain", "1")
    assert "world_size = tp" in out
    assert "global_batch_size = device_batch_size" in out
    assert "arXiv 2205.05198" in out
    assert "MFU" in out
    code, _, err = run(capsys, *PLAN, "--explain", "99999")
    assert code == 2
    assert "give a number from 1 to" in err


def test_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert "num_attention_heads 32 is not divisible" in run(capsys, *PLAN, "--why-not", "tp=3")[1]
    for fix, wanted in (("pp=1", "zero=1"), ("tp=2", "tp=4")):  # the search looks at these if they are fixed
        _, out, _ = run(capsys, *PLAN, "--fix", fix, "--why-not", wanted)
        assert f"{wanted} fits, but the search looks at it only with --fix {wanted}: its fastest layout, " in out


def test_context_parallelism_that_a_search_leaves_out_is_planned_when_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    """`check` accepts both: 512 tokens a rank of a cp group, and a group of three ranks."""
    for wanted, more in (("cp=16", ("--gpus", "64")), ("cp=3", ("--gpus", "24", "--seq_length", "6144"))):
        argv = ("plan", LLAMA, "--gpu", "h100", *more)
        code, out, _ = run(capsys, *argv, "--why-not", wanted)
        assert code == 0
        assert f"{wanted} fits, but the search looks at it only with --fix {wanted}: its fastest layout, " in out
        _, out, _ = run(capsys, *argv, "--fix", wanted, "--json", "--top", "1")
        assert json.loads(out)["layouts"][0]["cp"] == int(wanted[3:])


def test_write_gives_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.yaml"
    code, *_ = run(capsys, *PLAN, "--write", str(out), "--row", "2")
    assert code == 0
    assert resolve(load(out), world_size=64).layout.world_size == 64


def test_what_plan_writes_check_accepts_and_plan_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without being told the number of GPUs: it is a key of the file."""
    out = tmp_path / "out.yaml"
    run(capsys, *PLAN, "--write", str(out))
    code, text, _ = run(capsys, "check", str(out))
    assert code == 0
    assert "world_size 64 (world_size)" in text
    _, text, _ = run(capsys, "plan", str(out), "--json", "--top", "1")
    assert json.loads(text)["gpus"] == 64


def test_sizes_of_a_deepspeed_json_do_not_hold_the_planned_batch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`--write` refused a row with another micro-batch, as the block disagreed with it."""
    path, out = tmp_path / "run.json", str(tmp_path / "out.yaml")
    block = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 7}
    keys = SMALL | {"pp_microbatches": None, "bf16": True, "vocab_size": 256, "mock_data": True}
    path.write_text(json.dumps(keys | {"deepspeed": block}))
    code, _, err = run(capsys, "plan", str(path), "--gpus", "4", "--fix", "mbs=2", "--write", out)
    assert code == 0, err
    config = load(out)
    assert resolve(config, world_size=4).batch.micro_batch_size == 2
    assert config.deepspeed == {"steps_per_print": 7}


def test_a_file_whose_batch_follows_from_its_layout_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", str(Path(LLAMA).with_name("tiny_cpu.yaml")), "--json", "--top", "1")
    told = json.loads(out)
    assert code == 0
    assert (told["gpus"], told["tokens_per_step"]) == (4, 32 * 128)  # mbs 2 * 4 chunks * 2 steps * dp 2


def test_every_fix_holds(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--fix", "pp=2,mbs=1", "--fix", "tp=2", "--schedule", "zb-h1", "--json", "--top=3")
    held = {tuple(row[axis] for axis in ("pp", "mbs", "tp", "schedule")) for row in json.loads(out)["layouts"]}
    assert held == {(2, 1, 2, "zb-h1")}


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_layout_on_the_command_line_is_not_set_aside(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was planned away without a word, as the layout of the file is."""
    keys = ["--tp", "4", "--micro_batch_size", "2", "--recompute_granularity", "full"]
    tiny = str(Path(LLAMA).with_name("tiny_cpu.yaml"))
    code, _, err = run(capsys, command, tiny, "--gpus", "4", "--global_batch_size", "32", *keys)
    assert code == 2
    assert "tensor_model_parallel_size is chosen by the planner" in err and "hold it by --fix tp=4." in err
    assert "--fix mbs=2." in err and "--fix recompute=full." in err


def test_two_schedules_that_are_held_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *PLAN, "--fix", "pp=2,schedule=1f1b", "--schedule", "zb-h1")
    assert (code, "'schedule=zb-h1' must read" in err) == (2, True)


def test_the_help_names_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "tune"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert {"h100", "b200", "mi300x"} <= set(capsys.readouterr().out.replace(",", " ").split())


def test_write_cuts_the_layers_by_their_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, words = tmp_path / "out.yaml", [*PLAN, "--fix", "pp=2,schedule=1f1b", "--write", str(tmp_path / "out.yaml")]
    _, _, err = run(capsys, *words)
    counts = layers_of_stages(*model_and_parallel(out))
    assert sum(counts) == 32
    assert counts[0] > counts[1]  # the head over 128,256 words is worth some layers
    assert "faster than the even split" in err
    run(capsys, *words, "--even")
    assert layers_of_stages(*model_and_parallel(out)) == [16, 16]


def test_stages_without_a_layer_between_the_ends_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Llama 3 405B has as many on 128 stages: the embedding and the head have a stage each."""
    out, words = tmp_path / "out.yaml", [*PLAN, "--num_layers", "30", "--fix", "pp=4,vpp=8,schedule=interleaved"]
    code, _, err = run(capsys, *words, "--write", str(out))
    assert (code, "layers: split evenly" in err) == (0, True)
    assert layers_of_stages(*model_and_parallel(out)) == [0, *[1] * 30, 0]


def test_write_cuts_by_measured_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, file = tmp_path / "out.yaml", tmp_path / "layers.json"
    words = [*PLAN, "--fix", "pp=2,schedule=1f1b", "--write", str(out), "--profile", str(file)]
    layer, head = LayerCost(forward=1, input_grad=1, weight_grad=1), LayerCost(forward=8, input_grad=8, weight_grad=8)
    write_profile(Profile(pattern="E" + "T" * 32 + "L", kinds={"E": layer, "T": layer, "L": head}), file)
    run(capsys, *words)
    first, last = layers_of_stages(*model_and_parallel(out))
    assert first - last in (6, 7, 8)
    further = Profile(pattern="E" + "T" * 32 + "PPL", kinds={"E": layer, "T": layer, "P": layer, "L": layer})
    write_profile(further, file)  # two layers that predict further tokens, on the head's stage
    assert run(capsys, *words, "--mtp_num_layers", "2")[0] == 0
    first, last = layers_of_stages(*model_and_parallel(out))
    assert first - last == 2
    write_profile(Profile(pattern="ETTL", kinds={"E": layer, "T": layer, "L": head}), file)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "the profile has 4" in err
    write_profile(Profile(pattern="E" + "TX" * 16 + "L", kinds={"E": layer, "T": layer, "X": layer, "L": head}), file)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert "the profile is of another model: its layer 2 is of kind X, where the model has T" in err
    file.write_text(file.read_text().replace('"X": {', '"Y": {'))
    code, _, err = run(capsys, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert "the model has layers of kind X, for which kinds has no costs" in err


def test_the_searched_schedule_is_a_column_with_the_costs_of_megaaccum_schedule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`schedule --search` on the planner's own costs finds what the column says."""
    words = [*PLAN, "--fix", "pp=2,schedule=1f1b,dbs=4,mbs=1,tp=1,sync=streaming,recompute=none", "--top", "1"]
    _, out, _ = run(capsys, *words, "--search", "--json")
    (row,) = json.loads(out)["layouts"]
    assert row["seconds_searched"] < row["seconds_per_step"]
    config = load(LLAMA, ["--bf16"])
    work = make_workload(config, world_size=64, hardware=load_hardware("h100"))
    at = search(work, Limits(fixed={axis: row[axis] for axis in AXES if axis != "zero"})).layouts
    model = work.time_model(work.memory_model())
    write_profile(predicted_profile(work, at), tmp_path / "layers.json")
    hop, m = float(model.hop_seconds(at)[0]), min(int(at.num_microbatches[0]), 8)
    text = f"schedule --pp 2 -m {m} --schedule 1f1b --profile {tmp_path}/layers.json --p2p {hop} --search --no-timeline"
    _, out, _ = run(capsys, *text.split(), "--iterations", "100")
    named, found = (float(line.split()[-7]) for line in out.splitlines()[1:3])
    gain = row["seconds_per_step"] - row["seconds_searched"]
    assert gain == pytest.approx(named - found, rel=1e-3)
    slow = predicted_profile(work, at)  # as a CPU measures them: the gain is the same share of the row's own flush
    kinds = {kind: replace(each, forward=1e3 * each.forward, input_grad=1e3 * each.input_grad,
                           weight_grad=1e3 * each.weight_grad) for kind, each in slow.kinds.items()}  # fmt: skip
    write_profile(replace(slow, kinds=kinds), tmp_path / "slow.json")
    _, out, _ = run(capsys, *words, "--search", "--json", "--profile", str(tmp_path / "slow.json"))
    (slow_row,) = json.loads(out)["layouts"]
    assert slow_row["seconds_searched"] == pytest.approx(row["seconds_searched"], rel=0.01)
    _, out, _ = run(capsys, *words, "--search")
    assert "searched" in out and "tokens" not in out.splitlines()[2]


def model_and_parallel(file: Path) -> tuple[ModelConfig, ParallelConfig]:
    config = resolve(load(file), world_size=64).config
    return config.model, config.parallel


def receipt(path: Path, config: str, *flags: str, seconds: float | None) -> str:
    plan = resolve(load(config, [*TP8, "--bf16", *flags]), world_size=64)
    content = receipts.opening(plan, data_digest="", vocab_size=128256, ranks=[], predicted={}, start_step=0)
    measured = {"measured": {"seconds_per_step": seconds}}
    path.write_text(json.dumps(content | measured | {"schema": receipts.SCHEMA, "version": receipts.VERSION}))
    return str(path)


TP8 = [
    *("--tensor_model_parallel_size", "8", "--pipeline_model_parallel_size", "1", "--sequence_parallel"),
    *("--micro_batch_size", "1", "--pp_microbatches", "1", "--grad_accum_steps", "64", "--global_batch_size", "512"),
]


def test_times_are_scaled_by_what_a_run_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The run's own layout comes out as it was measured, within what is not of the machine, and others move with it."""

    def seconds(*more: str, fix: str = "tp=8,cp=1,pp=1,mbs=1,recompute=none,sync=resident,dbs=1,zero=3") -> float:
        code, out, err = run(capsys, *PLAN, "--bf16", "--json", "--top", "1", "--fix", fix, *more)
        assert code == 0, err
        return float(json.loads(out)["layouts"][0]["seconds_per_step"])

    plain = seconds()
    slow = receipt(tmp_path / "slow.json", LLAMA, seconds=2 * plain)
    assert seconds("--from-run", slow) == pytest.approx(2 * plain, rel=0.03)
    _, out, _ = run(capsys, *PLAN, "--bf16", "--json", "--from-run", slow, "--memory_gib", "60")
    assert json.loads(out)["hbm_bytes"] == 60 * 2**30
    other = "tp=4,cp=1,pp=2,mbs=1,recompute=none,sync=resident"
    assert seconds("--from-run", slow, fix=other) == pytest.approx(2 * seconds(fix=other), rel=0.05)


def test_receipts_that_tell_nothing_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    longer = receipt(tmp_path / "other.json", LLAMA, "--num_layers", "64", seconds=9.0)
    short = receipt(tmp_path / "short.json", LLAMA, seconds=None)
    (tmp_path / "none.json").write_text("{}")
    for path, told in (
        (longer, "the run was of another model, with num_layers 64 and not 32"),
        (short, "no step after the first was measured"),
        (str(tmp_path / "none.json"), "is no receipt"),
        (str(tmp_path / "missing.json"), "cannot be read as a receipt"),
    ):
        code, _, err = run(capsys, *PLAN, "--from-run", path)
        assert code == 2
        assert told in err.replace("\n", " ")


def test_a_hostfile_says_gpus_and_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    _, out, _ = run(capsys, "plan", LLAMA, "--hostfile", str(hosts), "--gpu", "h200", "--json", "--rank", "time")
    told = json.loads(out)
    assert told["gpus"] == 8
    assert max(row["tp"] for row in told["layouts"]) <= 4
    hosts.write_text("a slots=4\nb slots=8\n")
    code, _, err = run(capsys, "plan", LLAMA, "--hostfile", str(hosts))
    assert code == 2
    assert "[4, 8] slots" in err


@pytest.mark.parametrize("option", ["--gpus", "--gpus-per-node", "--top", "--max-tp"])
@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_a_number_below_1_is_refused_by_its_option(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "plan", LLAMA, f"{option}={value}")
    assert f"argument {option}: {value}: give a whole number of at least 1" in capsys.readouterr().err


def test_a_schedule_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "schedule must be one of none, 1f1b" in run(capsys, *PLAN, "--schedule", "pipedream")[2]


def test_the_planner_imports_no_torch() -> None:
    script = (
        "import sys; from megaaccum import cli;"
        f"cli.main({[*PLAN, '--top', '1']!r});"
        "assert not {'torch', 'deepspeed', 'megatron'} & sys.modules.keys(), 'too much was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, stdout=subprocess.DEVNULL)


# --- calibrate -------------------------------------------------------------------------------------------------------


def test_the_curve_of_products_is_found_again() -> None:
    rate, halves = 600e12, (120.0, 90.0, 60.0)
    points = [
        (m, n, k, rate / (1 + halves[0] / m + halves[1] / n + halves[2] / k))
        for m in (256, 2048, 8192) for n in (256, 2048, 8192) for k in (256, 2048, 8192)
    ]  # fmt: skip
    found, sides = calibration.fit_products(points)
    assert found == pytest.approx(rate)
    assert sides == pytest.approx(halves)


def test_a_busy_machine_is_fitted_by_what_it_measured() -> None:
    """Large products that other work slowed down: halves below 1 were cut off and the rate was left at theirs, a ninth
    of what was measured."""
    sides = (256, 512, 1024)
    points = [(m, n, k, 100e9 * 256**2 / (n * k)) for m in sides for n in sides for k in sides]
    rate, halves = calibration.fit_products(points)
    predicted = [rate / (1 + sum(half / side for half, side in zip(halves, dims, strict=True))) for *dims, _ in points]
    median = statistics.median(flops for *_, flops in points)
    assert statistics.median(predicted) == pytest.approx(median, rel=0.05)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "abc"])
def test_a_time_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """`--seconds nan` repeated for ever."""
    monkeypatch.setattr(calibration, "measure", lambda like, **keys: pytest.fail("it measured"))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["calibrate", "mine", f"--seconds={seconds}"])
    assert f"argument --seconds: {seconds}: give a finite number above 0" in capsys.readouterr().err


def test_latency_and_bandwidth_are_found_again() -> None:
    ranks, alpha, beta = 8, 12e-6, 40e9
    points = [(s, (ranks - 1) * alpha + (ranks - 1) / ranks * s / beta) for s in calibration.MESSAGES]
    assert calibration.fit_link(points, ranks) == pytest.approx((alpha, beta))


def test_values_of_keys_are_no_name_of_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "calibrate", "--layers", LLAMA, "--recompute_granularity", "some")
    assert (code, "recompute_granularity must be one of" in err) == (2, True)
    assert "unexpected here" in run(capsys, "calibrate", "here", "--layers", LLAMA)[2]


def test_calibrate_writes_an_entry_that_plan_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "SIDES", (64, 128, 256))
    file = tmp_path / "made" / "hardware.yaml"
    assert run(capsys, "calibrate", "here", "--seconds", "0.002", "--output", str(file))[0] == 0
    here = load_hardware("here", file=file)
    assert 0 < here.device.peak < 1e14
    assert here.device.efficiency.gemm < 1
    code, out, _ = run(capsys, *PLAN[:-2], "--gpu", "h100", "--hardware", str(file), "--json", "--top", "1")
    assert code == 0
    assert json.loads(out)["gpu"] == "h100"
