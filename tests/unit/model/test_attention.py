"""Attention inside documents, given by where they begin: that of a whole mask, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions import fused_softmax
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import GlobalMemoryBuffer

from megaaccum.model.attention import LocalAttention
from megaaccum.pretrain.data.loader import starts_of
from megaaccum.pretrain.model.attention import FusedAttention

HEADS, GROUPS, CHANNELS, ROWS = 4, 2, 8, 2
END = 0


@pytest.fixture(scope="module", params=["fused", "whole scores"])
def core(request) -> Iterator[torch.nn.Module]:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * CHANNELS, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, use_cpu_initialization=True,
    )  # fmt: skip
    collection = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1), tp=SimpleNamespace(size=lambda: 1))
    kind = FusedAttention if request.param == "fused" else LocalAttention
    with pytest.MonkeyPatch.context() as patch:  # what megaaccum's groups and random states set up on a rank
        patch.setattr(dot_product_attention.parallel_state, "get_global_memory_buffer", GlobalMemoryBuffer)
        tracker = SimpleNamespace(fork=nullcontext)
        patch.setattr(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
        patch.setattr(fused_softmax, "get_default_causal_mask", lambda size: torch.ones(size, size).triu(1).bool())
        empty = lambda _buffer, shape, dtype, _name: torch.empty(shape, dtype=dtype)  # noqa: E731
        patch.setattr(GlobalMemoryBuffer, "get_tensor", empty)
        yield kind(config, 1, AttnMaskType.causal, "self", pg_collection=collection)


def inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(length, ROWS, heads, CHANNELS, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


def starts(length: int, every: int = 5) -> torch.Tensor:
    """Rows of documents of different lengths; an end at the last token and two in a row are among them."""
    tokens = torch.ones(ROWS, length, dtype=torch.int64)
    tokens[0, 2::every] = tokens[0, 3] = tokens[0, -1] = tokens[1, length // 2] = END
    return starts_of(tokens, END)


def masked(query, key, value, begins) -> torch.Tensor:
    """The same with the mask of the layers that make whole scores."""
    document = begins.cumsum(1)
    mask = ~(document[:, :, None] == document[:, None, :]).tril()[:, None]
    q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3) / CHANNELS**0.5).masked_fill(mask, float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def test_documents_attend_as_under_a_mask(core):
    begins, weight = starts(16), torch.randn(16, ROWS, HEADS * CHANNELS, dtype=torch.float64)
    mine, theirs = inputs(16), inputs(16)
    ours, expected = core(*mine, begins), masked(*theirs, begins)
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-12)
    (ours * weight).sum().backward()
    (expected * weight).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    shifted = core(*inputs(16), starts_of(torch.ones(ROWS, 16, dtype=torch.int64), END))
    assert not torch.allclose(shifted, expected)  # one document: the comparison sees where they begin


def test_what_a_backward_keeps_grows_with_tokens(core):
    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = core(*inputs(length), starts(length)[:1].expand(ROWS, -1))  # short documents in both rows
        return sum(sizes.values()) + 0 * output.numel()

    assert kept(512) <= 2.2 * kept(256)
