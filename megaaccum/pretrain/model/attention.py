"""The core of attention of Megatron's local layers: Megatron's own, for latent attention too, or torch's fused kernel,
which keeps no scores.

Megatron's configurations, groups and packed sequences have no types: `Any`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megaaccum.errors import ConfigError
from megaaccum.model.attention import LocalAttention, by_document, causal_mask, on_packed, whole_sequence

if TYPE_CHECKING:
    # Megatron has no types; torch's cover all that is used of its modules here.
    from torch.nn import Module as MegatronModule
else:
    from megatron.core.transformer.module import MegatronModule


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
        assert config.window_size is None and config.softmax_type == "vanilla", config  # check_machine
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
            return on_packed(self, packed_seq_params, query, key, value)
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
