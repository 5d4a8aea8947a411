"""`megaaccum verify` and `megaaccum.verify`: what is right passes, what is wrong is seen and found, and what cannot be
compared is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import megaaccum
from megaaccum import Plan, cli
from megaaccum.config import resolve
from megaaccum.lab.planner import auto_schedule
from megaaccum.lab.verification.case import UserModel
from megaaccum.lab.verification.localise import first_wrong_border
from megaaccum.lab.verification.relations import CLOSE
from megaaccum.lab.verification.shrink import as_case
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.lab.verification.user_model import case_of
from megaaccum.lab.verification.verdict import CANNOT, PASSED, Verifier
from megaaccum.pretrain.interop.load import load
from tests.bank import on_ranks
from tests.support import hybrid, user_models, whole_runs
from tests.support.configs import make


def plan_of(ranks: int, *, micro_batch_size: int = user_models.ROWS, **layout) -> Plan:
    dp = ranks // layout.get("pp", 1)
    sharding = layout.pop("sharding", dict(backend="deepspeed"))
    return Plan.of(
        layout=layout,
        batch=dict(micro_batch_size=micro_batch_size, seq_length=user_models.SEQ, pp_microbatches=16 // dp),
        sharding=sharding, optimizer=dict(lr=1e-2, weight_decay=0.1, clip_grad=0.5), hidden_size=32, world_size=ranks,
    )  # fmt: skip


SCHEDULES = [
    dict(pp=2),
    dict(pp=2, vpp=2, schedule="interleaved"),
    dict(pp=2, schedule="zbv"),
    dict(pp=2, schedule="dualpipev"),
]
under_each_schedule = pytest.mark.parametrize("layout", SCHEDULES, ids=lambda layout: layout.get("schedule", "1f1b"))


@under_each_schedule
def test_a_gpt_with_another_attention(layout):
    verdict = megaaccum.verify(
        plan_of(4, **layout), user_models.Stage, user_models.forward_step, user_models.batches, verbose=False
    )
    assert verdict.exit_code == PASSED, verdict
    assert [each.lane for each in verdict.comparisons] == ["fp64", "fp32"]
    assert verdict.comparisons[0].largest < 1e-12


@under_each_schedule
def test_a_loss_as_that_of_grpo_on_packed_documents(layout):
    verdict = megaaccum.verify(
        plan_of(4, micro_batch_size=1, **layout), user_models.packed_stage, user_models.clipped, user_models.packed,
        verbose=False,
    )  # fmt: skip
    assert verdict.ok, verdict


SMALL = dict(
    num_layers=4, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=61, pp_microbatches=8,
    pipeline_model_parallel_size=2,
)  # fmt: skip


@under_each_schedule
def test_a_hybrid_model_of_megatrons_builder(layout):
    """Mamba's mixer casts parameters to FP32, also in a float64 model, which holds its float64 to that."""
    verdict = megaaccum.verify(
        plan_of(2, **layout), hybrid.stage, hybrid.forward_step, user_models.batches, verbose=False
    )
    assert verdict.ok, verdict
    assert any("the model computes partly in FP32, first in decoder.layers.0.mixer" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "layout",
    [
        dict(),
        dict(schedule="interleaved", virtual_pipeline_model_parallel_size=2),
        dict(schedule="zbv"),
        dict(schedule="dualpipev"),
    ],
    ids=lambda layout: layout.get("schedule", "1f1b"),
)
def test_experts_with_latent_attention_and_prediction(layout):
    keys = SMALL | dict(
        multi_latent_attention=True, position_embedding_type="rope", q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8,
        qk_pos_emb_head_dim=8, v_head_dim=8, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32,
        moe_aux_loss_coeff=0.01, mtp_num_layers=1, add_bias_linear=False,
    )  # fmt: skip
    config = make(**keys | layout)
    verdict = Verifier().verify(as_case(config, resolve(config, world_size=2), shrink=False).case)
    assert verdict.ok, verdict
    assert {"fp64", "fp32"} == {each.lane for each in verdict.comparisons}
    assert any("kv_up_proj" in row.name for row in verdict.comparisons[0].rows)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "lion"])
