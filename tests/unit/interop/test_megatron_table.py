"""The table of Megatron's flags, held against the parser that is installed and against megaaccum's own keys."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megaaccum.config.keys import all_keys
from megaaccum.config.schema import Config
from megaaccum.interop.megatron_args import parse
from megaaccum.interop.megatron_rules import RULES
from megaaccum.interop.megatron_table import Flag, as_markdown, families, flags, spelling

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def oracle() -> dict[str, argparse.Action]:
    """Megatron-LM's own flags by name."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions = [action for action in parser._actions if action.dest != "help"]
    return {name: action for action in actions for name in action.option_strings}


def test_every_flag_of_the_installed_parser_is_in_the_table(oracle):
    assert len(oracle) > 800
    assert sorted(name for name in oracle if spelling(name) not in flags()) == []


def _count(action: argparse.Action) -> str:
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction | argparse.BooleanOptionalAction):
        return "none"
    return "one" if action.nargs is None else str(action.nargs)


WIDER = {
    "--rampup-batch-size": ("3", "*"),  # Megatron-DeepSpeed takes any number
    "--num-experts": ("one", "+"),  # Megatron-DeepSpeed takes one per layer group
    "--profile": ("none", "?"),  # Megatron-DeepSpeed takes the kind of profile
}


def test_every_flag_takes_as_many_values_as_megatrons(oracle):
    differing = {}
    for name, action in oracle.items():
        ours = flags()[spelling(name)].count
        if ours != _count(action) and WIDER.get(name) != (_count(action), ours):
            differing[name] = (_count(action), ours)
    assert differing == {}


def test_both_names_of_an_on_off_flag_are_told_apart(oracle):
    for name, action in oracle.items():
        if isinstance(action, argparse.BooleanOptionalAction):
            flag = flags()[spelling(name)]
            assert flag.kind == "onoff"
            assert flag.names == tuple(action.option_strings)
            assert action.default is False


NAMED_DEFAULTS = {
    "--dataloader-type": ("single", "None"),  # validate_args turns None into single
    "--rope-type": ("rope", "None"),  # None is rope, and for latent attention YaRN with factor 1, which is rope
}


def test_a_refused_flag_is_accepted_at_megatrons_default_and_no_other(oracle):
    differing = {}
    for name, action in oracle.items():
        flag = flags()[spelling(name)]
        if flag.treatment != "refused" or _count(action) == "none":
            continue
        theirs = getattr(action.default, "name", action.default)
        same = str(theirs) == str(flag.default) or (theirs in ([], "") and flag.default is None)
        if not same and NAMED_DEFAULTS.get(name) != (flag.default, str(theirs)):
            differing[name] = (flag.default, theirs)
    assert differing == {}


# Megatron-LM's defaults that megaaccum's own differ from, where a launch script may leave the flag out.
OTHER_DEFAULTS = {
    "transformer_impl": "auto takes Transformer Engine where it can run",
    "moe_token_dispatcher_type": "how tokens travel; the sum is the same",
    "loss_norm": "token weighs every token alike",
    "split": "validate_args fills in 969, 30, 1",
    "data_path": "the text in the package",
    "eval_interval": "Megatron-LM's was 1000 for years, and none means no evaluation",
    "save_interval": "0 is off, as None there",
    "log_interval": "a progress line every 10 steps",
    "lr_warmup_iters": "derived: 0, as in Megatron-LM",
    "reduce_bucket_size": "derived by Megatron-LM from dp",
    "distributed_timeout_minutes": "10 as a whole number",
    "train_iters": "required",
    "lr": "required",
    "num_layers": "required",
    "hidden_size": "required",
    "num_attention_heads": "required",
    "seq_length": "required",
    "grad_accum_dtype": "fp32 whatever the parameters, as Megatron-LM for BF16",
    "grad_reduce_dtype": "fp32 whatever the parameters, as Megatron-LM for BF16",
}


