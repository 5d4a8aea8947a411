"""Models of a user's own with unusual parameters and buffers, beside torch and through checkpoints."""

from __future__ import annotations

import os

import pytest

from megaaccum.errors import FlushError
from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine_inputs import batches, forward_step, said


def of_unusual_shapes(backend: str, folder: str) -> dict:
    """How far the gradient of each parameter is from torch's own, over two ranks: a transposed one, one that is read as
    complex numbers, and a scalar where the backend takes it. A checkpoint in `folder` takes them back."""
    import copy

    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(8, 8)
            self.turned = torch.nn.Parameter(torch.randn(4, 8).t())
            self.pairs = torch.nn.Parameter(torch.randn(2, 2))
            self.scale = torch.nn.Parameter(torch.tensor(1.5)) if backend in ("ddp", "megatron") else 1.5

        def forward(self, batch):
            output = (self.layer(batch * self.scale) @ self.turned).unflatten(-1, (2, 2))
            turns = torch.view_as_complex(self.pairs).conj()
            return torch.view_as_real(torch.view_as_complex(output) * turns).flatten(-2)

    model, data = Model(), batches(8)
    reference = copy.deepcopy(model)
    batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=dict(backend=backend), optimizer=dict(clip_grad=0.0), world_size=2)
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    torch.stack([reference(batch).square().sum() for batch in data]).sum().div(4.0 * len(data)).backward()
    wanted, distances = dict(reference.named_parameters()), {}

    def compare() -> None:
        for shard in engine.backend.shards():
            whole = wanted[shard.name].grad.reshape(-1)[shard.start :][: shard.grad.numel()]
            if whole.numel():
                distances[shard.name] = float(
                    (shard.grad.view(-1) - whole).abs().max() / wanted[shard.name].grad.norm()
                )

    engine.backend.step = compare
    engine.train_step(data[torch.distributed.get_rank() :: 2])
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    engine.save(folder)
    engine.load_weights({name: tensor + 1 for name, tensor in before.items()})
    assert engine.load(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.whole_weights())
    return distances


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron", "ddp"])
def test_parameters_of_unusual_shapes(backend, tmp_path):
    ranks = run_ranks(of_unusual_shapes, 2, backend, str(tmp_path))
    found = {name: error for rank in ranks for name, error in rank.items()}
    assert {"layer.weight", "layer.bias", "turned", "pairs"} <= found.keys()
    assert ("scale" in found) == (backend in ("ddp", "megatron"))
    assert max(found.values()) < 1e-6


def without_gradients(kind: str, sharding: dict) -> str:
    """The error of a step, or the names of parameters whose gradient is not torch's own, over two ranks: of a function
    that gives its weight none in the last micro-batch of one rank, of outputs that are detached, or of a weight that is
    read from a list."""
    import copy

    import torch

    from megaaccum import Plan, initialize

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, is_seen):
            ctx.save_for_backward(x, weight)
            ctx.is_seen = is_seen
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum((0, 1)) if ctx.is_seen else None, None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
            self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8))
            self.held = [self.scale]

        def forward(self, batch):
            scale = self.held[0] if kind == "held" else self.scale
            output = Scaled.apply(self.layers[0](batch), scale, kind != "none" or batch is not data[-1])
            return output.detach() if kind == "detached" else output

    model, data = Model(), batches(8)
    reference = copy.deepcopy(model)
    total = torch.stack([reference(batch).square().sum() for batch in data]).sum().div(4.0 * len(data))
    if total.requires_grad:
        total.backward()
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in reference.named_parameters()}
    batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(clip_grad=0.0), world_size=2)
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    wrong = []

    def compare() -> None:
        for shard in engine.backend.shards():
            whole = wanted[shard.name].reshape(-1)[shard.start :][: shard.grad.numel()]
            if not torch.allclose(shard.grad.view(-1), whole, rtol=1e-4, atol=1e-6):
                wrong.append(shard.name)

    engine.backend.step = compare
    try:
        engine.train_step(data[torch.distributed.get_rank() :: 2])
    except FlushError as error:
        return str(error)
    return ", ".join(wrong)


@pytest.mark.parametrize(
    "sharding", [dict(backend="megatron"), dict(backend="fsdp2", sync="streaming"), dict()], ids=str
)
@pytest.mark.parametrize("kind", ["none", "detached"])
def test_parameters_that_get_no_gradient(kind, sharding):
    assert run_ranks(without_gradients, 2, kind, sharding) == ["", ""]


