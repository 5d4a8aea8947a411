"""Conversations of JSONL files: which tokens they become, which count, and how they are put into rows."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing

from megaaccum.errors import DataError
from megaaccum.pretrain.data.chat_rows import Part, put_in_rows
from megaaccum.pretrain.data.chats import Chats, ChatTokenizer, parse, read_chats
from megaaccum.pretrain.data.dataset import Datasets, build_datasets
from tests.support.chats import CHATML, conversations, write_lines, write_tokenizer
from tests.support.configs import make
from tests.support.data_samples import make_plan

MARKED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n",
)
ASIDE = CHATML.replace("{{ message['content'] }}", "{% if loop.last %}(thinking){% endif %}{{ message['content'] }}")
TALK = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "cd"}]


def tokenizer_of(folder: Path, template: str | None = CHATML, **keys: Any) -> ChatTokenizer:
    write_tokenizer(folder, template)
    return ChatTokenizer(make(sft=True, tokenizer_model=str(folder), **keys).data)


def counted(tokenizer: ChatTokenizer, record: dict[str, Any], **options: Any) -> str:
    """The text of the tokens that count."""
    ids, counts = tokenizer.encode(parse(record, "here"), "here", **{"only_responses": True} | options)
    return tokenizer._tokenizer.decode([i for i, counting in zip(ids, counts, strict=True) if counting])


def test_responses_count(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    assert counted(tokenizer, {"messages": TALK}) == "cd<|im_end|>\n"
    assert counted(tokenizer, {"messages": TALK * 2}) == "cd<|im_end|>\n" * 2
    assert counted(tokenizer, {"prompt": "a b", "response": "cd"}) == "cd<|im_end|>\n"
    assert counted(tokenizer, {"prompt": TALK + TALK[:1], "completion": TALK[1:]}) == "cd<|im_end|>\n"
    assert counted(tokenizer, {"messages": TALK}, only_responses=False).startswith("<|im_start|>user\na b")


def test_a_template_that_leaves_out_functions_or_calls_is_refused(tmp_path):
    """The response would be empty, and the model learn to say nothing where it should call a function."""
    weather = {"type": "function", "function": {"name": "weather", "arguments": {"place": "a"}}}
    called = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [weather]}]
    calls = "{% for each in message.tool_calls or [] %}<call>{{ each.function.name }}{% endfor %}<|im_end|>"
    shown = "{% for each in tools or [] %}{{ each.function.name }}{% endfor %}" + CHATML
    plain, calling, showing = (
        tokenizer_of(tmp_path / name, template)
        for name, template in (("a", CHATML), ("b", CHATML.replace("<|im_end|>", calls)), ("c", shown))
    )
    assert counted(calling, {"messages": called}) == "<call>weather<|im_end|>\n"
    assert counted(calling, {"messages": [TALK[0], called[1] | {"content": None}]}).endswith(
        "<call>weather<|im_end|>\n"
    )
    assert counted(showing, {"messages": TALK, "tools": [weather]}) == "cd<|im_end|>\n"
    marking = tokenizer_of(tmp_path / "d", shown.replace(CHATML, MARKED))
    assert counted(marking, {"messages": TALK, "tools": [weather]}) == "cd<|im_end|>"
    assert counted(plain, {"messages": TALK, "tools": []}) == "cd<|im_end|>\n"
    for tokenizer, record in (
        (plain, {"messages": called}),
        (plain, {"messages": TALK, "tools": [weather]}),
        (calling, {"messages": TALK, "tools": [weather]}),
    ):
        with pytest.raises(DataError, match="here: the chat template leaves out the function weather"):
            counted(tokenizer, record)


def test_a_template_that_marks_responses_decides(tmp_path):
    tokenizer = tokenizer_of(tmp_path, MARKED)
    assert counted(tokenizer, {"messages": TALK * 2}) == "cd<|im_end|>" * 2
    assert counted(tokenizer, {"prompt": TALK + TALK[:1], "completion": TALK[1:]}) == "cd<|im_end|>"
    assert counted(tokenizer, {"messages": TALK}, only_responses=False).startswith("<|im_start|>user\na b")


@pytest.mark.parametrize("reply", ["cd", "c\u0301", "xe\u0301", "x\N{GRINNING FACE}", "  cd  ", "\u0301"])
def test_marked_responses_end_where_the_template_says(tmp_path, reply):
    """Whatever the tokenizer makes of their last letters: several tokens, or one of two letters."""
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    folder = write_tokenizer(tmp_path, template)
    written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" {2,}"), " ")])
    written.save(str(folder / "tokenizer.json"))
    tokenizer = ChatTokenizer(make(sft=True, tokenizer_model=str(folder)).data)
    turns = [TALK[0], TALK[1] | {"content": reply}, *TALK]
    expected = re.sub(" +", " ", unicodedata.normalize("NFC", reply))
    assert counted(tokenizer, {"messages": turns}) == f"{expected}cd"


def test_a_marked_call_without_a_text_counts_alone(tmp_path):
    """Its `content: null` is left out, as in transformers, and not the word None, by which all that follows moves."""
    call = "{{ message.content }}{% for each in message.tool_calls or [] %}{{ each.function.name }}{% endfor %}"
    tokenizer = tokenizer_of(
        tmp_path, MARKED.replace("{% generation %}{{ message['content'] }}", "{% generation %}" + call)
    )
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]}
    assert counted(tokenizer, {"messages": [TALK[0], called, *TALK]}) == "weather<|im_end|>cd<|im_end|>"


def test_tokens_are_those_of_transformers(tmp_path):
    """The template writes the token that begins a text, so the tokenizer adds no second one."""
    tokenizer = tokenizer_of(tmp_path)
    first = ("<|endoftext|>", 256)
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first[0]} $A", special_tokens=[first]
    )
    assert tokenizer._tokenizer("a")["input_ids"][0] == first[1]
    for record in conversations(8):
        chat = parse(record, "here")
        ids, _ = tokenizer.encode(chat, "here", only_responses=True)
        assert ids == tokenizer._tokenizer.apply_chat_template(chat.messages, return_dict=True)["input_ids"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"text": "a"}, "needs messages, or prompt and completion; this one has ['text']"),
        ({"messages": "a"}, "must be a list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "must be a list of objects with role and content"),
        ({"messages": [*TALK, {"role": "assistant", "content": None}]}, "role and content (null: with tool_calls)"),
        ({"prompt": 5, "completion": "a"}, "must be a list of objects with role and content"),
        ({"messages": TALK[:1]}, "no message of the assistant"),
        ({"messages": TALK[1:]}, "cannot begin with the assistant"),
        ({"prompt": TALK, "completion": TALK[:1]}, "no message of the assistant"),
        ({"messages": [*TALK, TALK[0], TALK[1] | {"weight": 0}]}, "a message's weight is not read: give what counts"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(record, text):
    with pytest.raises(DataError, match="here: ") as caught:
        parse(record, "here")
    assert text in str(caught.value)


def test_a_content_of_parts_is_no_text_of_python(tmp_path):
    """A template for texts would have the parts learnt as `[{'type': ...`."""
    parts = {"messages": [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "cd"}]}]}
    with pytest.raises(DataError, match=r"writes \[\{'type': 'text', 'text': 'cd'\}\] as it is"):
        counted(tokenizer_of(tmp_path), parts)
    of_parts = CHATML.replace("message['content']", "message['content'][0]['text'] or message['content']")
    assert counted(tokenizer_of(tmp_path / "parts", of_parts), parts) == "cd<|im_end|>\n"


def test_half_a_surrogate_pair_is_named_with_its_line(tmp_path):
    """A tokenizer's own error is about its arguments."""
    tokenizer = tokenizer_of(tmp_path)
    for chat in ([TALK[0] | {"content": "\ud800"}, TALK[1]], [TALK[0], TALK[1] | {"content": "a\udc00"}]):
        with pytest.raises(DataError, match="here: a message holds half a surrogate pair"):
            tokenizer.encode(parse({"messages": chat}, "here"), "here", only_responses=True)


