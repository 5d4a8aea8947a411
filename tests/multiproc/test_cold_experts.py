"""Gradients of cold experts in host memory: the same gradient to the bit, and less on the device."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import Case, Rig

MODEL = (
    "--num_layers 2 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_aux_loss_coeff 0 --moe_router_score_function sigmoid --moe_router_enable_expert_bias "
)
COLD = "--cold_expert_offload --cold_expert_steps 1 --cold_expert_tokens "
EP = "--expert_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 2 "
SPLIT = "--pipeline_model_parallel_size 2 --schedule zb-h1 --grad_accum_steps 2 --pp_microbatches 4 "
CASES = {
    "every expert on every rank": (Case(2, "--pp_microbatches 4 ", MODEL), COLD + "1"),
    "half of them, two flushes": (Case(2, EP + "--flush per_round", MODEL, "bf16"), COLD + "1"),
    "a split backward, every expert cold": (Case(2, SPLIT, MODEL), COLD + "100000"),
}
AVOIDED = 1
"""The expert to which routers send no token in the first two steps."""
STEPS = 4


@dataclass(frozen=True)
class Step:
    """gradient: what the optimizer receives, by name. memory: bytes by kind. experts: bytes of the whole gradients of
    each of this rank's experts, by (layer, number of the expert in the whole model)."""

    gradient: dict[str, torch.Tensor]
    memory: dict[str, int]
    experts: dict[tuple[int, int], int]


def trained(case: Case) -> list[Step]:
    """Some steps of training, with an expert that gets tokens from the third on."""
    rig = Rig.of(case)
    experts = sizes(rig.chunks)
    update, steps = rig.backend.step, []
    for step in range(STEPS):
        send(rig.chunks, avoid=step < 2)
        seen: dict[str, torch.Tensor] = {}

        def look_and_update(seen=seen):
            seen.update(rig.assemble())
            update()

        rig.backend.step = look_and_update
        result = rig.train(step=step, first=rig.plan.batch.global_batch_size * step)
        steps.append(Step(seen, result.memory, experts))
    return steps


def sizes(chunks) -> dict[tuple[int, int], int]:
    """`Step.experts`; gradients are FP32."""
    from megaaccum.model import names

    found: dict[tuple[int, int], int] = {}
    for name, param in names.named_parameters(chunks):
        if ".experts." in name:
            words = name.split(".")
            at = int(words[words.index("layers") + 1]), int(words[words.index("local_experts") + 1])
            found[at] = found.get(at, 0) + 4 * param.ds_numel
    return found


def send(chunks, *, avoid: bool) -> None:
    """Let routers choose AVOIDED never, or by its score alone."""
    for router in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "expert_bias")):
        router.expert_bias.zero_()
        router.expert_bias[AVOIDED] = -10.0 if avoid else 0.0


def both(cases: list[tuple[Case, str]]) -> list[tuple[list[Step], list[Step]]]:
    """For each case, the steps without and with the key."""
    return [(trained(case), trained(offloading(case, keys))) for case, keys in cases]


def offloading(case: Case, keys: str) -> Case:
    return Case(case.world_size, case.layout + keys, case.model, case.lane)


@pytest.fixture(scope="module")
def seen():
    """By name of the case, on each rank the steps without and with."""
    ranks = run_ranks(both, 2, list(CASES.values()), timeout=120)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(CASES)}


def differing(plain: list[Step], offloaded: list[Step]) -> set[str]:
    """Names of the parameters whose gradients differ in some step."""
    return {
        name
        for one, other in zip(plain, offloaded, strict=True)
        for name in one.gradient
        if not torch.equal(one.gradient[name], other.gradient[name])
    }


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_to_the_bit(name, seen):
    for plain, offloaded in seen[name]:
        assert len(plain) == STEPS
        assert all(step.gradient and all(g.isfinite().all() for g in step.gradient.values()) for step in plain)
        assert not differing(plain, offloaded)


@pytest.mark.parametrize("name", ["every expert on every rank", "half of them, two flushes"])
def test_a_cold_expert_is_not_on_the_device_and_one_without_tokens_nowhere(name, seen):
    """Step 0: no history. 1: cold, without a token. 2: cold, and tokens come. 3: it had tokens."""
    for plain, offloaded in seen[name]:
        size = sum(size for (_, expert), size in plain[0].experts.items() if expert == AVOIDED)
        saved = [
            one.memory["gradients_whole"] - other.memory["gradients_whole"]
            for one, other in zip(plain, offloaded, strict=True)
        ]
        assert saved == [0, size, size, 0]
        assert [step.memory.get("host", 0) for step in offloaded] == [0, 0, size, 0]
        assert all("host" not in step.memory for step in plain)
    on_ranks = [sum(expert == AVOIDED for _, expert in steps[0].experts) for steps, _ in seen[name]]
    assert on_ranks == ([2, 2] if name.startswith("every") else [2, 0])


def test_under_a_split_backward_all_experts_may_be_cold(seen):
    for plain, offloaded in seen["a split backward, every expert cold"]:
        size = sum(plain[0].experts.values())
        avoided = sum(size for (_, expert), size in plain[0].experts.items() if expert == AVOIDED)
        for step, (one, other) in enumerate(zip(plain, offloaded, strict=True)):
            if step:
                assert one.memory["gradients_whole"] - other.memory["gradients_whole"] == size
                assert other.memory["host"] == size - (avoided if step == 1 else 0)


# --- broken on purpose ------------------------------------------------------------------------------------------------


def with_mistakes(case: Case) -> list[list[Step]]:
    """The steps when what lies in host memory is forgotten in the reduction, and when a micro-batch's gradient replaces
    there the sum of those before."""
    from megaaccum.sharding.cold_experts import ColdExperts

    offload = ColdExperts.offload

    def replace(self, param):
        before = self._sums.pop(id(param), None)
        offload(self, param)
        if before is not None:
            self._sums.setdefault(id(param), before)

    with patch.object(ColdExperts, "bring_back", lambda self, param: None):
        forgotten = trained(case)
    with patch.object(ColdExperts, "offload", replace):
        return [forgotten, trained(case)]


def test_sums_that_are_lost_are_seen(seen):
    name = "every expert on every rank"
    found = run_ranks(with_mistakes, 2, offloading(*CASES[name]), timeout=60)
    for (plain, _), mistaken in zip(seen[name], found, strict=True):
        for steps in mistaken:
            assert any(f"local_experts.{AVOIDED}." in each for each in differing(plain, steps))
