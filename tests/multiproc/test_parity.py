"""The accumulated step equals the step on the full global batch: every pipeline, split and ZeRO stage."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import cells
from tests.support.parity import Case, gradient_of, one_process

LAYOUTS = [(pp, dp, vpp) for pp in (1, 2, 4) for dp in (1, 2) for vpp in (1, 2) if pp > 1 or vpp == 1]
"""(pp, dp, vpp)."""
PER_ROUND = "--flush per_round"
MEAN_OF_MEANS = "--loss_norm microbatch"


def cell(
    pp: int, dp: int, vpp: int, ga: int, pp_microbatches: int, flags: str = "", *, lane: str = "fp32", model: str = ""
):
    layout = f"--pipeline_model_parallel_size {pp} --grad_accum_steps {ga} --pp_microbatches {pp_microbatches} {flags}"
    interleaved = f" --virtual_pipeline_model_parallel_size {vpp}" if vpp > 1 else ""
    layers = "--num_layers 4 " if pp * vpp < 4 else ""  # two of a chunk, or more
    return Case(pp * dp, layout + interleaved, layers + model, lane)


def splits(layout: tuple[int, int, int], lane: str) -> list[Case]:
    round_size = max(4, 2 * layout[0])  # no fewer micro-batches in a flush
    return [
        cell(*layout, 2, 4, lane=lane),
        cell(*layout, 2, round_size, PER_ROUND, lane=lane),
        cell(*layout, 1, 8, lane=lane, model="--micro_batch_size 2 " + MEAN_OF_MEANS),
    ]


@cells(*(each for layout in LAYOUTS for each in splits(layout, "fp64")))
def test_float64(case, parity):
    parity(case)


@cells(*(each for layout in LAYOUTS for each in splits(layout, "fp32")))
def test_engine(case, parity):
    parity(case)


@cells(*(cell(*layout, 2, 4, f"--zero_stage {stage}") for layout in LAYOUTS for stage in (1, 2)))
def test_engine_at_other_zero_stages(case, parity):
    parity(case)


@cells(
    *(
        cell(*layout, 2, 4, f"--zero_stage {stage}", lane="bf16")
        for layout in ((1, 2, 1), (2, 2, 1), (2, 2, 2))
        for stage in (1, 2, 3)
    )
)
def test_bf16_parameters_with_fp32_accumulation(case, parity):
    parity(case)


class Float32Watch(TorchDispatchMode):
    """Notes operators whose results are FP32 tensors that depend on the model's numbers."""

    def __init__(self):
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype is torch.float64]
        if inputs and isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.operators.add(str(operator))
        return result


def operators_that_leave_float64(model: str) -> set[str]:
    chunk, plan = one_process(model, "fp64")
    with Float32Watch() as watch:
        gradient_of(chunk, plan, range(4))
    return watch.operators


@pytest.mark.parametrize(
    "model", ["", "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope"]
)
def test_the_reference_is_float64_throughout(model):
    assert run_ranks(operators_that_leave_float64, 1, model) == [set()]
