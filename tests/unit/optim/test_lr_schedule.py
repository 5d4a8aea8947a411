"""Learning rate, weight decay and parameter groups: Megatron's own values, and points worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megaaccum.config import Plan
from megaaccum.config.batch_ramp import BatchRamp
from megaaccum.config.schema import BatchConfig, Config, OptimizerConfig, RunConfig
from megaaccum.errors import CheckpointError
from megaaccum.optim import lr_schedule
from megaaccum.optim.chosen import keep_decays
from megaaccum.optim.lr_schedule import LrSchedule, param_groups

BATCH = 32


def configured(
    *,
    train_iters: int = 100,
    global_batch_size: int = BATCH,
    override: tuple[str, ...] = (),
    of_checkpoint: bool = False,
    **optimizer,
) -> Config:
    return Config(
        optimizer=OptimizerConfig(**(dict(lr=1e-3, min_lr=1e-4, weight_decay=0.1) | optimizer)),
        batch=BatchConfig(global_batch_size=global_batch_size),
        run=RunConfig(train_iters=train_iters, override=[*override], use_checkpoint_opt_param_scheduler=of_checkpoint),
    )


def constant(config: Config) -> BatchRamp:
    """Every step takes the global batch."""
    return BatchRamp(((0, config.batch.global_batch_size),), {})


def build(groups, config: Config, ramp: BatchRamp | None = None) -> LrSchedule:
    optimizer = Groups(groups) if isinstance(groups, list) else groups
    return lr_schedule.build(optimizer, config, ramp or constant(config))


def scheduler_arguments(config: Config, ramp: BatchRamp | None = None) -> dict:
    return lr_schedule.scheduler_arguments(config, ramp or constant(config))


def rates(config: Config, num_steps: int) -> list[float]:
    """Learning rate that each of the first `num_steps` steps, and the one after them, is taken with."""
    groups = [{}]
    schedule = build(groups, config)
    values = [groups[0]["lr"]]
    for _ in range(num_steps):
        schedule.step(config.batch.global_batch_size)
        values.append(groups[0]["lr"])
    return values


def test_warmup_is_linear_from_its_start_to_the_peak():
    values = rates(configured(lr_decay_style="cosine", lr_warmup_iters=10, lr_warmup_init=1e-5), 10)
    assert values == pytest.approx([1e-5 + (1e-3 - 1e-5) * step / 10 for step in range(11)], rel=1e-12)


def test_under_a_ramp_the_schedule_follows_the_samples_that_its_steps_consume():
    sizes = [8, 8, 16, 16, 24] + [32] * 95
    ramp = BatchRamp(((0, 8), (16, 16), (48, 24), (72, 32)), {})
    config = configured(lr_decay_style="linear", lr_warmup_iters=4, min_lr=0.0)
    groups: list[dict] = [{}]
    schedule = build(groups, config, ramp)
    values = []
    for size in sizes:
        values.append(groups[0]["lr"])
        schedule.step(size)
    # Four steps of warm-up are 48 samples, and a step's rate is that of the samples before it.
    assert values[:5] == pytest.approx([1e-3 * before / 48 for before in (0, 8, 16, 32, 48)], rel=1e-12)
    total = sum(sizes)
    assert values[50] == pytest.approx(1e-3 * (total - sum(sizes[:50])) / (total - 48), rel=1e-12)
    assert groups[0]["lr"] == 0.0
    again = build([{}], config, ramp)
    again.load_state_dict(schedule.state_dict())
    assert (again.lr, again.state_dict()["num_steps"]) == (schedule.lr, total)


def test_the_anneal_of_wsd_ends_with_the_last_step_of_a_ramped_run():
    ramp = BatchRamp(((0, 8), (80, 32)), {})
    config = configured(lr_decay_style="WSD", lr_wsd_decay_iters=95, train_iters=100)
    arguments = scheduler_arguments(config, ramp)
    assert arguments["lr_decay_steps"] == 80 + 90 * 32
    assert arguments["lr_decay_steps"] - arguments["wsd_decay_steps"] == 5 * 8


def test_spans_stay_those_of_the_ramp_that_they_were_laid_out_by():
    """Another ramp is refused, or asked for, as a batch (Plan.continued)."""
    ramp = BatchRamp(((0, 8), (16, 32)), {})
    saved = build([{}], configured(lr_warmup_iters=4), ramp).state_dict()
    assert saved["lr_warmup_steps"] == 80
    constant = build([{}], configured(lr_warmup_iters=4))
    constant.load_state_dict(saved)
    assert constant.state_dict() == saved
    with pytest.raises(CheckpointError, match=r"lr_warmup_iters: 80 samples .*, 112 in the configuration; set .* to 4"):
        build([{}], configured(lr_warmup_iters=5)).load_state_dict(saved)


def test_spans_in_samples_need_no_whole_steps():
    config = configured(
        lr_decay_style="WSD", lr_decay_samples=3001, lr_warmup_samples=15, lr_wsd_decay_samples=1280, train_iters=94
    )
    for ramp in (None, BatchRamp(((0, 8), (80, 32)), {})):
        found = scheduler_arguments(config, ramp)
        assert [found[f"{name}_steps"] for name in ("lr_decay", "lr_warmup", "wsd_decay")] == [3001, 15, 1280]
    assert rates(config, 2)[:2] == [0.0, 1e-3]


def test_the_last_steps_of_a_decay_in_samples_anneal():
    config = configured(lr_decay_style="WSD", lr_decay_samples=3001, lr_wsd_decay_iters=2, train_iters=94)
    assert scheduler_arguments(config)["wsd_decay_steps"] == 2 * BATCH


def test_without_warmup_the_first_step_has_the_peak():
    assert rates(configured(lr_decay_style="cosine"), 0) == [1e-3]


def test_warmup_as_a_share_of_the_decay():
    share, steps = (
        configured(lr_warmup_fraction=0.2, lr_decay_iters=50),
        configured(lr_warmup_iters=10, lr_decay_iters=50),
    )
    assert rates(share, 60) == pytest.approx(rates(steps, 60), rel=1e-12)


def test_cosine_at_its_middle_its_end_and_beyond():
    values = rates(configured(lr_decay_style="cosine", lr_warmup_iters=20), 120)
    assert values[20] == 1e-3
    assert values[60] == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12)
    assert values[40] == pytest.approx(1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-12)
    assert values[100:] == pytest.approx([1e-4] * 21, rel=1e-12)


def test_linear_at_a_quarter_and_at_its_end():
    values = rates(configured(lr_decay_style="linear", lr_warmup_iters=20), 101)
    assert values[40] == pytest.approx(1e-4 + 9e-4 * 0.75, rel=1e-12)
    assert values[100] == pytest.approx(1e-4, rel=1e-12)
    assert values[101] == 1e-4


def test_constant_stays_at_the_peak_past_the_end():
    assert set(rates(configured(lr_decay_style="constant"), 150)) == {1e-3}


def test_inverse_square_root_is_one_of_samples():
    values = rates(configured(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=3e-4), 100)
    assert values[16] == pytest.approx(1e-3 * math.sqrt(4 / 16), rel=1e-12)
    assert values[100] == 3e-4
    # Without a warm-up Megatron takes one sample for one, so counting steps instead would give sqrt(32) times as much.
    assert rates(configured(lr_decay_style="inverse-square-root", min_lr=0.0), 9)[9] == pytest.approx(
        1e-3 / math.sqrt(9 * BATCH), rel=1e-12
    )


@pytest.mark.parametrize(
    ("style", "half_way"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_flat_then_anneals(style, half_way):
    keys = dict(lr_decay_style="WSD", lr_warmup_iters=10, lr_wsd_decay_iters=20, lr_wsd_decay_style=style)
    values = rates(configured(**keys), 101)
    assert set(values[10:81]) == {1e-3}
    assert values[90] == pytest.approx(1e-4 + 9e-4 * half_way, rel=1e-12)
    assert values[100:] == pytest.approx([1e-4, 1e-4], rel=1e-12)


@pytest.mark.parametrize(("style", "half_way"), [("linear", 0.5), ("cosine", 0.5)])
def test_weight_decay_grows_from_start_to_end(style, half_way):
    keys = dict(start_weight_decay=0.02, end_weight_decay=0.1, weight_decay_incr_style=style)
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    schedule = build(groups, configured(**keys))
    assert [group["weight_decay"] for group in groups] == [0.02, 0.0]
    for _ in range(50):
        schedule.step(BATCH)
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.02 + 0.08 * half_way, 0.0], rel=1e-12)
    for _ in range(51):
        schedule.step(BATCH)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


SCHEDULES = {
    "cosine": dict(lr_decay_style="cosine", lr_warmup_iters=7),
    "linear, shorter than the run": dict(lr_decay_style="linear", lr_decay_iters=33, lr_warmup_fraction=0.13),
    "wsd": dict(lr_decay_style="WSD", lr_wsd_decay_iters=11, lr_wsd_decay_style="minus_sqrt", lr_warmup_iters=3),
    "inverse square root": dict(lr_decay_style="inverse-square-root"),
    "weight decay": dict(start_weight_decay=0.01, end_weight_decay=0.3, weight_decay_incr_style="cosine"),
}


@pytest.mark.parametrize("keys", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_the_same_flags_give_megatrons_numbers_to_the_last_bit(keys, monkeypatch):
    from megatron.training import training

    config = configured(train_iters=40, global_batch_size=24, **keys)
    mine, theirs = [{"wd_mult": 1.0}], [{"wd_mult": 1.0}]
    schedule = build(mine, config)
    monkeypatch.setattr(training, "get_args", lambda: megatron_args(config))
    reference = training.get_optimizer_param_scheduler(Groups(theirs))
    for _ in range(45):
        assert mine == theirs
        schedule.step(24)
        reference.step(increment=24)


class Groups:
    def __init__(self, param_groups):
        self.param_groups = param_groups


def megatron_args(config: Config):
    """The arguments that Megatron-LM's own parser passes to its scheduler."""
    from argparse import Namespace

    o = config.optimizer
    args = Namespace(**{name: getattr(o, name) for name in OptimizerConfig.__dataclass_fields__})
    args.train_iters, args.global_batch_size = config.run.train_iters, config.batch.global_batch_size
    args.lr_warmup_iters = o.lr_warmup_iters or 0
    if o.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = o.weight_decay
    args.use_checkpoint_opt_param_scheduler = args.override_opt_param_scheduler = False
    return args


