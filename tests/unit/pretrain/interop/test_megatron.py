"""Flags of Megatron-LM and Megatron-DeepSpeed, read by Megatron's own parser."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaaccum.config import resolve
from megaaccum.config.keys import all_keys, value
from megaaccum.config.megatron_arguments import handled, listed, lists
from megaaccum.optim.lr_schedule import scheduler_arguments
from megaaccum.pretrain.interop.launch_script import Launch
from megaaccum.pretrain.interop.load import load, read
from megaaccum.pretrain.interop.megatron.parser import built_fields, defaults, model_fields, parse, parser
from megaaccum.pretrain.interop.megatron.read_flags import read_flags

DATA = Path(__file__).parent / "data"
GENERATOR = runpy.run_path(str(Path(__file__).parents[4] / "docs" / "gen_megatron_flags.py"))

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128"
    " --tokenizer-type NullTokenizer --data-path d"
)
"""A whole list that Megatron accepts."""


def some(text: str, **options: object):
    """The reading of a few flags."""
    return read_flags(text.split(), whole=False, **options)


def whole(text: str, *, world_size: int = 1):
    """The plan of BASE with more flags."""
    config, problems = read(launch=Launch("pretrain_gpt.py", f"{BASE} {text}".split(), "s.sh", Path("."), world_size))
    assert problems == []
    return resolve(config, world_size=world_size)


def refusals(text: str, *, world_size: int | None = 1) -> list[str]:
    return read(launch=Launch("pretrain_gpt.py", f"{BASE} {text}".split(), "s.sh", Path("."), world_size))[1]


def config_of(text: str):
    config, problems = read(launch=Launch("pretrain_gpt.py", f"{BASE} {text}".split(), "s.sh", Path("."), 1))
    assert problems == []
    return config


# --- the lists -------------------------------------------------------------------------------------------------------


def test_every_argument_of_both_parsers_goes_exactly_one_way():
    names = {action.dest for action in parser()._actions}
    ways = {name: GENERATOR["verdict_of"](name) for name in names}
    assert set(ways.values()) == {"key", "rule", "model", "run", "note", "refuse"}
    in_lists = [name for row in lists() for name in row.names]
    assert len(in_lists) == len(set(in_lists))
    assert set(in_lists) <= names
    assert not set(in_lists) & all_keys().keys()
    assert all(row.why and (row.instead or row.verdict != "refuse") for row in lists())


def test_what_reaches_the_builder_is_a_field_of_the_installed_version():
    assert handled("owned_fields") & model_fields().keys()
    assert len([name for name in defaults() if GENERATOR["verdict_of"](name) == "model"]) > 50


def test_the_page_of_the_documentation_is_the_tables():
    written = GENERATOR["PAGE"].read_text(encoding="utf-8")
    assert written == GENERATOR["page"](), "run: python docs/gen_megatron_flags.py"


# --- one flag at a time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-layers 4 --hidden-size=256", {"num_layers": 4, "hidden_size": 256}),
        ("--disable-bias-linear --swiglu", {"add_bias_linear": False, "swiglu": True}),
        ("--grad-reduce-in-bf16", {"grad_reduce_dtype": "bf16"}),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--recompute-modules core_attn mlp", {"recompute_modules": ["core_attn", "mlp"]}),
        ("--data-path 0.3 a 0.7 b", {"data_path": ["0.3", "a", "0.7", "b"]}),
        ("--split '99,1,0'", {"split": "99,1,0"}),
        ("--moe-layer-freq ([0]*1+[1]*2)", {"moe_layer_freq": [0, 1, 1]}),
        ("--num-virtual-stages-per-pipeline-rank 2", {"virtual_pipeline_model_parallel_size": 2}),
        ("--tokenizer-type HFTokenizer", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--normalization rmsnorm --layernorm-epsilon 1e-6", {"normalization": "RMSNorm", "norm_epsilon": 1e-6}),
        ("--ds-sequence-parallel-size 4", {"context_parallel_size": 4}),
        ("--checkpoint-activations --checkpoint-num-layers 2", {
            "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2,
        }),
        ("--group-query-attention --num-query-groups 8", {"num_query_groups": 8}),
        ("--num-key-value-heads 8", {"num_query_groups": 8}),
        ("--use-rotary-position-embeddings --no-position-embedding", {"position_embedding_type": "rope"}),
        ("--fp8-format hybrid --fp8-amax-history-len 4", {"fp8_format": "hybrid", "fp8_amax_history_len": 4}),
        ("--deepspeed --zero-stage 2 --no-pipeline-parallel", {"zero_stage": 2, "pipeline_model_parallel_size": 1}),
        ("--zero-stage 0", {"backend": "ddp"}),
        ("--zero-stage 0 --bf16", {"zero_stage": 1, "bf16": True}),
        ("--use-distributed-optimizer", {"backend": "megatron"}),
        ("--use-distributed-optimizer --zero-stage 3", {"zero_stage": 3}),
        ("--use-torch-fsdp2", {"backend": "fsdp2"}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero_stage": 2}),
        ("--enable-zbh1-pipeline", {"schedule": "zb-h1"}),
        ("--decoupled-lr 5e-4 --decoupled-min-lr 1e-5", {"decoupled_lr": 5e-4, "decoupled_min_lr": 1e-5}),
        ("--exit-interval 5 --exit-duration-in-mins 3", {"exit_interval": 5, "exit_duration_in_mins": 3.0}),
        ("--eval-iters 0", {"eval_iters": 0}),
        ("--fim-data --fim-rate 0.9 --fim-eod-token <e>", {"fim_data": True, "fim_rate": 0.9, "fim_eod_token": "<e>"}),
        ("--optimizer adam --dataloader-type single --null-tokenizer-pad-id -1", {"optimizer": "adam"}),
        ("--optimizer dist_muon --muon-nesterov --muon-no-split-qkv --muon-scale-mode unit_rms_norm", {
            "optimizer": "muon", "muon_nesterov": True, "muon_split_qkv": False, "muon_scale_mode": "unit_rms_norm",
        }),
        ("--grad_accum_steps 8 --dbs 4 --no-save-at-end", {
            "grad_accum_steps": 8, "device_batch_size": 4, "save_at_end": False,
        }),
    ],
)  # fmt: skip
def test_a_flag_sets_its_key(text, expected):
    reading = some(text)
    assert reading.problems == []
    assert reading.values == expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--num-layerz 4", ["unknown flag --num-layerz", "--num-layers"]),
        ("--num-layers", ["--num-layers", "expected one argument"]),
        ("--num-layers four", ["--num-layers four", "invalid int value"]),
        ("--num-layers 4 5", ["unexpected 5"]),
        ("--cuda-graph-modules attention", ["--cuda-graph-modules attention", "attention"]),
        ("4 --bf16", ["unexpected 4", "--name value"]),
        ("--grad-accum-steps few", ["grad_accum_steps must be a whole number"]),
        ("--optimizer sgd", ["--optimizer sgd", "adam (AdamW), lion, muon or soap"]),
        ("--optimizer muon --muon-scalar-optimizer lion", ["--muon-scalar-optimizer lion", "adam"]),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise", ["2 blocks", "duplicated"]),
        ("--tokenizer-type NullTokenizer", ["needs --vocab-size"]),
        ("--tokenizer-type BertWordPieceCase", ["tokenizer_type must be one of GPT2BPETokenizer"]),
        ("--deepspeed --num-experts 64 --moe-loss-coeff 0.01", ["DeepSpeed's own MoE layer"]),
        ("--use-distributed-optimizer --backend ddp --grad-accum-steps", ["needs a value"]),
        ("--lr-decay-tokens 640", ["--seq-length must be given to make samples"]),
        ("--train-samples 640", ["--global-batch-size must be given"]),
        ("--deepspeed_config none.json", ["No such file"]),
        ("--spec a b", ["layers of one's own"]),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named_with_the_reason(text, parts):
    (told,) = some(text).problems
    assert all(part in told for part in parts), told


REFUSED = [name for row in lists() if row.verdict == "refuse" for name in row.names]
VALUES = {"dataloader_type": "cyclic", "exit_signal": "SIGUSR1"}


def something_else(name: str) -> str:
    """The flag of a refused argument, with a value that is not Megatron's default."""
    ways = [each for each in parser()._actions if each.dest == name]
    switches = [each for each in ways if each.nargs == 0 and each.const != defaults()[name]]
    if switches:
        return switches[0].option_strings[0]
    choices = [str(each) for each in ways[0].choices or () if each != defaults()[name]]
    made = choices[0] if choices else {int: 7, float: 0.7}.get(ways[0].type, "x")
    return f"{ways[0].option_strings[0]} {VALUES.get(name, made)}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_something_else_is_refused_with_the_reason(name):
    problems = some(something_else(name)).problems
    assert any(listed()[name].why in text for text in problems), problems


