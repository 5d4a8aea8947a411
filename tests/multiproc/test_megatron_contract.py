"""The parts of Megatron's two protocols that its own train_step does not call: what a loop by hand makes of them is
what it makes of Megatron's own objects."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext, redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine import BACKENDS, SCHEDULES
from tests.support.megatron_loop import Loop, LoopRig, as_megatron_has_it
from tests.support.parity import VOCAB, Case, microbatches

SMALL = "--num_layers 2 --clip_grad 1.0 "
CELLS = {name: Case(2, flags, SMALL) for name, flags in BACKENDS.items() if name != "fsdp2 streaming"}
ROUNDING = 1e-5


class ByHand:
    """A loop without Megatron's schedules, over this package's objects or over Megatron's."""

    def __init__(self, case: Case, *, ours: bool, per_token: bool = True):
        from megaaccum.distributed import groups
        from megaaccum.loop import wrap
        from megaaccum.pretrain.model import gpt

        plan = case.plan()
        groups.destroy()
        built = groups.build(plan.layout, timeout_minutes=1)
        (self.bare,) = chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
        self.bare.config.calculate_per_token_loss = per_token
        with torch.no_grad():
            for param in self.bare.parameters():
                param.add_(0.01 * built.dp.rank())  # until they are broadcast
        if ours:
            (self.chunk,), self.optimizer = wrap(chunks, built.collection, plan)
        else:
            self.chunk, self.optimizer = _theirs(self.bare, built.collection, plan)
        self.chunk.broadcast_params()
        self.batches = microbatches(plan, built.dp.rank())
        everyone = [batch for rank in range(plan.layout.dp) for batch in microbatches(plan, rank)]
        self.tokens = float(sum(batch["loss_mask"].sum() for batch in everyone))

    def backward(self, batch: dict[str, torch.Tensor]) -> float:
        losses = self.chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = (losses.float() * batch["loss_mask"]).sum()
        self.optimizer.scale_loss(loss).backward()
        return float(loss.detach())

    def leave(self) -> None:
        """A backward of a step that is not taken."""
        with self.chunk.no_sync():
            self.backward(self.batches[0])

    def step(self, *, start: bool = False) -> tuple[float, float]:
        """(this rank's loss, gradient norm). start: every backward is inside no_sync, and start_grad_sync is called."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        last = len(self.batches) if start else -1
        with self.chunk.no_sync():
            loss = sum(map(self.backward, self.batches[:last]))
        loss += sum(map(self.backward, self.batches[last:]))
        if start:
            self.chunk.start_grad_sync()
        self.chunk.finish_grad_sync()
        self.chunk.scale_gradients(1.0 / self.tokens)
        success, norm, _ = self.optimizer.step()
        assert success
        return loss, float(norm)


def _theirs(bare: Any, collection: Any, plan: Any) -> tuple[Any, Any]:
    """Megatron's DistributedDataParallel and optimizer, which has AdamW too."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from megaaccum.optim import adamw
    from megaaccum.platform import cpu

    inner = adamw.build(plan, [bare])
    ddp = DistributedDataParallel(
        bare.config, DistributedDataParallelConfig(overlap_grad_reduce=True), bare, pg_collection=collection
    )
    with cpu.cuda_type_names():
        made = FP32Optimizer(inner, OptimizerConfig(optimizer="adam", clip_grad=1.0), lambda *_: None)
    made.grad_stats_parallel_group = collection.mp
    return ddp, made


def numbers(case: Case, *, ours: bool) -> list[float]:
    """Losses and norms of steps taken in every way of the protocol, and of one that resumes from a state."""
    from megaaccum.platform import cpu

    with nullcontext() if ours else cpu.cuda_type_names():  # Megatron's clipping asks for it
        loop = ByHand(case, ours=ours)
        found = [*loop.step()]
        loop.leave()
        found += [*loop.step(start="fsdp2" not in case.layout), *loop.step()]
        weights, state = copy.deepcopy(
            (loop.chunk.state_dict(), loop.optimizer.state_dict())
        )  # Megatron's are no copies
        fourth = loop.step()
        again = ByHand(case, ours=ours)
        again.chunk.load_state_dict(weights)
        again.optimizer.load_state_dict(state)
        assert again.step() == fourth
    scale = loop.optimizer.get_loss_scale()
    assert scale.shape == (1,)
    return [*found, *fourth, float(scale)]


