"""Flags of Megatron-LM and Megatron-DeepSpeed read into megaaccum's keys."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from megaaccum.config import resolve
from megaaccum.config.keys import all_keys
from megaaccum.errors import ConfigError
from megaaccum.interop.load import load
from megaaccum.interop.megatron_args import parse, read_argument_file, read_flags
from megaaccum.interop.megatron_reading import Unresolved
from megaaccum.interop.megatron_table import flags

DATA = Path(__file__).parent / "data"


def values(text: str, **options: object) -> dict[str, object]:
    """What the flags set; they have no problem."""
    read, problems = parse(text.split(), **options)
    assert problems == []
    return read


def problem(text: str, **options: object) -> str:
    """The one problem of the flags."""
    _, problems = parse(text.split(), **options)
    assert len(problems) == 1, problems
    return problems[0]


# --- one flag at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-layers 4 --hidden-size=256", {"num_layers": 4, "hidden_size": 256}),
        ("--disable-bias-linear --swiglu", {"add_bias_linear": False, "swiglu": True}),
        ("--lr 3.0e-4 --adam-eps 1e-8", {"lr": 3e-4, "adam_eps": 1e-8}),
        ("--bf16", {"bf16": True}),
        ("--accumulate-allreduce-grads-in-fp32", {"grad_accum_dtype": "fp32", "grad_reduce_dtype": "fp32"}),
        ("--grad-reduce-in-bf16", {"grad_accum_dtype": "bf16", "grad_reduce_dtype": "bf16"}),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--recompute-modules core_attn mlp", {"recompute_modules": ["core_attn", "mlp"]}),
        ("--data-path 0.3 a 0.7 b", {"data_path": ["0.3", "a", "0.7", "b"]}),
        ("--data-path one", {"data_path": ["one"]}),
        ("--split 98,2,0", {"split": "98,2,0"}),
        ("--moe-layer-freq ([0]*1+[1]*2)", {"moe_layer_freq": [0, 1, 1]}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--moe-aux-loss-coeff 1e-2", {"moe_aux_loss_coeff": 0.01}),
        ("--num-layers-per-virtual-pipeline-stage 2", {"num_layers_per_virtual_pipeline_stage": 2}),
        ("--num-virtual-stages-per-pipeline-rank 2", {"virtual_pipeline_model_parallel_size": 2}),
        ("--pipeline-model-parallel-layout Et|(tt|)*29,m|L", {"pipeline_model_parallel_layout": "Et|(tt|)*29,m|L"}),
        ("--normalization rmsnorm", {"normalization": "RMSNorm"}),
        ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
        ("--ds-sequence-parallel-size 4", {"context_parallel_size": 4}),
        ("--calculate-per-token-loss", {"loss_norm": "token"}),
        ("--optimizer adam --dataloader-type single --null-tokenizer-pad-id -1", {}),
        ("--no-rl-partial-rollouts", {}),
    ],
)
def test_a_flag_sets_its_key(text, expected):
    assert values(text) == expected


def test_values_are_typed_as_the_keys():
    read = values("--distributed-timeout-minutes 30 --lr 1 --num-workers 0")
    assert [type(value) for value in read.values()] == [float, float, int]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--num-layerz 4", ["unknown flag --num-layerz", "--num-layers"]),
        ("--entirely-unheard-of", ["unknown flag --entirely-unheard-of."]),
        ("--num-layers", ["--num-layers needs a value"]),
        ("--num-layers four", ["--num-layers four", "num_layers must be a whole number"]),
        ("--num-layers 4 5", ["--num-layers takes one value", "unexpected 5"]),
        ("--bf16 true", ["--bf16 takes no value", "true"]),
        ("4 --bf16", ["unexpected 4", "--name value"]),
        ("--log-memory-interval often", ["--log-memory-interval takes a whole number"]),
        ("--position-embedding-type yarn", ["position_embedding_type must be one of learned_absolute, rope, none"]),
        (
            "--moe-router-load-balancing-type aux_loss sinkhorn",
            ["moe_router_load_balancing_type takes one value, not 2"],
        ),
        ("--num-layers 4 --encoder-num-layers 8", ["--num-layers 4 makes num_layers 4", "makes it 8", "keep one"]),
        ("--rl-partial-rollouts", ["reinforcement learning", "leave the flag out"]),
        ("--optimizer sgd", ["--optimizer sgd", "AdamW"]),
        ("--moe-layer-freq [1]*x", ["moe_layer_freq must be"]),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named_with_the_reason(text, parts):
    told = problem(text)
    assert all(part in told for part in parts), told


def test_refused_flags_of_one_family_make_one_problem():
    told = problem("--fp4-format e2m1 --fp8-output-proj --no-fp8-wgrad --fp8-interval 1")
    assert told.startswith("--fp4-format e2m1, --fp8-output-proj, --no-fp8-wgrad: ")
    assert "--fp8-interval" not in told


def test_flags_of_fp8_set_its_keys():
    values, problems = parse(
        "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max".split()
    )
    assert problems == []
    assert values == {
        "fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"
    }  # fmt: skip


def test_flags_without_effect_are_noted_with_the_reason():
    reading = read_flags("--overlap-grad-reduce --use-flash-attn --overlap-param-gather".split())
    assert reading.values == {}
    assert reading.problems == []
    assert len(reading.notes) == 2
    assert reading.notes[0].startswith("without effect: --overlap-grad-reduce, --overlap-param-gather. ")


def test_the_last_of_two_equal_flags_holds_and_is_noted():
    reading = read_flags("--lr 1e-4 --lr 6e-5".split())
    assert reading.values == {"lr": 6e-5}
    assert reading.notes == ["--lr 1e-4 and --lr 6e-5: the last one holds, as in Megatron."]


def test_all_problems_are_told_at_once():
    _, problems = parse("--lr fast --num-layers --fp4-format e2m1 --unheard-of".split())
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--grad-accum-steps 8", {"grad_accum_steps": 8}),
        ("--grad_accum_steps 8 --dbs 4", {"grad_accum_steps": 8, "device_batch_size": 4}),
        ("--schedule interleaved", {"schedule": "interleaved"}),
        ("--no-save-at-end", {"save_at_end": False}),
        ("--save-at-end", {"save_at_end": True}),
        ("--save-at-end false", {"save_at_end": False}),
    ],
)
def test_own_keys_stand_among_the_flags(text, expected):
    assert values(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--grad-accum-steps", "needs a value"),
        ("--grad-accum-steps 2 3", "takes one value, not 2"),
        ("--grad-accum-steps few", "grad_accum_steps must be a whole number"),
        ("--no-save-at-end true", "takes no value"),
        ("--bf16 --params-dtype fp8", "params_dtype must be one of"),
        ("--num-layers 4 --max-steps 3 --encoder-num-layers 5", "keep one of the two"),
    ],
)
def test_a_wrong_own_key_is_a_problem(text, part):
    assert part in problem(text)


# --- flags that work together ----------------------------------------------------------------------------------------


def test_lengths_in_samples_become_steps():
    read = values(
        "--train-samples 6400 --lr-decay-samples 3200 --lr-warmup-samples 640 --lr-wsd-decay-samples 64"
        " --global-batch-size 64"
    )
    assert {key: read[key] for key in read if key != "global_batch_size"} == {
        "train_iters": 100,
        "lr_decay_iters": 50,
        "lr_warmup_iters": 10,
        "lr_wsd_decay_iters": 1,
    }


def test_lengths_in_tokens_become_steps():
    sizes = "--global-batch-size 64 --seq-length 128"
    read = values(f"--train-tokens 819200 --lr-decay-tokens 409600 --lr-warmup-tokens 8192 {sizes}")
    assert (read["train_iters"], read["lr_decay_iters"], read["lr_warmup_iters"]) == (100, 50, 1)


def test_the_batch_that_lengths_need_may_stand_beside_the_list():
    assert values("--train-samples 640", beside={"global_batch_size": "64"}) == {"train_iters": 10}


def test_lengths_that_are_no_whole_steps_name_the_nearest_ones():
    told = problem("--train-samples 6405 --global-batch-size 64")
    assert "6405" in told
    assert "100.08 steps" in told
    assert "--train-samples 6400 or 6464, or --train-iters 100 or 101" in told
    told = problem("--lr-warmup-tokens 100 --global-batch-size 4 --seq-length 8")
    assert "a step takes 32 tokens (global_batch_size * seq_length)" in told
    assert "96 or 128, or --lr-warmup-iters 3 or 4" in told


def test_lengths_need_the_batch():
    assert "--global-batch-size must stand beside it" in problem("--train-samples 640")
    assert "--global-batch-size and --seq-length" in problem("--train-tokens 640 --global-batch-size 64")


def test_the_shorter_of_samples_and_tokens_holds():
    reading = read_flags("--train-samples 960 --train-tokens 2048 --global-batch-size 16 --seq-length 4".split())
    assert reading.values["train_iters"] == 32
    assert any("--train-samples. " in note for note in reading.notes)
    reading = read_flags("--train-samples 16 --train-tokens 2048 --global-batch-size 16 --seq-length 4".split())
    assert reading.values["train_iters"] == 1


def test_iterations_and_samples_that_disagree_are_a_problem():
    assert "keep one of the two" in problem("--train-iters 5 --train-samples 640 --global-batch-size 64")


def test_query_groups_need_their_switch():
    assert values("--group-query-attention --num-query-groups 8") == {"num_query_groups": 8}
    assert values("--group-query-attention") == {"num_query_groups": 1}
    assert values("--group-query-attention", beside={"num_query_groups": "8"}) == {}
    assert "without --group-query-attention" in problem("--num-query-groups 8")


def test_rotary_positions_by_their_older_names():
    assert values("--use-rotary-position-embeddings --no-position-embedding") == {"position_embedding_type": "rope"}
    assert values("--position-embedding-type rope --no-position-embedding") == {"position_embedding_type": "rope"}
    assert "--position-embedding-type rope" in problem("--no-position-embedding")
    assert "keep one" in problem("--use-rotary-position-embeddings --position-embedding-type none")


def test_tokenizers_that_can_be_read():
    assert values("--tokenizer-type HuggingFaceTokenizer --tokenizer-model t.json") == {"tokenizer_model": "t.json"}
    assert values("--tokenizer-type HFTokenizer --tokenizer-model t") == {"tokenizer_model": "t"}
    assert values("--tokenizer-model t.json") == {"tokenizer_model": "t.json"}
    assert values("--tokenizer-type NullTokenizer --vocab-size 1000") == {"vocab_size": 1000}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m", "ByteLevelBPETokenizer"),
        ("--vocab-file v --merge-file m", "--tokenizer-model tokenizer.json"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model t.model", "convert the SentencePiece model"),
        ("--tokenizer-type TikTokenizer --tokenizer-model t", "with the same vocabulary"),
        ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model"),
        ("--tokenizer-type NullTokenizer", "needs --vocab-size"),
    ],
)
def test_tokenizers_that_cannot_be_read_say_what_to_write(text, part):
    assert part in problem(text)


def test_data_paths_in_files(tmp_path):
    (tmp_path / "blend.txt").write_text("0.3 a\n0.7 b\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [1, "a"], "valid": ["b"], "test": []}))
    assert values("--data-args-path blend.txt", base_dir=tmp_path) == {"data_path": ["0.3", "a", "0.7", "b"]}
    read = values("--per-split-data-args-path splits.json", base_dir=tmp_path)
    assert read == {"train_data_path": ["1", "a"], "valid_data_path": ["b"]}
    (tmp_path / "splits.json").write_text('{"train": ["a"]}')
    assert "a list per split" in problem("--per-split-data-args-path splits.json", base_dir=tmp_path)
    assert "No such file" in problem("--data-args-path none.txt", base_dir=tmp_path)


def test_loss_scaling_is_without_effect_except_for_fp16():
    reading = read_flags("--bf16 --initial-loss-scale 65536 --hysteresis 2".split())
    assert reading.problems == []
    assert any("Only FP16" in note for note in reading.notes)
    scaled = values("--fp16 --loss-scale-window 500 --initial-loss-scale 4096 --hysteresis 1 --min-loss-scale 2")
    assert scaled == {
        "fp16": True, "loss_scale_window": 500, "initial_loss_scale": 4096.0, "hysteresis": 1, "min_loss_scale": 2.0
    }  # fmt: skip
    assert values("--fp16 --loss-scale 128")["loss_scale"] == 128.0
    assert "--hysteresis one: hysteresis must be" in problem("--fp16 --hysteresis one")


def test_experts_of_megatron_core():
    assert values("--num-experts 8 --moe-router-topk 2") == {"num_experts": 8, "moe_router_topk": 2}
    assert values("--num-experts 8 --moe-router-topk 2 --deepspeed")["num_experts"] == 8


def test_experts_of_megatron_deepspeed_are_dense_at_one_and_refused_above():
    reading = read_flags("--deepspeed --num-experts 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0".split())
    assert reading.values == {}
    assert reading.problems == []
    assert any("--moe-loss-coeff, --moe-train-capacity-factor" in note for note in reading.notes)
    told = problem("--deepspeed --num-experts 64 --moe-expert-parallel-size 8 --moe-loss-coeff 0.01")
    assert (
        "--num-experts 64 --expert-model-parallel-size 8 --moe-router-topk 1 --moe-layer-freq 2"
        " --moe-aux-loss-coeff 0.01" in told
    )
    assert "DeepSpeed's own MoE layer" in problem("--deepspeed --num-experts 64")
    assert "one number" in problem("--num-experts 64 128")


def test_the_distributed_optimizer_is_zero_1_unless_a_stage_is_given(tmp_path):
    assert values("--use-distributed-optimizer") == {"zero_stage": 1}
    assert values("--use-distributed-optimizer --zero-stage 3") == {"zero_stage": 3}
    assert values("--use-distributed-optimizer", beside={"zero_stage": 2}) == {}
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert "zero_stage" not in values("--use-distributed-optimizer --deepspeed_config ds.json", base_dir=tmp_path)


def test_checkpoint_activations_is_full_recompute():
    assert values("--checkpoint-activations --checkpoint-num-layers 2 --deepspeed-activation-checkpointing") == {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    }
    assert values("--checkpoint-activations")["recompute_num_layers"] == 1
    assert values("--checkpoint-num-layers 2 --deepspeed-activation-checkpointing") == {}


def test_deepspeeds_flags(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    read = values("--deepspeed --deepspeed_config ds.json --zero-stage 2 --no-pipeline-parallel", base_dir=tmp_path)
    assert read == {"deepspeed": {"train_batch_size": 8}, "zero_stage": 2, "pipeline_model_parallel_size": 1}
    assert values("--deepspeed-config ds.json", base_dir=tmp_path) == {"deepspeed": {"train_batch_size": 8}}
    assert "--backend ddp" in problem("--zero-stage 0")
    assert "zero_stage must be one of 1, 2, 3" in problem("--zero-stage 5")
    told = problem("--no-pipeline-parallel --pipeline-model-parallel-size 4")
    assert "--pipeline-model-parallel-size 4" in told
    assert "--no-pipeline-parallel" in told
    assert "No such file" in problem("--deepspeed_config none.json", base_dir=tmp_path)


def test_a_masked_loss_tells_how_it_is_averaged():
    assert any("loss_norm" in note for note in read_flags(["--eod-mask-loss"]).notes)
    assert read_flags(["--eod-mask-loss", "--calculate-per-token-loss"]).notes == []


# --- words of a script that only execution would tell ----------------------------------------------------------------


def test_an_unresolved_value_is_a_problem_of_its_flag_alone():
    unknown = Unresolved("$1/x", ("$1 on line 3 is an argument of the script",))
    _, problems = parse(["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", unknown, "--bf16"])
    assert problems == [
        "--tokenizer-model $1/x: $1 on line 3 is an argument of the script. Write its value into the file."
    ]
    assert parse(["--wandb-exp-name", unknown]) == ({}, [])
    _, problems = parse([Unresolved("--deepspeed_config=$X", ("$X on line 1 is not set in the file",))])
    assert len(problems) == 1


def test_an_unresolved_word_between_the_flags_is_a_problem():
    unknown = Unresolved("$EXTRA", ("$EXTRA on line 3 is not set in the file",))
    for argv in ([unknown, "--bf16"], ["--bf16", unknown], ["--grad-accum-steps", unknown]):
        _, problems = parse(argv)
        assert len(problems) == 1
        assert "$EXTRA on line 3 is not set in the file" in problems[0]
    _, problems = parse([Unresolved("--$DTYPE", ("$DTYPE on line 3 is not set in the file",))])
    assert "$DTYPE on line 3" in problems[0]


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "dp", "microbatches"),
    [("megatron_lm_gpt.sh", 16, 4, 8), ("megatron_deepspeed_gpt.sh", 32, 16, 8), ("flags.txt", 4, 2, 8)],
)
def test_launch_files_make_whole_plans(name, world_size, dp, microbatches):
    plan = resolve(load(DATA / name), world_size=world_size)
    assert plan.layout.dp == dp
    assert plan.batch.num_microbatches == microbatches


def test_a_megatron_lm_script_means_what_megatrons_own_parser_reads():
    from megatron.training.arguments import add_megatron_arguments

    words = read_argument_file(DATA / "megatron_lm_gpt.sh")
    theirs = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)
    ours, problems = parse(words)
    assert problems == []
    compared = 0
    for flag in dict.fromkeys(name for name in words if name.startswith("--")):
        for key, _ in flags()[flag.partition("=")[0]].sets:
            name = {"norm_epsilon": "layernorm_epsilon"}.get(key, key)
            their_value = getattr(theirs, name)
            assert str(ours[key]) == str(their_value) or ours[key] == their_value, key
            compared += 1
    assert compared > 30
    assert ours["train_iters"] * ours["global_batch_size"] == theirs.train_samples
    assert ours["num_query_groups"] == theirs.num_query_groups


def test_a_megatron_deepspeed_script_sets_these_keys():
    config = load(DATA / "megatron_deepspeed_gpt.sh")
    sharding, model = config.sharding, config.model
    assert (sharding.zero_stage, sharding.bf16, config.parallel.pipeline_model_parallel_size) == (3, True, 1)
    assert (model.recompute_granularity, model.recompute_method, model.num_experts) == ("full", "uniform", None)
    assert (config.run.train_iters, config.optimizer.lr_warmup_iters) == (100_000, 500)
    assert config.deepspeed["train_batch_size"] == 512


def test_the_command_line_outranks_a_file_of_flags():
    config = load(DATA / "flags.txt", ["--lr", "5e-4", "--overlap-grad-reduce"])
    assert config.optimizer.lr == 5e-4


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_argument_file(tmp_path / "none.sh")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.sh"):
        read_argument_file(tmp_path / "binary.sh")
    (tmp_path / "open.sh").write_text('torchrun pretrain_gpt.py --lr "1e-3')
    with pytest.raises(ConfigError, match=r"open\.sh: line 1"):
        read_argument_file(tmp_path / "open.sh")


def test_every_key_can_be_written_as_a_flag():
    for name in all_keys():
        _, problems = parse(["--" + name.replace("_", "-")])
        assert all("unknown" not in text for text in problems)