def test_a_parameter_that_a_list_holds():
    """FSDP2 trains another one in its place."""
    for text in run_ranks(without_gradients, 2, "held", dict(backend="fsdp2")):
        assert text.startswith("backend fsdp2 trains another parameter than this scale, which a list")
    assert run_ranks(without_gradients, 2, "held", dict(zero_stage=3)) == ["", ""]


def with_a_running_mean(folder: str) -> tuple[list[str], float, float, list[str]]:
    """Warnings of a model whose forward binds another running mean; that mean, and what a checkpoint has of it; notes
    on weights that are read outside of their module under streaming: after it ran, and of the unit that comes next."""
    import warnings

    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, batch):
            self.mean = 0.9 * self.mean + 0.1 * batch.mean((0, 1))
            return self.layer(batch - self.mean)

    class Reading(Model):
        read = "layer"

        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(8, 8)

        def forward(self, batch):
            return torch.nn.functional.linear(super().forward(batch), getattr(self, self.read).weight)

    class ReadingNext(Reading):
        read = "head"

    def made(kind, **sharding):
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
        plan = Plan.of(batch=batch, sharding=sharding or dict(backend="ddp"), world_size=1)
        return initialize(plan, kind(), forward_step_func=forward_step, optimizer=torch.optim.AdamW)

    engine = made(Model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.train_step(batches())
    engine.save(folder)
    loaded = made(Model)
    loaded.load(folder)
    means = [float(each.chunks[0].module.mean.norm()) for each in (engine, loaded)]
    notes = []
    for kind in (Reading, ReadingNext):
        with pytest.raises(RuntimeError) as raised:
            made(kind, zero_stage=3, sync="streaming").train_step(batches())
        notes += raised.value.__notes__
    return [str(each.message) for each in caught], *means, notes


def test_a_buffer_that_a_forward_changes_and_a_weight_that_is_not_there(tmp_path):
    ((texts, mean, of_checkpoint, notes),) = run_ranks(with_a_running_mean, 1, str(tmp_path))
    assert [text.startswith("the forward of a micro-batch changes mean: steps depend") for text in texts] == [True]
    assert of_checkpoint == mean > 0
    note = "With sync streaming a module's parameters are there while its forward runs"
    assert [each.startswith(note) for each in notes] == [True, True]


def changing_in_place(by_loss: bool = False) -> str:
    """The error of the first step of a model, or a loss function, that changes what the backward needs."""
    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, batch):
            output = torch.tanh(self.layer(batch))
            return output[..., 1:] if by_loss else output.square() + output.add_(1.0)

    def step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda output: (output.clamp_(min=0.1).log().sum(), 4, {})

    batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=dict(backend="ddp"), world_size=1)
    engine = initialize(plan, Model(), forward_step_func=step if by_loss else forward_step, optimizer=torch.optim.AdamW)
    try:
        engine.train_step(batches())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_change_in_place_of_what_the_backward_needs_is_an_error_in_the_first_step_too():
    """Whose saved tensors are counted; torch itself sees it in the second."""
    for by_loss in (False, True):
        assert run_ranks(changing_in_place, 1, by_loss) == [
            "a tensor that the backward needs has been changed in place"
        ]


def of_buffers(backend: str) -> dict:
    """Dtypes that a forward of a BF16 model finds in its buffers."""
    import torch

    from megaaccum import Plan, initialize

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8).bfloat16()
            for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64):
                self.register_buffer(f"of_{dtype}".replace(".", "_"), torch.ones(8, dtype=dtype))

        def forward(self, batch):
            found.update({name: str(buffer.dtype) for name, buffer in self.named_buffers()})
            return self.layer(batch.bfloat16())

    found: dict[str, str] = {}
    batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=dict(backend=backend, bf16=True), world_size=1)
    engine = initialize(plan, Model(), forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    engine.train_step(batches())
    return found


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron", "ddp"])
def test_buffers_keep_their_precision(backend):
    (found,) = run_ranks(of_buffers, 1, backend)
    assert found == {f"of_torch_{name}": f"torch.{name}" for name in ("bfloat16", "float32", "float64", "int64")}


class OfTwoDtypes:
    """A model with layers in BF16, and after them norms in FP32, which Megatron's optimizer lists first."""

    def __new__(cls, seed: int):
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(seed)
                self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8).bfloat16() for _ in range(2))
                self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(2))

            def forward(self, batch):
                for norm, layer in zip(self.norms, self.layers, strict=True):
                    batch = batch + layer(norm(batch).bfloat16())
                return batch

        return Model()


