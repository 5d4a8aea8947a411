"""The guard of the norm, the limits on bad steps, and the message for short ranks: plain arithmetic, no ranks."""

from __future__ import annotations

import math
import statistics
from typing import Any, cast

import pytest
import torch

from megaaccum.errors import RankDisagreement, StepError
from megaaccum.observe import nonfinite
from megaaccum.observe.nonfinite import Finding, Findings, ZeroNonFinite
from megaaccum.observe.norm_guard import NormGuard
from megaaccum.step import short_batch
from megaaccum.step.recovery import Attempt, Recovery
from megaaccum.step.short_batch import check_can_pad, filled, stand_in, too_few
from tests.support.configs import plan


def guard(action: str = "skip", **keys: object) -> NormGuard:
    return NormGuard(plan(grad_norm_guard=action, **keys).config.step)


def test_the_guard_is_silent_until_it_has_seen_a_window() -> None:
    watch = guard(grad_norm_guard_window=5)
    assert [watch.judge(norm) for norm in (1.0, 50.0, 1.0, 1.0, 100.0)] == [None] * 5
    assert watch.limit < math.inf


def test_the_averages_are_those_of_the_definition() -> None:
    norms, weight = [1.0, 1.5, 0.7, 1.1, 0.9, 1.3], 2 / (3 + 1)
    watch = guard(grad_norm_guard_window=3, grad_norm_guard_deviations=100.0)
    for norm in norms:
        watch.judge(norm)
    # Weights of an exponential average that begins with the first value whole.
    shares = [(1 - weight) ** (len(norms) - 1), *[weight * (1 - weight) ** (len(norms) - 1 - i) for i in range(1, 6)]]
    mean = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    variance = sum(share * (norm - mean) ** 2 for share, norm in zip(shares, norms, strict=True))
    assert watch.limit == pytest.approx(mean + 100 * math.sqrt(variance))


def test_a_spike_is_told_with_its_numbers_and_only_learnt_when_it_passes() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 1.05]
    for action, learnt in (("skip", False), ("stop", False), ("warn", True)):
        watch = guard(action, grad_norm_guard_window=5)
        assert all(watch.judge(norm) is None for norm in usual)
        before = watch.limit
        text = watch.judge(100.0)
        assert text is not None
        assert "gradient norm 100 is above" in text
        assert (watch.limit > before) == learnt
        assert watch.judge(statistics.mean(usual)) is None


def test_a_guard_that_is_off_says_nothing() -> None:
    watch = guard("off")
    assert [watch.judge(norm) for norm in [1.0] * 200 + [1e30]] == [None] * 201


def test_the_guard_judges_finite_norms_where_others_are_not_checked() -> None:
    by = Recovery(
        plan(nonfinite="off", grad_norm_guard="skip", grad_norm_guard_window=2), cast(Any, None), cast(Any, None)
    )
    attempts = [Attempt(loss=1.0, weight=1.0, norm=norm, reports={}) for norm in (1.0, 1.0, 100.0, math.inf, 1.0)]
    verdicts = [by.judge(i, each, look=lambda: None, without=lambda _: attempts[0]) for i, each in enumerate(attempts)]
    assert [each.skip for each in verdicts] == [False, False, True, False, False]


def test_a_resumed_guard_goes_on() -> None:
    first, second = (guard(grad_norm_guard_window=4) for _ in range(2))
    for norm in (1.0, 1.2, 0.8, 1.1):
        first.judge(norm)
    second.load_state_dict(first.state_dict())
    assert second.limit == first.limit


def recovery(**keys: object) -> Recovery:
    return Recovery(plan(nonfinite="skip", **keys), cast(Any, None), cast(Any, None))


def judge(by: Recovery, step: int, *, bad: bool) -> Attempt:
    """The verdict on a step; a bad one has no token that counts."""
    attempt = Attempt(loss=1.0, weight=0.0 if bad else 1.0, norm=1.0, reports={})
    return by.judge(step, attempt, look=lambda: None, without=lambda _: attempt)


