"""Where a step that is not the big batch's goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Diagnosis:
    """Where it goes wrong."""

    axes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return []