def all_numbers(cells: list[Case]) -> list[list[float]]:
    """Megatron's own first."""
    return [numbers(cells[0], ours=False), *(numbers(case, ours=True) for case in cells)]


@pytest.fixture(scope="module")
def measured() -> dict[str, list[list[float]]]:
    """Every rank's numbers, for each backend and for Megatron's own objects."""
    by_rank = run_ranks(all_numbers, 2, list(CELLS.values()), timeout=150)
    return dict(zip(["theirs", *CELLS], map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize("name", CELLS)
def test_a_loop_by_hand(name, measured):
    for mine, theirs in zip(measured[name], measured["theirs"], strict=True):
        assert mine == pytest.approx(theirs, rel=ROUNDING)


def with_a_step_that_stays(case: Case) -> list[float]:
    """By mistake what a step that was not taken has left is kept."""
    from megaaccum.loop.contract import LoopStep

    with patch.object(LoopStep, "abandon", lambda self: None):
        loop = ByHand(case, ours=True)
        loop.step()
        loop.leave()
        return list(loop.step(start=True))


def test_gradients_that_are_not_dropped_are_seen(measured):
    kept = run_ranks(with_a_step_that_stays, 2, CELLS["ddp"], timeout=60)
    assert abs(kept[0][1] / measured["theirs"][0][3] - 1) > 100 * ROUNDING


# --- N of a loop by hand ---------------------------------------------------------------------------------------------


def norm_over(total: float, *, ours: bool) -> float:
    """The gradient's norm of a loop by hand that weighs its tokens."""
    from megaaccum.platform import cpu

    with nullcontext() if ours else cpu.cuda_type_names():
        loop = ByHand(CELLS["ddp"], ours=ours)
        loop.tokens = total
        return loop.step()[1]


@pytest.mark.parametrize("total", [12.5, 0.75, 2.0**25 + 1])
def test_the_weights_of_a_loop_by_hand_need_not_be_whole(total):
    theirs, *_ = run_ranks(norm_over, 2, total, ours=False, timeout=60)
    assert run_ranks(norm_over, 2, total, ours=True, timeout=60) == pytest.approx([theirs] * 2, rel=ROUNDING)


def scaled_means() -> str:
    from megaaccum.errors import ConfigError

    loop = ByHand(CELLS["ddp"], ours=True, per_token=False)
    try:
        loop.step()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_factor_on_means_is_refused():
    assert all("calculate_per_token_loss" in text for text in run_ranks(scaled_means, 2, timeout=60))


def sums_of_the_last_stage() -> str:
    from megaaccum.errors import RankDisagreement
    from tests.multiproc.test_engine_inputs import chunk_of
    from tests.multiproc.test_engine_states import BATCH

    stage = torch.distributed.get_rank()
    try:
        wrapped_chunk(chunk_of(stage), BATCH, dict(layout=dict(pp=2)), torch.optim.AdamW, per_token=stage == 1)
    except RankDisagreement as error:
        return str(error)
    return ""


def test_stages_that_differ_in_what_a_loss_is_are_refused():
    texts = run_ranks(sums_of_the_last_stage, 2, timeout=60)
    assert all("calculate_per_token_loss in the chunks' config" in text for text in texts), texts


# --- errors that the loop catches ------------------------------------------------------------------------------------


def after_errors(mode: str) -> dict[str, Any]:
    """Texts and steps after an error in a flush's first forward or last backward, and in an optimizer's update."""
    from tests.multiproc import test_engine_states as states
    from tests.multiproc.test_engine_inputs import batches, chunk_of, forward_step, said

    armed: list[str] = []

    def breaks(at: str) -> None:
        if at in armed:
            raise ArithmeticError(at)

    def made_of(params):
        inner = torch.optim.AdamW(params, lr=0.01)
        inner.register_step_post_hook(lambda *_: breaks("update"))
        return inner

    def forward(data_iterator, chunk):
        breaks("forward")
        output, loss_func = forward_step(data_iterator, chunk)
        output.register_hook(lambda _: breaks("backward") if data_iterator.__length_hint__() == 0 else None)
        return output, lambda out: (loss_func(out)[0], torch.tensor(4), {})

    def flush(data) -> None:
        run(
            forward_step_func=forward, data_iterator=iter(data), model=chunks, num_microbatches=len(data),
            seq_length=16, micro_batch_size=1,
        )  # fmt: skip

    def failing(at: str, call) -> None:
        armed.append(at)
        with pytest.raises(ArithmeticError):
            call()
        armed.clear()

    torch.manual_seed(torch.distributed.get_rank())
    first, second = batches(), batches()
    due: list[Any] = []
    for fails in (False, True):
        chunks, optimizer, run = wrapped_chunk(chunk_of(0, 1), states.BATCH, states.MODES[mode], made_of)
        if fails:
            failing("forward", lambda: flush(first))
            due.append((*optimizer.step()[:2], optimizer._step.transaction.num_updates))
            failing("backward", lambda: flush(first))
            found = {"flush": said(lambda: flush(second)), "step": said(optimizer.step)}
            failing("backward", lambda: flush(first))
            chunks[0].zero_grad_buffer()
            optimizer.zero_grad()
        flush(second)
        due.append(optimizer.step()[:2])
    found["after it was dropped"] = due[0] == due[2]
    found["of a flush without a backward"] = due[1] == (False, 0.0, 0)
    saved = optimizer.state_dict()
    flush(second)
    failing("update", optimizer.step)
    found |= {name: said(getattr(optimizer, name)) for name in ("state_dict", "sharded_state_dict")}
    flush_after = said(lambda: flush(first))
    optimizer.zero_grad()
    found |= {"flush after update": flush_after, "step after update": said(optimizer.step)}
    optimizer.load_state_dict(saved)
    flush(second)
    return found | {"after a load": optimizer.step()[0]}


def wrapped_chunk(chunk: Any, batch: Any, keys: Any, optimizer: Any, *, per_token: bool = True) -> tuple[Any, Any, Any]:
    from megaaccum.config import Plan
    from megaaccum.distributed import groups
    from megaaccum.loop import get_forward_backward_func, wrap

    groups.destroy()
    plan = Plan.of(batch=batch, hidden_size=8, world_size=2, **keys)
    chunk.config.calculate_per_token_loss = per_token
    chunks, inner = wrap([chunk], groups.build(plan.layout, timeout_minutes=1).collection, plan, optimizer=optimizer)
    return chunks, inner, get_forward_backward_func(plan)


@pytest.mark.parametrize("mode", ["zero-2", "zero-3", "zero-3 streaming", "megatron", "fsdp2", "ddp"])
def test_an_error_that_the_loop_catches_leaves_no_part_of_a_sum(mode):
    for found in run_ranks(after_errors, 2, mode, timeout=90):
        assert found.pop("after it was dropped") and found.pop("after a load")
        assert found.pop("of a flush without a backward")
        unfinished = [found.pop(name) for name in ("flush", "step")]
        assert all("a flush has begun its backwards but not ended" in text for text in unfinished), unfinished
        assert len(found) == 4 and all("a change of the weights failed midway" in text for text in found.values()), (
            found
        )


# --- weights from outside ---------------------------------------------------------------------------------------------


def reloaded(case: Case) -> dict[str, bool]:
    """Whether masters and weights are what reload_model_params was asked for: the chunks' weights, and given ones."""
    from megaaccum.model import names

    loop = ByHand(case, ours=True)
    step, named = loop.optimizer._step, dict(names.named_parameters([loop.bare]))

    def masters_are(expected: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(
                piece.tensors["param"].float().cpu(),
                expected[piece.name].float().reshape(-1)[piece.start :][: piece.tensors["param"].numel()],
            )
            for piece in step.backend.state()
        )

    with torch.no_grad():
        for param in named.values():
            param.mul_(1.5)
    stale = masters_are(named)
    loop.optimizer.reload_model_params()
    found = {"stale": stale, "reloaded": masters_are(named)}
    torch.manual_seed(5)
    given = {name: torch.randn(param.shape) for name, param in loop.bare.named_parameters()}
    loop.optimizer.reload_model_params({"model": given})
    in_model = {names.global_name(loop.bare, name): each for name, each in given.items()}
    found["given"] = masters_are(in_model)
    held = loop.chunk.state_dict()
    whole = {names.global_name(loop.bare, name): each for name, each in held.items() if name in given}
    found["weights"] = all(torch.equal(whole[name], each.to(whole[name].dtype)) for name, each in in_model.items())
    return found


def test_weights_that_another_program_wrote_become_the_masters():
    """Masters in FP32 beside weights in BF16: given ones are not rounded."""
    for found in run_ranks(reloaded, 2, Case(2, BACKENDS["zero1"], SMALL, "bf16"), timeout=60):
        assert found == {"stale": False, "reloaded": True, "given": True, "weights": True}


# --- the loss scale ---------------------------------------------------------------------------------------------------


def loss_scales(loop: Loop) -> list[float]:
    """Before a step that is spoiled and after it."""
    rig = LoopRig.of_loop(loop)
    before = float(rig.optimizer.get_loss_scale())
    assert rig.step_of(spoil=True) == (1, False)
    return [before, float(rig.optimizer.get_loss_scale())]


def megatrons_scales(keys: Any) -> list[float]:
    """The state of Megatron's scaler, with the same keys."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    theirs = DynamicGradScaler(
        initial_scale=keys.initial_loss_scale, min_scale=keys.min_loss_scale, growth_factor=2.0, backoff_factor=0.5,
        growth_interval=keys.loss_scale_window, hysteresis=keys.hysteresis,
    )  # fmt: skip
    before = float(theirs.scale)
    theirs.update(torch.ones(1))
    return [before, float(theirs.scale)]


def test_the_loss_scale_is_that_of_megatrons_scaler():
    case = Case(2, SCHEDULES["1f1b"], lane="fp16")
    keys = case.plan().config.step
    assert run_ranks(loss_scales, 2, Loop(case), timeout=60) == run_ranks(megatrons_scales, 1, keys) * 2


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(loop: Loop) -> str:
    from megaaccum.errors import ConfigError

    rig = LoopRig.of_loop(loop)
    try:
        rig.megatrons_step(lambda data, chunk: as_megatron_has_it(data, chunk, per_token=True))
    except ConfigError as error:
        return str(error)
    return ""


def test_megatrons_finalize_under_a_v_is_an_error_on_every_rank():
    texts = run_ranks(refusal, 2, Loop(Case(2, SCHEDULES["zbv"]), finalize="theirs"), timeout=60)
    assert all("with schedule zbv the last stage is on the first" in text for text in texts)


def start_of(case: Case) -> str:
    from megaaccum.errors import ConfigError

    try:
        ByHand(case, ours=True).chunk.start_grad_sync()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_reduction_apart_from_a_backward_is_refused_where_it_cannot_be_had():
    assert all("outside no_sync" in text for text in run_ranks(start_of, 2, CELLS["fsdp2"], timeout=60))


def wrapped(keys: str) -> str:
    """The ConfigError that `wrap` raises for these keys."""
    from megaaccum.errors import ConfigError

    try:
        LoopRig.of_loop(Loop(Case(2, SCHEDULES["zbv"] + keys)))
    except ConfigError as error:
        return str(error)
    return ""


def printed_at_start(case: Case) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        ByHand(case, ours=True)
    return printed.getvalue()


def test_what_the_loop_does_not_get_is_printed_once_at_start():
    first, second = run_ranks(printed_at_start, 2, CELLS["ddp"], timeout=60)
    for words in ("its micro-batches are not run again", "none is dropped", "hang in the schedule before it"):
        assert first.count(words) == 1
    assert second == ""


def test_a_step_that_begins_before_the_verdict_is_refused():
    for text in run_ranks(wrapped, 2, "--speculative_step", timeout=60):
        assert "speculative_step: the next step's micro-batches come after this one's verdict" in text


def test_a_model_on_another_device_than_the_rank_is_refused():
    from megaaccum.errors import ConfigError
    from megaaccum.loop import contract

    plan = Case(1, "").plan()
    contract._check(plan, [torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="move the chunks there first"):
        contract._check(plan, [torch.nn.Linear(2, 2, device="meta")])
