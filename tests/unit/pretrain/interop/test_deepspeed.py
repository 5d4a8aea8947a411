"""A user's DeepSpeed JSON against megaaccum's keys, and what DeepSpeed is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaaccum.cli.convert import as_yaml
from megaaccum.config import Config, Plan, resolve
from megaaccum.config.batch import SIZES
from megaaccum.config.deepspeed_config import deepspeed_config
from megaaccum.config.keys import all_keys
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop.deepspeed import keys
from megaaccum.pretrain.interop.deepspeed.reconcile import ORIGIN
from megaaccum.pretrain.interop.load import load
from tests.support.check import run
from tests.support.configs import SMALL, plan

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128 --mock-data"
    " --tokenizer-type NullTokenizer"
)
"""Megatron's, beside which a JSON may stand."""


def problems(block: dict[str, object], **others: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(2, deepspeed=block, **others)
    return caught.value.problems


def value(config, key: str) -> object:
    return getattr(getattr(config, all_keys()[key].section), key)


def adam(**params: object) -> dict[str, object]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def scheduler(kind: str, **params: object) -> dict[str, object]:
    return {"scheduler": {"type": kind, "params": {"warmup_type": "linear", "warmup_num_steps": 7} | params}}


AGREEING: list[tuple[dict[str, object], str, object, object]] = [
    # JSON, key, the JSON's value, another value of the key
    ({"gradient_clipping": 0.5}, "clip_grad", 0.5, 2.0),
    ({"bf16": {"enabled": True}}, "bf16", True, False),
    ({"zero_optimization": {"stage": 2}}, "zero_stage", 2, 1),
    ({"zero_optimization": {"reduce_bucket_size": 2e8}}, "reduce_bucket_size", 200_000_000, 10),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer", "cpu", "none"),
    ({"communication_data_type": "bf16"}, "grad_reduce_dtype", "bf16", "fp32"),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype", "fp32", "bf16"),
    (adam(lr=2e-3), "lr", 2e-3, 1e-3),
    (adam(betas=[0.8, 0.9]), "adam_beta1", 0.8, 0.9),
    (adam(betas=[0.8, 0.9]), "adam_beta2", 0.9, 0.999),
    (adam(eps=1e-6), "adam_eps", 1e-6, 1e-8),
    (adam(weight_decay=0.1), "weight_decay", 0.1, 0.2),
    (scheduler("WarmupLR"), "lr_decay_style", "constant", "cosine"),
    (scheduler("WarmupDecayLR", total_num_steps=50), "lr_decay_iters", 50, 60),
    (scheduler("WarmupCosineLR", warmup_num_steps=5), "lr_warmup_iters", 5, 6),
    (scheduler("WarmupLR", warmup_min_lr=1e-5), "lr_warmup_init", 1e-5, 0.0),
    (scheduler("WarmupLR", warmup_max_lr=2e-3), "lr", 2e-3, 1e-3),
    (scheduler("WarmupCosineLR", cos_min_ratio=0.5), "min_lr", 5e-4, 1e-4),
    (scheduler("WarmupCosineLR", warmup_min_ratio=0.5), "lr_warmup_init", 5e-4, 1e-4),
    ({"tensorboard": {"enabled": True, "output_path": "t"}}, "tensorboard_dir", "t", "u"),
    ({"csv_monitor": {"enabled": True, "output_path": "t"}}, "csv_dir", "t", "u"),
    ({"wandb": {"enabled": True, "project": "p"}}, "wandb_project", "p", "q"),
]


@pytest.mark.parametrize(("block", "key", "theirs", "other"), AGREEING)
def test_the_json_supplies_what_no_key_says(block: dict, key: str, theirs: object, other: object) -> None:
    open_keys = {name: None for name in (key,) if name in SMALL}
    settled = plan(2, deepspeed=block, **open_keys)
    assert value(settled.config, key) == theirs
    assert settled.config.origin[key] == ORIGIN


@pytest.mark.parametrize(("block", "key", "theirs", "other"), AGREEING)
def test_the_json_may_repeat_a_key(block: dict, key: str, theirs: object, other: object) -> None:
    plan(2, deepspeed=block, **{key: theirs})


@pytest.mark.parametrize(("block", "key", "theirs", "other"), AGREEING)
def test_a_disagreement_shows_both_values(block: dict, key: str, theirs: object, other: object) -> None:
    texts = problems(block, **{key: other})
    assert any(f"is {_shown(block, theirs)} and {key} is {other}: make them equal" in text for text in texts), texts


def _shown(block: dict, theirs: object) -> object:
    return 2e8 if theirs == 200_000_000 else theirs


@pytest.mark.parametrize(("block", "key", "theirs", "other"), AGREEING)
def test_the_command_line_outranks_the_json(
    tmp_path: Path, block: dict, key: str, theirs: object, other: object
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({k: v for k, v in SMALL.items() if k != key} | {"deepspeed": block}))
    extra = ["--bf16"] if other == "bf16" else []
    config = load(path, [f"--{key}", str(other), *extra])
    settled = resolve(config, world_size=2)
    assert value(settled.config, key) == other
    assert any("is set aside: the command line gives" in note for note in settled.notes)
    assert _keys(resolve(_written(config, tmp_path), world_size=2)) == _keys(settled)


def _keys(settled: Plan) -> dict[str, object]:
    """Every key's value."""
    return {name: value(settled.config, name) for name in all_keys()}


def _written(config: Config, folder: Path) -> Config:
    """The configuration that is read again from the file that `convert` writes, and `train --record` for its ranks."""
    path = folder / "written.yaml"
    path.write_text(as_yaml(config, "run.json"))
    return load(path)


def test_a_file_that_is_written_says_a_thing_once(tmp_path: Path) -> None:
    """The optimizer of a JSON, which Megatron's flags replace, stays set aside."""
    block = {
        "steps_per_print": 7,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1}},
    }
    monitor = {"tensorboard": {"enabled": True, "output_path": "t", "job_name": "j"}}
    (tmp_path / "ds.json").write_text(json.dumps(block | monitor | adam(weight_decay=0.25)))
    flags = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    config = load(None, [*FLAGS.split(), *flags])
    again = _written(config, tmp_path)
    assert _keys(resolve(again, world_size=2)) == _keys(resolve(config, world_size=2))
    assert again.deepspeed == {
        "steps_per_print": 7,
        "tensorboard": {"enabled": True, "job_name": "j"},
        "zero_optimization": {"offload_optimizer": {"device": "auto", "ratio": 1}},
    }


