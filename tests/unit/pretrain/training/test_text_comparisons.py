"""The comparisons in the package, and the rows of tokens that they become."""

from __future__ import annotations

import pytest

from megaaccum.config.schema import Config
from megaaccum.errors import DataError
from megaaccum.pretrain.data.sources import read_run_tokenizer
from megaaccum.pretrain.training import text_comparisons
from megaaccum.pretrain.training.text_comparisons import Row, comparisons


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_package_has_two_dozen_comparisons() -> None:
    every = comparisons()
    assert len(every) == 24
    assert len({text for text, _ in every}) == 24
    assert all(2 <= len(set(choices)) == len(choices) <= 4 for _, choices in every)
    assert all(choice.startswith(" ") and choice.endswith(".") for _, choices in every for choice in choices)


def test_only_the_choice_is_scored() -> None:
    assert text_comparisons._row("ab", " cd", encode, 16) == Row(encode("ab cd"), 3)
    long = text_comparisons._row("a" * 30, " cd", encode, 8)
    assert (len(long.tokens), long.scored) == (9, 3)
    batch = text_comparisons.microbatch_of([Row(encode("ab cd"), 3)], 2, 8)
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1, 0, 0, 0, 0], [0] * 8]
    assert batch["labels"][0, 1:4].tolist() == encode(" cd")
    assert batch["tokens"][0, 1:4].tolist() == encode("b c")


@pytest.mark.parametrize(("wins", "value"), [(0, 1.0), (1, None)])
def test_one_is_all_right_and_zero_is_chance(monkeypatch, wins, value) -> None:
    def scores(engine, rows):
        found = []
        for _, choices in comparisons():
            found += [1.0 if index == wins else 0.0 for index in range(len(choices))]
        return found

    monkeypatch.setattr(text_comparisons, "mean_log_likelihoods", scores)

    class Engine:
        class batch:
            seq_length = 128

    found = text_comparisons.compare_texts(Engine(), encode)
    chance = sum(1 / len(choices) for _, choices in comparisons()) / 24
    assert found["centered_accuracy"] == pytest.approx(-chance / (1 - chance) if value is None else value)
    assert found["accuracy"] == (1.0 if value else 0.0)


def test_data_without_a_tokenizer_are_refused_with_the_key() -> None:
    config = Config()
    config.data.mock_data = True
    with pytest.raises(DataError, match=r"sample_every needs a tokenizer that encodes text.*leave sample_every out"):
        read_run_tokenizer(config, "sample_every")
