"""Parameters that get no gradient in a step neither hang a boundary nor change the gradients of the others."""

import pytest

from megaaccum.testing import run_ranks
from tests.multiproc import no_gradient
from tests.multiproc.distance import FACTOR, _parameter_problems, _scalar_problems, _worst, total_error
from tests.multiproc.parity import Case

SMALL = "--num_layers 4 "
EXPERTS = (
    SMALL + "--num_experts 4 --moe_router_topk 1 --moe_ffn_hidden_size 32 --add_bias_linear false "
    "--moe_router_load_balancing_type none "
)
BOUNDARIES = ("", "--sync streaming ", "--zero_stage 2 ", "--boundary fsdp2 ", "--boundary fsdp2 --sync streaming ",
              "--boundary megatron ", "--boundary ddp ")  # fmt: skip
PIPELINES = ("--num_chunks 4 --pipeline_model_parallel_size 2 --schedule dualpipev ", "--num_chunks 4 ")


def cases(model: str, lane: str = "fp32") -> list[Case]:
    return [Case(4, boundary + pipeline, model, lane) for boundary in BOUNDARIES for pipeline in PIPELINES]


@pytest.mark.parametrize(
    ("change", "model"),
    [("frozen", SMALL), ("unused", SMALL), ("skipping", EXPERTS)],
    ids=["frozen", "unused", "skipping"],
)
def test_every_boundary(change, model):
    change = getattr(no_gradient, change)
    found = []
    for case, ranks in zip(
        cases(model), zip(*run_ranks(no_gradient.gradients, 4, cases(model), change, timeout=240)), strict=True
    ):
        batch = case.plan().batch.global_batch_size
        exact, near = (
            run_ranks(no_gradient.reference, 1, model, batch, dtype, change)[0] for dtype in ("fp64", case.lane)
        )
        found += [f"{case}: {problem}" for problem in _scalar_problems(case, list(ranks), exact.gradient)]
        error, limit = total_error(list(ranks), exact), FACTOR * total_error([near.gradient], exact)
        found += (
            [f"{case}: error {error:.2e} > {limit:.2e}; {_worst(list(ranks), exact)}"] if not error <= limit else []
        )
    assert not found, "\n" + "\n".join(found)
