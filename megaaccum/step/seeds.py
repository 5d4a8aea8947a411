"""The random states of a forward, set for each sample.

`rng: sample` draws everything from (seed, step, micro-batch of the global batch, layer, stream). A micro-batch then has
the same masks wherever and whenever it runs: under every pipeline, schedule and number of ranks, when its forward is
recomputed, when a step is attempted again, and after a resume. `rng: megatron` draws on from states that each rank has
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megaaccum.config import Plan
from megaaccum.distributed import rng
from megaaccum.distributed.groups import Groups
from megaaccum.model.names import over_stages
from megaaccum.model.torch_chunk import TorchChunk, layers_of
from megaaccum.platform.replacing import replaced
from megaaccum.upstream import pytorch


class SampleSeeds:
    """Seeds the forwards of a flush by sample, where `rng` is `sample`; does nothing where it is `megatron`.

    A forward is seeded where it begins, and again at its embedding and at each layer, so that what a layer draws does
    not depend on which layers its stage holds; not at all where nothing in it may draw, nor its forward step function
    (`may_be_needed`). Streams are those of Megatron's tracker: the default and `data-parallel-rng` are the same on the
    ranks of a tp group, the others differ between them; on ranks of a cp group, which hold parts of one sample, all
    differ.
    """

    def __init__(self, plan: Plan, groups: Groups, chunks: Sequence[torch.nn.Module]):
        self._seed, self._plan, self._groups = plan.config.run.seed, plan, groups
        self._is_on = plan.config.run.rng == "sample"
        drawing = [chunk for chunk in chunks if _may_draw(chunk, chunk.config)]
        self._chunks_draw = bool(drawing)
        # In blocks, each draws what a rank with that block would (executor/blocks.py).
        in_blocks = (plan.config.sharding.reproducible_context_blocks or 1) > 1
        self._cp_rank, self._tp_rank = 0 if in_blocks else groups.collection.cp.rank(), groups.tp.rank()
        self._step: int | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._streams: tuple[str, ...] = ()
        self._forward = self._backward = 0
        """Numbers in the step, on this rank, of the micro-batches whose forward and backward began last."""
        self._sample_index: Callable[[int], int] = self._planned_index
        for chunk in drawing if self._is_on else ():
            # Under sequence parallelism Megatron runs a stage's layers inside the state that differs over tp, and
            # recomputes them outside.
            stream = "model-parallel-rng" if getattr(chunk.config, "sequence_parallel", False) else "default"
            for name, module in seeded_modules(chunk):
                module.register_forward_pre_hook(lambda *_, at=(name, stream): self.seed_at(*at))

    def may_be_needed(self, forward_step_func: object) -> bool:
        """Whether something draws in forwards by this function: a chunk does, or the function does not say by an
        attribute `draws_nothing` that it does not itself."""
        return self._is_on and (self._chunks_draw or not getattr(forward_step_func, "draws_nothing", False))

    @contextmanager
    def flush(self, step: int) -> Iterator[None]:
        """Around the flushes of step `step` (0: an evaluation). The process' own random states are as before after
        it."""
        self._step = step if self._is_on else None
        try:
            yield
        finally:
            self._step = None
            before, self._before = self._before, {}
            rng.restore(before)

    def numbered(self, sample_index: Callable[[int], int] | None) -> AbstractContextManager[None]:
        """Inside, this rank's micro-batch i is number `sample_index(i)` of the global batch; None: as planned."""
        return replaced(self, _sample_index=sample_index or self._planned_index)

    def _planned_index(self, index: int) -> int:
        return self._plan.batch.sample_index(index, self._groups.dp.rank(), in_runs=self._plan.in_runs)

    def begin_forward(self, chunk: int, microbatch: int) -> None:
        """Seed the forward of this rank's micro-batch number `microbatch` of the step."""
        self._forward = microbatch
        self.seed_at("", "default")

    def begin_backward(self, chunk: int, microbatch: int) -> None:
        """Note the micro-batch of a backward, which may run forwards again (activation recompute)."""
        self._backward = microbatch

    def seed_at(self, layer: str, stream: str) -> None:
        """Before `layer`, whose own code draws from `stream`, and from others inside a `fork` of Megatron's tracker."""
        if self._step is None:  # nothing, or a forward of the user's own
            return
        if not self._before:
            self._before = rng.snapshot()
            self._streams = tuple(name for name in self._before if name not in ("cpu", "cuda"))
        microbatch = self._sample_index(self._backward if pytorch.in_backward() else self._forward)
        key = f"{self._seed}/{self._step}/{microbatch}/{layer}/{self._cp_rank}"
        rng.seed_streams(key, stream, self._streams, tp_rank=self._tp_rank)


def seeded_modules(chunk: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name in the whole model, module) of what a stage may begin with and what may draw: the embedding, the attention
    of each transformer layer (a layer draws nothing before it, and Megatron's schedule plans call no layer as a whole),
    and every layer of another kind, as its caller may draw after it. A model without a pipeline has the names that its
    chunks have in one."""
    chunk = chunk.module if isinstance(chunk, TorchChunk) else chunk
    predicting = chunk.mtp.layers if getattr(chunk, "mtp", None) is not None else []
    layers = {id(layer) for layer in (*layers_of(chunk), *(layer.mtp_model_layer for layer in predicting))}
    for name, module in chunk.named_modules():
        if name in ("embedding", "mtp.embedding"):
            yield "embedding", module
        elif id(module) in layers:
            yield over_stages(chunk, f"{name}.forward"), getattr(module, "self_attention", module)


_DRAW_NOTHING = (
    "megaaccum.model.",
    "megatron.core.extensions.",
    "megatron.core.fusions.",
    "megatron.core.models.common.embeddings.",
    "megatron.core.models.gpt.",
    "megatron.core.tensor_parallel.",
    "megatron.core.transformer.",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
    "torch.nn.modules.sparse",
    "transformer_engine.",
)
"""Modules whose classes draw nothing in a forward where dropout is 0."""


def _may_draw(module: torch.nn.Module, config: Any) -> bool:
    """Whether a forward of `module` may draw: with dropout, in a mixture of experts (routers may), in a class that is
    not known, as a user's own, or in a function that was put in a forward's place."""
    every = list(module.modules())
    names = ("hidden_dropout", "attention_dropout", "p")
    rates = [getattr(each, name, 0.0) for each in (config, *every) for name in names]
    kinds = {type(each).__module__ for each in every}
    return (
        any(isinstance(rate, int | float) and rate > 0 for rate in rates)
        or any(not kind.startswith(_DRAW_NOTHING) or ".moe." in kind for kind in kinds)
        or any("forward" in vars(each) for each in every)
    )