def test_all_problems_are_told_at_once():
    assert len(some("--lr fast --num-layers --optimizer sgd --unheard-of").problems) == 4


def test_notes_give_the_reason_and_the_last_of_two_equal_flags_holds():
    reading = some("--lr 1e-4 --lr 6e-5 --overlap-grad-reduce --overlap-param-gather --log-throughput")
    assert reading.values == {"lr": 6e-5}
    assert reading.notes[0] == "--lr 1e-4 and --lr 6e-5: the last one holds, as in Megatron."
    assert reading.notes[1].startswith("--overlap-grad-reduce, --overlap-param-gather: ")
    assert len(reading.notes) == 2


def test_another_surplus_of_a_blend_is_noted():
    (note,) = some("--mid-level-dataset-surplus 0.5").notes
    assert note.startswith("--mid-level-dataset-surplus 0.5: ")
    assert "samples come in another order" in note


SPANS = ("train_iters", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


def test_the_length_of_a_run_becomes_whole_steps_and_spans_of_its_schedule_stay_samples():
    reading = some("--train-samples 6405 --lr-decay-samples 3205 --lr-warmup-samples 15 --global-batch-size 64")
    assert [reading.values.get(key) for key in SPANS] == [100, 3205, 15, None]
    assert reading.notes == ["--train-samples 6405: train_iters 100, whole batches of 64 samples."]
    reading = some("--train-tokens 2048 --train-samples 960 --global-batch-size 16 --seq-length 4")
    assert reading.values["train_iters"] == 32
    reading = some("--lr-decay-tokens 1280 --lr-warmup-tokens 640 --global-batch-size 16 --seq-length 4")
    assert [reading.values[key] for key in SPANS[1:3]] == [320, 160]
    reading = some("--lr-warmup-tokens 642 --seq-length 4")
    assert reading.values["lr_warmup_samples"] == 160
    assert reading.notes == ["--lr-warmup-tokens 642: lr_warmup_samples 160, whole samples of 4 tokens."]


@pytest.mark.parametrize(
    ("text", "decay", "warmup", "anneal"),
    [
        ("--train-samples 6405", 6405, 0, None),
        ("--train-samples 6400 --lr-warmup-samples 15", 6400, 15, None),
        ("--train-samples 6400 --lr-decay-samples 6001 --lr-warmup-fraction 0.1", 6001, 600.1, None),
        ("--train-samples 6400 --lr-decay-style WSD --lr-wsd-decay-samples 1280 --rampup-batch-size 8 8 1600", 6400, 0,
         1280),
    ],
)  # fmt: skip
def test_spans_in_samples_are_megatrons_own(text, decay, warmup, anneal):
    """With a ramp an anneal of 1280 samples at the end of the run was 4352: the steps that 1280 make at its start."""
    flags = BASE.replace("--train-iters 10", text).replace("--global-batch-size 8", "--global-batch-size 64")
    config, problems = read(launch=Launch("pretrain_gpt.py", flags.split(), "s.sh", Path("."), 1))
    assert problems == []
    plan = resolve(config, world_size=1)
    found = scheduler_arguments(plan.config, plan.ramp)
    assert (found["lr_decay_steps"], found["lr_warmup_steps"], found["wsd_decay_steps"]) == (decay, warmup, anneal)


def test_a_ramp_s_lengths_are_the_steps_that_it_takes():
    reading = some("--rampup-batch-size 16 16 160 --global-batch-size 64 --train-samples 6400")
    assert reading.values["rampup_batch_size"] == [16, 16, 160]
    # 16 * 4 + 32 * 2 + 48 + 64 * 97.4 samples.
    assert reading.values["train_iters"] == 4 + 2 + 1 + 97
    reading = some("--step-batch-size-schedule 0:4,1K:8 --seq-length 10 --train-samples 180 --micro-batch-size 2")
    assert reading.values["step_batch_size_schedule"] == "0:4,1K:8"
    assert reading.values["train_iters"] == 25 + 10


def test_data_paths_in_files(tmp_path):
    (tmp_path / "blend.txt").write_text("0.3 a\n0.7 b\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [1, "a"], "valid": ["b"], "test": []}))
    assert some("--data-args-path blend.txt", locate=tmp_path.joinpath).values == {
        "data_path": ["0.3", "a", "0.7", "b"]
    }
    reading = some("--per-split-data-args-path splits.json", locate=tmp_path.joinpath)
    assert reading.values == {"train_data_path": ["1", "a"], "valid_data_path": ["b"]}
    (tmp_path / "splits.json").write_text('{"train": ["a"]}')
    assert some("--per-split-data-args-path splits.json", locate=tmp_path.joinpath).problems


# --- whole lists -----------------------------------------------------------------------------------------------------


def test_megatrons_own_check_is_asked():
    (told,) = refusals("--deterministic-mode --tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2")
    assert told.startswith("s.sh: Megatron refuses this list: ")


def test_the_least_ranks_are_whole_groups_of_tp_and_of_experts():
    """6 for tp 2 and ep 3: the larger of the two groups is no multiple of the other."""
    text = "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 6 --disable-bias-linear --bf16"
    text += " --expert-model-parallel-size 3 --expert-tensor-parallel-size 1 --global-batch-size 6"
    assert refusals(text, world_size=None) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: a size is at least 1"),
        ("--num-attention-heads 0 --eval-interval 0", "--num-attention-heads 0: a size is at least 1"),
        ("--heterogeneous-layers-config-path nowhere.json", "No such file or directory: 'nowhere.json'"),
    ],
)
def test_what_megatrons_check_stumbles_over_is_named(flags, reason):
    told = [text for text in refusals(flags) if "Megatron refuses this list" in text]
    assert len(told) == 1 and reason in told[0]


