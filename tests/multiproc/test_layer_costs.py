"""`megaaccum calibrate --layers`: the pieces that are timed make up the model's whole gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaaccum.errors import ConfigError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import VOCAB, Case

EXPERTS = (
    "--num_layers 4 --num_experts 4 --moe_layer_freq [0,1,1,1] --add_bias_linear false --mtp_num_layers 2"
    " --position_embedding_type rope "
)
MODELS = {"dense": "", "experts and prediction": EXPERTS, "selective": "--recompute_granularity selective"}


def gradients(case: Case) -> dict[str, tuple[float, float]]:
    """{parameter: (norm of its gradient, distance of the pieces' from it)}, of one plain backward."""
    import torch

    from megaaccum.distributed import groups
    from megaaccum.executor.wgrad import install
    from megaaccum.lab.planner import layer_costs
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.model.gpt_forward import GptForwardStep

    plan = layer_costs.of_one_layer_each(case.plan().config)
    built = groups.build(plan.layout, timeout_minutes=1)
    (chunk,) = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    install(chunk)
    step, microbatch = GptForwardStep(built, "token"), layer_costs.microbatch_of(plan, VOCAB)
    output, loss_func = step(iter([microbatch]), chunk)
    loss_func(output)[0].backward()
    whole = {name: param.grad.clone() for name, param in chunk.named_parameters()}
    chunk.zero_grad(set_to_none=True)
    layer_costs.Pieces(chunk, plan).run(microbatch, step)
    return {
        name: (float(whole[name].norm()), float((param.grad - whole[name]).norm()))
        for name, param in chunk.named_parameters()
        if not torch.equal(param.grad, whole[name]) or whole[name].any()
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_pieces_make_up_the_gradient(model: str) -> None:
    (found,) = run_ranks(gradients, 1, Case(1, "--params_dtype fp64 --backend ddp", MODELS[model]))
    assert len(found) > 10
    assert all(distance <= 1e-12 * norm for norm, distance in found.values())


def profile(case: Case, ranks: int = 1):
    from megaaccum.lab.planner import layer_costs

    return layer_costs.measure(case.plan(), vocab_size=VOCAB, repeats=1, data_parallel_size=ranks)


def test_kinds_of_layers() -> None:
    (found,) = run_ranks(profile, 1, Case(1, "", EXPERTS))
    assert found.pattern == "ETXXXPPL"
    assert all(cost.forward > 0 and cost.input_grad > 0 for cost in found.kinds.values())
    layer = found.kinds["T"]
    assert layer.weight_grad > 0
    # Of each matrix the input [s b in] and the output's gradient [s b out] wait for W: four FP32 matrices of a layer.
    hidden, tokens = 32, 16
    widths = (hidden, 3 * hidden, hidden, hidden, hidden, 4 * hidden, 4 * hidden, hidden)
    assert layer.deferred <= 4 * tokens * sum(widths)
    assert layer.activation >= 4 * tokens * hidden


def test_bytes_of_state_and_recompute() -> None:
    plain, shared, full = (
        run_ranks(profile, 1, case, ranks)[0]
        for case, ranks in (
            (Case(1, ""), 1),
            (Case(1, ""), 4),
            (Case(1, "", "--recompute_granularity full"), 1),
        )
    )
    elements = 12 * 32**2 + 13 * 32
    # ZeRO-3, resident, FP32: whole parameters and gradients; shards of both, and 12 bytes of optimizer.
    assert plain.kinds["T"].state == elements * (4 + 4 + 4 + 4 + 12)
    assert shared.kinds["T"].state == elements * (4 + 4 + (4 + 4 + 12) / 4)
    assert full.kinds["T"].activation == 4 * 16 * 32
    assert plain.kinds["T"].activation > 10 * full.kinds["T"].activation


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("--recompute_granularity full --recompute_method block", "set recompute_method to uniform"),
        ("--tensor_model_parallel_size 2", "with --nproc-per-node 2, or set these sizes to 1"),
    ],
)
def test_what_cannot_be_measured(model: str, text: str) -> None:
    from megaaccum.lab.planner import layer_costs

    with pytest.raises(ConfigError, match=text):
        layer_costs.of_one_layer_each(replace(Case(2, ""), model=model).plan().config)


# --- chunks of one's own ---------------------------------------------------------------------------------------------


def own_chunks(folder: str) -> dict:
    """Profiles of the stages of tests/support/user_models.py: of 4 stages of a layer each, of 2, and of a loss that is
    compared with the whole model's."""
    import torch

    from megaaccum import Plan, calibrate
    from tests.support import user_models

    losses = []

    def forward_step(data_iterator, chunk):
        output, loss_func = user_models.forward_step(data_iterator, chunk)

        def noting(logits):
            losses.append(loss_func(logits)[0])
            return (losses[-1], *loss_func(logits)[1:])

        return output, noting

    layout, batch = dict(pp=2, schedule="zbv"), dict(seq_length=user_models.SEQ, micro_batch_size=user_models.ROWS)
    plan = Plan.of(
        layout=layout, batch=batch | dict(pp_microbatches=8), sharding=dict(backend="ddp"), world_size=2,
        hidden_size=32, vocab_size=user_models.VOCAB, bf16=False,
    )  # fmt: skip
    (microbatch, *_) = user_models.batches(0)
    torch.manual_seed(1)
    four = calibrate(plan, user_models.quiet_stage, forward_step, microbatch, repeats=2, path=f"{folder}/four.json")
    piecewise = float(losses[-1])
    calibrate(plan, user_models.quiet_stage, forward_step, microbatch, stages=1, repeats=1)
    drawn = calibrate(plan, user_models.quiet_stage, user_models.forward_step, stages=2, repeats=1)
    uneven = calibrate(plan, user_models.quiet_stage, user_models.forward_step, microbatch, stages=6, repeats=1)
    refused = {}
    for name, build, keys in (("plain", user_models.plain, {}), ("none", user_models.quiet_stage, dict(stages=0))):
        try:
            calibrate(plan, build, user_models.forward_step, microbatch, **keys)
        except ConfigError as error:
            refused[name] = str(error)
    sizes = [sum(each.numel() for each in user_models.quiet_stage(s, 4).parameters()) for s in range(4)]
    return dict(
        four=four, drawn=drawn, uneven=uneven, refused=refused, sizes=sizes, losses=(piecewise, float(losses[-1])),
        still_built=torch.distributed.is_initialized() and _is_built(),
    )  # fmt: skip


def _is_built() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.model_parallel_is_initialized())


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    (found,) = run_ranks(own_chunks, 1, str(folder))
    return found | {"folder": folder}


