"""Weight gradients that wait for W; tp ranks and their messages are stand-ins."""

from types import SimpleNamespace

import torch

from megaaccum.executor import wgrad


def test_an_input_is_gathered_under_the_product_before_its_own(monkeypatch):
    happened: list[str] = []

    def start(part: torch.Tensor, tp: object):
        name = int(part[0, 0])
        happened.append(f"gather {name}")
        return part, SimpleNamespace(wait=lambda: happened.append(f"wait {name}"))

    monkeypatch.setattr(wgrad, "start_gather", start)
    owed = wgrad.WeightGrads()
    weights = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    for number, weight in enumerate(weights):
        owed.add(weight, wgrad.Product(torch.full((4, 2), float(number)), torch.ones(4, 2), gather=object()))  # type: ignore[arg-type]
    owed.compute(lambda weight, grad: happened.append(f"add {int(grad[0, 0]) // 4}"))
    assert happened == [
        "gather 0", "gather 1", "wait 0", "add 0", "gather 2", "wait 1", "add 1", "wait 2", "add 2",
    ]  # fmt: skip


def test_the_uses_of_a_weight_are_added_in_the_precision_of_its_gradient():
    """Autograd does so in a backward that is not split."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    parts = [torch.full((2, 2), each, dtype=torch.bfloat16) for each in (1.0, 2.0**-9, 2.0**-9)]
    owed = wgrad.WeightGrads()
    for part in parts:
        owed.add(weight, lambda part=part: part)  # type: ignore[misc]
    owed.compute()
    assert weight.grad is not None and weight.grad.tolist() == [[1 + 2.0**-8] * 2] * 2


def test_a_layer_under_autocast_has_the_gradients_of_torchs_own():
    """Its backward, and its W, run outside of the context in which its forward made 16-bit numbers of 32-bit ones."""
    torch.manual_seed(0)
    weight, given = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(5, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(
            torch.nn.functional.linear(given, weight).float().square().sum(), [given, weight]
        )
        output = wgrad._forward(input=given, weight=weight, bias=None, allreduce_dgrad=False, sequence_parallel=False)
    owed = wgrad.WeightGrads()
    with wgrad.put_aside(owed):
        output.float().square().sum().backward()
    owed.compute()
    assert given.grad is not None and weight.grad is not None
    assert given.grad.equal(expected[0]) and weight.grad.equal(expected[1])
