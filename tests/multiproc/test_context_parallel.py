"""Sequences cut over ranks (cp), and torch's fused attention: the gradient of one process with plain attention."""

from pathlib import Path

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_checkpoint import Run, progress
from tests.support.distance import check
from tests.support.parity import Case

CP = "--context_parallel_size 2 "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
PP = "--pipeline_model_parallel_size 2 "
SPLIT = "--grad_accum_steps 2 --pp_microbatches 4 "
FUSED = "--attention_backend fused "
LLAMA = (
    "--num_layers 4 --swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope"
    " --num_query_groups 2 --group_query_attention --disable_bias_linear "
)
SHORT = "--num_layers 4 "
NORMS = ("token", "microbatch")


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_sequences_cut_over_ranks(lane):
    check(
        [
            Case(4, CP + SPLIT, SHORT, lane),
            Case(4, CP + SPLIT, LLAMA + "--micro_batch_size 2 --loss_norm microbatch", lane),
            Case(4, CP + PP + SPLIT, LLAMA, lane),
            Case(4, CP + TP + SPLIT, LLAMA, lane),
            Case(4, CP + PP + SPLIT + "--schedule zbv", SHORT, lane),
            Case(4, CP + SPLIT + "--recompute_granularity full", SHORT, lane),
        ]
    )


def test_sequences_cut_over_ranks_on_every_backend():
    check(
        [
            Case(4, CP + SPLIT + "--zero_stage 1", SHORT),
            Case(4, CP + PP + SPLIT + "--sync streaming", SHORT),
            Case(4, CP + PP + SPLIT + "--backend fsdp2", SHORT),
            Case(4, CP + PP + SPLIT + "--backend megatron", SHORT),
        ]
    )


@pytest.mark.parametrize("lane", ["fp64", "fp32"])
def test_fused_attention(lane):
    check(
        [
            Case(2, PP + SPLIT + FUSED, SHORT, lane),
            Case(2, PP + SPLIT + FUSED + "--schedule zb-h1", LLAMA, lane),
            Case(2, TP + SPLIT + FUSED, LLAMA, lane),
        ]
    )


def test_side_losses_of_cut_sequences():
    experts = "--num_experts 4 --moe_router_load_balancing_type none --disable_bias_linear "
    balanced = "--num_experts 4 --moe_aux_loss_coeff 0.05 --moe_z_loss_coeff 0.01 --disable_bias_linear "
    check([Case(4, CP + PP + SPLIT, SHORT + model) for model in (experts, balanced)])
    check(
        [Case(4, CP + SPLIT, SHORT + balanced + f"--micro_batch_size 2 --loss_norm {norm} ", "fp64") for norm in NORMS]
    )


PREDICTION = "--num_layers 4 --position_embedding_type rope --mtp_num_layers 2 --mtp_loss_scaling_factor 0.5 "


def test_prediction_layers_of_cut_sequences():
    """Megatron's factor for tokens that a shift loses is then of a rank's own part."""
    check([Case(2, CP + SPLIT, PREDICTION + f"--loss_norm {norm} ", "fp64") for norm in NORMS])
    check(
        [
            Case(4, CP + PP + SPLIT + "--schedule dualpipev", PREDICTION, "fp64"),
            Case(4, CP + PP + SPLIT + "--sync streaming", PREDICTION),
            Case(4, CP + TP + SPLIT + "--backend fsdp2", PREDICTION),
        ]
    )


MEANS = Case(2, CP + SPLIT, SHORT + "--loss_norm microbatch")


def weighed_late() -> list[tuple[float, float]]:
    """(loss, norm) of a step whose N is known before the backward, of a trial of it, and of one whose N the loss
    functions give."""
    run = Run.of(MEANS)
    early, _ = run.watched()
    opened, trial = run.train_step.gradient(run.microbatches())
    run.train_step.drop(opened)
    run = Run.of(MEANS)
    run.train_step.forward_backward(run.train_step.batch_of(run.microbatches()), step=1, last=False)
    late = run.train_step.optim_step()
    return [(early.loss, early.norm), (trial.loss, trial.norm), (late.loss, late.grad_norm)]


def test_a_mean_over_microbatches_weighs_each_once():
    """Each cp rank gives the weight of a micro-batch of which it has a part."""
    for early, *others in run_ranks(weighed_late, 2):
        for other in others:
            assert other == pytest.approx(early, rel=1e-6)


def moved(folder: str, there: str, back: str) -> tuple[float, float, float, float]:
    """Loss and norm of step 3 without an interruption; and after a resume by the other layout before it, from where the
    first one takes over after another step."""
    from megaaccum.checkpoint import save_load

    first, second = (Case(2, layout + SPLIT + "--sync resident", SHORT + "--clip_grad 1") for layout in (there, back))

    def resumed(case: Case, path: str) -> Run:
        run = Run.of(case)
        run.load(Path(path))
        return run

    def save(run: Run, path: str, step: int) -> None:
        save_load.save(path, run.backend, run.groups, progress(step), keep_last=1, buffers=run.buffers)

    run = Run.of(first)
    run.step(1)
    save(run, f"{folder}/1", 1)
    run.step(2)
    whole = run.train(step=3, first=3 * run.plan.batch.global_batch_size)
    run = resumed(second, f"{folder}/1")
    run.step(2)
    save(run, f"{folder}/2", 2)
    again = resumed(first, f"{folder}/2").train(step=3, first=3 * run.plan.batch.global_batch_size)
    return whole.loss, whole.grad_norm, again.loss, again.grad_norm


@pytest.mark.parametrize(("there", "back"), [(CP, PP), (PP, CP)], ids=["cp-pp-cp", "pp-cp-pp"])
def test_a_checkpoint_moves_between_cut_and_whole_sequences(tmp_path, there, back):
    for loss, norm, loss_again, norm_again in run_ranks(moved, 2, str(tmp_path), there, back):
        assert (loss_again, norm_again) == pytest.approx((loss, norm), rel=2e-6)
