"""The shipped configurations: each names its source, is accepted at its cluster size, and is the real model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megaaccum.cli import check
from megaaccum.config import Plan, resolve
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics.param_count import count_parameters

CONFIGS = Path(__file__).parents[3] / "configs"
REAL = {
    # parameters of the model, of those that one token meets, tokens per step: as published, or as the config states
    "gpt3_175b": (174.6e9, 174.6e9, 1536 * 2048),  # arXiv 2104.04473, table 2; batch as there
    "llama3_8b": (8.03e9, 8.03e9, 512 * 8192),  # as published with the weights
    "llama3_70b": (70.55e9, 70.55e9, 1024 * 8192),  # likewise
    "llama3_405b": (405.85e9, 405.85e9, 2048 * 8192),  # likewise; batch: arXiv 2407.21783, table 4 (16M)
    "mixtral_8x7b": (46.7e9, 12.9e9, 256 * 4096),  # arXiv 2401.04088: 47B, 13B active
    "deepseek_v3_like": (671e9, 37.5e9, 15360 * 4096),  # arXiv 2412.19437: 671B, 37B active
}
PAPERS = {
    "gpt3_175b": ("2005.14165", "2104.04473"),
    "llama3_8b": ("2407.21783",),
    "llama3_70b": ("2407.21783",),
    "llama3_405b": ("2407.21783",),
    "mixtral_8x7b": ("2401.04088",),
    "deepseek_v3_like": ("2412.19437",),
}


@cache
def plan(path: Path) -> Plan:
    """The plan at the cluster size that the first line names."""
    first = path.read_text(encoding="utf-8").splitlines()[0]
    match = re.fullmatch(r"# world_size: (\d+)", first)
    assert match, f"{path.name} must begin with '# world_size: N'"
    return resolve(load(path), world_size=int(match[1]))


def files() -> list[Path]:
    return sorted(CONFIGS.glob("*.yaml"))


def test_the_promised_configurations_are_there():
    assert {path.stem for path in files()} >= REAL.keys() | {"tiny_cpu"}


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_a_configuration_is_accepted_at_its_cluster_size(path):
    settled = plan(path)
    pp = settled.layout.pp
    assert pp == 1 or settled.batch.microbatches_per_flush >= 2 * pp
    assert settled.config.sharding.zero_stage == (1 if path.stem == "deepseek_v3_like" else 3)


@pytest.mark.parametrize("at", ["its own world", "its smallest world"])
@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_check_accepts_a_configuration(path, at, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    own = ["--world-size", str(plan(path).layout.world_size)] if at == "its own world" else []
    assert check.main([str(path), *own]) == 0
    assert "world_size = tp" in capsys.readouterr().out


@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_names_its_source(name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    comments = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert all(f"arXiv {paper}" in comments for paper in PAPERS[name])


@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_is_the_published_model(name):
    settled = plan(CONFIGS / f"{name}.yaml")
    model = settled.config.model
    assert model.vocab_size is not None
    total, active, tokens = REAL[name]
    # The published total of DeepSeek-V3 leaves its prediction layer out (11.6 billion more).
    without = replace(settled.config, model=replace(model, mtp_num_layers=None))
    count = count_parameters(without, model.vocab_size)
    assert count.total == pytest.approx(total, rel=2e-3)
    assert count.active == pytest.approx(active, rel=5e-3)
    assert settled.batch.tokens_per_step == tokens


@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_holds_its_stage_on_a_device_of_80_gb(name):
    """BF16 parameters and FP32 gradients of a stage are whole on a rank during a step (sync: resident)."""
    settled = plan(CONFIGS / f"{name}.yaml")
    count = count_parameters(settled.config, settled.config.model.vocab_size or 0)
    experts = count.total - count.active if settled.config.model.num_experts else 0
    dense = count.total - experts
    layout = settled.layout
    per_rank = dense / (layout.tp * layout.pp) + experts / (layout.etp * layout.ep * layout.pp)
    assert per_rank * (2 + 4) < 40e9, "leaves less than half of the device for activations and the optimizer's shard"


@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_70b", "llama3_405b", "mixtral_8x7b", "deepseek_v3_like"])
def test_a_real_configuration_at_half_its_data_parallel_size_is_still_accepted(name):
    """The same layout on fewer ranks takes more micro-batches for the same batch."""
    path = CONFIGS / f"{name}.yaml"
    whole = plan(path)
    half = resolve(load(path), world_size=whole.layout.world_size // 2)
    assert half.batch.global_batch_size == whole.batch.global_batch_size
    assert half.batch.num_microbatches == 2 * whole.batch.num_microbatches


@pytest.mark.parametrize("name", REAL)
def test_megatron_core_accepts_the_model(name):
    from megaaccum.pretrain.model.gpt import transformer_config

    built = transformer_config(plan(CONFIGS / f"{name}.yaml"))
    assert built.num_layers == plan(CONFIGS / f"{name}.yaml").config.model.num_layers
    if built.multi_latent_attention:
        # Megatron-core's default for latent attention is YaRN, stretched by 40.
        assert built.rope_type == "rope"
        assert built.moe_router_dtype == "fp32"


def test_the_405b_layout_is_the_papers():
    layout = plan(CONFIGS / "llama3_405b.yaml").layout
    assert (layout.tp, layout.cp, layout.pp, layout.dp, layout.world_size) == (8, 1, 16, 64, 8192)
