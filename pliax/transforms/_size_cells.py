"""One trace of a function at given sizes: all sizes that go the same way, and where to.

Program, sizes -> Cell

In such a trace the sizes at hand answer everything that does not follow from what is
known, also JAX's own `==`. So whatever the function, or JAX in it, tells apart becomes
a branch, and all sizes that take the same branches have the same outcome: results of
the same shapes, or the same error from the same line.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pliax.core._jax import whole_tracebacks
from pliax.core.conditions import opposite
from pliax.core.decisions import Decision
from pliax.core.guards import Assumptions
from pliax.core.provenance import NOWHERE, Place
from pliax.core.size_expressions import evaluate_text
from pliax.core.symbols import Symbol

from ._trace_errors import place_of, reason_of
from .tracing import trace_under


@dataclasses.dataclass(frozen=True)
class Branch:
    """A question that the sizes at hand decided.

    Attributes:
        question: the condition that was asked.
        answer: whether it held.
        condition: what holds of all sizes that go this way.
        is_from_jax: whether it was JAX that asked.
    """

    question: str
    answer: bool
    condition: str
    is_from_jax: bool


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """The type of a result: f32[b, 2 * t]."""

    dtype: str
    shape: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(self.shape)}]"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function does with the sizes of one cell.

    Attributes:
        results: the pytree of the types of its results; None where it raises.
        error: the type and the first line of what it raises; "" where it does not.
        place: the user's line that raises.
        asked: what the user's own code asked about sizes, and the answers.
    """

    results: Any = None
    error: str = ""
    place: Place = NOWHERE
    asked: tuple[tuple[str, bool], ...] = ()

    @property
    def kind(self) -> str:
        """The type of the error."""
        return self.error.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class Cell:
    """Sizes that a function does not tell apart.

    Attributes:
        path: the branches that lead there, in the order in which they were asked.
        example: sizes in the cell.
        outcome: what the function does with them.
        note: why the cell holds no other sizes, where JAX needs their values.
    """

    path: tuple[Branch, ...]
    example: Mapping[str, int]
    outcome: Outcome
    note: str = ""

    @property
    def conditions(self) -> tuple[str, ...]:
        """What holds of the sizes in the cell, and of no others."""
        return tuple(branch.condition for branch in self.path)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function whose arguments have named sizes.

    Attributes:
        function: it.
        arguments: its arguments, and those by name; what has a shape is abstract.
        shapes: for each flat argument its shape, with names and expressions of sizes.
        symbols: the named sizes.
        constraints: what is known about them, in `jax.export`'s notation.
        owner: how errors name it.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    shapes: tuple[tuple[str | int, ...], ...]
    symbols: tuple[Symbol, ...]
    constraints: tuple[str, ...]
    owner: str

    def assumptions(self, sizes: Mapping[str, int]) -> Assumptions:
        """What is known before a trace at these sizes, which tells all sizes apart."""
        symbols = [dataclasses.replace(s, hint=sizes[s.name]) for s in self.symbols]
        return Assumptions(symbols, self.constraints, split=True, owner=self.owner)

    def trace(self, assumptions: Assumptions) -> Any:
        """The program for all sizes that take the branches of those at hand."""

        def make(assumptions: Assumptions) -> Any:
            return self._arguments(lambda n: assumptions.known.parse(str(n))[0])

        return trace_under(assumptions, self.function, make)

    def trace_exactly(self, sizes: Mapping[str, int]) -> Any:
        """The program for these sizes alone."""

        def make(_: Assumptions) -> Any:
            return self._arguments(lambda n: evaluate_text(str(n), sizes))

        return trace_under(Assumptions((), owner=self.owner), self.function, make)

    def _arguments(self, size_of: Callable[[str | int], Any]) -> Any:
        leaves, tree = jax.tree.flatten(self.arguments)
        pairs = zip(leaves, self.shapes, strict=True)
        made = [
            jax.ShapeDtypeStruct(
                tuple(n if isinstance(n, int) else size_of(n) for n in shape),
                x.dtype,
                weak_type=getattr(x, "weak_type", False),
            )
            if hasattr(x, "shape")
            else x
            for x, shape in pairs
        ]
        return jax.tree.unflatten(tree, made)


def cell_at(program: Program, sizes: Mapping[str, int]) -> Cell:
    """The cell that holds these sizes."""
    assumptions = program.assumptions(sizes)
    results, error = _outcome(lambda: program.trace(assumptions))
    path, note = _path(assumptions), ""
    if error is not None:
        exact, other = _outcome(lambda: program.trace_exactly(sizes))
        if not _is_its_own(error, other):
            # JAX cannot do without the values of these sizes: a cell of their own.
            note = f"Traced size by size: {reason_of(error)}\n  at {place_of(error)}"
            pins = (f"{name} == {size}" for name, size in sizes.items())
            path = (*path, *(Branch(pin, True, pin, True) for pin in pins))
            results = exact
        if type(error) is not type(other) or results is not None:
            error = other
    place = NOWHERE if error is None else place_of(error)
    text = "" if error is None else reason_of(error)
    outcome = Outcome(results, text, place, _asked(assumptions))
    return Cell(path, dict(sizes), outcome, note)


def _outcome(trace: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with whole_tracebacks():
            return _results(trace()), None
    except Exception as error:
        return None, error


def _is_its_own(error: Exception, other: Exception | None) -> bool:
    """Whether a symbolic trace fails as the function does at the sizes at hand.

    That is so if both errors were raised by the same line, of the user's code or of
    JAX's. One of JAX's has another type in each: a reshape whose sizes do not divide,
    of which it says so after it was told that there is a remainder. And an integer that
    is too large for its type is told by JAX, a size by us, after it was asked.
    """
    if other is None or place_of(other) != place_of(error):
        return False
    if isinstance(error, OverflowError) and isinstance(other, OverflowError):
        return True
    is_symbolic = isinstance(error, jax.errors.InconclusiveDimensionOperation)
    if is_symbolic and "Cannot divide evenly" in str(error):
        return True
    return type(other) is type(error) and _raised_at(other) == _raised_at(error)


_STAND_INS = ("pliax.core.", "jaxtyping.", "beartype.")


def _raised_at(error: Exception) -> tuple[str, int] | None:
    """The line that raised an error; the caller's where our sizes do for integers."""
    found, step = None, error.__traceback__
    while step is not None:
        code, name = step.tb_frame.f_code, step.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(_STAND_INS) and not code.co_filename.startswith("<@"):
            found = code.co_filename, step.tb_lineno
        step = step.tb_next
    return found


def _results(trace: Any) -> Any:
    types = [_type_of(v.aval) for v in trace.jaxpr.outvars]
    return jax.tree.unflatten(trace.out_tree, types)


def _type_of(aval: Any) -> ArrayType:
    dtype = aval.str_short(short_dtypes=True).partition("[")[0]
    return ArrayType(dtype, tuple(map(str, aval.shape)))


def _path(assumptions: Assumptions) -> tuple[Branch, ...]:
    return tuple(
        _branch(decision)
        for decision in assumptions.decisions.values()
        if decision.decided is not None
    )


def _branch(decision: Decision) -> Branch:
    decided: Any = decision.decided
    condition = decided if decision.answer else opposite(decided)
    return Branch(str(decided), decision.answer, str(condition), decision.is_from_jax)


def _asked(assumptions: Assumptions) -> tuple[tuple[str, bool], ...]:
    asked = assumptions.decisions.values()
    return tuple((str(d.question), d.answer) for d in asked if not d.is_from_jax)