def test_a_step_that_was_not_committed_does_not_move_the_rate():
    """DeepSpeed#8415: the rate moves by `step` alone, so a skipped step, which does not call it, leaves it in place."""
    schedule = build([{}], configured(lr_warmup_iters=10))
    schedule.step(BATCH)
    assert (schedule.lr, schedule.state_dict()["num_steps"]) == (1e-4, BATCH)
    schedule.step(num_samples=BATCH // 2)
    assert (schedule.lr, schedule.state_dict()["num_steps"]) == (pytest.approx(1.5e-4, rel=1e-12), BATCH * 3 // 2)


def test_a_group_with_a_rate_of_its_own_keeps_it():
    groups = [{}, {"max_lr": 5e-3, "min_lr": 5e-3}]
    build(groups, configured(lr_decay_style="cosine"))
    assert [group["lr"] for group in groups] == [1e-3, 5e-3]


def test_a_rate_of_its_own_holds_without_a_schedule_too():
    named = [
        ("embedding.word_embeddings.weight", torch.nn.Parameter(torch.zeros(2, 2))),
        ("decoder.layers.0.mlp.weight", torch.nn.Parameter(torch.zeros(2, 2))),
    ]
    groups = param_groups(named, 0.1, decoupled={"max_lr": 5e-3, "min_lr": 5e-4})
    assert {each["param_names"][0]: each.get("lr") for each in groups} == {named[0][0]: 5e-3, named[1][0]: None}


def test_resumes_where_it_was_even_when_loaded_after_steps():
    config = configured(lr_decay_style="cosine", lr_warmup_iters=10)
    first = build([{}], config)
    for _ in range(37):
        first.step(BATCH)
    groups = [{}]
    second = build(groups, config)
    second.step(BATCH)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.state_dict()["num_steps"], second.lr, groups[0]["lr"]) == (37 * BATCH, first.lr, first.lr)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (dict(lr=2e-3), ["lr:", "0.001", "0.002"]),
        (dict(train_iters=200), ["lr_decay_iters", "3200", "6400", "set lr_decay_iters to 100"]),
        (dict(lr_warmup_init=1e-6), ["lr_warmup_init"]),
        (dict(lr_decay_style="linear"), ["lr_decay_style", "cosine", "linear"]),
        (dict(global_batch_size=64, train_iters=50), ["lr_decay_iters", "set lr_decay_iters to 100"]),
        (dict(lr_decay_samples=3201), ["lr_decay_samples: 3200", "3201", "set lr_decay_samples to 3200"]),
        (dict(lr_warmup_iters=None, lr_warmup_samples=7), ["lr_warmup_samples: 320", "set lr_warmup_samples to 320"]),
    ],
)
def test_another_schedule_is_refused_and_nothing_moves(change, texts):
    base = dict(lr_decay_style="cosine", lr_warmup_iters=10)
    saved = build([{}], configured(**base))
    saved.step(BATCH)
    groups = [{}]
    other = build(groups, configured(**(base | change)))
    before = groups[0]["lr"]
    with pytest.raises(CheckpointError) as error:
        other.load_state_dict(saved.state_dict())
    assert all(text in str(error.value) for text in texts), str(error.value)
    assert (other.state_dict()["num_steps"], groups[0]["lr"]) == (0, before)


