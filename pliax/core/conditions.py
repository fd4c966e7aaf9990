"""Comparisons of sizes that are not known yet, and how to decide them.

    a == b, a <= b, …  ->  bool where that follows from what is known, else a Condition

A `Condition` decides itself where Python needs a truth value (`if`, `and`, `in`), by
the sizes at hand, and leaves one guard. `sym_and` and `sym_or` combine conditions into
one that is kept whole; `guard_or_false` and its kin decide without needing the answer.
"""

import functools
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._jax import accept_as_boolean, primitive_that_stays
from .callers import asker, is_asked_by_jax
from .float_formulas import COMPARISONS
from .provenance import user_place
from .size_expressions import variables


_OPPOSITE = {"==": "!=", "!=": "==", ">=": "<", "<": ">=", "<=": ">", ">": "<="}


class Condition:
    """A truth value about sizes, decided when it is needed.

    Attributes:
        operation: "==", "<=", … of two sizes, or "and", "or" of conditions.
        parts: the sizes or the conditions.
        assumptions: what decides.
    """

    __slots__ = ("assumptions", "operation", "parts")

    # What JAX asks of a scalar; `dimension_as_value` is its value.
    shape: ClassVar[tuple[int, ...]] = ()
    ndim: ClassVar[int] = 0
    dtype: ClassVar[Any] = np.dtype(np.bool_)
    __array_ufunc__ = None  # NumPy leaves operators to us

    def __init__(self, operation: str, parts: tuple[Any, ...], assumptions: Any):
        self.operation = operation
        self.parts = parts
        self.assumptions = assumptions

    def __bool__(self) -> bool:
        return self.assumptions.decide(self, asker())

    def __index__(self) -> int:
        return int(bool(self))

    def dimension_as_value(self) -> Any:
        """The truth value as a scalar at run time, under JAX's name for sizes'."""
        values = [_as_value(part) for part in self.parts]
        if self.operation in COMPARISONS:
            return COMPARISONS[self.operation](*values)
        join = operator.and_ if self.operation == "and" else operator.or_
        return functools.reduce(join, values)

    __jax_array__ = dimension_as_value

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        if is_asked_by_jax():
            return NotImplemented
        if _is_decidable(other):
            both = sym_and(self, other), sym_and(sym_not(self), sym_not(other))
            return sym_or(*both)
        if isinstance(other, int | float):
            return self if other == 1 else sym_not(self) if other == 0 else False
        if hasattr(other, "dtype"):
            return self.__jax_array__() == other
        return NotImplemented

    def __ne__(self, other: Any) -> Any:
        equal = self.__eq__(other)
        if equal is NotImplemented or isinstance(equal, bool):
            return equal if equal is NotImplemented else not equal
        return ~equal

    def __hash__(self) -> int:
        """That of the truth value, for users; JAX keys its caches by the object."""
        return object.__hash__(self) if is_asked_by_jax() else hash(bool(self))

    def __invert__(self) -> Any:
        return sym_not(self)

    def __and__(self, other: Any) -> Any:
        if not _is_decidable(other):
            return self.__jax_array__() & other
        return sym_and(self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        if not _is_decidable(other):
            return self.__jax_array__() | other
        return sym_or(self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        if not _is_decidable(other):
            return self.__jax_array__() ^ other
        return self != other

    __rxor__ = __xor__

    def __str__(self) -> str:
        if self.operation in COMPARISONS:
            return f"{self.parts[0]} {self.operation} {self.parts[1]}"
        return f" {self.operation} ".join(f"({part})" for part in self.parts)

    __repr__ = __str__


accept_as_boolean(Condition)


def _integer(condition: Condition) -> jax.Array:
    """The truth value as 0 or 1 at run time, of a type that gives way."""
    return jnp.where(condition.__jax_array__(), 1, 0)


_ARRAYS = jax.Array | np.ndarray | np.generic


def _arithmetic(operation: Callable[..., Any]) -> tuple[Callable, Callable]:
    """An operator of two, as Python's bool has it of integers, and its reflection."""

    def of(a: Any, b: Any) -> Any:
        if isinstance(b, _ARRAYS):
            return operation(a.__jax_array__(), b)
        return operation(_integer(a), _integer(b) if isinstance(b, Condition) else b)

    def reflected(a: Any, b: Any) -> Any:
        if isinstance(b, _ARRAYS):
            return operation(b, a.__jax_array__())
        return operation(b, _integer(a))

    return of, reflected


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _of, _reflected = _arithmetic(getattr(operator, _name))
    setattr(Condition, f"__{_name}__", _of)
    setattr(Condition, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge"):
    setattr(Condition, f"__{_name}__", _arithmetic(getattr(operator, _name))[0])
for _name in ("neg", "pos", "abs"):
    _of_one = getattr(operator, _name)
    setattr(Condition, f"__{_name}__", lambda c, f=_of_one: f(_integer(c)))


def _is_decidable(x: Any) -> bool:
    """Whether something is a condition or a plain truth value; else it is an array."""
    return isinstance(x, Condition | bool | np.bool_)


def _as_value(part: Any) -> Any:
    """A size or a condition as a run-time scalar; an integer as itself."""
    return part.__jax_array__() if hasattr(part, "__jax_array__") else part


def conjuncts(condition: Condition) -> list[Condition]:
    """The comparisons that hold where the condition does."""
    if condition.operation == "or":
        return []
    if condition.operation != "and":
        return [condition]
    return [c for part in condition.parts for c in conjuncts(part)]


def names_of(condition: Condition) -> frozenset[str]:
    """The named sizes that a condition is about."""
    if condition.operation in ("and", "or"):
        return frozenset().union(*(names_of(part) for part in condition.parts))
    a, b = condition.parts
    return variables(a) | variables(b)


def proven(condition: Any) -> bool | None:
    """The truth of a condition where it follows from what is known."""
    if not isinstance(condition, Condition):
        return bool(condition)
    if condition.operation in COMPARISONS:
        a, b = condition.parts
        return condition.assumptions.known.proves(a, condition.operation, b)
    answers = [proven(part) for part in condition.parts]
    decisive = condition.operation == "or"
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def known(condition: Any, frame: FrameType, owner: str) -> bool | None:
    """As `proven`, for a frame that goes on with the answer: it is put on record.

    Raises:
        TypeError: where it is no condition, or an array without a truth value.
    """
    _refuse_others(condition, owner)
    answer = proven(condition)
    if answer is not None and isinstance(condition, Condition):
        condition.assumptions.record(condition, answer, frame)
    return answer


def is_unknown(asked: Any) -> bool:
    """Whether only the device has the answer to a question about sizes."""
    is_open = isinstance(asked, Condition)
    return is_open and not asked.assumptions.has_hints(asked)


def is_one(n: Any) -> bool:
    """Whether an axis has one element; a guard, and a trace of its own if so."""
    asked = n == 1
    if not isinstance(asked, Condition):
        return asked
    return asked.assumptions.decide(asked, sys._getframe(), may_collapse=True)


def _refuse_others(condition: Any, owner: str) -> None:
    """Refuses what has no truth value, or one that only the device knows."""
    if _is_decidable(condition):
        return
    if not isinstance(condition, jax.Array | np.ndarray):
        raise TypeError(
            f"{owner}: the condition is {condition!r} of type "
            f"{type(condition).__name__}.\nPass a comparison, x.shape[0] > 3 for "
            "example, or a bool."
        )
    if condition.size == 1 and not isinstance(condition, Tracer):
        return
    raise TypeError(
        f"{owner}: the condition is an array, {jax.typeof(condition)}; conditions are "
        "about sizes, x.shape[0] > 3.\nFor what arrays hold use jnp.where, "
        "jax.lax.cond or jax.experimental.checkify."
    )


def remaining(condition: Condition) -> Condition:
    """An undecided condition without the parts whose truth is known."""
    if condition.operation in COMPARISONS:
        return condition
    parts = tuple(remaining(p) for p in condition.parts if proven(p) is None)
    if len(parts) == 1:
        return parts[0]
    return Condition(condition.operation, parts, condition.assumptions)


def opposite(condition: Condition) -> Condition:
    """The condition that holds where this one does not."""
    operation, parts = condition.operation, condition.parts
    if operation in _OPPOSITE:
        return Condition(_OPPOSITE[operation], parts, condition.assumptions)
    turned = "or" if operation == "and" else "and"
    parts = tuple(sym_not(part) for part in parts)
    return Condition(turned, parts, condition.assumptions)


def sym_not(condition: Any) -> Any:
    """The opposite of a condition, undecided."""
    is_symbolic = isinstance(condition, Condition)
    return opposite(condition) if is_symbolic else not condition


def sym_and(*conditions: Any) -> Any:
    """All of the conditions, kept as one: it leaves one guard when it is decided.

    Args:
        *conditions: comparisons of sizes, and plain truth values.

    Examples:
        >>> import pliax as px
        >>> px.sym_and(True, 3 < 4)
        True
    """
    return _joined("and", conditions)


def sym_or(*conditions: Any) -> Any:
    """Any of the conditions, kept as one: it leaves one guard when it is decided.

    Args:
        *conditions: comparisons of sizes, and plain truth values.
    """
    return _joined("or", conditions)


def _joined(operation: str, conditions: tuple[Any, ...]) -> Any:
    decisive = operation == "or"
    for condition in conditions:
        _refuse_others(condition, f"px.sym_{operation}")
    known = [c for c in conditions if not isinstance(c, Condition)]
    if any(bool(c) is decisive for c in known):
        return decisive
    parts = tuple(c for c in conditions if isinstance(c, Condition))
    if not parts:
        return not decisive
    return (
        parts[0]
        if len(parts) == 1
        else Condition(operation, parts, parts[0].assumptions)
    )


def statically_known_true(condition: Any) -> bool:
    """Whether a condition follows from what is known of the sizes; leaves no guard.

    Args:
        condition: a comparison of sizes or a plain truth value.

    Returns:
        True only where the condition holds for every size the trace will serve.
    """
    return known(condition, asker(), "px.statically_known_true") is True


def guard_or_false(condition: Any) -> bool:
    """Decides a condition; False for sizes that only the device knows.

    Args:
        condition: a comparison of sizes or a plain truth value.

    Returns:
        The answer for the sizes at hand, with a guard, as `if` would; where no size is
        at hand, what is known, else False. Write the program so that the branch for
        False is right for all sizes.
    """
    return _guard_or(condition, False, asker(), "px.guard_or_false")


def guard_or_true(condition: Any) -> bool:
    """Decides a condition; True for sizes that only the device knows.

    Args:
        condition: a comparison of sizes or a plain truth value.

    Returns:
        As `guard_or_false`, with True in place of False.
    """
    return _guard_or(condition, True, asker(), "px.guard_or_true")


def _guard_or(condition: Any, otherwise: bool, frame: FrameType, owner: str) -> bool:
    if (answer := known(condition, frame, owner)) is not None:
        return answer
    condition.assumptions.values.refuse_afterwards(condition, frame)
    if not condition.assumptions.has_hints(condition):
        return otherwise
    return condition.assumptions.decide(condition, frame)


def check(condition: Any, message: str = "") -> None:
    """States that a condition on sizes holds; later questions may rely on it.

    For sizes at hand it leaves a guard. For sizes born from data (`px.ragged`) it is a
    run-time assertion: a function of `px.compile` or `px.pad` that has one waits for
    the device at the end of each call and raises there. It may then not stand in a loop
    or a branch of JAX's. Of sizes of `px.pad` that are traced it has to follow from
    `where=`, as nobody could raise there.

    Args:
        condition: a comparison of sizes or a plain truth value.
        message: what to say where it does not hold.

    Raises:
        ValueError: where it does not hold for the sizes at hand, which it names.

    Examples:
        >>> import pliax as px
        >>> px.check(3 < 4, "three is less than four")
    """
    frame = asker()
    answer = known(condition, frame, "px.check")
    place = user_place(frame)
    what = condition if hasattr(condition, "assumptions") else "the condition"
    text = f"px.check: {message or f'{what} does not hold'}\n  at {place}"
    if answer is None:
        condition.assumptions.values.refuse_afterwards(condition, frame)
    if answer is None and not condition.assumptions.has_values(condition):
        state(condition, text, place)
        return
    if answer is None:
        answer = condition.assumptions.decide(condition, frame)
    if not answer:
        raise FailedCheckError(f"{text}{_found(condition)}")


class FailedCheckError(ValueError):
    """What `check` states does not hold for the sizes of a call."""


def _found(condition: Any) -> str:
    """What a condition asks, and the sizes at hand, in a line of an error."""
    if not isinstance(condition, Condition):
        return ""
    known = condition.assumptions.known
    names = sorted(names_of(condition))
    found = ", ".join(filter(None, (known.symbols[n].at_hand for n in names)))
    return f"\nAsked was {condition}, found {found}." if found else ""


def state(condition: Condition, text: str, place: Any) -> None:
    """Asserts at run time what only the device knows; from now on it is known."""
    state_p.bind(condition=condition, text=text)
    condition.assumptions.learn(condition, place)


# A condition to be computed on the device: an equation without operands or results.
state_p = primitive_that_stays("check", lambda **_: None)
state_p.def_abstract_eval(lambda **_: [])


def computed(condition: Any, value: Callable[[Any], Any]) -> Any:
    """The truth of a condition as an array.

    Args:
        condition: comparisons of sizes, and plain truth values.
        value: from a size or an integer to a scalar.
    """
    if not isinstance(condition, Condition):
        return np.bool_(condition)
    if condition.operation in COMPARISONS:
        a, b = map(value, condition.parts)
        return COMPARISONS[condition.operation](a, b)
    join = operator.and_ if condition.operation == "and" else operator.or_
    return functools.reduce(join, (computed(p, value) for p in condition.parts))
