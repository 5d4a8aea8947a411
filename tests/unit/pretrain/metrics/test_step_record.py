"""The log's names for the measurements of a step."""

from __future__ import annotations

from megaaccum.observe.traffic import Count
from megaaccum.pretrain.metrics.step_record import bytes_by_collective, bytes_by_kind


def test_bytes_are_named_after_what_they_are():
    assert bytes_by_kind({"optimizer": 5}) == {"memory_optimizer_bytes": 5}
    lanes = {
        "send/pp/bfloat16": Count(1, 2.0),
        "send/pp/float32": Count(1, 4.0),
        "all_reduce/tp/float32": Count(2, 8.0),
    }
    assert bytes_by_collective(lanes) == {"bytes_send_pp": 6.0, "bytes_all_reduce_tp": 8.0}
