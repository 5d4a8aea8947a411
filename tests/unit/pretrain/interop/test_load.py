"""The front door: every dialect in one configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaaccum.pretrain.interop.load import load
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
