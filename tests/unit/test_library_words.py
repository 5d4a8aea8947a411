"""Texts for users of the library: plans and verdicts that fit a screen, near misses, and errors without flags."""

import pytest

from megaaccum import Plan, cli
from megaaccum.cli import keys, train
from megaaccum.config.keys import SECTIONS, all_keys
from megaaccum.config.source import MEANT
from megaaccum.errors import ConfigError

BATCH = dict(micro_batch_size=1, seq_length=4096, global_batch_size=256)


def fits(text: str, lines: int) -> bool:
    return len(text.splitlines()) <= lines and max(map(len, text.splitlines())) <= 120


def test_a_plan_and_a_verdict_print_in_a_few_lines():
    plan = Plan.of(layout=dict(pp=4, schedule="zbv"), batch=BATCH, hidden_size=64, world_size=8)
    assert fits(str(plan), 8) and str(plan) == repr(plan)
    assert "pp 4 x vpp 2 x dp 2 on 8 ranks, schedule zbv, deepspeed ZeRO-3 resident" in str(plan)
    assert "global_batch_size = device_batch_size 128 *" in str(plan)

    from megaaccum.step.result import StepResult

    measured = dict(seconds={"forward_backward": 0.25}, memory={"gradients": 10}, traffic={"all_gather": {"dp": 1}})
    result = StepResult(step=3, loss=2.5, weight=64.0, grad_norm=1.5, skipped=False, **measured)
    assert "loss=2.5" in str(result) and "forward_backward" not in str(result) and len(str(result)) < 240

    from megaaccum.lab.verification.case import Case
    from megaaccum.lab.verification.verdict import Verdict

    case = Case(keys=BATCH | dict(hidden_size=64), world_size=1, user_model=object())
    verdict = Verdict(case, 2, problem="its loss depends on other samples")
    assert fits(f"{verdict}", 3) and "Cannot be verified because its loss depends" in f"{verdict}"


NEAR = {
    "warmup_steps": "lr_warmup_iters", "epochs": "train_iters", "num-gpus": "nproc_per_node",
    "per-device-train-batch-size": "micro_batch_size", "max_grad_norm": "clip_grad", "eval_steps": "eval_interval",
    "gas": "grad_accum_steps", "resume_from_checkpoint": "load", "dtype": "params_dtype",
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_names_the_key(name):
    with pytest.raises(ConfigError, match=rf"did you mean {NEAR[name]}\?"):
        Plan.of(batch=BATCH | {name.replace("-", "_"): 1})
    with pytest.raises(ConfigError, match=rf"--{name} \(did you mean --{NEAR[name]}\?\)"):
        train.main(["configs/tiny_cpu.yaml", f"--{name}", "3"])


def test_names_of_other_programs_are_no_keys_and_lead_to_keys():
    assert set(MEANT.values()) <= all_keys().keys() and not MEANT.keys() & all_keys().keys()


def test_a_schedule_with_swapped_letters_is_suggested():
    with pytest.raises(ConfigError, match=r"no schedule '1f2b' \(did you mean 1f1b\?\).*ends in \.csv\.$"):
        Plan.of(layout=dict(pp=2, schedule="1f2b"), batch=BATCH, hidden_size=64, world_size=2)


def test_keys_are_listed_by_the_command_and_by_the_help_of_train(capsys):
    assert cli.main(["keys"]) == 0
    listed = capsys.readouterr().out
    assert cli.main(["train", "--help"]) == 0
    helped = capsys.readouterr().out
    for name in all_keys():
        assert f" {name} " in " ".join(listed.split()) + " " and name in helped
    assert all(f"{section}:" in listed for section in SECTIONS) and fits(listed, 70)


def test_a_key_is_described_by_any_of_its_names(capsys):
    assert cli.main(["keys", "ga", "--fp8-format"]) == 0
    said = capsys.readouterr().out
    for words in ("grad_accum_steps", "Device batches per optimizer step", "at least 1", "gradient_accumulation_steps",
                  "fp8_format", "section  quantization"):  # fmt: skip
        assert words in said
    assert cli.main(["keys", "step", "optimizer"]) == 0  # a section, and a key with a section's name
    said = capsys.readouterr().out
    assert said.startswith("step:\n  loss_scale ") and "adam | lion | muon | soap" in said and "lr" not in said.split()
    assert cli.main(["keys", "epochs"]) == 2 and "did you mean train_iters?" in capsys.readouterr().err
    assert all(keys.describe(name) for name in all_keys())


MISTAKES: list[dict] = [
    dict(batch=dict(micro_batch_size=1)),
    dict(batch=BATCH | dict(micro_batch_size="two")),
    dict(batch=BATCH, layout=dict(pp=3), world_size=4),
    dict(batch=BATCH, layout=dict(pp=2, schedule="interleaved"), world_size=2),
    dict(batch=BATCH, sharding=dict(backend="ddp", sync="streaming")),
    dict(batch=BATCH, deepspeed="ds.json"),
    dict(batch=BATCH, learning_rat=1.0),
    dict(batch=BATCH, sharding=dict(bf16=True, fp16=True)),
    dict(batch=BATCH, step=dict(hysteresis=2)),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=range(len(MISTAKES)))
def test_an_error_of_plan_of_speaks_of_no_file_and_no_flag(mistake):
    with pytest.raises(ConfigError) as error:
        Plan.of(**mistake)
    assert " --" not in str(error.value) and "the file" not in str(error.value)
    assert "command line" not in str(error.value)
