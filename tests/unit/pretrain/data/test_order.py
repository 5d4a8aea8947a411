"""The order of samples over restarts with more steps, another batch or other data: none comes twice, none is lost."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megaaccum.pretrain.data import order
from megaaccum.pretrain.data.dataset import Datasets, build_datasets
from tests.support.data_samples import counting_pair, make_plan

TOKENS = 2000
"""Tokens of each corpus: 50 documents of 40; 124 samples of 16 in a pass."""
PASS = (TOKENS - 1) // 16


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    return [str(counting_pair(tmp_path / name, first=number * TOKENS)) for number, name in enumerate("abc")]


def data(tmp_path: Path, paths: list[str], train_iters: int, **keys: object) -> Datasets:
    """The datasets of a run of 4 samples a step."""
    more = dict(vocab_size=3 * TOKENS, split="100,0,0", eval_interval=0, seq_length=16, train_iters=train_iters)
    return build_datasets(make_plan(tmp_path / "run", data_path=paths, **(more | keys)))


def recorded(of: Datasets, consumed: int) -> dict:
    return json.loads(json.dumps(of.state(consumed)))


def first_tokens(of: Datasets, start: int, stop: int) -> list[int]:
    """The first token of each sample: in whole passes over a corpus whose ids count up, no two samples share one."""
    return [int(of.train[index]["tokens"][0]) for index in range(start, stop)]


def resumed(of: Datasets, before: Datasets, consumed: int, needed: int) -> Datasets:
    return of.after(recorded(before, consumed), consumed=consumed, needed=needed)


def test_more_steps_within_a_pass_are_those_of_the_longer_run(tmp_path, corpora):
    short, long = (data(tmp_path, corpora[:1], train_iters) for train_iters in (10, 25))
    more = resumed(long, short, 20, 100)
    assert first_tokens(more, 0, 100) == first_tokens(long, 0, 100)


def test_fewer_steps_leave_the_order_as_it_was(tmp_path, corpora):
    long, short = (data(tmp_path, corpora[:1], train_iters) for train_iters in (60, 45))
    assert first_tokens(long, 0, 180) != first_tokens(short, 0, 180), "Megatron's orders of two passes depend on length"
    assert first_tokens(resumed(short, long, 20, 180), 0, 180) == first_tokens(long, 0, 180)


def test_after_an_order_of_several_passes_a_new_pass_begins(tmp_path, corpora):
    short, long = (data(tmp_path, corpora[:1], train_iters) for train_iters in (45, 100))
    more = resumed(long, short, 100, 400)
    assert len(more.train) == 400
    assert first_tokens(more, 100, 180) == first_tokens(short, 100, 180)
    assert len(set(first_tokens(more, 180, 180 + PASS))) == PASS
    assert Counter(first_tokens(more, 180 + PASS, 400)).most_common(1)[0][1] == 1
    assert first_tokens(more, 180, 200) != first_tokens(more, 180 + PASS, 200 + PASS), (
        "each pass has an order of its own"
    )


def corpora_of(tokens: list[int]) -> Counter:
    return Counter("abc"[token // TOKENS] for token in tokens)


def test_a_new_blend_goes_on_where_each_corpus_was(tmp_path, corpora):
    a, b, c = corpora
    old = data(tmp_path, ["0.75", a, "0.25", b], 25)
    new = resumed(data(tmp_path, ["1", a, "2", b, "2", c], 40), old, 80, 160)
    seen, coming = first_tokens(old, 0, 80), first_tokens(new, 80, 160)
    assert corpora_of(seen) == dict(a=60, b=20)
    assert corpora_of(coming) == dict(a=16, b=32, c=32)
    assert not set(seen) & set(coming), "a sample came twice"
    assert set(first_tokens(data(tmp_path, [a], 25), 0, 76)) == {token for token in seen + coming if token < TOKENS}
    third = resumed(data(tmp_path, ["1", b, "1", c], 50), new, 120, 200)
    every = Counter(seen + coming[:40] + first_tokens(third, 120, 200))
    assert set(first_tokens(data(tmp_path, [b], 25), 0, 76)) == {token for token in every if token // TOKENS == 1}
    assert every.most_common(1)[0][1] == 1, "a sample came twice"


def test_a_corpus_that_is_there_twice_goes_on_from_two_places(tmp_path, corpora):
    blend = ["0.75", corpora[0], "0.25", corpora[0]]
    short, long = (data(tmp_path, blend, train_iters) for train_iters in (10, 20))
    more = first_tokens(resumed(long, short, 40, 80), 0, 80)
    assert sorted(Counter(more).values()) == [1] * 40 + [2] * 20, "60 samples of one copy, of which 20 are in the other"
    third = resumed(data(tmp_path, ["0.25", corpora[0], *blend], 20), short, 40, 80)
    assert not set(first_tokens(short, 0, 10)) & set(first_tokens(third, 40, 80)), "a new copy continues as the first"


def test_a_start_after_that_goes_on_in_the_new_blend(tmp_path, corpora):
    a, b, _ = corpora
    old = data(tmp_path, ["0.75", a, "0.25", b], 25)
    plain = data(tmp_path, ["0.5", a, "0.5", b], 40)
    new = resumed(plain, old, 80, 160)
    again = resumed(plain, new, 120, 160)
    assert first_tokens(again, 120, 160) == first_tokens(new, 120, 160)
    longer = resumed(data(tmp_path, ["0.5", a, "0.5", b], 50), again, 140, 200)
    assert first_tokens(longer, 120, 160) == first_tokens(new, 120, 160)
    assert len(set(first_tokens(longer, 80, 200)) | set(first_tokens(old, 0, 80))) == 200


def test_a_third_start_counts_what_the_spans_of_both_before_use(tmp_path, corpora):
    """The second is interrupted before its own span begins: a checkpoint there records both."""
    blend = ["0.75", corpora[0], "0.25", corpora[1]]
    whole = data(tmp_path, blend, 30)
    second = resumed(whole, data(tmp_path, blend, 10), 20, 80)
    third = resumed(whole, second, 24, 120)
    assert len(third.train) == len(set(first_tokens(third, 0, 120))) == 120
    assert first_tokens(third, 0, 80) == first_tokens(second, 0, 80)


def test_a_corpus_that_was_rebuilt_in_place_gets_new_passes(tmp_path, corpora):
    """The orders of passes are kept in files, and those of the old corpus would leave half of the new one unread."""
    corpus = corpora[:1]
    before = data(tmp_path, corpus, 10)
    first_tokens(resumed(data(tmp_path, corpus, 40), before, 40, 160), 40, 160)
    counting_pair(Path(corpus[0]), num_documents=100)
    after = resumed(data(tmp_path, corpus, 80), before, 40, 289)
    assert len(set(first_tokens(after, 40, 289))) == 249, "all samples of the 4,000 tokens come once"


def test_what_was_used_is_counted(tmp_path, corpora, monkeypatch):
    """Without the count the new blend repeats samples, and the tests above would see it."""
    a, b, _ = corpora
    old = data(tmp_path, ["0.75", a, "0.25", b], 25)
    monkeypatch.setattr(order.Order, "used", lambda self, stop: {})
    new = resumed(data(tmp_path, ["0.5", a, "0.5", b], 40), old, 80, 160)
    assert set(first_tokens(old, 0, 80)) & set(first_tokens(new, 80, 160))


def test_what_differs_is_named_with_both_sides(tmp_path, corpora):
    a, b, _ = corpora
    state = recorded(data(tmp_path, ["0.75", a, "0.25", b], 25), 20)
    other = data(tmp_path, ["0.5", a, "0.5", b], 25, seed=5)
    assert other.differences(state) == {
        "data: 0.75 of 2,000 tokens of a, 0.25 of 2,000 tokens of b in the checkpoint, 0.5 of 2,000 tokens of a, 0.5 of"
        " 2,000 tokens of b here": "set data back",
        "seed: 1234 in the checkpoint, 5 here": "set seed back",
    }
    assert not data(tmp_path, ["0.75", a, "0.25", b], 99).differences(state), "the number of steps is no data"


def test_made_up_samples_go_on_too(tmp_path, monkeypatch):
    """Only the training part of the made-up data is indexed."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    index, parts = MockGPTDataset._build_document_sample_shuffle_indices, []
    monkeypatch.setattr(
        MockGPTDataset,
        "_build_document_sample_shuffle_indices",
        lambda self: parts.append(self.index_split.name) or index(self),
    )
    short, long = (data(tmp_path, ["embedded"], train_iters, mock_data=True) for train_iters in (10, 25))
    more = resumed(long, short, 20, 100)
    tokens = [more.train[index]["tokens"].tolist() for index in range(100)]
    assert tokens == [long.train[index]["tokens"].tolist() for index in range(100)]
    assert {*parts} == {"train"}


def test_a_checkpoint_counts_what_the_one_before_has_not_counted():
    """A blend of billions of samples was copied, eight bytes wide, and counted as a whole on every rank at each one."""
    which = np.random.default_rng(0).integers(0, 3, 4_000_000).astype(np.int16)
    read: list[int] = []

    class Index:
        def __getitem__(self, part: slice) -> np.ndarray:
            read.append(len(which[part]))
            return which[part]

    blend = SimpleNamespace(dataset_index=Index(), datasets=[SimpleNamespace(document_index=(), indices=())] * 3)
    parts = [order.Corpus(name, 1.0, lambda number: []) for name in "abc"]  # type: ignore[arg-type, return-value]
    whole = order.Order([order.Span(0, len(which))], parts, lambda count: blend)  # type: ignore[arg-type, return-value]
    tracemalloc.start()
    for stop, counted in ((3_000_000, 3_000_000), (3_000_500, 500), (100, 100), (4_000_000, 3_999_900)):
        read.clear()
        found, (_, peak) = whole.used(stop), tracemalloc.get_traced_memory()
        assert peak < 12e6 and sum(read) == counted
        assert list(found.values()) == np.bincount(which[:stop]).tolist()
        tracemalloc.reset_peak()
    tracemalloc.stop()