def test_auto_leaves_everything_to_the_keys() -> None:
    block = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "initial_scale_power": 11},  # as Accelerate's
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
        **adam(lr="auto", betas="auto", eps="auto", weight_decay="auto"),
        **scheduler("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto"),
    }
    assert plan(2, deepspeed=block).batch == plan(2).batch
    assert plan(2, deepspeed=block).config.optimizer == plan(2).config.optimizer


def test_auto_stays_in_a_file_that_is_written(tmp_path: Path) -> None:
    """Without it DeepSpeed's defaults would hold: no clipping, FP32."""
    path = tmp_path / "run.json"
    block = {"steps_per_print": 7, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    path.write_text(json.dumps({key: value for key, value in SMALL.items() if key != "bf16"} | {"deepspeed": block}))
    assert _written(load(path), tmp_path).deepspeed == block


@pytest.mark.parametrize("size", [("global_batch_size", 8), ("global_batch_size", 32), ("micro_batch_size", 2)])
def test_a_file_that_is_written_has_the_sizes_that_count(tmp_path: Path, size: tuple[str, int]) -> None:
    """All four sizes of the file, with one of the command line between them, would contradict each other."""
    path = tmp_path / "run.json"
    four = {"micro_batch_size": 1, "pp_microbatches": 4, "grad_accum_steps": 2, "global_batch_size": 16}
    path.write_text(json.dumps({key: value for key, value in SMALL.items() if key not in SIZES} | four))
    config = load(path, [f"--{size[0]}", str(size[1])])
    assert resolve(_written(config, tmp_path), world_size=2).batch == resolve(config, world_size=2).batch


# --- batch -----------------------------------------------------------------------------------------------------------

CUT = dict(micro_batch_size=2, pp_microbatches=4, grad_accum_steps=3)  # at dp 2: global batch 48


@pytest.mark.parametrize(
    ("micro", "steps"),
    [(2, 12), (8, 3), (24, 1), (None, 12), (None, 3), (None, 1), (2, None), (8, None), (24, None)],
)
def test_deepspeeds_words_for_the_same_batch(micro: int | None, steps: int | None) -> None:
    block = {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    plan(2, deepspeed={k: v for k, v in block.items() if v is not None}, **CUT)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"train_batch_size": 64}, ["train_batch_size 64", "global_batch_size 48", "train_batch_size to 48"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["per_gpu 4", "2 with 12 or 8 with 3 or 24 with 1"]),
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps 2", "grad_accum_steps 3"]),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, ["2 with 12"]),
    ],
)
def test_another_batch_in_the_json_is_one_error_with_both(block: dict, words: list[str]) -> None:
    (text,) = problems(block, **CUT)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}, (2, 12, 1)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 12}, (2, 12, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 12}, (2, 1, 12)),
        ({"train_batch_size": 48}, (1, 24, 1)),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 3}, (1, 8, 3)),
    ],
)
def test_the_json_alone_may_give_the_batch(block: dict, expected: tuple[int, int, int]) -> None:
    batch = plan(2, deepspeed=block, micro_batch_size=None, pp_microbatches=None).batch
    assert (batch.micro_batch_size, batch.pp_microbatches, batch.grad_accum_steps) == expected


