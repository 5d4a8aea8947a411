"""Pieces of a checkpoint against whole tensors: each rank of a layout finds its elements in the pieces of another."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaaccum.checkpoint import pieces
from megaaccum.checkpoint.folders import DamagedCheckpoint
from megaaccum.checkpoint.pieces import Cut, Piece, StoredPieces
from megaaccum.errors import CheckpointError
from megaaccum.sharding.base import StatePiece

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


# --- the pieces of a rank ---------------------------------------------------------------------------------------------


def seat(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def groups(tp: int = 0, of_tp: int = 1, expert_tp: Any = None) -> Any:
    return SimpleNamespace(tp=seat(tp, of_tp), expert_tp=expert_tp)


def param(*shape: int, trained: bool = True, **marks: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape), requires_grad=trained)
    vars(made).update(marks)
    return made


CUT = dict(tensor_model_parallel=True, partition_stride=1)


@pytest.mark.parametrize(
    ("marks", "cut", "whole"),
    [
        ({}, Cut(6), (2, 3)),
        (CUT | {"partition_dim": 0}, Cut(12, 1, 1, 2), (4, 3)),
        (CUT | {"partition_dim": 0, "partition_stride": 2}, Cut(12, 2, 1, 2), (4, 3)),
        (CUT | {"partition_dim": 1}, Cut(12, 2, 1, 2), (2, 6)),
        ({"tensor_model_parallel": True, "partition_dim": 0}, Cut(12, 1, 1, 2), (4, 3)),
    ],
)
def test_a_rank_of_tp_has_the_part_that_megatrons_marks_say(marks, cut, whole):
    """State-space layers of Megatron's mark no stride."""
    held = StatePiece("w", param(2, 3, **marks), 0, {"param": torch.zeros(6)})
    backend: Any = SimpleNamespace(state=lambda: [held])
    ((piece, _, _),) = pieces.held_pieces(backend, groups(1, 2))
    assert (piece.cut, piece.shape) == (cut, whole)
    ((piece, _, _),) = pieces.held_pieces(backend, groups(0, 1))
    assert piece.cut == Cut(6) and piece.shape == (2, 3)


def test_one_rank_writes_what_several_hold():
    same, cut = param(4), param(4, **CUT, partition_dim=0)
    tensors = {"param": torch.zeros(4), "exp_avg": torch.ones(4)}
    held = [
        StatePiece("same", same, 8, tensors),
        StatePiece("cut", cut, 0, tensors),
        StatePiece("replica", cut, 0, tensors, replica=1),
        StatePiece("copy", param(4, **CUT, partition_dim=0, shared_embedding=True, shared=True), 0, tensors),
        StatePiece("empty", cut, 4, {"param": torch.zeros(0)}),
        StatePiece("of_soap", same, 0, {"soap_L_0": torch.zeros(9)}, replica=1, shape=(3, 3)),
    ]
    backend: Any = SimpleNamespace(state=lambda: held)
    for tp, written in ((0, {"same", "cut", "of_soap"}), (1, {"cut", "of_soap"})):
        found = list(pieces.held_pieces(backend, groups(tp, 2)))
        assert {piece.name for piece, _, writes in found if writes} == written
        assert [(piece.kind, piece.start, piece.stop) for piece, _, _ in found if piece.name == "same"] == [
            ("param", 8, 12), ("exp_avg", 8, 12)
        ]  # fmt: skip
        weights = pieces.held_pieces(backend, groups(tp, 2), only_weights=True)
        assert {piece.kind for piece, _, _ in weights} == {"param"}
    assert found[-1][0] == Piece("of_soap", "soap_L_0", (3, 3), Cut(9), 0, 9)


ADAM = ("exp_avg", "exp_avg_sq")
MATRICES = SimpleNamespace(kind="momentum_buffer")


@pytest.mark.parametrize(
    ("here", "kept", "there", "keys", "text"),
    [
        (param(2, 3), ADAM, ADAM, {}, None),
        (param(1), ADAM, ADAM, {"shape": ()}, None),
        (param(3, 2), ADAM, ADAM, {}, "w is 2 x 3 in step_1, but 3 x 2 in the model"),
        (param(3, 2), ADAM, ADAM, {"only_weights": True}, "w is 2 x 3 in step_1, but 3 x 2 in the model"),
        (param(2, 3, trained=False), (), ADAM, {}, "w is trained in step_1, but frozen in the model"),
        (param(2, 3, trained=False), (), (), {}, None),
        (param(2, 3), ADAM, (), {}, "w has no optimizer state, not exp_avg and exp_avg_sq, in step_1"),
        (param(2, 3), ADAM, (), {"only_weights": True}, None),
        (param(2, 3), (), ADAM, {}, "w has exp_avg and exp_avg_sq, not nothing, in step_1"),
        (param(2, 3), ADAM, ("exp_avg",), {}, "w has exp_avg, not exp_avg and exp_avg_sq, in step_1"),
        (param(2, 3, matrix_parts=()), (), ("momentum_buffer",), {"matrices": MATRICES}, None),
        (param(2, 3, matrix_parts=()), (), ADAM, {"matrices": MATRICES}, "not momentum_buffer, in step_1"),
        (param(2, 3, matrix_parts=()), (), ADAM, {"matrices": MATRICES, "new_momenta": True}, None),
        (param(2, 3, matrix_parts=()), (), (), {"matrices": MATRICES, "new_momenta": True}, "w has no optimizer state"),
        (param(2, 3), ADAM, ("momentum_buffer",), {"matrices": MATRICES, "new_momenta": True}, "w has momentum_buffer"),
        (param(2, 3, matrix_parts=(), trained=False), (), (), {"matrices": MATRICES}, None),
    ],
)
def test_a_parameter_fits_with_its_shape_and_with_the_state_of_its_optimizer(here, kept, there, keys, text):
    shape = keys.pop("shape", (2, 3))
    found = [Piece("w", kind, shape, Cut(here.numel()), 0, here.numel()) for kind in ("param", *there)]
    state = StatePiece("w", here, 0, dict.fromkeys(("param", *kept), torch.zeros(here.numel())))
    backend: Any = SimpleNamespace(own_state=lambda: [state], matrices=keys.pop("matrices", None))

    def fit(name: str = "w") -> None:
        of_model: Any = SimpleNamespace(own_state=lambda: [state._replace(name=name)], matrices=backend.matrices)
        flags = {"only_weights": False, "new_momenta": False} | keys
        pieces.check_fit(Path("step_1"), stored(found), of_model, groups(), **flags)

    if text is None:
        fit()
    else:
        with pytest.raises(CheckpointError) as caught:
            fit()
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match="step_1 has no v"):
        fit("v")
