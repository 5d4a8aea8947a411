"""The public step: exact accumulated steps of the user's own model, loss and loop.

from megaaccum import Plan, initialize

plan = Plan.of(layout=dict(pp=2), batch=dict(micro_batch_size=1, seq_length=4096, grad_accum_steps=8))
engine = initialize(plan, chunks, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
for microbatches in batches:
    result = engine.train_step(microbatches)  # or forward_backward(...), any number of times, and optim_step()
    print(result.loss, result.grad_norm)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megaaccum import sharding
from megaaccum.checkpoint import resume, save_load, whole
from megaaccum.checkpoint.folders import read_progress
from megaaccum.config import Plan
from megaaccum.config.batch import BatchPlan
from megaaccum.config.keys import group_rates, unseen
from megaaccum.distributed import groups as process_groups
from megaaccum.distributed.agreement import any_rank, assert_same_on_ranks, raise_on_all_ranks
from megaaccum.distributed.groups import Groups
from megaaccum.distributed.start import groups_of, start_together
from megaaccum.errors import CheckpointError, ConfigError, DataError, MegaaccumError, RankDisagreement, StepError
from megaaccum.model import names, router_state
from megaaccum.model.torch_chunk import TorchChunk
from megaaccum.observe.observer import Observer
from megaaccum.optim import by_pattern, lr_schedule
from megaaccum.optim.chosen import OptimizerFactory, keep_decays, no_optimizer, optimizer_of
from megaaccum.step import call_agreement, chunk_config, evaluation
from megaaccum.step.loss import ForwardStepFunc, ReportReducer, Reports
from megaaccum.step.recovery import Attempt
from megaaccum.step.result import StepResult
from megaaccum.step.speculation import SpeculativeTrainStep
from megaaccum.step.train_step import TrainStep
from megaaccum.step.transaction import Transaction
from megaaccum.upstream import adam

_HARMLESS = (ConfigError, DataError, RankDisagreement, StepError)
"""Errors that every rank raises together before anything has changed; the engine can be used after them. In the middle
of a step's flush or update the user's code has raised them, and the engine has failed as after any other."""


def initialize(
    plan: Plan,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    forward_step_func: ForwardStepFunc | None = None,
    groups: Groups | ProcessGroupCollection | None = None,
    optimizer: OptimizerFactory | None = None,
    reports: Mapping[str, str] | None = None,
) -> Engine:
    """An engine over a model; collective over the world.

    Args:
        plan: how ranks and batch are cut (`Plan.load`, `Plan.of`).
        model: this rank's Megatron chunks in the order of the schedule (in a V, chunk 0 is stage `rank` and chunk 1
            stage `2 * pp - 1 - rank`), or, without a pipeline, one torch module. Its parameters may be of any dtype
            that the sharding backend takes; they are the initial weights, the same on all data-parallel ranks.
        forward_step_func: Megatron's, `(data_iterator, chunk) -> (output, loss_func)`, where `loss_func(output)`
            returns (sum of the losses, weight of that sum, reports). Each call may bring another one.
        groups: those of `build_groups(plan)`, or Megatron's ProcessGroupCollection of the layout; default: those of
            `parallel_state` where it is initialised, else they are built from the plan.
        optimizer: a torch optimizer, or a function that builds one from parameters; default: AdamW by the plan's
            `optimizer` section, which then needs `lr`. A model without trained parameters on any rank (a reference
            model) has none.
        reports: how each report of the loss functions is reduced: `mean` (the default: by weight; of Megatron's pair
            [sum, count] the quotient of sums), `sum` (the default of a whole number, a count), or `microbatch` (as it
            is, on ranks of the last stage).

    Starts torch.distributed from the launcher's environment where nothing has yet; without a launcher the world is one
    rank. Raises ConfigError on every rank where groups, chunks, their configuration and the plan do not fit together.
    """
    start_together(plan)
    built = groups_of(plan, groups)
    chunks: list[torch.nn.Module] = [TorchChunk(model)] if isinstance(model, torch.nn.Module) else [*model]
    with built.current(), torch.enable_grad():
        chunk_config.prepare_together(plan, built, chunks)
        by_pattern.freeze(plan, chunks)
        return Engine(plan, built, chunks, forward_step_func, optimizer=optimizer, reports=reports)


class Engine:
    """Takes exact accumulated optimizer steps. Made by `initialize`; every method is collective over the world.

    plan: the plan it was made of. groups: this rank's process groups. chunks: the model, which the engine's schedules
    run.

    An engine is idle, has an open step (after `forward_backward`, until `optim_step`), or has failed:

    | method | idle | open step | failed |
    | --- | --- | --- | --- |
    | `train_step` | takes a step | StepError | StepError |
    | `forward_backward` | opens a step | adds to it | StepError |
    | `optim_step` | StepError | ends it; drops it, if a loss function gave something wrong | StepError |
    | `forward`, `evaluate` | run | run, and leave it open | StepError |
    | `trial` | makes a gradient and drops it | StepError | StepError |
    | `gather_ahead` | begins the gather of the next step | nothing: parameters are whole | StepError |
    | `save` | writes a checkpoint | writes the state of before it, and leaves it open | writes, or StepError * |
    | `load` | loads | drops its gradients, then loads | loads, but the engine stays failed |
    | `whole_weights` | streams the weights | streams those of before it, and leaves it open | streams, or StepError * |
    | `load_weights` | replaces the weights | drops its gradients, then replaces | StepError |

    * StepError if an update, `load_weights` or `load` failed midway: the weights are those of no step until a `load`.
    After any other failure they, the counters and random states are those of before the step. An engine that only a
    `load` failed refuses all other methods until a `load` succeeds, and then continues.

    A ConfigError, DataError, RankDisagreement or StepError is raised on every rank before anything has changed and
    leaves the engine idle, or with its open step. Any other error in a step leaves ranks at different places, and so
    does one of these from the user's own code in a step's forwards, backwards or update: the engine has failed, and its
    methods name the error. Any error in the block of a `trial` changes nothing.

    Ranks that wait for one that has failed end when its process does. If the user's code fails on any rank in `forward`
    or `evaluate`, every rank raises its error, and one of these changes nothing; but if ranks wait for each other
    within a forward (tp, cp, ep, `sync: streaming`), it is as in a step. If an optimizer failed on one rank alone, the
    others have made the step: their next call raises the StepError too, but with experts or `speculative_step` ranks
    wait for each other after an update.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        chunks: list[torch.nn.Module],
        forward_step_func: ForwardStepFunc | None,
        *,
        optimizer: OptimizerFactory | None = None,
        reports: Mapping[str, str] | None = None,
    ):
        self.groups, self.chunks, reducer = groups, chunks, ReportReducer(reports)
        self.shape: dict[str, Any] = {}
        """Properties that a checkpoint has to share with this model, beside the names and sizes of its parameters."""
        self._dtypes = {name: param.dtype for name, param in names.named_parameters(chunks)}
        self.trains = any_rank(any(param.requires_grad for chunk in chunks for param in chunk.parameters()))
        """Whether any rank trains a parameter; if none does, the engine has no optimizer."""
        inner = optimizer_of(plan, chunks, optimizer) if self.trains else no_optimizer(plan)
        self._has_schedule = self.trains and plan.config.optimizer.lr and plan.config.run.train_iters
        if optimizer is not None and self._has_schedule:
            raise_on_all_ranks(keep_decays, inner, plan)
        self._unkept = adam.kept_by(inner).others
        self.backend = sharding.build(plan, groups, chunks, inner)
        if self.backend.matrices is not None:
            self.print(self.backend.matrices.summary)
        kind = SpeculativeTrainStep if plan.config.step.speculative_step else TrainStep
        self.train_steps = kind(plan, groups, chunks, self.backend, forward_step_func, reports=reducer)
        self._begin_at_zero(plan)
        self.verified = ""
        """The layout in which this run's step was verified at its start (lab/verification/at_start.py)."""
        self._failed: StepError | None = None

    def _begin_at_zero(self, plan: Plan) -> None:
        """Begin at step 0 of `plan`."""
        self.plan = plan
        self.lr_schedule = lr_schedule.build(self.backend, plan.config, plan.ramp) if self._has_schedule else None
        """Moves on with every committed step; None without `lr` and `train_iters` in the plan."""
        self.train_steps.transaction = Transaction(plan, self.lr_schedule)

    def __repr__(self) -> str:
        return f"Engine at step {self.step} of {self.plan}"

    @property
    def batch(self) -> BatchPlan:
        """The batch of the next step: how many micro-batches it takes. It changes with the plan's batch warm-up."""
        return self.train_steps.transaction.batch

    @property
    def step(self) -> int:
        """Steps whose samples were consumed."""
        return self.train_steps.transaction.step

    @property
    def consumed_samples(self) -> int:
        """Sequences of those steps, over all ranks, as the plan cuts the batch: a step of more or fewer micro-batches
        counts as a planned one."""
        return self.train_steps.transaction.consumed_samples

    @property
    def trained_buffers(self) -> dict[str, torch.Tensor]:
        """{name in the whole model: tensor} of state that is no parameter, as it is now (expert biases)."""
        return dict(names.named_buffers(self.chunks))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The trained buffers and the scales of FP8."""
        return self.trained_buffers | self.train_steps.fp8.tensors

    @property
    def observer(self) -> Observer:
        """The meter of this rank's steps: seconds by phase, bytes, memory."""
        return self.train_steps.observer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; a schedule of the user's own may set their `lr` between steps."""
        return self.backend.param_groups

    def print(self, text: str) -> None:
        """Print a line on global rank 0."""
        if torch.distributed.get_rank() == 0:
            print(text, flush=True)

    # --- steps ---

    def train_step(
        self,
        microbatches: Sequence[Any],
        *,
        stop: bool = False,
        problem: MegaaccumError | None = None,
        upcoming: Sequence[Any] | None = None,
    ) -> StepResult:
        """One optimizer step on this rank's micro-batches of it: `engine.batch.num_microbatches`.

        Args:
            microbatches: a list; one `next(data_iterator)` of the forward step function returns one element.
            stop: this rank asks to stop after the step; every rank's result then says so.
            problem: why this rank cannot take the step, raised on every rank before any begins.
            upcoming: with `speculative_step`, the list that the next call will be given, or None, on every rank alike.
                Where it can, the next step begins before this one's verdict. It is then too late for its `problem`,
                which keeps the step after it from beginning early.

        The step is judged as the plan's `step` section says (skip, zero, drop a micro-batch, end the run), and rolled
        back where it does not count. Raises StepError, RankDisagreement, or `problem`, on every rank.
        """
        with self._guarded(trains=True):
            return self.train_steps.train(microbatches, stop=stop, problem=problem, upcoming=upcoming)

    def gather_ahead(self) -> None:
        """Start the next step's gather of parameters (ZeRO-3, `sync: resident`) early, so that it overlaps reading data
        or logging. Until that step, an evaluation, `save` or `load`, nothing else may read or write the chunks'
        parameters. Call it on every rank or on none."""
        with self._guarded(agrees=False), self.observer.watching():
            self.observer.phase("gather")
            self.backend.gather_ahead()

    def forward_backward(
        self,
        data: Sequence[Any] | Iterator[Any] | list[Iterator[Any] | None],
        num_microbatches: int | None = None,
        *,
        forward_step_func: ForwardStepFunc | None = None,
        weights: Sequence[float] | None = None,
        total_weight: float | None = None,
        expected_tokens: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Add the gradients of some micro-batches to those of the step. Any number of calls make a step.

        Args:
            data: a list of micro-batches (a bad step can then be run again), an iterator, or Megatron's list of
                iterators, one per chunk (None where a stage reads nothing).
            num_microbatches: how many to take, of a list its first ones; needed with iterators, and at most the
                batch's. The same on every rank.
            forward_step_func: instead of the engine's.
            weights: of each micro-batch, where known before the forward.
            total_weight: N of the whole step, over all calls and ranks, where known: the loss is then divided before
                the backward, which is exact for balancing losses too if the step has as many micro-batches as planned
                (otherwise its `note` says by how much they are off). Else gradients are sums until `optim_step`.
            expected_tokens: the expected weight of a micro-batch, by which a balancing loss of experts is weighed while
                N is not known. Default: its `weights`, else all its tokens.
            lengths: tokens per sequence of each micro-batch, with `variable_seq_lengths` and micro-batches that are no
                dicts with `tokens` or `input_ids`; needed on one stage of each pipeline.

        The call that completes the `engine.batch` micro-batches of a step reduces gradients inside its last backward.
        """
        with self._guarded(trains=True):
            try:
                batch = self.train_steps.batch_of(
                    data, forward_step_func, count=num_microbatches, weights=weights, expected=expected_tokens,
                    lengths=lengths,
                )  # fmt: skip
                if self.plan.config.batch.static_graph and len(batch) != self.batch.num_microbatches:
                    raise ConfigError(
                        f"static_graph true: a call takes the {self.batch.num_microbatches} micro-batches of a step,"
                        f" not {len(batch)}: give it all of them, or set static_graph to false"
                    )
                if not 0.0 <= (known := float(total_weight or 0.0)) < float("inf"):
                    raise ConfigError(f"total_weight is {known}: give the sum of all weights, finite and not negative")
            except ConfigError as error:
                self.train_steps.agree_on_call("forward_backward", error)
                raise
            self.train_steps.forward_backward(batch, total=None if total_weight is None else known)

    def optim_step(self, *, stop: bool = False, problem: MegaaccumError | None = None) -> StepResult:
        """End the step: reduce what is left, divide once, judge, update. Raises as `train_step` does."""
        with self._guarded():
            return self.train_steps.optim_step(stop=stop, problem=problem)

    def forward(
        self,
        data: Sequence[Any] | Iterator[Any] | list[Iterator[Any] | None],
        num_microbatches: int | None = None,
        *,
        forward_step_func: ForwardStepFunc | None = None,
        lengths: Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> list[Reports]:
        """Run micro-batches without gradients or dropout. Returns what their loss functions report (the third value),
        in order, on the ranks of the last stage; elsewhere an empty list, or with `broadcast` the same reports on every
        rank of the pipeline. Every rank runs as many. The open step, if any, is left as it is."""
        with self._guarded():
            read = self.train_steps.agreed_batch
            batch = read("forward", None, data, forward_step_func, count=num_microbatches, lengths=lengths)
            reports = evaluation.forward(self.train_steps, batch).reports
            last = 0 if self.plan.layout.placement == "v" else self.groups.pp.size() - 1
            return process_groups.share_reports(reports, self.groups.pp, last) if broadcast else reports

    def evaluate(self, microbatches: Sequence[Any], problem: MegaaccumError | None = None) -> tuple[float, float]:
        """(loss, weight) of micro-batches without gradients or dropout, over all ranks; the same on every rank."""
        with self._guarded():
            return evaluation.evaluate(self.train_steps, microbatches, problem)

    @contextmanager
    def trial(
        self,
        microbatches: Sequence[Any],
        *,
        batch: BatchPlan | None = None,
        sample_index: Callable[[int], int] | None = None,
    ) -> Iterator[Attempt]:
        """The next step's gradient, reduced over all ranks, which `backend.shards` show inside. At the end everything
        is as it was: weights, optimizer, random states, counters.

        Args:
            microbatches: this rank's, of the next step or of another cut of it.
            batch: how they are cut; default `engine.batch`.
            sample_index: the number in the global batch of each, if it is not the planned one.
        """
        with self._guarded(trains=True), self.observer.watching():
            opened, attempt = self.train_steps.gradient(microbatches, batch=batch, sample_index=sample_index)
        with self.groups.current(), torch.enable_grad():
            try:
                yield attempt
            finally:
                self.train_steps.drop(opened)
                router_state.begin_step(self.chunks)

    @contextmanager
    def _guarded(self, *, trains: bool = False, agrees: bool = True) -> Iterator[None]:
        """Raise if the engine has failed before, unless the call begins with an agreement that tells the other ranks;
        record an error inside that makes it a failed engine. Megatron's parallel_state holds this engine's groups
        inside."""
        if self._failed is None:
            self.train_steps.refuse_partial_update()
        elif not agrees or self.train_steps.failure is None:
            raise self._failed
        if trains and not self.trains:
            raise ConfigError(
                "the model has no trained parameter, so this engine runs forward and evaluate alone: set requires_grad"
                " of what is to be trained, and initialize another engine"
            )
        try:
            with self.groups.current(), torch.enable_grad():
                yield
        except BaseException as error:
            if self._failed is None and (self.train_steps.amid or not isinstance(error, _HARMLESS)):
                why = f"the engine failed before ({type(error).__name__}: {error}) and cannot continue"
                self._failed = StepError(f"{why}: start again from a checkpoint")
                # The other ranks are about to make the next call. After another error they may wait for this one.
                self.train_steps.failure = self._failed if self.train_steps.amid == "update" else None
            raise

    # --- state ---

    def state(self) -> dict[str, Any]:
        """Counters, loss scale, guards, noise scale and what the optimizer is, as numbers and texts; the same on every
        rank."""
        config, steps = self.plan.config, self.train_steps
        kept: dict[str, Any] = {"train_step": steps.recovery.state_dict(), "verified": self.verified}
        kept |= {"optimizer": config.optimizer.optimizer, "group_rates": group_rates(config), "model": unseen(config)}
        if steps.noise_scale is not None:
            kept["noise_scale"] = list(steps.noise_scale.steps)
        return steps.transaction.state_dict() | kept

    def progress(self, data: Mapping[str, Any] | None = None) -> save_load.Progress:
        """A checkpoint's record beside its tensors. data: which samples come in which order."""
        return save_load.Progress(
            step=self.step,
            consumed_samples=self.consumed_samples,
            lr_schedule={} if self.lr_schedule is None else self.lr_schedule.state_dict(),
            data=dict(data or {}),
            shape=self.shape,
            transaction=self.state(),
            batch_ramp=self.plan.ramp_state(),
        )

    def save(self, folder: str | os.PathLike[str], *, keep_last: int = 0) -> Path:
        """Write a checkpoint into `folder` and make it the current one; returns where. keep_last: how many checkpoints
        of the folder are kept, 0 for all; of one step the last is. Raises CheckpointError on every rank when any could
        not write."""
        raise_on_all_ranks(resume.check_kept, self._unkept)
        with self.groups.current(), self.train_steps.before_open():
            return save_load.save(
                folder, self.backend, self.groups, self.progress(), keep_last=keep_last, buffers=self.buffers
            )

    def load(self, folder: str | os.PathLike[str]) -> bool:
        """Load the current checkpoint of `folder`: weights, optimizer, schedule, counters, random states; without
        trained parameters the weights alone. Returns whether there is one. The layout may differ from that of the save.
        A damaged checkpoint is reported, and the one before it is loaded. Raises CheckpointError, or ConfigError if
        these ranks cannot take its batch warm-up, on every rank, with the engine as it was, without its open step; any
        other error leaves weights of no step. With `no_load_optim` the optimizer and its schedule begin; `load_step`
        names the checkpoint, and with `no_load` nothing is loaded."""
        run = self.plan.config.run
        raise_on_all_ranks(resume.check_kept, self._unkept)
        if run.finetune or run.reset_iteration:
            raise ConfigError(
                "finetune and reset_iteration are keys of `megaaccum train`, but Engine.load continues at the"
                " checkpoint's step: leave them out, and to begin at step 0 give weights to engine.load_weights"
            ).printed_once()
        with self.groups.current():
            self.train_steps.abandon()
            if run.no_load:
                return False
            return resume.first_good(folder, self._load, self.print, step=run.load_step) is not None

    def _load(self, checkpoint: Path) -> Path:
        progress = raise_on_all_ranks(read_progress, checkpoint)
        differences = self.differences(progress) if self.trains else {}
        if self.trains and ("batch" in self.override or not differences["batch"]):  # if not, that is what is refused
            raise_on_all_ranks(self.plan.continued, progress.batch_ramp, progress.consumed_samples)
        only_weights = not self.trains or self.plan.config.run.no_load_optim
        notes = self.load_tensors(checkpoint, differences, only_weights=only_weights)
        if self.trains:
            self.resume(progress, with_optimizer=not only_weights)
        self.train_steps.settle()
        for note in notes:
            self.print(note)
        return checkpoint

    def load_tensors(
        self, checkpoint: Path, differences: Mapping[str, Mapping[str, str]], *, only_weights: bool
    ) -> list[str]:
        """Load weights and buffers and, unless `only_weights`, the optimizer's state, if `override` permits the
        `differences` of the checkpoint. Returns a note on each; the caller resumes and settles the step. Raises
        CheckpointError on every rank, with nothing changed."""
        notes: list[str] = []
        if only_weights:
            differences = {name: each for name, each in differences.items() if name not in ("lr_schedule", "optimizer")}
        before, self.train_steps.amid = self.train_steps.amid, "weights"
        try:
            save_load.load(
                checkpoint, self.backend, self.groups, shape=self.shape, buffers=self.buffers,
                only_weights=only_weights, new_momenta="optimizer" in self.override,
                check=lambda: notes.extend(resume.check_differences(checkpoint, differences, self.override)),
            )  # fmt: skip
        except CheckpointError:
            self.train_steps.amid = before
            raise
        return notes

    def whole_weights(
        self, *, dtype: torch.dtype | None = None, rank: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the whole model, tensor in host memory) of every parameter and trained buffer over all ranks, in any
        layout. One parameter is under way at a time, so no rank holds the model unless the caller keeps it.

        Args:
            dtype: of all tensors, as in `torch.float32` for the masters of a BF16 model; default: as in the model.
            rank: the global rank that is given the tensors, the others nothing; default: every rank.

        Every rank has to run the iterator to its end. Raises RankDisagreement if ranks give other options.
        """
        assert_same_on_ranks("the options of whole_weights", f"rank {rank}, dtype {dtype}")
        if rank is not None and rank not in range(ranks := torch.distributed.get_world_size()):
            raise ConfigError(f"whole_weights: rank {rank} is none of the {ranks} ranks").printed_once()
        if any_rank(self.train_steps.amid != "" or call_agreement.is_written(self.train_steps)):
            raise_on_all_ranks(self.train_steps.refuse_partial_update)
            call_agreement.refuse_edits(self.train_steps)
        with self.groups.current():
            weights = whole.WholeWeights(self.backend, self.groups, self._dtypes, self.trained_buffers)
        return self.groups.iterated(weights.stream(dtype=dtype, rank=rank))

    def load_weights(self, weights: whole.Given, *, num_updates: int | None = None) -> None:
        """Replace the weights by those of `whole_weights`, of this or another layout; each rank takes its part of a
        tensor before it asks for the next. Optimizer state and counters stay.

        weights: pairs or a dict, on every rank; a rank may leave out what other stages hold. In place of a tensor, an
        object that reads the parts which a rank asks for. num_updates: the optimizer's state is replaced too, by that
        after this number of updates; `weights` then has its tensors besides, named as in NAME/exp_avg. Raises
        CheckpointError on every rank if a name is missing, unknown or there twice, or a shape differs; the engine has
        then failed.
        """
        with self._guarded(agrees=False):
            self.train_steps.abandon()
            self.train_steps.amid = "weights"
            whole.put(weights, self.backend, self.groups, self.trained_buffers, only_weights=num_updates is None)
            of = self.train_steps.transaction
            of.num_updates = of.num_updates if num_updates is None else num_updates
            self.backend.adopt_state(of.num_updates)
            self.train_steps.settle()

    @property
    def override(self) -> set[str]:
        """Settings in which a checkpoint may differ from the configuration (the key of that name)."""
        run = self.plan.config.run
        return {*run.override, *(["lr_schedule"] if run.override_opt_param_scheduler else [])}

    def differences(self, progress: save_load.Progress) -> dict[str, dict[str, str]]:
        """Settings, besides the layout, that differ from the checkpoint, with how to restore them; by the name under
        which `override` allows them."""
        mine, theirs = self.lr_schedule, progress.lr_schedule
        named = [{"learning-rate schedule (lr and train_iters)": "one" if each else "none"} for each in (mine, theirs)]
        schedule = resume.changed(*named) or (mine.differences(theirs) if mine else {})
        then, config = progress.transaction, self.plan.config
        return {
            "model": resume.changed(unseen(config), then.get("model", {})),
            "optimizer": resume.changed({"optimizer": config.optimizer.optimizer}, {"optimizer": "adam"} | then),
            "batch": self.plan.ramp_differences(progress.batch_ramp),
            "lr_schedule": schedule | resume.changed(group_rates(config), then.get("group_rates", {})),
        }

    def resume(self, progress: save_load.Progress, *, with_optimizer: bool = True) -> None:
        """Continue after `progress`, whose tensors have been loaded. with_optimizer: its LR schedule is loaded too.
        Raises ConfigError on every rank if these ranks cannot continue its batch warm-up."""
        plan = raise_on_all_ranks(self.plan.continued, progress.batch_ramp, progress.consumed_samples)
        if plan is not self.plan:
            self._begin_at_zero(plan)
        if self.lr_schedule is not None and with_optimizer:
            self.lr_schedule.load_state_dict(progress.lr_schedule or {"num_steps": progress.consumed_samples})
        begun = {} if with_optimizer else {"num_updates": 0}
        self.train_steps.transaction.load_state_dict(
            progress.transaction | begun, step=progress.step, consumed_samples=progress.consumed_samples
        )
        self.train_steps.recovery.load_state_dict(progress.transaction.get("train_step", {}))
        if (noise := self.train_steps.noise_scale) is not None:
            noise.steps.clear()
            noise.steps.extend((float(s), float(square)) for s, square in progress.transaction.get("noise_scale", ()))
        self.verified = progress.transaction.get("verified", "")
