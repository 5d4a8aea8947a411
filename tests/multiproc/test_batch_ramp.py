"""Batch warm-up on ranks: every step is the step of its batch alone, also through a kill and other ranks."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.metrics import journal
from tests.support import ramps
from tests.support.distance import EXACT, relative_error
from tests.support.parity import Case
from tests.support.whole_runs import make_data, train

SMALL = "--num_layers 4"
RAMPS = (
    Case(4, "--pp 2 --num_chunks 2 --grad_accum_steps 4 --batch_warmup_steps 3", SMALL, "fp64"),
    Case(4, "--num_chunks 1 --grad_accum_steps 8 --batch_warmup_steps 2 --flush per_round", SMALL, "fp64"),
    Case(
        4, "--pp 2 --schedule dualpipev --global_batch_size 16 --rampup_batch_size 4 4 24", SMALL, "fp64"
    ),
    Case(
        4,
        "--pp 2 --num_layers_per_virtual_pipeline_stage 1 --step_batch_size_schedule 0:8,200:12,500:20,700:24",
        SMALL,
        "fp64",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def walked():
    """{case: its steps on each rank}, of one start of ranks."""
    by_rank = run_ranks(ramps.walk_all, 4, RAMPS, timeout=120)
    return {case: list(ranks) for case, ranks in zip(RAMPS, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("case", RAMPS, ids=str)
def test_every_step_is_the_step_of_its_batch_alone(walked, case):
    ranks = walked[case]
    assert len({step.size for step in ranks[0]}) > 2, "the batch does not grow"
    for steps in zip(*ranks, strict=True):
        alone = ramps.whole_model(steps, "alone")
        for name, after in ramps.whole_model(steps, "after").items():
            assert relative_error(after, alone[name]) <= EXACT, (steps[0].size, name)


def test_every_gradient_is_that_of_one_process_on_the_same_samples(walked):
    wanted = []
    for case in RAMPS:
        wanted += [
            (case.model, ramps.whole_model(steps, "before"), steps[0]) for steps in zip(*walked[case], strict=True)
        ]
    (exact,) = run_ranks(ramps.one_process, 1, [(m, w, s.first, s.size) for m, w, s in wanted], timeout=120)
    found = [steps for case in RAMPS for steps in zip(*walked[case], strict=True)]
    for steps, gradient in zip(found, exact, strict=True):
        for name, part in ramps.whole_model(steps, "gradient").items():
            assert relative_error(part, gradient[name]) <= EXACT, (steps[0].size, name)


def test_a_divisor_of_the_whole_batch_would_be_seen(walked):
    """A step that divides by the tokens of the configured batch, in place of its own, is far from the exact one."""
    case = RAMPS[0]
    first = [ranks[0] for ranks in walked[case]]
    (exact,) = run_ranks(ramps.one_process, 1, [(case.model, ramps.whole_model(first, "before"), 0, 16)], timeout=60)
    wrong = ramps.whole_model(first, "gradient")
    assert max(relative_error(wrong[name], gradient) for name, gradient in exact[0].items()) > 1e-2


def proven(case: Case) -> tuple[list[int], list[int]]:
    """Micro-batches of the flushes that a ramp takes, and of those whose schedule is proven before the first step."""
    from unittest.mock import patch

    from megaaccum.executor import entry
    from tests.support.engines import engine_of

    with patch.object(entry, "validate", wraps=entry.validate) as validate:
        engine = engine_of(case)
    assert engine.step == 0
    return engine.plan.ramp.flush_sizes(), sorted(call.args[0].num_microbatches for call in validate.call_args_list)


def test_the_schedule_of_every_batch_is_proven_before_the_first_step():
    for wanted, found in run_ranks(proven, 4, RAMPS[2], timeout=60):
        assert len(wanted) > 2
        assert found == wanted


def part_of_a_static_step() -> list[str]:
    """The errors of an engine with a static graph for a part of a step, and for all of it."""
    from megaaccum.errors import ConfigError
    from tests.support.engines import engine_of
    from tests.support.parity import microbatches

    engine = engine_of(Case(1, "--num_chunks 4 --static_graph true", SMALL, "fp64"))
    batch, said = microbatches(engine.plan, 0), []
    for part in (batch[:2], batch):
        try:
            engine.forward_backward(part)
            said.append(f"norm {engine.optim_step().grad_norm > 0}")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_static_graph_takes_whole_steps_alone():
    ((part, whole),) = run_ranks(part_of_a_static_step, 1, timeout=60)
    assert "static_graph true: a call takes the 4 micro-batches of a step, not 2" in part
    assert whole == "norm True"


def loaded_in_steps_that_do_not_divide(folder: str) -> tuple[str, bool]:
    """The error of a load in mid-ramp, and whether the engine is as it was."""
    import torch

    from megaaccum import Plan, initialize
    from megaaccum.errors import ConfigError

    def forward_step(data_iterator, model):
        output = model(next(data_iterator))
        return output, lambda sums: (sums.square().sum(), torch.ones(()), {})

    def engine_of(micro_batch_size: int):
        batch = dict(micro_batch_size=micro_batch_size, global_batch_size=8, seq_length=4, rampup_batch_size=[2, 2, 24])
        plan = Plan.of(
            batch=batch, sharding=dict(backend="ddp"), optimizer=dict(lr=1e-2), run=dict(train_iters=50), world_size=1
        )
        return initialize(plan, torch.nn.Linear(4, 4), forward_step_func=forward_step)

    first = engine_of(1)
    first.train_step([torch.ones(1, 4)] * first.batch.num_microbatches)
    first.save(folder)
    other = engine_of(4)  # whose ramp begins with 4
    before = [weight.clone() for _, weight in other.whole_weights()]
    with pytest.raises(ConfigError) as refusal:
        other.load(folder)
    now = [weight for _, weight in other.whole_weights()]
    return str(refusal.value), other.step == 0 and all(map(torch.equal, before, now))


def test_a_load_that_these_ranks_cannot_cut_leaves_the_engine_as_it_was(tmp_path):
    ((refusal, is_as_it_was),) = run_ranks(loaded_in_steps_that_do_not_divide, 1, str(tmp_path), timeout=60)
    assert "has steps of 2 sequences still to come" in refusal
    assert is_as_it_was


# --- killed in the middle of it, and gone on with other ranks ---------------------------------------------------------

EXACT_RUN = {
    "backend": "ddp", "params_dtype": "fp64", "pp_microbatches": 2, "global_batch_size": 24, "batch_warmup_steps": 4,
    "attention_dropout": 0, "nproc_per_node": 4, "lr_decay_style": "cosine", "lr_warmup_iters": 3,
    "lr_scaling": "sqrt", "lr_reference_batch_size": 6, "lr_scaling_follows_rampup": True,
}  # fmt: skip


def seen(folder):
    """(step, samples consumed, size, rate, loss) of a run, each step once."""
    records = {r["step"]: r for r in journal.read(folder / "run" / "log.jsonl") if r["kind"] == "train"}
    names = ("step", "consumed_samples", "global_batch_size", "lr")
    return [tuple(r[name] for name in names) for r in records.values()], [r["loss"] for r in records.values()]


def test_a_run_killed_in_mid_ramp_goes_on_exactly_on_other_ranks(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    make_data(tmp_path)
    for folder in (whole, killed):
        folder.mkdir()
    keys = {"data_path": tmp_path / "corpus", **EXACT_RUN}
    assert train(whole, **keys).code == 0
    ended = train(killed, **keys, worker="dies_after_three_steps")
    assert ended.code != 0
    assert "SIGKILL" in ended.output
    again = train(killed, **(keys | {"nproc_per_node": 2}))
    assert again.code == 0, again.output
    assert "resumed from" in again.output
    (steps, losses), (expected, exact) = seen(killed), seen(whole)
    assert len({size for _, _, size, _ in expected}) > 3
    warm = expected[2][1]  # samples of the three steps of warm-up of the learning rate
    assert [rate for *_, rate in expected[:4]] == pytest.approx(
        [1e-2 * (size / 6) ** 0.5 * (consumed - size) / warm for _, consumed, size, _ in expected[:4]], rel=1e-12
    )
    assert steps == expected
    assert losses == pytest.approx(exact, rel=EXACT)
