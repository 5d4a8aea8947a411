"""Settling a configuration: what is derived, what the command line recomputes, and what ranks compare."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from megaaccum.config import resolve
from megaaccum.config.keys import all_keys
from megaaccum.config.stage_layout import parse_layout
from megaaccum.errors import ConfigError
from megaaccum.lab.planner.stages import layers_of_stages
from megaaccum.pretrain.interop.load import load
from tests.support.configs import make, plan

FILE = """
num_layers: 8
hidden_size: 64
num_attention_heads: 8
seq_length: 64
train_iters: 100
lr: 1.0e-3
bf16: false
"""


def resolve_file(tmp_path: Path, text: str, words: list[str], world_size: int = 1):
    path = tmp_path / "run.yaml"
    path.write_text(FILE + text)
    return resolve(load(path, words), world_size=world_size)


def sizes(batch) -> tuple[int, ...]:
    """(micro, chunks, device, steps, global)."""
    return (
        batch.micro_batch_size,
        batch.pp_microbatches,
        batch.device_batch_size,
        batch.grad_accum_steps,
        batch.global_batch_size,
    )


def test_the_configuration_given_is_not_changed() -> None:
    config = make()
    before = copy.deepcopy(config)
    resolve(config, world_size=1)
    assert config == before


def test_everything_that_can_be_derived_is() -> None:
    config = plan(4, pipeline_model_parallel_size=2).config
    open_keys = {name for name, key in all_keys().items() if getattr(getattr(config, key.section), name) is None}
    assert open_keys == {
        "vocab_size", "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
        "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_num_groups",
        "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_z_loss_coeff",
        "moe_expert_capacity_factor",
        "q_lora_rank", "mtp_num_layers", "apply_rope_fusion", "fp8_format",
        "memory_gib", "virtual_pipeline_model_parallel_size", "schedule_trace",
        "num_layers_per_virtual_pipeline_stage",
        "microbatch_group_size_per_vp_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout", "lr_warmup_fraction", "lr_wsd_decay_iters", "train_data_path",
        "valid_data_path", "test_data_path", "tokenizer_model", "max_steps", "load", "load_step", "tensorboard_dir",
        "wandb_project", "csv_dir", "num_threads", "nproc_per_node",
        "world_size",
        "loss_scale", "muon_scalar_lr", "muon_scalar_weight_decay",
        "decoupled_lr", "decoupled_min_lr", "tokenizer_type", "vocab_file", "merge_file",
        "exit_interval", "exit_duration_in_mins", "save_retain_interval",
        "rampup_batch_size", "step_batch_size_schedule", "total_batch_size", "lr_reference_batch_size",
        "lr_reference_tokens", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix", "init_from",
        "chat_template_path", "verify_at_start", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples",
        "num_workers", "reproducible_tensor_blocks", "reproducible_context_blocks",
    }  # fmt: skip


SFT = dict(sft=True, tokenizer_model="m", data_path=["chats.jsonl"], vocab_size=100)


@pytest.mark.parametrize(
    ("keys", "derived"),
    [
        (dict(), dict(ffn_hidden_size=256, num_query_groups=8, kv_channels=8, max_position_embeddings=64)),
        (dict(swiglu=True, hidden_size=96), dict(ffn_hidden_size=256)),
        (dict(swiglu=True, hidden_size=16), dict(ffn_hidden_size=64)),
        (dict(reproducible="layout"), dict(reproducible_tensor_blocks=1, reproducible_context_blocks=1)),
        (dict(quick_geglu=True), dict(ffn_hidden_size=256, swiglu=True)),  # Megatron narrows swiglu alone
        (dict(num_experts=4), dict(moe_ffn_hidden_size=256)),
        (dict(recompute_granularity="full"), dict(recompute_method="uniform", recompute_num_layers=1)),
        (dict(recompute_granularity="selective"), dict(recompute_modules=["core_attn"])),
        (dict(bf16=True), dict(params_dtype="bf16")),
        (dict(params_dtype="bf16"), dict(bf16=True)),
        (dict(), dict(params_dtype="fp32", sync="resident", schedule="none")),
        (dict(), dict(lr_decay_iters=100, lr_warmup_iters=0, start_weight_decay=0.01, end_weight_decay=0.01)),
        (dict(lr_warmup_fraction=0.1), dict(lr_warmup_iters=None)),
        (dict(lr_decay_samples=99, lr_warmup_samples=9), dict(lr_decay_iters=None, lr_warmup_iters=None)),
        (dict(output_dir="out"), dict(save="out/checkpoints", data_cache_path="out/data")),
        (dict(add_bias_linear=True), dict(add_qkv_bias=True)),
        (dict(), dict(expert_tensor_parallel_size=1)),
        (SFT, dict(reset_attention_mask=True, reset_position_ids=True)),
        (SFT | dict(reset_attention_mask=False), dict(reset_attention_mask=False, reset_position_ids=True)),
    ],
)
def test_derived_values(keys: dict[str, object], derived: dict[str, object]) -> None:
    config = plan(1, **keys).config
    assert {name: getattr(getattr(config, all_keys()[name].section), name) for name in derived} == derived


@pytest.mark.parametrize(
    ("keys", "schedule", "vpp", "overlap"),
    [
        (dict(), "1f1b", 1, False),
        (dict(virtual_pipeline_model_parallel_size=1), "1f1b", 1, False),
        (dict(virtual_pipeline_model_parallel_size=2), "interleaved", 2, True),
        (dict(num_layers_per_virtual_pipeline_stage=1), "interleaved", 4, True),
        (dict(num_layers_per_virtual_pipeline_stage=4), "1f1b", 1, False),
        (dict(pipeline_model_parallel_layout="Ett|tt|tt|ttL"), "interleaved", 2, True),
        (dict(pipeline_model_parallel_layout="Et*3|t*5L"), "1f1b", 1, False),
    ],
)
def test_the_schedule_follows_the_chunks(keys: dict[str, object], schedule: str, vpp: int, overlap: bool) -> None:
    settled = plan(2, pipeline_model_parallel_size=2, **keys)
    parallel = settled.config.parallel
    assert (settled.layout.schedule, settled.layout.vpp) == (schedule, vpp)
    assert (parallel.overlap_p2p_comm, parallel.batch_p2p_comm) == (overlap, not overlap)


WSD: dict[str, object] = dict(lr_decay_style="WSD")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (dict(lr_warmup_iters=10), "lr_warmup_iters 10 leaves nothing of the 80 samples of lr_decay_iters 10: set"
         " lr_warmup_iters to at most 9, or lr_decay_iters (default train_iters) to at least 11."),
        (dict(lr_warmup_samples=101), "lr_warmup_samples 101 leaves nothing of the 80 samples of lr_decay_iters 10: set"
         " lr_warmup_samples to at most 79, or lr_decay_iters (default train_iters) to at least 13."),
        (dict(lr_warmup_iters=5, lr_decay_samples=40), "lr_warmup_iters 5 leaves nothing of the 40 samples of"
         " lr_decay_samples 40: set lr_warmup_iters to at most 4, or lr_decay_samples to at least 41."),
        (WSD | dict(lr_wsd_decay_iters=11), "lr_wsd_decay_iters 11 is more than the 80 samples of lr_decay_iters 10:"
         " set lr_wsd_decay_iters to at most 10, or lr_decay_iters (default train_iters) to at least 11."),
        (WSD | dict(lr_wsd_decay_samples=81), "lr_wsd_decay_samples 81 is more than the 80 samples of lr_decay_iters"
         " 10: set lr_wsd_decay_samples to at most 80, or lr_decay_iters (default train_iters) to at least 11."),
        (WSD | dict(lr_wsd_decay_iters=6, lr_decay_samples=40), "lr_wsd_decay_iters 6 is more than the 40 samples of"
         " lr_decay_samples 40: set lr_wsd_decay_iters to at most 5, or lr_decay_samples to at least 48."),
    ],
)  # fmt: skip
def test_spans_of_the_schedule_are_compared_in_samples(keys: dict[str, object], told: str) -> None:
    size = dict(micro_batch_size=2, global_batch_size=8, grad_accum_steps=None, pp_microbatches=None, train_iters=10)
    with pytest.raises(ConfigError) as error:
        plan(1, **size | keys)
    assert error.value.problems == [told]


def test_the_layout_multiplies_to_the_world() -> None:
    at = plan(
        16,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        sequence_parallel=True,
        num_experts=4,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    ).layout
    assert (at.tp, at.cp, at.pp, at.dp) == (2, 2, 2, 2)
    assert (at.ep, at.etp, at.edp) == (4, 1, 2)


def test_what_costs_time_where_a_kernel_is_missing_is_noted() -> None:
    experts = plan(num_experts=8, add_bias_linear=False, moe_grouped_gemm=True)
    assert any("one product for a rank's 8 experts" in note for note in experts.notes)
    split = plan(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, schedule="zb-h1")
    assert any("2 of a layer's collectives per micro-batch are waited for" in note for note in split.notes)
    assert plan(4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, bf16=True).notes == []


@pytest.mark.parametrize(
    ("keys", "fields", "words"),
    [
        ({}, {"moe_flex_dispatcher_backend": "deepep"}, "no effect with moe_token_dispatcher_type alltoall"),
        ({"moe_token_dispatcher_type": "flex"}, {"moe_deepep_num_sms": 20}, "needs GPUs and a library of its own"),
        ({}, {"moe_shared_expert_overlap": True}, "no effect, as moe_shared_expert_intermediate_size is not set"),
        (
            {"moe_shared_expert_intermediate_size": 32},
            {"moe_shared_expert_overlap": True},
            "under the all-to-all on a GPU, and after it on a CPU",
        ),
    ],
)
def test_what_is_asked_of_the_experts_traffic_without_effect_is_noted(keys, fields, words) -> None:
    asked = make(num_experts=4, add_bias_linear=False, **keys)
    asked.megatron |= fields
    assert [words in note for note in resolve(asked, world_size=1).notes].count(True) == 1


# --- the command line over the file's batch --------------------------------------------------------------------------


def test_a_larger_batch_on_the_command_line_recomputes_what_contradicts_it(tmp_path: Path) -> None:
    text = "micro_batch_size: 1\nnum_chunks: 8\nglobal_batch_size: 32\n"
    settled = resolve_file(tmp_path, text, ["--dbs", "4", "--grad_accum_steps", "8"], world_size=2)
    assert sizes(settled.batch) == (1, 4, 4, 8, 64)
    assert settled.notes == [
        "pp_microbatches 8 of the file is recomputed to 4: the command line gives device_batch_size 4,"
        " grad_accum_steps 8.",
        "global_batch_size 32 of the file is recomputed to 64: the command line gives device_batch_size 4,"
        " grad_accum_steps 8.",
    ]
    assert settled.config.batch.global_batch_size == 64


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # These say how large the batch is: the file's cut is kept where it fits.
        (["--dbs", "4"], (1, 4, 4, 2, 16)),
        (["--dbs", "16"], (1, 16, 16, 2, 64)),
        (["--grad_accum_steps", "4"], (1, 8, 8, 4, 64)),
        (["--global_batch_size", "64"], (1, 8, 8, 4, 64)),
        (["--dbs", "16", "--pp_microbatches", "4"], (4, 4, 16, 2, 64)),
        # These say how it is cut: the file's global batch is kept.
        (["--micro_batch_size", "2"], (2, 8, 16, 1, 32)),
        (["--pp_microbatches", "4"], (1, 4, 4, 4, 32)),
        (["--pp_microbatches", "8"], (1, 8, 8, 2, 32)),
    ],
)
def test_what_the_command_line_keeps_of_the_file(tmp_path: Path, words: list[str], expected: tuple[int, ...]) -> None:
    text = "micro_batch_size: 1\nnum_chunks: 8\ngrad_accum_steps: 2\nglobal_batch_size: 32\n"
    assert sizes(resolve_file(tmp_path, text, words, world_size=2).batch) == expected


def test_sizes_of_the_file_that_agree_with_the_command_line_make_no_note(tmp_path: Path) -> None:
    text = "micro_batch_size: 1\nnum_chunks: 8\nglobal_batch_size: 32\n"
    assert resolve_file(tmp_path, text, ["--dbs", "8", "--ga", "4"]).notes == []


def test_a_contradiction_in_the_file_shows_both_values(tmp_path: Path) -> None:
    text = "micro_batch_size: 1\nnum_chunks: 8\ngrad_accum_steps: 2\nglobal_batch_size: 32\n"
    with pytest.raises(ConfigError, match=r"global_batch_size 32 contradicts .* = 16"):
        resolve_file(tmp_path, text, [])


def test_a_contradiction_on_the_command_line_shows_both_values(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"device_batch_size 4 contradicts micro_batch_size 1 \* pp_microbatches 8 = 8"
    ):
        resolve_file(tmp_path, "", ["--dbs", "4", "--pp_microbatches", "8", "--micro_batch_size", "1"])


def test_the_command_line_does_not_hide_a_contradiction_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device_batch_size 4 contradicts"):
        resolve_file(tmp_path, "micro_batch_size: 1\nnum_chunks: 8\ndbs: 4\n", ["--ga", "2"])


def test_a_batch_without_any_size_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no batch size is given: set micro_batch_size and global_batch_size"):
        resolve_file(tmp_path, "", [])


# --- the digest ------------------------------------------------------------------------------------------------------


def test_the_digest_of_equal_plans_is_equal() -> None:
    first, again = plan(2).digest(), plan(2).digest()
    assert first == again
    assert len(first) == 16
    assert int(first, 16) >= 0


@pytest.mark.parametrize(
    "keys", [dict(lr=2e-3), dict(pp_microbatches=8), dict(seed=1), dict(deepspeed={"log_level": "x"})]
)
def test_the_digest_tells_runs_apart(keys: dict[str, object]) -> None:
    assert plan(2, **keys).digest() != plan(2).digest()
    assert plan(4).digest() != plan(2).digest()


def test_paths_and_what_concerns_one_host_do_not_enter_the_digest() -> None:
    here = plan(2, output_dir="a", num_threads=2, num_workers=0, data_path=["x"], tensorboard_dir="t")
    assert here.digest() == plan(2).digest()


def test_where_a_key_was_written_does_not_enter_the_digest(tmp_path: Path) -> None:
    written = resolve_file(tmp_path, "micro_batch_size: 1\nseed: 5\n", [])
    asked = resolve_file(tmp_path, "micro_batch_size: 1\n", ["--seed", "5"])
    assert written.digest() == asked.digest()


def test_the_digest_is_the_same_under_another_hash_seed() -> None:
    import subprocess
    import sys

    code = "from tests.support.configs import plan; print(plan(2).digest())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {plan(2).digest()}


# --- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        (dict(), [4, 4]),
        (dict(virtual_pipeline_model_parallel_size=2), [2, 2, 2, 2]),
        (dict(decoder_first_pipeline_num_layers=3), [3, 5]),
        (dict(decoder_last_pipeline_num_layers=2), [6, 2]),
        (dict(decoder_first_pipeline_num_layers=2, virtual_pipeline_model_parallel_size=2), [1, 3, 1, 3]),
        (dict(pipeline_model_parallel_layout="Et|tt|ttt|ttL"), [1, 2, 3, 2]),
    ],
)
def test_layers_of_stages(keys: dict[str, object], layers: list[int]) -> None:
    config = plan(2, pipeline_model_parallel_size=2, **keys).config
    assert layers_of_stages(config.model, config.parallel) == layers


LAYOUTS = ["Et*3|(tt|)*29,m|L", "Ettt|tt|mL", "E|t*2,(t|t)*2|L", "(|t)*3|L", "Et|*3tL"]


@pytest.mark.parametrize("text", LAYOUTS)
def test_layouts_are_read_as_megatron_reads_them(text: str) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letter = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert parse_layout(text) == ["".join(letter[layer.name] for layer in stage) for stage in theirs]


@pytest.mark.parametrize("text", ["Etx|L", "((t)*2)*2", "t*9999999", "(t)*9999999", "(t"])
def test_layouts_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError):
        parse_layout(text)


def test_prediction_layers_stay_together_and_last() -> None:
    keys = dict(position_embedding_type="rope", pipeline_model_parallel_size=2, mtp_num_layers=2)
    with pytest.raises(ConfigError, match="all m must be in one stage, not in 2"):
        plan(2, pipeline_model_parallel_layout="Et*8m|mL", **keys)
    for apart in ("Et*4|t*4mm||L", "Et*4|t*4|mm|L", "Et*8mm|L"):  # ranks waited for each other under interleaved 1F1B
        with pytest.raises(ConfigError, match=r"m must be in the last stage, .* move it there \(\.\.\.mL\)"):
            plan(2, pipeline_model_parallel_layout=apart, **keys)
    plan(2, pipeline_model_parallel_layout="Et*4|t*4mmL", **keys)
