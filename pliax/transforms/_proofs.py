"""Conditions on sizes as Z3 takes them: proofs, counterexamples, smallest sizes.

    Facts, "t // 2 < t"  ->  None (it follows), sizes that refute it, or Undecided

Conditions are Python over integer names, as guards are written. The translation is
exact: // and % round towards minus infinity, whatever the signs; `and` and `or` look at
their second operand only where Python does; and sizes for which a divisor is 0 satisfy
neither a condition nor its opposite, since Python has no answer there.
"""

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pliax.core.constraints import in_python
from pliax.core.guards import Assumptions
from pliax.core.size_expressions import code


def every(conditions: Iterable[str]) -> str:
    """All of the conditions as one."""
    return " and ".join(f"({text})" for text in conditions) or "True"


class Undecided(Exception):  # noqa: N818  (an answer, not a failure)
    """Z3 found neither a proof nor a counterexample in the time it had."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of named sizes.

    Attributes:
        ranges: each name with its smallest and its largest value.
        conditions: what else holds.
    """

    ranges: tuple[tuple[str, int, int], ...]
    conditions: tuple[str, ...] = ()

    @classmethod
    def of(cls, assumptions: Assumptions, conditions: Iterable[str] = ()) -> "Facts":
        """What was declared of the sizes of a trace, and more conditions."""
        ranges = assumptions.known.declared_ranges.items()
        declared = map(in_python, assumptions.known.constraints)
        declared = (*declared, *map(str, assumptions.known.facts))
        return cls(
            tuple((name, low, high) for name, (low, high) in ranges),
            (*declared, *conditions),
        )

    def hold(self, sizes: dict[str, int]) -> bool:
        """Whether all of it is true of these sizes."""
        in_range = all(low <= sizes[name] <= high for name, low, high in self.ranges)
        return in_range and all(holds(text, sizes) for text in self.conditions)


_FUNCTIONS = {"max": max, "min": min, "mod": operator.mod}
_FUNCTIONS["floordiv"] = operator.floordiv


def holds(condition: str, sizes: dict[str, int]) -> bool:
    """Whether a condition is true of sizes; not where a divisor is 0."""
    try:
        names = {"__builtins__": {}, **_FUNCTIONS}
        return bool(eval(code(condition), names, dict(sizes)))
    except ZeroDivisionError:
        return False


def load_z3(owner: str) -> Any:
    """The module, or an error that says how to install it."""
    try:
        import z3
    except ImportError as error:
        raise ImportError(
            f'{owner} needs Z3, which is not installed.\nInstall it: pip install "'
            'pliax[verify]"'
        ) from error
    return z3


