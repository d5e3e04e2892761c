"""A filter for texts that a scorer evaluates as Python: only formulas of numbers and names, and literals, pass."""

from __future__ import annotations

import ast
import math
import re

FUNCTIONS = frozenset((
    "Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln", "log", "sec", "sin", "sinh", "sqrt",
    "tan", "tanh",
))  # fmt: skip
MOST_CHARACTERS = 2000
MOST_BITS = 10_000.0
"""Size of the largest number that a formula may make."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,15}")
PLAIN = (ast.Expression, ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.unaryop, ast.expr_context)


class Refused(ValueError):
    """A text that must not be evaluated; the message gives the reason."""


def check_formula(text: str) -> None:
    """Raise Refused unless the text is a sum, product, quotient or power of numbers, names and `FUNCTIONS` of these.

    No string, attribute, index or other call is allowed, and no intermediate number of more than `MOST_BITS` bits.
    """
    tree = _parsed(text)
    if tree is None:
        raise Refused("is no formula")
    _bits(tree.body)


def check_literal(text: str) -> None:
    """Raise Refused for Python that is more than a literal; a text that is not Python cannot be evaluated and passes."""
    tree = _parsed(text)
    for node in () if tree is None else ast.walk(tree):
        if not isinstance(node, PLAIN):
            raise Refused(f"holds Python that is no literal ({type(node).__name__})")


def _parsed(text: str) -> ast.Expression | None:
    if len(text) > MOST_CHARACTERS:
        raise Refused(f"has more than {MOST_CHARACTERS} characters")
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError) as error:
        raise Refused("is nested too deeply") from error


def _bits(node: ast.expr) -> float:
    """Return an upper bound of the bits of the numbers in an expression's value."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            found = math.log2(abs(value) + 1) + 1 if math.isfinite(value) else math.inf
        case ast.Name(id=name) if NAME.fullmatch(name):
            found = 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            found = _bits(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            found = _bits(left) + _bits(right) + 1
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _bits(right)
            found = _bits(left) * 2**power if power < 64 else math.inf
        case ast.Call(func=ast.Name(id=name), args=[*arguments], keywords=[]) if name in FUNCTIONS and 1 <= len(arguments) <= 2:
            found = sum(_bits(argument) for argument in arguments)
        case _:
            raise Refused(f"holds more than numbers, names and operators ({type(node).__name__})")
    if found > MOST_BITS:
        raise Refused("makes numbers that are too large")
    return found
