"""Names that have another value for a while have their own again, whatever happens meanwhile."""

from types import SimpleNamespace

import pytest

from megaaccum.platform.replaced import replaced


def test_values_come_back_after_an_error():
    owner = SimpleNamespace(first=1, second=2)
    seen = {}

    def fail() -> None:
        with replaced(owner, first=3, second=4):
            seen.update(vars(owner))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == {"first": 3, "second": 4}
    assert (owner.first, owner.second) == (1, 2)


def test_a_name_that_is_missing_is_no_name_to_replace():
    owner = SimpleNamespace(first=1)
    with pytest.raises(AttributeError), replaced(owner, first=3, second=4):
        pass
    assert vars(owner) == {"first": 1}