def test_the_command_line_outranks_the_jsons_batch(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(SMALL | {"deepspeed": {"train_batch_size": 32}}))
    settled = resolve(load(path, ["--grad_accum_steps", "4"]), world_size=2)
    assert settled.batch.global_batch_size == 128
    assert any("deepspeed's train_batch_size 32 is set aside" in note for note in settled.notes)


def test_a_batch_of_the_command_line_stays_so_in_a_file_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(SMALL | {"deepspeed": {"train_batch_size": 32, "steps_per_print": 7}}))
    config = load(path, ["--micro_batch_size", "2", "--pp_microbatches", "2", "--grad_accum_steps", "1"])
    again = _written(config, tmp_path)
    assert again.deepspeed == {"steps_per_print": 7}
    assert resolve(again, world_size=2).batch == resolve(config, world_size=2).batch


# --- keys that are not honoured --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(keys.REFUSED))
def test_what_is_not_supported_is_named_with_what_to_write(name: str) -> None:
    (text,) = problems({name: {"enabled": True}})
    assert text == f"deepspeed.{name} (a block) is not supported: {keys.REFUSED[name]}."
    plan(2, deepspeed={name: {"enabled": False}})
    plan(2, deepspeed={name: False})


@pytest.mark.parametrize("name", sorted(keys.ZERO_REFUSED))
def test_what_is_not_supported_of_zero(name: str) -> None:
    (text,) = problems({"zero_optimization": {name: True}})
    assert text.startswith(f"deepspeed.zero_optimization.{name} True is not supported: ")
    plan(2, deepspeed={"zero_optimization": {name: False}})


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_stage, which must be one of 1, 2, 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer: cpu"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size 8"),
        ({"zero_optimization": 3}, "must be a block"),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "auto_cast"),
        ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "until the scale doubles"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "master weights"),
        ({"data_types": {"param_dtype": "bf16"}}, "params_dtype"),
        ({"gradient_predivide_factor": 2.0}, "divided once"),
        ({"gradient_allreduce_op": "sum"}, "divided once"),
        ({"managed_gradient_accumulation": False}, "divided once"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "recompute_granularity"),
        ({"optimizer": {"type": "Lamb"}}, "the optimizer is AdamW"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "the optimizer is AdamW"),
        (adam(adam_w_mode=False), "adam_w_mode False"),
        (adam(amsgrad=True), "amsgrad True"),
        (adam(momentum=0.9), "momentum 0.9"),
        (adam(betas=0.9), "two numbers"),
        ({"scheduler": {"type": "OneCycle"}}, "lr_decay_style"),
        (scheduler("WarmupLR", warmup_type="log"), "set it to linear"),
        ({"scheduler": {"type": "WarmupLR"}}, "lr_warmup_iters 1000 leaves nothing"),  # DeepSpeed's default
        (scheduler("WarmupLR", cycle=1), "cycle 1"),
        ({"tensorboard": {"enabled": True}}, "write tensorboard_dir"),
        ({"gradient_clipping": "much"}, "clip_grad, which must be a number"),
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
        ({"zero_optimization": {"stag": 3}}, "did you mean stage"),
    ],
)
def test_what_cannot_be_honoured(block: dict, words: str) -> None:
    texts = problems(block, clip_grad=1.0)
    assert any(words in text for text in texts), texts


