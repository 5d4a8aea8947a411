"""FP8 on two ranks that see Transformer Engine's own modules, recipes and state manager (`make te` fetches them).

The kernels are torch's (support/fp8/te_on_cpu.py). The cases (cases.py there) all run in one start of two ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fp8 import te_on_cpu

CASES = (
    "one_chunk_per_rank two_chunks_per_rank two_chunks_per_rank_left_alone recomputed_layers "
    "recomputed_layers_left_alone backwards_in_reverse_order a_skipped_step an_infinity_that_fp8_hides "
    "other_ends_of_a_step an_evaluation quantized_weights checkpoints tensor_parallel scales_are_transformer_engines "
    "other_recipes split_backward fused_weight_gradients other_layers private_names"
).split()
SECONDS = 500.0
"""Limit for all cases together; a minute on two free cores."""

pytestmark = pytest.mark.skipif(
    not te_on_cpu.is_there(),
    reason=f"Transformer Engine's wheel is not in {te_on_cpu.FOLDER.name}: make te",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    """Each rank's result of each case."""
    folder = tmp_path_factory.mktemp("fp8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = []
    for rank in (0, 1):
        env = os.environ | address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.support.fp8.worker", str(folder / f"{rank}.json"), *CASES]
        with (folder / f"{rank}.log").open("w") as log:
            root = Path(__file__).parents[2]
            ranks.append(subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        for process in ranks:
            process.wait(timeout=SECONDS)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in (0, 1))
    assert all((folder / f"{rank}.json").exists() for rank in (0, 1)), logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def results(told, request) -> list[dict]:
    """Both ranks' results of the case that the test is named after."""
    name = request.node.name.removeprefix("test_")
    said = [rank.get(name, {"error": "did not come to this case"}) for rank in told]
    assert not any("error" in each for each in said), "\n".join(each.get("error", "") for each in said)
    return [each["result"] for each in said]


SAME = 1e-6
"""Relative L2 distance of FP32 sums of the same terms in another order (biases and norms, ranks)."""


def is_serial(told: dict, *, tensors: int = 32) -> bool:
    """Scales and histories equal to the bit to those of accumulation without a pipeline, and gradients the same."""
    return told["tensors"] == tensors and told["wrong"] == [] and told["worst_gradient"] < SAME


def test_every_case_has_a_test():
    assert {f"test_{name}" for name in CASES} <= globals().keys()


def test_one_chunk_per_rank(results):
    assert all(is_serial(each) and each["rows"] == [4] for each in results)


def test_two_chunks_per_rank(results):
    for each in results:
        assert is_serial(each["interleaved"])
        assert is_serial(each["dualpipev"])
        assert each["interleaved"]["rows"] == each["dualpipev"]["rows"] == [4]


def test_two_chunks_per_rank_left_alone(results):
    """The mistake that the test above sees: rows of zeros for the chunk that did not run."""
    assert all(max(each["rows"]) < 4 for each in results)


def test_recomputed_layers(results):
    for each in results:
        assert is_serial(each["1f1b"])
        assert is_serial(each["interleaved"])


def test_recomputed_layers_left_alone(results):
    assert all(max(each["rows"]) < 4 for each in results)


def test_backwards_in_reverse_order(results):
    for each in results:
        assert each["norm"] > 0
        assert each["plain"] == 0
        assert each["left alone"] > 1e-2


def test_a_skipped_step(results):
    for each in results:
        assert each["skipped"]
        assert each["changed"] == []
        assert each["changed by the next step"] > 0
        assert each["unlike a run that never saw it"] == []
        assert each["changed where nothing is put back"] > 0


def test_an_infinity_that_fp8_hides(results):
    for each in results:
        assert each["skipped"]
        assert "FP8 met an infinite value in decoder.layers.2.mlp.linear_fc2/amax_history_bwd" in each["note"]
        assert each["changed"] == []
        assert not each["left alone"]


def test_other_ends_of_a_step(results):
    assert all(not each["skipped"] and each["dropped"] == 1 for each in results)
    assert all(each["rows"] == [3, 4] for each in results), "the micro-batch of weight zero has no gradient"


def test_an_evaluation(results):
    for each in results:
        assert each["changed"] == each["unlike a run without it"] == []
        assert each["changed where nothing is put back"] > 0


def test_quantized_weights(results):
    for each in results:
        weights = each["weights"]
        once = ("step", "second step", "step after it", "evaluation", "two flushes")
        assert weights == 8
        assert [each[name] for name in once] == [weights] * len(once)
        assert each["skipped step"] == 2 * weights, "once in the step, once to look where it came from"
        assert each["two flushes, left alone"] == 2 * weights


def test_checkpoints(results):
    for each in results:
        assert each["plain tensors"]
        assert (each["saved"], *each["read"]) == (32, 64, 32)
        assert each["unlike"] == []
        assert all(is_serial(next_step) for next_step in each["next"])
        assert "fp8_amax_history_len" in each["another length"]
        assert "(30, 3)" in each["another length"]
        assert each["from BF16"] == [0]


def test_tensor_parallel(results):
    assert all(each["unlike"] == [] and each["rows"] == [4] for each in results)


def test_scales_are_transformer_engines(results):
    for each in results:
        assert (each["scales"], each["moved"]) == (16, 0)
        assert set(each["rows"].values()) == {4}


def test_other_recipes(results):
    assert all(each["tensors"] == 0 and each["worst_gradient"] < SAME for each in results)


def test_split_backward(results):
    for each in results:
        assert is_serial(each["fp8"])
        assert is_serial(each["bf16"], tensors=0)
        for precision in ("fp8", "bf16"):
            assert each[precision]["products"] == 3, "F, I and W are one product each"
    assert max(each["fp8"]["deferred"] for each in results) > 1, "weight gradients of several micro-batches waited"


def test_fused_weight_gradients(results):
    for each in results:
        for layout, found in each.items():
            assert found["worst"] < 0.005, (layout, "products are added to FP32 sums before they are rounded to BF16")
            assert found["added"] == (4 - 1) * 4 * 4, (layout, "of 4 micro-batches but the first, in 4 layers")


def test_other_layers(results):
    """Computed values differ by BF16's rounding alone; values in a checkpoint do not differ."""
    for each in results:
        assert (each["names"], each["weights"], each["read"]) == ([], [], [[], []])
        assert each["gradients"] < 0.1, "in BF16, layer by layer in another order"


def test_private_names(results):
    assert all(each["missing"] == [] and len(each["noticed"]) == 4 for each in results)
