"""Following a launch script to its training command, and giving back the flags of that command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megaaccum.interop.shell.condition import is_test, truth
from megaaccum.interop.shell.expand import Variables
from megaaccum.interop.shell.lexer import Lexer, ShellError, Text, Word
from megaaccum.interop.shell.parser import Block, Case, Chain, Function, If, Loop, Node, Simple, parse_script

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_SETTERS = frozenset({"source", ".", "unset", "read", "mapfile", "readarray", "getopts"})
_LAUNCHER_FLAGS = re.compile(
    r"--(nproc|nnodes|node|master|rdzv|hostfile|num_nodes|num_gpus|include|exclude|launcher|rank|standalone|max_restarts"
    r"|ntasks|partition|gpus|container|mpi|job)"
)
_MODEL_FLAGS = frozenset({"--num-layers", "--hidden-size", "--micro-batch-size", "--global-batch-size", "--lr"})
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that runs a Python program with flags."""

    line: int
    flags: tuple[str, ...]


def read_words(text: str) -> list[str]:
    """The words of a list of flags, or of the training command of a shell script.

    Raises:
        ShellError: the text is no such thing, or starts training more than once.
    """
    words = Lexer(text, plain=True).tokens() if _is_list_of_flags(text) else None
    if words is None:
        return _Follower().read(text)
    variables = Variables()
    return [variables.finish(field) for word in words if isinstance(word, Word) for field in variables.fields(word)]


def _is_list_of_flags(text: str) -> bool:
    lexer = Lexer(text, plain=True)
    return lexer.skip_blanks() and lexer.peek() == "-"


