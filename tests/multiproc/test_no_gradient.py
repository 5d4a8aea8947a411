"""Parameters that get no gradient in a step neither hang a backend nor change the gradients of the others."""

from functools import cache

import pytest

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support import no_gradient, parity
from tests.support.distance import problems_with, total_error
from tests.support.parity import Case, Reference

SMALL = "--num_layers 4 "
TWO = "--num_layers 2 "
"""Layers of a model of which no rank has several chunks."""
EXPERTS = (
    SMALL + "--num_experts 8 --moe_router_topk 1 --moe_router_pre_softmax --moe_ffn_hidden_size 32"
    " --add_bias_linear false --moe_router_load_balancing_type none "
)
BOUNDARIES = ("", "--sync streaming ", "--zero_stage 2 ", "--backend fsdp2 ", "--backend fsdp2 --sync streaming ",
              "--backend megatron ", "--backend ddp ")  # fmt: skip
SMALL_BUCKETS = "--reduce_bucket_size 4000 --zero_stage "
WHOLE = "--tensor_model_parallel_size 2 --sequence_parallel --expert_tensor_parallel_size 1 "
SPLIT, PLAIN = "--pp_microbatches 4 --pipeline_model_parallel_size 2 --schedule dualpipev ", "--pp_microbatches 4 "


def check(change: no_gradient.Change, cases: list[Case]) -> None:
    """Run distance.check on a changed model."""
    found = []
    by_rank = run_ranks(no_gradient.gradients, 4, cases, change, timeout=60 + 15 * len(cases))
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        found += [f"{case}: {problem}" for problem in problems_with(case, list(ranks), *references(change, case))]
    assert not found, "\n" + "\n".join(found)


def references(change: no_gradient.Change, case: Case) -> list[Reference]:
    """Gradients of the changed model in one process: in float64, and in the precision of the lane."""
    return _references(change, case.model, case.plan().batch.global_batch_size, case.lane)


@cache
def _references(change: no_gradient.Change, model: str, batch: int, lane: str) -> list[Reference]:
    return run_ranks(no_gradient.references, 1, change, model, batch, ["fp64", lane])[0]


@pytest.mark.parametrize(
    ("change", "model", "pipeline"),
    [
        (no_gradient.frozen, SMALL, SPLIT),
        (no_gradient.unused, TWO, PLAIN),
        (no_gradient.skipping, EXPERTS, SPLIT),
        (no_gradient.skipping, EXPERTS, SPLIT + WHOLE),
    ],
    ids=["frozen", "unused", "experts", "spread experts"],
)
def test_every_boundary(change, model, pipeline):
    check(change, [Case(4, backend + pipeline, model) for backend in BOUNDARIES])


def test_parameters_that_some_microbatches_skip():
    """Ranks would fill buckets in other orders: the last backward of one brings a gradient that another's does not."""
    layouts = [*(f"{SMALL_BUCKETS}{stage} " for stage in (1, 2, 3)), *BOUNDARIES[1:2], *BOUNDARIES[3:]]
    ordered = (f"{SMALL_BUCKETS}3 ", "--zero_stage 1 ", BOUNDARIES[3], *BOUNDARIES[5:])
    layouts += [each + "--reproducible layout " for each in ordered]
    splits = ((PLAIN, TWO), (SPLIT, SMALL))
    check(no_gradient.seldom, [Case(4, layout + split, model) for layout in layouts for split, model in splits])


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (SMALL_BUCKETS + "1 ", no_gradient.gated),
        (SMALL_BUCKETS + "3 ", no_gradient.gated),
        ("--backend ddp --recompute_granularity full ", no_gradient.gated_above_frozen),
    ],
    ids=["zero-1", "zero-3", "ddp"],
)
def test_parameters_that_some_microbatches_skip_beside_experts_of_other_ranks(layout, change):
    """A rank that waited for such a reduction in its last backward would keep its experts from another's tokens. DDP
    waits at the end of the backward of the last gradient, which may be that of one recomputed layer."""
    check(change, [Case(4, layout + "--expert_model_parallel_size 2 " + PLAIN, EXPERTS)])


