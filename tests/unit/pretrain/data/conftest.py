"""The embedded text, which takes seconds to build."""

import pytest

from megaaccum.pretrain.data.corpus import embedded_prefix


@pytest.fixture(scope="session")
def built(texts):
    """A data folder, and the prefix of the embedded text that was built there."""
    return texts, embedded_prefix(texts)
