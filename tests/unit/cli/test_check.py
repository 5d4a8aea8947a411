"""`megaaccum check`: the plan as a reader sees it, and every error at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaaccum.cli import check
from megaaccum.config import resolve
from megaaccum.config.batch import bubble_fraction
from megaaccum.config.deepspeed_config import deepspeed_config
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.launch.hostfile import read_hostfile
from tests.support.check import run

TINY = str(Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml")

RUN = """
num_layers: 8
hidden_size: 64
num_attention_heads: 8
seq_length: 64
vocab_size: 1000
train_iters: 100
lr: 1.0e-3
pipeline_model_parallel_size: 2
micro_batch_size: 1
pp_microbatches: 8
global_batch_size: 32
"""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--bf16", "gradients added in fp32 and reduced in fp32, optimizer in fp32"),
        ("--bf16 --grad_accum_dtype bf16", "gradients added in bf16 and reduced in fp32, optimizer in fp32"),
        ("--bf16 --backend fsdp2 --grad_reduce_dtype bf16", "added in bf16 and reduced in bf16, optimizer in fp32"),
        ("--bf16 --backend megatron --grad_reduce_dtype bf16", "added in bf16 and reduced in bf16, optimizer in fp32"),
        ("--backend megatron --grad_reduce_dtype bf16", "added in fp32 and reduced in fp32, optimizer in fp32"),
        ("--bf16 --backend ddp", "added in fp32 and reduced in fp32, optimizer in fp32"),
        ("--params_dtype fp64 --backend ddp", "added in fp64 and reduced in fp64, optimizer in fp64\n"),
    ],
)
def test_the_precision_of_sums_is_that_of_the_backend(run_yaml, capsys, flags, words):
    assert check.main([run_yaml, "--world-size", "4", *flags.split()]) == 0
    assert words in capsys.readouterr().out


def test_experts_with_one_rank_each(run_yaml, capsys):
    """HSDP, of which the other modes are shown, has no two ranks that hold the same experts."""
    experts = "--num_experts 4 --disable_bias_linear --expert_model_parallel_size 4 --expert_tensor_parallel_size 1"
    flags = f"{experts} --pipeline_model_parallel_size 1 --global_batch_size 256 --world-size"
    for world_size, shown in (("4", False), ("16", True)):
        assert check.main([run_yaml, *flags.split(), world_size]) == 0
        assert ("fsdp2 x2 resident" in capsys.readouterr().out) is shown


def test_the_plan_is_written_out(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([run_yaml, "--world-size", "4"]) == 0
    text = capsys.readouterr().out
    for words in (
        "world_size = tp 1 * cp 1 * pp 2 * dp 2 = 4",
        "global_batch_size = device_batch_size 8 * grad_accum_steps 2 * data_parallel_size 2 = 32 sequences",
        "1 flush of 16 micro-batches per step",
        "1F1B: pp 2, 1 model chunk per rank",
        "layers by stage: 2 x 4",
        "1 / 17 = 5.9%",
        "vocabulary 1,000 (vocab_size)",
        "ZeRO-3 over dp 2",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--context_parallel_size 2", "DeepSpeed ZeRO-3 over dp 1 * cp 2"),
        ("--backend fsdp2 --data_parallel_replicas 2 --pipeline_model_parallel_size 1", "over dp 4 in 2 replicas"),
    ],
)
def test_the_ranks_that_share_a_shard_are_told(run_yaml: str, words: str, expected: str) -> None:
    assert expected in run(run_yaml, words.split(), world_size=4)


def test_what_the_command_line_recomputed_is_told(run_yaml: str) -> None:
    text = run(run_yaml, ["--dbs", "4", "--grad_accum_steps", "8"], world_size=4)
    assert "pp_microbatches 8 of the file is recomputed to 4" in text
    assert "global_batch_size 32 of the file is recomputed to 64" in text


def test_every_error_of_reading_and_resolving_at_once(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([run_yaml, "--world-size", "3", "--lr", "fast", "--hysteresis", "1", "--num_layers", "7"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == f"4 errors in {run_yaml}:"
    assert len(lines) == 5
    for words in ("lr must be a number", "world size 3", "num_layers 7", "hysteresis"):
        assert any(words in line for line in lines[1:]), words


def test_a_world_that_does_not_factor_is_told(run_yaml: str) -> None:
    with pytest.raises(ConfigError, match=r"world size 5 is not divisible by .* 2: run on 4 or 6 ranks"):
        run(run_yaml, world_size=5)


def test_what_deepspeed_is_given_can_be_printed(run_yaml: str) -> None:
    text = run(run_yaml, world_size=4, with_json=True)
    block = json.loads(text[text.index("DeepSpeed is given") :].split("\n", 1)[1])
    assert block == deepspeed_config(resolve(load(run_yaml), world_size=4))


def test_deepspeed_is_given_nothing_by_another_backend(run_yaml: str) -> None:
    text = run(run_yaml, ["--backend", "ddp", "--no-bf16"], world_size=4, with_json=True)
    assert text.endswith("DeepSpeed is given\n  nothing: backend is ddp")


@pytest.mark.parametrize("words", [["--vpp", "2"], ["--backend", "ddp"], ["--ep", "2", "--num_experts", "4"]])
def test_other_layouts_are_described(run_yaml: str, words: list[str]) -> None:
    text = run(run_yaml, words, world_size=4)
    expected = {
        "--vpp": "interleaved 1F1B: pp 2, 2 model chunks per rank",
        "--backend": "nothing is sharded",
        "--ep": "experts: ep 2 * etp 1 * pp 2 * expert dp 1 = 4",
    }
    assert expected[words[0]] in text


def test_the_bubble_shrinks_with_micro_batches_and_chunks() -> None:
    assert bubble_fraction(pp=1, vpp=1, microbatches=8) == 0
    assert bubble_fraction(pp=4, vpp=1, microbatches=9) == pytest.approx(0.25)
    assert bubble_fraction(pp=4, vpp=3, microbatches=8) == pytest.approx(3 / 27)


def test_a_dataset_that_is_not_here_leaves_only_the_parameters_open(tmp_path: Path, run_yaml: str) -> None:
    path = tmp_path / "elsewhere.yaml"
    path.write_text(RUN.replace("vocab_size: 1000", f"data_path: [{tmp_path}/absent]"))
    assert "parameters: unknown before the vocabulary is" in run(str(path), world_size=4)


def test_parameters_of_other_layers_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "gated.yaml"
    path.write_text(f"{RUN}model:\n  attention_output_gate: true\n")
    text = run(str(path), world_size=4)
    assert "parameters: not counted with attention_output_gate; bytes below are of plain layers" in text


# --- the world size --------------------------------------------------------------------------------------------------


def test_the_world_size_comes_from_the_nearest_source(
    run_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\n")
    assert "world_size 2 (the smallest" in run(run_yaml)
    assert "world_size 4 (nproc_per_node)" in run(run_yaml, ["--nproc_per_node", "4"])
    assert "world_size 8 (world_size)" in run(run_yaml, ["--world_size", "8", "--nproc_per_node", "4"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "world_size 4 (WORLD_SIZE in the environment)" in run(run_yaml, ["--nproc_per_node", "2"])
    assert "world_size 8 (2 hosts of" in run(run_yaml, hostfile=hosts)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE in the environment is 'many'"):
        run(run_yaml)


def test_memory_that_few_or_no_gpus_have_is_told() -> None:
    config = str(Path(TINY).with_name("llama3_405b.yaml"))
    assert re.search("more than an 80 GB GPU has: of the known GPUs .*b200,", run(config, world_size=128))
    assert "80 GB" not in run(str(Path(TINY).with_name("llama3_8b.yaml")), world_size=128)
    experts = run(str(Path(TINY).with_name("mixtral_8x7b.yaml")), world_size=32)
    assert "78.12 GiB is more than an 80 GB GPU has: of the known GPUs h100_96, h20, h200," in experts  # beside NCCL's
    with pytest.raises(ConfigError, match=r"memory_gib to what there is, at least \d+: of the known GPUs .*b200,"):
        run(config, ["--memory_gib", "80"], world_size=128)
    with pytest.raises(ConfigError, match=r"at least \d+: no known GPU has that, the largest is \w+ with \d+ GiB"):
        run(config, ["--memory_gib", "80", "--micro_batch_size", "8"], world_size=128)


def test_a_hostfile_and_a_world_size_exclude_each_other(run_yaml: str) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main([run_yaml, "--hostfile", "h", "--world-size", "4"])
    assert ended.value.code == 2


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# our cluster\n\nworker-1 slots=8  # new\nworker-2   slots=4\n")
    assert read_hostfile(path) == {"worker-1": 8, "worker-2": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-1\n", "hosts:1: 'worker-1' must read 'host slots=N'"),
        ("a slots=2\nb slots=x\n", "hosts:2: 'b slots=x' must read"),
        ("a slots=2\na slots=2\n", "hosts:2: host a was already given"),
        ("a slots=0\n", "hosts:1: a has slots=0"),
        ("# no host\n", "names no host"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert expected in str(caught.value)


def test_every_wrong_line_is_named_and_a_missing_hostfile_too(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\nb\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "absent")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_tiny_configuration_is_accepted_without_torch() -> None:
    """In a process of its own: checking a plan must not load torch, DeepSpeed or Megatron."""
    code = (
        "import sys; from megaaccum.cli.check import main; code = main(sys.argv[1:]);"
        " print([m for m in ('torch', 'deepspeed', 'megatron') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, TINY, "--world-size", "4"],
        capture_output=True,
        text=True,
        cwd=Path(TINY).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")


def test_help_tells_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(["--help"])
    assert ended.value.code == 0
    assert "--hostfile" in capsys.readouterr().out


def test_the_whole_ramp_is_shown_with_what_was_rounded() -> None:
    text = run(TINY, ["--rampup_batch_size", "8", "8", "200", "--global_batch_size", "64"])
    rows = text[text.index("Batch warm-up") :].splitlines()[2:8]
    assert rows[0].split()[-6:] == ["1", "*", "4", "=", "4", "20.0%"]
    assert [row.split("  ")[1] for row in rows] == ["1 to 4", "5", "6", "7", "8", "9 on"]
    assert "batches of 8 sequences are rounded up to 16" in text
    assert "Batch warm-up" not in run(TINY)


def test_the_arithmetic_of_the_learning_rate_is_shown() -> None:
    scaling = ["--lr_scaling", "sqrt", "--lr_reference_batch_size", "8"]
    text = run(TINY, [*scaling, "--batch_warmup_steps", "4", "--lr_scaling_follows_rampup"])
    assert "factor = (32 sequences / lr_reference_batch_size 8) ^ 0.5 = 2" in text
    assert "lr = 0.006 * 2 = 0.012" in text
    assert "min_lr = 0.0006 * 2 = 0.0012" in text
    assert "the step's own batch" in text
    assert "Learning rate" not in run(TINY)


def test_a_static_graph_has_no_warm_up_and_says_so() -> None:
    text = run(TINY, ["--static_graph", "--batch_warmup_steps", "8"])
    assert "static_graph: batch_warmup_steps 8 is set to 0." in text
    assert "static_graph: every step has this count and this shape" in text
    assert "Batch warm-up" not in text


def test_documents_have_their_bytes_and_what_packed_rows_cannot_do_is_said(run_yaml: str) -> None:
    assert "reset_attention_mask" not in run(run_yaml)
    keys = ["--reset_attention_mask", "--micro_batch_size", "1", "--position_embedding_type", "rope"]
    text = run(run_yaml, keys)
    tokens = int(text.partition("reset_attention_mask: a micro-batch has ")[2].split()[0].replace(",", ""))
    assert f"and no mask, of {tokens * tokens:,} bytes" in text
    assert "on a GPU with Transformer Engine" not in text
    predicts = [*keys, "--mtp_num_layers", "1"]
    assert "on a GPU with Transformer Engine: reset_attention_mask with" in run(run_yaml, predicts)
    assert "on a GPU" not in run(run_yaml, [*predicts, "--transformer_impl", "local"])


def test_a_start_that_is_verified_says_what_it_does_not_see(run_yaml: str) -> None:
    assert "verify_at_start" not in run(run_yaml)
    text = run(run_yaml, ["--verify_at_start"])
    assert "verify_at_start: two more forwards and backwards before the first step" in text
    assert "is not seen: sums over tp" in text


@pytest.mark.parametrize(
    ("name", "words"), [("zbv", "takes 1.0000 of its work, with a barrier 1.0"), ("gpipe", "gains nothing")]
)
def test_what_a_step_gains_without_a_barrier(run_yaml: str, name: str, words: str) -> None:
    keys = ["--schedule", name, "--speculative_step"]
    assert f"speculative_step {words}" in run(run_yaml, keys, world_size=4).replace(": a step", "")
