"""How the messages of the shared loader are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaaccum.pretrain.data.shared import SharedLoader


def test_messages_to_all_stages_are_one_batch():
    """NCCL gives a message that is sent alone a communicator of its own two ranks, beside the pipeline's."""
    pipeline, batches = object(), []
    loader = cast(SharedLoader, SimpleNamespace(_pp=pipeline))
    with (
        patch.object(dist, "P2POp", lambda op, tensor, *, group, group_peer: (op, group_peer, group)),
        patch.object(dist, "batch_isend_irecv", lambda operations: batches.append(operations) or ["work"]),
    ):
        messages = {stage: torch.zeros(1) for stage in (1, 2, 3)}
        assert SharedLoader._post(loader, dist.isend, messages) == ["work"]
        assert SharedLoader._post(loader, dist.isend, {}) == [], "a pipeline of one rank sends nothing"
    assert batches == [[(dist.isend, stage, pipeline) for stage in (1, 2, 3)]]
