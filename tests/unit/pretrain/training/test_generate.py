"""The source of the weights of `megaaccum generate`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaaccum.config import resolve
from megaaccum.errors import ConfigError, MegaaccumError
from megaaccum.schedule import build as build_schedule
from megaaccum.schedule.table import write_csv
from tests.support.configs import SMALL, plan


@pytest.mark.parametrize(("save", "folder"), [(None, "moved/checkpoints"), ("kept", "kept")])
def test_the_checkpoints_of_a_run_are_in_the_folder_that_is_given(save: str | None, folder: str) -> None:
    """The output_dir that the run had is of another working directory, or has another name now."""
    from megaaccum.pretrain.training.generate import Generation

    loaded: list[Path] = []
    keys = {"output_dir": ("runs/first", "run.yaml"), "save": (save or "runs/first/checkpoints", "derived")}
    if save is not None:
        keys["save"] = save, "run.yaml"
    section = {name: {"value": value, "from": origin} for name, (value, origin) in keys.items()}
    wanted = Generation(Path("moved"), ["a"], 1)
    receipt = {"folder": "/", "data": {"vocab_size": 64}, "configuration": {"run": section}, "megatron": {}}
    vars(wanted).update(_receipt=receipt)
    planned = plan(output_dir="runs/first")
    wanted.load(SimpleNamespace(plan=planned, load=lambda path: loaded.append(path) is None))
    assert loaded == [Path(folder)]


def generation(model: dict[str, Any], parallel: dict[str, Any], dtype: str = "fp32", words: str = "") -> Any:
    """A request to a run with these keys beside those of its size."""
    from megaaccum.pretrain.training.generate import Generation

    keys = {name: SMALL[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")} | model
    configuration = {
        name: {key: {"value": value, "from": "run.yaml"} for key, value in section.items()}
        for name, section in dict(model=keys, parallel=parallel, sharding=dict(params_dtype=dtype)).items()
    }
    wanted = Generation(Path("run"), ["a"], 1, words.split())
    receipt = {"data": {"vocab_size": 64}, "configuration": configuration, "megatron": {}}
    vars(wanted).update(prompt_ids=[[1]], _receipt=receipt, _run_config=plan().config)
    return wanted


def test_keys_that_only_training_heeds_are_left_out() -> None:
    """Without a capacity none says which tokens are dropped, and no weight gradient is added to a sum."""
    model = dict(num_experts=4, add_bias_linear=False, moe_expert_capacity_factor=1.0)
    model |= dict(moe_token_drop_policy="position", gradient_accumulation_fusion=True)
    found = resolve(generation(model, {}, "bf16").config, world_size=1).config.model
    assert (found.num_experts, found.moe_expert_capacity_factor, found.gradient_accumulation_fusion) == (4, None, False)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--rotary_base 7", "rotary_base is 7, but run has 10000: leave it out: only layout and precision change."),
        ("--seq_length 96", "seq_length is 96, but run has"),
        ("--global_batch_size 96", "global_batch_size is 96, but run has"),
        ("--lr 7", "lr is 7.0, but run has"),
    ],
)
def test_a_key_that_would_change_the_model_or_nothing_is_refused(words: str, text: str) -> None:
    """Text came from another model than was trained, without a word."""
    with pytest.raises(ConfigError) as caught:
        _ = generation({}, {}, words=words).config
    assert text in str(caught.value)


def test_layout_and_precision_may_change() -> None:
    words = "--pipeline_model_parallel_size 2 --bf16 --seed 7 --rotary_base 10000 --transformer_impl local"
    assert generation({}, {}, words=words).config.parallel.pipeline_model_parallel_size == 2


def test_a_checkpoint_is_of_a_run(tmp_path: Path) -> None:
    """It was ignored beside a Hugging Face folder, whose weights spoke."""
    from megaaccum.pretrain.training.generate import Generation

    (tmp_path / "config.json").touch()
    wanted = Generation(tmp_path, ["a"], 1, checkpoint=Path("kept"))
    vars(wanted).update(prompt_ids=[[1]], _keys={})
    with pytest.raises(ConfigError, match=f"--checkpoint kept: no effect, as {tmp_path} is a Hugging Face folder"):
        _ = wanted.config


def test_prediction_layers_stay_as_the_checkpoint_has_them() -> None:
    parallel = dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ett|ttmL")
    wanted = generation(dict(num_layers=4, mtp_num_layers=1, position_embedding_type="rope"), parallel)
    assert resolve(wanted.config, world_size=2).config.model.mtp_num_layers == 1


def test_a_run_of_a_table_generates_under_megatrons_own_schedule(tmp_path: Path) -> None:
    write_csv(build_schedule("zbv", pp=2, num_microbatches=6), tmp_path / "run.csv")
    parallel = dict(pipeline_model_parallel_size=2, schedule=str(tmp_path / "run.csv"))
    assert resolve(generation(dict(num_layers=4), parallel).config, world_size=2).layout.schedule == "1f1b"


def test_a_folder_that_is_neither_a_run_nor_a_model_is_told_of_both(tmp_path):
    from megaaccum.pretrain.training.generate import Generation

    with pytest.raises(MegaaccumError, match=r"holds no receipts .* output_dir of a run .* has a config\.json"):
        _ = Generation(tmp_path, ["a"], 1).config
