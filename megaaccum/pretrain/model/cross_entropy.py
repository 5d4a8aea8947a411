"""The loss over the vocabulary in float64."""

from __future__ import annotations

import torch


def cross_entropy_in_float64(
    tp: torch.distributed.ProcessGroup, labels: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Per-token losses [batch, sequence] of labels of that shape and logits [sequence, batch, vocabulary / tp].

    Megatron's own cross entropy works in FP32 whatever it is given (megatron-core 0.19:
    VocabParallelCrossEntropy.calculate_logits_max).
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits, tp)
    return torch.nn.functional.cross_entropy(whole.permute(1, 2, 0), labels, reduction="none")
