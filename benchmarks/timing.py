"""Published step times, grouped so that rows of one model and one machine are predicted together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from zlib import crc32

import numpy as np

from benchmarks import frameworks
from benchmarks.published import LeftOut, Row, model_of
from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner.hardware import Hardware
from megaaccum.lab.planner.layouts import Layouts
from megaaccum.lab.planner.time import Software, TimeModel


@dataclass(frozen=True)
class Case:
    """One row, ready to be predicted."""

    row: Row
    model: ModelConfig
    vocab_size: int
    software: Software
    hardware: str
    layout: Layouts
    seconds: float

    @property
    def key(self) -> tuple:
        """Equal for rows that one model can predict together."""
        model = tuple(tuple(v) if isinstance(v, list) else v for v in astuple(self.model))
        return (model, self.software, self.hardware, self.row.source)


def case_of(row: Row) -> Case:
    """LeftOut, with the reason, where a row cannot be predicted."""
    seconds = frameworks.measured_seconds(row)
    model, vocab_size = model_of(row)
    name = frameworks.hardware_name(row)
    return Case(row, model, vocab_size, frameworks.software_of(row), name, frameworks.layout_of(row), seconds)


def cases_of(rows: Iterable[Row]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """(rows to predict, rows left out and why)."""
    cases, left = [], []
    for row in rows:
        try:
            cases.append(case_of(row))
        except LeftOut as reason:
            left.append((row, str(reason)))
    return cases, left


class Predictor:
    """Predicts many cases at once for any hardware table."""

    def __init__(self, cases: list[Case]):
        groups: dict[tuple, list[int]] = {}
        for index, case in enumerate(cases):
            groups.setdefault(case.key, []).append(index)
        self.cases = cases
        self._groups = [(np.array(rows), _joined([cases[i].layout for i in rows])) for rows in groups.values()]

    def seconds(self, hardware: Callable[[str], Hardware]) -> np.ndarray:
        """Predicted seconds of every case."""
        out = np.zeros(len(self.cases))
        for rows, layouts in self._groups:
            case = self.cases[rows[0]]
            model = TimeModel(
                model=case.model,
                vocab_size=case.vocab_size,
                hardware=frameworks.network_of(case.row, hardware(case.hardware)),
                stages=frameworks.published_stages(case.model, short_ends=frameworks.has_short_ends(case.row)),
                software=case.software,
            )
            out[rows] = model.step(layouts).total
        return out


def _joined(parts: list[Layouts]) -> Layouts:
    return Layouts(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Layouts)})


def in_fit_half(row: Row) -> bool:
    """Whether a row belongs to the half that constants may be fitted on: a fixed random half, by its name."""
    return crc32(row.name.encode()) % 2 == 0
