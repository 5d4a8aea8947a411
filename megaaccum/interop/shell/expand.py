"""Words of a script into fields, with the values of its variables; what only execution tells is kept as a marker."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megaaccum.interop.megatron_reading import Unresolved
from megaaccum.interop.shell.lexer import Arithmetic, Lexer, Opaque, Param, Piece, Text, Word

_MARKER = re.compile("\x00(\\d+)\x01")


@dataclass(slots=True)
class Variables:
    """The variables of a script as far as it has been followed.

    The environment and the script's arguments count as empty: ${NAME:-default} gives the default. A bare $NAME that
    the script does not set stands for something unknown, a marker in the text.
    """

    values: dict[str, str | list[str]] = field(default_factory=dict)
    """Text, or the elements of an array."""
    arguments: list[str] = field(default_factory=list)
    """$1 ... inside a function; empty for the script itself."""
    sourced: list[str] = field(default_factory=list)
    """Files that the script sources, which are not read."""
    unset_is_empty: bool = False
    """Inside a condition, [ -z "$NAME" ] asks exactly whether the name is set."""
    _unknown: list[tuple[str, str]] = field(default_factory=list)

    def marker(self, raw: str, reason: str) -> str:
        """Text that stands for an unknown value written as `raw`."""
        self._unknown.append((raw, reason))
        return f"\x00{len(self._unknown) - 1}\x01"

    def finish(self, text: str) -> str:
        """The text with its markers as they were written: an `Unresolved` if there were any."""
        numbers = [int(number) for number in _MARKER.findall(text)]
        if not numbers:
            return text
        plain = _MARKER.sub(lambda match: self._unknown[int(match[1])][0], text)
        return Unresolved(plain, tuple(dict.fromkeys(self._unknown[number][1] for number in numbers)))

    @contextmanager
    def in_condition(self) -> Iterator[None]:
        before, self.unset_is_empty = self.unset_is_empty, True
        try:
            yield
        finally:
            self.unset_is_empty = before

    def fields(self, word: Word) -> list[str]:
        """The word as the fields that a command gets: quotes removed, unquoted values split at blanks."""
        parts: list[str] = []
        open_part = False  # whether the next text goes on with the last field
        for piece in word.pieces:
            if isinstance(piece, Text):
                if open_part:
                    parts[-1] += piece.text
                elif piece.text or piece.quoted:
                    parts.append(piece.text)
                    open_part = True
                continue
            chunks = self._chunks(piece, word.line)
            if not chunks and open_part and parts[-1] == "":
                # "${EMPTY[@]}" is no field at all, though its quotes have begun one.
                parts.pop()
                open_part = False
            for index, chunk in enumerate(chunks):
                joins = open_part and index == 0 and not chunk[:1].isspace()
                pieces = [chunk] if piece.quoted else chunk.split()
                if joins and pieces:
                    parts[-1] += pieces.pop(0)
                parts += pieces
                open_part = bool(parts) and (piece.quoted or (bool(chunk) and not chunk[-1:].isspace()) or joins)
        return parts

    def text(self, word: Word) -> str:
        """The word as one text, as in an assignment: nothing is split."""
        parts = []
        for piece in word.pieces:
            parts.append(piece.text if isinstance(piece, Text) else " ".join(self._chunks(piece, word.line)))
        return "".join(parts)

    def _chunks(self, piece: Piece, line: int) -> list[str]:
        """The value of an expansion: one text, or the elements of an array."""
        if isinstance(piece, Arithmetic):
            number = self.arithmetic(piece.expression)
            reason = f"{piece.raw} on line {line} cannot be computed without running the script"
            return [self.marker(piece.raw, reason) if number is None else str(number)]
        if isinstance(piece, Opaque):
            return [self.marker(piece.raw, f"{piece.raw} on line {line} is known only when the script runs")]
        assert isinstance(piece, Param)
        if piece.operator == "?" or (piece.operator and piece.index):
            return [self.marker(piece.raw, f"{piece.raw} on line {line} is a form that is not followed here")]
        value = self._lookup(piece)
        if piece.operator:
            return [self._with_operator(piece, value)]
        if value is None:
            # An array cannot come from the environment: unset, it is empty.
            return [] if piece.index in ("@", "*") else [self._unset(piece, line)]
        if isinstance(value, str):
            return [value]
        return [" ".join(value)] if piece.index == "*" and piece.quoted else value

    def _lookup(self, piece: Param) -> str | list[str] | None:
        """The value, None where the script sets none."""
        if piece.name in ("@", "*"):
            return list(self.arguments)
        if piece.name == "#":
            return str(len(self.arguments))
        if piece.name.isdigit():
            number = int(piece.name)
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        value = self.values.get(piece.name)
        if isinstance(value, str):
            return value if piece.index in ("", "@", "*", "0") else None
        if value is None or piece.index in ("@", "*"):
            return value
        number = int(piece.index or 0)
        return value[number] if number < len(value) else None

    def _with_operator(self, piece: Param, value: str | list[str] | None) -> str:
        operand = self.text(piece.operand) if piece.operand else ""
        text = " ".join(value) if isinstance(value, list) else value
        missing = text is None or (piece.operator.startswith(":") and text == "")
        if piece.operator.endswith("+"):
            return "" if missing else operand
        if missing and piece.operator.endswith("="):
            self.values[piece.name] = operand
        return operand if missing else text or ""

    def _unset(self, piece: Param, line: int) -> str:
        if self.unset_is_empty:
            return ""
        if piece.name.isdigit():
            reason = f"{piece.raw} on line {line} is an argument of the script"
        else:
            sourced = f" (it sources {', '.join(self.sourced)}, which is not read)" if self.sourced else ""
            reason = f"{piece.raw} on line {line} is not set in the file{sourced}"
        return self.marker(piece.raw, reason)

    def arithmetic(self, expression: str) -> int | None:
        """The whole number that the shell would compute, or None if something in it is unknown."""
        word = Word(1)
        lexer = Lexer(expression, plain=True)
        while lexer.skip_blanks():
            word.pieces.append(Text(" ", True))
            word.pieces += lexer.word().pieces
        text = self.text(word).replace("&&", " and ").replace("||", " or ")
        try:
            return _evaluate(ast.parse(text.strip(), mode="eval").body, self._number_of)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None

    def _number_of(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, str):
            return int(value)
        raise ValueError(name)


def _divide(left: int, right: int) -> int:
    """Towards zero, as the shell."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if not 0 <= right <= 64:
        raise ValueError("an exponent out of range")
    return left**right


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Mod: lambda left, right: left - _divide(left, right) * right,
    ast.Pow: _power,
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _evaluate(node: ast.expr, number_of: Callable[[str], int]) -> int:
    """Whole-number arithmetic; ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return number_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, number_of)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_evaluate(left, number_of), _evaluate(right, number_of))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return int(_COMPARE[type(op)](_evaluate(left, number_of), _evaluate(right, number_of)))
        case ast.BoolOp(op=op, values=values):
            truths = [_evaluate(value, number_of) != 0 for value in values]
            return int(all(truths) if isinstance(op, ast.And) else any(truths))
    raise ValueError(ast.dump(node))
