"""Two cells of the fuzz (python -m benchmarks fuzz), and that it sees what is wrong; tests/long has sixteen more."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks import fuzz, fuzz_cell, fuzz_reference
from benchmarks.fuzz_cell import Cell
from benchmarks.fuzz_draws import SOAP
from megaaccum.lab.verification.testing import run_ranks

SEED = 37


def problems_of_cells(first: int, count: int) -> list[str]:
    """Problems of that many cells of four ranks, from the first given."""
    of_four = (cell for cell in (fuzz.draw(SEED, index) for index in itertools.count()) if cell.world_size == 4)
    cells = list(itertools.islice(of_four, first, first + count))
    return [f"{cell}: {found}" for cell, found in zip(cells, fuzz.check(cells), strict=True) if found]


def test_two_cells():
    assert problems_of_cells(0, 2) == []


def with_an_empty_stage(lane: str, **keys: str) -> Cell:
    """A cell whose second rank begins with a stage that has no parameter."""
    layout = {"pipeline_model_parallel_size": 2, "schedule": "zbv", "pipeline_model_parallel_layout": "Et||tt|tL"}
    return Cell(world_size=2, lane=lane, model={"num_layers": 4}, layout=layout | {"pp_microbatches": 8} | keys)


EXPERTS = {
    "num_layers": 2, "num_experts": 4, "moe_ffn_hidden_size": 32, "add_bias_linear": False, "moe_router_dtype": "fp64",
    "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip

PARTS = {"lr_mult": ["decoder.layers.1.*=0.5"], "wd_mult": ["decoder.layers.3.*=3"], "decoupled_lr": 3e-3}
MOVING = {"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 1, "min_lr": 1e-4}

FOUND = [
    Cell(  # without a mask, micro-batches of unequal length had the side losses' scale of the first
        world_size=2,
        model=EXPERTS,
        layout={"pp_microbatches": 4},
        policies={"variable_seq_lengths": True},
        masks="full",
        lengths=True,
    ),
    with_an_empty_stage("fp32", backend="deepspeed", sync="streaming"),
    with_an_empty_stage("bf16", backend="deepspeed", sync="resident"),
    with_an_empty_stage("fp64", backend="fsdp2", sync="streaming"),
    with_an_empty_stage("bf16", backend="fsdp2", sync="resident"),
    Cell(  # what a second call of the step without its bad micro-batch began with
        world_size=2,
        model={"num_layers": 2},
        layout={
            "pipeline_model_parallel_size": 2,
            "schedule": "gpipe",
            "backend": "fsdp2",
            "grad_accum_steps": 2,
            "pp_microbatches": 4,
        },
        policies={"nonfinite": "drop_microbatch"},
        masks="full",
        bad=3,
        calls=2,
    ),
    Cell(  # parameters that some micro-batches do not use
        world_size=2,
        model={"num_layers": 4},
        layout={"zero_stage": 2, "pp_microbatches": 4},
        gated=True,
    ),
    Cell(  # every cp rank gave a micro-batch the weight 1
        world_size=2,
        model={"num_layers": 2, "loss_norm": "microbatch"},
        layout={"context_parallel_size": 2, "pp_microbatches": 8},
        masks="full",
        evaluate=True,
        calls=2,
        told=False,
    ),
    Cell(  # a speculative step took the micro-batches of the one before again, where its own were too few
        world_size=2,
        model={"num_layers": 4},
        layout={
            "pipeline_model_parallel_size": 2,
            "schedule": "zbv",
            "speculative_step": True,
            "pp_microbatches": 8,
        },
        policies={"short_batch": "pad"},
        short=2,
    ),
    Cell(  # masks of dropout that belong to samples, and matrices at owners
        world_size=2,
        model={"num_layers": 2, "hidden_dropout": 0.2, "attention_dropout": 0.2, "optimizer": "muon"},
        layout={"pp_microbatches": 4, "zero_stage": 2},
    ),
    Cell(  # the reference's documents rotated by the angles of position 0
        world_size=2,
        lane="fp64",
        model={"num_layers": 2, "position_embedding_type": "rope", "mtp_num_layers": 1},
        layout={"pipeline_model_parallel_size": 2, "schedule": "zb-h1", "backend": "ddp", "pp_microbatches": 8},
        policies={"reset_attention_mask": True},
        documents=True,
    ),
    Cell(  # Megatron's table of losses of predictions had a row for each layer of the model before
        world_size=2,
        model={"num_layers": 2, "position_embedding_type": "rope", "mtp_num_layers": 2},
        layout={"pp_microbatches": 4},
    ),
    Cell(  # a chunk of one layer took the next micro-batch's recompute for its own, and was released under it
        world_size=2,
        model={"num_layers": 4, "normalization": "RMSNorm", "add_bias_linear": False},
        layout={
            "pipeline_model_parallel_size": 2,
            "schedule": "interleaved",
            "virtual_pipeline_model_parallel_size": 2,
            "pp_microbatches": 8,
            "backend": "deepspeed",
            "sync": "streaming",
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        frozen="norms",
    ),
    Cell(  # rates that move, and belong to parts
        world_size=2,
        lane="fp64",
        model={"num_layers": 4, "optimizer": "lion", "add_bias_linear": False, **PARTS, **MOVING},
        layout={"pp_microbatches": 4, "backend": "fsdp2"},
    ),
    Cell(
        world_size=2,
        lane="fp64",
        model={"num_layers": 4, **SOAP, **PARTS, **MOVING},
        layout={"pipeline_model_parallel_size": 2, "schedule": "zbv", "backend": "ddp", "pp_microbatches": 8},
        resume={"pp_microbatches": 4, "backend": "fsdp2"},
    ),
    Cell(  # a loss scale that is halved, and doubles again after the resume
        world_size=2,
        lane="fp16",
        model={"num_layers": 4, **MOVING},
        layout={"pp_microbatches": 4, "backend": "deepspeed"},
        resume={"pipeline_model_parallel_size": 2, "pp_microbatches": 8, "backend": "fsdp2"},
        policies={"nonfinite": "zero", "loss_scale": None, "loss_scale_window": 1, "hysteresis": 1}
        | {"initial_loss_scale": fuzz_cell.LOSS_SCALE},
        bad=3,
    ),
    Cell(  # a step that no rank takes had the loss scale 1
        world_size=2,
        lane="fp16",
        model={"num_layers": 2},
        layout={"pp_microbatches": 4, "backend": "ddp"},
        policies={"short_batch": "drop"},
        short=2,
    ),
    Cell(
        world_size=2,
        lane="bf16",
        model={"num_layers": 4},
        layout={"pp_microbatches": 4, "grad_reduce_dtype": "bf16", "grad_accum_dtype": "bf16"},
    ),
    Cell(  # four blocks of matrices, on two tp ranks
        world_size=2,
        model={"num_layers": 2, "ffn_hidden_size": 128, "make_vocab_size_divisible_by": 128},
        layout={"tensor_model_parallel_size": 2, "pp_microbatches": 8, "reproducible": "layout"}
        | {"reproducible_tensor_blocks": 4, "make_vocab_size_divisible_by": 32},
    ),
]
"""Cells of which the fuzz has shown defects, and one of each kind that it draws seldom."""


HALF = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "pp_microbatches": 4}
FOUND_BY_FOUR = [
    # experts in one of two stages: the other averaged over its ranks, by a divisor of its own
    Cell(world_size=4, model=EXPERTS | {"moe_layer_freq": 2}, layout=HALF | {"backend": backend})
    for backend in ("ddp", "fsdp2")
] + [
    Cell(  # a rank sent a full bucket in its last backward, and waited there for ranks that agreed on the next call
        world_size=4,
        microbatches=16,
        model={"num_layers": 4},
        layout={"backend": "deepspeed", "zero_stage": 1, "grad_accum_steps": 4, "pp_microbatches": 1}
        | {"deterministic": True, "reduce_bucket_size": 20000},
        calls=2,
        gated=True,
    )
]


def test_cells_that_failed_once():
    assert fuzz.check(FOUND) == [[]] * len(FOUND)
    assert fuzz.check(FOUND_BY_FOUR) == [[]] * len(FOUND_BY_FOUR)


def test_a_cell_is_the_same_whenever_it_is_drawn():
    assert fuzz.draw(SEED, 3) == fuzz.draw(SEED, 3) != fuzz.draw(SEED + 1, 3)


PLAIN = Cell(world_size=1, model={"num_layers": 2}, layout={"pp_microbatches": 8}, evaluate=True)


def moved(trained: fuzz_cell.Trained, **of_step: float) -> fuzz_cell.Trained:
    steps = [*trained.steps[:-1], dataclasses.replace(trained.steps[-1], **of_step)]
    return dataclasses.replace(trained, steps=steps)


def test_what_differs_is_named():
    ((exact, near),) = run_ranks(fuzz_reference.references, 1, [PLAIN])[0]
    part = next(part for part in near.parts if part.name == "decoder.layers.0.mlp.linear_fc1.weight")
    others = [each for each in near.parts if each is not part]
    wrong = dataclasses.replace(part, values=part.values * 1.001)
    cases = {
        "loss": moved(near, loss=near.steps[-1].loss * 1.0001),
        "norm": moved(near, norm=near.steps[-1].norm * 1.0001),
        "(skipped, tokens, loss scale)": moved(near, num_tokens=1),
        "evaluation 1": dataclasses.replace(near, evaluations=[each + 1e-3 for each in near.evaluations]),
        f"{part.name} (tp rank 0): its change is off": dataclasses.replace(near, parts=[*others, wrong]),
        f"{part.name} is on no rank": dataclasses.replace(near, parts=others),
    }
    assert fuzz.problems(PLAIN, [near], exact, near) == []
    still = dataclasses.replace(exact, parts=exact.before)
    assert fuzz.problems(PLAIN, [still], still, still) == []
    for words, rank in cases.items():
        assert any(words in problem for problem in fuzz.problems(PLAIN, [rank], exact, near)), words


def test_what_fails_is_made_smaller(monkeypatch: pytest.MonkeyPatch):
    """Down to the one key that it fails with."""

    def alone(cell: Cell) -> list[str]:
        return ["ValueError: no"] if cell.layout.get("sync") == "streaming" else []

    monkeypatch.setattr(fuzz, "_alone", alone)
    cell = Cell(
        world_size=4,
        model={"num_layers": 4, "swiglu": True},
        layout={"pp_microbatches": 2, "sync": "streaming", "reduce_bucket_size": 5000},
        frozen="layer",
        bad=2,
    )
    small, why = fuzz.minimised(cell)
    assert small.layout == {"pp_microbatches": 2, "sync": "streaming"}
    assert (small.model, small.frozen, small.bad, why) == ({"num_layers": 4}, "", None, ["ValueError: no"])
