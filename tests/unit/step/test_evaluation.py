"""Forwards alone leave the FP8 weights of an open step as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.model.fp8 import Fp8
from megaaccum.step import evaluation
from megaaccum.step.loss import Tally
from megaaccum.upstream import te


class Chunk(torch.nn.Module):
    """A chunk that notes when it is to quantize its weights; Megatron's schedules tell it in every flush."""

    def __init__(self) -> None:
        super().__init__()
        self.happened: list[str] = []

    def set_is_first_microbatch(self) -> None:
        self.happened.append("quantize")

    def flush(self, name: str) -> None:
        self.set_is_first_microbatch()
        self.happened.append(name)


@pytest.mark.parametrize(
    ("is_open", "happened"),
    [
        (True, ["quantize", "training", "evaluation", "training"]),
        (False, ["quantize", "training", "quantize", "evaluation", "training"]),
    ],
)
def test_an_evaluation_reads_the_weights_that_an_open_step_has_quantized(monkeypatch, is_open, happened) -> None:
    """Under delayed scaling the scale has moved since, and the step's later flushes would read other weights."""
    monkeypatch.setattr(te, "stop_updates", lambda: lambda forward: None)
    monkeypatch.setattr(te, "make_states", lambda chunk: None)
    monkeypatch.setattr(te, "states", lambda chunk: [])
    monkeypatch.setattr(evaluation, "spread_over_batch", lambda *_: None)
    monkeypatch.setattr(evaluation.call_agreement, "on_call", lambda *_, **__: None)
    monkeypatch.setattr(evaluation.call_agreement, "with_lengths", lambda batch, *_: batch)
    chunk = Chunk()
    steps: Any = SimpleNamespace(
        drop_begun=lambda: None,
        plan=SimpleNamespace(layout=SimpleNamespace(tp=1, cp=1, ep=1)),
        groups=SimpleNamespace(pp=None),
        backend=SimpleNamespace(gather=lambda: None, streamed_modules=list, drop_gathered=lambda: None),
        fp8=Fp8([chunk]),
        chunks=[chunk],
        opened=SimpleNamespace(step=1) if is_open else None,
        flush=lambda *_, **__: chunk.flush("evaluation"),
    )
    steps.fp8.begin_attempt()
    chunk.flush("training")
    batch: Any = []
    assert isinstance(evaluation.forward(steps, batch), Tally)
    chunk.flush("training")
    assert chunk.happened == happened
