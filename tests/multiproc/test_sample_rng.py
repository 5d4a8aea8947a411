"""`rng: sample`: a micro-batch has the same dropout masks wherever it runs, so that every layout has one gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import EXACT
from tests.support.parity import Case, Gradient, Rig

FOUR, EIGHT = "--num_layers 4 ", "--num_layers 8 "
"""Two layers of a chunk, or more, and one in the four chunks' V."""
MODEL = "--attention_dropout 0.1 --hidden_dropout 0.1 "
BATCH = "--global_batch_size 8 "
PP = "--pipeline_model_parallel_size 2 "
VPP = PP + "--virtual_pipeline_model_parallel_size 2 "
FULL = "--recompute_granularity full "
PAIRS = FULL + "--recompute_method uniform --recompute_num_layers 2 "
SELECTIVE = "--recompute_granularity selective --recompute_modules core_attn mlp "


def fp64(layout: str, model: str = FOUR) -> Case:
    return Case(4, layout + BATCH + "--params_dtype fp64 ", MODEL + model, "fp64")


def fp32(layout: str) -> Case:
    return Case(4, layout + BATCH, MODEL + FOUR)


ONE = replace(fp64("--pp_microbatches 8 "), world_size=1)
WITHOUT = replace(ONE, model=FOUR)
LAYOUTS = [
    fp64("--pp_microbatches 2 "),
    fp64(PP + "--grad_accum_steps 1 --pp_microbatches 4 " + FULL),
    fp64(VPP + "--pp_microbatches 4 --schedule interleaved ", EIGHT),
    fp64(PP + "--schedule zb-h1 --pp_microbatches 4 "),
    fp64("--pipeline_model_parallel_size 4 --schedule zbv --pp_microbatches 8 " + FULL, EIGHT),
    fp64(VPP + "--schedule dualpipev --pp_microbatches 4 " + SELECTIVE, EIGHT),
    fp64("--pipeline_model_parallel_size 4 --pp_microbatches 8 " + PAIRS, EIGHT),
    fp64(PP + "--backend fsdp2 --sync streaming --pp_microbatches 4 " + FULL),
    fp32(PP + "--sync streaming --pp_microbatches 4 " + FULL),
    fp32(PP + "--zero_stage 1 --pp_microbatches 4 "),
    fp32(PP + "--backend megatron --pp_microbatches 4 "),
]  # fmt: skip


# --- mistakes --------------------------------------------------------------------------------------------------------


def by_rank() -> Iterator[None]:
    """Each pipeline stage and data-parallel rank has masks of its own, whatever its micro-batches are."""
    from megaaccum.distributed import rng
    from megaaccum.step import seeds

    def seed_at(self, layer: str, stream: str) -> None:
        place = (self._groups.pp.rank(), self._groups.dp.rank())
        rng.seed_streams(f"{self._step}/{self._forward}/{layer}/{place}", stream, self._streams, tp_rank=0)

    with patch.object(seeds.SampleSeeds, "seed_at", seed_at):
        yield


def counted_by_forwards() -> Iterator[None]:
    """A recomputed forward belongs to the micro-batch that went forward last."""
    from megaaccum.upstream import pytorch

    with patch.object(pytorch, "in_backward", lambda: False):
        yield


def by_chunk() -> Iterator[None]:
    """A chunk's layers draw on from where its first one began."""
    from megaaccum.step import seeds

    with patch.object(seeds, "seeded_modules", lambda chunk: ()):
        yield


def no_mistake() -> Iterator[None]:
    yield


# --- on ranks --------------------------------------------------------------------------------------------------------


def gradients(cases: list[Case], mistakes=None) -> list[Gradient]:
    """Step 7 of each case, with its mistake."""
    found = []
    for case, mistake in zip(cases, mistakes or [no_mistake] * len(cases), strict=True):
        with contextmanager(mistake)():
            found.append(Rig.of(case).watched(step=7)[0])
    return found


def again(case: Case) -> dict[str, Gradient]:
    """Step 7 of `case`: at once, and after other steps, an evaluation and draws of the process' own; and step 8."""
    import torch

    from megaaccum.step import evaluation

    rig = Rig.of(case)
    seen = {"at once": rig.watched(step=7)[0]}
    before = torch.get_rng_state()
    rig.watched(step=3)
    evaluation.evaluate(rig.train_step, rig.microbatches())
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    return seen | {"later": rig.watched(step=7)[0], "another step": rig.watched(step=8)[0]}


