"""Conversion of values of a file or command line to the annotated types of keys."""

from __future__ import annotations

import ast
import contextlib
import sys
import types
import typing
from typing import Literal

from megaaccum.errors import printable

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class NotOfType(Exception):
    """A value that cannot be read as the key's type; the text names the expected type."""


def coerce(value: object, annotation: object) -> object:
    """Convert `value` to the annotated type. Text is parsed; numbers are never rounded, and booleans are no numbers.

    Raises:
        NotOfType: the value is of another type; its text names the expected type.
    """
    origin = typing.get_origin(annotation)
    if origin is types.UnionType or origin is typing.Union:
        return _coerce_union(value, typing.get_args(annotation))
    if origin is Literal:
        return _coerce_literal(value, typing.get_args(annotation))
    if origin is list:
        return _coerce_list(value, typing.get_args(annotation)[0])
    assert isinstance(annotation, type)
    return _SCALARS[annotation](value)


def _coerce_union(value: object, members: tuple[object, ...]) -> object:
    optional = types.NoneType in members
    if value is None and optional:
        return None
    expected: list[str] = []
    for member in members:
        if member is types.NoneType:
            continue
        try:
            return coerce(value, member)
        except NotOfType as error:
            expected.append(str(error))
    # Tried last: 'none' is a word of its own for some keys.
    if optional and isinstance(value, str) and value.lower() in ("none", "null"):
        return None
    raise NotOfType(" or ".join(expected))


def _coerce_literal(value: object, choices: tuple[object, ...]) -> object:
    for choice in choices if not isinstance(value, bool) else ():
        if value == choice or str(value).lower() == str(choice).lower():
            return choice
    if value is None and "none" in choices:
        return "none"
    raise NotOfType(f"one of {', '.join(map(str, choices))}")


def _coerce_list(value: object, member: object) -> list[object]:
    if isinstance(value, str) and member is int:
        words = value.replace(",", " ").split()
        value = words if len(words) > 1 and all(map(str.isdecimal, words)) else evaluate_int_list(value)
    elif isinstance(value, str):
        value = value.replace(",", " ").split() if "," in value else [value]
    if not isinstance(value, list | tuple):
        raise NotOfType(f"a list of {'whole numbers' if member is int else 'names'}")
    return [coerce(item, member) for item in value]


def evaluate_int_list(text: str) -> list[int]:
    """A list of whole numbers written with [], + and *: '([0]*3+[1]*58)', as Megatron-LM's --moe-layer-freq.

    Raises:
        NotOfType: the text is anything else. Nothing in it is executed.
    """
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        if isinstance(found := _evaluate(ast.parse(text.strip(), mode="eval").body), list):
            return found
    raise NotOfType("a list of whole numbers such as [0]*3+[1]*58")


_LONGEST_LIST = 10_000


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if (numbers := [item for item in items if isinstance(item, int)]) and len(numbers) == len(items):
            return numbers
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right <= _LONGEST_LIST:
                return left * right
    raise ValueError(ast.dump(node))


_LARGEST_INT = 2**53
"""Up to here every whole number is a float as well."""


def _to_int(value: object) -> int:
    number = _number(value, "a whole number")
    if number != int(number) or abs(number) > _LARGEST_INT:
        raise NotOfType("a whole number")
    return int(number)


def _to_float(value: object) -> float:
    number = _number(value, "a number")
    if abs(number) > sys.float_info.max:
        raise NotOfType("a number")
    return float(number)


def _number(value: object, expected: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise NotOfType(expected)
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4 as text, and shells pass nothing else.
        for parse in (int, float):
            with contextlib.suppress(ValueError):
                value = parse(value)
                break
    if isinstance(value, str) or value != value or value in (float("inf"), float("-inf")):
        raise NotOfType(expected)
    return value


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    raise NotOfType("true or false")


def _to_str(value: object) -> str:
    if isinstance(value, str) and value == printable(value):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise NotOfType("text" if not isinstance(value, str) else "text without control characters")


_SCALARS = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str}
