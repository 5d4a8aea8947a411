"""The context around backwards that are not final: Megatron's schedules enter it and may never leave it."""

from __future__ import annotations

import gc
from types import SimpleNamespace

from megaaccum.sharding.base import AccumulatingBackend


def test_a_context_that_is_dropped_ends_nothing():
    """It would say at any moment, when Python collects it, that gradients are final."""
    said: list[bool] = []
    backend = SimpleNamespace(_set_syncing=said.append, _last_flush=True)
    with AccumulatingBackend.no_sync_func(backend):  # type: ignore[arg-type]
        assert said == [False]
    assert said == [False, True]
    entered = AccumulatingBackend.no_sync_func(backend)  # type: ignore[arg-type]
    entered.__enter__()
    del entered
    gc.collect()
    assert said == [False, True, False]
