"""Models and calls that no example has: the step of each is that of one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from megaaccum.errors import ConfigError, FlushError, StepError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support import huggingface as hf

WIDTH, LENGTH, COUNT = 8, 4, 6
Weights = dict[str, Any]


def stage(number: int, count: int, kind: str) -> Any:
    """A linear layer; on the first stage under a tanh, which saves its output, or in float64 none; on the second none
    for some micro-batches, whose input is then its output."""
    import torch

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre_process, self.post_process = number == 0, number == count - 1
            self.name_in_model, self.received = f"stages.{number}.", None
            torch.manual_seed(number)
            bare = kind == "bare" and number == 0
            self.layer = torch.nn.Identity() if bare else torch.nn.Linear(WIDTH, WIDTH)

        def set_input_tensor(self, tensor: Any) -> None:
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, batch: Any) -> Any:
            x = self.received if not self.pre_process else batch.double() if kind == "bare" else batch
            if kind == "drops" and number == 1 and float(batch[0, 0, 0]) > 0:
                return x
            return torch.tanh(self.layer(x)) if kind == "saves" and number == 0 else self.layer(x)

    return Stage().double() if kind == "bare" else Stage()


def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
    return chunk(next(data_iterator)), lambda out: (out.square().sum(), LENGTH, {})


def data() -> list[Any]:
    import torch

    torch.manual_seed(7)
    return [torch.randn(LENGTH, 1, WIDTH) * (-1) ** index for index in range(COUNT)]


def plan_of(**layout: Any) -> Any:
    from megaaccum import Plan

    batch = dict(micro_batch_size=1, seq_length=LENGTH, global_batch_size=COUNT)
    sharding = layout.pop("sharding", None) or dict(backend=layout.pop("backend", "ddp"))
    batch |= layout.pop("batch", {})
    keys = dict(step=layout.pop("step", {}), optimizer=dict(clip_grad=0.0), hidden_size=WIDTH)
    return Plan.of(layout=layout, batch=batch, sharding=sharding, **keys)


def engine_on(plan: Any, chunks: Any, **keys: Any) -> Any:
    import torch

    from megaaccum import initialize

    keys = dict(forward_step_func=forward_step, optimizer=lambda params: torch.optim.SGD(params, lr=1.0)) | keys
    return initialize(plan, chunks, **keys)


def update(kind: str, layout: dict[str, Any], iterator: bool = False) -> Weights:
    """Gradients, as the update of a step with a learning rate of 1."""
    import torch

    plan = plan_of(**layout)
    stages = plan.layout.stages(torch.distributed.get_rank())
    engine = engine_on(plan, [stage(number, plan.layout.num_stages, kind) for number in stages])
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    if iterator:
        engine.forward_backward(iter(data()), COUNT)
        engine.optim_step()
    else:
        engine.train_step(data())
    return {name: before[name] - tensor for name, tensor in engine.whole_weights()}


def expected(kind: str, count: int) -> Weights:
    stages = [stage(number, count, kind) for number in range(count)]
    for batch in data():
        x = None
        for each in stages:
            each.set_input_tensor(x)
            x = each(batch)
        x.square().sum().div(LENGTH * COUNT).backward()
    return {each.name_in_model + name: param.grad for each in stages for name, param in each.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "ranks", "layout", "iterator"),
    [
        ("drops", 3, dict(pp=3), False),
        ("drops", 3, dict(pp=3, schedule="zb-h1"), False),
        ("saves", 2, dict(pp=2), False),
        ("saves", 2, dict(pp=2, schedule="zb-h1"), False),
        ("bare", 2, dict(pp=2, schedule="zbv"), False),
        ("plain", 2, dict(pp=2, schedule="zbv"), True),
        ("plain", 2, dict(pp=2, schedule="interleaved", vpp=2), True),
    ],
)
def test_the_first_gradient_is_that_of_one_process(kind, ranks, layout, iterator):
    """In the first step memory is measured, which holds on to what autograd saves."""
    for found in run_ranks(update, ranks, kind, layout, iterator, timeout=60):
        whole = expected(kind, ranks * (2 if iterator or kind == "bare" else 1))
        for name, grad in found.items():
            assert (grad - whole[name]).norm() <= 1e-6 * whole[name].norm(), name


def with_a_force(schedule: str) -> dict[str, float]:
    """How far gradients are from those of one process where a forward has a derivative of a linear layer of Megatron's,
    which no loss sees."""
    import torch
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from megaaccum import build_groups

    def stage_with(number: int) -> Any:
        made = stage(number, 2, "plain")
        config = ModelParallelConfig(use_cpu_initialization=True)
        made.extra = ColumnParallelLinear(WIDTH, WIDTH, config=config, init_method=torch.nn.init.ones_, bias=False)
        forward = made.forward

        def forced(batch: Any) -> Any:
            x = forward(batch)
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(made.extra(at)[0].square().sum(), at)
            return x + made.extra(x)[0] + force

        made.forward = forced
        return made

    plan = plan_of(pp=2, schedule=schedule)
    groups = build_groups(plan)
    with groups.current():
        chunks = [stage_with(number) for number in plan.layout.stages(torch.distributed.get_rank())]
        alone = [stage_with(number) for number in range(2)]
    engine = engine_on(plan, chunks, groups=groups)
    before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
    engine.train_step(data())
    with groups.current():
        for batch in data():
            alone[0].set_input_tensor(None)
            alone[1].set_input_tensor(alone[0](batch))
            (alone[1](batch).square().sum() / LENGTH / COUNT).backward()
    whole = {each.name_in_model + name: param.grad for each in alone for name, param in each.named_parameters()}
    return {
        name: float((before[name] - tensor - whole[name]).norm() / whole[name].norm())
        for name, tensor in engine.whole_weights()
    }


def test_a_derivative_inside_a_forward_is_no_part_of_the_gradient():
    """A schedule that could not tell it from the loss' refuses it."""
    for found in run_ranks(with_a_force, 2, "1f1b", timeout=60):
        assert max(found.values()) < 1e-5, found
    texts = [ends.error.text for ends in try_ranks(with_a_force, 2, "zb-h1", timeout=60) if ends.error is not None]
    assert any("a forward differentiates through a linear layer of Megatron's" in text for text in texts), texts


