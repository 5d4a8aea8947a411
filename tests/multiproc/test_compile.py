"""Models that torch.compile compiles: the steps, weights and names of the same model as it is."""

import sys

import pytest

from megaaccum.lab.verification.testing import run_ranks

STEPS = 3


def in_place(chunk):
    for layer in chunk.layers:
        layer.compile(backend="aot_eager")
    return chunk


def chunk_in_place(chunk):
    chunk.compile(backend="aot_eager")
    return chunk


def wrapped(chunk):
    import torch

    return torch.compile(chunk, backend="aot_eager")


def layers_wrapped(chunk):
    import torch

    for number, layer in enumerate(chunk.layers):
        chunk.layers[number] = torch.compile(layer, backend="aot_eager")
    return chunk


CELLS = {
    "zero-3": ({"zero_stage": 3}, "1f1b", wrapped),
    "streaming": ({"zero_stage": 3, "sync": "streaming"}, "zbv", in_place),
    "zero-1": ({"zero_stage": 1}, "zb-h1", layers_wrapped),
    "fsdp2": ({"backend": "fsdp2", "sync": "streaming"}, "1f1b", chunk_in_place),
    "megatron": ({"backend": "megatron"}, "dualpipev", layers_wrapped),
    "ddp": ({"backend": "ddp"}, "1f1b", in_place),
}
Trained = tuple[list[float], dict]


def train(sharding: dict, schedule: str, compiled=None) -> Trained:
    """(loss and norm of each step, whole weights after them)."""
    import torch

    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups
    from tests.support import user_models

    batch = {"micro_batch_size": user_models.ROWS, "seq_length": user_models.SEQ, "pp_microbatches": 8}
    layout = {"pp": 2, "schedule": schedule}
    plan = Plan.of(layout=layout, batch=batch | {"grad_accum_steps": 1}, sharding=sharding, hidden_size=32)
    groups.destroy()
    chunks = [
        user_models.Stage(stage, plan.layout.num_stages) for stage in plan.layout.stages(torch.distributed.get_rank())
    ]
    if compiled is not None:
        chunks = [compiled(chunk) for chunk in chunks]
    engine = initialize(plan, chunks, forward_step_func=user_models.forward_step, optimizer=torch.optim.AdamW)
    numbers, dp = [], engine.groups.dp
    for step in range(STEPS):
        result = engine.train_step(user_models.batches(step)[dp.rank() :: dp.size()])
        numbers += [result.loss, result.grad_norm]
    return numbers, dict(engine.whole_weights())


Both = tuple[Trained, Trained, list[str]]
"""Outcomes of the model as it is and compiled; errors that Python passed over, functions that torch.compile gave up."""


def both(sharding: dict, schedule: str, compiled) -> Both:
    """Nothing that an earlier cell compiled is left."""
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    complaints: list[str] = []
    sys.unraisablehook = lambda raised: complaints.append(str(raised.exc_value))
    plain, found = train(sharding, schedule), train(sharding, schedule, compiled)
    assert counters["stats"]["unique_graphs"] > 0
    return plain, found, [*complaints, *counters["recompile_limit"]]


def every_cell() -> list[Both]:
    return [both(*cell) for cell in CELLS.values()]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Both, ...]]:
    """Each rank's outcome of each cell, of one start: ranks import and set up torch's compiler once for all cells."""
    return dict(zip(CELLS, zip(*run_ranks(every_cell, 4, timeout=300), strict=True), strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_a_compiled_model_takes_the_same_steps(found, cell):
    import torch

    for (numbers, weights), (others, compiled), complaints in found[cell]:
        assert others == pytest.approx(numbers, rel=1e-6)
        assert compiled.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(compiled[name], weight, rtol=1e-5, atol=1e-6)
        assert not complaints


def evaluated_in_one_graph() -> float:
    """The loss of a model that is compiled without a break, under ZeRO-3."""
    import torch

    from megaaccum import Plan, initialize

    def forward_step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda output: (output.square().sum(), 4, {})

    batch = dict(micro_batch_size=4, seq_length=1, grad_accum_steps=2)
    plan = Plan.of(batch=batch, sharding=dict(zero_stage=3), world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    for param in model.parameters():
        torch.nn.init.ones_(param)
    model.compile(backend="aot_eager", fullgraph=True)
    engine = initialize(plan, model, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    return engine.evaluate([torch.ones(4, 8)] * 2)[0]


def test_deepspeeds_dict_of_parameters_breaks_no_graph():
    assert run_ranks(evaluated_in_one_graph, 2) == [pytest.approx(648.0)] * 2