def test_a_flag_that_is_left_out_means_the_same_as_in_megatron(oracle):
    config = Config()
    differing = set()
    for name, action in oracle.items():
        flag = flags()[spelling(name)]
        for key, constant in flag.sets:
            ours = getattr(getattr(config, all_keys()[key].section), key)
            # A switch that changed nothing would be the default here and not there.
            if str(ours) == str(action.default) if constant is None else str(ours).lower() != constant:
                continue
            differing.add(key)
    assert differing == OTHER_DEFAULTS.keys()


def test_mapped_flags_set_keys_that_exist():
    for flag in flags().values():
        assert {key for key, _ in flag.sets} <= all_keys().keys()
        assert bool(flag.sets) == (flag.treatment == "mapped")


def test_every_family_says_why():
    for family in families():
        if family.treatment in ("ignored", "refused", "rule"):
            assert family.why, family.title
        assert bool(family.instead) == (family.treatment == "refused"), family.title
        assert family.flags, family.title


def test_every_family_with_a_rule_has_its_function():
    titles = {family.title for family in families() if family.treatment == "rule"}
    # Decided on by 'Experts'; and a rule that only notes, on mapped flags.
    assert titles == set(RULES) - {"Masked loss"} | {"Experts of Megatron-DeepSpeed"}


def _value(flag: Flag) -> list[str]:
    """A value that is not the default."""
    return {"none": []}.get(
        flag.count, [{"int": "7", "float": "0.77", "str": "other", "bool": "true"}.get(flag.kind, "")]
    )


@pytest.mark.parametrize("family", [f for f in families() if f.treatment == "refused"], ids=lambda f: f.title)
def test_every_refused_flag_is_a_problem_with_a_remedy(family):
    for flag in family.flags:
        values, problems = parse([flag.name, *_value(flag)])
        assert values == {}
        assert len(problems) == 1, flag.name
        assert flag.name in problems[0]
        assert family.instead in problems[0]
        if flag.default is not None:
            assert parse([flag.name, flag.default]) == ({}, [])


@pytest.mark.parametrize("family", [f for f in families() if f.treatment == "ignored"], ids=lambda f: f.title)
def test_every_flag_without_effect_is_accepted_and_sets_nothing(family):
    for flag in family.flags:
        assert parse([flag.name, *_value(flag)]) == ({}, [])


CHANGES_THE_RESULT = """
--fp8-param-gather --fp4-format --rampup-batch-size --step-batch-size-schedule --optimizer --decoupled-lr --softmax-type
--window-size --apply-layernorm-1p --rotary-interleaved --use-rope-scaling --fp32-residual-connection --openai-gelu
--init-method-xavier-uniform --embedding-init-method-std --moe-expert-capacity-factor --moe-input-jitter-eps
--moe-router-force-load-balancing --dataloader-type --fim-data --mock-data --iterations-to-skip
--no-load-optim --finetune --freeze-all-layers --use-mup --moe-router-bias-update-rate --main-grads-dtype
--exp-avg-dtype --data-efficiency-curriculum-learning --random-ltd --remote-device --qk-l2-norm
--moe-apply-probs-on-input
--apply-wd-to-qk-layernorm --no-weight-decay-cond-type --attention-output-gate --mtp-detach-heads --quick-geglu
--padded-vocab-size --fp16-lm-cross-entropy --moe-shared-expert-gate --experimental-attention-variant --spec --sft
""".split()


@pytest.mark.parametrize("name", CHANGES_THE_RESULT)
def test_a_flag_that_changes_what_is_trained_is_never_without_effect(name):
    assert flags()[name].treatment == "refused"


def test_the_page_of_the_documentation_is_current():
    page = (ROOT / "docs" / "megatron-flags.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run: python -m megaaccum.interop.megatron_table > docs/megatron-flags.md"


def test_reading_flags_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from megaaccum.interop.megatron_args import parse; parse(['--lr', '1'])\n"
        "print([name for name in ('torch', 'megatron', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