def through_a_checkpoint(backend: str, folder: str) -> tuple[list[str], list[str]]:
    """Parameters that have other values than they began with, or after a step, a save and a load into `ddp`; what
    other backends say to them."""
    import torch

    from megaaccum import Plan, initialize

    def made(backend, seed):
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4)
        plan = Plan.of(batch=batch, sharding=dict(backend=backend), world_size=2)
        return initialize(plan, OfTwoDtypes(seed), forward_step_func=forward_step, optimizer=torch.optim.AdamW)

    first = made(backend, 0)
    before = dict(OfTwoDtypes(0).named_parameters())
    wrong = [name for name, whole in first.whole_weights() if not torch.equal(whole, before[name])]
    first.train_step(batches())
    after = dict(first.whole_weights())
    first.save(folder)
    other = made("ddp", 1)
    other.load(folder)
    wrong += [name for name, whole in other.whole_weights() if not torch.equal(whole, after[name])]
    return wrong, [said(lambda backend=backend: made(backend, 0)) for backend in ("deepspeed", "fsdp2")]


@pytest.mark.parametrize("backend", ["megatron", "ddp"])
def test_parameters_of_two_dtypes(backend, tmp_path):
    words = (
        "gives all parameters one dtype, but the model has layers.0.weight in bfloat16 and norms.0.weight in float32"
    )
    for wrong, errors in run_ranks(through_a_checkpoint, 2, backend, str(tmp_path)):
        assert not wrong
        assert all(words in error for error in errors)


def over_two_stages(schedule: str, marked: bool) -> tuple[float, list[str]]:
    """The largest distance of a step's weights from torch's own where stages return transposed views, and give their
    input no gradient in the first micro-batch; what is said of stages that return another dtype, shape or type, of
    calls with three micro-batches, and of a loss function that returns two values, by steps and evaluations, after
    which the engine continues. marked: of a subclass of Tensor."""
    import torch

    from megaaccum import Plan, initialize

    plan = Plan.of(
        layout=dict(pp=2, schedule=schedule) | (dict(vpp=2) if schedule == "interleaved" else {}),
        batch=dict(micro_batch_size=2, seq_length=5, pp_microbatches=4),
        sharding=dict(backend="ddp"),
        optimizer=dict(clip_grad=0.0),
        hidden_size=8,
        world_size=2,
    )

    class Marked(torch.Tensor):
        pass

    class Stage(torch.nn.Module):
        returns = staticmethod(lambda x: x)

        def __init__(self, stage: int):
            super().__init__()
            torch.manual_seed(stage)
            self.layer, self.stage, self.name_in_model = torch.nn.Linear(8, 8), stage, f"stages.{stage}."

        def set_input_tensor(self, tensor):
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, batch):
            x = batch.transpose(0, 1) if self.stage == 0 else self.received
            x = x.detach() if batch is data[0] else x
            x = torch.tanh(self.layer(x.float())).transpose(0, 1).contiguous().transpose(0, 1)
            return x if self.stage == plan.layout.num_stages - 1 else Stage.returns(x)

    def forward_step(data_iterator, chunk):
        batch = next(data_iterator)
        return chunk(batch), lambda output: (output.square().sum(), 10, {})

    def without_reports(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda output: (output.sum(), 10)

    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(2, 5, 8, generator=generator) for _ in range(4)]
    chunks = [Stage(stage) for stage in plan.layout.stages(torch.distributed.get_rank())]
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    engine = initialize(plan, chunks, forward_step_func=forward_step, optimizer=sgd)
    errors = []
    wrong = (
        lambda x: x.bfloat16(),
        lambda x: x.transpose(0, 1),
        lambda x: x[:3],
        lambda x: (x, None),
        torch.Tensor.to_sparse,
    )
    for returns in wrong:
        Stage.returns = staticmethod(returns)
        errors += [said(lambda: engine.train_step(data)), said(lambda: engine.evaluate(data))]
    Stage.returns = staticmethod(lambda x: x.as_subclass(Marked) if marked else x)
    if schedule == "interleaved":
        errors += [said(lambda: engine.forward_backward(data[:3])), said(lambda: engine.evaluate(data[:3]))]
    errors.append(said(lambda: engine.forward(data, forward_step_func=without_reports)))
    engine.train_step(data)
    whole = [Stage(stage) for stage in range(plan.layout.num_stages)]
    total = torch.zeros(())
    for batch in data:
        x = batch
        for stage in whole:
            stage.received = x
            x = stage(batch)
        total = total + x.square().sum()
    (total / 40).backward()
    wanted = {f"{s.name_in_model}{n}": w - 0.5 * w.grad for s in whole for n, w in s.named_parameters()}
    return max(float((each - wanted[name]).abs().max()) for name, each in engine.whole_weights()), errors


