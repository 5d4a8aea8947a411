"""Whole runs with skipped steps in them: what moves, what does not, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from megaaccum.pretrain.metrics import journal
from tests.support.data_samples import counting_pair
from tests.support.faults import Fault, injected

SMALL = (
    "--num_layers 2 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 8 --lr 1e-2 "
    "--pipeline_model_parallel_size 2 --micro_batch_size 1 --num_chunks 4 --attention_dropout 0.1 --hidden_dropout 0.1 "
    "--eval_interval 0 --log_interval 1 --save_interval 4 --lr_warmup_iters 4 --num_workers 0 --nonfinite skip "
)
FP16 = SMALL + "--fp16 --hysteresis 1 --loss_scale_window 2 --initial_loss_scale 256 "
FIXED = SMALL + "--fp16 --loss_scale 256 "
FAULTS = {3: Fault(1, 2), 6: Fault(0, 0)}


def train(flags: str, folder: Path, faults: dict[int, Fault] | None = None) -> None:
    """`megaaccum train` on this rank, with a fault in the first attempt at each step that `faults` names."""
    from megaaccum.cli.train import main
    from megaaccum.step.train_step import TrainStep

    left = dict(faults or {})
    real = TrainStep.train

    def with_fault(self, microbatches, **more):
        fault = left.pop(self.transaction.step + 1, None)
        with injected([fault], self.chunks) if fault else nullcontext():
            return real(self, microbatches, **more)

    with patch.object(TrainStep, "train", with_fault):
        main([*flags.split(), "--output_dir", str(folder), "--data_cache_path", str(folder.parent / "cache")])


def counted(flags: str, folder: Path) -> int:
    """`train`; returns how many of its steps ended before their verdict."""
    from megaaccum.step.speculation import SpeculativeTrainStep

    ended = []
    end = SpeculativeTrainStep.end_early
    with patch.object(
        SpeculativeTrainStep, "end_early", lambda self, *args, **more: ended.append(1) or end(self, *args, **more)
    ):
        train(flags, folder)
    return len(ended)


def records(folder: Path) -> list[dict]:
    """The journal without its times."""
    read = journal.read(folder / "log.jsonl")
    timed = ("second", "mfu", "tflops", "goodput", "time")
    return [{key: value for key, value in r.items() if not any(word in key for word in timed)} for r in read]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "cache").symlink_to(texts)
    return folder


def without_memory(record: dict) -> dict:
    """A record but for its high-water marks: a start has its own, and looks in its own steps."""
    return {name: value for name, value in record.items() if not name.startswith("memory_")}


def run(flags: str, folder: Path, faults: dict[int, Fault] | None = None) -> list[dict]:
    run_ranks(train, 2, flags, folder, faults, init=False, timeout=90)
    return records(folder)


def test_a_skipped_step_moves_its_samples_and_the_loss_scale_and_nothing_else(folder):
    seen = run(FP16, folder / "whole", FAULTS)
    assert [r["step"] for r in seen] == list(range(1, 9))
    assert [r["step"] for r in seen if r["skipped"]] == [3, 6]
    assert [r["consumed_samples"] for r in seen] == [4 * step for step in range(1, 9)]
    # Doubles after two good steps, is halved by each overflow.
    assert [r["loss_scale"] for r in seen] == [256, 256, 512, 256, 256, 512, 256, 256]
    # Four committed steps of warm-up, then a linear decay; after a skipped step comes the rate of the skipped one.
    assert [r["lr"] for r in seen] == pytest.approx([0, 2.5e-3, 5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 7.5e-3])


def test_a_resumed_run_goes_on_with_scale_schedule_and_adams_count(folder):
    whole = run(FP16, folder / "again", FAULTS)
    run(FP16 + "--max_steps 4 ", folder / "parts", FAULTS)
    resumed = run(FP16, folder / "parts", FAULTS)
    assert [without_memory(r) for r in resumed] == [without_memory(r) for r in whole]


def test_a_retried_step_makes_the_run_that_never_saw_the_fault(folder):
    clean = run(FIXED, folder / "clean")
    retried = run(FIXED + "--skipped_samples retried ", folder / "retried", FAULTS)
    assert [r["step"] for r in retried] == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert [r for r in retried if not r["skipped"]] == clean


def test_a_run_without_barriers_is_the_run_with_them(folder):
    """It reads a step ahead, and an evaluation and a checkpoint come between two steps."""
    flags = SMALL.replace("--num_layers 2", "--num_layers 4").replace("--eval_interval 0", "--eval_interval 3")
    flags += "--schedule zbv --eval_iters 1 --clip_grad 0 "
    seen = [run(flags, folder / "barriers")]
    early = run_ranks(counted, 2, flags + "--speculative_step ", folder / "none", init=False, timeout=90)
    assert early == [3, 3]  # steps 2, 5 and 7: not the first, nor those before an evaluation, a checkpoint and the end
    seen.append(records(folder / "none"))
    keys = ("step", "loss", "grad_norm", "lr", "num_tokens", "consumed_samples", "skipped", "valid_loss")
    with_barriers, without = ([{key: each.get(key) for key in keys} for each in records] for records in seen)
    assert with_barriers == without
    receipts = [path.read_text() for path in (folder / "none" / "receipts").iterdir()]
    assert receipts and not any('"alarm"' in text for text in receipts)


def test_the_end_at_the_floor_names_the_last_good_checkpoint(folder):
    at_floor = (
        SMALL.replace("--save_interval 4", "--save_interval 2")
        + "--fp16 --initial_loss_scale 256 --min_loss_scale 256 "
    )
    outcomes = try_ranks(train, 2, at_floor, folder / "floor", {5: Fault(1, 3)}, init=False, timeout=90)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "step 5 overflows at loss scale 256" in outcome.error.text
        assert "micro-batch 3 of data-parallel rank 0: first in the backward of stage 1 (rank 1)" in outcome.error.text
        last_good = folder / "floor" / "checkpoints" / "step_0000002"  # no finite step came after that of step 4
        assert f"The last good checkpoint is {last_good}, after which a step was finite" in outcome.error.text
        assert "(load_step: 4, 2)" in outcome.error.text


POISON = 2000
"""Tokens from here on make a loss infinite."""
PAIRS = "--vocab_size 4000 --split 100,0,0 --max_bad_steps_in_a_row 2 "


def train_with_poison(flags: str, folder: Path) -> None:
    """`train`, where some tokens are poison."""
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    real = GptForwardStep.__call__

    def spoilt(self, data_iterator, chunk, **more):
        microbatch = next(data_iterator)
        output, loss = real(self, iter([microbatch]), chunk, **more)
        is_bad = chunk.post_process and bool((microbatch["labels"] >= POISON).any())
        return output * float("inf") if is_bad else output, loss

    with patch.object(GptForwardStep, "__call__", spoilt):
        train(flags, folder)


def test_the_end_after_bad_steps_names_remedies_that_work(folder):
    """Other data, and a lower learning rate: each is refused unless it is asked for by the words of the error."""
    output = folder / "poisoned"
    good, bad, other = (
        counting_pair(folder / name / "pair", num_documents=25, first=first)
        for name, first in (("good", 0), ("bad", POISON), ("other", 1000))
    )
    start = f"{SMALL}{PAIRS}--data_path "
    run_ranks(train_with_poison, 2, f"{start}{good} --max_steps 4", output, init=False, timeout=90)
    for _ in range(2):  # the same data end the run again, wherever it resumes
        ends = try_ranks(train_with_poison, 2, f"{start}{bad} --override data", output, init=False, timeout=90)
        for end in ends:
            assert end.error is not None
            assert "step 6 is bad, number 2 in a row" in end.error.text
            newest = output / "checkpoints" / "step_0000004"
            assert f"No checkpoint was followed by a finite step; the newest is {newest}" in end.error.text
    words = re.search(r"lower lr \(set override to (\w+)\) or other data \(override (\w+)\)", ends[0].error.text)
    assert words
    (_, asked), (lower, named) = words.groups(), (f"--override {word}" for word in words.groups())
    for end in try_ranks(train_with_poison, 2, f"{start}{other}", output, init=False, timeout=90):
        assert end.error is not None and f"or set override to {asked}" in end.error.text
    run_ranks(train_with_poison, 2, f"{start}{other} {named} --max_steps 2", output, init=False, timeout=90)
    seen = [record for record in records(output) if not record["skipped"]]
    assert [(r["step"], r["consumed_samples"]) for r in seen] == [(step, 4 * step) for step in range(1, 7)]
    assert [r["lr"] for r in seen] == pytest.approx([0, 2.5e-3, 5e-3, 7.5e-3, 1e-2, 7.5e-3])
    slower = f"{start.replace('--lr 1e-2', '--lr 1e-3')}{other}"
    run_ranks(train_with_poison, 2, f"{slower} {lower}", output, init=False, timeout=90)
    last = records(output)[-2:]
    assert [(r["step"], r["skipped"]) for r in last] == [(7, False), (8, False)]
    assert [r["lr"] for r in last] == pytest.approx([5e-4, 2.5e-4])