def test_deepspeed_s_default_warm_up_gives_way_to_one_in_samples() -> None:
    found = plan(2, deepspeed={"scheduler": {"type": "WarmupLR"}}, lr_warmup_samples=9).config.optimizer
    assert (found.lr_warmup_samples, found.lr_warmup_iters) == (9, None)


def test_what_has_no_effect_is_told_and_left_out() -> None:
    block = {"zero_optimization": {"stage3_prefetch_bucket_size": 5}, "checkpoint": {"load_universal": False}}
    settled = plan(2, deepspeed=block)
    assert any("stage3_prefetch_bucket_size is left out" in note for note in settled.notes)
    assert any("deepspeed.checkpoint is left out" in note for note in settled.notes)
    written = deepspeed_config(settled)
    assert "checkpoint" not in written
    assert "stage3_prefetch_bucket_size" not in written["zero_optimization"]


# --- as DeepSpeed's own examples have it -----------------------------------------------------------------------------


def test_stage_0_is_the_least_stage_there_is() -> None:
    settled = plan(2, deepspeed={"zero_optimization": {"stage": 0}})
    assert settled.config.sharding.zero_stage == 1
    assert any(
        "zero_stage 1 is taken from deepspeed.zero_optimization.stage (0 there" in note for note in settled.notes
    )
    assert deepspeed_config(settled)["zero_optimization"]["stage"] == 1
    (text,) = problems({"zero_optimization": {"stage": 0}}, zero_stage=2)
    assert "zero_stage is 2: make them equal" in text


@pytest.mark.parametrize(
    ("block", "note"),
    [
        ({"prescale_gradients": True}, "deepspeed.prescale_gradients is left out: the loss is divided once"),
        ({"flops_profiler": {"enabled": True}}, "deepspeed.flops_profiler is left out: the log shows FLOP/s"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}}, "default is logarithmic"),
    ],
)
def test_what_changes_no_weights_or_is_a_default_is_a_note(block: dict, note: str) -> None:
    assert any(note in each for each in plan(2, deepspeed=block).notes)
    off = {name: False for name in block if name != "scheduler"}
    assert plan(2, deepspeed=off).notes == plan(2, deepspeed={"steps_per_print": 1} if off else {}).notes