def test_layers_that_some_microbatches_skip():
    """In all modes that gather the parameters of a stage at once."""
    layouts = ["", "--zero_stage 1 ", "--backend fsdp2 ", "--backend megatron ", "--backend ddp "]
    check(no_gradient.dropped, [Case(4, layout + PLAIN, TWO) for layout in layouts])


def test_layers_that_some_microbatches_do_not_call():
    """FSDP2 gathers and reduces a layer where it runs, and ranks run others at a time."""
    layouts = ["", "--data_parallel_replicas 2 ", "--deterministic ", "--reproducible layout "]
    layouts.append("--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 ")
    cases = [Case(4, f"--backend fsdp2 {layout}" + PLAIN, SMALL) for layout in layouts]
    check(no_gradient.uncalled, [*cases, Case(4, "--backend fsdp2 " + SPLIT, SMALL)])


def test_layers_that_some_microbatches_do_not_call_beside_experts_of_other_ranks():
    """A rank that waited for such a layer in its last backward would keep its experts from another's tokens."""
    case = Case(4, "--expert_model_parallel_size 2 --backend fsdp2 " + PLAIN, EXPERTS + "--moe_layer_freq [0,1,0,1] ")
    check(no_gradient.uncalled, [case])


ALL = [0, 1, 2]
OF_FSDP2 = {
    "in a later step": [[ALL] * 8, [ALL] * 5 + [[0, 2], [1], ALL]],
    "another on each rank": [[ALL] * 6 + [[1, 2], [0, 2]], [[0, 1]] * 7 + [[1]]],
    "on one rank": [[ALL, [1, 2]] * 4, [ALL] * 6 + [[], ALL]],
    "in the first micro-batches": [[[0]] * 4 + [ALL] * 4, [ALL] * 8],
    "everywhere": [[[1, 2]] * 8, [[]] * 7 + [[2]]],
    "or called again": [[ALL + ALL] * 8, [ALL, [2, 0, 2]] * 4, [[1, 1, 0]] * 7 + [ALL]],
}
"""By step and micro-batch of two ranks, which take turns, the layers that it calls."""


