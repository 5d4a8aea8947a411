"""Ranks that would do different things end together, with the reason; a rank that runs short joins with weight zero."""

from __future__ import annotations

import pytest

from megaaccum.errors import StepError
from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support.distance import problems
from tests.support.faults import differences, state_of
from tests.support.parity import Case, Gradient, Rig

PIPELINE = "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 "


def odd_one_out(kind: str, rank: int) -> str:
    """The error on this rank if `rank` alone differs in a way named `kind`."""
    import torch

    from megaaccum.errors import MegaaccumError

    odd = torch.distributed.get_rank() == rank
    rig = Rig.of(Case(4, PIPELINE, "--num_layers 4"))
    batches, step = rig.microbatches(), 1
    if odd and kind == "num_microbatches":
        batches = batches[:-1]
    if odd and kind == "too many":
        batches = [*batches, batches[0]]
    if odd and kind == "seq_length":
        batches = [{name: each[:, :8] for name, each in batch.items()} for batch in batches]
    if odd and kind == "step":
        step = 2
    try:
        rig.train_step.train(batches, step=step)
    except MegaaccumError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("num_microbatches", ["RankDisagreement: step 1", "(ranks 0, 1, 2: 8; rank 3: 7)", "data-parallel rank 1"]),
        ("too many", ["RankDisagreement", "rank 3: 9"]),
        ("seq_length", ["RankDisagreement", "only variable_seq_lengths lets differ (ranks 0, 1, 2: 16; rank 3: 8)"]),
        ("step", ["RankDisagreement", "step (ranks 0, 1, 2: 1; rank 3: 2)"]),
    ],
)
def test_one_rank_that_differs_ends_all_with_the_reason(kind, words):
    texts = run_ranks(odd_one_out, 4, kind, 3, timeout=30)
    assert len(set(texts)) == 1
    for word in words:
        assert word in texts[0]


def cut_unevenly(cut: str, lengths: tuple[int, int]) -> str:
    """The error if sequences are cut, and the last micro-batch of each rank has its of `lengths`."""
    import torch

    from megaaccum.errors import MegaaccumError

    keys = f"{cut} --variable_seq_lengths --grad_accum_steps 2 --pp_microbatches 4 "
    rig = Rig.of(Case(2, keys, "--num_layers 2"))
    batches, length = rig.microbatches(), lengths[torch.distributed.get_rank()]
    batches[-1] = {name: each[:, :length] for name, each in batches[-1].items()}
    try:
        rig.train_step.train(batches, step=1)
    except MegaaccumError as error:
        return str(error)
    return "went on"


IN_BLOCKS = "--reproducible layout --reproducible_context_blocks 4"


@pytest.mark.parametrize(
    ("cut", "lengths", "words"),
    [
        (IN_BLOCKS, (8, 16), "went on"),
        (IN_BLOCKS, (8, 12), "12 tokens, which reproducible_context_blocks 4 cuts into 8 equal pieces: pad it to 16"),
        ("--context_parallel_size 2", (12, 12), "went on"),
        ("--context_parallel_size 2", (6, 6), "6 tokens, which context_parallel_size 2 cuts into 4 equal pieces"),
        ("--tensor_model_parallel_size 2 --sequence_parallel", (7, 7), "cuts into 2 equal pieces: pad it to 8"),
    ],
)
def test_a_length_that_is_not_cut_evenly_ends_all_ranks_before_the_step(cut, lengths, words):
    assert all(words in text for text in run_ranks(cut_unevenly, 2, cut, lengths, timeout=30))


def agree_without_a_gather() -> tuple[int, list[int]]:
    """Gathers in a step on which all ranks agree, and what every rank gets where a number is not the usual one."""
    from unittest.mock import patch

    import torch.distributed as dist

    from megaaccum.distributed import agreement

    rank, gathers = dist.get_rank(), []
    gather = dist.all_gather_into_tensor
    with (
        patch.object(
            dist, "all_gather_into_tensor", lambda *args, **keys: (gathers.append(1), gather(*args, **keys))[1]
        ),
        patch.object(dist, "all_gather_object", lambda *args: gathers.append(1)),
    ):
        agreed = agreement.check_agreement("plan", tell={"given": 4, "dp_rank": rank}, usual={"given": 4}, step=1)
        agreement.assert_same_on_ranks("a file", "the same")
        agreement.raise_on_all_ranks(int, "1")
        assert agreed.told == {}
        quiet = len(gathers)
        told = agreement.check_agreement("plan", tell={"given": 4 - rank}, usual={"given": 4}).told
    return quiet, told["given"]


def test_ranks_that_agree_gather_nothing():
    assert run_ranks(agree_without_a_gather, 2) == [(0, [4, 3])] * 2


def what_ranks_tell() -> list[tuple[bool, dict[str, list[int]]]]:
    """One rank wishes to stop; all have as few micro-batches; all wish to stop; a number that is always told."""
    import torch.distributed as dist

    from megaaccum.distributed.agreement import check_agreement

    rank = dist.get_rank()
    given = {"tell": {"given": 3, "dp_rank": rank}, "usual": {"given": 4}}
    agreed = [
        check_agreement("plan", tell={"given": 4}, usual={"given": 4}, stop=rank == 1),
        check_agreement("plan", **given),
        check_agreement("plan", stop=True),
        check_agreement("plan", tell={"rank": rank}),
    ]
    return [(each.stop, each.told) for each in agreed]


