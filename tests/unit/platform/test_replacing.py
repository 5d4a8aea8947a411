"""Attributes that are put back, inherited ones too."""

import pytest

from megaaccum.platform.replacing import replaced


class Base:
    inherited = 1


class Owner(Base):
    own = 2

    @staticmethod
    def static() -> int:
        return 3


def test_attributes_are_what_they_were_after_an_error():
    before = dict(vars(Owner))
    with replaced(Owner, inherited=4, own=5, static=lambda: 6):
        assert (Owner.inherited, Owner.own, Owner.static()) == (4, 5, 6)
    with pytest.raises(ZeroDivisionError), replaced(Owner, own=5):
        raise ZeroDivisionError
    assert dict(vars(Owner)) == before


def test_an_attribute_that_is_missing_is_not_made():
    with pytest.raises(AssertionError, match="lacks one of own, other"), replaced(Owner, own=1, other=2):
        pass
    assert Owner.own == 2
