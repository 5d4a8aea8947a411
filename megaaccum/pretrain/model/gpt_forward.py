"""A Megatron GPT's `forward_step_func` over batches of tokens, as `megaaccum train` passes it to its engine.

Megatron's models have no types: a chunk and its output are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank

from megaaccum.distributed.groups import Groups
from megaaccum.platform import cpu
from megaaccum.step.short_batch import Microbatch

REPORTS = {"num_tokens": "sum"}
"""How its reports are reduced."""

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Sum of a micro-batch's loss, its weight, and its reports."""


class _Form(NamedTuple):
    """Fixed facts of a chunk: the tensors of a micro-batch that it reads, whether it has to be given its own part of a
    padding mask, and attributes. To look for one that a module lacks takes as long as a small operator."""

    reads: tuple[str, ...]
    packs_rows: bool
    cuts_padding: bool
    loss_cut: Any


class GptForwardStep:
    """The sum over unmasked tokens of the cross entropy, weighed by their number (`loss_norm: token`), or the mean of
    each micro-batch, weighed 1 (`microbatch`). Under context parallelism, of this rank's part of the sequences."""

    draws_nothing = True
    """It draws no random number outside its chunk, so that it need not be seeded."""
    adds_blocks = True
    """Under `reproducible_context_blocks` its loss is a sum over blocks, without reports."""

    def __init__(self, groups: Groups, loss_norm: str):
        self._cp, self._tp = groups.collection.cp, groups.tp
        self._per_token = loss_norm == "token"
        self._forms: WeakKeyDictionary[Any, _Form] = WeakKeyDictionary()

    def __call__(
        self, data_iterator: Iterator[Microbatch], chunk: Any, *, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[[torch.Tensor], Loss]]:
        """Output of `chunk` for the next micro-batch, and its loss function; with `return_schedule_plan`, Megatron's
        plan of that computation in place of the output."""
        microbatch, form = next(data_iterator), self._form_of(chunk)
        read = ((name, microbatch.get(name)) for name in form.reads)
        batch = {name: each.to(cpu.device(), non_blocking=True) for name, each in read if each is not None}
        if self._cp.size() > 1:
            batch = get_batch_on_this_cp_rank(batch, cp_group=self._cp, is_hybrid_cp=False)
        starts = microbatch.get("document_starts")
        given: dict[str, Any] = {**batch, "attention_mask": starts}
        if form.packs_rows:
            given = _as_one_row(batch, whole_rows(microbatch["loss_mask"].shape) if starts is None else starts, chunk)
        if form.cuts_padding and "padding_mask" in given:
            given["padding_mask"] = given["padding_mask"].chunk(self._tp.size(), dim=1)[self._tp.rank()]
        compute = chunk.build_schedule_plan if return_schedule_plan else chunk
        inputs = [given.pop(name, None) for name in ("tokens", "position_ids", "attention_mask")]
        output = compute(*inputs, labels=given.pop("labels", None), loss_mask=given.pop("loss_mask", None), **given)
        (tokens,) = (1.0,) if self._per_token else _counts([microbatch])
        return output, partial(self._loss_of_rows, batch.get("loss_mask"), tokens, form.loss_cut)

    def _form_of(self, chunk: Any) -> _Form:
        if (form := self._forms.get(chunk)) is None:
            reads = tuple(name for name in read_by([chunk]) if name != "document_starts")
            cut = getattr(chunk, "loss_cut", None) if self.adds_blocks else None
            # Megatron-core 0.19 cuts the mask to a rank's tokens on the first stage of a GPT alone.
            cuts = chunk.config.sequence_parallel and not (chunk.pre_process and isinstance(chunk, GPTModel))
            form = self._forms[chunk] = _Form(reads, getattr(chunk, "packs_rows", False), cuts, cut)
        return form

    def _loss_of_rows(self, mask: torch.Tensor | None, tokens: float, cut: Any, output: torch.Tensor) -> Loss:
        assert mask is not None, "the last stage reads it, and only that one has a loss"
        if output.shape != mask.shape:
            output = output.view(*mask.shape, *output.shape[2:])
        if cut is None:
            return self.loss(mask, tokens, output)
        # Sums of blocks of a sequence, wide enough that adding them rounds nothing (executor/blocks.py).
        parts = zip(cut.split(mask, 1), cut.split(output, 1), strict=True)
        totals, weights, _ = zip(*(self.loss(*part[:1], tokens, part[1]) for part in parts), strict=True)
        return sum(total.double() for total in totals), sum(weights), {}

    def loss(self, mask: torch.Tensor, tokens: float, output: torch.Tensor) -> Loss:
        """(sum or mean to add up, its weight, numbers to report) of one micro-batch on this rank. mask: [batch,
        sequence]. tokens: the micro-batch's unmasked tokens. output: cross entropy per token, shaped like `mask`."""
        # Half precision would lose the sum. Float64 is the lane that is compared to 1e-12.
        losses = output if output.dtype is torch.float64 else output.float()
        total = (losses * mask.to(losses.dtype)).sum()
        if self._per_token:
            return total, mask.count_nonzero(), {}
        # The micro-batch's ranks of context parallelism weigh 1 together.
        weight = mask.new_full((), 1.0 / self._cp.size(), dtype=torch.float64)
        return total / max(tokens, 1.0), weight, {"num_tokens": mask.count_nonzero()}

    def weights(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """The weight of each micro-batch, before its forward."""
        return _counts(microbatches) if self._per_token else [1.0] * len(microbatches)

    def token_weights(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """The factor on a token's loss in the sum of its micro-batch."""
        if self._per_token:
            return [1.0] * len(microbatches)
        return [1.0 / max(count, 1.0) for count in _counts(microbatches)]

    def routed_tokens(self, microbatches: Sequence[Microbatch]) -> list[int] | None:
        """The tokens of each micro-batch that routers count, if rows may be padded."""
        masks = [mask for each in microbatches if (mask := each.get("padding_mask")) is not None]
        return [int((~mask).sum()) for mask in masks] if len(masks) == len(microbatches) else None


def _as_one_row(batch: Microbatch, starts: torch.Tensor, chunk: Any) -> dict[str, Any]:
    documents = documents_of(starts, cpu.device(), in_rows=not chunk.config.sequence_parallel)
    return {name: each.view(1, -1) for name, each in batch.items()} | {"packed_seq_params": documents}


def documents_of(starts: torch.Tensor, device: torch.device, *, in_rows: bool) -> PackedSeqParams:
    """The documents of a packed row. starts: [rows, tokens] bool in host memory, True where one begins, at each row's
    begin too. in_rows: layers of experts split the tokens into rows again, for statistics of a row; not if sequence
    parallelism cuts the packed row."""
    bounds = torch.cat([starts.view(-1).nonzero().view(-1), torch.tensor([starts.numel()])]).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
        tokens_per_sample=starts.shape[1] if in_rows else None,
    )  # fmt: skip


def whole_rows(shape: torch.Size) -> torch.Tensor:
    """The starts of documents in [rows, tokens] if each row is one document."""
    starts = torch.zeros(shape, dtype=torch.bool)
    starts[:, 0] = True
    return starts


def read_by(chunks: Sequence[Any]) -> list[str]:
    """The names of the tensors of a micro-batch that chunks need: stages between the first and the last, no tokens."""
    predict = any(getattr(chunk, "mtp_process", False) for chunk in chunks)
    first, last = any(chunk.pre_process for chunk in chunks), any(chunk.post_process for chunk in chunks)
    names = ["padding_mask"] if any(chunk.config.num_moe_experts for chunk in chunks) else []
    names += ["tokens", "position_ids"] if first or predict else []
    return [*names, *(["labels", "loss_mask"] if last or predict else []), "document_starts"]


def _counts(microbatches: Sequence[Microbatch]) -> list[float]:
    """Unmasked tokens of each micro-batch, counted in host memory: a loader that has counted them did so ahead of the
    step."""
    counts = [
        each["loss_mask"].count_nonzero() if each.get("num_tokens") is None else each["num_tokens"]
        for each in microbatches
    ]
    return [float(count) for count in torch.stack(counts).tolist()]
