"""Conditions of a script: [ ], [[ ]], test and (( )), as far as they can be told without running it."""

from __future__ import annotations

from collections.abc import Sequence

from megaaccum.interop.shell.expand import Variables
from megaaccum.interop.shell.lexer import Arithmetic
from megaaccum.interop.shell.parser import Simple

_NUMERIC = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def is_test(command: Simple) -> bool:
    """Whether the command is a condition."""
    first = command.words[0]
    return first.literal() in ("[", "[[", "test", "true", "false", ":", "!") or _arithmetic(command) is not None


def truth(command: Simple, variables: Variables) -> bool | None:
    """Whether the condition holds, or None where that is not known."""
    name = command.words[0].literal()
    if name in ("true", ":"):
        for word in command.words[1:]:
            variables.fields(word)  # : ${NAME:=default} sets NAME
        return True
    if name == "false":
        return False
    if name == "!":
        rest = Simple(command.words[1:], command.line)
        inner = truth(rest, variables) if rest.words and is_test(rest) else None
        return None if inner is None else not inner
    with variables.in_condition():
        if (expression := _arithmetic(command)) is not None:
            number = variables.arithmetic(expression)
            return None if number is None else number != 0
        words = command.words[1:] if name == "test" else command.words[1:-1]
        # [[ ]] does not split its words, so an empty value stays an operand.
        if name == "[[":
            return _any([variables.text(word) for word in words])
        return _any([field for word in words for field in variables.fields(word)])


def _arithmetic(command: Simple) -> str | None:
    pieces = command.words[0].pieces
    if len(command.words) == 1 and len(pieces) == 1 and isinstance(pieces[0], Arithmetic):
        return pieces[0].expression if pieces[0].raw.startswith("((") else None
    return None


def _any(words: Sequence[str]) -> bool | None:
    return _joined(words, ("||", "-o"), _all, decides=True)


def _all(words: Sequence[str]) -> bool | None:
    return _joined(words, ("&&", "-a"), _one, decides=False)


def _joined(words: Sequence[str], operators: tuple[str, str], part, *, decides: bool) -> bool | None:
    """The parts between the operators: one with the deciding value settles it, else an unknown one leaves it open."""
    results, start = [], 0
    for index in [*(i for i, word in enumerate(words) if word in operators), len(words)]:
        results.append(part(words[start:index]))
        start = index + 1
    if decides in results:
        return decides
    return None if None in results else not decides


def _one(words: Sequence[str]) -> bool | None:
    if words and words[0] == "!":
        inner = _one(words[1:])
        return None if inner is None else not inner
    if any("\x00" in word for word in words):
        return None
    match words:
        case [value]:
            return value != ""
        case ["-n", value]:
            return value != ""
        case ["-z", value]:
            return value == ""
        case [left, "=" | "==", right] if not set("*?[") & set(right):
            return left == right
        case [left, "!=", right] if not set("*?[") & set(right):
            return left != right
        case [left, operator, right] if operator in _NUMERIC:
            try:
                return _NUMERIC[operator](int(left or 0), int(right or 0))
            except ValueError:
                return None
    return None
