"""The order of a run's training samples: Megatron's own, and what follows if the run needs more, or others.

A fresh run takes Megatron's order for train_iters * global_batch_size samples. Another number gives another order where
the data are gone through more than once, so a run that is resumed keeps the order that it began with to its end. What
comes after that, or after a change of data, is a new span: the corpora in their proportions, each from where it was.
A corpus gives its samples pass by pass, shuffled by (seed, pass), the first pass in Megatron's own order. So one in
its first pass repeats and loses nothing; one that Megatron has shuffled over several passes begins a new pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np


class SampleDataset(Protocol):
    """The part of a dataset that the loader needs: Megatron's GPTDataset and BlendedDataset have it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


@dataclass
class Corpus:
    """One part of the data. digest: of what its samples are. weight: its share of the samples. build_pass: takes the
    number of a pass, and gives a dataset that has every sample of the corpus once."""

    digest: str
    weight: float
    build_pass: Callable[[int], SampleDataset]
    _built: dict[int, SampleDataset] = field(default_factory=dict)

    def sample(self, number: int) -> dict[str, Any]:
        """The one that comes after `number` others of this corpus."""
        pass_number, position = divmod(number, self.num_samples)
        return self._pass(pass_number)[position]

    @property
    def num_samples(self) -> int:
        """Samples of one pass."""
        return len(self._pass(0))

    def _pass(self, number: int) -> SampleDataset:
        if number not in self._built:
            self._built = {0: self._built[0]} if 0 in self._built else {}
            self._built[number] = self.build_pass(number)
        return self._built[number]


@dataclass(frozen=True, slots=True)
class Span:
    """From sample `start` of the run on, `count` samples of one order. used: how many samples of each corpus, by its
    name (`_names`), came before; None for Megatron's own order of `count` samples."""

    start: int
    count: int
    used: dict[str, int] | None = None

    @property
    def stop(self) -> int:
        """The sample of the run after its last."""
        return self.start + self.count


class Order:
    """The training samples of a run by their numbers in the run, over its spans (in order, without a gap)."""

    def __init__(
        self, spans: list[Span], corpora: list[Corpus], build_own: Callable[[int], SampleDataset] | None = None
    ):
        """build_own: Megatron's own order, of a number of samples; data without it have no span that names it."""
        self.spans, self._corpora, self._build_own = spans, corpora, build_own
        self._parts: list[_Blend | _Own] = []
        for span in spans:
            if span.used is not None:
                self._parts.append(_Blend(corpora, span))
            else:
                assert build_own is not None
                self._parts.append(_Own(corpora, build_own(span.count)))

    def __len__(self) -> int:
        return self.spans[-1].start + len(self._parts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = max(0, bisect_right([span.start for span in self.spans], index) - 1)
        return self._parts[at][index - self.spans[at].start]

    def used(self, stop: int) -> dict[str, int]:
        """Samples of each corpus, by its name (`_names`), among those of the run before `stop`."""
        at = max(0, bisect_right([span.start for span in self.spans], max(stop - 1, 0)) - 1)
        counts = self._parts[at].used(stop - self.spans[at].start)
        return dict(zip(_names(self._corpora), counts, strict=True))

    def state(self, consumed: int) -> dict[str, Any]:
        """Plain numbers: the spans from sample `consumed` on, and what has been used of each corpus before."""
        spans = [span for span in self.spans if span.stop > consumed] or self.spans[-1:]
        return {"spans": [asdict(span) for span in spans], "used": self.used(consumed)}

    def after(self, state: dict[str, Any], consumed: int, needed: int, *, same_data: bool) -> Order:
        """The order of a run that continues after `consumed` samples up to sample `needed`, if a checkpoint recorded
        `state`."""
        other = Span(consumed, max(needed - consumed, 1), dict(state.get("used", {})))
        spans = [Span(**span) for span in state["spans"]] if same_data else [other]
        order, stop = Order(spans, self._corpora, self._build_own), spans[-1].stop
        if needed <= stop:
            return order
        return Order([*spans, Span(stop, needed - stop, order.used(stop))], self._corpora, self._build_own)


class _Own:
    """Megatron's own order: its dataset of one pair, or its blend of several."""

    def __init__(self, corpora: list[Corpus], dataset: Any):
        self._corpora, self._dataset = corpora, dataset
        self._drawn = _Drawn(getattr(dataset, "dataset_index", None), len(corpora))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[index]  # type: ignore[no-any-return]

    def used(self, count: int) -> list[int]:
        """Samples of each corpus among the first `count`. Of one that is shuffled over several passes at once, those
        of whole passes."""
        datasets = getattr(self._dataset, "datasets", [self._dataset])
        drawn = self._drawn.among(count) if len(datasets) > 1 else [count]
        once = [len(each.document_index) == len(each.indices) for each in datasets]
        return [
            number if one_pass else -(-number // corpus.num_samples) * corpus.num_samples
            for number, one_pass, corpus in zip(drawn, once, self._corpora, strict=True)
        ]


class _Blend:
    """The corpora in their proportions, each after the samples that were used of it."""

    def __init__(self, corpora: list[Corpus], span: Span):
        from megatron.core.datasets import helpers

        assert span.used is not None
        used = span.used  # a copy that is new continues from where the first was
        self._corpora, self._before = corpora, [used.get(n, used.get(n.partition(":")[0], 0)) for n in _names(corpora)]
        weights = np.array([corpus.weight for corpus in corpora], dtype=np.float64)
        self._corpus = np.zeros(span.count, dtype=np.int16)
        self._number = np.zeros(span.count, dtype=np.int64)
        helpers.build_blending_indices(
            self._corpus, self._number, weights / weights.sum(), len(corpora), span.count, False
        )
        self._drawn = _Drawn(self._corpus, len(corpora))

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = int(self._corpus[index])
        return self._corpora[at].sample(self._before[at] + int(self._number[index]))

    def used(self, count: int) -> list[int]:
        """Samples of each corpus before the first `count` are over."""
        return [before + number for before, number in zip(self._before, self._drawn.among(count), strict=True)]


def _names(corpora: list[Corpus]) -> list[str]:
    """The digest of each corpus; where one comes again, with a number after it."""
    digests = [corpus.digest for corpus in corpora]
    return [f"{each}:{n}" if (n := digests[:at].count(each)) else each for at, each in enumerate(digests)]


class _Drawn:
    """Counts the samples of each corpus among the first of an order, where each checkpoint asks for more. which: the
    corpus of each sample. Of all samples at once numpy would make a copy, four times as large."""

    def __init__(self, which: Any, num_corpora: int):
        self._which, self._stop, self._counts = which, 0, np.zeros(num_corpora, dtype=np.int64)

    def among(self, stop: int) -> list[int]:
        """The samples of each corpus among the first `stop`."""
        if stop < self._stop:
            self._stop, self._counts = 0, np.zeros_like(self._counts)
        for start in range(self._stop, stop, _AT_ONCE):
            part = self._which[start : min(stop, start + _AT_ONCE)]
            self._counts += np.bincount(part, minlength=len(self._counts))
        self._stop = stop
        return [int(number) for number in self._counts]


_AT_ONCE = 1 << 20
"""Samples that are counted at a time."""
