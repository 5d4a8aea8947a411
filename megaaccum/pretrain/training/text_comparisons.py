"""24 likelihood comparisons: whether the model finds the right continuation of a text likelier than the wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megaaccum.engine import Engine
from megaaccum.platform import cpu
from megaaccum.pretrain.model.gpt_forward import GptForwardStep
from megaaccum.step.short_batch import Microbatch
from megaaccum.texts import packaged_yaml

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Row:
    """A text as token ids; the last `scored` are the choice."""

    tokens: list[int]
    scored: int


def comparisons() -> list[tuple[str, list[str]]]:
    """(text, choices) of the comparisons in the package; the first choice is the right one."""
    found = packaged_yaml("megaaccum.pretrain.data", "comparisons.yaml")
    return [(each["text"], each["choices"]) for each in found]


def compare_texts(engine: Engine, encode: Encode) -> dict[str, float]:
    """`accuracy` over the comparisons (a model is right if the first choice has the largest mean log-likelihood per
    token), and `centered_accuracy`: 0 is chance, 1 is all right. Collective over the world, the same on every rank."""
    every = comparisons()
    rows = [_row(text, choice, encode, engine.batch.seq_length) for text, choices in every for choice in choices]
    scores = iter(mean_log_likelihoods(engine, rows))
    right, chance = 0, 0.0
    for _, choices in every:
        mine = [next(scores) for _ in choices]
        right += mine[0] > max(mine[1:])
        chance += 1 / len(choices)
    accuracy, chance = right / len(every), chance / len(every)
    return {"centered_accuracy": (accuracy - chance) / (1 - chance), "accuracy": accuracy}


def _row(text: str, choice: str, encode: Encode, seq_length: int) -> Row:
    """The tokens of text and choice; if they exceed a sequence, their last ones."""
    context, whole = encode(text), encode(text + choice)
    shared = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(context))
    return Row(whole[-(seq_length + 1) :], min(len(whole) - shared, seq_length))


def mean_log_likelihoods(engine: Engine, rows: Sequence[Row]) -> list[float]:
    """Mean log-likelihood of each row's scored tokens, in nats. Collective over the world, the same on every rank."""
    groups, batch = engine.groups, engine.plan.batch
    dp, per_call = groups.dp.size(), batch.microbatches_per_flush
    size, mine = batch.micro_batch_size, range(groups.dp.rank(), len(rows), dp)
    totals = torch.zeros(len(rows), dtype=torch.float64, device=cpu.device())
    for call in range(-(-len(rows) // (dp * size * per_call))):
        starts = range(call * per_call * size, (call + 1) * per_call * size, size)
        at = [list(mine[start : start + size]) for start in starts]
        data = [microbatch_of([rows[index] for index in indices], size, batch.seq_length) for indices in at]
        reports = engine.forward(data, forward_step_func=_RowLosses(groups, "token"))
        for indices, report in zip(at, reports, strict=False):  # empty but on the last stage
            totals[indices] -= report["rows"].double()[: len(indices)]
    if groups.tp.rank() > 0:  # ranks of a tp group hold the same sums, ranks of a cp group hold parts
        totals.zero_()
    torch.distributed.all_reduce(totals)
    return [total / row.scored for total, row in zip(totals.tolist(), rows, strict=True)]


def microbatch_of(rows: Sequence[Row], size: int, seq_length: int) -> Microbatch:
    """A micro-batch of `rows`, filled up with empty rows to `size`."""
    tokens, labels = torch.zeros(2, size, seq_length, dtype=torch.int64)
    mask = torch.zeros(size, seq_length)
    for index, row in enumerate(rows):
        length = len(row.tokens) - 1
        tokens[index, :length] = torch.tensor(row.tokens[:-1])
        labels[index, :length] = torch.tensor(row.tokens[1:])
        mask[index, length - row.scored : length] = 1
    positions = torch.arange(seq_length).expand(size, -1).contiguous()
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


class _RowLosses(GptForwardStep):
    """Reports the sum of the losses of each row's scored tokens, on this context-parallel rank."""

    adds_blocks = False

    def loss(self, mask: torch.Tensor, tokens: float, output: torch.Tensor):
        rows = (output.double() * mask).sum(dim=1)
        return rows.sum(), mask.count_nonzero(), {"rows": rows}