def draws(case: Case, of_a_user: bool) -> tuple[int, int]:
    """In a step of `case`: how often its forwards were seeded, and how often something had then drawn from some stream.
    of_a_user: by a forward step function of which nothing is known."""
    import torch

    from megaaccum.distributed import rng
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    rig = Rig.of(case)
    seeded, drawn, last = [], [], [rng.snapshot()]

    def look() -> None:
        now = rng.snapshot()
        drawn.append(any(not torch.equal(now[name], state) for name, state in last[0].items()))

    def set_states(*args, set_states=rng.seed_streams, **kwargs) -> None:
        look()
        set_states(*args, **kwargs)
        seeded.append(args)
        last[0] = rng.snapshot()

    def restore(states, restore=rng.restore) -> None:
        look()
        restore(states)
        last[0] = rng.snapshot()

    with (
        patch.object(rng, "seed_streams", set_states),
        patch.object(rng, "restore", restore),
        patch.object(GptForwardStep, "draws_nothing", not of_a_user),
    ):
        rig.watched(step=7)
        look()
    return len(seeded), sum(drawn)


def draws_of_each(cells: list[tuple[Case, bool]]) -> list[tuple[int, int]]:
    return [draws(*cell) for cell in cells]


# --- tests -----------------------------------------------------------------------------------------------------------


def error(ranks: list[Gradient], exact: Gradient) -> float:
    """Largest relative L2 error of any parameter's gradient on any rank."""
    found = {name for rank in ranks for name in rank.parts}
    assert found == exact.parts.keys()
    return max(
        float((part - exact.parts[name]).norm() / exact.parts[name].norm())
        for rank in ranks
        for name, part in rank.parts.items()
    )


@pytest.fixture(scope="module")
def exact() -> dict[str, Gradient]:
    """One process' gradient, by model."""
    models = [ONE.model, MODEL + EIGHT, WITHOUT.model]
    found = run_ranks(gradients, 1, [replace(ONE, model=model) for model in models])[0]
    return dict(zip(models, found, strict=True))


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Gradient]]:
    by_rank = run_ranks(gradients, 4, LAYOUTS, timeout=150)
    return dict(zip(map(str, LAYOUTS), map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_draws_the_same_masks(case, measured, exact):
    assert error(measured[str(case)], exact[case.model]) < (EXACT if case.lane == "fp64" else 5e-6)


def test_the_masks_are_there_and_belong_to_the_step(exact):
    masked = exact[ONE.model]
    assert error([masked], exact[WITHOUT.model]) > 0.1
    seen = run_ranks(again, 1, ONE)[0]
    assert error([seen["at once"]], masked) == error([seen["later"]], masked) == 0
    assert error([seen["another step"]], masked) > 0.1


MISTAKES = [(by_rank, 0), (by_rank, 3), (counted_by_forwards, 1), (counted_by_forwards, 6), (by_chunk, 2)]


@pytest.fixture(scope="module")
def mistaken() -> list[list[Gradient]]:
    """Gradients of each rank with each mistake, and then without one."""
    mistakes, cases = [mistake for mistake, _ in MISTAKES], [LAYOUTS[number] for _, number in MISTAKES]
    by_rank = run_ranks(gradients, 4, [*cases, LAYOUTS[1]], [*mistakes, no_mistake], timeout=100)
    return list(map(list, zip(*by_rank, strict=True)))


@pytest.mark.parametrize(("mistake", "number"), MISTAKES)
def test_a_mistake_is_seen(mistake, number, mistaken, exact):
    seen = mistaken[MISTAKES.index((mistake, number))]
    assert error(seen, exact[LAYOUTS[number].model]) > 0.01
    assert error(mistaken[-1], exact[LAYOUTS[1].model]) < EXACT, "a mistake stayed"


def test_under_tp_the_masks_are_those_of_the_sample_too():
    """Ranks of a tp group hold other heads and other tokens, and draw from states of their own."""
    tp = "--tensor_model_parallel_size 2 --sequence_parallel --pp_microbatches 4 "
    by_rank = run_ranks(gradients, 4, [fp64(tp), fp64(tp + PP + FULL)])
    for rank in (0, 1):
        exact = by_rank[rank][0]
        stages = [each for _, each in by_rank if each.tp_rank == exact.tp_rank]
        assert error(stages, exact) < EXACT


SILENT = "--attention_dropout 0 --hidden_dropout 0 --normalization RMSNorm --swiglu "
EXPERTS = SILENT + "--num_experts 4 --disable-bias-linear --moe_input_jitter_eps 0.1 "


@pytest.mark.parametrize("layout", [PP + "--pp_microbatches 4 ", PP + "--schedule zb-h1 --pp_microbatches 4 " + FULL])
def test_only_stages_that_may_draw_are_seeded(layout):
    """4 forwards of each stage: seeded where they begin, and again at each layer, if one has dropout or experts; not at
    all where neither a layer nor the forward step function may draw."""
    silent = fp64(layout, FOUR + SILENT)
    cells = [(silent, False), (silent, True), (fp64(layout), False), (fp64(layout, FOUR + EXPERTS), False)]
    for nothing, of_a_user, *others in run_ranks(draws_of_each, 4, cells):
        assert nothing == (0, 0) and of_a_user == (4, 0)
        for seeded, drawn in others:
            assert seeded >= 4 + 8 and drawn
