"""The summary printed at the start of a run: four lines, one for a verification of the start, and on GPUs another."""

from __future__ import annotations

from megaaccum.config import Plan
from megaaccum.config.rules.step import verifies_start
from megaaccum.platform import cpu, gpu
from megaaccum.pretrain.metrics.flops import uncounted
from megaaccum.pretrain.metrics.param_count import count_parameters
from megaaccum.pretrain.metrics.progress import last_step, ranks_of
from megaaccum.pretrain.training.run_folder import checkpoint_folder


def header(plan: Plan, *, sync: str, vocab_size: int, start_step: int) -> str:
    """Summary of ranks, model, batch and length of the run. sync: its sharding mode in words. vocab_size: before
    padding."""
    config, at, batch = plan.config, plan.layout, plan.batch
    run, last = config.run, last_step(config.run, start_step)
    steps = f"steps {start_step + 1} to {last}" if start_step < last else f"no step left after {start_step}"
    count = "uncounted" if uncounted(config) else f"{count_parameters(config, vocab_size).total:,}"
    ramp = "" if plan.ramp.is_constant else f", from {plan.ramp.size_at(0)} sequences over {plan.ramp.num_steps} steps"
    rows = {
        "ranks": f"{at.world_size} = {ranks_of(at)}, schedule {at.schedule}, {sync}",
        "model": f"{count} parameters ({config.sharding.params_dtype}),"
        f" {config.model.num_layers} layers of width {config.model.hidden_size}, vocabulary {vocab_size:,}",
        "batch": f"{batch.global_batch_size} sequences of {batch.seq_length} tokens = micro_batch_size"
        f" {batch.micro_batch_size} * {batch.num_microbatches} micro-batches * dp {at.dp}{ramp}",
        "run": f"{steps}, log in {run.output_dir}, {_checkpoints(plan)}",
    }
    if on_gpu := gpu.describe():
        rows["gpu"] = on_gpu
    if verifies_start(config, on_gpu=cpu.has_accelerator()):
        rows["first"] = (
            "once in a layout: the gradient of the first step in two splits of its samples, which takes as long as"
            " two steps (verify_at_start false leaves it out)"
        )
    return "\n".join(f"{name:<6}{text}" for name, text in rows.items())


def _checkpoints(plan: Plan) -> str:
    run = plan.config.run
    when = [f"every {run.save_interval} steps"] if run.save_interval else []
    when += ["at the end"] if run.save_at_end else []
    return f"checkpoints {' and '.join(when)} in {checkpoint_folder(plan.config)}" if when else "no checkpoints"