def test_parts_with_rates_of_their_own_and_frozen_ones(optimizer):
    """The reference's groups are masters with their own rates; right layouts were called wrong."""
    keys = SMALL | dict(
        lr=1e-2, lr_mult=["decoder.layers.2.*=0.5", "*.linear_fc1.*=2"], wd_mult=["*.layers.3.*=3"],
        optimizer=optimizer, freeze=["decoder.layers.0.*"], decoupled_lr=1e-3, decoupled_min_lr=1e-4,
        add_bias_linear=False,
    )  # fmt: skip
    config = make(**keys | ({"muon_scalar_lr": 5e-3, "muon_scalar_weight_decay": 0.05} if optimizer == "muon" else {}))
    case = as_case(config, resolve(config, world_size=2), shrink=False).case
    verdict = Verifier().verify(case, ["fp64"])
    assert verdict.ok, verdict
    assert case.plan().config.optimizer.decoupled_lr == 1e-3
    trained = {row.name for row in verdict.comparisons[0].rows if row.kind == "gradient"}
    assert trained
    assert not any("layers.0." in name for name in trained)


def test_the_schedule_that_auto_takes():
    """The case is of the plan that `megaaccum train` settles, and not of the one that the key is first read as."""
    plan = auto_schedule.choose_schedule(resolve(make(**SMALL | dict(schedule="auto")), world_size=2))
    case = as_case(plan.written, plan, shrink=False).case
    assert case.plan().layout == plan.layout
    assert plan.layout.schedule not in ("none", "1f1b")
    verdict = Verifier().verify(case)
    assert verdict.ok, verdict
    assert verdict.comparisons[0].largest < 1e-12


