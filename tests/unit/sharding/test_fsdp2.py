"""The fully_shard that backend fsdp2 drives is there, or the backend is refused."""

from __future__ import annotations

import pytest

from megaaccum.errors import ConfigError
from megaaccum.sharding import fsdp2
from megaaccum.upstream import fsdp2 as torch_fsdp2


def test_an_older_torch_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp2._check_torch()
    monkeypatch.setattr(torch_fsdp2, "check", lambda: ["FSDPState._fsdp_param_groups is missing"])
    with pytest.raises(ConfigError, match=r"needs the fully_shard of torch 2\.13.*_fsdp_param_groups is missing"):
        fsdp2._check_torch()