def test_limits_on_bad_steps() -> None:
    first = recovery(max_bad_steps_in_a_row=3, max_bad_steps=4)
    for number, is_bad in enumerate([True, True, False, True]):
        assert judge(first, number, bad=is_bad).bad == is_bad
    with pytest.raises(StepError, match=r"step 9 is bad, number 4 of the run \(max_bad_steps 4\)\. every token"):
        judge(first, 9, bad=True)
    resumed = recovery(max_bad_steps_in_a_row=3, max_bad_steps=0)
    resumed.load_state_dict({"bad_steps": {"in_a_row": 2, "total": 1000}})
    with pytest.raises(StepError, match=r"step 9 is bad, number 3 in a row \(max_bad_steps_in_a_row 3\)"):
        judge(resumed, 9, bad=True)


def test_a_checkpoint_without_counts_begins_them_afresh() -> None:
    by = recovery(grad_norm_guard="warn", grad_norm_guard_window=2)
    afresh = by.state_dict()
    judge(by, 1, bad=False)
    judge(by, 2, bad=True)
    assert by.state_dict() != afresh
    by.load_state_dict({})
    assert by.state_dict() == afresh


def test_zero_counts_by_parameter() -> None:
    zero = ZeroNonFinite()
    good, bad = torch.ones(3), torch.tensor([1.0, math.inf, math.nan, -math.inf])
    zero("good", good)
    zero("bad", bad)
    assert bad.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert float(zero.total()) == 3
    assert zero.names() == {"bad": 3}
    zero.clear()
    assert float(zero.total()) == 0


def finding(
    microbatch: int, *, backward: bool, distance: int, dp_rank: int = 0, tokens_of: tuple[int, ...] | None = None
) -> Finding:
    return Finding(
        dp_rank=dp_rank,
        microbatch=microbatch,
        backward=backward,
        distance=distance,
        stage=0,
        rank=0,
        what=f"{distance}",
        tokens_of=(dp_rank,) if tokens_of is None else tokens_of,
    )


def test_origins_are_the_first_of_the_forward_else_of_the_backward() -> None:
    found = Findings(
        [
            finding(1, backward=True, distance=2),
            finding(1, backward=True, distance=1),
            finding(2, backward=True, distance=0),
            finding(2, backward=False, distance=3),
            finding(5, backward=False, distance=0),  # an output that did no harm
        ]
    )
    assert found.bad_microbatches() == {0: [1, 2]}
    assert [(f.microbatch, f.backward, f.distance) for f in found.origins()] == [(1, True, 1), (2, False, 3)]


def test_a_spread_expert_tells_whose_tokens_were_bad_only_where_nothing_else_does() -> None:
    shared = [finding(3, backward=True, distance=0, dp_rank=dp_rank, tokens_of=(0, 1)) for dp_rank in (0, 1)]
    explained = Findings([*shared, finding(3, backward=True, distance=4, dp_rank=1)])
    assert explained.bad_microbatches() == {1: [3]}
    assert [f.distance for f in explained.origins()] == [4]
    alone = Findings([*shared[:1], finding(2, backward=True, distance=1)])
    assert alone.bad_microbatches() == {0: [2, 3], 1: [3]}
    assert "micro-batch 3 of one of the data-parallel ranks 0, 1" in str(alone)


def test_many_bad_microbatches_are_counted_not_listed() -> None:
    text = str(Findings([finding(index, backward=True, distance=0) for index in range(10)]))
    assert text.count("micro-batch") == 4
    assert text.endswith("and 6 more")


