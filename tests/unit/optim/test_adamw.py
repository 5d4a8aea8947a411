"""Which fused Adam steps a rank's parameters on a GPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megaaccum.optim import adamw, by_pattern


@pytest.mark.parametrize(("backend", "kind"), [("deepspeed", "apex"), ("fsdp2", "torch")])
def test_apex_steps_plain_memory_alone(monkeypatch: pytest.MonkeyPatch, backend: str, kind: str):
    """It gives its kernel the addresses of tensors, which a DTensor has none of."""
    module = ModuleType("apex.optimizers")
    module.FusedAdam = lambda *_, **__: "apex"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    monkeypatch.setattr(adamw.cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(adamw.by_pattern, "split_groups", lambda *_: [])
    monkeypatch.setattr(adamw, "raise_on_all_ranks", lambda action, *args: [])
    monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: "torch")
    keys = SimpleNamespace(optimizer="adam", lr=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8)
    sharding = SimpleNamespace(
        backend=backend, reproducible="none", offload_optimizer="none", optimizer_dtype=None, params_dtype=None
    )
    config = SimpleNamespace(optimizer=keys, sharding=sharding)
    assert adamw.build(SimpleNamespace(config=config), []) == kind  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("count", "words"), [(0, "has no parameter, and"), (26, "all 26 parameters of this pipeline rank are")]
)
def test_a_rank_that_trains_nothing_is_told_what_it_has(count: int, words: str):
    assert words in str(adamw.untrained(count, "cut the model"))


def test_the_last_pattern_that_fits_holds_also_if_it_was_given_before():
    found = by_pattern.factors("lr_mult", ["embedding.*=0.1", "*=0.5", "embedding.*=0.2"])
    assert by_pattern.factor_of("embedding.word_embeddings.weight", found) == 0.2