def test_another_batch_leaves_the_schedule_in_samples():
    """In this start and in those after it: the keys, in steps, are the same ones."""
    base = dict(lr_decay_style="cosine", lr_warmup_iters=10)
    saved = build([{}], configured(**base))
    for _ in range(30):
        saved.step(BATCH)
    for _ in range(2):
        groups = [{}]
        larger = build(groups, configured(**base, global_batch_size=2 * BATCH))
        larger.load_state_dict(saved.state_dict())
        assert (groups[0]["lr"], larger.state_dict()["num_steps"]) == (saved.lr, saved.state_dict()["num_steps"])
        larger.step(2 * BATCH)
        saved.step(num_samples=2 * BATCH)
        assert larger.lr == saved.lr
        saved = larger


def test_the_configurations_schedule_holds_when_asked_for():
    saved = build([{}], configured(train_iters=100))
    saved.step(BATCH)
    longer = build([{}], configured(train_iters=200, override=("lr_schedule",)))
    assert longer.differences(saved.state_dict())
    longer.load_state_dict(saved.state_dict())
    assert longer.lr > saved.lr


@pytest.mark.parametrize(
    ("own", "change", "text"),
    [
        (dict(lr_mult=["embedding.*=0.1"]), dict(lr=2e-3), "set lr to 0.001"),
        (dict(decoupled_lr=5e-3), dict(min_lr=2e-4), "set min_lr to 0.0001"),
        (dict(optimizer="muon", muon_scalar_lr=5e-3), dict(lr=2e-3), "set lr to 0.001"),
        (dict(optimizer="muon", muon_scalar_weight_decay=0.2), dict(weight_decay=0.3), "set start_weight_decay to 0.1"),
    ],
)
def test_the_checkpoints_schedule_moves_no_group_that_was_made_by_the_configurations(own, change, text):
    """Such a group has its rates before the checkpoint's are known: it would stay at the configuration's."""
    saved = build([{}], configured(**own)).state_dict()
    with pytest.raises(CheckpointError, match=text):
        build([{}], configured(**own, **change, of_checkpoint=True)).load_state_dict(saved)
    build([{}], configured(**own, train_iters=200, of_checkpoint=True)).load_state_dict(saved)
    build([{}], configured(**change, of_checkpoint=True)).load_state_dict(saved)


