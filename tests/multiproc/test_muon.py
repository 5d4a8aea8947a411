"""Muon under sharding: cells of the table (tests/long has all of it), the transaction, checkpoints, and bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megaaccum.errors import CheckpointError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support import whole_runs
from tests.support.faults import Fault, differences, injected, state_of
from tests.support.muon import (
    BACKENDS,
    FLAGS,
    MOE,
    cell,
    check_held,
    check_one_digest,
    counted,
    engine_of,
    moved,
    problems,
    take_steps,
    trained,
)  # fmt: skip
from tests.support.parity import Case, Rig

CELLS = [
    cell("ZeRO-1", "tied"),
    cell("ZeRO-2", "clip"),
    cell("ZeRO-3 resident", "ep 2"),
    cell("ddp", "ep 2, tp 2, etp 1"),
    cell("ZeRO-3 streaming", "pp 2 V"),
    cell("fsdp2", "tp 2"),
    cell("HSDP", "dp 4"),
    cell("HSDP", "ep 2"),
    cell("megatron", "ga 4"),
    cell("ddp", "frozen", "fp64"),
]
INF = float("inf")
TWO_LAYERS = FLAGS.replace("--num_layers 4", "--num_layers 2")


def test_one_cell_per_backend():
    found = problems(CELLS)
    assert not found, "\n".join(found)


# --- the transaction --------------------------------------------------------------------------------------------------


def with_a_bad_step(case: Case, value: float) -> tuple[bool, list[str], list[str], int]:
    """A run with `value` in a gradient of its third step: (whether that is skipped; what differs after it; what differs
    after the fourth from a run that never saw the third; Newton-Schulz iterations of the skipped step)."""
    rig, clean = Rig.of(case), None
    for step in range(2):
        rig.train(step=step, first=8 * step)
    before, calls = state_of(rig.backend), rig.backend.matrices.num_calls
    with injected([Fault(1, 0, value)], rig.chunks):
        skipped = rig.train(step=2, first=16).skipped
    moved, calls = differences(before, state_of(rig.backend)), rig.backend.matrices.num_calls - calls
    rig.train(step=3, first=24)
    after = state_of(rig.backend)
    clean = Rig.of(case)
    for step in (0, 1, 3):
        clean.train(step=step, first=8 * step)
    return skipped, moved, differences(state_of(clean.backend), after), calls


@pytest.mark.parametrize(
    ("case", "value"),
    [
        (Case(2, "--zero_stage 3 --grad_accum_steps 4 --nonfinite skip", TWO_LAYERS), INF),
        (Case(2, "--backend fsdp2 --grad_accum_steps 4 --nonfinite skip", TWO_LAYERS, "bf16"), INF),
        (Case(2, "--zero_stage 1 --grad_accum_steps 4 --loss_scale 256 --nonfinite skip", TWO_LAYERS, "fp16"), INF),
        (
            Case(
                2,
                "--zero_stage 3 --grad_accum_steps 4 --initial_loss_scale 256 --hysteresis 2",
                TWO_LAYERS,
                "fp16",
            ),
            INF,
        ),
        (
            Case(2, "--backend ddp --grad_accum_steps 4 --grad_norm_guard skip --grad_norm_guard_window 2", TWO_LAYERS),
            1e6,
        ),
    ],
    ids=str,
)
def test_a_skipped_step_leaves_momenta_and_weights(case, value):
    for found in run_ranks(with_a_bad_step, 2, case, value, timeout=120):
        assert found == (True, [], [], 0)


def with_zeroed_elements(cases: list[Case]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """(elements of gradients set to 0 in the second step, the state after the third) of each case."""
    found = []
    for case in cases:
        rig, zeroed = Rig.of(case), 0
        for step in range(3):
            with injected([Fault(1, 0)] if step == 1 else [], rig.chunks):
                zeroed += rig.train(step=step, first=8 * step).sanitized
        found.append((zeroed, trained(rig).tensors))
    return found


def test_a_gradient_with_zeroed_elements_is_orthogonalised_alike_everywhere():
    layouts = ("--backend ddp", "--zero_stage 3", "--backend fsdp2", "--backend megatron")
    cases = [Case(2, f"{layout} --grad_accum_steps 4 --nonfinite zero", TWO_LAYERS) for layout in layouts]
    by_case = list(zip(*run_ranks(with_zeroed_elements, 2, cases, timeout=120), strict=True))
    states = [{name: part for _, tensors in ranks for name, part in tensors.items()} for ranks in by_case]
    for case, ranks, state in zip(cases, by_case, states, strict=True):
        assert len({zeroed for zeroed, _ in ranks}) == 1 and ranks[0][0] > 0, case
        for name, part in state.items():
            assert torch.isfinite(part).all(), (case, name)
            assert float((part - states[0][name]).norm()) <= 1e-6 * float(part.norm()), (case, name)


def test_one_digest_over_layouts():
    """Loops, ranks and sharding differ; the bits of weights and momenta do not."""
    same = "--reproducible layout --reduce_bucket_size 20000 "
    layouts = [
        Case(4, same + "--zero_stage 3 --grad_accum_steps 2", TWO_LAYERS),
        Case(4, same + "--zero_stage 1 --pipeline_model_parallel_size 2 --pp_microbatches 4", TWO_LAYERS),
        Case(4, "--reproducible layout --backend fsdp2 --sync streaming --grad_accum_steps 2", TWO_LAYERS),
        Case(4, "--reproducible layout --backend ddp --grad_accum_steps 2", TWO_LAYERS),
        Case(4, "--reproducible layout --backend megatron --grad_accum_steps 2", TWO_LAYERS),
    ]
    check_one_digest(layouts)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_momenta_move_between_layouts_under_the_matrices_names(tmp_path):
    layouts = [
        Case(4, "--zero_stage 3 --grad_accum_steps 2", TWO_LAYERS),
        Case(4, "--backend fsdp2 --data_parallel_replicas 2 --grad_accum_steps 2", TWO_LAYERS),
        Case(4, "--zero_stage 1 --pipeline_model_parallel_size 2 --pp_microbatches 4", TWO_LAYERS),
        Case(4, "--backend megatron --tensor_model_parallel_size 2 --grad_accum_steps 4", TWO_LAYERS),
    ]
    by_rank = run_ranks(moved, 4, str(tmp_path), layouts, timeout=200)
    saved = by_rank[0][0]
    assert any(name.endswith("linear_fc1.weight/momentum_buffer") for name in saved)
    for number in range(1, len(layouts)):
        found = {name: each for rank in by_rank for name, each in rank[number].items()}
        assert not differences(saved, found), layouts[number - 1]
    # Cut over tp: a tensor-parallel rank's rows of queries, keys and values.
    name = "decoder.layers.0.self_attention.linear_qkv.weight/momentum_buffer"
    halves = [by_rank[rank][4][name] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), saved[name])


ADAM = "--normalization RMSNorm --no_add_bias_linear --swiglu --num_layers 2 --lr_decay_style constant --lr 2e-3"
ADAM += " --num_query_groups 2 --weight_decay 0.1 --adam_eps 1e-4"


def switched(folder: str, case: Case) -> tuple[list[str], dict[str, float], bool]:
    """(refusals; norms of the momenta after an override; whether AdamW's moments of embeddings came with it)."""
    adam = engine_of(case, ADAM)
    take_steps(adam, 2)
    adam.save(f"{folder}/adam")
    moments = {piece.name: piece.tensors["exp_avg"].clone() for piece in adam.backend.state() if "embed" in piece.name}
    refused = []
    for model, source, override in (("", "adam", ""), (ADAM, "muon", ""), (ADAM, "muon", "optimizer")):
        engine = engine_of(case, model, f"--override {override}" if override else "")
        try:
            engine.load(f"{folder}/{source}")
        except CheckpointError as error:
            refused.append(str(error))
        if not override and source == "adam":
            take_steps(engine, 1)
            engine.save(f"{folder}/muon")
    engine = engine_of(case, override="--override optimizer")
    engine.load(f"{folder}/adam")
    pieces = list(engine.backend.state())
    zero = {piece.name: float(piece.tensors.get("momentum_buffer", torch.zeros(1)).norm()) for piece in pieces}
    same = all(torch.equal(piece.tensors["exp_avg"], moments[piece.name]) for piece in pieces if "embed" in piece.name)
    take_steps(engine, 1)
    return refused, zero, same


def test_a_run_goes_from_adam_to_muon_by_an_override_and_not_back(tmp_path):
    case = Case(2, "--backend ddp --grad_accum_steps 2", TWO_LAYERS)
    for refused, zero, same in run_ranks(switched, 2, str(tmp_path), case, timeout=120):
        assert len(refused) == 3
        assert "optimizer: the checkpoint was made with adam, the configuration says muon; set it to adam" in refused[0]
        assert "or set override to optimizer" in refused[0]
        assert "made with muon, the configuration says adam" in refused[1]
        assert "where another optimizer stepped it" in refused[2]
        assert not any(zero.values())
        assert same


def test_a_configured_run_trains_with_muon_and_goes_on_in_another_layout(tmp_path):
    whole_runs.make_data(tmp_path)
    muon = dict(optimizer="muon", lr_mult="embedding.*=0.5", train_iters=4, save_interval=2, exit_interval=2)
    first = whole_runs.train(tmp_path, **muon)
    assert first.code == 0, first.output
    assert "optimizer: muon 12 matrices" in first.output
    again = whole_runs.train(
        tmp_path, **muon | dict(backend="fsdp2", pipeline_model_parallel_size=1, pp_microbatches=2)
    )
    assert again.code == 0, again.output
    assert "step 4/4" in again.output


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--muon_matrices *.linear_fc3.weight", ["*.linear_fc3.weight fits no trained parameter", "leave it out"]),
        ("--muon_matrices *.input_layernorm.weight", ["asks for decoder.layers.0.input_layernorm.weight (32)"]),
        ("--muon_matrices !*.weight", ["no trained parameter is a weight matrix", "set optimizer to adam"]),
        ("--muon_matrices embedding.word*", ["which embedding and head share"]),
    ],
)
def test_bad_patterns_end_the_start_on_every_rank(flags, parts):
    case = Case(2, "--backend ddp --pipeline_model_parallel_size 2 --pp_microbatches 4", f"{TWO_LAYERS} {flags}")
    for outcome in try_ranks(Rig.of, 2, case, timeout=60):
        assert outcome.error is not None
        text = outcome.error.text
        assert all(part in text for part in parts), text


