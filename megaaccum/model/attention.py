"""Two things that the core of attention of Megatron's local layers lacks: documents by where they begin, and sequences
that are cut over ranks.

Under context parallelism a rank holds two pieces of a sequence, one from each half (Megatron's zigzag). Its queries
meet the keys and values of the whole sequence, which are gathered over the ranks and whose gradients are scattered
back: Transformer Engine's `cp_comm_type: all_gather`, in plain torch on any device.

Megatron's groups and packed sequences have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megaaccum.model.names import as_in_local_layers
from megaaccum.upstream import megatron

if TYPE_CHECKING:
    # Megatron has no types; torch's cover all that is used of its modules here.
    from torch.nn import Module as DotProductAttention
else:
    from megatron.core.transformer.dot_product_attention import DotProductAttention


class LocalAttention(DotProductAttention):
    """Megatron's own core of attention, which makes whole scores, of each document for itself."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """attention_mask: None for a causal one; [batch, sequence] bool in host memory, True where a document begins;
        or of Megatron's own form, [batch, 1, sequence, sequence]. Shapes as Megatron's, packed ones too."""
        if (packed := kwargs.pop("packed_seq_params", None)) is not None:
            return on_packed(lambda *batch: self(*batch, *args, **kwargs), packed, query, key, value)
        whole: Callable[..., Tensor] = partial(DotProductAttention.forward, self)
        if attention_mask is None or attention_mask.dim() == 4:
            return whole(query, key, value, attention_mask, *args, **kwargs)
        return by_document(partial(whole, attention_mask=None, **kwargs), query, key, value, attention_mask)


def by_document(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Causal attention inside documents: `attend(query, key, value)` of each document of each row alone, so that scores
    are at most a document's length squared. starts: [batch, sequence] bool in host memory, True where one begins; other
    shapes as Megatron's. Rows are split and not sliced, since the backward of a split is one concatenation."""
    rows = []
    parts = (each.split(1, dim=1) for each in (query, key, value))
    for begins, *row in zip(starts, *parts, strict=True):
        lengths = torch.diff(begins.nonzero().flatten(), append=torch.tensor([len(begins)])).tolist()
        documents = zip(*(each.split(lengths) for each in row), strict=True)
        rows.append(torch.cat([attend(*document) for document in documents]))
    return torch.cat(rows, dim=1)


def on_packed(forward: Callable[..., Tensor], packed: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`forward(query, key, value, starts)` of packed queries, keys and values [tokens, heads, channels], as a batch of
    one; the context by heads, where Megatron finds its padding."""
    *batch, starts = _as_documents(packed, query, key, value)
    context = forward(*batch, starts)
    return context.view(len(context), -1, value.shape[-1])


def _as_documents(packed: Any, *parts: Tensor) -> tuple[Tensor, ...]:
    """Packed queries, keys and values as a batch of one, and where its documents begin. Tokens after the last document
    are one more."""
    bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    starts = torch.zeros(1, len(parts[0]), dtype=torch.bool)
    starts[0, bounds[bounds < len(parts[0])].long().cpu()] = True
    return *(part.unsqueeze(1) for part in parts), starts


def accept_packed_sequences(chunks: Sequence[torch.nn.Module]) -> None:
    """Let Megatron's own core of attention in a user's local layers, which refuses PackedSeqParams, accept them as
    LocalAttention does."""
    for chunk in chunks:
        for module in chunk.modules():
            if type(module) is DotProductAttention:
                module.forward = MethodType(LocalAttention.forward, module)


def causal_mask(num_queries: int, num_keys: int, number: int, count: int, device: torch.device) -> Tensor:
    """Causal mask [num_queries, num_keys] of the tokens of rank, or block, `number` of `count`: pieces `number` and
    `2 * count - 1 - number` of the sequence."""
    keys = torch.arange(num_keys, device=device)
    pieces = keys.split(num_queries // 2)
    return torch.cat([pieces[number], pieces[2 * count - 1 - number]])[:, None] >= keys


class _WholeSequence(torch.autograd.Function):
    """See `whole_sequence`; backward, the sum of all ranks' gradients of this rank's pieces."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cp: dist.ProcessGroup, add: Callable[..., Tensor] | None) -> Tensor:
        ctx.cp, ctx.add = cp, add
        gathered = part.new_empty(cp.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=cp)
        pieces = gathered.view(cp.size(), 2, len(part) // 2, *part.shape[1:])
        return torch.cat([pieces[:, 0].flatten(0, 1), pieces[:, 1].flip(0).flatten(0, 1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        size = ctx.cp.size()
        halves = grad.view(2, size, -1, *grad.shape[1:])
        rows = torch.stack([halves[0], halves[1].flip(0)], dim=1).flatten(0, 2)
        if ctx.add is not None:
            theirs = torch.empty_like(rows)
            dist.all_to_all_single(theirs, rows, group=ctx.cp)
            return ctx.add(theirs.chunk(size)), None, None
        part = grad.new_empty(len(grad) // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(part, rows, group=ctx.cp)
        return part, None, None


def whole_sequence(part: Tensor, cp: dist.ProcessGroup, add: Callable[..., Tensor] | None = None) -> Tensor:
    """The whole sequence in order, from each rank's two pieces along dimension 0. add: the sum of gradients, a list of
    each rank's; default: a reduce-scatter's."""
    return cast("Tensor", _WholeSequence.apply(part, cp, add))


def prepare_latent_attention(chunks: list[torch.nn.Module]) -> None:
    """Make the gradients of latent attention whole under tp: of the rotated part of its keys, and of the norm of the
    queries' latent, which has the name of a norm of heads though every tp rank sees all of it."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MLASelfAttention) and module.tp_group.size() > 1:
                megatron.sum_rotated_key(module)
                for name, param in module.named_parameters():
                    vars(param)["is_of_latent"] = "q_layernorm" in as_in_local_layers(f"self_attention.{name}")
