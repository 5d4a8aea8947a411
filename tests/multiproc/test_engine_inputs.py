"""Wrong inputs to an engine: one clear error on every rank, no hang, and nothing lost."""

from __future__ import annotations

import pytest

from megaaccum.errors import MegaaccumError
from megaaccum.lab.verification.testing import run_ranks

KEYS = dict(layout=dict(pp=2), batch=dict(micro_batch_size=1, seq_length=16, pp_microbatches=4))


def chunk_of(stage: int, stages: int = 2, **keys):
    """A small pipeline stage of a user's own."""
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig

    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = ModelParallelConfig(
                pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, batch_p2p_sync=False, **keys
            )
            self.config.hidden_size = 8
            self.pre_process, self.post_process = stage == 0, stage == stages - 1
            self.name_in_model = f"stages.{stage}."
            self.weight = torch.nn.Linear(8, 8)
            self.received = None

        def set_input_tensor(self, tensor):
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, batch):
            return self.weight(batch if self.pre_process else self.received)

    torch.manual_seed(stage)
    return Stage()


def forward_step(data_iterator, chunk):
    output = chunk(next(data_iterator))
    return output, lambda out: (out.square().sum(), out.new_tensor(4.0), {})


def batches(count: int = 4) -> list:
    import torch

    return [torch.randn(16, 1, 8) for _ in range(count)]


