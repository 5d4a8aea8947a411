"""`megaaccum generate` draws the same tokens under every layout, on every rank: those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaaccum.errors import ConfigError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.chats import write_tokenizer

GREEDY, DRAWN = (0.0, 0, 1.0), (1.5, 20, 0.95)
PROMPTS = ["ab", "c a b"]
PP = "--pipeline_model_parallel_size 2 "
LAYOUTS = {
    "tp": (2, "--tensor_model_parallel_size 2 --sequence_parallel true"),
    "contexts": (2, "--context_parallel_size 2"),
    "a V": (2, PP + "--schedule zbv"),
    "experts": (2, "--expert_model_parallel_size 2"),
    "experts in a V": (4, PP + "--schedule dualpipev --expert_model_parallel_size 2"),
    "experts cut over tp, interleaved": (
        4,
        PP + "--schedule interleaved --virtual_pipeline_model_parallel_size 2 --tensor_model_parallel_size 2"
        " --sequence_parallel true --expert_tensor_parallel_size 2",
    ),
}


Texts = list[tuple[str, str]]
"""(prompt, continuation)"""


def texts(folder: Path, words: str, world_size: int, draw: tuple[float, int, float]) -> Texts:
    """The texts of a layout, on this rank."""
    from megaaccum.pretrain.training.generate import Generation, generate
    from megaaccum.pretrain.training.sampling import Draw

    wanted = Generation(folder, PROMPTS, 8, [*words.split(), "--seed", "7"])
    return list(generate(wanted, Draw(*draw), world_size))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers", reason="not installed: transformers")
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("model")
    transformers.MixtralForCausalLM(config).save_pretrained(where)
    return write_tokenizer(where)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[float, int, float], Texts]:
    return {draw: run_ranks(texts, 1, folder, "", 1, draw, init=False)[0] for draw in (GREEDY, DRAWN)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_continues_as_one_process_does(
    name: str, folder: Path, alone: dict[tuple[float, int, float], Texts]
) -> None:
    ranks, words = LAYOUTS[name]
    assert alone[GREEDY] != alone[DRAWN] and all(text for each in alone.values() for _, text in each)
    for draw in (GREEDY, DRAWN) if name == "tp" else (DRAWN,):
        assert run_ranks(texts, ranks, folder, words, ranks, draw, init=False) == [alone[draw]] * ranks


def refusal(folder: Path) -> str:
    """The error of a text that no machine holds."""
    from megaaccum.pretrain.training.generate import Generation, generate
    from megaaccum.pretrain.training.sampling import Draw

    with pytest.raises(ConfigError) as caught:
        list(generate(Generation(folder, PROMPTS, 10**6), Draw(*GREEDY), 1))
    return str(caught.value)


def test_more_tokens_than_memory_holds_are_one_message(folder: Path) -> None:
    (text,) = run_ranks(refusal, 1, folder, init=False)
    assert text.startswith(
        "memory does not hold a row of 1000005 tokens, the longest prompt and --max_new_tokens 1000000"
    )


def drawn(words: str, world_size: int) -> list[int]:
    """The tokens that a model of the words' layout draws; its weights depend on the seed and their names alone."""
    from megaaccum.pretrain.training.sampling import Draw, sample
    from megaaccum.pretrain.weights import inference

    keys = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, position_embedding_type="rope")
    given = f"--init_method_std 0.3 --global_batch_size 4 --make_vocab_size_divisible_by 1 {words}".split()
    engine = inference.engine_of(inference.config_of(keys, "test", given), world_size=world_size, vocab_size=64)
    return sample(engine, [1, 2, 3], vocab_size=64, num_tokens=8, draw=Draw(0.0))


def test_prediction_layers_change_no_text() -> None:
    """They stay in the model, whose checkpoint has them, and the text is the main head's."""
    plain = run_ranks(drawn, 1, "", 1, init=False)
    assert len(set(plain[0])) > 1
    assert run_ranks(drawn, 1, "--mtp_num_layers 1", 1, init=False) == plain
    assert run_ranks(drawn, 2, f"{PP} --mtp_num_layers 1", 2, init=False) == plain * 2
