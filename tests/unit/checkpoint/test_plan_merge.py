"""Rank 0's merge of the ranks' plans: nothing in it grows with the square of their number."""

from collections import ChainMap
from unittest import mock

import torch
from torch.distributed.checkpoint import default_planner

from megaaccum.checkpoint import save_load


def test_plans_bring_no_table_of_a_nested_dict():
    """torch looks each key of all ranks up in the tables of one rank after another."""
    plans = []
    for rank in range(64):
        planner = save_load.plan_maker()
        planner.set_up_planner({f"rank {rank}/{key}": torch.empty(4) for key in "abc"}, is_coordinator=not rank)
        plans.append(planner.create_local_plan())
    with mock.patch.object(default_planner, "ChainMap", wraps=ChainMap) as merged:
        made, metadata = planner.create_global_plan(plans)
    assert not merged.called and metadata.planner_data is None
    assert len(metadata.state_dict_metadata) == 3 * 64 == sum(len(plan.items) for plan in made)