def test_an_unknown_set_of_coefficients_is_named_with_those_that_exist():
    from megaaccum.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        Case(1, "", f"{FLAGS} --muon_coefficient_type newton").plan()
    assert "muon_coefficient_type" in str(caught.value)
    assert "polar_express" in str(caught.value)


def summary_of(case: Case) -> tuple[str, set[str]]:
    """The line of the start, and the names of the matrices."""
    rig = Rig.of(case)
    return rig.backend.matrices.summary, {matrix.name for each in rig.backend.matrices.owned for matrix in each}


def test_patterns_add_and_take_away_and_the_start_says_what_muon_steps():
    flags = "--untie_embeddings_and_output_weights --muon_matrices output_layer.weight !*.linear_proj.weight"
    case = Case(2, "--backend ddp --grad_accum_steps 2", f"{TWO_LAYERS} {flags}")
    for text, names in run_ranks(summary_of, 2, case, timeout=60):
        assert "output_layer.weight" in names
        assert not any("linear_proj" in name for name in names)
        assert text.startswith("optimizer: muon 13 matrices (")
        assert "adam 2 embeddings, 5 norms, 2 others" in text


def test_every_backend_of_the_table_is_one_that_can_be_chosen():
    for layout in BACKENDS.values():
        Case(4, f"--grad_accum_steps 2 {layout}", FLAGS).plan()
    assert Path(__file__).parents[1].joinpath("long", "test_muon_table.py").exists()