def own_layers(
    steps: list[list[list[int]]], shared: str = "", *, is_reentrant: bool = False, **sharding: str
) -> tuple[float, list[str]]:
    """By how much weights and losses differ from those of one process, and what happened in the last backward of the
    first step: names of parameters that were reduced, and of layers whose backward began.

    A layer -1 is a use of layer 1's bias outside of it. shared: what has a parameter of layer 0 too. is_reentrant: a
    checkpoint runs each layer.
    """
    import copy

    import torch
    from torch.utils.checkpoint import checkpoint

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
            if shared == "layer":
                self.layers[2] = self.layers[0]
            elif shared:
                self.get_submodule(shared).weight = self.layers[0].weight

        def forward(self, batch):
            hidden = self.first(batch["x"])
            for number in batch["calls"]:
                more = self.layers[number](hidden) if number >= 0 else hidden + self.layers[1].bias
                if is_reentrant:
                    more = checkpoint(self.layers[number], hidden, use_reentrant=True)
                if more.requires_grad:
                    more.register_hook(lambda _, number=number: events.append(f"backward of {number}"))
                hidden = hidden + more.tanh()
            return self.last(hidden)

    def forward_step(data, model):
        return model(next(data)), lambda output: (output.square().sum(), 1, {})

    events: list[str] = []
    rank, model = torch.distributed.get_rank(), Model().double()
    reference = copy.deepcopy(model)
    batch = dict(micro_batch_size=1, seq_length=8, grad_accum_steps=4)
    sharding = dict(backend="fsdp2", sync="resident") | sharding
    plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(clip_grad=0.0))
    engine = initialize(
        plan, model, forward_step_func=forward_step, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    engine.backend.before_reduce = lambda name, _: events.append(name)
    ours, optimizer, apart = [], torch.optim.SGD(reference.parameters(), lr=0.1), 0.0
    for calls in steps:
        data = [dict(x=torch.randn(1, 8, dtype=torch.float64), calls=each) for each in calls]
        events.clear()
        losses = [engine.evaluate(data[rank::2])[0], engine.train_step(data[rank::2]).loss]
        if not ours and "backward of 2" in events:
            ours = events[-events[::-1].index("backward of 2") :]
        loss = torch.stack([reference(each).square().sum() for each in data]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights, wanted = dict(engine.whole_weights()), dict(reference.named_parameters())
        apart = max(
            apart,
            *(abs(each - loss.item()) for each in losses),
            *((weights[name] - wanted[name]).abs().max().item() for name in wanted),
        )
    return apart, ours


def each_of_own_layers(runs: list[list[list[list[int]]]]) -> list[tuple[float, list[str]]]:
    from megaaccum.distributed import groups

    found = []
    for steps in runs:
        groups.destroy()
        found.append(own_layers(steps))
    return found


@pytest.fixture(scope="module")
def own() -> dict[str, list[tuple[float, list[str]]]]:
    """By name of the run, what each rank found."""
    runs = OF_FSDP2 | {"all": [[ALL] * 8]}
    ranks = run_ranks(each_of_own_layers, 2, list(runs.values()), timeout=90)
    return dict(zip(runs, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", OF_FSDP2)
def test_layers_of_an_own_model_that_some_microbatches_do_not_call(name, own):
    for apart, _ in own[name]:
        assert apart < 1e-12


def test_layers_that_every_microbatch_calls_are_reduced_under_the_last_backward(own):
    for _, events in own["all"]:
        assert [event for event in events if "bias" not in event][:5] == [
            "layers.2.weight", "backward of 1", "layers.1.weight", "backward of 0", "layers.0.weight"
        ]  # fmt: skip


def test_a_gradient_of_a_layer_that_comes_after_its_reduction_ends_the_run():
    ends = try_ranks(own_layers, 2, [[ALL] * 6 + [[-1, *ALL]] * 2], timeout=40)
    assert all(end.failed for end in ends)
    found = [end.error for end in ends if end.error and end.error.kind == "FlushError"]
    assert "a gradient of module.layers.1.bias came after its reduction" in found[0].text


def test_a_layer_that_is_listed_twice_is_cut_once():
    for apart, _ in run_ranks(own_layers, 2, [[ALL] * 8, [[0], ALL] * 4], "layer", timeout=40):
        assert apart < 1e-12


@pytest.mark.parametrize(("calls", "instead"), [([0, 2, 1], "module.layers.1"), ([*ALL, 2], "the end")])
def test_layers_that_run_in_another_order_end_a_run_that_gathers_layer_by_layer(calls, instead):
    """FSDP2 mixed up the weights of layers of one size without a word."""
    ends = try_ranks(own_layers, 2, [[ALL] * 4 + [ALL, calls] + [ALL] * 2], timeout=40, sync="streaming")
    assert all(end.failed for end in ends)
    assert f"run other layers of this chunk (module.layers.2 in place of {instead})" in str(ends[1].error)


def test_layers_that_run_twice_in_reentrant_checkpoints():
    """FSDP2 reduces the first backward's gradients alone."""
    twice = [[ALL + ALL] * 8]
    for apart, _ in run_ranks(own_layers, 2, twice, is_reentrant=True, timeout=40):
        assert apart < 1e-12
    for end in try_ranks(own_layers, 2, twice, is_reentrant=True, sync="streaming", timeout=40):
        assert end.error is not None and "checkpoint a layer that runs more than once with use_reent" in end.error.text


@pytest.mark.parametrize("shared", ["last", "layers.2"])
def test_one_weight_of_two_units_of_fsdp2_ends_the_run(shared):
    """FSDP2 would cut it in one, and fail in the other."""
    for end in try_ranks(own_layers, 2, [[ALL] * 8], shared, timeout=40):
        assert end.error is not None and end.error.kind == "ConfigError"
        assert "layers.0.weight" in end.error.text and f"{shared}.weight" in end.error.text


@pytest.mark.parametrize("backend", ["--sync streaming ", "--backend fsdp2 --sync streaming "])
def test_a_layer_that_a_rank_leaves_out_ends_a_run_that_gathers_layer_by_layer(backend):
    ends = try_ranks(no_gradient.gradients, 2, [Case(2, backend + PLAIN, SMALL)], no_gradient.left_out, timeout=40)
    assert all(end.failed for end in ends)
    last = ends[1].error
    assert last is not None and last.kind == "FlushError" and "other layers of this chunk (decoder" in last.text


def by_two_functions(backend: str) -> list[int]:
    """Values that a function of a part of the model reports, between steps of the whole one."""
    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = torch.nn.Linear(8, 8), torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in "ab")
            self.last = torch.nn.Linear(8, 8)

        def forward(self, hidden, whole=True):
            hidden = self.layers[0](self.first(hidden))
            return self.last(self.layers[1](hidden)) if whole else hidden

    def whole(data, model):
        return model(next(data)), lambda output: (output.square().sum(), 1, {})

    def part(data, model):
        return model(next(data), whole=False), lambda output: (output.sum(), 1, {"seen": output.numel()})

    batch = dict(micro_batch_size=1, seq_length=8, grad_accum_steps=2)
    plan = Plan.of(batch=batch, sharding=dict(backend=backend, sync="streaming"), optimizer=dict(lr=0.1))
    engine, data = initialize(plan, Model(), forward_step_func=whole), [torch.ones(1, 8)] * 2
    seen = []
    for _ in range(2):
        seen += [int(report["seen"]) for report in engine.forward(data, forward_step_func=part)]
        engine.train_step(data)
        engine.evaluate(data)
    return seen


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_another_forward_step_function_may_run_a_part_of_a_model_that_streams(backend):
    assert run_ranks(by_two_functions, 2, backend, timeout=40) == [[8] * 4] * 2


def without_a_call(backend: str, microbatch: int) -> None:
    """A step in which rank 1's forward step does not call the model in one micro-batch."""
    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, hidden):
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    def forward_step(data, model):
        batch = next(data)
        if not batch:
            return torch.zeros((), requires_grad=True), lambda output: (output, 0, {})
        return model(batch["x"]), lambda output: (output.square().sum(), 1, {})

    batch = dict(micro_batch_size=1, seq_length=8, grad_accum_steps=2)
    plan = Plan.of(batch=batch, sharding=dict(backend=backend, sync="streaming"))
    engine = initialize(plan, Model(), forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    data = [dict(x=torch.randn(1, 8)) for _ in range(2)]
    if torch.distributed.get_rank() == 1:
        data[microbatch] = {}
    engine.train_step(data)


@pytest.mark.parametrize(("backend", "microbatch"), [("deepspeed", 0), ("deepspeed", 1), ("fsdp2", 1)])
def test_a_forward_step_that_does_not_call_the_model_ends_a_run_that_gathers_layer_by_layer(backend, microbatch):
    """The other rank waited to gather a layer until the timeout."""
    ends = try_ranks(without_a_call, 2, backend, microbatch, timeout=40)
    assert all(end.failed and not end.ended_by_harness for end in ends)
    last = ends[1].error
    assert last is not None and last.kind == "FlushError"
    assert f"the forward step of micro-batch {microbatch} does not call the model" in last.text


def test_a_rank_that_trains_nothing_ends_all_with_one_message():
    case = Case(2, PLAIN + "--pipeline_model_parallel_size 2", SMALL)
    ends = try_ranks(no_gradient.gradients, 2, [case], no_gradient.frozen_stage)
    for end in ends:
        assert end.error is not None
        assert end.error.kind == "ConfigError"
        assert "rank 0: all 26 parameters of this pipeline rank are frozen" in end.error.text


def test_other_ways_of_the_backward():
    """A last backward, or an unsplit one, computes the gradients that I and W compute under the other schedule."""
    check(no_gradient.frozen, [Case(4, "--sync streaming " + PLAIN, SMALL), Case(4, "--backend ddp " + PLAIN, SMALL)])


def biases(frozen: str) -> dict[str, list[float]]:
    """Gradients of biases in one process where matrices with `frozen` in their name do not train."""
    chunk, plan = parity.one_process(SMALL, "fp64")
    for name, param in parity.named(chunk):
        param.requires_grad_(not (param.dim() > 1 and frozen and frozen in name))
    grads = parity.gradient_of(chunk, plan, range(2)).gradient.parts
    return {name: grad.tolist() for name, grad in grads.items() if name.endswith("bias")}


def test_a_bias_of_a_frozen_matrix_is_trained():
    """Megatron's own linear layers give it no gradient."""
    (true,), *frozen = (run_ranks(biases, 1, name) for name in ("", "linear", "linear_fc1"))
    for (found,) in frozen:
        assert found.keys() == true.keys()
        for name, grad in true.items():
            assert found[name] == pytest.approx(grad, rel=1e-9, abs=1e-15), name


RECOMPUTE = (
    "--recompute_granularity full ",
    "--recompute_granularity full --recompute_method block --recompute_num_layers 2 ",
    "--recompute_granularity selective --recompute_modules core_attn mlp ",
)


@pytest.mark.parametrize("backends", [BOUNDARIES[:4], BOUNDARIES[4:]], ids=["deepspeed", "others"])
def test_what_is_recomputed_behind_frozen_layers_has_its_gradient(backends):
    """Megatron's checkpoints give none where their input needs none."""
    layouts = [backend + RECOMPUTE[number % 3] for number, backend in enumerate(backends)]
    layouts += [backends[0] + each for each in RECOMPUTE[1:]]
    check(no_gradient.frozen, [Case(4, layout + PLAIN, SMALL) for layout in layouts])


def test_recompute_under_a_split_backward():
    check(no_gradient.frozen, [Case(4, each + SPLIT, SMALL) for each in RECOMPUTE[::2]])


def test_sixteen_bit():
    """The zeros that a backend makes for them have the precision of the sums."""
    layouts = ("--backend fsdp2 " + PLAIN, "--backend fsdp2 " + SPLIT, SPLIT)
    check(no_gradient.unused, [Case(4, layout, SMALL, "bf16") for layout in layouts])


# --- broken on purpose ------------------------------------------------------------------------------------------------


def released_with_its_last_gradient(cases: list[Case]):
    """A unit is released when all that is trained of it has a gradient, though a frozen matrix is still to be read; its
    memory is another's by then."""
    import torch

    from megaaccum.sharding.streaming import StreamingBackend

    def on_gradient(self, param):
        unit = self._owner[id(param)]
        unit.arrived += 1
        if unit is self._in_backward and unit.arrived == len(unit.own):
            self._end_backward()
            for each in unit.params:
                each.data = torch.zeros(each.ds_shape, dtype=each.dtype)

    StreamingBackend._on_gradient = on_gradient
    return no_gradient.gradients(cases, no_gradient.frozen)


def sent_only_when_all_have_come(cases: list[Case]):
    """A bucket is reduced when each of its parameters has had a gradient, and else not at all."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    from megaaccum.sharding.expert_turns import ExpertTurns
    from megaaccum.upstream.pytorch import in_backward

    finish, finish_grad_sync = ExpertTurns.finish, BucketGroup.finish_grad_sync

    def finish_if_come(self, param) -> None:
        if in_backward():
            finish(self, param)

    def finish_if_sent(self, *args, **keys) -> None:
        if self.grad_reduce_handle is not None:
            finish_grad_sync(self, *args, **keys)

    ExpertTurns.finish, BucketGroup.finish_grad_sync = finish_if_come, finish_if_sent
    return no_gradient.gradients(cases, no_gradient.unused)


def reduced_as_they_come(cases: list[Case]):
    """Each rank puts gradients into its bucket as its own last backward brings them."""
    from megaaccum.sharding.agreed_order import AgreedOrder

    AgreedOrder.add = lambda self, param: self._reduce(param)
    return no_gradient.gradients(cases, no_gradient.seldom)


ONE_BUCKET = "--zero_stage 1 --reduce_bucket_size 50000000 "


@pytest.mark.parametrize(
    ("mistake", "change", "layout", "error", "layer"),
    [
        (released_with_its_last_gradient, no_gradient.frozen, "--sync streaming ", 0.208, 1),
        (sent_only_when_all_have_come, no_gradient.unused, "--backend megatron ", 0.696, 1),
        (reduced_as_they_come, no_gradient.seldom, ONE_BUCKET, 0.936, 2),
    ],
)
def test_a_mistake_is_a_wrong_gradient_under_the_right_loss(mistake, change, layout, error, layer):
    case = Case(2, layout + PLAIN, SMALL)
    ranks = [gradient for (gradient,) in run_ranks(mistake, 2, [case])]
    exact, near = references(change, case)
    found = problems_with(case, ranks, exact, near)
    assert total_error(ranks, exact) == pytest.approx(error, rel=0.01)
    assert [each for each in found if "error" in each and f"worst decoder.layers.{layer}." in each], found
    assert not [each for each in found if "loss" in each], found
