"""Each copy of a tied embedding is a group of its own in the optimizer that DeepSpeed gets."""

import torch

from megaaccum.sharding.deepspeed import separate_tied_copies


def parameter(*, tied: bool = False) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(2, 2))
    if tied:
        param.shared_embedding = True
    return param


def test_a_group_keeps_its_options_and_names():
    plain, tied, copy, norm = parameter(), parameter(tied=True), parameter(tied=True), parameter()
    groups = [
        {"params": [tied, plain, copy], "param_names": ["embedding", "layer", "embedding"], "weight_decay": 0.1},
        {"params": [norm], "param_names": ["norm"], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-3)
    listed = adam.param_groups
    separate_tied_copies(adam)
    assert adam.param_groups is listed, "a learning-rate schedule may hold the list"
    assert [group["param_names"] for group in listed] == [["layer"], ["embedding"], ["embedding"], ["norm"]]
    assert [list(map(id, group["params"])) for group in listed] == [[id(each)] for each in (plain, tied, copy, norm)]
    assert [(group["weight_decay"], group["lr"]) for group in listed] == [(wd, 1e-3) for wd in (0.1, 0.1, 0.1, 0.0)]


def test_no_group_is_left_empty_and_names_are_not_made_up():
    tied = parameter(tied=True)
    adam = torch.optim.AdamW([tied], lr=1e-3)
    separate_tied_copies(adam)
    (group,) = adam.param_groups
    assert [*map(id, group["params"])] == [id(tied)]
    assert "param_names" not in group
