"""Conversations of JSONL files as tokens, of which the responses count: text by the tokenizer's chat template.

A line has `messages`, as OpenAI, TRL and Megatron name them, or `prompt` and `completion` (or `response`), as texts or
lists of messages. The text is what transformers' apply_chat_template makes of it, and so are its tokens. A token counts
if it begins in a response: in the text that the template adds for an assistant's message after its generation prompt,
or between {% generation %} and {% endgeneration %} of a template that has them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megaaccum.config.schema import DataConfig
from megaaccum.errors import DataError
from megaaccum.pretrain.data.documents import json_lines
from megaaccum.pretrain.data.files import digest_of, disk_errors, make_once, staging_folder
from megaaccum.pretrain.data.tokenizer import single_threaded, tokenizer_file

Message = dict[str, Any]

_RECIPE, _MARKED_RECIPE = 1, 2
"""Counts changes in how tokens are made of a line, so that a new version does not read an old one's files. The second
is of templates that mark responses."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ARRAYS = ("tokens", "counts", "starts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """The conversations of one file, one after the other."""

    digest: str
    """Hash of the file and of everything that makes tokens of it, 16 hexadecimal digits."""
    tokens: np.ndarray
    """Token ids, int32 [tokens]."""
    counts: np.ndarray
    """Whether a token is in a response, bool [tokens]."""
    starts: np.ndarray
    """The first token of each conversation, and the number of all tokens, int64 [conversations + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a line. first: the number of the first message that may count. tools: functions that the template
    shows, or None."""

    messages: list[Message]
    first: int
    tools: list[Any] | None


def parse(record: dict[str, Any], where: str) -> Conversation:
    """The conversation in a line's object. Raises DataError, naming the line, for one that has no response."""
    answer = next((name for name in ("completion", "response") if name in record), None)
    if "messages" in record:
        messages, first = record["messages"], 0
    elif "prompt" in record and answer is not None:
        prompt = _turns(record["prompt"], "user")
        messages, first = prompt + _turns(record[answer], "assistant"), len(prompt)
    else:
        raise DataError(f"{where}: a line needs messages, or prompt and completion; this one has {sorted(record)}")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise DataError(f"{where}: messages must be a list of objects with role and content (null: with tool_calls)")
    if any(message.get("weight") not in (None, 1) for message in messages):
        raise DataError(f"{where}: a message's weight is not read: give what counts as the completion of a prompt")
    if messages[:1] and messages[0]["role"] == "assistant":
        raise DataError(f"{where}: a conversation cannot begin with the assistant: put a user's message before it")
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise DataError(f"{where}: no message of the assistant: there is nothing to learn")
    said = [{name: value for name, value in each.items() if value is not None} for each in messages]  # as transformers
    return Conversation(said, first, record.get("tools"))


def _is_message(given: Any) -> bool:
    is_turn = isinstance(given, dict) and isinstance(given.get("role"), str) and "content" in given
    return is_turn and (given["content"] is not None or bool(given.get("tool_calls")))


def _turns(given: Any, role: str) -> list[Any]:
    if isinstance(given, list):
        return given
    return [{"role": role, "content": given}] if isinstance(given, str) else [given]


