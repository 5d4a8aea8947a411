"""The first tensor at a border of stages that is wrong, in the order of a step."""

from __future__ import annotations

import pytest
import torch

from megaaccum.lab.verification.borders import of_layers
from megaaccum.lab.verification.localise import first_wrong_border
from megaaccum.lab.verification.records import RECEIVED, SENT, Crossing, Observed, Reference

AFTER = ("layers.0", "layers.1")


def tensors(microbatch: int, stage: int) -> list[torch.Tensor]:
    """Activation and gradient at the border after stage `stage`."""
    generator = torch.Generator().manual_seed(10 * microbatch + stage)
    return [torch.randn(4, 2, 3, dtype=torch.float64, generator=generator) for _ in range(2)]


REFERENCE = Reference({}, layers=[{name: tensors(m, stage) for stage, name in enumerate(AFTER)} for m in range(2)])


def seen() -> list[Crossing]:
    """The messages of two micro-batches between three stages."""
    found = []
    for m in range(2):
        for stage, name in enumerate(AFTER):
            for is_gradient, values in enumerate(tensors(m, stage)):
                ways = (RECEIVED, SENT) if is_gradient else (SENT, RECEIVED)
                for at, way in zip((stage, stage + 1), ways, strict=True):
                    found.append(Crossing(at, way, bool(is_gradient), name, m, values.clone(), 0, 1))
    return found


def where(found: list[Crossing]) -> str:
    return first_wrong_border([Observed(0, {}, [], crossings=found)], REFERENCE, 1e-6)


def test_right_borders_leave_the_inside_of_a_stage():
    assert where(seen()).startswith("activations and gradients at the borders of stages are right")
    assert where([]) == ""


@pytest.mark.parametrize(
    ("stage", "way", "is_gradient", "words"),
    [
        (0, SENT, False, "in the forward: the activation of micro-batch 1 that stage 0 sends"),
        (1, RECEIVED, False, "in the forward: the activation of micro-batch 1 that stage 1 receives"),
        (2, SENT, True, "in the backward: the gradient of micro-batch 1 that stage 2 sends"),
        (0, RECEIVED, True, "in the backward: the gradient of micro-batch 1 that stage 0 receives"),
    ],
)
def test_what_is_wrong_first_is_named_though_all_after_it_is_wrong(stage, way, is_gradient, words):
    found = sorted(seen(), key=lambda each: (each.is_gradient, each.stage * (-1 if each.is_gradient else 1)))
    start = next(
        i for i, each in enumerate(found) if (each.stage, each.way, each.is_gradient) == (stage, way, is_gradient)
    )
    for each in found[start:]:
        if each.microbatch == 1 and not (each.stage == stage and each.is_gradient == is_gradient and each.way != way):
            each.values.mul_(0.5)
    assert words in where(found)
    assert "is x 0.5" in where(found)


def test_a_run_of_the_sequence_is_compared_with_its_part():
    values = tensors(0, 0)[0].chunk(2)[1].clone()
    assert "are right" in where([Crossing(0, SENT, False, AFTER[0], 0, values, 1, 2)])
    assert "off by" in where([Crossing(0, SENT, False, AFTER[0], 0, values, 0, 2)])


def test_layers_of_one_process():
    model = torch.nn.Sequential()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)])
    x = torch.randn(2, 3, dtype=torch.float64)
    with of_layers(model, 0.5) as found:
        (model.layers[1](model.layers[0](x)).sum() * 0.5).backward()
    assert set(found) == {"layers.0", "layers.1"}
    assert torch.equal(found["layers.1"][1], torch.ones(2, 3, dtype=torch.float64))
