"""Lion under sharding: its updates and its one moment, checkpoints, and bad input."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megaaccum.errors import CheckpointError
from megaaccum.lab.verification.testing import run_ranks
from tests.support import whole_runs
from tests.support.faults import differences
from tests.support.muon import (
    BACKENDS,
    PIPELINE,
    Cell,
    check_held,
    check_one_digest,
    engine_of,
    moved,
    problems,
    take_steps,
    updates,
)  # fmt: skip
from tests.support.parity import Case, Rig

MODEL = (
    "--num_layers 4 --normalization RMSNorm --no_add_bias_linear --swiglu --num_query_groups 2 --weight_decay 0.1"
    " --lr_decay_style constant --lr 2e-4"
)
LION = f"{MODEL} --optimizer lion"
LAYOUTS = {
    **{name: f"{flags} --grad_accum_steps 2" for name, flags in BACKENDS.items()},
    "offload": "--zero_stage 3 --offload_optimizer cpu --grad_accum_steps 2",
    "tp 2, V": f"--zero_stage 1 {PIPELINE} --tensor_model_parallel_size 2 --schedule dualpipev",
}
STEPS = 3


def test_weights_and_moments_equal_one_process():
    """In float64: the sign of a gradient near zero is a matter of rounding."""
    cells = [
        Cell(name, Case(4, f"{layout} --params_dtype fp64", f"{LION} --clip_grad 0.1"), "", 1e-11)
        for name, layout in (
            ("fsdp2", "--backend fsdp2 --grad_accum_steps 2"),
            ("streaming", "--backend fsdp2 --sync streaming --tensor_model_parallel_size 2 --grad_accum_steps 2"),
            ("V", f"--backend ddp {PIPELINE} --schedule zbv"),
        )
    ]
    found = problems(cells)
    assert not found, "\n".join(found)


def test_shards_are_stepped_as_whole_parameters_are():
    cases = [Case(4, layout, LION) for layout in LAYOUTS.values()]
    for ranks in run_ranks(updates, 4, cases, STEPS, timeout=300):
        for name, found in zip(LAYOUTS, ranks, strict=True):
            assert found.keys() == {"param", "exp_avg"} and max(found.values()) <= 1e-6, (name, found)


def with_exchanged_betas(case: Case) -> Rig:
    from megaaccum.upstream import emerging

    lion = emerging.lion
    with patch.object(emerging, "lion", lambda groups, **keys: lion(groups, **keys | {"betas": keys["betas"][::-1]})):
        return Rig.of(case)


def test_exchanged_betas_are_seen():
    case = Case(2, "--zero_stage 3 --grad_accum_steps 2", LION)
    for (found,) in run_ranks(updates, 2, [case], STEPS, with_exchanged_betas, timeout=120):
        assert found["exp_avg"] > 0.5 and found["param"] > 1e-4, found


def test_one_digest_over_layouts():
    same = "--reproducible layout --grad_accum_steps 2 "
    cases = [
        Case(4, same + flags, LION) for flags in ("--zero_stage 3", "--backend fsdp2 --sync streaming", "--backend ddp")
    ]
    cases.append(Case(4, f"--reproducible layout --backend megatron {PIPELINE}", LION))
    check_one_digest(cases)


def test_what_is_held_is_within_two_percent_of_the_prediction():
    check_held(f"{LION} --untie_embeddings_and_output_weights")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_the_moment_moves_between_layouts(tmp_path):
    layouts = [
        Case(4, "--zero_stage 3 --grad_accum_steps 2", LION),
        Case(4, "--backend fsdp2 --data_parallel_replicas 2 --grad_accum_steps 2", LION),
        Case(4, "--backend megatron --pipeline_model_parallel_size 2 --pp_microbatches 4", LION),
    ]
    by_rank = run_ranks(moved, 4, str(tmp_path), layouts, timeout=200)
    for number, case in enumerate(layouts, start=1):
        found = {name: each for rank in by_rank for name, each in rank[number].items()}
        assert not differences(by_rank[0][0], found), case


def exchanged(folder: str, case: Case) -> list[str]:
    """Refusals of a checkpoint of the other optimizer, each with `override optimizer` too."""
    refused = []
    for model, other in ((LION, MODEL), (MODEL, LION)):
        engine = engine_of(case, model)
        take_steps(engine, 1)
        engine.save(f"{folder}/{len(refused)}")
        for override in ("", "--override optimizer"):
            with pytest.raises(CheckpointError) as error:
                engine_of(case, other, override).load(f"{folder}/{len(refused) // 2 * 2}")
            refused.append(str(error.value))
    return refused


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    case = Case(2, "--backend ddp --grad_accum_steps 2", LION)
    for refused in run_ranks(exchanged, 2, str(tmp_path), case, timeout=120):
        assert "made with lion, the configuration says adam" in refused[0]
        assert (
            "has exp_avg, not exp_avg and exp_avg_sq, in" in refused[1]
            and "where another optimizer stepped it" in refused[1]
        )
        assert "made with adam, the configuration says lion" in refused[2]
        assert "has exp_avg and exp_avg_sq, not exp_avg, in" in refused[3]


def test_an_error_names_the_key_by_which_a_run_goes_from_adam_to_lion(tmp_path):
    whole_runs.make_data(tmp_path)
    assert whole_runs.train(tmp_path, train_iters=4, exit_interval=2).code == 0
    lion = dict(train_iters=4, optimizer="lion")
    for override in ({}, {"override": "optimizer"}):
        refused = whole_runs.train(tmp_path, **lion, **override)
        assert refused.code != 0 and "no_load_optim to true" in refused.output
    begun = whole_runs.train(tmp_path, **lion, no_load_optim=True)
    assert begun.code == 0 and "step 4/4" in begun.output, begun.output


def lion_of_megatron(case: Case) -> list[tuple[str, tuple[float, float], set[str]]]:
    """(optimizer, betas, parameters) of each group that Megatron makes for `--optimizer lion`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megaaccum.model import names
    from megaaccum.platform import cpu

    rig = Rig.of(case)
    ((chunk,), groups) = rig.chunks, rig.groups.collection
    named = {id(param): name for name, param in names.named_parameters([chunk])}
    with rig.groups.current(), cpu.cuda_type_names():
        ddp = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk, pg_collection=groups)
        settings = OptimizerConfig(optimizer="lion", lr=1e-4, lion_beta1=0.5, lion_beta2=0.6)
        made = get_megatron_optimizer(settings, [ddp], pg_collection=groups, use_gloo_process_groups=False)
    return [
        (type(each.optimizer).__name__, group["betas"], {named[id(param)] for param in group["params"]})
        for each in made.chained_optimizers
        for group in each.optimizer.param_groups
    ]


def test_megatrons_lion_is_what_a_note_says_of_it():
    """Megatron 0.19; as soon as it steps every parameter by Lion's betas the note is wrong."""
    case = Case(1, "--backend ddp", f"{MODEL} --position_embedding_type rope")
    (lion, betas, matrices), *others = run_ranks(lion_of_megatron, 1, case)[0]
    assert (lion, betas) == ("Lion", (0.9, 0.999)) and {name.rsplit(".", 1)[1] for name in matrices} == {"weight"}
    assert {optimizer for optimizer, _, _ in others} == {"AdamW"}
    rest = set.union(*(names for _, _, names in others))
    assert "embedding.word_embeddings.weight" in rest and "decoder.final_layernorm.weight" in rest
