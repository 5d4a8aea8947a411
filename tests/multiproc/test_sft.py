"""Supervised fine-tuning: the gradient of packed rows is that of the conversations, and the commands from JSONL and a
Hugging Face folder to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.multiproc.test_export import call
from tests.support import huggingface as hf
from tests.support import parity
from tests.support.chats import conversations, write_lines, write_tokenizer
from tests.support.distance import relative_error
from tests.support.parity import Case, Gradient

VOCAB, LENGTH, ROWS = 259, 96, 8
MODEL = f"--num_layers 2 --seq_length {LENGTH} --sft true --split 100,0,0 --eval_interval 0 "
PP = f"--pipeline_model_parallel_size 2 --global_batch_size {ROWS} "


def packed(words: str, without: str = "") -> tuple[Gradient, int]:
    """The gradient of the first step over the rows of the data, pp 2 x dp 2, and how many rows there are. without: what
    rows do not say."""
    from megaaccum.pretrain.data.dataset import build_datasets
    from megaaccum.pretrain.data.loader import MicrobatchLoader

    with patch.object(parity, "VOCAB", VOCAB):
        rig = parity.Rig.of(Case(4, PP, MODEL + words, "fp64"))
    data = build_datasets(rig.plan)
    with MicrobatchLoader(data.train, rig.plan.batch, dp_rank=rig.groups.dp.rank(), num_workers=0) as loader:
        batch: list[Any] = loader.next_step()
    batch = [{name: part for name, part in each.items() if name != without} for each in batch]
    return rig.watched(batch)[0], int(data.facts["data"].split(" rows")[0].split()[-1])


def one_by_one(words: str, folder: str, lines: list[dict[str, Any]], spoil: str) -> Gradient:
    """The gradient of one process, conversation after conversation, over the tokens of the responses. spoil: a mistake
    made on purpose."""
    from megaaccum.pretrain.data.chats import ChatTokenizer, parse

    with patch.object(parity, "VOCAB", VOCAB):
        chunk, plan = parity.one_process(MODEL + words, "fp64")
    loop, tokenizer = parity.plain_loop(chunk, plan), ChatTokenizer(plan.config.data)
    parts = []
    for line in lines:
        ids, counts = (torch.tensor(each) for each in tokenizer.encode(parse(line, ""), "", only_responses=True))
        mask = (counts[:-1] if spoil == "mask of the input" else counts[1:]).double()
        part = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": torch.arange(len(mask))}
        parts.append({name: each[None] for name, each in part.items()})
    total = sum(float(part["loss_mask"].sum()) for part in parts)
    if spoil == "all tokens divide":
        total = float(sum(part["loss_mask"].numel() for part in parts))
    grads: dict[str, torch.Tensor] = {}
    loss = 0.0
    for part in parts:
        value, mine = loop.backward(part, total, len(parts))
        loss += value
        grads = {name: grads.get(name, 0) + grad for name, grad in mine.items()}
    return Gradient(grads, 0.0, loss, int(total))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[dict[str, Any]]]:
    """(command-line words, folder, lines): conversations that fill ROWS rows."""
    folder = tmp_path_factory.mktemp("chats")
    lines = conversations(14)
    write_lines(folder / "chats.jsonl", lines)
    write_tokenizer(folder)
    words = f"--tokenizer_model {folder} --data_path {folder / 'chats.jsonl'} --data_cache_path {folder} "
    return words + f"--output_dir {folder} ", str(folder), lines


@pytest.fixture(scope="module")
def expected(data: tuple[str, str, list[dict[str, Any]]]) -> Gradient:
    (found,) = run_ranks(one_by_one, 1, *data, "", timeout=60)
    return found


def apart(found: list[tuple[Gradient, int]], expected: Gradient) -> float:
    return max(relative_error(part, expected.parts[name]) for each, _ in found for name, part in each.parts.items())


def test_the_gradient_of_packed_rows_is_that_of_the_conversations(data, expected):
    found = run_ranks(packed, 4, data[0], timeout=60)
    assert found[0][1] == ROWS, "the global batch is one pass over the data"
    assert apart(found, expected) <= 1e-12
    assert {name for each, _ in found for name in each.parts} == expected.parts.keys()
    assert all(
        each.num_tokens == expected.num_tokens and each.loss == pytest.approx(expected.loss) for each, _ in found
    )


MOE = "--num_experts 4 --no_add_bias_linear --moe_aux_loss_coeff 0.1 --moe_router_dtype fp64 "


def test_padding_after_a_conversation_is_none_of_its_tokens_to_routers(data):
    """Megatron's routers sum scores in FP32."""
    words, folder, lines = data
    write_lines(Path(folder) / "few.jsonl", lines[:ROWS])
    words = words.replace("chats.jsonl", "few.jsonl") + "--reset_attention_mask false " + MOE
    (expected,) = run_ranks(one_by_one, 1, words, folder, lines[:ROWS], "", timeout=60)
    assert apart(run_ranks(packed, 4, words, timeout=60), expected) < 1e-7
    assert apart(run_ranks(packed, 4, words, "padding_mask", timeout=60), expected) > 0.1