# --- transformers' models that DeepSpeed and Megatron treat in a way of their own -------------------------------------


def step_of(kind: str) -> Any:
    def step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        import torch

        tokens = next(data_iterator)["input_ids"]
        given = dict(decoder_input_ids=tokens[:, :-1]) if kind == "t5" else {}
        logits = model(input_ids=tokens[:, :-1], **given).logits
        sum_of = torch.nn.CrossEntropyLoss(reduction="sum")
        return logits, lambda out: (sum_of(out.flatten(0, 1), tokens[:, 1:].flatten()), tokens[:, 1:].numel(), {})

    return step


def of_transformers(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "t5":  # its decoder has no `layers`
        sizes = dict(vocab_size=hf.VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    name, keys = hf.MODELS[kind]
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**keys))


def tokens_of(count: int) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(5)
    return [{"input_ids": torch.randint(0, hf.VOCAB, (1, 13))} for _ in range(count)]


def apart_from_one_process(kinds: list[tuple[str, dict[str, Any]]]) -> dict[str, float]:
    """The largest distance of a parameter's gradient from that of one process, relative to it."""
    import torch

    from megaaccum import Plan

    rank, far = torch.distributed.get_rank(), {}
    for kind, sharding in kinds:
        batches, model, alone = tokens_of(8), of_transformers(kind), of_transformers(kind)
        for batch in batches:
            output, loss_func = step_of(kind)(iter([batch]), alone)
            (loss_func(output)[0] / 96).backward()
        keys = dict(micro_batch_size=1, seq_length=13, global_batch_size=8)
        plan = Plan.of(batch=keys, sharding=sharding, optimizer=dict(clip_grad=0.0))
        engine = engine_on(plan, model, forward_step_func=step_of(kind))
        before = {name: tensor.clone() for name, tensor in engine.whole_weights()}
        engine.train_step(batches[rank::2])
        grads = {name: before[name] - tensor for name, tensor in engine.whole_weights()}
        named = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
        assert named.keys() <= grads.keys()
        far[f"{kind}, {sharding}"] = max(
            float((grads[name] - grad).norm() / grad.norm().clamp(min=1e-4)) for name, grad in named.items()
        )
    return far


