"""Which fused Adam steps a rank's parameters on a GPU."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.optim import adamw, by_pattern
from tests.support.configs import plan


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


@pytest.mark.parametrize("text", ["*=inf", "*=nan", "*=-1", "*=x", "0.5", "*"])
def test_a_factor_is_a_number_of_at_least_zero(text: str):
    with pytest.raises(ConfigError, match="write PATTERN=FACTOR"):
        by_pattern.factors("lr_mult", ["*=2", text])


def test_each_group_is_split_by_both_factors_and_keeps_rates_of_its_own():
    given = plan(
        lr=1e-2, min_lr=1e-3, weight_decay=0.1, lr_mult=["embedding.*=0.5", "*.gate=0"], wd_mult=["*.fc.*=3", "head=2"]
    )
    names = ["embedding.weight", "layer.fc.weight", "layer.qkv.weight", "layer.gate"]
    plain = {"params": names, "param_names": names, "wd_mult": 1.0, "weight_decay": 0.1}
    own = {"lr": 4e-3, "max_lr": 4e-2, "min_lr": 2e-3, "is_decoupled_lr": True}
    own |= {"params": ["head", "embedding.out"], "param_names": ["head", "embedding.out"]}
    groups = by_pattern.split_groups(given, [plain, {"wd_mult": 0.5, "weight_decay": 0.05} | own])

    def made(name: str, wd_mult: float, **rates: float) -> dict:
        decay = {"wd_mult": pytest.approx(wd_mult), "weight_decay": pytest.approx(0.1 * wd_mult)}
        return {"params": [name], "param_names": [name]} | decay | {key: pytest.approx(r) for key, r in rates.items()}

    assert groups == [
        made("embedding.weight", 1.0, lr=5e-3, max_lr=5e-3, min_lr=5e-4),
        made("layer.fc.weight", 3.0),
        made("layer.qkv.weight", 1.0),
        made("layer.gate", 1.0, lr=0.0, max_lr=0.0, min_lr=0.0),
        made("head", 1.0, lr=4e-3, max_lr=4e-2, min_lr=2e-3) | {"is_decoupled_lr": True},
        made("embedding.out", 0.5, lr=2e-3, max_lr=2e-2, min_lr=1e-3) | {"is_decoupled_lr": True},
    ]
    for key in ("lr_mult", "wd_mult"):
        only = plan(lr=1e-2, min_lr=1e-3, **{key: ["layer.gate=0.5"]})
        assert [group["params"] for group in by_pattern.split_groups(only, [plain])] == [names[:3], names[3:]]


def test_a_pattern_may_fit_parameters_of_another_stage_alone(monkeypatch: pytest.MonkeyPatch):
    given = plan(freeze=["0.*"], lr_mult=["elsewhere.*=2"], wd_mult=["nowhere.*=2"])
    monkeypatch.setattr(by_pattern, "raise_on_all_ranks", lambda action: action())
    for there, fits in (({"elsewhere.*", "nowhere.*"}, True), ({"elsewhere.*"}, False)):
        chunk = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        monkeypatch.setattr(by_pattern, "gathered", lambda fitting, there=there: [fitting, there])
        if fits:
            by_pattern.freeze(given, [chunk])
        else:
            with pytest.raises(ConfigError, match=r"mult: nowhere\.\* fits no parameter; one is named 0\.weight"):
                by_pattern.freeze(given, [chunk])
        assert [param.requires_grad for param in chunk.parameters()] == [False, False, True, True]
