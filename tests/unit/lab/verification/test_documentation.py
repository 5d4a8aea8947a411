"""The example of the page on verification, and the bank's entries as they are written."""

from __future__ import annotations

import ast

from tests.support.snippets import ROOT, blocks_of

BANK = ROOT / "tests" / "bank"


def test_the_linear_model_accumulates_to_rounding():
    names: dict = {}
    (example,) = [block for block in blocks_of(ROOT / "docs/guides/verify.md") if block.runs]
    exec(example.source, names)
    assert (names["N"], names["d"], names["workers"], names["microbatches"]) == (4096, 12, 8, 4)
    assert names["error"] < 5e-15


def test_tokens_and_means_agree_on_equal_shards_alone():
    names: dict = {}
    (example,) = [block for block in blocks_of(ROOT / "docs/guides/verify.md") if block.runs]
    exec(example.source, names)
    assert max(names["equal"]) < 5e-15
    by_tokens, by_means = names["unequal"]
    assert by_tokens < 5e-15
    assert by_means > 0.01


def entries() -> list[tuple[str, str]]:
    """(name, source) of every mistake."""
    found = []
    for path in sorted(BANK.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "mistake":
                        found.append((node.name, ast.literal_eval(call.args[1])))
    return found


def test_the_bank_has_at_least_sixty_mistakes_with_a_source():
    assert len(entries()) >= 60
    assert [name for name, source in entries() if not source.startswith("https://")] == []
    assert len({name for name, _ in entries()}) == len(entries())


ASKED = """
    division_per_stage division_per_chunk accumulation_divided_twice mean_of_means mean_over_own_tokens
    reduction_in_every_microbatch accumulated_after_the_reduction last_microbatch_left_out tied_copy_summed_twice
    tied_copy_not_summed tied_copy_counted_twice norm_per_stage norm_per_partition whole_parameters_counted_per_rank
    sequence_parallel_norms_not_summed prediction_recomputed_over_the_wrong_group balancing_divided_by_ranks
    balancing_by_context_parallel balancing_of_every_microbatch z_loss_of_every_microbatch prediction_not_averaged
    padding_mask_lost bias_moved_by_microbatch experts_over_the_wrong_group one_rank_skips one_stage_does_not_skip
    loss_scale_divided_twice clipped_before_unscaling amax_of_a_chunk_lost amax_of_an_evaluation_kept
    recomputed_with_other_dropout dropout_equal_on_all_ranks weight_gradient_a_step_late
    weight_gradient_of_another_microbatch activation_of_another_microbatch_sent another_stage_in_a_v buffer_not_zeroed
    frozen_parameter_decays norms_decay rate_moves_on_a_skip optimizer_by_microbatch stale_weights accumulation_in_bf16
"""
"""Mistakes that are known to train all the same: the bank may grow, but none of these may go."""


def test_the_bank_keeps_those_that_were_asked_for():
    assert set(ASKED.split()) - {name for name, _ in entries()} == set()
