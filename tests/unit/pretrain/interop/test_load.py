"""The front door: every dialect in one configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaaccum.config.keys import value
from megaaccum.pretrain.interop.launch_script import Launch
from megaaccum.pretrain.interop.load import load, read
from tests.support.configs import problems_of, write


def problems(*args: object) -> list[str]:
    return problems_of(load, *args)


def test_a_deepspeed_block_may_be_a_file_beside_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"steps_per_print": 7}), "ds.json")
    assert load(write(tmp_path, "deepspeed: ds.json\n")).deepspeed == {"steps_per_print": 7}
    flags = ["--deepspeed_config", str(tmp_path / "ds.json")]
    assert load(write(tmp_path, ""), flags).deepspeed == {"steps_per_print": 7}


@pytest.mark.parametrize(
    ("json_text", "words"),
    [
        (None, "cannot read the DeepSpeed configuration"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"bf16": {}, "bf16": {}}', "gives bf16 more than once"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_read(tmp_path: Path, json_text: str | None, words: str) -> None:
    if json_text is not None:
        write(tmp_path, json_text, "ds.json")
    (text,) = problems(write(tmp_path, "deepspeed: ds.json\n"))
    assert text.startswith("run.yaml:1: ")
    assert words in text


def test_a_repeated_key_inside_a_deepspeed_block_is_told(tmp_path: Path) -> None:
    (text,) = problems(write(tmp_path, "deepspeed:\n  zero_optimization:\n    stage: 3\n    stage: 2\n"))
    assert text == "run.yaml:4: stage was already given at run.yaml:3; give it once."


def test_megatrons_own_flags_are_read_everywhere(tmp_path: Path) -> None:
    by_flag = load(write(tmp_path, "num_layers: 4\n"), ["--disable-bias-linear"])
    by_yaml = load(write(tmp_path, "disable_bias_linear: true\n"))
    for config in (by_flag, by_yaml):
        assert not config.model.add_bias_linear
    assert load(write(tmp_path, "disable_bias_linear: false\n")).model.add_bias_linear


@pytest.mark.parametrize(
    ("written", "line", "key", "expected", "note"),
    [
        ("--tensor-model-parallel-size 2", "--tp 4", "tensor_model_parallel_size", 4, "the last one holds"),
        ("--num-experts 4 --disable-bias-linear", "--num_moe_experts 8", "num_experts", 8, "the last one holds"),
        ("--norm-epsilon 1e-5", "--norm_epsilon=1e-6", "norm_epsilon", 1e-6, "the last one holds"),
        ("--disable-bias-linear", "--add_bias_linear true", "add_bias_linear", True, "is set aside: the command line"),
        ("--calculate-per-token-loss", "--loss-norm microbatch", "loss_norm", "microbatch", "is set aside"),
        ("--backend ddp", "--backend fsdp2", "backend", "fsdp2", "and --backend fsdp2: the last one holds"),
        ("--zero-stage 2", "--zero_stage 3 --zero_stage 1", "zero_stage", 1, "--zero-stage 1: the last one holds"),
        ("--bf16", "--params_dtype fp32", "params_dtype", "fp32", "bf16 of the file is set aside"),
    ],
)  # fmt: skip
def test_the_command_line_outranks_a_script_under_every_spelling(tmp_path, written, line, key, expected, note) -> None:
    flags = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
        " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128 --mock-data"
        " --tokenizer-type NullTokenizer "
    )
    launch = Launch("pretrain_gpt.py", (flags + written).split(), "s.sh", tmp_path, 8)
    config, problems = read(launch=launch, overrides=line.split())
    assert problems == []
    assert value(config, key) == expected
    assert any(note in each for each in config.notes), config.notes


def test_flags_mean_the_same_on_a_command_line_and_in_a_file_if_each_has_the_name_of_a_key(tmp_path: Path) -> None:
    flags = (
        "--num-layers=4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
        " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128 --fp16"
    )
    in_file, on_line = load(write(tmp_path, flags, "flags.txt")), load(None, flags.split())
    for key in ("loss_norm", "nonfinite", "hysteresis", "initial_loss_scale", "mock_data", "log_interval"):
        assert value(on_line, key) == value(in_file, key)
    assert (on_line.batch.loss_norm, on_line.step.nonfinite) == ("microbatch", "skip")
    own = load(None, flags.replace("--num-layers", "--num_layers").split())
    assert (own.batch.loss_norm, own.step.nonfinite) == ("token", "zero")


def test_a_line_in_megatrons_spelling_that_megatron_refuses_is_not_read_with_our_defaults(tmp_path: Path) -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    flags += " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128 --save ckpt"
    in_file, on_line = problems(write(tmp_path, flags, "flags.txt")), problems(None, flags.split())
    assert "save_interval" in in_file[0] and in_file[0].split(": ", 1)[1] == on_line[0].split(": ", 1)[1]
    assert "--num_layers has ours" in on_line[1]
    own = load(None, flags.replace("--num-layers", "--num_layers").split())
    assert (own.batch.loss_norm, own.step.nonfinite) == ("token", "zero")


def test_a_tokenizer_that_megatron_does_not_have_is_no_key_of_ours() -> None:
    """Each flag has the name of a key, and the value was read as a tokenizers file's."""
    for flag in ("--num-layers", "--num_layers"):
        (problem,) = problems(None, [flag, "4", "--tokenizer-type", "NONSENSE"])[:1]
        assert "tokenizer_type must be one of GPT2BPETokenizer, HuggingFaceTokenizer" in problem


def test_values_that_megatron_does_not_read_are_those_of_our_keys() -> None:
    config = load(None, ["--num-layers", "4", "--bf16", "true"])
    assert (config.sharding.bf16, config.batch.loss_norm, config.step.nonfinite) == (True, "token", "zero")


@pytest.mark.parametrize(("tokens", "samples"), [(3200, 100), (32000, 400)])
def test_of_a_decay_in_steps_and_one_in_tokens_the_first_to_end_holds(tokens: int, samples: int) -> None:
    line = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3"
        " --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr-decay-iters 50"
    )
    keys = load(None, [*line.split(), "--lr-decay-tokens", str(tokens)]).optimizer
    assert (keys.lr_decay_iters, keys.lr_decay_samples) == (None, samples)


def test_a_flag_of_megatrons_spelling_beside_a_file_keeps_the_file_s_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, "lr: 1e-3\n"), ["--num-layers", "4"])
    assert (config.model.num_layers, config.batch.loss_norm, config.step.nonfinite) == (4, "token", "zero")


def test_the_last_of_two_equal_keys_holds_on_a_command_line(tmp_path: Path) -> None:
    config = load(write(tmp_path, "lr: 1\n"), ["--backend", "ddp", "--dbs", "4", "--backend=fsdp2", "--dbs", "4"])
    assert (config.sharding.backend, config.batch.device_batch_size, config.optimizer.lr) == ("fsdp2", 4, 1)
    assert [note for note in config.notes if "holds" in note] == [
        "--backend ddp and --backend fsdp2: the last one holds."
    ]


def test_a_megatron_flag_and_the_key_it_stands_for_are_one_key_given_twice(tmp_path: Path) -> None:
    (text,) = problems(write(tmp_path, ""), ["--no-add-bias-linear", "--disable-bias-linear"])
    assert "already given" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun pretrain_gpt.py --lr 1", "--record -- bash"),
        ('--lr "1', "No closing quotation"),
        ("lr 1", "neither keys"),
    ],
)
def test_a_file_that_is_no_list_of_flags_says_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    assert words in problems(write(tmp_path, text, "run.sh"))[0]
