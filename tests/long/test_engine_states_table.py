"""Every pair of an engine's calls under every sharding mode, of which the suite tries a third in most."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine_states import MODES, WHOLE, pairs


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in WHOLE])
def test_every_pair_of_calls_does_what_the_table_says(tmp_path, mode):
    for found in run_ranks(pairs, 2, str(tmp_path), mode, timeout=180):
        assert not found, "\n".join(found)