def test_kernels_are_keys():
    model = whole("--bf16 --attention-backend flash --no-rope-fusion --cross-entropy-loss-fusion").config.model
    assert (model.attention_backend, model.apply_rope_fusion, model.cross_entropy_loss_fusion) == ("flash", False, True)
    assert not model.gradient_accumulation_fusion  # Megatron's default needs the buffers of Megatron's DDP


@pytest.mark.parametrize(
    ("flags", "kept"), [("", 0), ("--save-retain-interval 100", 1), ("--save-retain-interval 100 --keep_last 3", 3)]
)
def test_megatron_keeps_every_checkpoint_unless_it_is_told_which(flags, kept):
    assert whole(f"--save ck --save-interval 50 {flags}").config.run.keep_last == kept


def test_the_loss_is_megatrons_unless_tokens_are_asked_for():
    assert whole("").batch.loss_norm == "microbatch"
    assert whole("--calculate-per-token-loss").batch.loss_norm == "token"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4.0",
            {"rope_scaling": True, "rope_scaling_factor": 4.0},
        ),
        ("--apply-layernorm-1p", {"layernorm_zero_centered_gamma": True}),
        ("--attention-output-gate", {"attention_output_gate": True}),
        ("--window-size 8,0 --window-attn-skip-freq 2", {"window_size": (8, 0), "window_attn_skip_freq": 2}),
        ("--num-experts 4 --moe-shared-expert-gate --moe-shared-expert-intermediate-size 8 --disable-bias-linear",
         {"moe_shared_expert_gate": True}),
    ],
)  # fmt: skip
def test_fields_of_the_model_need_no_key(text, fields):
    assert whole(text).config.megatron == fields


