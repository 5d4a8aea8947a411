"""SOAP under sharding: whole matrices on their owners, their state in checkpoints, and bad input."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.faults import differences
from tests.support.muon import (
    BACKENDS,
    PIPELINE,
    Cell,
    check_held,
    check_one_digest,
    counted,
    engine_of,
    problems,
    take_steps,
    updates,
)  # fmt: skip
from tests.support.parity import Case, Rig

MODEL = (
    "--num_layers 4 --normalization RMSNorm --no_add_bias_linear --swiglu --num_query_groups 2 --weight_decay 0.1"
    " --lr_decay_style constant --lr 2e-3 --adam_eps 1e-4"
)
SOAP = f"{MODEL} --optimizer soap"
STEPS = 3


def test_weights_equal_one_process():
    """In float64, whose gradients SOAP takes in FP32: the same bits, so that no eigenbasis differs."""
    cells = [
        Cell(name, Case(4, f"{layout} --params_dtype fp64", f"{SOAP} {model}"), "", 1e-11)
        for name, layout, model in (
            ("fsdp2", "--backend fsdp2 --grad_accum_steps 2", "--clip_grad 0.1 --muon_bucket_size 2000"),
            (
                "streaming, tp 2",
                "--backend fsdp2 --sync streaming --tensor_model_parallel_size 2 --grad_accum_steps 2",
                "--no_soap_use_kl_shampoo --muon_scalar_lr 1e-3 --muon_scalar_weight_decay 0.01",
            ),
            ("V", f"--backend ddp {PIPELINE} --schedule zbv", "--no_muon_split_qkv"),
        )
    ]
    found = problems(cells, steps=5)
    assert not found, "\n".join(found)


def test_shards_are_stepped_as_whole_matrices_are():
    cases = [Case(4, f"{flags} --grad_accum_steps 2", SOAP) for flags in BACKENDS.values()]
    for ranks in run_ranks(updates, 4, cases, STEPS, timeout=300):
        for name, found in zip(BACKENDS, ranks, strict=True):
            assert found["param"] <= 1e-6, (name, found)


def with_fused_matrices(case: Case) -> Rig:
    from megaaccum.optim import muon

    def whole(plan, name, param, config):
        rows = int(getattr(param, "ds_shape", param.shape)[0])
        return (muon.Part(0, rows, rows),)

    with patch.object(muon, "parts_of", whole):
        return Rig.of(case)


def test_a_fused_weight_that_is_stepped_as_one_matrix_is_seen():
    case = Case(2, "--zero_stage 3 --grad_accum_steps 2", SOAP)
    for (found,) in run_ranks(updates, 2, [case], STEPS, with_fused_matrices, timeout=120):
        assert found["param"] > 1e-4, found


def test_one_digest_over_layouts():
    same = "--reproducible layout --grad_accum_steps 2 "
    flags = ("--zero_stage 3", "--backend fsdp2 --sync streaming", "--backend ddp")
    cases = [Case(4, same + each, SOAP) for each in flags]
    cases.append(Case(4, f"--reproducible layout --backend megatron {PIPELINE}", SOAP))
    check_one_digest(cases)


def test_what_is_held_is_within_two_percent_of_the_prediction():
    """Megatron's optimizer cuts one run of all parameters, of which matrices have no moments: ranks are unequal."""
    for summary in check_held(f"{SOAP} --untie_embeddings_and_output_weights", in_the_mean="megatron"):
        assert "soap 28 matrices" in summary and "momenta at owners" in summary


def test_bytes_are_the_predicted_ones():
    from megaaccum.lab.planner import matrices

    layouts = ("--zero_stage 3", "--backend fsdp2 --sync streaming", "--backend ddp")
    cases = [Case(4, f"{layout} --grad_accum_steps 2", SOAP) for layout in layouts]
    by_rank = run_ranks(counted, 4, cases, timeout=100)
    for number, case in enumerate(cases):
        found, ranks = matrices.forecast(case.plan()), [rank[number] for rank in by_rank]
        exchanged, foretold = (sum(getattr(rank, name) for rank in ranks) for name in ("exchanged", "foretold"))
        assert exchanged == foretold == pytest.approx(4 * (found.to_owners + found.back), rel=1e-12), case
        assert found.saved < 0 and all(rank.calls == 2 * rank.owned for rank in ranks), case