def test_what_only_some_ranks_say_and_what_all_say():
    of_rank = [(True, {}), (False, {"given": [3, 3], "dp_rank": [0, 1]}), (True, {}), (False, {"rank": [0, 1]})]
    assert run_ranks(what_ranks_tell, 2) == [of_rank] * 2


def train_with_own_flags(flags: list[str], folder: str) -> None:
    """`megaaccum train`, each rank with flags of its own."""
    import os

    from megaaccum.cli.train import main

    small = "--num_layers 4 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 4 --lr 1e-2"
    batch = "--micro_batch_size 1 --pp_microbatches 4"
    main([*f"{small} {batch} {flags[int(os.environ['RANK'])]}".split(), "--output_dir", folder])


@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [
        ("", "--grad_accum_steps 2", ["grad_accum_steps (rank 0: 1; rank 1: 2)", "batch.grad_accum_steps"]),
        (
            "--schedule 1f1b --pipeline_model_parallel_size 2",
            "",
            ["pipeline_model_parallel_size (rank 0: 2; rank 1: 1)"],
        ),
        ("--lr_decay_style cosine", "", ["lr_decay_style (rank 0: cosine; rank 1: linear)", "same configuration"]),
    ],
)
def test_configurations_that_differ_end_before_the_groups_are_built(tmp_path, usual, odd, words):
    outcomes = try_ranks(train_with_own_flags, 2, [usual, odd], str(tmp_path), init=False, timeout=30)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.kind == "RankDisagreement"
        for word in words:
            assert word in outcome.error.text


# --- a rank that runs short ------------------------------------------------------------------------------------------


def short(case: Case, missing: int) -> tuple[Gradient, str]:
    """The step in which data-parallel rank 1 lacks its last `missing` micro-batches."""
    rig = Rig.of(case)
    batches = rig.microbatches()
    if rig.groups.dp.rank() == 1:
        batches = batches[: len(batches) - missing]
    gradient, result = rig.watched(batches, step=1)
    return gradient, result.note


def all_short(cases: list[Case], missing: int) -> list[tuple[Gradient, str]]:
    return [short(case, missing) for case in cases]


@pytest.mark.parametrize("missing", [3, 8])
def test_padding_is_the_step_on_what_there_is(missing):
    pad = PIPELINE + "--short_batch pad "
    cases = [Case(4, pad), Case(4, pad, lane="fp64"), Case(4, pad, "--loss_norm microbatch", lane="fp64")]
    there = tuple(index for index in range(16) if index % 2 == 0 or index // 2 < 8 - missing)
    by_rank = run_ranks(all_short, 4, cases, missing, timeout=60)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert problems(case, [gradient for gradient, _ in ranks], there) == []
        assert all(f"rank 1 has {8 - missing}, rank 3 has {8 - missing}" in note for _, note in ranks)


def padded_in_another_format(mine: int) -> str:
    rig = Rig.of(Case(2, "--grad_accum_steps 2 --pp_microbatches 1 --short_batch pad", "--num_layers 2"))
    batches = [{**batch, "user_id": 1} for batch in rig.microbatches()]
    try:
        rig.train_step.train(batches[: mine if rig.groups.dp.rank() else None], step=1)
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mine", [0, 1])
def test_a_rank_without_any_microbatch_of_a_users_format_is_an_error_on_every_rank(mine):
    for text in run_ranks(padded_in_another_format, 2, mine, timeout=40):
        assert ("rank 1 has 0" in text and "give it one" in text) if mine == 0 else text == ""


def dropped_or_not() -> list[str]:
    rig = Rig.of(Case(4, PIPELINE, "--num_layers 4 --short_batch drop"))
    batches = rig.microbatches()[: 8 - rig.groups.dp.rank()]
    before = state_of(rig.backend)
    result = rig.train_step.train(batches, step=1)
    seen = [result.note, *differences(before, state_of(rig.backend))] if result.skipped else ["not skipped"]
    rig = Rig.of(Case(4, PIPELINE, "--num_layers 4"))
    try:
        rig.train_step.train(batches, step=7)
    except StepError as error:
        return [*seen, str(error)]
    return seen


def test_drop_skips_the_step_and_error_ends_it():
    for note, text in run_ranks(dropped_or_not, 4, timeout=40):
        assert note == "of 8 micro-batches rank 1 has 7, rank 3 has 7 (short_batch: drop)"
        assert "step 7 needs 8 micro-batches on every rank, but rank 1 has 7, rank 3 has 7" in text
        assert "short_batch to pad or drop" in text


def what_differs() -> tuple[list[list[str]], int]:
    """The different lists of four ranks of two stages, and how many were sent."""
    from unittest.mock import patch

    import torch.distributed as dist

    from megaaccum.distributed.agreement import distinct_values

    with patch.object(dist, "broadcast_object_list", wraps=dist.broadcast_object_list) as sent:
        found = distinct_values([f"layer {dist.get_rank() // 2}"] * 3, None)
    return found, sent.call_count


def test_a_list_that_ranks_share_is_sent_once():
    assert run_ranks(what_differs, 4, timeout=60) == [([["layer 0"] * 3, ["layer 1"] * 3], 2)] * 4
