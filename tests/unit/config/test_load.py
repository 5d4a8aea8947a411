"""Reading files and command lines: names, types, precedence, and every mistake at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaaccum.config import load
from megaaccum.config.coerce import NotOfType, coerce, evaluate_int_list
from megaaccum.config.keys import ALIASES, all_keys, canonical
from megaaccum.config.load import given
from megaaccum.errors import ConfigError
from tests.support import configs
from tests.support.configs import problems_of, write


def problems(*args: object) -> list[str]:
    return problems_of(load, *args)


def test_flat_keys_and_sections_read_alike(tmp_path: Path) -> None:
    flat = load(write(tmp_path, "num_layers: 4\nlr: 1e-4\n"))
    nested = load(write(tmp_path, "model:\n  num_layers: 4\noptimizer: {lr: 1e-4}\nrun:\n"))
    assert flat == nested
    assert (flat.model.num_layers, flat.optimizer.lr) == (4, 1e-4)
    assert flat.origin == {"num_layers": "run.yaml", "lr": "run.yaml"}


def test_json_is_read(tmp_path: Path) -> None:
    assert load(write(tmp_path, '{"num_layers": 4}', "run.json")).model.num_layers == 4


def test_the_names_of_other_programs_are_unknown_here(tmp_path: Path) -> None:
    texts = problems(write(tmp_path, "deepspeed: {steps_per_print: 5}\ndisable_bias_linear: true\n"))
    assert texts == [
        "run.yaml:1: commands read a DeepSpeed JSON, but Plan.of and Plan.load take megaaccum's keys alone: write those"
        " (`megaaccum convert CONFIG` translates the block).",
        "run.yaml:2: unknown key disable_bias_linear (did you mean add_bias_linear?).",
    ]


def test_an_empty_file_and_no_file_give_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing yet\n")) == load()


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_name_keys(alias: str) -> None:
    assert canonical(alias) == ALIASES[alias]
    assert alias not in all_keys()


@pytest.mark.parametrize(
    "words",
    [
        ["--dbs", "4"],
        ["--dbs=4"],
        ["--device-batch-size", "4"],
        ["--device_batch_size=4"],
        ["--batch.device_batch_size", "4"],
    ],
)
def test_ways_to_write_a_key_on_the_command_line(words: list[str]) -> None:
    config = load(None, words)
    assert config.batch.device_batch_size == 4
    assert config.origin == {"device_batch_size": "command line"}


def test_flags_and_their_negations() -> None:
    config = load(None, ["--bf16", "--no-save-at-end", "--no_add_bias_linear", "--swiglu", "false", "--no-load"])
    assert config.sharding.bf16
    assert not config.run.save_at_end
    assert not config.model.add_bias_linear
    assert not config.model.swiglu
    assert config.run.no_load


def test_lists_on_the_command_line_run_to_the_next_flag() -> None:
    config = load(None, ["--data-path", "0.3", "a", "0.7", "b", "--recompute_modules", "mlp,layernorm"])
    assert config.data.data_path == ["0.3", "a", "0.7", "b"]
    assert config.model.recompute_modules == ["mlp", "layernorm"]


def test_the_command_line_outranks_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, "lr: 1e-4\nmin_lr: 1e-5\n"), ["--lr", "2e-4"])
    assert (config.optimizer.lr, config.optimizer.min_lr) == (2e-4, 1e-5)
    assert config.origin == {"lr": "command line", "min_lr": "run.yaml"}


@pytest.mark.parametrize(
    ("text", "words", "kept", "lost"),
    [
        ("lr_warmup_fraction: 0.1", ["--lr_warmup_iters", "5"], "lr_warmup_iters", "lr_warmup_fraction"),
        ("lr_decay_iters: 9", ["--lr_decay_samples", "5"], "lr_decay_samples", "lr_decay_iters"),
        ("params_dtype: fp32", ["--bf16"], "bf16", "params_dtype"),
        ("num_layers_per_virtual_pipeline_stage: 2", ["--vpp", "2"], "virtual_pipeline_model_parallel_size",
         "num_layers_per_virtual_pipeline_stage"),
        ("data_path: [a]", ["--train_data_path", "b"], "train_data_path", "data_path"),
        ("zero_stage: 3", ["--backend", "ddp"], "backend", "zero_stage"),
        ("muon_momentum: 0.9", ["--optimizer", "adam"], "optimizer", "muon_momentum"),
    ],
)  # fmt: skip
def test_another_way_to_say_it_is_set_aside_too(
    tmp_path: Path, text: str, words: list[str], kept: str, lost: str
) -> None:
    config = load(write(tmp_path, text), words)
    assert given(config, kept)
    assert not given(config, lost)
    assert config.notes == [f"{lost} of the file is set aside: the command line gives {kept}."]


def test_what_needs_a_key_that_is_set_aside_is_set_aside_with_it(tmp_path: Path) -> None:
    config = load(write(tmp_path, "fp16: true\nloss_scale: 1024"), ["--bf16"])
    assert not given(config, "fp16") and not given(config, "loss_scale")
    assert config.notes == [
        f"{lost} of the file is set aside: the command line gives bf16." for lost in ("fp16", "loss_scale")
    ]
    config = load(write(tmp_path, "loss_scale: 1024"), ["--bf16"])
    assert given(config, "loss_scale"), "the file lacks fp16 already, which a rule reports"


def test_what_the_file_says_stays_if_it_has_an_effect(tmp_path: Path) -> None:
    config = load(write(tmp_path, "backend: ddp\nzero_stage: 2"), ["--backend", "deepspeed"])
    assert (config.sharding.zero_stage, config.notes) == (2, [])
    config = load(write(tmp_path, "zero_stage: 2\nbackend: ddp"), ["--lr", "1e-4"])
    assert (config.sharding.zero_stage, config.notes) == (2, []), "the command line has no part in it"


def test_an_unknown_key_is_told_with_the_nearest(tmp_path: Path) -> None:
    (text,) = problems(write(tmp_path, "num_layers: 4\nlr_decay_stlye: cosine\n"))
    assert text.startswith("run.yaml:2: unknown key lr_decay_stlye (did you mean lr_decay_style")


def test_an_unknown_flag_is_told_with_the_nearest() -> None:
    (text,) = problems(None, ["--grad_acum_steps", "4"])
    assert "--grad_acum_steps" in text
    assert "did you mean" in text


def test_a_key_in_the_wrong_section_is_told(tmp_path: Path) -> None:
    (text,) = problems(write(tmp_path, "model:\n  lr: 1e-4\n"))
    assert text == "run.yaml:2: lr belongs to section optimizer, not model."


@pytest.mark.parametrize(
    "text",
    ["lr: 1\nlr: 2\n", "lr: 1\noptimizer: {lr: 2}\n", "dbs: 1\ndevice_batch_size: 2\n", "optimizer:\n  lr: 1\n  lr: 2"],
)
def test_a_repeated_key_is_told_with_both_places(tmp_path: Path, text: str) -> None:
    (problem,) = problems(write(tmp_path, text))
    assert "was already given at run.yaml:" in problem


def test_the_last_of_two_flags_of_one_key_holds_with_a_note() -> None:
    config = load(None, ["--dbs", "4", "--device-batch-size", "8"])
    assert config.batch.device_batch_size == 8
    assert config.notes == ["--dbs 4 and --device-batch-size 8: the last one holds."]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_layers: four", "num_layers must be a whole number, not 'four'"),
        ("num_layers: 4.5", "num_layers must be a whole number, not 4.5"),
        ("num_layers: true", "num_layers must be a whole number, not True"),
        ("num_layers: null", "num_layers must be a whole number, not None"),
        ("lr: fast", "lr must be a number, not 'fast'"),
        ("lr: .nan", "lr must be a number"),
        ("bf16: maybe", "bf16 must be true or false, not 'maybe'"),
        ("bf16: 1", "bf16 must be true or false, not 1"),
        ("zero_stage: 4", "zero_stage must be one of 1, 2, 3, not 4"),
        ("lr_decay_style: cosin", "lr_decay_style must be one of constant, linear, cosine"),
        ("data_path: 3", "data_path must be a list of names, not 3"),
        ("moe_layer_freq: often", "moe_layer_freq must be a whole number or a list of whole numbers"),
    ],
)
def test_a_value_of_the_wrong_type_is_told(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = problems(write(tmp_path, text))
    assert problem.startswith(f"run.yaml:1: {expected}")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("lr: 1e-4", "lr", 1e-4),
        ("reduce_bucket_size: 5e8", "reduce_bucket_size", 500_000_000),
        ("lr_decay_style: wsd", "lr_decay_style", "WSD"),
        ("schedule: none", "schedule", "none"),
        ("offload_optimizer: null", "offload_optimizer", "none"),
        ("ffn_hidden_size: null", "ffn_hidden_size", None),
        ("ffn_hidden_size: none", "ffn_hidden_size", None),
        ("data_path: corpus", "data_path", ["corpus"]),
        ("zero_stage: '2'", "zero_stage", 2),
        ("zero_stage: 2.0", "zero_stage", 2),
        ("sync: Streaming", "sync", "streaming"),
        ("bf16: 'yes'", "bf16", True),
        ("moe_layer_freq: ([0]*3+[1]*2)", "moe_layer_freq", [0, 0, 0, 1, 1]),
        ("moe_layer_freq: 2", "moe_layer_freq", 2),
        ("seed: 7.0", "seed", 7),
    ],
)
def test_values_become_their_keys_type(tmp_path: Path, text: str, key: str, value: object) -> None:
    config = load(write(tmp_path, text))
    assert getattr(getattr(config, all_keys()[key].section), key) == value


@pytest.mark.parametrize("text", ["", "[1", "f()", "[1.5]", "[[1]]*2", "[1]*100000", "[1]+2", "3", "__import__('os')"])
def test_only_lists_of_numbers_are_evaluated(text: str) -> None:
    with pytest.raises(NotOfType):
        evaluate_int_list(text)


def test_infinity_is_no_number() -> None:
    with pytest.raises(NotOfType):
        coerce("inf", float)


def test_a_value_is_missing() -> None:
    assert problems(None, ["--lr", "--bf16"]) == ["--lr needs a value."]


def test_only_a_switch_is_negated() -> None:
    (problem,) = problems(None, ["--no-lr"])
    assert problem.startswith("command line: unknown key --no-lr")


def test_a_stray_word_is_told() -> None:
    assert problems(None, ["lr", "--bf16"]) == ["command line: unexpected lr; keys are written --key value."]


def test_too_many_values_are_told() -> None:
    assert problems(None, ["--lr", "1", "2"]) == ["--lr takes one value, not 2: 1 2."]


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "num_layers: x\nfoo: 1\nlr: 1\nlr: 2\n")
    assert len(problems(path, ["--seed", "y", "--tp"])) == 5


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    (text,) = problems(tmp_path / "absent.yaml")
    assert "cannot read the configuration file" in text
    assert "No such file" in text


def test_a_missing_file_that_a_wheel_installs_is_told_with_its_place(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    installed = tmp_path / "share" / "megaaccum" / "configs" / "tiny.yaml"
    installed.parent.mkdir(parents=True)
    installed.write_text("num_layers: 4\n")
    (text,) = problems(Path("configs/tiny.yaml"))
    assert f"No such file or directory; megaaccum's own is {installed}." in text


@pytest.mark.parametrize("text", ["lr: [1\n", "- lr\n- 1\n", "just words\n"])
def test_a_file_that_is_no_mapping_is_told(tmp_path: Path, text: str) -> None:
    (problem,) = problems(write(tmp_path, text))
    assert problem.startswith(("run.yaml: ", "run.yaml:2: "))


def test_names_of_recipes_are_keys() -> None:
    argv = (
        "--dbs 4 --max_grad_accum_steps 8 --save_every 5 --text_comparisons_every 3 --sample_every 2 --eval_every 7"
        " --warmup_ratio 0.25 --max_seq_len 64 --gradient_checkpointing"
    )
    config = load(None, argv.split())
    assert (config.batch.device_batch_size, config.batch.grad_accum_steps, config.model.seq_length) == (4, 8, 64)
    run = config.run
    assert (run.save_interval, run.text_comparisons_every, run.sample_every, run.eval_interval) == (5, 3, 2, 7)
    assert (config.optimizer.lr_warmup_fraction, config.model.gradient_checkpointing) == (0.25, True)


def test_core_metric_every_is_no_key_but_may_be_switched_off(tmp_path: Path) -> None:
    assert load(None, ["--core_metric_every", "0"]).run.text_comparisons_every == 0
    assert load(write(tmp_path, "core_metric_every: 0\n")).run.text_comparisons_every == 0
    with pytest.raises(ConfigError, match=r"core_metric_every.*did you mean --text_comparisons_every"):
        load(None, ["--core_metric_every", "3"])
    (problem,) = problems(write(tmp_path, "core_metric_every: 3\n"))
    assert problem == "run.yaml:1: unknown key core_metric_every (did you mean text_comparisons_every?)."


def test_gradient_checkpointing_is_full_recompute() -> None:
    model = configs.plan(gradient_checkpointing=True).config.model
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == ("full", "uniform", 1)
    with pytest.raises(ConfigError, match="recompute_granularity full, which is set to selective"):
        configs.plan(gradient_checkpointing=True, recompute_granularity="selective")


@pytest.mark.parametrize("name", ["lora_rank", "use_peft", "qlora", "adapter_dim"])
def test_adapters_are_refused_by_name(name):
    (problem,) = problems_of(load, None, [f"--{name}", "8"])
    assert f"--{name}: LoRA and other adapters are not trained here" in problem
    assert "unknown key" in problems_of(load, None, ["--explore", "8"])[0]
