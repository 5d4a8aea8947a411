"""FP16: the gradient of one process, and an overflow anywhere skips the step everywhere and halves the scale once."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import check, problems
from tests.support.engines import Calls, in_calls
from tests.support.faults import Fault, differences, injected, state_of, weights
from tests.support.parity import Case, Rig
from tests.unit.optim.test_loss_scaler import of_torch, verdicts

PIPELINE = "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 "
TENSOR = "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel --pp_microbatches 4 "
INTERLEAVED = PIPELINE + "--virtual_pipeline_model_parallel_size 2 "
FP16 = "--fp16 --hysteresis 1 --lr 1e-2 --num_layers 4 --hidden_dropout 0.1 --attention_dropout 0.1 "


EXPERTS = (
    "--num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 --moe_aux_loss_coeff 0.01 "
    "--moe_router_dtype fp32 "
)
SPREAD = "--expert_model_parallel_size 2 "
UNTIED = "--untie_embeddings_and_output_weights "


def test_the_gradient_is_that_of_one_process():
    layouts = [PIPELINE + f"--zero_stage {stage}" for stage in (1, 2, 3)]
    layouts += [PIPELINE + "--backend ddp", TENSOR + "--pp_microbatches 8"]
    check([Case(4, layout, "--num_layers 4", "fp16") for layout in layouts])


def test_ranks_may_expect_other_weights():
    """The power of two that keeps the first step's gradients in range is one for all: each rank takes out its own."""
    case = Case(4, PIPELINE + "--zero_stage 1", "--num_layers 4", "fp16")
    assert problems(case, run_ranks(in_calls, 4, case, Calls((3, 5), "expected by rank"), timeout=90)) == []


# Each stage, data-parallel or tensor-parallel rank in turn; first, middle and last micro-batch; inf and nan.
FAULTS = [Fault(0, 0), Fault(1, 3), Fault(2, 7, value=float("nan")), Fault(3, 5)]
TP_FAULTS = [Fault(0, 3), Fault(1, 0), Fault(2, 2), Fault(3, 2, value=float("nan"))]
LAYOUTS = [
    *((PIPELINE + f"--zero_stage {stage}", FAULTS) for stage in (1, 2, 3)),
    (INTERLEAVED, [Fault(0, 2, chunk=1), Fault(3, 6)]),
    (TENSOR, TP_FAULTS),
    (PIPELINE + EXPERTS, [Fault(2, 1, within="experts.local_experts.1.linear_fc2")]),
    (PIPELINE + EXPERTS + SPREAD, [Fault(1, 1, within="experts.local_experts.1.linear_fc2"), Fault(2, 3)]),
    (PIPELINE + "--schedule dualpipev", [Fault(0, 6, chunk=1), Fault(3, 0, chunk=1)]),
    (PIPELINE + "--backend ddp", FAULTS[:1]),
    (PIPELINE + "--zero_stage 2 --offload_optimizer cpu", FAULTS[:1]),
    (PIPELINE + "--zero_stage 3 --offload_optimizer cpu", FAULTS[1:2]),
]


@dataclass(frozen=True)
class State:
    """Everything that a step may change on this rank."""

    masters: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]

    def differences(self, other: State) -> list[str]:
        """Names of tensors and states that are not bit-equal."""
        pairs = [(self.masters, other.masters), (self.weights, other.weights), (self.rng, other.rng)]
        return [name for mine, theirs in pairs for name in differences(mine, theirs)]


def state(rig: Rig) -> State:
    from megaaccum.distributed import rng

    return State(state_of(rig.backend), weights(rig.backend, rig.chunks), rng.snapshot())


def skipped_steps(layout: str, faults: list[Fault]) -> list[str]:
    """Violations on this rank of: each step with a fault, after one without, is skipped, changes nothing, and halves
    the scale once."""
    rig = Rig.of(Case(4, layout, FP16))
    size = rig.plan.batch.global_batch_size
    rig.train(step=0)
    before, problems = state(rig), []
    for number, fault in enumerate(faults, start=1):
        scale = rig.train_step.recovery.scaler.scale
        with injected([fault], rig.chunks):
            result = rig.train(step=number, first=size)
        where = f"{layout} {fault}"
        problems += [] if result.skipped else [f"{where}: not skipped"]
        problems += (
            [] if rig.train_step.recovery.scaler.scale == scale / 2 == result.loss_scale / 2 else [f"{where}: scale"]
        )
        problems += [f"{where}: {what} differs" for what in state(rig).differences(before)]
    return problems


def all_layouts() -> list[str]:
    return [problem for layout, faults in LAYOUTS for problem in skipped_steps(layout, faults)]


def test_an_overflow_anywhere_is_skipped_everywhere_and_changes_nothing():
    assert run_ranks(all_layouts, 4, timeout=240) == [[]] * 4


def run(case: Case, steps: list[Fault | None]) -> State:
    """The state after steps on consecutive global batches, attempt n with fault n in it; a skipped step is taken again,
    with its number (of which dropout draws) and its batch."""
    rig = Rig.of(case)
    step = 0
    for fault in steps:
        with injected([fault] if fault else [], rig.chunks):
            result = rig.train(step=step, first=step * rig.plan.batch.global_batch_size)
        assert result.skipped == (fault is not None)
        step += not result.skipped
    return state(rig)


