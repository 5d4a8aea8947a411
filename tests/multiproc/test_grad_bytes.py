"""A micro-batch's BF16 gradients are added to FP32 sums at 12 bytes per parameter, with no copy in FP32."""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.sharding.fp32_sums import Fp32Sums
from tests.support.parity import Case, Rig

OF_NO_MEMORY = "t transpose view _unsafe_view detach alias expand slice split as_strided select".split()
"""Operators that move no bytes of their tensors."""


class Bytes(TorchDispatchMode):
    """Bytes that operators read and write of tensors of one shape, by operator; products only write."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape, self.moved = shape, Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in OF_NO_MEMORY:
            read = [] if name in ("mm", "addmm", "bmm") else args
            of_shape = [each for each in (*read, output) if isinstance(each, torch.Tensor) and each.shape == self.shape]
            self.moved[name] += sum(each.nbytes for each in of_shape)
        return output


def of_a_microbatch(layout: str, spoiled: bool = False) -> float:
    """Bytes per parameter that one more micro-batch moves of the gradient of a matrix. spoiled: by autograd's cast."""
    moved = []
    for m in (4, 6):
        rig = Rig.of(Case(dist.get_world_size(), f"{layout} --pp_microbatches {m}", "", "bf16"))
        weight = rig.chunks[0].decoder.layers[0].mlp.linear_fc1.weight  # type: ignore[union-attr,index]
        watch = Bytes(getattr(weight, "ds_shape", weight.shape))
        with patch.object(Fp32Sums, "is_used_once", lambda *args, **keys: False) if spoiled else nullcontext():
            rig.train(0)
            batch = rig.microbatches()
            with watch:
                rig.train_step.train(batch, step=1)
        layers = sum("linear_fc1.weight" in name for name, _ in rig.chunks[0].named_parameters())
        moved.append(sum(watch.moved.values()) / watch.shape.numel() / layers)
    return (moved[1] - moved[0]) / 2


SPLIT = "--pipeline_model_parallel_size 2 --schedule zb-h1 "


@pytest.mark.parametrize("split", ["", SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("backend", ["", "--backend ddp", "--backend fsdp2", "--backend megatron"])
def test_at_most_12_bytes_per_parameter_and_microbatch(backend, split):
    """2 that the product writes, 2 + 4 that the sum reads, 4 that it writes."""
    assert run_ranks(of_a_microbatch, 2, split + backend) == [12.0, 12.0]


@pytest.mark.parametrize("layout", ["--zero_stage 1", "--zero_stage 2"])
def test_other_zero_stages(layout):
    assert run_ranks(of_a_microbatch, 2, layout) == [12.0, 12.0]


@pytest.mark.parametrize("layout", ["", SPLIT, "--backend fsdp2 "])
def test_gradients_that_are_reduced_at_once_have_no_copy_in_fp32(layout):
    """The bucket takes the 16-bit gradient; the rest is what a view's sizes are asked for."""
    assert max(run_ranks(of_a_microbatch, 2, layout + "--sync streaming")) <= 6.0


def test_a_split_backward_under_streaming_fsdp2_casts_what_it_reduces():
    """2 that the product writes; FSDP2 reduces a layer in one precision, which its norms' sums of I have, so 2 + 4 that
    the cast reads and writes; 4 that a look for values that are not finite reads. Two ranks share each stage: alone
    with it, a rank adds whole gradients to its shard."""
    assert run_ranks(of_a_microbatch, 4, SPLIT + "--backend fsdp2 --sync streaming") == [12.0] * 4


def test_with_autograd_s_cast_it_would_be_20():
    assert run_ranks(of_a_microbatch, 2, "", True) == [20.0, 20.0]
