"""Rows of whole conversations: packed, each with attention and positions of its own, in an order that the seed draws.

A conversation of n tokens takes n - 1 positions, as its last token is only predicted. Conversations are put into rows
once, longest first, each into the fullest row that has room (best fit), so every pass has the same rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaaccum.config.schema import Config
from megaaccum.errors import DataError
from megaaccum.pretrain.data.chats import Chats, read_chats
from megaaccum.pretrain.data.files import digest_of
from megaaccum.pretrain.data.order import Corpus
from megaaccum.pretrain.data.sources import Blend, Sources, data_folder
from megaaccum.pretrain.data.train_valid_split import split_ends


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Conversations in rows of `length` tokens. rows: the numbers of the conversations of each. packed: rows may hold
    several, and say where each begins."""

    chats: Chats
    rows: list[list[int]]
    length: int
    packed: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = {name: torch.zeros(self.length, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        sample |= {"loss_mask": torch.zeros(self.length), "document_starts": torch.zeros(self.length, dtype=torch.bool)}
        at = 0
        for number in self.rows[index]:
            first, end = _span(self.chats, number, self.length)
            part = slice(at, at + end - first - 1)
            sample["tokens"][part] = torch.from_numpy(self.chats.tokens[first : end - 1].astype(np.int64))
            sample["labels"][part] = torch.from_numpy(self.chats.tokens[first + 1 : end].astype(np.int64))
            sample["loss_mask"][part] = torch.from_numpy(self.chats.counts[first + 1 : end].astype(np.float32))
            at = self._begin(sample, part)
        sample["padding_mask"] = torch.arange(self.length) >= at
        if at < self.length:  # what is left is filled with a document that counts nowhere
            self._begin(sample, slice(at, self.length))
        if not self.packed:
            del sample["document_starts"]
        return sample

    @staticmethod
    def _begin(sample: dict[str, torch.Tensor], part: slice) -> int:
        """Begin a document at the first position of `part`; returns the position after it."""
        sample["document_starts"][part.start] = True
        sample["position_ids"][part] = torch.arange(part.stop - part.start)
        return int(part.stop)

    def in_pass(self, number: int, seed: int) -> ChatRows:
        """The same rows in the order of pass `number`."""
        order = np.random.default_rng([seed, number]).permutation(len(self.rows))
        return ChatRows(self.chats, [self.rows[i] for i in order], self.length, self.packed)


def put_in_rows(chats: Chats, numbers: range, length: int, *, packed: bool) -> ChatRows:
    """The conversations `numbers` in rows. One that is longer than a row loses its end, and if no response is left in
    the row, it is left out. Raises DataError if no row is left."""
    spans = {number: _span(chats, number, length) for number in numbers}
    sizes = {n: end - first - 1 for n, (first, end) in spans.items() if chats.counts[first + 1 : end].any()}
    rows: list[list[int]] = []
    with_room: list[tuple[int, int]] = []  # (room, minus the row's number), so that of equal ones the last is taken
    for number in sorted(sizes, key=lambda n: (-sizes[n], n)):
        at = bisect_left(with_room, (sizes[number], -len(rows))) if packed else len(with_room)
        room, row = with_room.pop(at) if at < len(with_room) else (length, -len(rows))
        if -row == len(rows):
            rows.append([])
        rows[-row].append(number)
        if room > sizes[number] + 1:
            insort(with_room, (room - sizes[number], row))
    if not rows:
        raise DataError(
            f"none of {len(numbers)} conversations has a response in its first {length} tokens: set seq_length higher,"
            " or split to a larger share, or eval_iters to 0 for no validation"
        )
    return ChatRows(chats, rows, length, packed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The conversations of one file that training or validation has, without `left_out`. weight: their share of the
    samples."""

    path: Path
    rows: ChatRows
    weight: float
    left_out: int
    digest: str

    def corpus(self, seed: int) -> Corpus:
        """Its rows pass by pass."""
        return Corpus(self.digest, self.weight, partial(self.rows.in_pass, seed=seed))

    def __str__(self) -> str:
        numbers, chats = sum(map(len, self.rows.rows)), self.rows.chats
        cut = sum(
            int(chats.starts[n + 1] - chats.starts[n]) > self.rows.length + 1 for row in self.rows.rows for n in row
        )
        shortened = f", {cut} of them cut to {self.rows.length + 1} tokens" if cut else ""
        longer = f", {self.left_out} left out: no response in the first {self.rows.length + 1}" if self.left_out else ""
        return f"{numbers:,} conversations of {self.path.name} in {len(self.rows):,} rows{shortened}{longer}"


def read_parts(config: Config, sources: Sources, *, with_valid: bool) -> tuple[list[Part], list[Part]]:
    """The files of training, and of validation if the run evaluates. Raises DataError."""
    ends = None if sources.split is None else split_ends(sources.split)
    train = _read_blend(config, sources.train, (0.0, ends[0] if ends else 1.0))
    return train, _read_blend(config, sources.valid or sources.train, ends or (0.0, 1.0)) if with_valid else []


def shown(config: Config, train: list[Part]) -> dict[str, str]:
    """The facts that decide the training samples, for readers."""
    return {
        "data": "; ".join(map(str, train)),
        "split": config.data.split if not config.data.train_data_path else "None",
        "seq_length": str(config.model.seq_length),
        "seed": str(config.run.seed),
        "reset_attention_mask": str(config.data.reset_attention_mask),
        "assistant_only_loss": str(config.data.assistant_only_loss),
    }


def _read_blend(config: Config, blend: Blend, bounds: tuple[float, float]) -> list[Part]:
    weights: Sequence[float | None] = blend.weights or [None] * len(blend.prefixes)
    return [_read_part(config, Path(name), each, bounds) for name, each in zip(blend.prefixes, weights, strict=True)]


def _read_part(config: Config, path: Path, weight: float | None, bounds: tuple[float, float]) -> Part:
    chats = read_chats(path, config.data, data_folder(config))
    first, end = (round(bound * len(chats)) for bound in bounds)
    try:
        rows = put_in_rows(chats, range(first, end), config.model.seq_length, packed=config.data.reset_attention_mask)
    except DataError as error:
        raise DataError(f"{path}, conversations {first} to {end} of {len(chats)}: {error}") from None
    facts = [chats.digest, first, end, rows.length, rows.packed, config.run.seed]
    left_out = end - first - sum(map(len, rows.rows))
    weight = float(len(rows)) if weight is None else weight
    return Part(path=path, rows=rows, weight=weight, left_out=left_out, digest=digest_of(facts))


def _span(chats: Chats, number: int, length: int) -> tuple[int, int]:
    """The first token of a conversation and the one after its last that a row takes."""
    first = int(chats.starts[number])
    return first, min(int(chats.starts[number + 1]), first + length + 1)