def test_experts_that_deepspeed_makes_leaves_of_are_trained():
    """DeepSpeed 0.19 hooks the experts of these classes under ZeRO-3; T5 calls its decoder so."""
    cells = [
        ("mixtral", dict(zero_stage=3)),
        ("qwen3_moe", dict(zero_stage=3, reduce_bucket_size=3000)),
        ("qwen3_moe", dict(zero_stage=3, sync="streaming")),
        ("t5", dict(zero_stage=3)),
    ]
    for found in run_ranks(apart_from_one_process, 2, cells, timeout=150):
        assert max(found.values()) < 1e-4, found


# --- calls that leave an engine usable --------------------------------------------------------------------------------


def shared() -> str:
    import torch

    plan = plan_of(pp=2, schedule="zbv")
    chunks = [stage(number, 4, "plain") for number in plan.layout.stages(torch.distributed.get_rank())]
    chunks[1].layer.weight = chunks[0].layer.weight
    with pytest.raises(ConfigError) as raised:
        engine_on(plan, chunks)
    return str(raised.value)


def test_a_parameter_in_two_chunks_is_refused():
    for text in run_ranks(shared, 2):
        assert "stages.0.layer.weight, stages.3.layer.weight: one parameter in two chunks" in text


def speculating() -> str:
    """The error of an optimizer whose step cannot be taken back."""
    import torch

    plan = plan_of(pp=2, schedule="zbv", step=dict(speculative_step=True))
    chunks = [stage(number, 4, "plain") for number in plan.layout.stages(torch.distributed.get_rank())]
    with pytest.raises(ConfigError) as raised:
        engine_on(plan, chunks, optimizer=torch.optim.NAdam)
    return str(raised.value)


def test_an_optimizer_whose_step_cannot_be_taken_back_does_not_speculate():
    assert all("NAdam keeps mu_product: set it to false" in text for text in run_ranks(speculating, 2))


def after_errors() -> dict[str, Any]:
    """States after errors that an engine survives."""
    import torch

    def step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        def loss_func(out: Any) -> tuple[Any, Any, dict[str, Any]]:
            return out.square().sum(), running.add_(1.0), {}  # one tensor for all micro-batches

        return chunk(next(data_iterator)), loss_func

    running = torch.zeros((), dtype=torch.float64)
    made = engine_on(plan_of(batch=dict(variable_seq_lengths=True)), torch.nn.Linear(WIDTH, WIDTH))
    unnamed = made.train_step(data()).weight  # micro-batches that say nothing of their length
    made = engine_on(plan_of(), torch.nn.Linear(WIDTH, WIDTH))

    def spoiled(data_iterator: Any, chunk: Any) -> Any:
        raise ConfigError("a wrong setting of the user's")

    with pytest.raises(ConfigError):
        made.forward(data(), forward_step_func=spoiled)
    trains = made.chunks[0].training
    with pytest.raises(ConfigError), made.trial(data()):
        raise ConfigError("in the body")
    left = any(param.grad is not None for param in made.chunks[0].parameters())
    made.train_steps.forward_step_func = step
    return {"unnamed": unnamed, "trains": trains, "left": left, "weight": made.train_step(data()).weight}


