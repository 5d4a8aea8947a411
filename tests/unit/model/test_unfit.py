"""Modules and parameters that no accumulated step trains are named."""

import pytest
import torch

from megaaccum.config.schema import ShardingConfig
from megaaccum.model.unfit import module_problems, parameter_problems


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (torch.nn.BatchNorm1d(2), "0 (BatchNorm1d) takes statistics of each micro-batch"),
        (torch.nn.Embedding(2, 2, sparse=True), "0 (Embedding) has sparse gradients"),
        (torch.nn.EmbeddingBag(2, 2, max_norm=1.0), "0 (EmbeddingBag) changes its weight in every forward"),
        (torch.nn.Embedding(2, 2, scale_grad_by_freq=True), "0 (Embedding) divides by a micro-batch's counts"),
        (torch.nn.DataParallel(torch.nn.Linear(2, 2)), "0 (DataParallel) reduces gradients or cuts parameters"),
    ],
)
def test_a_module_that_accumulation_does_not_fit(module, words):
    (text,) = module_problems(torch.nn.Sequential(module, torch.nn.LayerNorm(2)))
    assert text.startswith(words)


def test_a_model_of_usual_modules_has_no_problem():
    chunk = torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    assert [*module_problems(chunk)] == []
    for backend in ("deepspeed", "fsdp2", "megatron", "ddp"):
        assert parameter_problems(ShardingConfig(backend=backend), dict(chunk.named_parameters())) == []


def hooked() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(2))
    param.register_post_accumulate_grad_hook(print)
    return param


def of(*shape: int, **keys) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, **keys))


def test_two_parameters_in_one_memory():
    """A tie by `.data`: every backend makes two of it. Parts of one tensor are apart, and a tie of itself is one."""
    one, flat = of(4), torch.ones(8)
    two, frozen = torch.nn.Parameter(one.data), torch.nn.Parameter(one.data, requires_grad=False)
    apart = {"up": torch.nn.Parameter(flat[:4]), "down": torch.nn.Parameter(flat[4:])}
    words = "in the memory of one, of which a backend makes two; assign that parameter, not its .data"
    for backend in ("deepspeed", "fsdp2", "megatron", "ddp"):
        assert parameter_problems(ShardingConfig(backend=backend), {"one": one, "two": two, "frozen": frozen}) == [
            f"two, frozen: {words}"
        ]
        assert parameter_problems(ShardingConfig(backend=backend), {"one": one, "again": one, **apart}) == []


@pytest.mark.parametrize(
    ("param", "words", "taken_by"),
    [
        (torch.nn.LazyLinear(2).weight, "without a shape", ""),
        (of(2, device="meta"), "on the meta device", ""),
        (of(0, 2), "without an element", ""),
        (of(2, dtype=torch.complex64), "complex64", ""),
        (of(2, dtype=torch.float64), "float64", "fsdp2 ddp"),
        (of(), "a scalar", "megatron ddp"),
        (hooked(), "with a hook", "deepspeed megatron ddp"),
        (torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False), "", "deepspeed fsdp2 megatron ddp"),
    ],
)
def test_a_parameter_that_is_not_taken(param, words, taken_by):
    for backend in ("deepspeed", "fsdp2", "megatron", "ddp"):
        texts = parameter_problems(ShardingConfig(backend=backend), {"one": param, "two": param})
        assert [text.startswith(f"one, two: {words}") for text in texts] == [True] * (backend not in taken_by), backend


@pytest.mark.parametrize(
    ("dtype", "asked", "words"),
    [
        (torch.float32, "bf16", "the model has one in float32, but params_dtype is bf16"),
        (torch.bfloat16, "fp16", "convert the model to float16, or set params_dtype to what it has"),
        (torch.float16, None, "the model has one in float16, but params_dtype is fp32"),
        (torch.bfloat16, None, ""),
        (torch.bfloat16, "bf16", ""),
        (torch.float64, None, ""),
    ],
)
def test_a_model_of_another_precision_than_the_plans(dtype, asked, words):
    """DeepSpeed would convert it, and the others train float16 without a scale of the loss."""
    texts = parameter_problems(ShardingConfig(backend="ddp", params_dtype=asked), {"one": of(2, dtype=dtype)})
    assert [words in text for text in texts] == [True] * bool(words)
