"""Every tensor of a collective comes from the device of its group, also where gradients lie in host memory."""

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support import device_lint


def test_norms_and_sums_of_offloaded_gradients():
    for norm, grads in run_ranks(device_lint.sums_of_offloaded_gradients, 2):
        assert grads == [3.0, 3.0]
        assert norm == pytest.approx((8 * 9.0) ** 0.5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_partitions_in_host_memory(deterministic):
    assert run_ranks(device_lint.partitions_in_host_memory, 2, deterministic) == [[3.0, 6.0], [9.0, 12.0]]


def test_agreement():
    assert run_ranks(device_lint.agreements, 2) == [0, 0]


def test_a_tensor_of_host_memory_is_noticed():
    assert "all_reduce of a tensor (2,) of host memory" in run_ranks(device_lint.a_tensor_of_the_host, 1)[0]
