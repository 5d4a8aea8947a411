"""The public engine over chunks that a user built, with Megatron's forward_step_func: the gradient of one process on
the whole batch, whatever the calls that bring it, and whenever its divisor is known."""

from __future__ import annotations

import traceback
from functools import partial
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import problems
from tests.support.engines import Calls, all_in_calls, engine_of, forward_step
from tests.support.parity import Case, Gradient, Rig

BACKENDS = {
    "zero1": "--zero_stage 1 ",
    "zero3": "",
    "streaming": "--sync streaming ",
    "fsdp2": "--backend fsdp2 ",
    "fsdp2 streaming": "--backend fsdp2 --sync streaming ",
    "megatron": "--backend megatron ",
    "ddp": "--backend ddp ",
}
PP2 = "--pipeline_model_parallel_size 2 --pp_microbatches 8 "
SCHEDULES = {
    "none": "--pp_microbatches 8 ",
    "1f1b": PP2,
    "interleaved": PP2 + "--virtual_pipeline_model_parallel_size 2 ",
    "zb-h1": PP2 + "--schedule zb-h1 ",
    "zbv": PP2 + "--schedule zbv ",
    "dualpipev": PP2 + "--schedule dualpipev ",
}
FOUR_OF_PP2 = "--grad_accum_steps 1 --pp_microbatches 4 --pipeline_model_parallel_size 2 "
OFF = "--offload_optimizer cpu "
FOUR = "--num_layers 4 "
LAYERS = dict.fromkeys(SCHEDULES, FOUR) | {"none": "--num_layers 2 "}
"""Two layers or more where a rank has one chunk."""
SIZES = {"interleaved": (2, 4, 2)}
"""Micro-batches of each call; Megatron's interleaved schedule requires multiples of pp."""


