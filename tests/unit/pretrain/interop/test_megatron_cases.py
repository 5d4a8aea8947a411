"""Labelled command lines through `check`: a few of our own, and a set of real ones where the environment names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.megatron_cases import score

CASES = os.environ.get("MEGAACCUM_CASES")
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --vocab-size 128"
    " --tokenizer-type NullTokenizer --mock-data"
)


def case(expected: str, flags: str = "", *, world: int = 1) -> dict:
    megatron = {"ok": True, "world": world}
    words = f"{GPT} {flags}".split()
    return {"file": flags, "program": "pretrain_gpt.py", "flags": words, "megatron": megatron, "expected": expected}


OURS = {
    "plain": case("run"),
    "rotary, grouped queries": case(
        "run", "--group-query-attention --num-query-groups 2 --position-embedding-type rope --rotary-percent 0.5"
    ),
    "pipeline": case("run", "--pipeline-model-parallel-size 2", world=2),
    "underfilled pipeline, for that reason alone": case(
        "run", "--pipeline-model-parallel-size 4 --global-batch-size 4", world=4
    ),
    "mixture of experts": case("run", "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"),
    "our backend in the place of Megatron's": case("note", "--use-megatron-fsdp --ckpt-format fsdp_dtensor"),
    "another objective": case("refuse", "--retro-add-retriever"),
    "another optimizer": case("refuse", "--optimizer sgd"),
    "Lion": case("note", "--optimizer lion --lion-beta1 0.9"),
}


@pytest.mark.parametrize("name", OURS)
def test_a_case_comes_out_as_its_label_says(name):
    assert score([OURS[name]]).wrong == []


@pytest.mark.parametrize(("name", "label"), [("plain", "refuse"), ("another objective", "run")])
def test_a_wrong_label_is_seen(name, label):
    assert len(score([OURS[name] | {"expected": label}]).wrong) == 1


@pytest.mark.skipif(CASES is None, reason="set MEGAACCUM_CASES to a JSON list of cases (benchmarks/megatron_cases.py)")
def test_real_command_lines_are_accepted_or_refused_as_labelled():
    found = score(json.loads(Path(CASES or "").read_text(encoding="utf-8")))
    accepted, total = found.accepted
    assert accepted >= 0.95 * total
    newer = {"muon", "dist_muon"}  # are taken since the labels were given
    wrong = [one for one, _ in found.wrong if not newer & set(one["flags"])]
    assert [one["file"] for one in wrong if one["expected"] == "refuse"] == []