def test_a_cosine_ends_where_deepspeeds_does() -> None:
    block = {**adam(lr=2e-3), **scheduler("WarmupCosineLR", total_num_steps=50)}
    optimizer = plan(2, deepspeed=dict(reversed(block.items())), lr=None).config.optimizer
    assert (optimizer.min_lr, optimizer.lr_decay_style) == (2e-3 * 0.0001, "cosine")
    assert plan(2, deepspeed=block, lr=2e-3, min_lr=1e-5).config.optimizer.min_lr == 1e-5


def test_a_weight_decay_that_nothing_says_is_deepspeeds() -> None:
    from inspect import signature

    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    for theirs, params in ((FusedAdam, {}), (DeepSpeedCPUAdam, {}), (torch.optim.AdamW, {"torch_adam": True})):
        settled = plan(2, deepspeed=adam(lr=1e-3, **params))
        assert settled.config.optimizer.weight_decay == signature(theirs).parameters["weight_decay"].default
    note = "weight_decay 0.0 is taken from deepspeed.optimizer.params.weight_decay (DeepSpeed's default)."
    assert note in plan(2, deepspeed=adam(lr=1e-3)).notes
    assert plan(2, deepspeed=adam(), weight_decay=0.1).config.optimizer.weight_decay == 0.1
    growing = plan(2, deepspeed=adam(), start_weight_decay=0.01, end_weight_decay=0.01).config.optimizer
    assert growing.weight_decay == 0.01


def test_a_norm_that_nothing_clips_is_deepspeeds() -> None:
    block = {"zero_optimization": {"stage": 1}}
    settled = plan(2, deepspeed=block)
    assert settled.config.optimizer.clip_grad == 0.0
    assert "clip_grad 0.0 is taken from deepspeed.gradient_clipping (DeepSpeed's default)." in settled.notes
    assert plan(2, deepspeed=block, clip_grad=0.5).config.optimizer.clip_grad == 0.5
    for theirs in ("auto", None):  # is left to the program around DeepSpeed
        assert plan(2, deepspeed=block | {"gradient_clipping": theirs}).config.optimizer.clip_grad == 1.0


