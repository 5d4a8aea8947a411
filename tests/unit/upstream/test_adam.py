"""The state that optimizers of a user's own are found to keep."""

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.upstream import adam
from tests.support.own_optimizers import Clipped, Counts, Lamb, OwnList, in_groups

BOTH = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    ("kind", "keys", "tensors", "others", "count"),
    [
        (torch.optim.SGD, {}, (), (), None),
        (torch.optim.SGD, {"momentum": 0.9}, ("momentum_buffer",), (), None),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, None, ("a state that does not begin at zero",), None),
        (torch.optim.AdamW, {"amsgrad": True}, (*BOTH, "max_exp_avg_sq"), (), torch.Tensor),
        (torch.optim.RMSprop, {"centered": True}, ("grad_avg", "square_avg"), (), torch.Tensor),
        (torch.optim.NAdam, {}, BOTH, ("mu_product",), torch.Tensor),
        (torch.optim.Rprop, {}, None, ("a state that does not begin at zero",), torch.Tensor),
    ],
)
def test_what_an_optimizer_keeps(kind, keys, tensors, others, count):
    layer = torch.nn.Linear(3, 4)
    layer(torch.ones(3)).sum().backward()
    optimizer = kind(layer.parameters(), lr=0.1, **keys)
    before, groups = [param.clone() for param in layer.parameters()], list(optimizer.param_groups)
    kept = adam.look_at(optimizer)
    assert (kept.others, kept.count, kept.cuts) == (others, count, True)
    assert tensors is None or kept.tensors == tensors
    assert all(map(torch.equal, before, layer.parameters())), "gradients that are there are not stepped"
    assert optimizer.param_groups == groups and not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimizers_of_whole_parameters(kind):
    assert not adam.look_at(kind([torch.nn.Parameter(torch.ones(3, 4))])).cuts


@pytest.mark.parametrize(
    "made",
    [
        lambda params: Lamb(in_groups(params, {"weight_decay": 0.0}, {"weight_decay": 0.1})),
        Clipped,
    ],
)
def test_a_later_group_or_step_that_needs_the_whole_parameter(made):
    assert not adam.look_at(made(torch.nn.Linear(3, 4).parameters())).cuts


def test_each_group_keeps_tensors_of_its_own():
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(in_groups(layer.parameters(), {"momentum": 0.0}, {"momentum": 0.9}), lr=0.1)
    assert adam.look_at(optimizer) == adam.Kept(tensors=("momentum_buffer",))
    assert adam.moments(optimizer, layer.bias) == ()
    assert adam.moments(optimizer, layer.weight) == ("momentum_buffer",)


@pytest.mark.parametrize(("own", "name"), [(False, 'group["k"]'), (True, "self.calls")])
def test_a_count_of_calls(own, name):
    optimizer = Counts(torch.nn.Linear(3, 4).parameters(), own=own)
    kept = adam.look_at(optimizer)
    assert (kept.others, kept.counts, kept.cuts) == ((name,), (name,), True)
    adam.check_calls(optimizer, 1)
    with pytest.raises(ConfigError, match="deepspeed makes 2 calls in a step"):
        adam.check_calls(optimizer, 2)


def test_a_number_that_no_step_reads_is_no_state():
    class Timed(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            super().step()

    kept = adam.look_at(Timed(torch.nn.Linear(3, 4).parameters(), lr=0.1))
    assert (kept.others, kept.counts, kept.tensors) == ((), (), ("exp_avg", "exp_avg_sq"))


def test_an_optimizer_is_as_before():
    """Counts, lists, hooks, schedulers' calls and random states: the look runs none of them and changes none."""
    layer, calls = torch.nn.Linear(3, 4), []
    layer(torch.ones(3)).sum().backward()
    for made in (lambda params: Counts(params, own=True), Counts, OwnList, lambda params: torch.optim.SGD(params, 0.1)):
        optimizer = made(layer.parameters())
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        before = {name: repr(value) for name, value in vars(optimizer).items()}
        weights, random = layer.weight.clone(), torch.get_rng_state()
        kept = adam.look_at(optimizer)
        assert "self._opt_called" not in kept.others, "the scheduler's mark is no state"
        assert {name: repr(value) for name, value in vars(optimizer).items()} == before
        assert torch.equal(weights, layer.weight) and torch.equal(random, torch.get_rng_state()) and not calls


def test_an_optimizer_with_parameters_in_a_list_of_its_own():
    assert adam.look_at(OwnList(torch.nn.Linear(3, 4).parameters())).others == (adam.OWN_LIST,)


@pytest.mark.parametrize("lr", [0.0, 1e-12, torch.tensor(0.0)])
def test_a_rate_at_which_fp32_shows_nothing(lr):
    kept = adam.look_at(torch.optim.AdamW(torch.nn.Linear(3, 4).parameters(), lr=lr, foreach=False))
    assert kept == adam.Kept(count=torch.Tensor)


def test_an_optimizer_that_takes_a_closure():
    with pytest.raises(TypeError, match="closure"):
        adam.look_at(torch.optim.LBFGS(torch.nn.Linear(3, 4).parameters()))


class InFewBits(torch.optim.Optimizer):
    """Momentum with codes of 8 bits, whose scales lie beside them, as bitsandbytes' and torchao's; that of a small
    parameter is in FP32. beside: scales lie in the optimizer, of all parameters, as those of Transformer Engine's."""

    def __init__(self, params, *, beside=False):
        super().__init__(params, dict(lr=0.1))
        self.beside, self._scales = beside, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                scales = self._scales if self.beside else state
                if not state and (self.beside or param.numel() >= 4096):
                    state["momentum"] = torch.zeros_like(param, dtype=torch.int8)
                    scales[param if self.beside else "scale"] = torch.ones(())
                codes = state.setdefault("momentum", torch.zeros_like(param))
                scale = scales[param] if self.beside else state.get("scale", torch.ones(()))
                momentum = codes * scale * 0.9 + param.grad
                if codes.dtype is torch.int8:
                    scale.copy_(momentum.abs().amax() / 127)
                codes.copy_(momentum / scale if codes.dtype is torch.int8 else momentum)
                param.add_(momentum, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("beside", "others"),
    [(False, "another state for parameters of 4,096 elements or more"), (True, "self._scales")],
)
def test_states_in_few_bits_are_not_those_of_a_checkpoint(beside, others):
    assert others in adam.look_at(InFewBits(torch.nn.Linear(3, 4).parameters(), beside=beside)).others


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
def test_a_count_lies_where_the_step_reads_it(capturable, device):
    """A GPU's count that the host reads would be waited for, once per parameter and step."""
    param = torch.nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([param], capturable=capturable)
    adam.state_of(optimizer, param, ("exp_avg",))
    assert optimizer.state[param]["step"].device.type == device
    adam.set_adam_step(optimizer, [param], 3)
    assert optimizer.state[param]["step"].device.type == device