def test_an_error_that_an_engine_survives_leaves_nothing():
    assert run_ranks(after_errors, 1) == [{"unnamed": 24.0, "trains": True, "left": False, "weight": 21.0}]


def without_one(lengths: list[int], backend: str, schedule: str) -> dict[str, Any]:
    """A step whose micro-batch 2 is not finite, in a field of the user's own beside ours; the loss and the norm of one
    process on the others. lengths: of each micro-batch."""
    import torch

    from megaaccum import initialize

    def step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        batch = next(data_iterator)
        return chunk(batch["x"]), lambda out: ((out.square().sum() * batch["scale"]), batch["loss_mask"].sum(), {})

    every = []
    for index, length in enumerate(lengths):
        torch.manual_seed(index)
        ours = {"tokens": torch.zeros(1, length).long(), "labels": torch.zeros(1, length).long()}
        scale = torch.tensor(float("nan") if index == 2 else 1.0, dtype=torch.float64)
        every.append(
            ours | {"loss_mask": torch.ones(1, length), "x": torch.randn(length, 1, WIDTH).double(), "scale": scale}
        )
    batch = dict(variable_seq_lengths=len(set(lengths)) > 1, global_batch_size=len(lengths))
    plan = plan_of(pp=2, schedule=schedule, backend=backend, batch=batch, step=dict(nonfinite="drop_microbatch"))
    count = plan.layout.num_stages
    chunks = [stage(number, count, "").double() for number in plan.layout.stages(torch.distributed.get_rank())]
    made = initialize(plan, chunks, forward_step_func=step, optimizer=torch.optim.SGD)
    made.forward_backward(every[:4])
    made.forward_backward(every[4:])
    result = made.optim_step()
    model = torch.nn.Sequential(*[stage(number, count, "").double().layer for number in range(count)])
    rest = [each for index, each in enumerate(every) if index != 2]
    loss = sum(model(each["x"]).square().sum() for each in rest) / sum(each["loss_mask"].sum() for each in rest)
    norm = torch.stack([grad.norm() for grad in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    return {"skipped": result.skipped, "got": (result.loss, result.grad_norm), "wanted": (float(loss), float(norm))}


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("lengths", [[4] * 8, [1, 3, 2, 4, 4, 2, 1, 3]], ids=["one length", "lengths"])
def test_a_bad_microbatch_of_a_users_own_format_is_left_out(lengths: list[int], schedule: str, backend: str):
    """Another stands in, whose length may differ: what is not finite may be in any field."""
    for found in run_ranks(without_one, 2, lengths, backend, schedule):
        assert not found["skipped"]
        assert found["got"] == pytest.approx(found["wanted"], rel=1e-12)


def forwards_of(schedule: str) -> tuple[list[float], list[float]]:
    """The losses of an evaluation and of two forwards, the first of a part of a list, and that of a step on the same,
    whose micro-batches differ in their lengths, which only the first rank knows."""
    import torch

    def step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        def loss_func(out: Any) -> tuple[Any, Any, dict[str, Any]]:
            return out.square().sum(), torch.tensor(float(len(out))), {"total": out.square().sum()}

        return chunk(next(data_iterator)["x"]), loss_func

    rank, lengths = torch.distributed.get_rank(), [1, 3, 2, 4, 4, 2, 1, 3]
    torch.manual_seed(7)
    every = [{"x": torch.randn(length, 1, WIDTH)} for length in lengths]
    for each, length in zip(every, lengths if rank == 0 else (), strict=rank == 0):
        each["tokens"] = torch.zeros(1, length).long()
    batch = dict(variable_seq_lengths=True, global_batch_size=len(lengths))
    plan = plan_of(pp=2, schedule=schedule, batch=batch)
    chunks = [stage(number, plan.layout.num_stages, "") for number in plan.layout.stages(rank)]
    made = engine_on(plan, chunks, forward_step_func=step)
    found, losses = made.evaluate(every)[0], []
    for halves in ((every, 4), (every[4:], None)):
        losses.append(sum(float(each["total"]) for each in made.forward(*halves, broadcast=True)))
    return [found, sum(losses) / sum(lengths)], [made.train_step(every).loss] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_lengths_that_one_stage_knows_are_those_of_all_in_forwards_too(schedule: str):
    for found, loss in run_ranks(forwards_of, 2, schedule):
        assert found == pytest.approx(loss, rel=1e-6)


def after_backwards_of_the_users(backend: str) -> list[tuple[float, float]]:
    """(norm of a step, that of one process) after the user's own backwards: before `initialize`, and between steps."""
    import torch

    made, found = torch.nn.Linear(WIDTH, WIDTH), []
    made(torch.ones(1, WIDTH)).sum().backward()
    engine = engine_on(plan_of(backend=backend), made, optimizer=lambda params: torch.optim.AdamW(params, lr=0.0))
    whole = torch.nn.Linear(WIDTH, WIDTH)
    whole.load_state_dict(dict(engine.whole_weights()))
    loss = sum(whole(each).square().sum() for each in data()) / (LENGTH * COUNT)
    norm = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(whole.parameters()))]).norm()
    for _ in range(2):
        found.append((engine.train_step(data()).grad_norm, float(norm)))
        engine.evaluate(data())
        if backend != "fsdp2":  # parameters are whole after an evaluation
            made(torch.ones(1, WIDTH)).sum().backward()
    return found


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "fsdp2", "megatron"])
def test_gradients_of_the_users_own_backwards_are_no_part_of_a_step(backend: str):
    (found,) = run_ranks(after_backwards_of_the_users, 1, backend)
    for norm, expected in found:
        assert norm == pytest.approx(expected, rel=1e-5)