def test_a_rank_sends_of_its_replaced_elements_what_may_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank had, on a GPU, a place for the longest list of 16,384: 300 MB for 250 names where memory is full."""
    sent: list[object] = []

    def gathered(mine: tuple[list[str], int]) -> list[tuple[list[str], int]]:
        sent.append(mine)
        return [([], 0), mine, mine]

    monkeypatch.setattr(nonfinite, "gathered", gathered)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    zero = nonfinite.ZeroNonFinite()
    for number in range(250):
        zero(f"experts.{number}", torch.tensor([1.0, torch.nan]))
    text = nonfinite.describe(zero)
    assert text.startswith("1 of experts.0 on rank 1, 1 of experts.1 on rank 1") and text.endswith(", and 492 more")
    assert len(str(sent)) < 400
    zero.clear()
    zero("head", torch.tensor([torch.inf, torch.nan]))
    assert nonfinite.describe(zero) == "2 of head on rank 1, 2 of head on rank 1"


def test_counts_of_microbatches() -> None:
    with pytest.raises(StepError, match="rank 1 has 3"):
        too_few([4, 3], [0, 1], wanted=4, policy="error", step=1)
    with pytest.raises(RankDisagreement, match="rank 1: 5"):
        too_few([4, 5], [0, 1], wanted=4, policy="error", step=1)
    with pytest.raises(RankDisagreement, match="data-parallel rank 0 have to agree"):
        too_few([4, 3], [0, 0], wanted=4, policy="pad", step=1)


def test_many_short_ranks_are_counted_not_listed() -> None:
    """Among 16,384 ranks the comparison of each with each took eleven seconds, and the note 142 kB in every log."""
    counts = [3 + rank % 2 for rank in range(16_384)]
    note = too_few(counts, range(16_384), wanted=4, policy="pad", step=1)
    assert note.startswith("of 4 micro-batches rank 0 has 3, rank 2 has 3") and "and 8184 more" in note
    assert len(note) < 200


def test_a_rank_without_any_microbatch_gets_whole_ones() -> None:
    padding = plan(pp_microbatches=4, short_batch="pad", reset_attention_mask=True)
    padded = filled([], padding, padding.batch)
    assert len(padded) == 4
    assert {name: tuple(each.shape) for name, each in padded[0].items()} == {
        "tokens": (1, 64), "labels": (1, 64), "loss_mask": (1, 64), "position_ids": (1, 64),
        "document_starts": (1, 64),
    }  # fmt: skip
    assert not padded[0]["loss_mask"].any()
    assert padded[0]["document_starts"].tolist() == [[True] + [False] * 63]
    whole = plan(pp_microbatches=4, short_batch="pad")
    assert "document_starts" not in filled([], whole, whole.batch)[0]


OURS = {
    "tokens": torch.tensor([[5, 6]]), "labels": torch.tensor([[6, 7]]), "loss_mask": torch.ones(1, 2),
    "num_tokens": torch.tensor(2), "position_ids": torch.tensor([[0, 1]]),
}  # fmt: skip
LEAST = {name: OURS[name] for name in ("tokens", "labels", "loss_mask")}
MOST = OURS | {"document_starts": torch.tensor([[True, False]]), "lengths": torch.tensor([2])}
WITH_MORE, OTHER = OURS | {"image": torch.tensor(math.nan)}, {"x": 1}


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize(
    ("mine", "refused"),
    [([OURS], False), ([LEAST, MOST], False), ([OURS, OTHER], True), ([WITH_MORE], True), ([(1,)], True)],
)
def test_a_rank_without_any_makes_dummies_of_our_format_alone(
    monkeypatch: pytest.MonkeyPatch, mine: list[Any], refused: bool, others: bool
) -> None:
    """Here this rank says what its format is, and another one whether it has none."""
    answers = iter((others, False))
    monkeypatch.setattr(short_batch, "any_rank", lambda flag: next(answers) or bool(flag))
    if refused and others:
        with pytest.raises(StepError, match="a rank without any cannot make one of your format"):
            check_can_pad(mine, "rank 1 has none")
    else:
        check_can_pad(mine, "rank 1 has none")


def test_the_last_ones_of_a_short_rank_are_of_its_own_shape_and_weigh_nothing() -> None:
    padding = plan(pp_microbatches=4, short_batch="pad")
    padded = filled([OURS, OURS], padding, padding.batch)
    assert padded[:2] == [OURS, OURS] and len(padded) == 4
    for each in padded[2:]:
        assert {name: each[name].tolist() for name in OURS} == {
            "tokens": [[0, 0]], "labels": [[0, 0]], "loss_mask": [[0, 0]], "num_tokens": 0, "position_ids": [[0, 1]],
        }  # fmt: skip


def test_what_runs_in_place_of_a_bad_microbatch() -> None:
    """A dummy of ours; of another format a healthy one, and of a user's additional field too, which may be the bad one.
    Without a healthy one, a dummy if the format is known, else the bad one again."""
    for known in (LEAST, MOST):
        assert not stand_in(known, OURS)["loss_mask"].any()
    dummy = stand_in(OURS | {"labels": None}, OURS)
    assert dummy["labels"] is None and not dummy["tokens"].any() and not dummy["loss_mask"].any()
    assert dummy["position_ids"] is OURS["position_ids"] and OURS["tokens"].all()
    assert stand_in(WITH_MORE, OURS) is OURS
    assert not stand_in(WITH_MORE, None)["loss_mask"].any()
    assert stand_in(OTHER, OURS) is OURS and stand_in((1,), OURS) is OURS
    assert stand_in(OTHER, None) is OTHER
