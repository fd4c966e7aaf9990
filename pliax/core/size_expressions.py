"""What a size is worth: its value, its bounds, its slope and its form.

evaluate   : Size, values of names  ->  integer, interval or scalar
substitute : Size, sizes of names   ->  Size
bounds     : Size, ranges of names  ->  (lowest, highest)
slope_of   : Size, name             ->  1, -1 or 0

An expression is evaluated as the Python that it prints.
"""

import ast
import functools
from collections.abc import Mapping
from types import CodeType
from typing import Any

from .constraints import in_python
from .dims import Size, larger, smaller
from .intervals import INTERVALS, Interval, Magnitude, interval, magnitude_of


@functools.lru_cache(maxsize=1 << 14)
def code(source: str) -> CodeType:
    """An expression or a guard over named sizes, compiled."""
    return compile(source, "<size>", "eval")


_INTEGERS = {"max": max, "min": min}


def evaluate(size: Any, values: Mapping[str, Any], extremes: Any = _INTEGERS) -> Any:
    """A size under values for the named sizes: integers, intervals or scalars.

    Args:
        size: A `Size` or an integer, which is its own value.
        values: By name. Anything with +, -, *, //, %, **.
        extremes: "max" and "min" for such values.
    """
    if not isinstance(size, Size):
        return size
    return eval(code(str(size)), {"__builtins__": {}, **extremes}, values)


def at_hand(size: Any) -> Any:
    """The value of a size in the call that is traced; an integer as itself."""
    return evaluate(size, size.assumptions.known.hints if variables(size) else {})


def substitute(size: Any, values: Mapping[str, Any]) -> Any:
    """A size with other sizes, or integers, for some of its named sizes."""
    names = variables(size)
    if not names & values.keys():
        return size
    own = {n: size.assumptions.known.parse(n)[0] for n in names - values.keys()}
    return evaluate(size, {**own, **values}, {"max": larger, "min": smaller})


def evaluate_text(expression: str, values: Mapping[str, int]) -> int:
    """The value of an expression as `jax.export` prints it."""
    names = {"__builtins__": {}, **_INTEGERS}
    return eval(code(in_python(expression)), names, dict(values))


def variables(size: Any) -> frozenset[str]:
    """The named sizes that an expression mentions."""
    if not isinstance(size, Size):
        return frozenset()
    return frozenset(code(str(size)).co_names).difference(_INTEGERS)


def is_remainder(size: Any) -> bool:
    """Whether an expression is the remainder of a division: t % 8."""
    return isinstance(size, Size) and _operator(str(size)) is ast.Mod


def is_quotient(size: Any) -> bool:
    """Whether an expression is the quotient of a division: t // 8."""
    return isinstance(size, Size) and _operator(str(size)) is ast.FloorDiv


@functools.lru_cache(maxsize=1 << 14)
def _operator(source: str) -> type[ast.operator] | None:
    tree = ast.parse(source, mode="eval").body
    return type(tree.op) if isinstance(tree, ast.BinOp) else None


def divided(division: Size) -> tuple[Any, Any]:
    """The dividend and the divisor of a division: t and 8 of t % 8 and t // 8."""
    tree = ast.parse(str(division), mode="eval").body
    assert isinstance(tree, ast.BinOp)
    own = {n: division.assumptions.known.parse(n)[0] for n in variables(division)}
    names = {"__builtins__": {}, "max": larger, "min": smaller}
    a, b = (eval(code(ast.unparse(x)), names, own) for x in (tree.left, tree.right))
    return a, b


def modulo(dividend: Any, divisor: int) -> Any:
    """What leaves the same rest, divided by a number: t for t % 8, divided by 4."""
    if not isinstance(dividend, Size):
        return dividend
    tree = _WithoutRests(divisor).visit(ast.parse(str(dividend), mode="eval").body)
    own = {n: dividend.assumptions.known.parse(n)[0] for n in variables(dividend)}
    names = {"__builtins__": {}, "max": larger, "min": smaller}
    return eval(code(ast.unparse(tree)), names, own)


class _WithoutRests(ast.NodeTransformer):
    """A sum of products whose rests by multiples of a divisor are their dividends."""

    def __init__(self, divisor: int):
        self._divisor = divisor

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            return ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        by = node.right
        if isinstance(node.op, ast.Mod) and isinstance(by, ast.Constant):
            is_multiple = isinstance(by.value, int) and by.value % self._divisor == 0
            return self.visit(node.left) if is_multiple else node
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return ast.UnaryOp(node.op, self.visit(node.operand))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node


def bounds(size: Any, ranges: Mapping[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """An interval that holds every value of a size; each range is inclusive.

    The bound is exact where each named size appears once, and safe everywhere.
    """
    if not isinstance(size, Size):
        return size, size
    values = {name: Interval(*ends) for name, ends in ranges.items()}
    result = interval(evaluate(size, values, INTERVALS))
    return result.low, result.high


def slope_of(size: Any, name: str) -> int:
    """1 or -1 if a size grows or falls with a name, whatever the others are; else 0."""
    if any(mark in str(size) for mark in ("//", "%", "max", "min", "**")):  # steps
        return 0
    others = sorted(variables(size) - {name})
    values = [dict.fromkeys(others, n) for n in (5, 11)]
    slopes = {
        evaluate(size, {**v, name: n + 1}) - evaluate(size, {**v, name: n})
        for v in values
        for n in (3, 8, 64)
    }
    slope = slopes.pop()
    return slope if not slopes and slope in (1, -1) else 0


def magnitude(size: Any, ranges: Mapping[str, tuple[Any, Any]]) -> Any:
    """What neither a size nor any step on the way to it exceeds; at least that."""
    values = {name: Magnitude(max(map(abs, ends))) for name, ends in ranges.items()}
    return magnitude_of(evaluate(size, values, {"max": max, "min": max})).most
