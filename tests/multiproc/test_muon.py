"""Muon under sharding: cells of the table (tests/long has all of it), the transaction, and checkpoints."""

from __future__ import annotations

from tests.support.muon import cell, problems

CELLS = [
    cell("ZeRO-1", "tied"),
    cell("ZeRO-2", "clip"),
    cell("ZeRO-3 resident", "ep 2"),
    cell("ZeRO-3 streaming", "pp 2 V"),
    cell("fsdp2", "tp 2"),
    cell("HSDP", "dp 4"),
    cell("megatron", "ga 4"),
    cell("ddp", "frozen", "fp64"),
]


def test_one_cell_per_backend():
    found = problems(CELLS)
    assert not found, "\n".join(found)
