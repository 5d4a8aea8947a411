"""The treatment of each key of a user's DeepSpeed JSON (deepspeed 0.19), other than those that are reconciled."""

from __future__ import annotations

from typing import Any

from megaaccum.config.deepspeed_config import PASSED, ZERO_PASSED
from megaaccum.texts import packaged_yaml

_TABLES: dict[str, Any] = packaged_yaml(__package__, "keys.yaml")

DROPPED: dict[str, str] = _TABLES["dropped"]
"""Not passed to DeepSpeed, with the reason. Some are reconciled first, or refused if switched on."""
REFUSED: dict[str, str] = _TABLES["refused"]
"""Keys that are refused if switched on, and what to write instead."""
FP16_REFUSED: dict[str, str] = _TABLES["fp16_refused"]
"""Keys of fp16 that are refused if switched on, and what to write instead."""
OFFLOAD_REFUSED: dict[str, str] = _TABLES["offload_refused"]
"""Keys of an offload_optimizer block that are refused if switched on, and what to write instead."""
RECONCILED = frozenset(_TABLES["reconciled"].split())
"""Reconciled with megaaccum's own keys."""
ZERO_DROPPED = {name: why for why, names in _TABLES["zero_dropped"].items() for name in names.split()}
"""Keys of zero_optimization that are not passed to DeepSpeed, with the reason."""
ZERO_REFUSED: dict[str, str] = _TABLES["zero_refused"]
"""Keys of zero_optimization that are refused if switched on, and what to write instead."""
ZERO_RECONCILED = frozenset(_TABLES["zero_reconciled"].split())
"""Keys of zero_optimization that are reconciled with megaaccum's own."""

TOP_LEVEL = PASSED | DROPPED.keys() | REFUSED.keys() | RECONCILED
ZERO = ZERO_PASSED | ZERO_DROPPED.keys() | ZERO_REFUSED.keys() | ZERO_RECONCILED


def is_on(value: object) -> bool:
    """Whether a block or flag asks for something; `false`, `{"enabled": false}` and `{"device": "none"}` do not."""
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) and value.get("device", "") not in ("none", None)
    return value not in (None, False, "auto", 0, 1.0) or value is True
