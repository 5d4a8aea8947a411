# ruff: noqa: E402
"""Megatron's own loops over this package's sharding and schedules: its `train_step`, its `pretrain`, or a worker of
another framework that calls a schedule and `optimizer.step()`.

    from megaaccum.loop import get_forward_backward_func, wrap

    chunks, optimizer = wrap(chunks, groups, plan, optimizer=torch.optim.AdamW)
    forward_backward_func = get_forward_backward_func(plan)  # or, for 1F1B and interleaved, Megatron's own

On a machine without a GPU, import it before Megatron: it installs CPU stand-ins for Megatron's CUDA calls.
`megaaccum.megatron_loop` is this module.

| module | holds |
| --- | --- |
| `contract` | `wrap`: chunks and an optimizer as Megatron's loops drive them |
| `pretrain` | Megatron-LM's `pretrain` |
| `checkpoint` | Megatron's checkpoints of their state |
"""

from megaaccum.distributed import preload

preload.libraries()  # before Megatron and DeepSpeed, which the modules below import: both look for a GPU then

from megaaccum.loop.contract import get_forward_backward_func, wrap
from megaaccum.loop.pretrain import pretrain
from megaaccum.upstream import megatron_training

megatron_training.answer_for_cuda()

__all__ = ["get_forward_backward_func", "pretrain", "wrap"]
