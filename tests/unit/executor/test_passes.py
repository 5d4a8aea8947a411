"""The parts of Megatron's forward_step that the executor does itself, and the cases in which it skips the rest."""

import inspect
import re
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import schedules

from megaaccum.upstream import megatron

IN_LOSS = {"calculate_per_token_loss"}
"""Keys that matter where a loss is computed or scaled, and alone do nothing."""
SIDE_LOSSES = {
    "num_moe_experts",
    "mtp_num_layers",
    "experimental_attention_variant",
    "experimental_attention_variant_loss_scale_func",
}


def keys_read(*functions) -> set[str]:
    text = "".join(map(inspect.getsource, functions))
    return {a or b for a, b in re.findall(r"config\.(\w+)|config, '(\w+)'", text)}


def test_megatrons_forward_reads_no_key_that_is_not_known_here():
    """A new one would be ignored: `ModulePasses.forward` and `megatron_scales_side_losses` know these."""
    assert keys_read(schedules.forward_step) == {"timers", "enable_autocast", "autocast_dtype"}
    after = keys_read(schedules.forward_step_calc_loss, schedules._get_experimental_attention_variant_loss_scale_func)
    assert after == {"timers"} | IN_LOSS | SIDE_LOSSES


@pytest.mark.parametrize("key", sorted(SIDE_LOSSES))
def test_side_losses_are_scaled_on_every_stage(key):
    plain = dict.fromkeys(SIDE_LOSSES)
    assert not megatron.scales_side_losses(SimpleNamespace(**plain))
    assert megatron.scales_side_losses(SimpleNamespace(**plain | {key: 1}))
