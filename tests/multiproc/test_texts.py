"""Text comparisons and samples under every kind of layout, and the command line that asks for them."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from megaaccum.pretrain.metrics import journal
from tests.support import texts
from tests.support.parity import Case
from tests.support.whole_runs import LAUNCHER

SMALL = "--num_layers 4"
LAYOUTS = (
    Case(4, "--pp 2 --num_chunks 4", SMALL, "fp64"),
    Case(4, "--pp 2 --num_layers_per_virtual_pipeline_stage 1 --num_chunks 4", SMALL, "fp64"),
    Case(4, "--pp 2 --schedule dualpipev --num_chunks 4 --micro_batch_size 2", SMALL, "fp64"),
    Case(4, "--tp 2 --cp 2 --num_chunks 1", SMALL, "fp64"),
    Case(4, "--cp 2 --backend fsdp2 --reproducible layout --reproducible_context_blocks 4", SMALL, "fp64"),
)
ALONE = Case(1, "--num_chunks 1", SMALL, "fp64")


@pytest.fixture(scope="module")
def looked():
    ((scores, text, kept),) = run_ranks(texts.looks, 1, [ALONE], timeout=60)[0]
    assert kept
    on_ranks = run_ranks(texts.looks, 4, LAYOUTS, timeout=120)
    return scores, text, dict(zip(LAYOUTS, zip(*on_ranks, strict=True), strict=True))


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_layout_scores_and_writes_as_one_process(looked, case):
    scores, text, by_layout = looked
    for mine, written, kept in by_layout[case]:
        assert mine == pytest.approx(scores, rel=1e-12)
        assert written == text
        assert kept, "a look changed the step after it"


LINE = (
    "python -m megaaccum.train --config configs/tiny_cpu.yaml --dbs 4 --grad_accum_steps 8 --save_every 0"
    " --core_metric_every 0 --sample_every 0 --eval_every 0 --warmup_ratio 0.0 --max_steps 4"
)


def typed(line: str, folder: str) -> None:
    """The command line, in `folder`, by a process that has the libraries imported."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.chdir(folder)
    sys.argv = line.split()[2:]
    try:
        runpy.run_module("megaaccum.train", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("exit code", ended.code or 0, flush=True)


def run(line: str, folder: Path) -> tuple[str, list[dict]]:
    (folder / "configs").symlink_to(Path(__file__).parents[2] / "configs")
    (rank,) = try_ranks(typed, 1, line, str(folder), init=False, timeout=150)
    assert "exit code 0" in rank.output, f"{rank.output}\n{rank.error}"
    return rank.output, journal.read(folder / "runs" / "tiny_cpu" / "log.jsonl")


def test_the_line_of_a_recipe_runs_as_it_is(tmp_path):
    output, records = run(LINE, tmp_path)
    assert [record["kind"] for record in records] == ["train"] * 4
    assert {record["global_batch_size"] for record in records} == {64}
    assert {record["lr"] for record in records[:1]} == {6e-3}, "a warm-up of nothing"
    assert "comparisons" not in output
    assert "sample" not in output


def test_comparisons_and_sample_are_printed_and_logged_under_a_pipeline(tmp_path, texts):
    line = LINE.replace("core_metric_every 0", "text_comparisons_every 2").replace("sample_every 0", "sample_every 3")
    small = f" --num_layers 2 --hidden_size 32 --seq_length 64 --nproc_per_node 2 --data_cache_path {texts}"
    output, records = run(line.replace("grad_accum_steps 8", "grad_accum_steps 2") + small, tmp_path)
    looks = [(record["kind"], record["step"]) for record in records if record["kind"] not in ("train", "valid")]
    assert looks == [("text_comparisons", 2), ("sample", 3), ("text_comparisons", 4), ("sample", 4)]
    assert all(-1 <= record["centered_accuracy"] <= 1 for record in records if record["kind"] == "text_comparisons")
    assert "step   2/300 | text comparisons: accuracy" in output
    (text, _) = [record["text"] for record in records if record["kind"] == "sample"]
    assert f"-> {text!r}" in output


def with_a_damaged_corpus() -> str:
    """The error of a sample whose prompt one rank cannot read, which others have begun to continue."""
    import torch

    from megaaccum.errors import DataError, MegaaccumError
    from megaaccum.pretrain.training import evaluation

    class Train:
        spans = (SimpleNamespace(start=0),)

        def __getitem__(self, index: int):
            if torch.distributed.get_rank() == 1:
                raise DataError("corpus.bin is damaged")
            return {"tokens": torch.arange(4)}

    run = SimpleNamespace(text_comparisons_every=0, sample_every=1)
    engine = SimpleNamespace(plan=SimpleNamespace(config=SimpleNamespace(run=run)), batch=SimpleNamespace(seq_length=4))
    with (
        patch.object(evaluation, "read_run_tokenizer"),
        patch.object(evaluation, "sample", lambda *_, **__: torch.distributed.barrier()),
    ):
        texts = evaluation.Texts(engine, SimpleNamespace(train=Train()), SimpleNamespace())
        try:
            texts.after(1, is_last=False)
        except MegaaccumError as error:
            return str(error)
    return ""


def test_a_prompt_that_one_rank_cannot_read_ends_all():
    assert run_ranks(with_a_damaged_corpus, 2, timeout=30) == ["rank 1: corpus.bin is damaged"] * 2


def of_no_number(case: Case) -> str:
    """The error of a sample from a model whose last stage has weights that are not numbers."""
    import torch

    from megaaccum.errors import StepError
    from megaaccum.pretrain.training.sampling import sample
    from tests.support.engines import engine_of

    engine = engine_of(case)
    with torch.no_grad():
        for param in engine.chunks[0].parameters() if engine.groups.pp.rank() else ():
            param.fill_(torch.nan)
    try:
        sample(engine, texts.PROMPT, vocab_size=texts.VOCAB)
    except StepError as error:
        return str(error)
    return ""


def test_logits_that_are_no_numbers_end_every_rank():
    """The rank that draws ended in an error of torch, and the others waited for its token."""
    for error in run_ranks(of_no_number, 2, Case(2, "--pp 2 --num_chunks 4 --backend ddp", SMALL), timeout=40):
        assert error == "rank 1: the model gives logits that are not numbers, of which no token can be drawn"