def test_the_parts_of_gpt_oss_are_read():
    config = whole(
        "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable"
        " --window-size 127,0 --window-attn-skip-freq 2"
    ).config
    assert config.model.swiglu and config.model.quick_geglu
    assert config.megatron == {
        "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "softmax_type": "learnable",
        "window_size": (127, 0), "window_attn_skip_freq": 2,
    }  # fmt: skip


def test_a_layer_pattern_alone_makes_a_hybrid_model():
    """The width of its output layers' initial weights, as that of Megatron's own conversion of the same list."""
    from megatron.core.transformer import TransformerConfig

    config = config_of("--hybrid-layer-pattern M*M* --position-embedding-type none")
    assert some("--hybrid-layer-pattern M*M*").problems == []  # as a file that has num_layers besides
    assert config.megatron["is_hybrid_model"] is True
    words = f"{BASE} --hybrid-layer-pattern M*M* --mamba-num-groups 4 --position-embedding-type none"
    assert built_fields(parse(words.split()))["is_hybrid_model"] is True
    sizes = dict(num_layers=4, hidden_size=64, num_attention_heads=4)
    std = [
        TransformerConfig(**sizes, **fields).output_layer_init_method(torch.empty(500, 500)).std()
        for fields in ({"is_hybrid_model": config.megatron["is_hybrid_model"]}, {})
    ]
    assert std[0] == pytest.approx(0.02 / 2, rel=0.02)
    assert std[1] == pytest.approx(0.02 / 8**0.5, rel=0.02)