@pytest.mark.parametrize(
    ("schedule", "marked"), [("1f1b", False), ("1f1b", True), ("zbv", False), ("interleaved", True)]
)
def test_what_a_stage_returns(schedule, marked):
    sent = "but stages send [sequence, micro-batch, hidden] = [5, 2, 8] of torch.float32"
    for distance, errors in run_ranks(over_two_stages, 2, schedule, marked):
        assert distance < 1e-6
        if schedule == "interleaved":  # Megatron's own errors would end the engine
            for error in (errors.pop(-2), errors.pop(-2)):
                assert "a call with 3 micro-batches: 3 micro-batches in a flush leave a last group of 3 %" in error
                assert "make it 2 or 4 micro-batches" in error
        returned = (
            "[5, 2, 8] of torch.bfloat16",
            "[2, 5, 8]",
            "[3, 2, 8]",
            "a tuple (no tensor)",
            "a Tensor (torch.sparse",
        )
        for error, found in zip(errors[:-1:2], returned, strict=True):
            assert f"chunk 0 returns {found}" in error and sent in error
        assert errors[:-1:2] == errors[1:-1:2], "an evaluation says the same"
        assert "but it returned 2 values" in errors[-1]


def norm_in_a_loop(layout: dict) -> tuple[float, float]:
    """(norm of a step of Megatron's loop over stages that end in a torch Linear, whose output is a view; that of one
    process)."""
    import torch

    from megaaccum import Plan
    from megaaccum.loop import get_forward_backward_func, wrap

    class Stage(torch.nn.Module):
        def __init__(self, stage: int):
            super().__init__()
            torch.manual_seed(stage)
            self.layer, self.pre_process, self.name_in_model = torch.nn.Linear(8, 8), stage == 0, f"stages.{stage}."

        def set_input_tensor(self, tensor):
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, batch):
            return self.layer(batch if self.pre_process else torch.tanh(self.received))

    def forward_step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda output: (output.square().sum() / 10, {})

    batch = dict(micro_batch_size=2, seq_length=5, pp_microbatches=4)
    optimizer = dict(clip_grad=0.0)
    plan = Plan.of(
        layout=layout, batch=batch, sharding=dict(backend="ddp"), optimizer=optimizer, hidden_size=8, world_size=2
    )
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(5, 2, 8, generator=generator) for _ in range(4)]
    stages = [Stage(stage) for stage in plan.layout.stages(int(os.environ["RANK"]))]
    chunks, optimizer = wrap(stages, None, plan, optimizer=torch.optim.AdamW)
    get_forward_backward_func(plan)(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in chunks],
        model=chunks,
        num_microbatches=4,
        seq_length=5,
        micro_batch_size=2,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    whole = [Stage(stage) for stage in range(plan.layout.num_stages)]
    for x in data:
        for stage in whole:
            stage.received = x
            x = stage(x)
        (x.square().sum() / 40).backward()
    grads = [param.grad for stage in whole for param in stage.parameters()]
    return norm, float(torch.nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("layout", [dict(pp=2), dict(pp=2, vpp=2), dict(pp=2, schedule="zbv")], ids=str)
def test_a_stage_in_megatrons_loop_may_return_a_view(layout: dict):
    for norm, wanted in run_ranks(norm_in_a_loop, 2, layout, timeout=40):
        assert norm == pytest.approx(wanted, rel=1e-5)


def with_buffers() -> list[str]:
    """Names of buffers that `whole_weights` gives as they are: a transposed view and one without elements."""
    import torch

    from megaaccum import Plan, initialize

    model = torch.nn.Linear(8, 8)
    model.register_buffer("turned", torch.randn(4, 8).t())
    model.register_buffer("empty", torch.zeros(0, 3))
    plan = Plan.of(batch=dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4), sharding=dict(backend="ddp"))
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    buffers = dict(model.named_buffers())
    return sorted(n for n, each in engine.whole_weights() if n in buffers and torch.equal(each, buffers[n]))


def test_buffers_of_unusual_shapes():
    assert run_ranks(with_buffers, 1) == [["empty", "turned"]]