class Prover:
    """What follows from facts.

    Args:
        facts: what is known.
        timeout: how long Z3 may think about one question, in milliseconds.
        owner: how errors name who asks.
    """

    def __init__(self, facts: Facts, timeout: int, owner: str):
        self.facts = facts
        self._z3 = load_z3(owner)
        self._context = self._z3.Context()  # its own, so that threads do not meet
        self._solver = self._z3.Solver(ctx=self._context)
        self._solver.set("timeout", timeout)
        for name, low, high in facts.ranges:
            size = self._z3.Int(name, self._context)
            self._solver.add(low <= size, size <= high)
        self._solver.add(*map(self._formula, facts.conditions))
        self._excluded: list[str] = []

    def _formula(self, condition: str) -> Any:
        value, defined = _Translation(self._z3, self._context).read(condition)
        return self._z3.And(defined, value)

    def exclude(self, condition: str) -> None:
        """From now on, only sizes for which a condition does not hold."""
        self._excluded.append(condition)
        self._solver.add(self._z3.Not(self._formula(condition)))

    def find(
        self, *conditions: str, outside: Iterable[str] = ()
    ) -> dict[str, int] | None:
        """Sizes that satisfy the facts and conditions; None if there are none.

        Args:
            *conditions: what holds of the sizes.
            outside: what does not: it is false, or has no value because of a divisor.

        Raises:
            Undecided: where Z3 cannot tell.
        """
        outside = tuple(outside)
        self._solver.push()
        try:
            self._solver.add(*map(self._formula, conditions))
            self._solver.add(*(self._z3.Not(self._formula(c)) for c in outside))
            answer = self._solver.check()
            if answer == self._z3.unsat:
                return None
            if answer == self._z3.unknown:
                raise Undecided(self._solver.reason_unknown())
            sizes = self._read(self._solver.model())
        finally:
            self._solver.pop()
        # Told by Python as well: a mistake in the translation cannot go unnoticed.
        assert self.facts.hold(sizes) and all(holds(c, sizes) for c in conditions)
        assert not any(holds(c, sizes) for c in (*self._excluded, *outside))
        return sizes

    def _read(self, model: Any) -> dict[str, int]:
        sizes = {}
        for name, _, _ in self.facts.ranges:
            size = self._z3.Int(name, self._context)
            sizes[name] = model.eval(size, model_completion=True).as_long()
        return sizes

    def counterexample(self, condition: str) -> dict[str, int] | None:
        """Sizes that satisfy the facts but not this; None if it follows from them."""
        return self.find(f"not ({condition})")

    def smallest(self, *conditions: str) -> dict[str, int] | None:
        """As `find`, of least sum, and of those the first in order of the names."""
        found = self.find(*conditions)
        if found is None:
            return None
        names = [name for name, _, _ in self.facts.ranges]
        fixed = list(conditions)
        for term in [" + ".join(names), *names] if names else ():
            lowest = {name: low for name, low, _ in self.facts.ranges}
            found = self._descend(term, eval(code(term), {}, lowest), found, fixed)
            fixed.append(f"{term} == {eval(code(term), {}, found)}")
        return found

    def _descend(
        self, term: str, low: int, found: dict[str, int], fixed: Sequence[str]
    ) -> dict[str, int]:
        """Sizes with the least value of a term, which is at least `low`."""
        step, high = 1, eval(code(term), {}, found)
        while low < high:  # double the step until there are some, then bisect
            middle = min(low + step - 1, (low + high) // 2)
            better = self.find(*fixed, f"{term} <= {middle}")
            if better is None:
                low, step = middle + 1, 2 * step
            else:
                found, high, step = better, eval(code(term), {}, better), high
        return found


# A formula and where it is defined. Terms have values in place of the formula.
_Pair = tuple[Any, Any]


class _Translation(ast.NodeVisitor):
    """An expression of Python over integers, in a context of Z3's."""

    def __init__(self, z3: Any, context: Any):
        self._z3, self._context = z3, context
        self._true = z3.BoolVal(True, context)

    def read(self, text: str) -> _Pair:
        return self.visit(ast.parse(text, mode="eval").body)

    def generic_visit(self, node: ast.AST) -> _Pair:
        raise NotImplementedError(f"{ast.unparse(node)} in a condition on sizes")

    def visit_Name(self, node: ast.Name) -> _Pair:
        return self._z3.Int(node.id, self._context), self._true

    def visit_Constant(self, node: ast.Constant) -> _Pair:
        if isinstance(node.value, bool):
            return self._z3.BoolVal(node.value, self._context), self._true
        return self._z3.IntVal(node.value, self._context), self._true

    def visit_UnaryOp(self, node: ast.UnaryOp) -> _Pair:
        value, defined = self.visit(node.operand)
        negated = isinstance(node.op, ast.Not)
        return (self._z3.Not(value) if negated else -value), defined

    def visit_BinOp(self, node: ast.BinOp) -> _Pair:
        if isinstance(node.op, ast.Pow):
            return self._power(node)
        return self._apply(_OPERATORS[type(node.op)], node.left, node.right)

    def _power(self, node: ast.BinOp) -> _Pair:
        base, defined = self.visit(node.left)
        power = ast.literal_eval(node.right)
        one = self._z3.IntVal(1, self._context)
        return functools.reduce(operator.mul, [base] * power, one), defined

    def visit_Call(self, node: ast.Call) -> _Pair:
        apply = _OPERATORS[getattr(node.func, "id", "")]
        pairs = [self.visit(x) for x in node.args]
        return functools.reduce(lambda a, b: self._combined(apply, a, b), pairs)

    def visit_Compare(self, node: ast.Compare) -> _Pair:
        (comparison,), (right,) = node.ops, node.comparators
        return self._apply(_OPERATORS[type(comparison)], node.left, right)

    def visit_BoolOp(self, node: ast.BoolOp) -> _Pair:
        pairs = list(map(self.visit, node.values))
        return functools.reduce(functools.partial(self._either, node.op), pairs)

    def _either(self, op: ast.AST, a: _Pair, b: _Pair) -> _Pair:
        z3, is_or = self._z3, isinstance(op, ast.Or)
        joined = z3.Or(a[0], b[0]) if is_or else z3.And(a[0], b[0])
        is_decided = a[0] if is_or else z3.Not(a[0])
        return joined, z3.And(a[1], z3.Or(is_decided, b[1]))

    def _apply(self, apply: Callable, left: ast.AST, right: ast.AST) -> _Pair:
        return self._combined(apply, self.visit(left), self.visit(right))

    def _combined(self, apply: Callable, a: _Pair, b: _Pair) -> _Pair:
        defined = [a[1], b[1]]
        if apply in (_quotient, _rest):
            defined.append(b[0] != 0)
        return apply(self._z3, a[0], b[0]), self._z3.And(*defined)


def _quotient(z3: Any, a: Any, b: Any) -> Any:
    """Python's //. Z3's / leaves a rest of at least 0: the floor where b > 0."""
    return z3.If(b > 0, a / b, (-a) / (-b))


def _rest(z3: Any, a: Any, b: Any) -> Any:
    return a - b * _quotient(z3, a, b)


def _plainly(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda _, a, b: apply(a, b)


_OPERATORS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    ast.Add: _plainly(operator.add),
    ast.Sub: _plainly(operator.sub),
    ast.Mult: _plainly(operator.mul),
    ast.FloorDiv: _quotient,
    ast.Mod: _rest,
    ast.Eq: _plainly(operator.eq),
    ast.NotEq: _plainly(operator.ne),
    ast.Lt: _plainly(operator.lt),
    ast.LtE: _plainly(operator.le),
    ast.Gt: _plainly(operator.gt),
    ast.GtE: _plainly(operator.ge),
    "max": lambda z3, a, b: z3.If(a >= b, a, b),
    "min": lambda z3, a, b: z3.If(a <= b, a, b),
    "floordiv": _quotient,
    "mod": _rest,
}