@pytest.mark.parametrize(
    "flag",
    ["--allow-ambiguous-pad-tokens", "--train-idx-path x", "--train-doc-idx-path x", "--train-sample-idx-path x",
     "--train-shuffle-idx-path x"],
)  # fmt: skip
def test_other_samples_than_megatrons_order_gives_are_refused(flag):
    (problem,) = some(flag).problems
    assert problem.startswith(f"{flag}: samples are drawn in Megatron's own seeded order")


@pytest.mark.parametrize(
    ("text", "note", "key", "expected"),
    [
        ("--moe-aux-loss-coeff 0.01 --moe-grouped-gemm", "0.01, --moe-grouped-gemm: no effect without num_experts",
         "moe_aux_loss_coeff", 0.0),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
         "--moe-aux-loss-coeff 0.01: no effect without a balancing loss", "moe_aux_loss_coeff", 0.0),
        ("--lr-decay-style cosine --lr-wsd-decay-style linear", "--lr-wsd-decay-style linear: no effect without"
         " lr_decay_style WSD", "lr_decay_style", "cosine"),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 1", "--first-last-layers-bf16, --num-layers-at-start"
         "-in-bf16 1: no effect without fp8_format", "first_last_layers_bf16", False),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --num-layers-at-end-in-bf16 1",
         "--num-layers-at-end-in-bf16 1: no effect without first_last_layers_bf16", "fp8_format", "hybrid"),
        ("--fp8-format hybrid --fp8-margin 2", "--fp8-format hybrid: no effect without --bf16: FP8 quantizes BF16",
         "fp8_format", None),
        ("--num-query-groups 2", "--num-query-groups 2: no effect without --group-query-attention",
         "num_query_groups", None),
        ("--use-precision-aware-optimizer --use-distributed-optimizer --main-grads-dtype fp32 --exp-avg-dtype fp32",
         "--use-precision-aware-optimizer: masters, moments and sums of gradients are FP32", "backend", "megatron"),
    ],
)  # fmt: skip
def test_a_flag_that_does_nothing_in_this_run_is_a_note(text, note, key, expected):
    config = config_of(text)
    assert any(note in each for each in config.notes), config.notes
    assert value(config, key) == expected
    plan = whole(text)
    assert any(note in each for each in plan.notes)