def test_a_difference_says_which_batches_it_counts():
    """The run's own batches are larger: 75 of its steps are more than the 2,400 samples of 75 steps before."""
    saved = build([{}], configured(lr_decay_iters=100)).state_dict()
    larger = build([{}], configured(lr_decay_iters=75, global_batch_size=2 * BATCH, override=("lr_schedule",)))
    what = "lr_decay_iters: 3200 samples over the same batches in the checkpoint, 2400 in the configuration"
    assert larger.differences(saved)[what] == "set lr_decay_iters to 100"


def test_what_has_no_effect_may_change():
    saved = build([{}], configured(lr_decay_iters=100)).state_dict()
    longer = build([{}], configured(lr_decay_iters=100, train_iters=200, lr_wsd_decay_style="linear"))
    longer.load_state_dict(saved)


def test_a_damaged_state_is_named():
    schedule = build([{}], configured())
    state = {name: value for name, value in schedule.state_dict().items() if name != "num_steps"}
    with pytest.raises(CheckpointError, match="lacks num_steps"):
        schedule.load_state_dict(state)


def test_an_unresolved_config_is_our_mistake():
    with pytest.raises(AssertionError, match="not resolved"):
        scheduler_arguments(configured(train_iters=0))


class Model(torch.nn.Module):
    """One parameter of each kind that a GPT has."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(8, 4)
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.wide = torch.nn.ParameterDict({"bias": torch.nn.Parameter(torch.zeros(2, 4))})
        self.frozen = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.expert = torch.nn.Linear(4, 4)
        for param in self.expert.parameters():
            param.allreduce = False


def test_what_decays_and_what_does_not():
    groups = param_groups(Model().named_parameters(), 0.1)
    assert [(g["param_names"], g["weight_decay"], g["wd_mult"], g["is_expert_parallel"]) for g in groups] == [
        (["word_embeddings.weight", "linear.weight"], 0.1, 1.0, False),
        (["expert.weight"], 0.1, 1.0, True),
        (["linear.bias", "norm.weight", "norm.bias", "wide.bias"], 0.0, 0.0, False),
        (["expert.bias"], 0.0, 0.0, True),
    ]


def test_names_and_parameters_stand_in_the_same_order():
    model = Model()
    by_name = dict(model.named_parameters())
    for group in param_groups(by_name.items(), 0.1):
        assert all(by_name[name] is param for name, param in zip(group["param_names"], group["params"], strict=True))


def test_the_rule_is_megatrons():
    from megatron.core import optimizer

    overrides = optimizer.get_standard_config_overrides(optimizer.OptimizerConfig())
    without = {
        name for g in param_groups(Model().named_parameters(), 0.1) if not g["wd_mult"] for name in g["param_names"]
    }
    for name, param in Model().named_parameters():
        if param.requires_grad:
            assert (name in without) == any(key.matches(param, name) for key in overrides)


def test_a_partitioned_parameter_is_judged_by_its_whole_shape():
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_shape = torch.Size([4, 4])
    (group,) = param_groups([("linear.weight", param)], 0.1)
    assert group["wd_mult"] == 1.0


def test_the_schedule_drives_a_torch_optimizer():
    optimizer = torch.optim.AdamW(param_groups(Model().named_parameters(), 0.1), lr=1e-3)
    schedule = build(optimizer, configured(lr_warmup_iters=10))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    schedule.step(BATCH)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-4, wd) for wd in (0.1, 0.1, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("keys", "decay"),
    [
        ({}, 0.07),
        ({"weight_decay": 0.2}, 0.2),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}, 0.2),
    ],
)
def test_an_own_optimizer_has_its_decays_unless_the_plan_gives_some(keys, decay):
    batch = dict(micro_batch_size=1, seq_length=8, global_batch_size=4)
    plan = Plan.of(batch=batch, hidden_size=8, optimizer=dict(lr=1e-3, **keys), run=dict(train_iters=10))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=1e-3, weight_decay=0.07)
    keep_decays(optimizer, plan)
    build(optimizer, plan.config, plan.ramp).step(5 * 4)
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay)