def check(cells: list[tuple[Case, Calls]], batch: tuple[int, ...] | None = None) -> None:
    """Each cell on 4 ranks, against one process. batch: the sequences that count, if not all."""
    by_rank = run_ranks(all_in_calls, 4, cells, timeout=60 + 10 * len(cells))
    found = [
        f"{case} {calls}: {problem}"
        for (case, calls), gradients in zip(cells, zip(*by_rank, strict=True), strict=True)
        for problem in problems(case, list(gradients), batch)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_calls_and_a_divisor_that_is_known_last(schedule):
    """3 + 4 + 1 micro-batches in three calls, the last of which fills the plan's number."""
    calls = Calls(SIZES.get(schedule, (3, 4, 1)))
    check([(Case(4, SCHEDULES[schedule] + backend, LAYERS[schedule]), calls) for backend in BACKENDS.values()])


@pytest.mark.parametrize("lane", ["fp64", "bf16", "fp16"])
def test_other_precisions(lane):
    backends = ["--backend ddp ", "--backend fsdp2 "] if lane == "fp64" else ["", "--sync streaming "]
    cells = [
        (Case(4, SCHEDULES[schedule] + backend, LAYERS[schedule], lane), Calls((5, 3)))
        for backend in backends
        for schedule in ("none", "1f1b", "zbv")
    ]
    check(cells)


def known_at_the_end(case: Case, where: str, count: int) -> Gradient:
    """The gradient of a step on `count` micro-batches whose weights the last stage alone knows in advance."""
    engine = engine_of(case, reports={"tokens": "sum"})
    rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    batches, seen = rig.microbatches()[:count], {}
    engine.backend.step = lambda: seen.update(rig.assemble())
    is_last = engine.groups.pp.rank() == engine.groups.pp.size() - 1

    def weights(data):
        return [float(batch["loss_mask"].sum()) for batch in data] if is_last else None

    function = partial(forward_step)
    function.weights = weights
    engine.train_steps.forward_step_func = function
    if where == "call":
        engine.forward_backward(batches, weights=weights(batches))
        result = engine.optim_step()
    elif where == "step":
        result = engine.train_step(batches)
    else:
        _, trial = engine.train_steps.gradient(batches)
        seen = {name: part * trial.factor for name, part in rig.assemble().items()}
        return Gradient(seen, trial.norm, trial.loss, round(trial.reports["tokens"]), engine.groups.tp.rank())
    return Gradient(seen, result.grad_norm, result.loss, round(result.reports["tokens"]), engine.groups.tp.rank())


@pytest.mark.parametrize(("where", "count"), [("call", 8), ("step", 8), ("step", 6), ("trial", 8)])
def test_weights_that_the_last_stage_alone_knows_are_taken_for_unknown(where, count):
    case = Case(2, "--pipeline_model_parallel_size 2 --pp_microbatches 8 --short_batch pad ", FOUR)
    ranks = run_ranks(known_at_the_end, 2, case, where, count, timeout=60)
    assert problems(case, ranks, tuple(range(count))) == []


def test_a_call_after_the_one_that_seemed_the_last():
    """A call that fills the plan's micro-batches reduces in its backward, and has divided by its own weights if they
    are known; the step may go on all the same."""
    cases = [Case(4, FOUR_OF_PP2 + backend, FOUR) for backend in BACKENDS.values()]
    check([(case, Calls((4, 4), known=known)) for case in cases for known in ("", "weights")], tuple(range(16)))


@pytest.mark.parametrize("lane", ["bf16", "fp16"])
def test_a_call_after_the_one_that_seemed_the_last_in_16_bits(lane):
    """DeepSpeed adds a second reduction to the FP32 sums of the first itself; they counted twice."""
    layouts = ["", OFF] + [f"--zero_stage {n} {off}" for n in (1, 2) for off in ("", OFF)]
    check([(Case(4, FOUR_OF_PP2 + each, FOUR, lane), Calls((4, 4))) for each in layouts], tuple(range(16)))


def test_what_is_known_in_advance():
    calls = [Calls((3, 5), known=known) for known in ("weights", "total")] + [Calls((3, 5), iterators=True)]
    cases = [Case(4, SCHEDULES[schedule], LAYERS[schedule]) for schedule in ("none", "1f1b", "zbv")]
    check([(case, each) for each in calls for case in cases])


MOE = (
    "--num_experts 4 --moe_router_topk 2 --disable_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0.1 --moe_z_loss_coeff 0.01 "
)
MTP = "--position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 "


@pytest.mark.parametrize("known", ["total", "expected"])
def test_side_losses_of_several_calls(known):
    """Balancing losses are exact where N is known, or where the expected tokens are those that come on average;
    multi-token prediction is a sum over tokens either way."""
    cases = [
        Case(4, SCHEDULES[name], model + LAYERS[name]) for name in ("none", "1f1b", "zb-h1") for model in (MOE, MTP)
    ]
    check([(case, Calls((3, 5), known=known)) for case in cases])


def test_fp16_at_four_million_tokens():
    """Sums of millions of tokens would drive the loss scale to its floor; a power of two near 1 / N stops that."""
    calls = Calls((3, 5), known="expected", unit=4e6 / 140)
    check([(Case(4, SCHEDULES[schedule], LAYERS[schedule], "fp16"), calls) for schedule in ("none", "1f1b", "zbv")])


def frames_of(flags: str, folder: str) -> dict[str, list[str]]:
    """Names of the functions from the training loop's `train` to the one that calls the pipeline schedule, and to the
    one that calls the user's forward_step_func, on this rank in a run of one step."""
    from megaaccum.cli.train import main
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep
    from megaaccum.step.train_step import TrainStep

    found: dict[str, list[str]] = {}
    init, forward = TrainStep.__init__, GptForwardStep.__call__

    def noted(name: str) -> None:
        names = [frame.name for frame in traceback.extract_stack() if "/tests/" not in frame.filename]
        found.setdefault(name, names[names.index("train", names.index("_train") + 1) :])

    def watch(self, *args, **keys) -> None:
        init(self, *args, **keys)
        schedule = self.schedule

        def call(**arguments):
            noted("schedule")
            return schedule(**arguments)

        if not isinstance(schedule, ForwardBackward):
            self.schedule = call

    def called(self, *args, **keys):
        noted("user")
        return forward(self, *args, **keys)

    def run_flush(self, **arguments):
        noted("schedule")
        return run(self, **arguments)

    from megaaccum.executor.entry import ForwardBackward

    run = ForwardBackward.__call__
    with (
        patch.object(TrainStep, "__init__", watch),
        patch.object(GptForwardStep, "__call__", called),
        patch.object(ForwardBackward, "__call__", run_flush),
    ):
        main([*flags.split(), "--output_dir", folder])
    return found


@pytest.mark.parametrize("schedule", ["none", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_frames_from_the_training_loop_to_the_schedule_and_to_the_users_forward(schedule: str, tmp_path, texts):
    pp = 1 if schedule == "none" else 2
    named = {"none": "", "interleaved": "--virtual_pipeline_model_parallel_size 2"}
    layout = named.get(schedule, f"--schedule {schedule}")
    flags = (
        f"--pipeline_model_parallel_size {pp} {layout} --num_layers 4 --hidden_size 32 --num_attention_heads 2"
        " --seq_length 16 --micro_batch_size 1 --global_batch_size 4 --train_iters 1 --lr 0.001 --no-save-at-end"
        f" --eval_interval 0 --data_cache_path {texts}"
    )
    for found in run_ranks(frames_of, pp, flags, str(tmp_path / "run"), timeout=90):
        assert len(found["schedule"]) <= 4, found["schedule"]
        assert len(found["user"]) <= 9, found["user"]