def test_states_of_a_precision_aware_optimizer_that_are_not_fp32_are_refused():
    (problem,) = refusals("--use-precision-aware-optimizer --use-distributed-optimizer --exp-avg-dtype bf16")
    assert "--exp-avg-dtype bf16: masters and moments are FP32" in problem


def test_two_balancing_losses():
    text = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type aux_loss seq_aux_loss"
    model = whole(f"{text} --moe-aux-loss-coeff 0.1 0.3").config.model
    assert model.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
    assert model.moe_aux_loss_coeff == [0.1, 0.3]


@pytest.mark.parametrize("flag", ["--cpu-optimizer", "--optimizer-cpu-offload"])
def test_the_optimizer_in_host_memory_is_deepspeeds(flag):
    sharding = whole(f"{flag} --bf16").config.sharding
    assert (sharding.backend, sharding.offload_optimizer) == ("deepspeed", "cpu")


def test_latent_attention_rotates_as_megatron_does_unless_a_file_says_otherwise(tmp_path):
    """Megatron's default there is YaRN, with whatever --rotary-scaling-factor says; a YAML file's is plain rope."""
    text = "--multi-latent-attention --kv-channels 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
    fields = config_of(f"{text} --rotary-scaling-factor 40 --mscale 0.5").megatron
    assert fields["rope_type"] == "yarn"
    assert "rotary_scaling_factor" not in fields  # 40 is the default of Megatron's configuration
    assert config_of(text).megatron["rotary_scaling_factor"] == 1.0
    (tmp_path / "run.yaml").write_text("multi_latent_attention: true\n")
    assert load(tmp_path / "run.yaml", ["--use-rope-scaling"]).megatron == {"rope_scaling": True}
    _, problems = read(tmp_path / "run.yaml", ["--yarn-beta-fast", "16"])
    assert "only a whole list" in problems[0]


def test_yarn_may_be_written_under_model(tmp_path):
    (tmp_path / "run.yaml").write_text("model: {position_embedding_type: yarn, yarn_beta_fast: 16, yarn_mscale: x}\n")
    config, (problem,) = read(tmp_path / "run.yaml")
    assert config.megatron == {"yarn_beta_fast": 16.0} and "run.yaml:1: yarn_mscale must be" in problem


def test_yarn_is_what_megatrons_conversion_makes_of_it():
    fields = whole("--position-embedding-type yarn --rotary-scaling-factor 4.0 --yarn-beta-fast 16").config.megatron
    assert (fields["yarn_rotary_scaling_factor"], fields["yarn_beta_fast"]) == (4.0, 16.0)


def test_embedding_and_loss_that_count_as_layers_are_a_layout():
    text = "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split"
    text += " --account-for-loss-in-pipeline-split --global-batch-size 16"
    assert whole(text, world_size=2).config.parallel.pipeline_model_parallel_layout == "Ett|ttL"


def test_an_underfilled_pipeline_is_an_error_unless_it_is_allowed():
    from megaaccum.errors import ConfigError

    with pytest.raises(ConfigError, match="allow_underfilled_pipeline"):
        whole("--pipeline-model-parallel-size 4 --global-batch-size 4", world_size=4)
    text = "--pipeline-model-parallel-size 4 --global-batch-size 4 --allow-underfilled-pipeline true"
    assert any("idle" in note for note in whole(text, world_size=4).notes)


def test_spread_experts_keep_the_distributed_optimizer_and_their_cut():
    text = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --use-distributed-optimizer"
    text += " --tensor-model-parallel-size 2 --sequence-parallel"
    plan = whole(text, world_size=4)
    assert (plan.config.sharding.backend, plan.layout.ep, plan.layout.etp) == ("megatron", 2, 2)