class _Follower:
    """Goes through a script as the shell would, with assignments done and other commands only looked at."""

    def __init__(self) -> None:
        self.variables = Variables()
        self.functions: dict[str, Node] = {}
        self.commands: list[_Command] = []
        self.depth = 0

    def read(self, text: str) -> list[str]:
        """The flags of the training command, or of the script's lists of flags if it has no such command."""
        self._run(parse_script(text))
        commands = [command for command in self.commands if _MODEL_FLAGS & set(command.flags)] or self.commands
        if len({command.flags for command in commands}) > 1:
            lines = ", ".join(str(line) for line in sorted({command.line for command in commands}))
            raise ShellError(f"lines {lines} start training with different flags: keep one of them.")
        flags = commands[0].flags if commands else self._lists_of_flags()
        if not flags:
            raise ShellError("no command that runs a Python program with flags, and no list of flags, was found.")
        return [self.variables.finish(flag) for flag in flags]

    def _lists_of_flags(self) -> tuple[str, ...]:
        """Variables that hold flags, in order: what a file of settings has, that another script sources."""
        lists = []
        for value in self.variables.values.values():
            words = value.split() if isinstance(value, str) else [part for item in value for part in item.split()]
            if words and words[0].startswith("--") and not _LAUNCHER_FLAGS.match(words[0]):
                lists.append(tuple(words))
        # A list that is part of another one is in it already.
        whole = [part for part in lists if not any(part != other and _contains(other, part) for other in lists)]
        return tuple(word for part in dict.fromkeys(whole) for word in part)

    def _run(self, node: Node) -> bool | None:
        """Follow one node; gives back whether it succeeded, None where that is not known."""
        match node:
            case Block():
                result: bool | None = True
                for part in node.nodes:
                    result = self._run(part)
                return result
            case Simple():
                return truth(node, self.variables) if is_test(node) else self._simple(node)
            case Chain():
                return self._chain(node)
            case If():
                self._if(node)
            case Case():
                self._case(node)
            case Loop():
                self._loop(node)
            case Function():
                self.functions[node.name] = node.body
        return None

    def _chain(self, chain: Chain) -> bool | None:
        result: bool | None = True
        for operator, node in chain.links:
            skipped = (operator == "&&" and result is False) or (operator == "||" and result is True)
            if skipped:
                continue
            if operator and result is None:
                self._perhaps([node], f"the condition on line {_line(node)}")
            else:
                result = self._run(node)
        return result

    def _if(self, node: If) -> None:
        for number, (condition, body) in enumerate(node.branches):
            holds = True if condition is None else self._holds(condition)
            if holds:
                self._run(body)
                return
            if holds is None:
                rest = [body for _, body in node.branches[number:]]
                self._perhaps(rest, f"the condition on line {node.line}")
                return

    def _holds(self, condition: Block) -> bool | None:
        """The truth of a condition; that of an ordinary command is not known."""
        node = condition.nodes[-1] if condition.nodes else None
        if isinstance(node, Chain):
            links = [link for _, link in node.links]
            if not all(isinstance(link, Simple) and is_test(link) for link in links):
                return None
        elif not (isinstance(node, Simple) and is_test(node)):
            return None
        return self._run(condition)

    def _loop(self, node: Loop) -> None:
        if node.condition is not None and self._holds(node.condition) is node.until:
            return
        if node.variable:
            self._forget(node.variable, f"${node.variable} changes in the loop on line {node.line}")
        self._perhaps([node.body], f"the loop on line {node.line}")

    def _case(self, node: Case) -> None:
        subject = self.variables.text(node.subject)
        patterns = [[self.variables.text(word) for word in words] for words, _ in node.arms]
        if "\x00" in subject or any("\x00" in pattern for arm in patterns for pattern in arm):
            self._perhaps([body for _, body in node.arms], f"the case on line {node.line}")
            return
        for arm, (_, body) in zip(patterns, node.arms, strict=True):
            if any(fnmatchcase(subject, pattern) for pattern in arm):
                self._run(body)
                return

    def _perhaps(self, bodies: Sequence[Node], condition: str) -> None:
        """Follow branches of which it is not known whether they run: what they set is not known afterwards."""
        before = dict(self.variables.values)
        outcomes: dict[str, list[str | list[str] | None]] = {}
        for body in bodies:
            self.variables.values = dict(before)
            self._run(body)
            after = self.variables.values
            for name in sorted(after.keys() | before.keys()):
                if after.get(name) != before.get(name):
                    outcomes.setdefault(name, []).append(after.get(name))
        self.variables.values = before
        for name, values in outcomes.items():
            self._forget(name, f"${name} depends on {condition}, which only running the script tells", values)

    def _forget(self, name: str, reason: str, outcomes: Sequence[str | list[str] | None] = ()) -> None:
        """The variable's value is unknown; what every outcome only adds to stays known."""
        values, before = self.variables.values, self.variables.values.get(name)
        marker = self.variables.marker(f"${name}", reason)
        if isinstance(before, str) and before and all(isinstance(o, str) and o.startswith(before) for o in outcomes):
            values[name] = f"{before} {marker}" if outcomes else marker
        elif isinstance(before, list) and all(isinstance(o, list) and o[: len(before)] == before for o in outcomes):
            values[name] = [*before, marker] if outcomes else marker
        else:
            values[name] = marker

    def _simple(self, command: Simple) -> bool:
        words = list(command.words)
        assignments = []
        while words and (match := _assignment(words[0])):
            assignments.append((match, words.pop(0)))
        if not words:
            for match, word in assignments:
                self._assign(match, word)
        elif words[0].literal() in _DECLARE:
            for word in words[1:]:
                if match := _assignment(word):
                    self._assign(match, word)
        else:
            self._look_at([field for word in words for field in self.variables.fields(word)], command.line)
        return True

    def _assign(self, match: re.Match[str], word: Word) -> None:
        name, index, append = match[1], match[2], bool(match[3])
        values = self.variables.values
        if index:
            self._forget(name, f"${name} is set element by element on line {word.line}, which is not followed here")
        elif word.array is not None:
            elements = [field for element in word.array for field in self.variables.fields(element)]
            old = values.get(name, []) if append else []
            values[name] = ([old] if isinstance(old, str) else old) + elements
        else:
            text = self.variables.text(_without(word, match.end()))
            old = values.get(name, "") if append else ""
            values[name] = [old[0] + text, *old[1:]] if isinstance(old, list) and old else f"{old or ''}{text}"

    def _look_at(self, argv: list[str], line: int) -> None:
        """A command that is not run: it may set variables, hold another script's text, or start training."""
        if not argv or argv[0] in ("echo", "printf"):
            return
        name = argv[0]
        if name.startswith("--"):
            raise ShellError(
                f"line {line} begins with a flag, {name}, and belongs to no command: the line before it has no"
                " backslash at its end, or is a comment."
            )
        if name in self.functions:
            self._call(self.functions[name], argv[1:], line)
        elif name in _SETTERS:
            self._set_by(name, argv[1:], line)
        elif name == "eval":
            self._nested(" ".join(argv[1:]), line)
        elif (script := _shell_text(argv)) is not None:
            self._nested(script, line)
        elif (flags := _flags_of_python(argv)) is not None:
            self.commands.append(_Command(line, flags))

    def _set_by(self, name: str, words: list[str], line: int) -> None:
        if name in ("source", "."):
            self.variables.sourced += [str(self.variables.finish(word)) for word in words[:1]]
        for word in words if name not in ("source", ".") else ():
            if name == "unset":
                self.variables.values.pop(word, None)
            elif word.isidentifier():
                self._forget(word, f"${word} is read on line {line} when the script runs")

    def _nested(self, text: str, line: int) -> None:
        self._deeper(lambda: self._run(parse_script(text, first_line=line)), line)

    def _call(self, body: Node, arguments: list[str], line: int) -> None:
        before, self.variables.arguments = self.variables.arguments, arguments
        self._deeper(lambda: self._run(body), line)
        self.variables.arguments = before

    def _deeper(self, action: Callable[[], object], line: int) -> None:
        if self.depth >= _DEEPEST:
            raise ShellError(f"line {line}: commands are nested more than {_DEEPEST} deep.")
        self.depth += 1
        action()
        self.depth -= 1


