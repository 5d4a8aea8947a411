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
    from megaaccum.model import gpt
    from megaaccum.model.gpt_forward import GptForwardStep

    plan = layer_costs.of_one_layer_each(case.plan().config)
    built = groups.build(plan.layout, timeout_minutes=1)
    (chunk,) = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    install(chunk)
    step, microbatch = GptForwardStep(built, "token"), layer_costs.microbatch_of(plan, VOCAB)
    output, loss_func = step(iter([microbatch]), chunk)
    loss_func(output)[0].backward()
    whole = {name: param.grad.clone() for name, param in chunk.named_parameters()}
    chunk.zero_grad(set_to_none=True)
    with layer_costs.Pieces(chunk, plan) as pieces:
        pieces.run(microbatch, step)
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