def test_a_template_that_hides_responses_is_refused(tmp_path):
    tokenizer = tokenizer_of(tmp_path, ASIDE)
    with pytest.raises(DataError, match=r"here: the chat template writes message 2 in another way"):
        counted(tokenizer, {"messages": TALK * 2})
    assert "a b" in counted(tokenizer, {"messages": TALK * 2}, only_responses=False)
    thinking = tokenizer_of(tmp_path / "thinking", CHATML.replace("assistant\n", "assistant\n<think>"))
    with pytest.raises(DataError, match=r"here: the chat template writes message 2 in another way"):
        counted(thinking, {"messages": TALK})
    raising = tokenizer_of(tmp_path / "raising", "{{ raise_exception('alternate!') }}")
    with pytest.raises(DataError, match="here: the chat template raises TemplateError: alternate!"):
        counted(raising, {"messages": TALK})


def test_a_tokenizer_without_template_is_refused_and_given_one(tmp_path):
    with pytest.raises(DataError, match=r"no chat template of its own.*chat_template_path"):
        tokenizer_of(tmp_path, None)
    (tmp_path / "mine.jinja").write_text(CHATML)
    tokenizer = tokenizer_of(tmp_path, None, chat_template_path=str(tmp_path / "mine.jinja"))
    assert counted(tokenizer, {"messages": TALK}) == "cd<|im_end|>\n"


