"""Whether the recorder's jail can be had on this machine."""

from __future__ import annotations

import pytest

from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop import jail


def require_bwrap() -> None:
    """Skip the test, with the reason, where bubblewrap is not installed or refused."""
    try:
        jail.bwrap()
    except ConfigError as error:
        pytest.skip(str(error))
