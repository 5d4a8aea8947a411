"""Text comparisons and samples in a run: what is suppressed, and what is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megaaccum.errors import DataError, StepError
from megaaccum.pretrain.training import evaluation


@pytest.fixture
def texts(monkeypatch):
    """`Texts` of a run that compares texts every second step, on an engine that computes nothing."""
    monkeypatch.setattr(evaluation, "read_run_tokenizer", lambda config, key: None)
    monkeypatch.setattr(evaluation.Texts, "_sample", lambda self, step: ("sample", {"step": step}, "a sample"))
    monkeypatch.setattr(evaluation.Texts, "_compare", lambda self, step: ("text_comparisons", {"step": step}, "right"))
    run = SimpleNamespace(text_comparisons_every=2, sample_every=3)
    log = SimpleNamespace(added=[], add_text=lambda *record: log.added.append(record))
    return evaluation.Texts(SimpleNamespace(plan=SimpleNamespace(config=SimpleNamespace(run=run))), None, log)


def test_each_is_logged_at_its_interval(texts):
    for step in range(1, 5):
        texts.after(step, is_last=step == 4)
    assert [(kind, record["step"]) for kind, record, _ in texts._log.added] == [
        ("text_comparisons", 2), ("sample", 3), ("text_comparisons", 4), ("sample", 4),
    ]  # fmt: skip


def test_an_error_of_the_model_is_not_suppressed(texts, monkeypatch):
    def fail(self, step):
        raise StepError("step 2 is open")

    monkeypatch.setattr(evaluation.Texts, "_compare", fail)
    with pytest.raises(StepError, match="step 2 is open"):
        texts.after(2, is_last=False)


def test_a_log_that_cannot_be_written_ends_the_run_later_on_every_rank(texts, monkeypatch):
    def full(*record):
        raise DataError("log.jsonl cannot be written")

    monkeypatch.setattr(texts._log, "add_text", full)
    texts.after(2, is_last=False)
