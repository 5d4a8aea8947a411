"""An engine that is dropped gives its memory back, also after a step that failed."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from megaaccum.errors import StepError
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.upstream import fsdp2
from tests.multiproc.test_two_engines import rig_of
from tests.support.parity import SYNC_MODES, Case

BACKENDS = {"ZeRO-1": "--zero_stage 1 ", "ZeRO-2": "--zero_stage 2 ", **SYNC_MODES}
KEYS = {
    "fp32": "",
    "bf16": "--params_dtype bf16 ",
    "in one order": "--reproducible layout ",
    "noise scale": "--noise_scale_window 2 ",
    "muon": "--optimizer muon ",
}


def kept(cases: list[Case], fails: bool) -> list[list[str]]:
    """Names of the parts that are left, for each case, of an engine that took a step and was dropped."""

    def dropped(case: Case) -> dict[str, weakref.ref]:
        rig = rig_of(case)
        rig.engine.train_step(rig.microbatches())
        rig.engine.evaluate(rig.microbatches()[:2])
        if fails:
            batches = rig.microbatches()
            with pytest.raises(KeyError):
                rig.engine.train_step([*batches[:-1], {}])
            with pytest.raises(StepError, match="failed before"):
                rig.engine.train_step(batches)
        state = next(iter(next(rig.backend.state()).tensors.values()))
        parts = {"backend": rig.backend, "chunk": rig.chunks[0], "parameter": next(rig.chunks[0].parameters())}
        parts["state"] = state if state._base is None else state._base
        return {name: weakref.ref(part) for name, part in parts.items()}

    found = []
    for case in cases:
        parts = dropped(case)
        gc.collect()
        gc.collect()  # ZeRO-1 and -2: DeepSpeed's finalizer unties the parameters in the first
        found.append([name for name, part in parts.items() if part() is not None])
    return found


@pytest.mark.parametrize(("keys", "fails"), [*((keys, False) for keys in KEYS), ("bf16", True)])
def test_a_dropped_engine_gives_its_memory_back(keys, fails):
    flags = [f"{backend}{KEYS[keys]}--pp_microbatches 4 " for backend in BACKENDS.values()]
    if keys == "in one order":
        flags = [each for each in flags if "fsdp2 --sync" not in each]  # refused on one rank
    if keys in ("noise scale", "muon"):
        flags = [each for each in flags if "streaming" not in each and "stage 2" not in each]
    assert run_ranks(kept, 1, [Case(1, each, "--num_layers 2 ") for each in flags], fails)[0] == [[]] * len(flags)


def has_the_mesh_of_its_groups(case: Case) -> bool:
    """Whether an engine's parameters have their replicas over the groups that another one of its layout would take."""
    from megaaccum.distributed.groups import replica_mesh

    rig = rig_of(case)
    mesh = replica_mesh(rig.groups.dp_cp, 2, rig.groups.timeout_minutes)
    return next(rig.chunks[0].parameters()).device_mesh.get_group("replica") is mesh.get_group("replica")


def test_an_engine_that_is_built_again_makes_no_groups_of_replicas():
    """Each would be a communicator, which stays until the process ends."""
    case = Case(4, "--backend fsdp2 --data_parallel_replicas 2 --pp_microbatches 4 ", "--num_layers 2 ")
    assert all(run_ranks(has_the_mesh_of_its_groups, 4, case))


def noted_forwards(cases: list[Case]) -> list[int]:
    """How many forwards of its units FSDP2 keeps for backwards after evaluations, in each case."""
    counts = []
    for case in cases:
        rig = rig_of(case)
        states = [chunk._get_fsdp_state() for chunk in rig.chunks]
        for _ in range(3):
            rig.engine.evaluate(rig.microbatches())
        units = [unit for chunk in rig.chunks for unit in fsdp2.units(chunk)]
        noted = [*(state._comm_ctx.post_forward_order for state in states), *(u._post_forward_indices for u in units)]
        counts.append(sum(map(len, noted)))
    return counts


def test_a_model_that_is_only_evaluated_keeps_no_record_of_its_forwards():
    """FSDP2 notes the forward of each layer and micro-batch for a backward: a reference model held ever more."""
    flags = [f"--backend fsdp2 --sync {sync} --pp_microbatches 4 " for sync in ("resident", "streaming")]
    assert run_ranks(noted_forwards, 2, [Case(2, each, "--num_layers 2 ") for each in flags]) == [[0, 0]] * 2


def layouts_in_turns(stages: list[int], folder: str | None = None) -> list[tuple[int, float]]:
    """(threads of this process, loss) after a step of an engine of each number of stages, one after the other. folder:
    torch.distributed is left and started again before each."""
    import torch
    import torch.distributed as dist

    from megaaccum import Plan, initialize
    from tests.multiproc.test_engine_inputs import batches, chunk_of, forward_step

    rank, world_size, found = dist.get_rank(), dist.get_world_size(), []
    for number, pp in enumerate(stages):
        if folder is not None:
            dist.destroy_process_group()
            store = f"file://{folder}/{number}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        batch = dict(micro_batch_size=1, seq_length=16, pp_microbatches=4)
        plan = Plan.of(layout=dict(pp=pp), batch=batch, sharding=dict(zero_stage=1), world_size=world_size)
        chunks = [chunk_of(stage, pp) for stage in plan.layout.stages(rank)]
        engine = initialize(plan, chunks, forward_step_func=forward_step, optimizer=torch.optim.AdamW)
        torch.manual_seed(0)
        loss = engine.train_step(batches()).loss
        del engine, chunks
        gc.collect()
        found.append((len(os.listdir("/proc/self/task")), loss))
    return found


def test_a_layout_has_the_groups_that_were_built_for_it_before():
    """An engine has 20, of two threads each with gloo."""
    for one, two, *more in run_ranks(layouts_in_turns, 2, [1, 2] * 3):
        assert more == [(two[0], loss) for loss in (one[1], two[1]) * 2]


def test_groups_end_with_the_world(tmp_path):
    """A notebook that leaves torch.distributed and starts it again: Megatron's parallel_state holds what was before."""
    for *_, one, other in run_ranks(layouts_in_turns, 2, [2, 1, 1, 1], str(tmp_path)):
        assert one == other
