"""How the messages of the shared loader are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaaccum.pretrain.data.shared import SharedLoader


def test_messages_to_all_stages_are_one_batch():
    """NCCL gives a message that is sent alone a communicator of its own two ranks, beside the pipeline's."""
    loader, batches = object.__new__(SharedLoader), []
    loader._pp = cast(Any, SimpleNamespace())
    with (
        patch.object(dist, "P2POp", lambda op, tensor, *, group, group_peer: (op, group_peer, group)),
        patch.object(dist, "batch_isend_irecv", lambda operations: batches.append(operations) or ["work"]),
    ):
        messages = {stage: torch.zeros(1) for stage in (1, 2, 3)}
        assert loader._post(dist.isend, messages) == ["work"]
        assert loader._post(dist.isend, {}) == [], "a pipeline of one rank sends nothing"
    assert batches == [[(dist.isend, stage, loader._pp) for stage in (1, 2, 3)]]
