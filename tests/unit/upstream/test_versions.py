"""Libraries of other versions: what they lack is said at every start, and a torch that no test has run with."""

from __future__ import annotations

import ast
import warnings
from importlib.metadata import distribution
from pathlib import Path

import pytest

from megaaccum.distributed import preload
from megaaccum.errors import LaunchError
from megaaccum.upstream.lookup import unwritten

PACKAGE = Path(__file__).parents[3] / "megaaccum"


@pytest.fixture(scope="module")
def upstream():
    preload.libraries()
    from megaaccum import upstream

    return upstream


def test_these_versions_lack_nothing(upstream, monkeypatch):
    monkeypatch.setattr(preload, "version", lambda name: upstream.TESTED[name] + "+cu130")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preload.check_versions()


def test_names_that_are_missing_end_the_start_with_the_tested_versions(upstream, monkeypatch):
    monkeypatch.setattr(upstream.megatron, "check", lambda: ["layers.f is missing", "groups.g is missing"])
    monkeypatch.setattr(upstream, "required", upstream.required.__wrapped__)  # not what it found before
    with pytest.raises(LaunchError) as error:
        preload.libraries()
    text = str(error.value)
    assert "layers.f is missing; groups.g is missing" in text
    assert str(distribution("megatron-core").locate_file("megatron/core")) in text  # a checkout may be found before it
    assert all(f"{name} {version}" in text for name, version in upstream.TESTED.items())


def test_names_are_looked_up_once_for_all_forks_and_imports(upstream, monkeypatch):
    monkeypatch.setattr(upstream.megatron, "check", lambda: ["layers.f was looked up again"])
    preload.libraries()


def test_names_of_a_newer_torch_are_not_needed_without_fsdp2(upstream, monkeypatch):
    monkeypatch.setattr(upstream.fsdp2, "check", lambda: ["FSDPParam.x is missing"])
    preload.check_versions()
    assert upstream.check() == ["FSDPParam.x is missing"]


@pytest.mark.parametrize(
    ("version", "warns"), [("2.13.1", False), ("2.10.0", False), ("2.15.1", False), ("2.16.0a0", True), ("3.0", True)]
)
def test_a_torch_beyond_the_tested_one_is_a_warning_of_rank_0(upstream, monkeypatch, version, warns):
    monkeypatch.setattr(preload, "version", lambda name: version)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            preload.check_versions()
        texts = [str(each.message) for each in caught]
        assert [f"torch {version} is newer" in text for text in texts] == [True] * (warns and rank == "0")


def test_what_a_newer_torch_asks_of_a_gloo_group_is_passed_on(upstream):
    import torch.distributed as dist

    upstream.pytorch.tame_gloo()
    group = dist.distributed_c10d.ProcessGroupGloo(
        dist.HashStore(), 0, 1, timeout=dist.default_pg_timeout, group_name="x"
    )
    assert group.options.group_name == "x"


ENTRANCES = ("__init__.py", "cli/train.py", "pretrain/launch/local.py", "loop/__init__.py")


@pytest.mark.parametrize("name", ENTRANCES)
def test_every_entrance_imports_the_libraries_where_they_are_checked(name):
    calls = [node.func for node in ast.walk(ast.parse((PACKAGE / name).read_text())) if isinstance(node, ast.Call)]
    assert any(isinstance(each, ast.Attribute) and each.attr == "libraries" for each in calls)


class Owner:
    _declared: int

    def method(self):
        def inner():
            self._set = "text"
            self.__mangled = self.local = 0

        return inner


def test_names_are_looked_up_in_compiled_code():
    assert unwritten(Owner, ["_set", "text", "local", "__mangled", "method"]) == []
    assert unwritten(Owner, ["_get", "_declared"]) == ["Owner._get is missing", "Owner._declared is missing"]