# --- rows ------------------------------------------------------------------------------------------------------------


def made_up(lengths: list[int]) -> Chats:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    counts = np.ones(starts[-1], dtype=bool)
    return Chats(digest="", tokens=np.arange(starts[-1], dtype=np.int32), counts=counts, starts=starts)


def test_rows_hold_every_conversation_once_and_are_full():
    lengths = [2 + i * 7 % 15 for i in range(300)]
    packed = put_in_rows(made_up(lengths), range(300), 16, packed=True)
    assert Counter(n for row in packed.rows for n in row) == Counter(range(300))
    assert all(sum(lengths[n] - 1 for n in row) <= 16 for row in packed.rows)
    total = sum(lengths) - 300
    assert len(packed) <= 1.03 * total / 16, "best fit decreasing leaves hardly any room"
    alone = put_in_rows(made_up(lengths), range(300), 16, packed=False)
    assert alone.rows == [[n] for n in sorted(range(300), key=lambda n: (-lengths[n], n))]


def test_a_row_is_its_conversations_one_after_the_other():
    chats = made_up([4, 30, 3])
    chats.counts[[0, 1, 4, 5]] = False
    sample = put_in_rows(chats, range(3), 8, packed=True)
    long, short = sample[0], sample[1]
    assert long["tokens"].tolist() == list(range(4, 12)) and long["labels"].tolist() == list(range(5, 13))
    assert long["loss_mask"].tolist() == [0] + [1] * 7, "what does not fit is cut"
    assert short["tokens"].tolist() == [0, 1, 2, 34, 35, 0, 0, 0]
    assert short["labels"].tolist() == [1, 2, 3, 35, 36, 0, 0, 0]
    assert short["loss_mask"].tolist() == [0, 1, 1, 1, 1, 0, 0, 0]
    assert short["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert short["document_starts"].nonzero().flatten().tolist() == [0, 3, 5]
    assert "document_starts" not in put_in_rows(chats, range(3), 8, packed=False)[0]


def test_a_conversation_whose_response_does_not_fit_is_left_out():
    chats = made_up([4, 30])
    chats.counts[4:20] = False
    assert put_in_rows(chats, range(2), 8, packed=True).rows == [[0]]
    with pytest.raises(DataError, match="none of 1 conversations has a response in its first 8 tokens"):
        put_in_rows(chats, range(1, 2), 8, packed=True)


def test_conversations_that_lose_their_end_are_counted():
    part = Part(
        path=Path("a"),
        rows=put_in_rows(made_up([4, 9, 10, 30]), range(4), 8, packed=False),
        weight=1.0,
        left_out=0,
        digest="",
    )
    assert str(part) == "4 conversations of a in 4 rows, 2 of them cut to 9 tokens"


# --- datasets --------------------------------------------------------------------------------------------------------


def datasets(folder: Path, lines: int = 40, **keys: Any) -> Datasets:
    write_tokenizer(folder)
    write_lines(folder / "chats.jsonl", conversations(lines))
    defaults = dict(sft=True, tokenizer_model=str(folder), data_path=[str(folder / "chats.jsonl")], seq_length=96)
    return build_datasets(make_plan(folder, **defaults | dict(split="80,20,0") | keys))


def test_the_kept_tokens_of_each_conversation_are_its_own(tmp_path):
    config = make(sft=True, tokenizer_model=str(write_tokenizer(tmp_path)))
    chats = read_chats(write_lines(tmp_path / "chats.jsonl", conversations(4)), config.data, tmp_path)
    for number, record in enumerate(conversations(4)):
        one = slice(*chats.starts[number : number + 2])
        ids, counts = ChatTokenizer(config.data).encode(parse(record, "here"), "here", only_responses=True)
        assert (chats.tokens[one].tolist(), chats.counts[one].tolist()) == (ids, counts)


def test_validation_has_all_of_a_file_of_its_own(tmp_path):
    other = str(write_lines(tmp_path / "other.jsonl", conversations(12, seed=1)))
    files = dict(data_path=None, train_data_path=[str(tmp_path / "chats.jsonl")], valid_data_path=[other], split=None)
    data = datasets(tmp_path, **files, eval_iters=3, reset_attention_mask=False)
    assert data.facts["data"] == "40 conversations of chats.jsonl in 40 rows" and data.facts["split"] == "None"
    assert data.valid is not None and data.valid_batches == 3
    alone = datasets(tmp_path, data_path=[other], split="100,0,0", eval_iters=0, reset_attention_mask=False)
    valid = [tuple(data.valid[i]["tokens"].tolist()) for i in range(12)]
    assert valid == rows_of(alone, 12)


def rows_of(data: Datasets, count: int) -> list[tuple[int, ...]]:
    return [tuple(data.train[i]["tokens"].tolist()) for i in range(count)]


def test_passes_have_the_same_rows_in_other_orders(tmp_path):
    data = datasets(tmp_path)
    assert data.facts["data"].startswith("32 conversations of chats.jsonl in ")
    size = int(data.facts["data"].split(" in ")[1].split()[0])
    assert 4 < size < 32
    first, second = rows_of(data, size), rows_of(data, 2 * size)[size:]
    assert set(first) == set(second) and first != second and len(set(first)) == size
    assert data.valid is not None and len(data.valid) == 4 * data.valid_batches
    assert not {tuple(data.valid[i]["tokens"].tolist()) for i in range(len(data.valid))} & set(first)
    assert rows_of(datasets(tmp_path), size) == first and rows_of(datasets(tmp_path, seed=2), size) != first


def test_conversations_that_are_left_out_are_counted(tmp_path):
    text = datasets(tmp_path, seq_length=24).facts["data"]
    used, left_out = re.findall(r"(\d+) (?:conversations|left out: no response in the first 25$)", text)
    assert int(used) + int(left_out) == 32 and int(used) > 0 and int(left_out) > 0


def test_a_file_that_is_too_short_for_validation_is_named_with_its_share(tmp_path):
    with pytest.raises(DataError, match=r"conversations 1 to 1 of 1: none of 0 conversations .* or eval_iters to 0"):
        datasets(tmp_path, 1)


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(tmp_path):
    data = datasets(tmp_path)
    longer = datasets(tmp_path, train_iters=30)
    assert rows_of(longer, 40) == rows_of(data, 40)
    state = json.loads(json.dumps(data.state(20)))
    later = longer.after(state, consumed=20, needed=60)
    assert longer.differences(state) == {}
    assert rows_of(later, 60) == rows_of(longer, 60)


def test_with_another_seed_a_corpus_begins_at_its_first_row(tmp_path):
    data, other = datasets(tmp_path), datasets(tmp_path, seed=2)
    size = int(data.facts["data"].split(" in ")[1].split()[0])
    later = other.after(data.state(4), consumed=4, needed=4 + size)
    assert rows_of(later, 4 + size)[4:] == rows_of(other, size)


def test_other_conversations_are_other_data(tmp_path):
    data = datasets(tmp_path)
    assert datasets(tmp_path, lines=41).differences(data.state(0))
    assert "assistant_only_loss: True in the checkpoint, False here" in datasets(
        tmp_path, assistant_only_loss=False
    ).differences(data.state(0))


def test_another_token_that_the_template_names_is_other_data(tmp_path):
    """The tokens of conversations are kept in files, and tokenizer_config.json alone may change them."""
    write_lines(tmp_path / "chats.jsonl", conversations(4))
    config = make(sft=True, tokenizer_model=str(tmp_path))
    for bos in ("<|endoftext|>", "<|im_start|>"):
        facts = json.loads(
            (write_tokenizer(tmp_path, "{{ bos_token }}" + CHATML) / "tokenizer_config.json").read_text()
        )
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts | {"bos_token": bos}))
        chats = read_chats(tmp_path / "chats.jsonl", config.data, tmp_path)
        assert ChatTokenizer(config.data)._tokenizer.decode(chats.tokens[:1]) == bos
