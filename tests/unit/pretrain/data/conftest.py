"""The embedded text, which takes seconds to build."""

import pytest

from megaaccum.pretrain.data.corpus import embedded_prefix


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A data folder, and the prefix of the embedded text that was built there."""
    folder = tmp_path_factory.mktemp("embedded")
    return folder, embedded_prefix(folder)
