"""The source of the weights of `megaaccum generate`."""

from __future__ import annotations

from dataclasses import replace
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


def test_a_row_holds_the_longest_prompt_and_its_text_and_divides_over_the_ranks() -> None:
    for parallel, length, batch in (
        ({}, 13, 2),
        (dict(tensor_model_parallel_size=2), 14, 2),
        (dict(pipeline_model_parallel_size=2), 13, 4),
        (dict(expert_model_parallel_size=4), 13, 8),
    ):
        wanted = replace(generation({}, parallel), max_new_tokens=4)
        kept = {name: vars(generation({}, parallel))[name] for name in ("_receipt", "_run_config")}
        vars(wanted).update(kept, prompt_ids=[[1], [1] * 9, [1] * 3])
        assert (wanted.config.model.seq_length, wanted.config.batch.global_batch_size) == (length, batch)
    vars(wanted).update(prompt_ids=[[1] * 9], words=["--context_parallel_size", "2"])
    del wanted.__dict__["config"]
    vars(wanted)["_receipt"]["configuration"]["parallel"] = {}
    assert wanted.config.model.seq_length == 16


def test_the_model_is_the_runs_with_fields_of_megatrons_and_its_precision() -> None:
    wanted = generation({}, {}, "bf16")
    vars(wanted)["_receipt"]["megatron"] = {"layernorm_epsilon": 1e-3}
    vars(wanted)["_run_config"].model.max_position_embeddings = 512
    found = wanted.config
    assert found.megatron == {"layernorm_epsilon": 1e-3}
    assert (found.sharding.params_dtype, found.model.max_position_embeddings) == ("bf16", 512)


def test_a_text_ends_where_the_model_the_tokenizer_and_the_chat_say(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    wanted = generation({}, {})
    tokenizer = Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 3}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    config, of_chat = vars(wanted)["_run_config"], SimpleNamespace(stops={9})

    def stops(chat: bool = False) -> set[int]:
        asked = replace(wanted, chat=chat)
        vars(asked).update(_run_config=config, _tokenizer=tokenizer, _chat_tokenizer=of_chat)
        return asked.stops

    assert stops() == {3}
    config.run.init_from = str(tmp_path)
    assert stops() == {3}, "the folder says nothing"
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stops() == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert stops() == {5, 6, 7}
    assert stops(chat=True) == {5, 6, 7, 9}


def test_an_empty_prompt_is_refused() -> None:
    wanted = generation({}, {})
    del wanted.__dict__["prompt_ids"]
    vars(wanted)["_tokenizer"] = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[4] * len(text)))
    assert wanted.prompt_ids == [[4]]
    for prompts in (["a", ""], [""]):
        other = replace(wanted, prompts=prompts)
        vars(other)["_tokenizer"] = vars(wanted)["_tokenizer"]
        with pytest.raises(ConfigError, match="a prompt is empty"):
            _ = other.prompt_ids


def test_a_folder_that_is_neither_a_run_nor_a_model_is_told_of_both(tmp_path):
    from megaaccum.pretrain.training.generate import Generation

    with pytest.raises(MegaaccumError, match=r"holds no receipts .* output_dir of a run .* has a config\.json"):
        _ = Generation(tmp_path, ["a"], 1).config