class ChatTokenizer:
    """Makes tokens of conversations by a chat template."""

    def __init__(self, data: DataConfig):
        """Raise DataError without transformers, a tokenizer or a chat template."""
        self.folder = tokenizer_file(data.tokenizer_model or "").parent
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError("chat templates are made into text by transformers: pip install transformers") from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, use_fast=True)
        except Exception as error:  # the library raises whatever its parts do
            raise DataError(f"tokenizer_model {self.folder}: transformers cannot read it: {error}") from error
        if data.chat_template_path is not None:
            with disk_errors("cannot read chat_template_path", Path(data.chat_template_path)):
                self._tokenizer.chat_template = Path(data.chat_template_path).read_text(encoding="utf-8")
        if not isinstance(self._tokenizer.chat_template, str) or not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer in {self.folder} has no chat template of its own, or no tokenizer.json: give"
                " chat_template_path a template (Jinja), or tokenizer_model the folder of an instruction-tuned model"
            )
        self.template: str = self._tokenizer.chat_template

    @property
    def facts(self) -> str:
        """Its tokens, and those that a template may name (bos_token), which tokenizer_config.json may change."""
        return f"{self._tokenizer.backend_tokenizer.to_str()}{self._tokenizer.special_tokens_map}"

    @property
    def stops(self) -> set[int]:
        """The tokens that end a response: the first special one that the template writes after it, and the tokenizer's
        eos_token, which of a base model is another; empty if there are none."""
        talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "response"}]
        try:
            _, found, rest = self.render(talk, None).rpartition("response")
        except Exception as error:  # a template is a program
            raise DataError(f"{self.folder}: the chat template raises {type(error).__name__}: {error}") from error
        added = self._tokenizer.added_tokens_decoder  # some are white space, as Gemma's
        ends = [each for each in self._ids(rest)[0] if found and each in added and added[each].content.strip()]
        return {*ends[:1], self._tokenizer.eos_token_id} - {None}

    def prompt(self, text: str) -> list[int]:
        """The tokens of a user's message, up to where the response begins."""
        return self._ids(self.render([{"role": "user", "content": text}], None, prompts=True))[0]

    def encode(self, chat: Conversation, where: str, *, only_responses: bool) -> tuple[list[int], list[bool]]:
        """(token ids, whether each counts). Raises DataError, naming the line, if the template refuses it, or does not
        show where responses are."""
        try:
            text = self.render(chat.messages, chat.tools)
            parts = [str(each["content"]) for each in chat.messages if isinstance(each.get("content"), list)]
            if raw := [each for each in parts if each in text]:
                raise DataError(f"{where}: the chat template writes {raw[0][:80]} as it is: make it a text")
            functions = [*(chat.tools or ()), *(call for m in chat.messages for call in m.get("tool_calls") or ())]
            if lost := [name for f in functions if (name := f.get("function", f).get("name", "")) not in text]:
                raise DataError(f"{where}: the chat template leaves out the function {lost[0]}: give one that has it")
            text.encode()  # the tokenizer's error would not say which text it is
            ids, begins = self._ids(text)
            find = self._marked if _MARKS.search(self.template) else self._spans
            spans = find(chat, text, where) if only_responses else [(0, len(text))]
        except DataError:
            raise
        except UnicodeEncodeError:
            raise DataError(f"{where}: a message holds half a surrogate pair, which is no text") from None
        except Exception as error:  # a template is a program
            raise DataError(f"{where}: the chat template raises {type(error).__name__}: {error}") from error
        return ids, [any(start <= begin < stop for start, stop in spans) for begin in begins]

    def render(self, messages: list[Message], tools: list[Any] | None, *, prompts: bool = False) -> str:
        """The text of messages. prompts: up to where a response to them begins."""
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompts
        )
        return rendered

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and where in the text each begins."""
        with single_threaded():
            made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return made["input_ids"], [begin for begin, _ in made["offset_mapping"]]

    def _spans(self, chat: Conversation, text: str, where: str) -> list[tuple[int, int]]:
        """The characters of `text` that are responses."""
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant" or number < chat.first:
                continue
            before = self.render(chat.messages[:number], chat.tools, prompts=True)
            after = self.render(chat.messages[: number + 1], chat.tools)
            if not after.startswith(before) or not text.startswith(after):
                raise DataError(
                    f"{where}: the chat template writes message {number + 1} in another way if others follow it, or"
                    " after its generation prompt, so where the response lies cannot be seen: put {% generation %} and"
                    " {% endgeneration %} around the assistant's text in it (chat_template_path), make a line of each"
                    " response, or set assistant_only_loss to false"
                )
            spans.append((len(before), len(after)))
        return spans

    def _marked(self, chat: Conversation, text: str, where: str) -> list[tuple[int, int]]:
        """The characters of `text` that the template marks as the assistant's. Which tokens have them is counted here:
        transformers' assistant_masks leave out the last letter's further tokens, and go on to the end of the text if
        the last letter begins no token (huggingface/transformers#47325)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        facts = self._tokenizer.special_tokens_map
        made: Any = render_jinja_template(  # its own type is of the text alone
            [chat.messages], chat.tools, chat_template=self.template, return_assistant_tokens_mask=True, **facts
        )
        prompt = len(self.render(chat.messages[: chat.first], chat.tools)) if chat.first else 0
        return [(max(start, prompt), stop) for start, stop in made[1][0]]


def read_chats(path: Path, data: DataConfig, folder: Path) -> Chats:
    """The conversations of a JSONL file; made into tokens once and kept in `folder`. Any number of processes may call
    it at once. Raises DataError."""
    tokenizer = ChatTokenizer(data)
    digest = _digest(path, tokenizer, data.assistant_only_loss)
    kept = folder / "chats" / digest
    make_once(kept, folder / ".lock", lambda: _write(path, tokenizer, data.assistant_only_loss, kept))
    with disk_errors("cannot read", kept):
        tokens, counts, starts = (np.load(kept / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
    return Chats(digest=digest, tokens=tokens, counts=counts, starts=starts)


def _digest(path: Path, tokenizer: ChatTokenizer, only_responses: bool) -> str:
    with disk_errors("cannot read", path), open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    made_by = hashlib.sha256(tokenizer.facts.encode()).hexdigest()
    recipe = _MARKED_RECIPE if only_responses and _MARKS.search(tokenizer.template) else _RECIPE
    return digest_of([recipe, content, made_by, tokenizer.template, only_responses, version("transformers")])


def _write(path: Path, tokenizer: ChatTokenizer, only_responses: bool, folder: Path) -> None:
    """Make tokens of a file's conversations into `folder`, which appears complete."""
    chats: list[tuple[np.ndarray, np.ndarray]] = []
    for where, record in json_lines(path):
        ids, counting = tokenizer.encode(parse(record, where), where, only_responses=only_responses)
        if not any(counting[1:]):
            raise DataError(f"{where}: no token counts: the responses are empty")
        chats.append((np.array(ids, dtype=np.int32), np.array(counting, dtype=bool)))
    if not chats:
        raise DataError(f"{path} has no line: a conversation a line, as messages or prompt and completion")
    tokens, counts = map(np.concatenate, zip(*chats, strict=True))
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in chats])])
    with staging_folder(folder) as staging, disk_errors("cannot write conversations to", folder):
        staged = staging / "chats"
        staged.mkdir()
        for name, array in zip(_ARRAYS, (tokens, counts, starts), strict=True):
            np.save(staged / f"{name}.npy", array)
        staged.rename(folder)
