"""Runs that continue in Megatron from what is written for it: its own optimizer's next step is ours."""

from __future__ import annotations

from pathlib import Path

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_foreign_weights import BATCH, MODELS, STEPS, Weights, apart, spoiled, two_steps
from tests.support.parity import VOCAB, Case


def train_ours(cells: list[tuple[Case, str]]) -> list[tuple[Weights, Weights]]:
    """(the gradients of the third step, the weights after it) of runs that are exported for Megatron before it."""
    import torch

    from megaaccum.pretrain.weights import torch_dist_out
    from tests.support.engines import engine_of
    from tests.support.parity import Rig, microbatches

    found = []
    for case, folder in cells:
        engine, grads = engine_of(case), Weights()
        two_steps(engine)
        checkpoint = engine.save(folder)
        if torch.distributed.get_rank() == 0:
            torch_dist_out.write(Path(f"{folder}.megatron"), engine.plan.config, checkpoint)
        torch.distributed.barrier()
        rig = Rig(case, engine.plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
        engine.train_steps.before_update = lambda rig=rig, grads=grads: grads.update(rig.assemble())
        engine.train_step(microbatches(engine.plan, engine.groups.dp.rank(), engine.consumed_samples))
        found.append((grads, {name: tensor.clone() for name, tensor in engine.whole_weights()}))
    return found


def step_in_megatron(cells: list[tuple[Case, str, Weights]], forget: bool = False) -> list[Weights]:
    """The weights after a step on given gradients by Megatron's own optimizer and schedule, which its own library has
    loaded. forget: without the moments, by mistake."""
    return [_step_in_megatron(*cell, forget=forget) for cell in cells]


def _step_in_megatron(case: Case, folder: str, grads: Weights, *, forget: bool) -> Weights:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamKey, distrib_optimizer
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    from megaaccum.model import names
    from megaaccum.optim.by_pattern import factors
    from megaaccum.platform import cpu
    from tests.support import fused_adam
    from tests.support.engines import engine_of

    engine, place = engine_of(case), Path(folder) / f"iter_{STEPS:07d}"
    spoiled(engine)
    keys, (chunk,) = engine.plan.config.optimizer, engine.chunks
    with engine.groups.current(), cpu.cuda_type_names():
        groups = engine.groups.collection
        ddp = DistributedDataParallel(
            chunk.config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk, pg_collection=groups
        )
        settings = OptimizerConfig(
            optimizer="adam", lr=keys.lr, min_lr=keys.min_lr, weight_decay=keys.weight_decay, clip_grad=0.0,
            adam_beta1=keys.adam_beta1, adam_beta2=keys.adam_beta2, adam_eps=keys.adam_eps,
            use_distributed_optimizer=True,
        )  # fmt: skip
        # Megatron 0.19 loads this form with Transformer Engine's Adam alone, whose count is its groups'.
        megatron_optimizer.Adam = distrib_optimizer.Adam = fused_adam.CountsCalls
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
        overrides = megatron_optimizer.get_standard_config_overrides(settings)
        if chunk.config.use_mup:
            overrides |= megatron_optimizer.get_mup_config_overrides(settings, chunk.config.mup_width_mult)
        for pattern, factor in factors("lr_mult", keys.lr_mult).items():
            overrides[ParamKey(name=pattern)] = ParamGroupOverride(max_lr=keys.lr * factor, min_lr=keys.min_lr * factor)
        for pattern, factor in factors("wd_mult", keys.wd_mult).items():
            overrides[ParamKey(name=pattern)] = ParamGroupOverride(wd_mult=factor)
        optimizer = megatron_optimizer.get_megatron_optimizer(
            settings, [ddp], config_overrides=overrides, pg_collection=groups, use_gloo_process_groups=False
        )
        common = dist_checkpointing.load_common_state_dict(str(place))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        assert common["args"].consumed_train_samples == 8 * STEPS
        state = {"model": chunk.sharded_state_dict()}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
        loaded = dist_checkpointing.load(state, str(place))
        chunk.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        schedule = loaded["opt_param_scheduler"]
        assert (schedule["max_lr"], schedule["num_steps"]) == (keys.lr, 8 * STEPS)
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            for group in each.optimizer.param_groups:
                group["lr"] = group["max_lr"]  # as the file has it
                for param in group["params"] if forget else ():
                    each.optimizer.state[param]["exp_avg"].zero_()
        ddp.zero_grad_buffer()
        for name, param in names.named_parameters([chunk]):
            param.main_grad.copy_(grads[name])
        assert optimizer.step()[0]
        torch.distributed.barrier()
    return {name: tensor.clone() for name, tensor in engine.whole_weights()}


PIPELINE = "--pipeline_model_parallel_size 2 "
STEPPED = {"dense": PIPELINE, "sparse": "--expert_model_parallel_size 2 ", "mup": PIPELINE}
TRAINED = {
    "dense": MODELS["dense"] + "--lr_mult *linear_fc1.weight=0.5 --wd_mult *linear_proj.weight=0.25 ",
    "sparse": MODELS["sparse"],
    "mup": "--num_layers 4 --swiglu --untie_embeddings_and_output_weights --use-mup --mup-base-hidden-size 16 ",
}


def test_megatrons_own_optimizer_goes_on_from_what_is_written_for_it(tmp_path):
    """Its next step on the same gradients is ours, with lr_mult and wd_mult, or use_mup; it is another without the
    moments."""
    model = "--lr_decay_style constant --clip_grad 0 --adam_eps 1e-3 "
    cells = [(Case(2, BATCH + layout, TRAINED[name] + model), str(tmp_path / name)) for name, layout in STEPPED.items()]
    by_rank = run_ranks(train_ours, 2, cells, timeout=150)
    wanted, after = [], []
    for number, (case, folder) in enumerate(cells):
        spread = "--expert_model_parallel_size 2 " if "expert" in case.layout else ""
        grads = {name: each for rank in by_rank for name, each in rank[number][0].items() if not each.isnan().any()}
        wanted.append((Case(2, f"{BATCH}--backend ddp {spread}", case.model), f"{folder}.megatron", grads))
        after.append(without_buffers(by_rank[0][number][1]))
    for case, found, expected in zip(cells, run_ranks(step_in_megatron, 2, wanted, timeout=150)[0], after, strict=True):
        assert apart(without_buffers(found), expected) < 1e-7, case
    forgotten = run_ranks(step_in_megatron, 2, wanted, forget=True, timeout=150)[0]
    assert all(apart(without_buffers(found), each) > 1e-5 for found, each in zip(forgotten, after, strict=True))
    ours = [(case, f"{folder}.megatron") for case, folder in cells]
    resumed = run_ranks(step_from, 2, ours, timeout=150)[0]
    assert all(apart(found, by_rank[0][number][1]) == 0.0 for number, found in enumerate(resumed))


def without_buffers(weights: Weights) -> Weights:
    """The parameters alone: a router's bias moves with the step, and not with the optimizer."""
    return {name: each for name, each in weights.items() if "expert_bias" not in name}


def step_from(cells: list[tuple[Case, str]]) -> list[Weights]:
    """The weights after the next step of runs of ours that continue from what was written for Megatron."""
    from megaaccum.pretrain.weights import foreign
    from tests.support.engines import engine_of
    from tests.support.parity import microbatches

    found = []
    for case, folder in cells:
        engine = engine_of(case)
        spoiled(engine)
        foreign.resume(engine, Path(folder), vocab_size=VOCAB)
        assert (engine.step, engine.consumed_samples) == (STEPS, 8 * STEPS)
        engine.train_step(microbatches(engine.plan, engine.groups.dp.rank(), engine.consumed_samples))
        found.append({name: tensor.clone() for name, tensor in engine.whole_weights()})
    return found