def _line(node: Node) -> int:
    match node:
        case Block():
            return _line(node.nodes[0]) if node.nodes else 0
        case Chain():
            return _line(node.links[0][1])
        case Function():
            return _line(node.body)
    return node.line


def _assignment(word: Word) -> re.Match[str] | None:
    """NAME=, NAME+= or NAME[...]= at the start of a word, unquoted."""
    start = ""
    for piece in word.pieces:
        if not isinstance(piece, Text) or piece.quoted:
            break
        start += piece.text
    return _ASSIGNMENT.match(start)


def _without(word: Word, length: int) -> Word:
    """The word without its first characters, which are unquoted text."""
    pieces = list(word.pieces)
    while length:
        first = pieces.pop(0)
        assert isinstance(first, Text)
        if len(first.text) > length:
            pieces.insert(0, Text(first.text[length:], first.quoted))
        length = max(0, length - len(first.text))
    return Word(word.line, pieces)


def _shell_text(argv: Sequence[str]) -> str | None:
    """The text after bash -c or sh -c, wherever in the command (srun ... bash -c "...")."""
    for index, word in enumerate(argv[:-2]):
        if word.rsplit("/", 1)[-1] in ("bash", "sh") and re.fullmatch(r"-\w*c", argv[index + 1]):
            return argv[index + 2]
    return None


def _flags_of_python(argv: Sequence[str]) -> tuple[str, ...] | None:
    """What follows the Python program in a command, if flags do."""
    for index, word in enumerate(argv):
        if word.endswith(".py") or (index and argv[index - 1] == "-m" and not word.startswith("torch.distributed")):
            flags = tuple(argv[index + 1 :])
            return flags if any(flag.startswith("--") or "\x00" in flag for flag in flags) else None
    return None


def _contains(whole: tuple[str, ...], part: tuple[str, ...]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