def test_a_flag_that_clips_is_told_when_the_json_does_not(tmp_path: Path) -> None:
    """Megatron-DeepSpeed gives --clip-grad to no optimizer under DeepSpeed, which clips by its JSON alone."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    flags = f"{FLAGS} --deepspeed --deepspeed_config ds.json"
    (tmp_path / "flags.txt").write_text(flags)
    assert load(tmp_path / "flags.txt").optimizer.clip_grad == 0.0
    (tmp_path / "flags.txt").write_text(f"{flags} --clip-grad 0.5")
    config = load(tmp_path / "flags.txt")
    assert config.optimizer.clip_grad == 0.5
    assert [
        note
        for note in config.notes
        if "clip_grad 0.5 holds; Megatron-DeepSpeed, by its JSON alone, clips nothing" in note
    ]


def test_a_linear_decay_begins_where_deepspeeds_does() -> None:
    from inspect import signature

    from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

    peak = signature(WarmupDecayLR).parameters["warmup_max_lr"].default
    linear = scheduler("WarmupDecayLR", total_num_steps=50)
    settled = plan(2, deepspeed=linear, lr=None)
    assert settled.config.optimizer.lr == peak
    assert f"lr {peak} is taken from deepspeed.scheduler.params.warmup_max_lr (DeepSpeed's default)." in settled.notes
    assert plan(2, deepspeed=linear, lr=2e-3).config.optimizer.lr == 2e-3
    (text,) = problems({**adam(lr=1.5e-4), **linear}, lr=None)  # DeepSpeed's scheduler goes past its optimizer's
    assert "scheduler.params.warmup_max_lr (DeepSpeed's default) is 0.001 and lr is 0.00015: make them equal" in text
    assert signature(WarmupLR).parameters["warmup_max_lr"].default is None  # the optimizer's
    assert plan(2, deepspeed={**adam(lr=1.5e-4), **scheduler("WarmupLR")}, lr=None).config.optimizer.lr == 1.5e-4


def test_a_linear_decay_ends_where_its_warmup_began_as_deepspeeds_does() -> None:
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    from megaaccum.optim import lr_schedule

    block = scheduler("WarmupDecayLR", total_num_steps=50, warmup_min_lr=2e-4, warmup_max_lr=1e-3)
    settled = plan(2, deepspeed=block, lr=None, train_iters=60)
    assert "min_lr 0.0002 is taken from deepspeed.scheduler.params.warmup_min_lr." in settled.notes
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    theirs = WarmupDecayLR(optimizers[0], **block["scheduler"]["params"])
    ours = lr_schedule.build(optimizers[1], settled.config, settled.ramp)
    for _ in range(60):
        theirs.step()
        assert optimizers[1].param_groups[0]["lr"] == pytest.approx(optimizers[0].param_groups[0]["lr"], rel=1e-12)
        ours.step(settled.batch.global_batch_size)
    (text,) = problems(block, lr=1e-3, min_lr=1e-4)
    assert "scheduler.params.warmup_min_lr is 0.0002 and min_lr is 0.0001: make them equal" in text


def test_a_loss_scale_of_the_flags_gives_way_to_that_of_the_json(tmp_path: Path) -> None:
    """Megatron-DeepSpeed gives --loss-scale to no optimizer under DeepSpeed, which scales by its JSON alone."""
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 11}}')
    flags = f"{FLAGS} --fp16 --loss-scale 12 --hysteresis 5"
    (tmp_path / "flags.txt").write_text(f"{flags} --deepspeed --deepspeed_config ds.json")
    config = load(tmp_path / "flags.txt")
    step = resolve(config, world_size=1).config.step
    assert (step.loss_scale, step.initial_loss_scale, step.hysteresis) == (None, 2048.0, 2)
    assert "--loss-scale 12: the JSON says how the loss is scaled, as in Megatron-DeepSpeed." in config.notes
    (tmp_path / "flags.txt").write_text(flags)
    assert load(tmp_path / "flags.txt").step.loss_scale == 12.0


@pytest.mark.parametrize("steps", [7, 2, 1])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_deepspeeds_schedulers_come_a_step_later_but_for_the_cosine(kind: str, steps: int) -> None:
    """DeepSpeed's engine calls the scheduler after each step, and the scheduler begins before its first rate, which two
    steps therefore have: docs/migrating/deepspeed.md says so."""
    import torch
    from deepspeed.runtime import lr_schedules

    from megaaccum.optim import lr_schedule

    block = scheduler(kind, warmup_num_steps=steps, **({} if kind == "WarmupLR" else {"total_num_steps": 50}))
    block |= adam(lr=1e-3)
    settled = plan(2, deepspeed=block, lr=None, train_iters=60)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3) for _ in range(2)]
    theirs = getattr(lr_schedules, kind)(optimizers[0], **block["scheduler"]["params"])
    ours = lr_schedule.build(optimizers[1], settled.config, settled.ramp)
    rates: list[list[float]] = [[], []]
    for _ in range(60):
        for one, optimizer in zip(rates, optimizers, strict=True):
            one.append(optimizer.param_groups[0]["lr"])
        theirs.step()
        ours.step(settled.batch.global_batch_size)
    decay = max(2, steps) + 1 if kind == "WarmupCosineLR" else 60
    assert rates[0][0] == rates[0][1] == 0.0
    assert rates[0][1:decay] == pytest.approx(rates[1][: decay - 1], rel=1e-12)
    assert rates[0][decay:] == pytest.approx(rates[1][decay:], rel=1e-12)


DYNAMIC = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 3, "initial_scale_power": 11}


def test_keys_that_move_the_scale_have_no_effect_beside_a_fixed_one() -> None:
    settled = plan(2, deepspeed={"fp16": DYNAMIC}, fp16=True, loss_scale=512.0)
    assert settled.config.step.loss_scale == 512.0
    (note,) = [each for each in settled.notes if "no effect beside loss_scale 512" in each]
    assert note.startswith("deepspeed.fp16.loss_scale, initial_scale_power, loss_scale_window, hysteresis: ")
    assert plan(2, deepspeed={"fp16": DYNAMIC | {"loss_scale": 128}}).config.step.loss_scale == 128.0
    moving = plan(2, deepspeed={"fp16": DYNAMIC}).config.step
    assert (moving.loss_scale, moving.initial_loss_scale, moving.hysteresis) == (None, 2048.0, 3)
    auto = plan(2, deepspeed={"fp16": DYNAMIC | {"enabled": "auto"}}, fp16=True).config.step
    assert (auto.initial_loss_scale, auto.hysteresis) == (2048.0, 3)


def test_a_dynamic_loss_scale_of_which_the_json_says_little_is_deepspeeds() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    theirs, settled = DeepSpeedFP16Config(enabled=True), plan(2, deepspeed={"fp16": {"enabled": True}})
    step = settled.config.step
    assert step.initial_loss_scale == theirs.initial_dynamic_scale()
    assert (step.loss_scale_window, step.hysteresis) == (theirs.loss_scale_window, theirs.hysteresis)
    assert step.min_loss_scale == theirs.min_loss_scale
    assert "hysteresis 2 is taken from deepspeed.fp16.hysteresis (DeepSpeed's default)." in settled.notes
    written = plan(2, deepspeed={"fp16": {"enabled": True}}, hysteresis=1, loss_scale_window=2000).config.step
    assert (written.loss_scale_window, written.hysteresis) == (2000, 1)
    for block in ({"loss_scale": 0}, {"enabled": False}, {"enabled": "auto"}):
        assert plan(2, deepspeed={"fp16": block}).config.step == plan(2).config.step
    fixed = plan(2, deepspeed={"fp16": {"enabled": True, "loss_scale": 128}, "gradient_clipping": 1.0})
    assert not any("DeepSpeed's default" in note for note in fixed.notes)


def test_an_optimizer_without_a_scheduler_keeps_its_rate_as_deepspeeds_does() -> None:
    settled = plan(2, deepspeed=adam(lr=1e-3))
    assert settled.config.optimizer.lr_decay_style == "constant"
    note = "lr_decay_style constant is taken from deepspeed.scheduler (DeepSpeed's default)."
    assert note in settled.notes
    for key, value in (("lr_decay_style", "cosine"), ("min_lr", 1e-4), ("lr_decay_iters", 50)):
        assert plan(2, deepspeed=adam(lr=1e-3), **{key: value}).config.optimizer.lr_decay_style != "constant"
    auto = plan(2, deepspeed=adam(lr="auto")).config.optimizer  # the rate is that of the program around it
    assert auto.lr_decay_style == plan(2).config.optimizer.lr_decay_style


def test_optimizer_and_scheduler_beside_megatrons_flags_are_set_aside(tmp_path: Path) -> None:
    """Megatron-DeepSpeed builds its own by the flags, and DeepSpeed takes those."""
    block = {**adam(lr=1.5e-4, max_grad_norm=1.0), "scheduler": {"type": "OneCycle"}, "steps_per_print": 5}
    (tmp_path / "ds.json").write_text(json.dumps(block))
    (tmp_path / "flags.txt").write_text(f"{FLAGS} --deepspeed --deepspeed_config ds.json --zero-stage 0")
    config = load(tmp_path / "flags.txt")
    assert config.optimizer.lr == 1e-3
    assert len([note for note in config.notes if "is set aside: the flags are Megatron's" in note]) == 2
    assert resolve(config, world_size=1).config.sharding.zero_stage == 1


def test_a_batch_that_tells_the_ranks(tmp_path: Path) -> None:
    block = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}
    path = tmp_path / "run.json"
    keys = {name: value for name, value in SMALL.items() if name not in ("micro_batch_size", "pp_microbatches")}
    path.write_text(json.dumps(keys | {"tensor_model_parallel_size": 2, "deepspeed": block}))
    assert "world_size 8 (dp 4 by the batch of the DeepSpeed JSON" in run(path)
    with pytest.raises(ConfigError, match="train_batch_size 48"):
        run(path, world_size=16)


def test_a_deepspeed_json_alone_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}')
    with pytest.raises(ConfigError) as caught:
        load(path)
    (text,) = caught.value.problems
    assert text.startswith("ds.json is a DeepSpeed configuration, which names no model: write a YAML file")
    assert "`deepspeed: ds.json`" in text


# --- what DeepSpeed is given -----------------------------------------------------------------------------------------


def test_one_owner_of_accumulation_divisor_and_clipping() -> None:
    written = deepspeed_config(plan(2, clip_grad=0.5, **CUT))
    assert written["gradient_accumulation_steps"] == 1
    assert written["train_micro_batch_size_per_gpu"] == 24
    assert written["gradient_clipping"] == 0.0


def test_sharding_and_precision_are_written() -> None:
    keys = dict(zero_stage=2, reduce_bucket_size=1000, bf16=True, grad_reduce_dtype="bf16", offload_optimizer="cpu")
    written = deepspeed_config(plan(2, **keys))
    assert written["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu"},
    }
    assert written["bf16"] == {"enabled": True}
    assert written["communication_data_type"] == "bf16"
    assert written["data_types"] == {"grad_accum_dtype": "fp32"}


def test_the_users_other_keys_are_passed_on() -> None:
    block = {
        "steps_per_print": 7,
        "zero_optimization": {
            "overlap_comm": False, "reduce_scatter": False, "offload_optimizer": {"device": "cpu", "pin_memory": True}
        },
    }  # fmt: skip
    written = deepspeed_config(plan(2, deepspeed=block))
    assert written["steps_per_print"] == 7
    zero = written["zero_optimization"]
    assert zero["overlap_comm"] is False and "reduce_scatter" not in zero
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.fixture(scope="module")
def accept():
    """DeepSpeed's own reader of its configuration."""
    from megaaccum.platform import cpu

    cpu.install()
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("extra", [dict(), dict(bf16=True, offload_optimizer="cpu")])
def test_deepspeed_accepts_what_is_written(accept, stage: int, extra: dict) -> None:
    settled = plan(1, zero_stage=stage, **extra, **CUT)
    read = accept(deepspeed_config(settled))
    assert read.zero_config.stage == stage
    assert read.gradient_accumulation_steps == 1
    assert read.train_batch_size == settled.batch.global_batch_size
    assert read.gradient_clipping == 0.0
    assert read.bfloat16_config.enabled == settled.config.sharding.bf16


def test_every_key_of_deepspeeds_zero_block_is_known(accept) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    theirs = {
        name
        for field_name, field in DeepSpeedZeroConfig.model_fields.items()
        for name in (field_name, field.alias)
        if name is not None
    }
    assert theirs <= keys.ZERO


def test_every_key_is_in_one_table() -> None:
    for tables in (
        (keys.PASSED, keys.REFUSED, keys.RECONCILED, keys.DROPPED),
        (keys.ZERO_PASSED, keys.ZERO_REFUSED, keys.ZERO_RECONCILED, keys.ZERO_DROPPED),
    ):
        names = [name for table in tables for name in table]
        assert len(names) == len(set(names))


def test_master_weights_in_bf16_are_a_key() -> None:
    block = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    taken = plan(deepspeed=block)
    assert taken.config.sharding.optimizer_dtype == "bf16"
    assert deepspeed_config(taken)["bf16"] == block["bf16"]
    assert deepspeed_config(plan(bf16=True))["bf16"] == {"enabled": True}