# --- checkpoints ------------------------------------------------------------------------------------------------------


def states(engine) -> dict[str, torch.Tensor]:
    """SOAP's tensors on this rank."""
    pieces = [piece for piece in engine.backend.state() if piece.shape is not None]
    return {f"{piece.name}/{kind}": each.clone() for piece in pieces for kind, each in piece.tensors.items()}


def moved(folder: str, layouts: list[Case]) -> list[dict[str, torch.Tensor]]:
    """The state after two steps in the first layout, then as each layout loads it, and after a step there."""
    engine = engine_of(layouts[0])
    take_steps(engine, 2)
    engine.save(folder)
    found = [states(engine)]
    take_steps(engine, 1)
    found.append(states(engine))
    for case in layouts:
        other = engine_of(case)
        assert other.load(folder)
        found.append(states(other))
        take_steps(other, 1)
        found.append(states(other))
    return found


def test_the_state_moves_between_layouts(tmp_path):
    same = "--reproducible layout "
    layouts = [
        Case(4, f"{same} --zero_stage 3 --grad_accum_steps 2", SOAP),
        Case(4, f"{same} --backend fsdp2 --sync streaming --grad_accum_steps 2", SOAP),
        Case(4, f"{same} --backend megatron {PIPELINE}", SOAP),
    ]
    by_rank = run_ranks(moved, 4, str(tmp_path), layouts, timeout=200)
    merged = [{name: each for rank in by_rank for name, each in rank[at].items()} for at in range(8)]
    assert len(merged[0]) == 7 * 28 and all(merged[0][key].max() == 2 for key in merged[0] if "soap_step" in key)
    for number, case in enumerate(layouts):
        assert not differences(merged[0], merged[2 + 2 * number]), case
        assert not differences(merged[1], merged[3 + 2 * number]), case


def switched(folder: str, case: Case) -> tuple[list[str], dict[str, torch.Tensor], list[str]]:
    """Refusals of checkpoints of AdamW by SOAP, of SOAP by AdamW, also with `override optimizer`; SOAP's state after a
    step from AdamW's; how that of an engine that has stepped before differs, and what it begins with from a new
    engine's."""
    refused = []
    for number, model in enumerate((MODEL, SOAP)):
        engine = engine_of(case, model)
        take_steps(engine, 1)
        engine.save(f"{folder}/{number}")
    for model, override, number in ((SOAP, "", 0), (MODEL, "", 1), (MODEL, "--override optimizer", 1)):
        with pytest.raises(CheckpointError) as error:
            engine_of(case, model, override).load(f"{folder}/{number}")
        refused.append(str(error.value))
    engine = engine_of(case, SOAP, "--override optimizer")
    new, begun, differ = states(engine), [], []
    for _ in range(2):
        assert engine.load(f"{folder}/0")  # over the state of the run before
        differ += differences(new, states(engine))
        take_steps(engine, 1)
        begun.append(states(engine))
    return refused, begun[0], differ + differences(*begun)


def test_a_run_goes_from_adam_to_soap_by_an_override_and_not_back(tmp_path):
    case = Case(2, "--backend ddp --grad_accum_steps 2", SOAP)
    for refused, begun, differ in run_ranks(switched, 2, str(tmp_path), case, timeout=120):
        assert "made with adam, the configuration says soap" in refused[0]
        assert "made with soap, the configuration says adam" in refused[1]
        assert "has soap_step_0, not exp_avg and exp_avg_sq, in" in refused[2]
        assert begun and all(each.max() == 1 for name, each in begun.items() if "soap_step" in name)
        assert not differ
        assert all(each.norm() > 0 for each in begun.values())


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--zero_stage 3 --offload_optimizer cpu", "offload_optimizer cpu: SOAP's state stays on the devices"),
        ("--zero_stage 1 --bf16 --grad_accum_dtype bf16", "optimizer soap keeps its states and updates in FP32"),
        ("--zero_stage 1 --muon_nesterov", "muon_nesterov: no effect with optimizer soap: set optimizer to muon"),
        ("--zero_stage 1 --soap_shampoo_beta 1", "soap_shampoo_beta is 1.0: it must be at least 0 and below 1"),
    ],
)
def test_what_soap_cannot_be_given_is_named(flags, text):
    with pytest.raises(ConfigError, match=text):
        Case(2, f"{flags} --grad_accum_steps 2", SOAP).plan()
