"""Text comparisons and samples in a run: what is suppressed, and what is not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megaaccum.errors import StepError
from megaaccum.pretrain.training import evaluation


class OneSample(list):
    """A dataset of one sample of two tokens."""

    spans = (SimpleNamespace(start=0),)


@pytest.fixture
def log():
    log = SimpleNamespace(added=[])
    log.add_text = lambda kind, record, text: log.added.append((kind, record["step"]))
    return log


@pytest.fixture
def texts(monkeypatch, log):
    """`Texts` of a run that compares texts every second step and samples every third, on an engine that computes
    nothing."""
    tokenizer = SimpleNamespace(decode=str, get_vocab_size=lambda: 8)
    monkeypatch.setattr(evaluation, "read_run_tokenizer", lambda config, key: tokenizer)
    monkeypatch.setattr(evaluation, "sample", lambda engine, prompt, vocab_size: [3])
    monkeypatch.setattr(evaluation, "raise_on_all_ranks", lambda action, *args: action(*args))  # this process is alone
    monkeypatch.setattr(evaluation, "compare_texts", lambda *_: {"accuracy": 0.5, "centered_accuracy": 0.0})
    run = SimpleNamespace(text_comparisons_every=2, sample_every=3)
    engine = SimpleNamespace(plan=SimpleNamespace(config=SimpleNamespace(run=run)), batch=SimpleNamespace(seq_length=3))
    data = SimpleNamespace(train=OneSample([{"tokens": np.array([1, 2])}]))
    return evaluation.Texts(engine, data, log)


def test_each_is_logged_at_its_interval(texts, log):
    for step in range(1, 5):
        texts.after(step, is_last=step == 4)
    assert log.added == [("text_comparisons", 2), ("sample", 3), ("text_comparisons", 4), ("sample", 4)]


def test_an_error_of_the_model_is_not_suppressed(texts, monkeypatch):
    def fail(*_):
        raise StepError("step 2 is open")

    monkeypatch.setattr(evaluation, "compare_texts", fail)
    with pytest.raises(StepError, match="step 2 is open"):
        texts.after(2, is_last=False)
