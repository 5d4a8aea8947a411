"""Optimizers of a user's own, through a checkpoint into another backend, beside torch in one process."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks

MADE = {
    "sgd": lambda torch: lambda params: torch.optim.SGD(params, lr=0.1),
    "nesterov": lambda torch: lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda torch: lambda params: torch.optim.RMSprop(params, lr=1e-2, eps=1e-2, centered=True),
    "amsgrad": lambda torch: lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-2, amsgrad=True),
    "adafactor": lambda torch: lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "lbfgs": lambda torch: torch.optim.LBFGS,
    "nadam": lambda torch: torch.optim.NAdam,
    "matrices": lambda torch: lambda params: torch.optim.AdamW([each for each in params if each.dim() > 1]),
    "adagrad": lambda torch: torch.optim.Adagrad,
    "cpu adam": lambda torch: type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {"__module__": "deepspeed.ops.adam"}),
    "sgd in groups": lambda torch: lambda params: torch.optim.SGD(halves(params, "momentum", 0.0, 0.9), lr=0.1),
    "amsgrad in groups": lambda torch: (
        lambda params: torch.optim.AdamW(halves(params, "amsgrad", False, True), lr=1e-2, eps=1e-2)
    ),
    "decayed": lambda torch: (
        lambda params: torch.optim.AdamW(halves(params, "weight_decay", 0.0, 0.3), lr=1e-2, eps=1e-2)
    ),
    "rates": lambda torch: lambda params: torch.optim.AdamW(halves(params, "lr", 0.1, 0.05)),
    "lamb": lambda torch: lambda params: own().Lamb(halves(params, "weight_decay", 0.0, 0.1)),
    "clipped": lambda torch: own().Clipped,
    "count": lambda torch: own().Counts,
    "counts": lambda torch: lambda params: own().Counts(halves(params, "lr", 0.1, 0.05)),
    "calls": lambda torch: lambda params: own().Counts(halves(params, "lr", 0.1, 0.05), own=True),
    "own list": lambda torch: own().OwnList,
}
BACKENDS = [
    dict(zero_stage=1),
    dict(zero_stage=3),
    dict(zero_stage=3, sync="streaming"),
    dict(backend="fsdp2"),
    dict(backend="ddp"),
]


def own():
    from tests.support import own_optimizers

    return own_optimizers


def halves(params, key: str, of_vectors, of_matrices) -> list[dict]:
    return own().in_groups(params, {key: of_vectors}, {key: of_matrices})


def model():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def forward_step(data_iterator, chunk):
    output = chunk(next(data_iterator))
    return output, lambda out: (out.square().sum(), out.new_tensor(float(len(out))), {})


def batches(step: int) -> list:
    import torch

    return list(torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(step)))


def made(name: str, sharding: dict, **more):
    import torch

    from megaaccum import Plan, initialize

    batch = dict(micro_batch_size=4, seq_length=1, grad_accum_steps=4)
    plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(clip_grad=0.0), world_size=2, **more)
    return initialize(plan, model(), forward_step_func=forward_step, optimizer=MADE[name](torch))


def of_one_process(name: str) -> dict:
    import torch

    whole = model()
    optimizer = MADE[name](torch)(list(whole.parameters()))
    for step in range(4):
        optimizer.zero_grad()
        data = torch.cat(batches(step))
        (whole(data).square().sum() / len(data)).backward()
        optimizer.step()
    return {name: each.detach() for name, each in whole.named_parameters()}


def distances(name: str, folder: str) -> dict[str, float]:
    """How far weights are from those of one process after two steps, a save, a load into the next backend and two
    more, by backend of the save."""
    import torch

    true, found = of_one_process(name), {}
    for number, sharding in enumerate(BACKENDS):
        engine, place = made(name, sharding), f"{folder}/{number}"
        for step in range(4):
            if step == 2:
                engine.save(place)
                engine = made(name, BACKENDS[number - 1])
                assert engine.load(place)
            engine.train_step(batches(step)[torch.distributed.get_rank() :: 2])
        weights = dict(engine.whole_weights())
        found[str(sharding)] = max(float((weights[name] - true[name]).abs().max()) for name in true)
    return found


@pytest.mark.parametrize("name", ["sgd", "nesterov", "rmsprop", "amsgrad", "sgd in groups", "amsgrad in groups"])
def test_an_optimizer_through_a_checkpoint(name, tmp_path):
    for found in run_ranks(distances, 2, name, str(tmp_path), timeout=90):
        assert len(found) == len(BACKENDS) and max(found.values()) < 1e-6, found


CALLED_ONCE = [
    ("counts", dict(backend="fsdp2")),
    ("calls", dict(backend="fsdp2")),
    ("calls", dict(backend="ddp")),
    ("count", dict(zero_stage=3)),
    ("count", dict(zero_stage=1)),
    ("own list", dict(backend="ddp")),
]


def trained_distances() -> list[float]:
    """How far weights are from those of one process after four steps, by `CALLED_ONCE`."""
    import torch

    found = []
    for name, sharding in CALLED_ONCE:
        engine, true = made(name, sharding), of_one_process(name)
        for step in range(4):
            engine.train_step(batches(step)[torch.distributed.get_rank() :: 2])
        weights = dict(engine.whole_weights())
        found.append(max(float((weights[each] - true[each]).abs().max()) for each in true))
    return found


def test_optimizers_that_count_their_calls():
    assert max(map(max, run_ranks(trained_distances, 2, timeout=90))) < 1e-6


RATES = [
    (
        "sgd",
        dict(lr=1e-3),
        "lr is 0.001 in the plan, and lr 0.1 in the optimizer that initialize was given: give it 0.001",
    ),
    ("decayed", dict(weight_decay=0.2), "weight_decay is 0.2 in the plan, and weight_decay 0.0, 0.3 in the optimizer"),
    ("amsgrad", dict(adam_beta2=0.95), "adam_beta2 is 0.95 in the plan, and beta2 0.999 in the optimizer"),
    ("rates", dict(lr=0.05), ""),  # one of its groups has it
    ("decayed", dict(weight_decay=0.3, adam_eps=1e-2, adam_beta1=0.9), ""),
    ("sgd", dict(adam_beta2=0.95), ""),  # which has none
    ("amsgrad", dict(lr=1e-3, train_iters=9), ""),  # set by a schedule
]
"""Names of optimizers with keys of the plan, and what is said of these."""


def under_a_schedule() -> tuple[list[float], str, list[str]]:
    """How far weights are from those of one process, by backend, where a schedule of the plan sets the rate; what is
    said of groups with rates of their own, and of RATES."""
    import torch

    from megaaccum.errors import ConfigError
    from tests.multiproc.test_engine_inputs import said

    found, schedule = [], dict(lr=1e-2, lr_decay_style="constant", train_iters=9)
    true = of_one_process("decayed")
    for sharding in BACKENDS:
        engine = made("decayed", sharding, **schedule)
        for step in range(4):
            engine.train_step(batches(step)[torch.distributed.get_rank() :: 2])
        weights = dict(engine.whole_weights())
        found.append(max(float((weights[each] - true[each]).abs().max()) for each in true))
    with pytest.raises(ConfigError) as raised:
        made("rates", dict(backend="ddp"), **schedule)
    of_rates = [said(lambda n=name, k=keys: made(n, dict(backend="ddp"), **k)) for name, keys, _ in RATES]
    return found, str(raised.value), of_rates


def test_a_schedule_of_the_plan_leaves_the_decays_of_an_own_optimizer():
    for found, said, of_rates in run_ranks(under_a_schedule, 2, timeout=60):
        assert max(found) < 1e-6, found
        assert "give each group its max_lr and min_lr" in said
        for (name, keys, words), text in zip(RATES, of_rates, strict=True):
            assert words in text and bool(words) == bool(text), (name, keys, text)


def begun_by_weights() -> list[int]:
    """Steps of optimizers whose state no checkpoint has, after weights were read and replaced before the first."""
    import torch

    stepped = []
    for name in ("nadam", "adafactor"):
        engine = made(name, dict(backend="ddp"))
        engine.load_weights(dict(engine.whole_weights()).items())
        stepped.append(engine.train_step(batches(0)[torch.distributed.get_rank() :: 2]).step)
    return stepped


def test_weights_begin_no_half_of_a_state():
    assert run_ranks(begun_by_weights, 2, timeout=60) == [[1, 1]] * 2


REFUSED = {
    ("adafactor", "fsdp2"): "Adafactor steps a parameter as a whole, and backend fsdp2 gives it pieces",
    ("adafactor", "deepspeed"): "Adafactor steps a parameter as a whole, and backend deepspeed gives it pieces",
    ("lbfgs", "ddp"): "optimizer LBFGS cannot step a parameter of its own",
    ("matrices", "deepspeed"): "the optimizer has no 0.bias, 2.bias, and backend deepspeed reduces the gradients",
    ("adagrad", "deepspeed"): "deepspeed builds Adagrad again, without its groups",
    ("cpu adam", "fsdp2"): "DeepSpeedCPUAdam reads plain memory",
    ("amsgrad", "megatron"): "not the state of this AdamW",
    ("nadam", "ddp"): "the optimizer keeps mu_product, and a checkpoint has",
    ("lamb", "deepspeed"): "Lamb steps a parameter as a whole, and backend deepspeed gives it pieces",
    ("clipped", "fsdp2"): "Clipped steps a parameter as a whole, and backend fsdp2 gives it pieces",
    ("counts", "deepspeed"): 'changes group["k"], and deepspeed makes 2 calls in a step',
    ("calls", "deepspeed"): "changes self.calls, and deepspeed makes 2 calls in a step",
    ("counts", "ddp"): 'the optimizer keeps group["k"], and a checkpoint has',
    ("calls", "fsdp2"): "the optimizer keeps self.calls, and a checkpoint has",
    ("own list", "fsdp2"): "OwnList does not step the parameters of its param_groups, where backend fsdp2 puts its own",
    ("own list", "deepspeed"): "OwnList does not step the parameters of its param_groups",
    ("own list", "ddp"): "the optimizer keeps parameters in a list of its own, and a checkpoint has",
    ("sgd", "into amsgrad"): "0.weight has no optimizer state, not exp_avg and exp_avg_sq and max_exp_avg_sq, in",
    ("amsgrad", "into sgd"): "has exp_avg and exp_avg_sq and max_exp_avg_sq, not nothing, in",
}


def refusals(folder: str) -> dict:
    from megaaccum.errors import MegaaccumError

    said = {}
    for name, backend in REFUSED:
        place = f"{folder}/{name}-{backend}"
        try:
            into = backend.removeprefix("into ")
            engine = made(name, dict(backend="ddp" if into != backend else backend))
            engine.save(place)
            if into != backend:
                made(into, dict(backend="ddp")).load(place)
            said[name, backend] = "nothing"
        except MegaaccumError as error:
            said[name, backend] = str(error)
    return said


def test_optimizers_that_are_refused(tmp_path):
    for said in run_ranks(refusals, 2, str(tmp_path), timeout=90):
        for case, words in REFUSED.items():
            assert words in said[case], (case, said[case])


def begun_afresh(folder: str) -> list[bool]:
    """Whether a step after `no_load_optim` on a checkpoint of SGD is the first of AdamW from its weights, in an engine
    that is new and in one that has stepped."""
    import torch

    def step(engine) -> list:
        engine.train_step(batches(9)[torch.distributed.get_rank() :: 2])
        return [each.clone() for _, each in engine.whole_weights()]

    equal = []
    for number, sharding in enumerate(BACKENDS):
        of_sgd, place = made("sgd", sharding), f"{folder}/{number}"
        for _ in range(2):
            step(of_sgd)
        of_sgd.save(place)
        first = made("amsgrad", sharding)
        first.load_weights(dict(of_sgd.whole_weights()))
        due, engine = step(first), made("amsgrad", sharding, run=dict(no_load_optim=True))
        for _ in range(2):
            assert engine.load(place) and engine.step == 2
            equal.append(all(map(torch.equal, step(engine), due)))
    return equal


def test_a_load_without_the_optimizer_begins_its_state(tmp_path):
    assert run_ranks(begun_afresh, 2, str(tmp_path), timeout=90) == [[True] * 10] * 2


def into_a_schedule(folder: str) -> tuple[str, int, float, str]:
    """The error of a run with a schedule that resumes from one without, then its step and rate where that is permitted,
    and the error of the way back."""
    from tests.multiproc.test_engine_inputs import batches, chunk_of, engine, said

    batch, sharding = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4), dict(backend="ddp")

    def made(override: list, **optimizer):
        run = dict(override=override, **({"train_iters": 10} if optimizer else {}))
        return engine(
            lambda rank: chunk_of(0, 1), keys=dict(batch=batch, sharding=sharding, optimizer=optimizer, run=run)
        )

    one = made([])
    for _ in range(3):
        one.train_step(batches(4))
    one.save(folder)
    refused = said(lambda: made([], lr=1e-2).load(folder))
    permitted = made(["lr_schedule"], lr=1e-2)
    assert permitted.load(folder)
    at = permitted.step, permitted.param_groups[0]["lr"]
    permitted.save(folder)
    return refused, *at, said(lambda: made([]).load(folder))


def by_keys(folder: str) -> dict[str, object]:
    """Steps, the second of which is saved, after a load under each key of `megaaccum train`, or the error."""
    from tests.multiproc.test_engine_inputs import batches, chunk_of, engine, said

    keys = dict(batch=dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4), sharding=dict(backend="ddp"))
    one = engine(lambda rank: chunk_of(0, 1), keys=keys)
    for _ in range(3):
        one.train_step(batches(4))
        one.save(folder)
    seen: dict[str, object] = {}
    for name, value in dict(load_step=2, no_load=True, finetune=True, reset_iteration=True).items():
        made = engine(lambda rank: chunk_of(0, 1), keys=keys | dict(run={name: value}))
        seen[name] = said(lambda made=made: made.load(folder)) or made.step
    return seen


def test_a_load_heeds_or_refuses_the_keys_of_train(tmp_path):
    (seen,) = run_ranks(by_keys, 1, str(tmp_path))
    assert (seen["load_step"], seen["no_load"]) == (2, 0)
    for name in ("finetune", "reset_iteration"):
        assert "keys of `megaaccum train`" in seen[name] and "engine.load_weights" in seen[name]


def test_a_run_without_a_schedule_continues_with_one_where_that_is_permitted(tmp_path):
    ((refused, step, lr, back),) = run_ranks(into_a_schedule, 1, str(tmp_path))
    text = "learning-rate schedule (lr and train_iters): the checkpoint was made with {}, the configuration says {}"
    assert text.format("none", "one") in refused and "set override to lr_schedule" in refused
    assert text.format("one", "none") in back
    assert (step, lr) == (3, pytest.approx(0.7e-2))  # of a linear decay to 0 in ten steps