def with_and_without(cases: list[Case], fault: Fault) -> list[str]:
    """Differences between a run in which `fault` caused a skipped step and a run without that step."""
    return [
        f"{case}: {what}"
        for case in cases
        for what in run(case, [None, fault, None]).differences(run(case, [None, None]))
    ]


def test_the_steps_after_a_skip_are_those_of_a_run_that_never_saw_it():
    # A fixed scale: the dynamic one is halved, which moves what underflows in FP16.
    fixed = FP16.replace("--hysteresis 1", "--loss_scale 1024") + "--nonfinite skip "
    cases = [Case(4, PIPELINE + "--rng megatron", fixed), Case(4, PIPELINE + "--zero_stage 1", fixed)]
    cases += [Case(4, PIPELINE + f"--zero_stage {stage}", fixed[fixed.index("--lr") :], "bf16") for stage in (2, 3)]
    assert run_ranks(with_and_without, 4, cases, FAULTS[1], timeout=200) == [[]] * 4


def to_the_floor() -> list[tuple[float, str]]:
    """Every step overflows, until the run ends: the scale of each and what the end said."""
    from megaaccum.errors import StepError

    rig = Rig.of(Case(4, PIPELINE, FP16 + "--nonfinite skip --initial_loss_scale 8 --min_loss_scale 2"))
    seen = []
    with injected([Fault(3, 5)], rig.chunks):
        for number in range(5):
            try:
                result = rig.train(step=number)
                seen.append((result.loss_scale, result.note))
            except StepError as error:
                seen.append((rig.train_step.recovery.scaler.scale, str(error)))
                break
    return seen


def test_the_floor_ends_the_run_and_says_what_overflowed_where():
    by_rank = run_ranks(to_the_floor, 4, timeout=90)
    assert all(rank == by_rank[0] for rank in by_rank)
    scales, texts = zip(*by_rank[0], strict=True)
    assert scales == (8.0, 4.0, 2.0)
    for words in ("step 2", "loss scale 2", "min_loss_scale", "micro-batch 5 of data-parallel rank 1", "stage 1",
                  "rank 3", "bf16", "inf"):  # fmt: skip
        assert words in texts[2]


def a_verdict_for_each_rank() -> list[bool]:
    """The skip decided by each rank's own gradient (as in deepspeedai/DeepSpeed#994)."""
    from megaaccum.step import grad_norm, world_sums

    def own(sums: list[torch.Tensor]) -> list[float]:
        return [float(each) for each in sums]

    rig = Rig.of(Case(4, PIPELINE, FP16 + UNTIED))
    rig.train(step=1)  # ranks learn the names of reports

    with (
        patch.object(grad_norm, "sums_over_ranks", own),
        patch.object(world_sums, "sums_over_ranks", own),
        injected([Fault(0, 5)], rig.chunks),
    ):
        return [rig.train(step=2).skipped]


def test_a_verdict_for_each_rank_would_be_seen():
    verdicts = {skipped for (skipped,) in run_ranks(a_verdict_for_each_rank, 4, timeout=60)}
    assert verdicts == {True, False}


def test_fifty_steps_of_a_run_have_the_scales_of_torchs_scaler():
    overflows = verdicts(seed=11, share=0.2)
    (scales, skipped), other = run_ranks(fifty_steps, 2, overflows, timeout=150)
    assert (scales, skipped) == other
    assert skipped == overflows
    assert scales == of_torch(overflows, scale=65536.0, window=4)[:-1]


def fifty_steps(overflows: list[bool]) -> tuple[list[float], list[bool]]:
    flags = FP16 + "--loss_scale_window 4 --lr 1e-4 --num_layers 2"
    rig = Rig.of(Case(2, "--pipeline_model_parallel_size 2 --pp_microbatches 4", flags))
    results = []
    for number, overflow in enumerate(overflows):
        with injected([Fault(number % 2, number % 4)] if overflow else [], rig.chunks):
            results.append(rig.train(step=number, first=4 * number))
    return [r.loss_scale for r in results], [r.skipped for r in results]


def resumed_where_few_tokens_count(folder: str) -> tuple[list[str], list[str]]:
    """(names of weights that differ from those of a run without a break after the step that follows a resume; the
    same between two runs without)."""
    from megaaccum import Plan, initialize

    def forward_step(data, model):
        return model(next(data)), lambda output: (output.float().sum() * 2.0**-20, 1, {})

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).half()
        plan = Plan.of(
            batch=dict(micro_batch_size=1, seq_length=64),
            sharding=dict(backend="ddp", fp16=True),
            step=dict(loss_scale=1.0),
        )
        return initialize(plan, model, forward_step_func=forward_step, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))

    def step(engine, number: int) -> None:
        engine.forward_backward([torch.full((1, 8), 0.1 * number, dtype=torch.half)])
        engine.optim_step()

    def whole(engine) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in engine.whole_weights()}

    found = []
    for cut in (False, False, True):
        engine = made()
        for number in (1, 2, 3):
            if cut and number == 3:
                engine.save(folder)
                engine = made()
                assert engine.load(folder)
            step(engine, number)
        found.append(whole(engine))
    uncut, again, resumed = found
    return differences(uncut, resumed), differences(uncut, again)


def test_the_step_after_a_resume_scales_its_loss_as_the_run_without_a_break(tmp_path):
    """Its weight is known at its end: the power of two is that of the last step's, which a checkpoint has to keep."""
    assert run_ranks(resumed_where_few_tokens_count, 1, str(tmp_path), timeout=60) == [([], [])]