# --- bytes and memory -------------------------------------------------------------------------------------------------

BYTES = {
    # backend: whether its shards are even, so that check's forecast is exact too.
    "--zero_stage 1": False,
    "--zero_stage 2": False,
    "--zero_stage 3": True,
    "--zero_stage 3 --sync streaming": True,
    "--backend fsdp2": True,
    "--backend fsdp2 --sync streaming": True,
    "--backend fsdp2 --data_parallel_replicas 2": True,
    "--backend megatron": False,
    "--backend ddp": True,
}
PRECISIONS = ("--muon_fp32_matmul_prec highest", "--muon_fp32_matmul_prec medium")
IN_PARTS = (
    "--backend fsdp2 --tensor_model_parallel_size 2 --sequence_parallel --grad_accum_steps 4",
    f"--zero_stage 3 --expert_model_parallel_size 2 --grad_accum_steps 2 {MOE}",
)
"""Matrices cut over tp, and on some ranks of the stage alone."""
IN_SHARDS = (
    "--zero_stage 3 --reproducible layout --grad_accum_steps 2",
    "--zero_stage 3 --sync streaming --deterministic --grad_accum_steps 2",
    "--backend fsdp2 --muon_weight_decay_method l2 --grad_accum_steps 2",
    "--backend fsdp2 --sync streaming --data_parallel_replicas 2 --grad_accum_steps 4",
    "--zero_stage 3 --offload_optimizer cpu --grad_accum_steps 2",
)
"""Momenta live with the shards."""