def test_conversations_that_see_each_other_are_seen(data, expected):
    assert apart(run_ranks(packed, 4, data[0], "document_starts", timeout=60), expected) > 1e-3


@pytest.mark.parametrize("spoil", ["mask of the input", "all tokens divide"])
def test_another_mask_or_divisor_is_seen(data, expected, spoil):
    (other,) = run_ranks(one_by_one, 1, *data, spoil, timeout=60)
    assert apart([(other, 0)], expected) > 1e-3


# --- verification ----------------------------------------------------------------------------------------------------


def blind(case: Any, steps: int) -> Any:
    """This rank's steps of a layout whose rows are one conversation each."""
    from megaaccum.lab.verification import on_ranks, subject

    read = subject._Gpt.microbatches

    def microbatches(self: Any, step: int, count: int) -> list[Any]:
        return [{k: v for k, v in each.items() if k != "document_starts"} for each in read(self, step, count)]

    with patch.object(subject._Gpt, "microbatches", microbatches):
        return on_ranks.observed(case, steps)


def start_blind(case: Any, steps: int, at_borders: bool = False) -> list[Any]:
    return run_ranks(blind, case.world_size, case, steps, timeout=60)


ROPE = "--position_embedding_type rope "
EXPERTS = "--num_experts 4 --no_add_bias_linear --moe_aux_loss_coeff 0.1 "


@pytest.mark.parametrize("also", ["", EXPERTS, ROPE, ROPE + "--mtp_num_layers 1 "])
def test_verify_keeps_conversations_apart(data, also):
    from megaaccum.config import resolve
    from megaaccum.lab.verification import on_ranks, shrink
    from megaaccum.lab.verification.first_samples import with_first_samples
    from megaaccum.lab.verification.verdict import Verifier

    case = Case(4, PP, MODEL + data[0] + also)
    config = parity.load(None, case.flags())
    plan = resolve(config, world_size=4)
    subject = with_first_samples(shrink.as_case(config, plan, shrink=False), plan, 1).case
    assert subject.samples["document_starts"].sum() > ROWS
    for observe, ok in ((on_ranks.start_and_observe, True), (start_blind, False)):
        verdict = Verifier(1, observing=observe).verify(subject, ["fp64"])
        assert verdict.ok == ok and not verdict.problem, verdict.problem


# --- by the commands -------------------------------------------------------------------------------------------------

PROMPTS = ("ab", "c a")


def chat_model(folder: Path) -> Path:
    """A model of transformers' with a tokenizer that has a chat template."""
    import transformers

    torch.manual_seed(5)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=128, rope_parameters=hf.LLAMA3)
    config = transformers.LlamaConfig(vocab_size=VOCAB, **sizes)
    config.initializer_range, config.eos_token_id = 0.2, 258
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


def continued(folder: Path, chat: bool) -> list[str]:
    """transformers' greedy texts."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        made = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if chat else prompt
        ids = tokenizer(made, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert all(texts)
    return texts


def test_from_jsonl_and_a_model_to_text(tmp_path):
    folder = chat_model(tmp_path / "model")
    chats, run, out = (
        write_lines(tmp_path / "chats.jsonl", conversations(40)),
        str(tmp_path / "run"),
        str(tmp_path / "out"),
    )
    hf.plan_of(folder, 1)  # writes the file that `megaaccum config` prints
    (yaml,) = tmp_path.glob("*.yaml")
    words = f"--sft true --data_path {chats} --seq_length 96 --lr 1e-2 --train_iters 6 --micro_batch_size 1"
    words += f" --global_batch_size 4 --eval_interval 3 --eval_iters 1 --split 80,20,0 --output_dir {run}"
    words += " --pipeline_model_parallel_size 2 --nproc_per_node 2 --num_threads 1"
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)] + ["--max_new_tokens", "6"]
    (rank,) = try_ranks(
        call, 1,
        [
            ["train", str(yaml), *words.split()],
            ["export", run, "--hf", out],
            ["generate", run, *prompts, "--chat", "--nproc_per_node", "2"],
            ["generate", out, *prompts, "--tensor_model_parallel_size", "2"],
            ["generate", out, *prompts, "--temperature", "1.5", "--top_k", "3", "--seed", "7"],
        ],
        init=False, timeout=200,
    )  # fmt: skip
    assert not rank.failed, f"{rank.error}\n{rank.stack}\n{rank.output}"
    assert [line for line in rank.output.splitlines() if line.startswith("exit code")] == ["exit code 0"] * 5
    assert "32 conversations of chats.jsonl in " in rank.output and "validation" in rank.output, rank.output
    by_chat, plain, drawn = (part.split("exit code")[0] for part in rank.output.split("$ generate")[1:])
    for prompt, text in zip(PROMPTS, continued(Path(out), chat=True), strict=True):
        assert f"{prompt}\n{text}\n" in by_chat
    for prompt, text in zip(PROMPTS, continued(Path(out), chat=False), strict=True):
        assert f"{prompt}{text}\n" in plain
    assert drawn != plain
    assert (Path(out) / "chat_template.jinja").is_file()
