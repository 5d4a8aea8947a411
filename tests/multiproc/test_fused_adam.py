"""Adam counts updates, however often DeepSpeed calls it in one; shown with an optimizer that counts calls."""

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import fused_adam
from tests.support.parity import Case

MODEL = "--num_layers 2 --adam_beta2 0.95 --weight_decay 0.1 --no_add_bias_linear"  # a bias of keys has gradient 0


@pytest.mark.parametrize("engine", ["--zero_stage 3", "--zero_stage 3 --sync streaming", "--zero_stage 1"])
def test_twenty_steps_and_a_resume_are_those_of_torchs_adam(engine):
    case = Case(2, f"--global_batch_size 4 --pp_microbatches 2 {engine}", MODEL)
    for torchs, fused in run_ranks(fused_adam.both, 2, case, 20, 10):
        assert torchs.keys() == fused.keys()
        for name, param in torchs.items():
            # Rounding of FP32 over 20 steps of 1e-3; one count off is 1e-4 and more.
            torch.testing.assert_close(fused[name], param, rtol=0, atol=2e-6, msg=name)