def with_a_penalty(backend: str, sync: str, by: str = "grad") -> float | str:
    """How far a step's norm is from that of one process, if a forward adds the gradient of its output; or the error."""
    import torch

    def step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
        x = next(data_iterator).requires_grad_()
        out = torch.tanh(chunk(x))
        if by == "backward":
            out.square().sum().backward(retain_graph=True)
            slope = x.grad
        elif by == "func":
            slope = torch.func.grad(lambda at: torch.tanh(at).square().sum())(x)
        else:
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + slope, lambda out: (out.square().sum(), LENGTH, {})

    made = torch.nn.Linear(WIDTH, WIDTH)
    whole = deepcopy(made)
    loss = sum(step(iter([each]), whole)[0].square().sum() for each in data()) / (LENGTH * COUNT)
    norm = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(whole.parameters()))]).norm()
    engine = engine_on(plan_of(sharding=dict(backend=backend, sync=sync)), made, forward_step_func=step)
    try:
        return abs(engine.train_step(data()).grad_norm / float(norm) - 1)
    except (FlushError, StepError) as error:
        return str(error)


@pytest.mark.parametrize("sync", ["resident", "streaming"])
def test_a_second_derivative_is_right_or_refused(sync: str):
    """FSDP2 releases a weight after the first: torch's error was of a storage out of bounds."""
    assert "takes no create_graph" in run_ranks(with_a_penalty, 1, "fsdp2", sync)[0]
    assert sync == "streaming" or run_ranks(with_a_penalty, 1, "ddp", sync)[0] < 1e-5


@pytest.mark.parametrize(("backend", "sync"), [("deepspeed", "resident"), ("fsdp2", "streaming"), ("ddp", "resident")])
def test_derivatives_of_the_users_own_inside_a_forward(backend: str, sync: str):
    """A backward adds to gradients that the step divides, if it divides them; torch.func refuses hooks on what is
    saved, by which the first step on a CPU counts activations."""
    assert "a backward inside the forward adds to" in run_ranks(with_a_penalty, 1, backend, sync, "backward")[0]
    assert run_ranks(with_a_penalty, 1, backend, sync, "func")[0] < 1e-5
