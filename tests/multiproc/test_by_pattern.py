"""freeze, lr_mult and wd_mult: an update that is frozen, scaled and decayed by patterns, on every layout alike."""

from __future__ import annotations

import pytest

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import VOCAB, Case, Rig

BATCH = "--global_batch_size 8 --micro_batch_size 1 "
# No biases: that of keys has the gradient 0, of whose rounding Adam would make a whole step.
MODEL = (
    "--num_layers 4 --no_add_bias_linear --untie_embeddings_and_output_weights --lr 1e-2 --weight_decay 0.1 "
    "--clip_grad 0 "
)
FREEZE = "--freeze decoder.layers.[01].*,embedding.* "
FACTORS = "--lr_mult output_layer.*=0.5,decoder.layers.3.*=0 --wd_mult decoder.layers.2.mlp.*=3 "
LAYOUTS = ["", "--zero_stage 1 ", "--tensor_model_parallel_size 2 ", "--backend fsdp2 ", "--sync streaming "]


def updated(cases: list[Case]) -> list[dict]:
    """The update of each parameter in one step, in each case."""
    import torch

    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import REPORTS, GptForwardStep

    found = []
    for case in cases:
        plan = case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        step = GptForwardStep(built, plan.batch.loss_norm)
        engine = initialize(plan, chunks, groups=built, forward_step_func=step, reports=REPORTS)
        before = dict(engine.whole_weights(dtype=torch.float32))
        rig = Rig(case, plan, built, chunks, engine.backend, engine.train_steps)
        engine.train_step(rig.microbatches())
        found.append({name: after - before[name] for name, after in engine.whole_weights(dtype=torch.float32)})
    return found


@pytest.fixture(scope="module")
def updates() -> dict:
    one = [Case(1, BATCH, MODEL + words) for words in ("", FREEZE, FACTORS)]
    two = [Case(2, BATCH + layout, MODEL + FREEZE + FACTORS) for layout in LAYOUTS]
    (alone,), together = run_ranks(updated, 1, one, timeout=60), run_ranks(updated, 2, two, timeout=120)[0]
    return {"plain": alone[0], "frozen": alone[1], "factors": alone[2], **dict(zip(LAYOUTS, together, strict=True))}


def test_what_is_frozen_stays_and_the_rest_is_updated(updates):
    for name, change in updates["frozen"].items():
        frozen = name.startswith(("embedding.", "decoder.layers.0.", "decoder.layers.1."))
        assert bool(change.any()) != frozen, name


def test_a_factor_scales_the_update_of_what_it_names_alone(updates):
    import torch

    for name, change in updates["factors"].items():
        plain = updates["plain"][name]
        factor = 0.5 if name.startswith("output_layer.") else 0.0 if ".layers.3." in name else 1.0
        decayed = ".layers.2.mlp." in name and plain.dim() > 1
        assert torch.allclose(change, plain * factor, rtol=1e-4, atol=1e-8) != decayed, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_same_update(layout, updates):
    import torch

    for name, change in updates[layout].items():
        frozen = name.startswith(("embedding.", "decoder.layers.0.", "decoder.layers.1."))
        expected = torch.zeros_like(change) if frozen else updates["factors"][name]
        assert torch.allclose(change, expected, rtol=1e-2, atol=1e-6), name


ADDED = MODEL + "--optimizer muon --muon_fp32_matmul_prec highest --muon_weight_decay_method l2 "
BACKENDS = ["", "--zero_stage 1 ", "--backend fsdp2 ", "--backend megatron ", "--backend ddp "]


def test_a_decay_that_is_added_to_gradients_has_the_factor_of_each_matrix():
    """In the first step a matrix' update knows of no other's decay."""
    factors, none = ADDED + "--wd_mult decoder.layers.2.mlp.*=0 ", ADDED.replace("decay 0.1", "decay 0")
    cases = [Case(2, BATCH + BACKENDS[0], each) for each in (ADDED, none)]
    cases += [Case(2, BATCH + backend, factors) for backend in BACKENDS]
    plain, without, *found = run_ranks(updated, 2, cases, timeout=120)[0]
    for changes in found:
        for name, change in changes.items():
            true, other = (without, plain) if ".layers.2.mlp." in name else (plain, without)
            assert (change - true[name]).norm() <= 1e-3 * true[name].norm(), name
            if ".linear_" in name:
                assert (change - other[name]).norm() > 1e-2 * true[name].norm(), name


def resumed(folder: str) -> tuple[list[str], list[dict[str, float]]]:
    """Refusals of a checkpoint with FACTORS by other factors and other rates of groups; the rates of the output layer
    after a resume with its own factors, and with others that `override` permits."""
    from tests.support.muon import engine_of, take_steps

    case = Case(2, BATCH, MODEL + FACTORS)
    engine = engine_of(case)
    take_steps(engine, 1)
    engine.save(folder)
    said, rates = [], []
    for words in ("", "--lr_mult output_layer.*=0.25 ", FACTORS + "--decoupled_lr 1e-3 --decoupled_min_lr 0 "):
        with pytest.raises(CheckpointError) as error:
            engine_of(case, MODEL + words).load(folder)
        said.append(str(error.value))
    for words in (FACTORS, "--lr_mult output_layer.*=0.25 --override lr_schedule "):
        engine = engine_of(case, MODEL + words)
        assert engine.load(folder)
        rates.append({n: float(g["lr"]) for g in engine.param_groups for n in g["param_names"]})
    return said, [
        {"output": each["output_layer.weight"], "norm": each["decoder.final_layernorm.weight"]} for each in rates
    ]


def test_other_factors_of_a_rate_are_refused_at_a_resume(tmp_path):
    """A run that is started again without its factors would go on at other rates."""
    for said, (same, other) in run_ranks(resumed, 2, str(tmp_path), timeout=120):
        without, changed, decoupled = said
        assert "lr_mult: the checkpoint was made with ['output_layer.*=0.5'" in without
        assert "the configuration says []; set it to" in without and "wd_mult: the checkpoint was made with" in without
        assert "the configuration says ['output_layer.*=0.25']" in changed
        assert "decoupled_lr: the checkpoint was made with None, the configuration says 0.001" in decoupled
        assert all("or set override to lr_schedule" in each for each in said)
        assert same["output"] == pytest.approx(0.5 * same["norm"])
        assert other["output"] == pytest.approx(0.25 * other["norm"])


def refused(words: str) -> str:
    try:
        updated([Case(2, BATCH + "--pipeline_model_parallel_size 2 ", MODEL + words)])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--freeze layers.9 --lr_mult head.*=2 --wd_mult tail=3", "head.*, layers.9, tail fits no parameter"),
        ("--lr_mult embedding.*", "lr_mult 'embedding.*': write PATTERN=FACTOR"),
        ("--wd_mult embedding.*=-1", "wd_mult 'embedding.*=-1': write PATTERN=FACTOR"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(words, text):
    for said in run_ranks(refused, 2, words, timeout=60):
        assert text in said
