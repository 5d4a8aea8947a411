"""Facts in the fields of keys: ranges that the defaults keep, names that exist, and one place for each fact."""

from __future__ import annotations

import dataclasses

import pytest

from megaaccum.config.facts import Facts
from megaaccum.config.keys import all_keys, keys_that_need, names_where, value
from megaaccum.config.schema import Config

KEYS = all_keys().values()


def test_the_words_of_a_range_and_what_it_allows():
    facts = Facts(at_least=0, below=1)
    assert facts.range == "at least 0 and below 1"
    assert [facts.allow(number) for number in (-0.1, 0, 0.5, 1)] == [False, True, True, False]
    assert Facts(above=0, at_most=1).range == "more than 0 and at most 1"
    assert [Facts(above=0, at_most=1).allow(number) for number in (0, 1, 1.5)] == [False, True, False]
    assert Facts().range == ""


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_default_is_in_range_unless_the_key_is_required(key):
    default = value(Config(), key.name)
    if key.facts.required:
        assert not key.facts.allow(default)
    elif default is not None and key.facts.range:
        assert key.facts.allow(default)


def test_a_key_needs_one_that_exists():
    assert {key.facts.needs.split(" ")[0] for key in KEYS if key.facts.needs} <= all_keys().keys()
    assert "moe_router_topk" in keys_that_need("num_experts")


def test_megatron_core_has_the_names():
    from megatron.core.transformer import MLATransformerConfig

    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    ours = [key.facts.core_name(key.name) for key in KEYS if key.facts.core]
    assert len(ours) == len(set(ours)) and set(ours) <= known


def test_what_differs_between_hosts_does_not_change_what_is_computed():
    for_hosts = names_where(lambda facts: facts.per_host)
    assert "data_path" in for_hosts
    assert not any(all_keys()[name].facts.core or all_keys()[name].facts.fixed for name in for_hosts)