def test_chunks_of_ones_own(measured) -> None:
    """Ends cost what they take over a chunk between them; the state is counted in bytes."""
    found, sizes = measured["four"], measured["sizes"]
    assert found.pattern == "ETTTTL"
    per_element = found.kinds["T"].state / sizes[1]
    assert per_element == 4 + 2 * 4 + 8, "DDP: FP32 weights, gradients and buckets, two moments"
    assert found.kinds["E"].state == per_element * (sizes[0] - sizes[1])
    assert found.kinds["L"].state == per_element * (sizes[3] - sizes[1])
    layer = found.kinds["T"]
    assert layer.forward > 0 and layer.input_grad > 0
    assert layer.activation >= 4 * 12 * 2 * 32, "its input at the least"


def test_the_chunks_are_run_as_a_pipeline_runs_them(measured) -> None:
    """The last chunk's loss, by what was handed on from chunk to chunk, is the whole model's."""
    piecewise, whole = measured["losses"]
    assert piecewise == pytest.approx(whole, rel=1e-5)
    assert not measured["still_built"]


def test_chunks_that_differ_have_letters_of_their_own(measured) -> None:
    assert measured["drawn"].pattern == "ab"
    assert measured["uneven"].pattern == "abbcbd", "of 4 layers in 6 stages two have none, the first an embedding"


def test_what_calibrate_refuses(measured) -> None:
    assert "chunk 0 (Plain) has no set_input_tensor(tensor)" in measured["refused"]["plain"]
    assert "stages is 0" in measured["refused"]["none"]


def test_schedule_and_plan_take_the_profile(measured, capsys) -> None:
    from megaaccum.cli import main

    words = f"--pp 2 -m 8 --schedule zbv --profile {measured['folder']}/four.json --cut --no-timeline"
    assert main(["schedule", *words.split()]) == 0
    assert "cut for zbv" in capsys.readouterr().out
    plan = "plan configs/tiny_cpu.yaml --gpus 4 --fix pp=2,dp=2 --search --profile"
    assert main([*plan.split(), f"{measured['folder']}/four.json"]) == 0
    assert "searched" in capsys.readouterr().out


def sizes_of_groups(case: Case) -> tuple[int, int, int]:
    """(ranks, data-parallel ranks, expert ranks) of the groups in which a layer is measured, and a chunk of one's
    own."""
    from megatron.core import parallel_state

    from megaaccum.lab.planner import chunk_costs, layer_costs

    plan = case.plan()
    at = layer_costs.of_one_layer_each(plan.config).layout
    with chunk_costs._groups_of(plan, at.world_size):
        dp, ep = parallel_state.get_data_parallel_world_size(), parallel_state.get_expert_model_parallel_world_size()
    assert dp == at.dp
    return at.world_size, dp, ep


def test_experts_cut_over_tp_are_measured_on_the_ranks_that_share_them() -> None:
    """ep 2 * etp 2 are four ranks, where tp 2 * cp 1 and ep 2 are two each."""
    words = "--tensor_model_parallel_size 2 --sequence_parallel --expert_model_parallel_size 2"
    found = run_ranks(sizes_of_groups, 4, Case(4, words, f"{EXPERTS} --expert_tensor_parallel_size 2"))
    assert found == [(4, 2, 2)] * 4