@pytest.mark.parametrize(
    ("ranks", "mistake", "layout", "words"),
    [
        (4, "", dict(sequence_parallel=True, tensor_model_parallel_size=2), "at the borders of stages are right"),
        (
            2,
            "division per stage",
            dict(grad_accum_steps=2),
            "in the backward: the gradient of micro-batch 0 that stage 1 sends",
        ),
        (
            2,
            "activation of another microbatch sent",
            dict(schedule="zbv"),
            "in the forward: the activation of micro-batch 1 that stage 1 receives, at the border after decoder.",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_the_border_at_which_a_step_goes_wrong(ranks, mistake, layout, words):
    config = make(**SMALL | dict(backend="ddp") | layout)
    case = as_case(config, resolve(config, world_size=ranks), shrink=False).case.in_lane("fp64")
    verifier = Verifier(steps=1)
    reference = verifier.references(case, ["fp64"], keep_parts=True)["fp64"]
    if mistake:
        verifier = replace(verifier, observing=on_ranks.observing(mistake))
    seen = verifier.observe(case, at_borders=True)
    assert words in first_wrong_border(seen, reference, CLOSE["fp64"])


def test_the_shipped_llama_in_its_layout():
    """8 B parameters on 128 ranks, shrunk to 8 ranks with the same axes."""
    config, seen = load("configs/llama3_8b.yaml"), []
    shrunk = as_case(config, resolve(config, world_size=128), shrink=True)
    verdict = Verifier(progress=seen.append).verify(shrunk.case)
    assert verdict.ok, verdict
    assert verdict.comparisons[0].largest < 1e-12
    assert seen == ["one process in fp64, fp32, bf16"] + [
        f"8 ranks, {lane}" for lane in ("fp64 over ddp", "fp32 over deepspeed", "bf16 over deepspeed")
    ]


def test_a_plain_module():
    sharding = dict(backend="fsdp2")
    verdict = megaaccum.verify(
        plan_of(2, sharding=sharding),
        user_models.plain,
        user_models.forward_step,
        user_models.batches(0),
        verbose=False,
    )
    assert verdict.ok, verdict


@pytest.mark.parametrize("mistake", ["", "rate does not move"])
def test_a_learning_rate_that_decays(mistake):
    optimizer = dict(lr=1e-2, min_lr=1e-3, lr_decay_style="linear", lr_decay_iters=4, weight_decay=0.1)
    batch = dict(micro_batch_size=user_models.ROWS, seq_length=user_models.SEQ, pp_microbatches=8)
    plan = Plan.of(batch=batch, sharding=dict(backend="ddp"), optimizer=optimizer, train_iters=8, world_size=2)
    own = UserModel(build=user_models.plain, forward_step_func=user_models.forward_step, data=user_models.batches)
    observe = {"observing": on_ranks.observing(mistake)} if mistake else {}
    verdict = Verifier(steps=3, **observe).verify(case_of(plan, own), ["fp64"])
    rates = [row.true for row in verdict.comparisons[0].rows if row.kind == "lr"]
    assert rates == pytest.approx([1e-2, 7.75e-3, 5.5e-3])
    assert verdict.ok == (not mistake), verdict
    assert min((row.step for row in verdict.comparisons[0].failed if row.kind == "param"), default=0) == 2 * bool(
        mistake
    )


@pytest.mark.parametrize(
    ("build", "step", "reason"),
    [
        (user_models.noisy, user_models.forward_step, "not deterministic: noise (Noise) gives another output"),
        (user_models.with_batch_norm, user_models.forward_step, "batch_norm (BatchNorm1d) takes statistics"),
        (user_models.plain, user_models.step_of_means, "samples depend on each other"),
        (user_models.too_large, user_models.forward_step, "one process does not hold the model"),
    ],
    ids=["noise", "batch norm", "means", "memory"],
)
def test_what_cannot_be_verified(build, step, reason):
    verdict = megaaccum.verify(plan_of(2), build, step, user_models.batches, verbose=False)
    assert verdict.exit_code == CANNOT
    assert reason in verdict.problem


def test_the_place_of_a_mistake_is_found(tmp_path):
    """By `python -m benchmarks verify`. `make bank` locates others."""
    written = tmp_path / "outcomes.json"
    ended = whole_runs.command("benchmarks.verify", "--json", str(written), "--mistakes", "division per stage")
    assert ended.code == 0, ended.output
    (row,) = json.loads(written.read_text())["mistakes"]
    assert row["outcome"] == "localised", row


def test_the_command(tmp_path, capsys):
    report, picture = tmp_path / "report.json", tmp_path / "report.png"
    files = ["--json", str(report), "--picture", str(picture)]
    data = ["--data_path", str(whole_runs.make_data(tmp_path)), "--split", "100,0,0", "--vocab_size", "2000"]
    assert cli.main(["verify", "configs/tiny_cpu.yaml", "--layout", "schedule=zbv", *files, *data]) == PASSED
    shown = capsys.readouterr()
    assert "tokens and masks are those of the first " in shown.out
    assert "schedule zbv" in shown.out
    assert "PASS: 2 steps" in shown.out
    assert "verify: " in shown.err
    written = json.loads(report.read_text())
    assert written["verdict"] == "pass"
    assert max(row["error"] for row in written["lanes"][0]["rows"] if row["kind"] == "gradient") < 1e-12
    assert picture.stat().st_size > 10_000


def test_the_path_of_a_gpu_is_taken_on_a_cpu(tmp_path):
    """Ranks and reference start torch.distributed as a run does; BF16 is compared, and one process' distance of it."""
    out = tmp_path / "verdict.json"
    words = "verify configs/tiny_cpu.yaml --device gpu --dry-run --json"
    ended = whole_runs.command("megaaccum.cli", *words.split(), str(out))
    assert ended.code == PASSED, ended.output
    assert "--device gpu: a dry run, without a GPU" in ended.output
    lanes = {each["lane"]: each for each in json.loads(out.read_text())["lanes"]}
    assert set(lanes) == {"fp64", "fp32", "bf16"}
    for lane in ("fp32", "bf16"):
        (row,) = (row for row in lanes[lane]["rows"] if row["kind"] == "one process")
        assert 0 < row["error"] < row["bound"] / 2


def refused_by_all() -> str:
    """Verify on ranks of a launcher, all of which end in a StepError."""
    from unittest.mock import patch

    from megaaccum.errors import StepError
    from megaaccum.lab.verification import launched

    config = make(pipeline_model_parallel_size=2)
    case = as_case(config, resolve(config, world_size=2), shrink=False).case
    problem = StepError("step 1: the gradient is not finite")
    with patch("megaaccum.lab.verification.on_ranks.observed", side_effect=problem):
        try:
            launched.together(case, lambda observe: observe(case, 1, False))
        except StepError as error:
            return str(error)
    return ""


def test_an_error_of_all_ranks_of_a_launcher_is_the_outcome():
    """The first sent it to the others, which were leaving."""
    for error in run_ranks(refused_by_all, 2, init=False, timeout=40):
        assert error == "step 1: the gradient is not finite"
