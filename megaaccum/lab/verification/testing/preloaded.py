"""Imports of the process that forks the ranks of tests: torch, DeepSpeed and Megatron, on the CPU lane, and what nearly
every test's ranks import then: a fifth of a second on each of them, and more in a run that draws its pictures."""

import contextlib
import gc
import importlib
from functools import partial

from megaaccum.distributed import preload
from megaaccum.pretrain.metrics import plots

WHAT_RANKS_IMPORT = (
    "deepspeed.module_inject.auto_ep_layer",  # by deepspeed.initialize, as the next ones
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "matplotlib.backends.backend_agg",  # by the picture of a run, as the next one
    "matplotlib.figure",
    "megaaccum.cli.train",
    "megaaccum.lab.advisor",
    "megaaccum.lab.verification.testing.ranks",  # ranks find their own code imported too
    "megaaccum.pretrain.interop.load",
    "megaaccum.pretrain.training.loop",
    "megaaccum.sharding.ddp",
    "megaaccum.sharding.deepspeed",
    "megaaccum.sharding.fsdp2",
    "megaaccum.sharding.megatron",
    "megaaccum.sharding.streaming",
)

WHERE_THERE = (
    "pytest",  # by the file of a test, which holds what its ranks call
    "transformers.models.auto.modeling_auto",  # by chat templates and models of others, 0.8 s with the next two
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)

with plots.quiet():
    preload.libraries(*WHAT_RANKS_IMPORT)
for name in WHERE_THERE:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
# Else each rank that Megatron has save starts an interpreter for a queue: two core seconds, of three that a test takes.
writer.get_write_results_queue = partial(writer.get_write_results_queue, "fork")  # type: ignore[attr-defined]
preload.freeze_objects()
gc.set_threshold(10_000)  # in ranks too: with Python's 700, garbage collections take an eighth of a rank's time