def test_sequence_parallel_without_tensor_parallel_is_noted():
    plan = whole("--sequence-parallel")
    assert not plan.config.parallel.sequence_parallel
    assert any("--sequence-parallel" in note for note in plan.notes)


def test_a_file_of_flags_and_the_command_line_over_it():
    config = load(DATA / "flags.txt", ["--lr", "5e-4", "--overlap-grad-reduce"])
    assert config.optimizer.lr == 5e-4
    assert config.origin["lr"] == "command line"
    assert config.origin["num_layers"] == "flags.txt"
    plan = resolve(config, world_size=4)
    assert (plan.layout.dp, plan.batch.num_microbatches) == (2, 8)


def test_megatrons_own_yaml_is_its_flags(tmp_path):
    (tmp_path / "m.yaml").write_text(
        "language_model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, activation_func: swiglu,\n"
        "  num_query_groups: 2, layernorm_zero_centered_gamma: true, add_bias_linear: false}\n"
        "model_parallel: {pipeline_model_parallel_size: 2, bf16: true}\n"
        "seq_length: 32\nmax_position_embeddings: 32\nmicro_batch_size: 1\nglobal_batch_size: 8\ntrain_iters: 10\n"
        "lr: 1e-3\nvocab_size: 128\ndata_path: [d]\n"
    )
    launch = Launch("pretrain_gpt.py", ["--yaml-cfg", "m.yaml"], "s.sh", tmp_path)
    config, problems = read(launch=launch)
    assert problems == []
    plan = resolve(config, world_size=2)
    model = plan.config.model
    assert (model.swiglu, model.num_query_groups, model.add_bias_linear, plan.layout.pp) == (True, 2, False, 2)
    assert (plan.config.optimizer.lr, plan.config.sharding.bf16) == (1e-3, True)
    assert config.megatron == {"layernorm_zero_centered_gamma": True}
    (tmp_path / "m.yaml").write_text("language_model: {activation_func: tanh, unheard_of: 3}\nqk_clip: true\n")
    _, problems = read(launch=launch)
    assert [word for word in ("tanh", "unheard_of: 3", "qk_clip") if any(word in text for text in problems)] == [
        "tanh", "unheard_of: 3", "qk_clip"
    ]  # fmt: skip


# --- YAML ------------------------------------------------------------------------------------------------------------


def test_a_yaml_may_hold_fields_of_megatrons_model(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  num_layers: 4\n  layernorm_zero_centered_gamma: true\n  attention_output_gate: yes\n")
    assert load(path).megatron == {"layernorm_zero_centered_gamma": True, "attention_output_gate": True}
    path.write_text("model:\n  layernorm_zero_centered_gama: true\n  attention_output_gate: 3\n  qk_clip: true\n")
    _, problems = read(path)
    assert [text.split(":")[1] for text in problems] == ["3", "4", "2"]
    assert "must be true or false" in problems[0]


def test_a_yaml_without_them_imports_no_megatron(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {num_layers: 4}\ndeepspeed: {steps_per_print: 5}\n")
    code = "import sys; from megaaccum.pretrain.interop.load import load\n"
    code += f"load({str(path)!r}, ['--lr', '1', '--no-save-at-end'])\n"
    code += "assert not {'torch', 'megatron', 'deepspeed'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_conversations_are_read_with_the_tokenizers_template_alone():
    flags = "--sft --sft-tokenizer-prompt-format {} --tokenizer-type SFTTokenizer"
    found = some(flags.format("default"))
    assert (found.values["sft"], found.values["assistant_only_loss"]) == (True, False)
    assert any(note.startswith("--sft: trains on all tokens") for note in found.notes)
    assert not found.problems and "tokenizer_type" not in found.values
    (problem,) = some("--sft").problems
    assert "--sft-tokenizer-prompt-format nemotron-h-aligned" in problem and "chat_template_path" in problem