def layers_that_return_more(backend: str) -> float:
    """The largest distance of a step's weights from torch's own where layers return a mask, what they were given, a sum
    that nothing uses, or one that the loss uses, beside the hidden states."""
    import torch

    from megaaccum import Plan, initialize

    forms = [
        lambda x, y: (x.detach() > 0, y),
        lambda x, y: {"given": x, "hidden": y},
        lambda x, y: [y.square().sum(), y],
        lambda x, y: (x, [y.square().sum(), None], y),
    ]
    plan = Plan.of(
        batch=dict(micro_batch_size=2, seq_length=4, grad_accum_steps=2),
        sharding=dict(backend=backend, sync="streaming"),
        optimizer=dict(clip_grad=0.0),
        world_size=2,
    )

    class Layer(torch.nn.Module):
        def __init__(self, form):
            super().__init__()
            self.linear, self.norm, self.form = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), form

        def forward(self, x):
            return self.form(x, x + torch.tanh(self.linear(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(11, 8)
            self.layers = torch.nn.ModuleList(Layer(form) for form in forms)
            self.head = torch.nn.Linear(8, 11)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                out = layer(x)
                x = out["hidden"] if isinstance(out, dict) else out[-1]
            return self.head(x), out[1][0]

    def total(output):
        return output[0].square().sum() + output[1]

    def forward_step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda output: (total(output), 8, {})

    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, 11, (2, 4), generator=generator) for _ in range(4)]
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    engine = initialize(plan, Model(), forward_step_func=forward_step, optimizer=sgd)
    engine.train_step(data[torch.distributed.get_rank() :: 2])
    whole = Model()
    (sum(total(whole(tokens)) for tokens in data) / 32).backward()
    wanted = {name: param - 0.5 * param.grad for name, param in whole.named_parameters()}
    return max(float((each - wanted[name]).abs().max()) for name, each in engine.whole_weights())


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_what_a_layer_returns(backend):
    assert max(run_ranks(layers_that_return_more, 2, backend)) < 1e-5


def offsets_of_a_softmax() -> dict[str, list[float]]:
    """Whole weights of learnable offsets, one per head, of chunks as a user of Megatron-core builds them: without the
    marks that megaaccum's own get."""
    from unittest.mock import patch

    import torch

    from megaaccum.pretrain.model import gpt
    from tests.support.engines import engine_of
    from tests.support.parity import Case

    build_chunks = gpt.build_chunks

    def unmarked(*args, **keys):
        chunks = build_chunks(*args, **keys)
        for name, param in (each for chunk in chunks for each in chunk.named_parameters()):
            if name.endswith("softmax_offset"):
                for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    vars(param).pop(mark)
                param.data.copy_(torch.arange(param.numel()) + 10 * torch.distributed.get_rank())
        return chunks

    layout = "--tensor_model_parallel_size 2 --pp_microbatches 4 --backend ddp "
    with patch.object(gpt, "build_chunks", unmarked):
        engine = engine_of(Case(2, layout, "--num_layers 1 --softmax-type learnable "))
    return {name: tensor.tolist() for name, tensor in engine.whole_weights() if name.endswith("softmax_offset")}


def test_offsets_of_a_softmax_are_those_of_every_tp_rank():
    """Megatron-core 0.19 does not mark them as cut."""
    for found in run_ranks(offsets_of_a_softmax, 2):
        assert [*found.values()] == [[0.0, 1.0, 10.0, 11.0]]


def in_another_precision(folder: str) -> list[str]:
    """The precisions of a buffer in a model that loads the checkpoint of one in another precision, and then trains."""
    import torch

    from megaaccum import Plan, initialize

    def engine(bf16: bool):
        model = torch.nn.Linear(8, 8, bias=False)
        model.register_buffer("scale", torch.linspace(1, 2, 8))
        model.forward = lambda batch: torch.nn.functional.linear(batch * model.scale, model.weight)
        batch = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=2)
        plan = Plan.of(batch=batch, sharding=dict(backend="ddp", bf16=bf16))
        model = model.bfloat16() if bf16 else model
        return initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW), model

    found = []
    for before in (True, False):
        engine(before)[0].save(f"{folder}/{before}")
        made, model = engine(not before)
        made.load(f"{folder}/{before}")
        made.train_step([each.to(model.weight.dtype) for each in batches(2)])
        found.append(str(model.scale.dtype))
    return found


def test_a_buffer_keeps_its_precision_whatever_the_checkpoints(tmp_path):
    assert run_ranks(in_another_precision, 1, str(tmp_path)) == [["torch.float32", "torch.bfloat16"]]