def test_bytes_are_those_of_adam_and_the_updates_return():
    """On every backend, and equal to the prediction: a gradient goes to its owner once, and no momentum crosses."""
    from megaaccum.lab.planner import matrices

    pairs = [
        (Case(4, f"{layout} --grad_accum_steps 2", f"{TWO_LAYERS} {more}"), even)
        for layout, even in BYTES.items()
        for more in PRECISIONS
    ]
    cases = [case for case, _ in pairs]
    plain = [replace(case, model=ADAM) for case in cases[:: len(PRECISIONS)]]
    by_rank = run_ranks(counted, 4, [*cases, *plain], timeout=300)
    adam = [sum(rank[len(cases) + number].moved for rank in by_rank) for number in range(len(plain))]
    for number, (case, even) in enumerate(pairs):
        ranks, found = [rank[number] for rank in by_rank], matrices.forecast(case.plan())
        exchanged = sum(rank.exchanged for rank in ranks)
        assert exchanged == sum(rank.foretold for rank in ranks), case
        assert found.at_owners == ("ddp" not in case.layout) and found.to_owners == 0, case
        if even:
            assert exchanged == pytest.approx(4 * found.back, rel=1e-12), case
        else:
            assert exchanged <= 4 * found.back * 4 / 3, case
        assert sum(rank.moved for rank in ranks) <= adam[number // len(PRECISIONS)] + exchanged, case
        assert all(rank.calls == 2 * rank.owned for rank in ranks), case


def test_bytes_of_parts_and_of_momenta_in_shards_are_the_predicted_ones():
    from megaaccum.lab.planner import matrices

    cases = [Case(4, layout, TWO_LAYERS) for layout in (*IN_PARTS, *IN_SHARDS)]
    plain = [Case(4, case.layout.replace("--muon_weight_decay_method l2", ""), ADAM) for case in cases]
    by_rank = run_ranks(counted, 4, [*cases, *plain], timeout=300)
    for number, case in enumerate(cases):
        ranks, found = [rank[number] for rank in by_rank], matrices.forecast(case.plan())
        assert found.at_owners == (number < len(IN_PARTS)), case
        exchanged = sum(rank.exchanged for rank in ranks)
        assert exchanged == sum(rank.foretold for rank in ranks), case
        assert exchanged == pytest.approx(4 * (found.to_owners + found.back), rel=1e-12), case
        adam = sum(rank[len(cases) + number].moved for rank in by_rank)
        if MOE not in case.layout:  # other weights send other tokens to experts
            assert sum(rank.moved for rank in ranks) <= adam + exchanged, case


def begun(cases: list[Case]) -> list[list[bool]]:
    """For every reduction of the second step to an owner, whether it began inside a backward; a list for each case."""
    from megaaccum.upstream.pytorch import in_backward

    found, reduce = [], torch.distributed.reduce
    for case in cases:
        rig, early = Rig.of(case), []
        rig.train(step=0, first=0)  # in which ranks agree on the order of reductions

        def note(*args, early=early, **keys):
            early.append(in_backward())
            return reduce(*args, **keys)

        with patch.object(torch.distributed, "reduce", note):
            rig.train(step=1, first=0)
        found.append(early)
    return found


def test_the_first_matrices_are_on_their_way_while_later_gradients_are_computed():
    layouts = [layout for layout in BYTES if "ddp" not in layout]
    small = {layout: "--reduce_bucket_size 2000" if "zero_stage" in layout else "" for layout in layouts}
    cases = [Case(4, f"{layout} --grad_accum_steps 2 {small[layout]}", TWO_LAYERS) for layout in layouts]
    for found in run_ranks(begun, 4, cases, timeout=200):
        for case, early in zip(cases, found, strict=True):
            assert early and early[0] and sum(early) > len(early) / 2, (case, early)


def test_what_is_held_is_within_two_percent_of_the_prediction():
    """Megatron's optimizer cuts one run of all parameters, of which matrices have one moment: ranks are unequal."""
    check_held(f"{TWO_LAYERS} --untie_embeddings_and_output_weights", BYTES, in_the_mean="megatron")
