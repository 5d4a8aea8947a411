"""Pieces of a checkpoint against whole tensors: each rank of a layout finds its elements in the pieces of another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megaaccum.checkpoint import pieces
from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.checkpoint.pieces import Cut, Piece, StoredPieces
from megaaccum.errors import CheckpointError

WHOLE = torch.arange(1.0, 73.0)
"""8 x 9: any cut below divides it."""
CUTS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (8, 3), (8, 9)]
"""(rows, runs): over the output, over the output with a gate, over the input."""


def part(cut: Cut) -> torch.Tensor:
    """A tensor-parallel rank's elements, as torch cuts them."""
    return WHOLE.view(cut.rows, -1).chunk(cut.runs, dim=1)[cut.run].reshape(-1)


def pieces_of(rows: int, runs: int, at: list[int]) -> list[Piece]:
    """Every part in the pieces between places `at`."""
    ends = [0, *at, WHOLE.numel() // runs]
    return [
        Piece("w", "param", (8, 9), Cut(WHOLE.numel(), rows, run, runs), start, stop)
        for run, (start, stop) in itertools.product(range(runs), itertools.pairwise(ends))
    ]


def content(piece: Piece) -> torch.Tensor:
    return part(piece.cut)[piece.start : piece.stop]


def overlap(one: Piece, other: Piece) -> bool:
    return one.start < other.stop and other.start < one.stop


def stored(found: list[Piece]) -> StoredPieces:
    return StoredPieces({each.key: (each.stop - each.start,) for each in found})


@pytest.mark.parametrize("at_once", [1 << 24, 3])
@pytest.mark.parametrize("written", CUTS, ids=str)
def test_each_cut_reads_its_elements_from_each_other(written, at_once, monkeypatch):
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    there = pieces_of(*written, [1, 5])[::-1]  # in whatever order the files name them
    for wanted in itertools.chain.from_iterable(pieces_of(*cut, [2, 3]) for cut in CUTS):
        target, found = torch.zeros(wanted.stop - wanted.start), stored(there).overlapping(wanted)
        for piece, start, stop in found:
            assert piece.start <= start < stop <= piece.stop
            pieces.copy(content(piece), piece, start, stop, wanted, target)
        assert torch.equal(target, content(wanted)), wanted
        if (wanted.cut.rows, wanted.cut.runs) == written:
            needed = {piece for piece in there if piece.cut == wanted.cut and overlap(piece, wanted)}
            assert {piece for piece, *_ in found} == needed, "no other piece is read"


@pytest.mark.parametrize("lost", range(6))
def test_elements_that_no_piece_holds_are_missed(lost):
    there = pieces_of(8, 3, [7, 20])
    left = [each for number, each in enumerate(there) if number != lost]
    for wanted in pieces_of(1, 1, []):
        with pytest.raises(DamagedCheckpoint, match="the checkpoint lacks elements"):
            stored(left).overlapping(wanted)


@pytest.mark.parametrize(
    ("cut", "span", "size"),
    [
        ("1:0of2", "0:37", 37),  # of 36
        ("1:2of2", "0:36", 36),
        ("5:0of1", "0:72", 72),
        ("0:0of1", "0:72", 72),
        ("1:0of1", "5:5", 0),
        ("1:0of1", "0:72", 71),
        ("1:0of1", "8:72", 72),
    ],
)
def test_a_key_of_no_piece_is_refused(cut, span, size):
    with pytest.raises(CheckpointError, match="unknown tensor"):
        StoredPieces({f"w/param/8x9/{cut}/{span}": (size,)})


@pytest.mark.parametrize("name", ["w", "a/b.w"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_a_key_says_what_the_piece_is(name, shape):
    numel = torch.zeros(shape).numel()
    piece = Piece(name, "exp_avg", shape, Cut(numel), numel - 1, numel)
    assert Piece.parse(piece.key) == piece and stored([piece]).has(name, "exp_avg")


def test_another_parameter_has_no_elements_of_this_one():
    there, (whole,) = stored(pieces_of(1, 1, [])), pieces_of(1, 1, [])
    for wanted in (replace(whole, name="v"), replace(whole, kind="exp_avg"), replace(whole, cut=Cut(80), stop=72)):
        with pytest.raises(DamagedCheckpoint, match=f"lacks elements of {wanted.name} "):
            there.overlapping(wanted)
        assert there.overlapping(replace(wanted, start=5, stop=5)) == []