def engine(change=None, keys=KEYS, **more):
    import torch

    from megaaccum.config import Plan
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups.destroy()
    model = chunk_of(rank // (world_size // 2)) if change is None else change(rank)
    plan = Plan.of(**keys, world_size=world_size)
    more = dict(forward_step_func=forward_step, optimizer=torch.optim.AdamW) | more
    return initialize(plan, model if isinstance(model, list) else [model], **more)


def said(action, kind: type[Exception] = MegaaccumError) -> str:
    """Class and text of the error of a `kind` that `action` raises, or nothing."""
    try:
        action()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_norm(rank):
    import torch

    chunk = chunk_of(rank)
    chunk.norm = torch.nn.BatchNorm1d(8)
    return chunk


def with_scalar(rank):
    import torch

    chunk = chunk_of(rank)
    chunk.scale = torch.nn.Parameter(torch.tensor(1.0))
    return chunk


def wrapped(rank):
    import torch

    return torch.nn.parallel.DistributedDataParallel(chunk_of(rank))


def with_a_list(rank):
    import torch

    chunk = chunk_of(rank)
    chunk.scales = torch.nn.ParameterList([torch.ones(1)])
    return chunk


def with_a_list_on_the_last(rank):
    return with_a_list(rank) if rank else chunk_of(rank)


def of_nothing_on_one_stage() -> str:
    """Initialize with a user's own optimizer that fails on the last stage alone."""
    import torch

    is_last = torch.distributed.get_rank() == 1
    try:
        engine(optimizer=lambda params: torch.optim.AdamW([] if is_last else params))
    except (MegaaccumError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def of_no_stage(rank):
    chunk = chunk_of(rank)
    del chunk.name_in_model
    return chunk


def of_two_dtypes(rank):
    import torch

    chunk = chunk_of(rank).to(torch.float32 if rank == 0 else torch.bfloat16)
    chunk.config.pipeline_dtype = None
    return chunk


def half_frozen(rank):
    return tied(rank).requires_grad_(rank == 0)


def tied(rank, first="", last="", weights_of=0):
    """A stage with a copy of a tied weight. first, last: prefixes of its name on the two stages."""
    chunk = chunk_of(rank)
    chunk.load_state_dict(chunk_of(rank * weights_of).state_dict())
    copy, chunk.name_in_model = next(chunk.parameters()), (first, last)[rank]
    copy.shared_embedding, copy.shared = True, rank == 1
    return chunk


def other_groups():
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megaaccum.distributed import groups

    groups.destroy()
    parallel_state.initialize_model_parallel()
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return said(
        lambda: __import__("megaaccum.engine").engine.initialize(
            __import__("megaaccum").Plan.of(**KEYS, world_size=2), [chunk_of(0)], groups=collection,
            forward_step_func=forward_step, optimizer=torch.optim.AdamW,
        )
    )  # fmt: skip


def another_engines() -> str:
    """A notebook's cell that runs again, with a part of the model that it made before."""
    import torch

    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups

    groups.destroy()
    plan = Plan.of(batch=KEYS["batch"], sharding=dict(zero_stage=3, sync="streaming"), world_size=2)
    module = torch.nn.Linear(8, 8)
    keys = dict(forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    initialize(plan, module, **keys).train_step(batches())
    return said(lambda: initialize(plan, torch.nn.Sequential(module), **keys))


def in_a_loop(change):
    """Wrap a chunk for Megatron's loop."""
    import torch

    from megaaccum import Plan
    from megaaccum.distributed import groups
    from megaaccum.loop import wrap

    groups.destroy()
    plan = Plan.of(**KEYS, world_size=2)
    return wrap([change(torch.distributed.get_rank())], None, plan, optimizer=torch.optim.AdamW)


def with_momentum(params):
    import torch

    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def other_reports() -> str:
    """A word that is none, and then again without it, with the same model."""
    import torch

    chunk = chunk_of(torch.distributed.get_rank())
    found = said(lambda: engine(lambda rank: chunk, reports={"a": "average"}))
    return f"{found}, then nothing" if not said(lambda: engine(lambda rank: chunk)) else found


def wrong_models() -> dict[str, str]:
    import torch

    from megaaccum import initialize

    megatron = KEYS | dict(sharding=dict(backend="megatron"))
    streaming = KEYS | dict(sharding=dict(zero_stage=3, sync="streaming"))
    return {
        "again": another_engines(),
        "megatron": said(lambda: engine(keys=megatron, optimizer=with_momentum)),
        "batch norm": said(lambda: engine(with_norm)),
        "scalar": said(lambda: engine(with_scalar)),
        "wrapped": said(lambda: engine(wrapped)),
        "list": said(lambda: engine(with_a_list, streaming)),
        "list on one stage": said(lambda: engine(with_a_list_on_the_last, streaming)),
        "an optimizer of nothing": of_nothing_on_one_stage(),
        "names": said(lambda: engine(of_no_stage)),
        "dtypes": said(lambda: engine(of_two_dtypes)),
        "other stage": said(lambda: engine(lambda rank: chunk_of(1 - rank))),
        "two chunks": said(lambda: engine(lambda rank: [chunk_of(rank), chunk_of(rank)])),
        "fusion": said(lambda: engine(lambda rank: chunk_of(rank, gradient_accumulation_fusion=True), streaming)),
        "hook": said(lambda: engine(lambda rank: chunk_of(rank, no_sync_func=lambda: None))),
        "scale": said(lambda: engine(lambda rank: chunk_of(rank, moe_grad_scale_func=lambda: torch.ones(1)))),
        "sizes": said(lambda: engine(lambda rank: chunk_of(rank, 3) if rank == 0 else chunk_of(1))),
        "no optimizer": said(lambda: engine(optimizer=None)),
        "an optimizer": said(lambda: engine(optimizer=with_momentum([torch.nn.Parameter(torch.ones(1))]))),
        "no plan": said(lambda: initialize("ds.json", chunk_of(0))),
        "half a tied pair": said(lambda: engine(half_frozen)),
        "half a tied pair in a loop": said(lambda: in_a_loop(half_frozen)),
        "one of a tied pair": said(lambda: engine(lambda rank: tied(0) if rank == 0 else chunk_of(1))),
        "names of a tied pair": said(lambda: engine(lambda rank: tied(rank, "in.", "out."))),
        "weights of a tied pair": said(lambda: engine(lambda rank: tied(rank, weights_of=1))),
        "names in a loop": said(lambda: in_a_loop(of_no_stage)),
        "reports": other_reports(),
        "groups": other_groups(),
    }


TIED = "the first and the last stage have unlike copies of a tied embedding, "
HALF = TIED + "weight.weight (frozen, its bytes add up to 31556) and weight.weight (trained, its bytes add up to 31556)"
SAME_NAMES = "several stages have a parameter weight.bias, weight.weight: give each chunk a name_in_model such as"
MODELS = {
    "again": "the model, or a part of it, is another engine's already",
    "megatron": "backend megatron shards the two moments of Adam, or Lion's, not the state of this SGD",
    "batch norm": "norm (BatchNorm1d) takes statistics of each micro-batch",
    "scalar": "stages.0.scale: a scalar, which deepspeed does not take; make it a tensor of shape [1]",
    "wrapped": "the model (DistributedDataParallel) reduces gradients or cuts parameters already: give the module",
    "list": "scales.0 lie beside modules that have parameters too, or in a list",
    "list on one stage": "rank 1: sync streaming gathers a module's parameters as its forward begins, and scales.0 lie",
    "names": SAME_NAMES,
    "names in a loop": SAME_NAMES,
    "dtypes": "stages of the pipeline send float32 and bfloat16: build their parameters in one dtype",
    "other stage": "is stage 0 of 2, but it was built with pre_process=False: it is a chunk of another stage",
    "two chunks": "the model is 2 chunks on this rank, but schedule 1f1b has 1",
    "fusion": "build the chunks with gradient_accumulation_fusion=False",
    "hook": "no_sync_func of the chunks' configuration is set already",
    "scale": "moe_grad_scale_func of the chunks' configuration is set already",
    "sizes": "pipeline_model_parallel_size of the chunks' configuration is 3, but the plan's is 2",
    "half a tied pair": HALF,
    "half a tied pair in a loop": HALF,
    "one of a tied pair": TIED + "weight.weight (trained, its bytes add up to 31556): build each with the same name,",
    "names of a tied pair": TIED + "in.weight.weight (trained, its bytes add up to 31556) and out.weight.weight (",
    "weights of a tied pair": TIED + "weight.weight (trained, its bytes add up to 30992) and weight.weight (trained",
    "no optimizer": "the plan has no lr: give initialize an optimizer",
    "an optimizer": "optimizer is the class SGD, or a function of a list of parameters",
    "no plan": "a plan is made by Plan.of(...) or Plan.load(FILE), but a str was given",
    "reports": "ConfigError: reports are reduced by sum, mean or microbatch, not {'a': 'average'}, then nothing",
    "groups": "the pp group has 1 ranks, but the plan says 2",
}


def test_models_that_do_not_fit():
    by_rank = run_ranks(wrong_models, 2, timeout=60)
    for case, words in MODELS.items():
        assert all(words in seen[case] and "ConfigError" in seen[case] for seen in by_rank), (case, by_rank)
    problem = "ValueError: optimizer got an empty parameter list"
    said = [seen["an optimizer of nothing"] for seen in by_rank]
    assert said == [f"LaunchError: rank 1: ended with {problem}", problem]


def weighed(weight):
    def step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda out: (out.square().sum(), out.new_tensor(weight), {})

    return step


def returning(values):
    def step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda out: values(out.square().sum())

    return step


def packed(output, chunk):
    """The last stage's output in a dict, beside what is infinite, as the logits of a padded vocabulary are."""
    return {"padded": ([output - float("inf")],), "output": output} if chunk.post_process else output


def returning_of_packed(values):
    def step(data_iterator, chunk):
        return packed(chunk(next(data_iterator)), chunk), lambda out: values(out["output"].square().sum())

    return step


def wrong_losses() -> dict[str, list[str]]:
    """The error of a step with a bad loss function, and the step with a good one after it."""
    import torch

    functions = {
        "nan": weighed(float("nan")),
        "infinite": weighed(float("inf")),
        "negative": weighed(-1.0),
        "pair": returning(lambda total: (total, {})),
        "pair of a dict": returning_of_packed(lambda total: (total, {})),
        "detached of a dict": returning_of_packed(lambda total: (total.detach(), torch.ones(()), {})),
        "tensor": returning(lambda total: total),
        "vector": returning(lambda total: (total.expand(3), torch.ones(()), {})),
        "reports": returning(lambda total: (total, torch.ones(()), total)),
        "detached": returning(lambda total: (total.detach(), torch.ones(()), {})),
        "report's type": returning(lambda total: (total, 1, {"name": "x"})),
        "weight's type": returning(lambda total: (total, None, {})),
        "complex sum": returning(lambda total: (total * (1 + 0j), 1, {})),
        "complex weight": returning(lambda total: (total, torch.tensor(1 + 0j), {})),
        "complex report": returning(lambda total: (total, 1, {"phase": 1j})),
    }
    seen: dict[str, list[str]] = {}
    for name, function in functions.items():
        made = engine(forward_step_func=function)
        evaluated = said(lambda made=made: made.evaluate(batches()))
        before = [piece.tensors["param"].clone() for piece in made.backend.state()]
        first = said(lambda made=made: made.train_step(batches()))
        same = all(map(torch.equal, before, [piece.tensors["param"] for piece in made.backend.state()]))
        made.train_steps.forward_step_func = forward_step
        seen[name] = [first, said(lambda made=made: made.train_step(batches())), str(same), evaluated]
    return seen


LOSSES = {
    "nan": "4 micro-batches have a weight that is negative or not finite",
    "infinite": "4 micro-batches have a weight that is negative or not finite",
    "negative": "4 micro-batches have a weight that is negative or not finite",
    "pair": "(sum of the losses, weight, reports), but it returned 2 values",
    "pair of a dict": "(sum of the losses, weight, reports), but it returned 2 values",
    "detached of a dict": "or a sum of losses without a gradient",
    "tensor": "(sum of the losses, weight, reports), but it returned Tensor",
    "vector": "has to be a scalar tensor, the sum of losses, not a tensor of shape (3,)",
    "reports": "has to be a dict of reports, not Tensor",
    "detached": "4 micro-batches have a weight that is negative or not finite, or a sum of losses without a gradient",
    "report's type": "weight and reports of a loss function have to be numbers or tensors",
    "weight's type": "weight and reports of a loss function have to be numbers or tensors",
    "complex sum": "a loss function returned a complex number",
    "complex weight": "a loss function returned a complex number",
    "complex report": "a loss function returned a complex number",
}


def without_a_token() -> list[tuple[float, float]]:
    """Losses and norms of a step whose first micro-batch has no token, which its loss function answers with a constant,
    of an output that is a tensor and of one that is a dict, or with a sum over nothing."""
    import torch

    def masked(first, pack=lambda output, chunk: output):
        def step(data_iterator, chunk):
            batch = next(data_iterator)
            is_first = bool(batch[0, 0, 0] == 0)

            def loss(out):
                out = out["output"] if isinstance(out, dict) else out
                return (first(out), 0, {}) if is_first else (out.square().sum(), 4, {})

            return pack(chunk(batch), chunk), loss

        return step

    torch.manual_seed(3)
    data = batches()
    data[0][0, 0, 0] = 0
    constant = lambda out: torch.zeros(())  # noqa: E731
    steps = (masked(constant), masked(constant, packed), masked(lambda out: out.sum() * 0))
    results = [engine(forward_step_func=step).train_step(data) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


def test_a_constant_is_the_loss_of_a_microbatch_without_a_token():
    """The stage before waits for the gradient of its output."""
    for constant, packed, summed in run_ranks(without_a_token, 2, timeout=90):
        assert constant == packed == summed and constant[1] > 0


def test_loss_functions_that_give_something_else():
    by_rank = run_ranks(wrong_losses, 2, timeout=90)
    for case, words in LOSSES.items():
        for seen in by_rank:
            first, second, same, evaluated = seen[case]
            assert words in first and first.startswith("StepError"), (case, seen)
            if "detached" in case:  # an evaluation has no gradient
                assert evaluated == ""
            else:
                assert words in evaluated and evaluated.startswith("StepError"), (case, seen)
            assert (second, same) == ("", "True"), (case, seen)


def wrong_losses_of_one_tp_rank() -> dict[str, list[str]]:
    """The texts of steps in which the loss function of the second rank of tp gives something wrong, and of a step
    after each."""
    import torch

    from tests.support import engines
    from tests.support.parity import Case, microbatches

    wrong = {
        "number": lambda total, weight: (float(total), weight, {}),
        "pair": lambda total, weight: (total, weight),
        "detached": lambda total, weight: (total.detach(), weight, {}),
        "nan": lambda total, weight: (total, weight * float("nan"), {}),
    }
    made, seen = engines.engine_of(Case(2, "--tp 2 --num_chunks 4", "--num_layers 1")), {}
    for name, change in wrong.items() if torch.distributed.get_rank() else dict.fromkeys(wrong).items():

        def step(data_iterator, chunk, change=change):
            output, loss_func = engines.forward_step(data_iterator, chunk)
            return output, (lambda out: change(*loss_func(out)[:2])) if change else loss_func

        data = microbatches(made.plan, 0)
        made.train_steps.forward_step_func = step
        first, made.train_steps.forward_step_func = said(lambda data=data: made.train_step(data)), engines.forward_step
        seen[name] = [first, said(lambda data=data: made.train_step(data))]
    return seen


def test_a_wrong_loss_of_one_tp_rank_is_no_gradient_of_zero():
    """Losses and weights are added up of the first ranks of tp, whose own values are right."""
    texts = {
        "number": "rank 1: the first value of a loss function has to be a scalar tensor, the sum of losses, not float",
        "pair": "rank 1: a loss function has to return (sum of the losses, weight, reports), but it returned 2 values",
        "detached": "or a sum of losses without a gradient",
        "nan": "2 micro-batches have a weight that is negative or not finite",
    }
    for seen in run_ranks(wrong_losses_of_one_tp_rank, 2, timeout=90):
        for name, text in texts.items():
            assert text in seen[name][0] and seen[name][1] == "", (name, seen)


def dying(*args, **keys):
    """An optimizer whose update of the model fails."""
    import torch

    class Dying(torch.optim.AdamW):
        def step(self, closure=None):
            held = [param for group in self.param_groups for param in group["params"]]
            if any(param.numel() > 6 and param.shape != (64, 64) for param in held):  # those that a look takes
                raise RuntimeError("a kernel died")
            super().step()

    return Dying(*args, **keys)


class Counting:
    """A forward step function that looks for a mask, which rank 1 has not got."""

    def __call__(self, data_iterator, chunk):
        return forward_step(data_iterator, chunk)

    def weights(self, microbatches):
        import torch

        if torch.distributed.get_rank():
            raise KeyError("mask")
        return [4.0] * len(microbatches)


def wrong_calls() -> dict[str, str]:
    import torch

    from megaaccum import Plan, build_groups, initialize

    rank = torch.distributed.get_rank()
    seen = {}
    seen["no gradient"] = said(engine().optim_step)
    made = engine()
    seen["counts"] = said(lambda: made.forward_backward(batches(2 + rank)))
    made = engine()
    made.forward_backward(batches(2))
    seen["calls"] = said(lambda: made.optim_step() if rank else made.forward_backward(batches(2)))
    made = engine()
    seen["totals"] = said(lambda: made.forward_backward(batches(2), total_weight=8.0 + rank))
    for name, numbers in {"negative": [1.0, -1.0], "nan": [1.0, float("nan")]}.items():
        seen[f"{name} weights"] = said(
            lambda made=made, numbers=numbers: made.forward_backward(batches(2), weights=numbers if rank else None)
        )
        seen[f"{name} total"] = said(
            lambda made=made, numbers=numbers: made.forward_backward(batches(2), total_weight=numbers[1])
        )
    seen["complex weights"] = said(lambda: made.forward_backward(batches(2), weights=[1.0, 1j * rank]))
    made = engine(forward_step_func=Counting())
    seen["a method that fails"] = said(lambda: made.train_step(batches()))
    made = engine()
    seen["iterator"] = said(lambda: made.forward_backward(iter(batches(2))))
    given = batches(2)
    for name in ("forward_backward", "forward"):
        made = engine()
        call = getattr(made, name)
        seen[f"one iterator, {name}"] = said(lambda call=call: call(iter(given) if rank else given))
    seen["counts of a forward"] = said(lambda: made.forward(batches(4 + rank)))
    seen["a step and a forward"] = said(lambda: made.forward(batches()) if rank else made.train_step(batches()))
    seen["nothing, evaluate"] = said(lambda: made.evaluate([None] * 4 if rank else batches()))
    seen["counts of a trial"] = said(lambda: made.trial(batches(4 + rank)).__enter__())
    seen["one iterator, after it"] = said(lambda: made.train_step(batches()))
    in_one_order = engine(keys=KEYS | dict(sharding=dict(reproducible="layout")))
    in_one_order.forward_backward(batches())
    seen["more in one order"] = said(lambda: in_one_order.forward_backward(batches(2)))
    seen["more in one order, after it"] = said(in_one_order.optim_step)
    made = engine(keys=KEYS | dict(batch=KEYS["batch"] | dict(static_graph=True)))
    seen["part of a graph"] = said(lambda: made.forward_backward(batches(4 - rank)))
    made = engine(forward_step_func=None)
    seen["no function"] = said(lambda: made.forward_backward(batches(2)))
    for name, given in {
        "an iterator's step": iter(batches()),
        "a dict's step": {"a": 1, "b": 2, "c": 3, "d": 4},
    }.items():
        made = engine()
        seen[name] = said(lambda made=made, given=given: made.train_step(given))
        made.train_step(batches())
    plan = Plan.of(batch=KEYS["batch"], sharding=dict(backend="ddp"), world_size=2)
    keys = dict(forward_step_func=lambda data, model: model(next(data)).sum(), optimizer=torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"has to return \(output, loss_func\), not Tensor"):
        initialize(plan, torch.nn.Linear(8, 8), groups=build_groups(plan), **keys).train_step(batches())
    made = engine()
    layer = made.chunks[0].weight.eval()  # as a frozen part is held
    made.evaluate(batches())
    assert made.chunks[0].training and not layer.training
    for trained in (False, True):
        layer.bias.requires_grad_(trained)
        if not trained:
            seen["bias trained: False, trial"] = said(lambda made=made: made.trial(batches()).__enter__())
        seen[f"bias trained: {trained}"] = said(lambda made=made: made.train_step(batches()))
    made = engine(optimizer=dying)
    with pytest.raises(RuntimeError, match="a kernel died"):
        made.train_step(batches())
    seen["after"] = said(lambda: made.train_step(batches()))
    return seen


CALLS = {
    "no gradient": "step 1 has no gradient: call forward_backward before optim_step",
    "counts": "ranks disagree about num_microbatches (rank 0: 2; rank 1: 3)",
    "calls": "ranks disagree about call (0 train_step, 1 forward_backward, 2 optim_step, 3 evaluate, 4 forward,"
    " 5 trial, 6 the end of a forward) (rank 0: 1; rank 1: 2)",
    "totals": "ranks disagree about total_weight",
    "negative weights": "rank 1: weights has one that is negative or not finite: [1.0, -1.0]",
    "nan weights": "rank 1: weights has one that is negative or not finite: [1.0, nan]",
    "complex weights": "has to be a list of real numbers, one per micro-batch: ",
    "a method that fails": "rank 1: weights of the forward step function raises KeyError('mask')",
    "negative total": "total_weight is -1.0: give the sum of all weights, finite and not negative",
    "nan total": "total_weight is nan: give the sum of all weights, finite and not negative",
    "iterator": "data comes from an iterator: give num_microbatches with it",
    "one iterator, forward_backward": "rank 1: data comes from an iterator: give num_microbatches with it",
    "one iterator, forward": "rank 1: data comes from an iterator: give num_microbatches with it",
    "counts of a forward": "ranks disagree about num_microbatches (rank 0: 4; rank 1: 5)",
    "a step and a forward": "5 trial, 6 the end of a forward) (rank 0: 0; rank 1: 4)",
    "nothing, evaluate": "rank 1: data comes from an iterator: give num_microbatches with it",
    "counts of a trial": "ranks disagree about num_microbatches (rank 0: 4; rank 1: 5)",
    "one iterator, after it": "",
    "more in one order": "each rank had 6 micro-batches, and reproducible layout adds up the 4 of the plan",
    "more in one order, after it": "",
    "bias trained: False, trial": "dtype or requires_grad of stages.",
    "part of a graph": "rank 1: static_graph true: a call takes the 4 micro-batches of a step, not 3",
    "no function": "no forward_step_func: give one to initialize, or with the call",
    "an iterator's step": "train_step takes a list of micro-batches, but a list_iterator was given",
    "a dict's step": "train_step takes a list of micro-batches, but a dict was given",
    "bias trained: False": "dtype or requires_grad of stages.",
    "bias trained: True": "",
    "after": "the engine failed before (RuntimeError: a kernel died) and cannot continue",
}


def with_numbers_in_tensors() -> list[tuple[float, float, object, float]]:
    """(loss, norm, weight, a report) of steps whose weights are known in advance as tensors or not; a micro-batch of
    weight zero reports 0 / 0."""
    import torch

    def step(data_iterator, chunk):
        output = chunk(batch := next(data_iterator))
        weight = (batch.mean() > 0).float() * 2  # of the first micro-batch zero

        def loss_func(y):
            return y.square().sum() * weight, weight, {"mean": y.detach().sum() * weight / weight}

        return output, loss_func

    torch.manual_seed(0)
    data = [batch.abs() for batch in batches()]
    data[0] = -data[0]
    weights, found = torch.tensor([0.0, 2.0, 2.0, 2.0]), []
    for known in (
        {},
        dict(weights=weights.tolist()),
        dict(weights=weights),
        dict(weights=weights.numpy()),
        dict(weights=list(weights.requires_grad_())),
        dict(total_weight=weights.sum() * 1, expected_tokens=weights.detach().sum() / 4),
    ):
        made = engine(forward_step_func=step)
        made.forward_backward(data, **known)
        result = made.optim_step()
        found.append((result.loss, result.grad_norm, result.weight, result.reports["mean"]))
    return found


def test_weights_in_tensors_are_those_numbers():
    for first, *others in run_ranks(with_numbers_in_tensors, 2, timeout=60):
        assert first[2] == 6.0
        assert all(other == pytest.approx(first, rel=1e-6) for other in others), (first, others)


def test_calls_that_ranks_do_not_make_alike():
    by_rank = run_ranks(wrong_calls, 2, timeout=60)
    for case, words in CALLS.items():
        assert all(words in seen[case] if words else seen[case] == "" for seen in by_rank), (
            case,
            [seen[case] for seen in by_rank],
        )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(layout=dict(pq=2)), "layout.pq: unknown key pq"),
        (dict(layout=dict(pp=2), batch=dict(micro_batch_size=1, seq_length=16)), "needs at least"),
        (dict(batch=dict(micro_batch_size=1)), "seq_length is required"),
        (dict(sharding=dict(backend="fsdp3")), "sharding.backend: backend must be"),
    ],
    ids=["unknown", "short", "length", "value"],
)
def test_plans_that_cannot_be(keys, words):
    from megaaccum.config import Plan
    from megaaccum.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        Plan.of(**(dict(batch=KEYS["batch"]) | keys), world_size=2)
    assert words in str(caught.value)
