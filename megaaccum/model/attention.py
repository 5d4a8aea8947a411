"""The core of attention of Megatron's local layers: Megatron's own, for latent attention too, or torch's fused kernel,
which keeps no scores. Both take documents by where they begin.

Under context parallelism a rank holds two pieces of a sequence, one from each half (Megatron's zigzag). Its queries
meet the keys and values of the whole sequence, which are gathered over the ranks and whose gradients are scattered
back: Transformer Engine's `cp_comm_type: all_gather`, in plain torch on any device.

Megatron's configurations, groups and packed sequences have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megaaccum.errors import ConfigError
from megaaccum.model.names import as_in_local_layers
from megaaccum.upstream import megatron

if TYPE_CHECKING:
    # Megatron has no types; torch's cover all that is used of its modules here.
    from torch.nn import Module as DotProductAttention
    from torch.nn import Module as MegatronModule
else:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.module import MegatronModule


class LocalAttention(DotProductAttention):
    """Megatron's own core of attention, which makes whole scores, of each document for itself."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """FusedAttention.forward, which also accepts a mask of Megatron's own form, [batch, 1, sequence, sequence]."""
        if (packed := kwargs.pop("packed_seq_params", None)) is not None:
            *batch, starts = _as_documents(packed, query, key, value)
            return _by_head(self(*batch, starts, *args, **kwargs), value)
        whole: Callable[..., Tensor] = partial(DotProductAttention.forward, self)
        if attention_mask is None or attention_mask.dim() == 4:
            return whole(query, key, value, attention_mask, *args, **kwargs)
        return by_document(partial(whole, attention_mask=None, **kwargs), query, key, value, attention_mask)


class LatentAttention(LocalAttention):
    """LocalAttention whose values may have another width than queries. k_channels, v_channels: widths of a head's keys
    and values, which latent attention passes but the class of Megatron-core 0.19 does not accept. (It also builds one
    without them, which it then replaces.)"""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """LocalAttention.forward. Megatron widens packed values to the width of queries."""
        self.hidden_size_per_partition = value.shape[-2] * value.shape[-1]
        return super().forward(query, key, value, *args, **kwargs)


class FusedAttention(MegatronModule):
    """Causal attention by torch's kernel. The arguments are those of Megatron's own DotProductAttention."""

    config: Any

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **channels: int,
    ):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ConfigError(
                "torch's fused attention has no window_size and no softmax_type: set attention_backend to unfused."
            )
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self._scale = softmax_scale
        self._cp = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [sequence, batch, heads, channels]; key and value with a head per group of queries. attention_mask:
        None for a causal one, or [batch, sequence] bool in host memory, True where a document begins: each document is
        computed alone, so nothing of sequence length squared is made. packed_seq_params: the documents of inputs
        [tokens, heads, channels]. Returns [sequence, batch, heads * channels of a value]; packed, [tokens, heads,
        channels]."""
        assert attention_bias is None, "not made by megaaccum's models"
        if packed_seq_params is not None:
            if self._cp.size() > 1:
                raise ConfigError("PackedSeqParams under context parallelism needs Transformer Engine's layers")
            *batch, starts = _as_documents(packed_seq_params, query, key, value)
            return _by_head(self(*batch, starts, attn_mask_type), value)
        if self._cp.size() > 1:
            assert attention_mask is None, "reset_attention_mask under context parallelism is refused"
            key, value = whole_sequence(key, self._cp), whole_sequence(value, self._cp)
            allowed: Tensor | None = causal_mask(len(query), len(key), self._cp.rank(), self._cp.size(), query.device)
        else:
            allowed = None
        if attention_mask is None:
            return self.attend(query, key, value, allowed)
        return by_document(self.attend, query, key, value, attention_mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Torch's kernel; shapes as `forward`'s. allowed: [queries, keys] bool; None for causal attention."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        with self._random_state():
            context = torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=self._dropout if self.training else 0.0,
                is_causal=allowed is None,
                scale=self._scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _random_state(self) -> Any:
        """Dropout differs between tp ranks, which hold different heads; under sequence parallelism it does anyway."""
        if self.config.sequence_parallel or not (self._dropout and self.training):
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def by_document(attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """Causal attention inside documents: `attend(query, key, value)` of each document of each row alone, so that scores
    are at most a document's length squared. starts: [batch, sequence] bool in host memory, True where one begins; other
    shapes as FusedAttention's. Rows are split and not sliced, since the backward of a split is one concatenation."""
    rows = []
    parts = (each.split(1, dim=1) for each in (query, key, value))
    for begins, *row in zip(starts, *parts, strict=True):
        lengths = torch.diff(begins.nonzero().flatten(), append=torch.tensor([len(begins)])).tolist()
        documents = zip(*(each.split(lengths) for each in row), strict=True)
        rows.append(torch.cat([attend(*document) for document in documents]))
    return torch.cat(rows, dim=1)


def _as_documents(packed: Any, *parts: Tensor) -> tuple[Tensor, ...]:
    """Packed queries, keys and values [tokens, heads, channels] as a batch of one, and where its documents begin.
    Tokens after the last document are one more."""
    bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    starts = torch.zeros(1, len(parts[0]), dtype=torch.bool)
    starts[0, bounds[bounds < len(parts[0])].long().cpu()] = True
    return *(part.unsqueeze(1) for part in parts), starts


def _by_head(context: Tensor, value: Tensor) -> Tensor:
    """[tokens, 1, heads * channels] as [tokens, heads, channels] of packed values, where Megatron finds its padding."""
    return context.view(len(context), -1, value.shape[-1])


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
    positions = torch.cat([pieces[number], pieces[2 * count - 1 - number]])
    return positions[:, None] >= keys


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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
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
    gathered: Tensor = _WholeSequence.apply(part, cp, add)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return gathered


def prepare_latent_attention(chunks: list[torch.nn.Module]) -> None:
    """Make the gradients of latent attention whole under tp: of the rotated part of its keys, and of the norm of the
    queries' latent, which has the name of a norm of heads though every tp rank sees all of it."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MLASelfAttention) and module.tp_group.size() > 1:
                megatron.sum_rotated_key(module)
                for name, param in module.named_parameters():
                    of_queries = "q_layernorm" in as_in_local_layers(f"self_attention.{name}")
                    vars(param)["is_of_latent"] = of_queries
