"""``px.validate_guards``: do the guards of a trace imply all that it relied upon?

A trace is right for all sizes that satisfy its guards, if every answer it was given
about sizes holds for all of them. Those answers are on record (`core/decisions.py`).
Z3, which knows nothing of how they were found, is asked for sizes that satisfy the
ranges of the named sizes, the user's conditions and the guards, but not the answer. If
there are none the decision is proved. If Z3 cannot tell, the report says so.
"""

import dataclasses
import functools
import threading
from typing import Any

from pliax.core.provenance import NOWHERE, Place

from ._proofs import Facts, Prover, Undecided, load_z3
from .tracing import SymbolicTrace


_OWNER = "px.validate_guards"
_TIMEOUT = 1000  # ms for one question; those that traces ask mostly take less than one


class GuardValidationError(AssertionError):
    """A trace relied upon something that its guards do not imply.

    Attributes:
        condition: what it relied upon, "t + 1 == t".
        sizes: sizes that satisfy the guards, but not the condition.
        place: the line of the user's code that asked.
    """

    def __init__(self, text: str, condition: str, sizes: dict[str, int], place: Place):
        super().__init__(text)
        self.condition, self.sizes, self.place = condition, sizes, place


@dataclasses.dataclass(frozen=True)
class GuardReport:
    """What :func:`validate_guards` found where nothing was wrong.

    Attributes:
        traces: how many traces were looked at.
        guards: how many guards they have.
        proved: how many decisions follow from them.
        unknown: the others, of which Z3 could not tell, with their lines.
    """

    traces: int
    guards: int
    proved: int
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = self.proved + len(self.unknown)
        head = (
            f"{self.proved} of {total} decisions proved "
            f"(guards: {self.guards}, traces: {self.traces})"
        )
        return "\n".join([head, *(f"not known: {text}" for text in self.unknown)])


def validate_guards(target: Any, *, timeout: int = _TIMEOUT) -> GuardReport:
    """Proves that the guards of traces imply every decision taken in them.

    A decision is an answer about sizes that the program went on with: a comparison that
    followed from what was known, one that the sizes at hand decided, a size used as an
    integer or looked up among integers, two sizes that JAX was told are equal, a name
    that padding takes for another. JAX's `==` that is False between sizes which may be
    equal is none: to JAX it means "not known to be equal".

    With the environment variable `PLIAX_VALIDATE_GUARDS=1` every trace is validated as
    soon as it is made.

    Args:
        target: a function of :func:`compile`, all of whose traces are looked at, or one
            of its `traces`.
        timeout: how long Z3 may think about one decision, in milliseconds. Most need
            less than one; products of sizes may need many.

    Returns:
        A :class:`GuardReport`.

    Raises:
        GuardValidationError: with sizes for which a decision is wrong.
        ImportError: where Z3 is missing: `pip install "pliax[verify]"`.
        TypeError: where the target has no traces.

    Examples:
        >>> import jax.numpy as jnp
        >>> import pliax as px
        >>> @px.compile(dims={"x": "t"}, where="t <= 4096")
        ... def f(x):
        ...     return x[:128] if x.shape[0] > 128 and x.shape[0] < 5000 else x
        >>> y = f(jnp.ones(200))
        >>> report = px.validate_guards(f)
        >>> report.guards, report.unknown
        (1, ())

    References:
        L. de Moura, N. Bjørner: Z3: An Efficient SMT Solver. TACAS 2008.
    """
    is_trace = isinstance(target, SymbolicTrace)
    traces = (target,) if is_trace else getattr(target, "traces", None)
    if traces is None:
        raise TypeError(
            f"{_OWNER}: found {target!r} of type {type(target).__name__}.\n"
            "Pass a function of px.compile, or one of its traces."
        )
    if type(timeout) is not int or timeout < 1:
        raise ValueError(
            f"{_OWNER}: timeout is {timeout!r}.\nPass milliseconds, at least 1."
        )
    load_z3(_OWNER)
    reports = [_validate(trace, timeout) for trace in traces]
    return GuardReport(
        traces=len(reports),
        guards=sum(report.guards for report in reports),
        proved=sum(report.proved for report in reports),
        unknown=tuple(text for report in reports for text in report.unknown),
    )


def _validate(trace: SymbolicTrace, timeout: int) -> GuardReport:
    guards = tuple(guard.condition for guard in trace.guards)  # what calls are asked
    facts = Facts.of(trace.assumptions, guards)
    unknown = []
    decisions = _decisions(trace)
    for condition, place in decisions:
        sizes = None if condition in guards else _verdict(facts, condition, timeout)
        if sizes == ():
            unknown.append(f"{condition}  # {place}")
        elif sizes is not None:
            raise _error(trace, condition, dict(sizes), place)
    return GuardReport(1, len(guards), len(decisions) - len(unknown), tuple(unknown))


def _decisions(trace: SymbolicTrace) -> list[tuple[str, Place]]:
    """Each condition that a trace relied upon, and who asked."""
    # A copy: other threads may be asking closed assumptions at this time.
    asked = list(trace.assumptions.decisions.values())
    tied = [(f"{name} == {size}", NOWHERE) for name, size in trace.equal.items()]
    return [*((d.condition, d.place) for d in asked), *tied]


_LOCK = threading.Lock()  # a prover is for one thread at a time


@functools.lru_cache(maxsize=1 << 14)
def _verdict(
    facts: Facts, condition: str, timeout: int
) -> tuple[tuple[str, int], ...] | None:
    """None where a condition follows; sizes that refute it; () where Z3 cannot tell."""
    with _LOCK:
        try:
            found = _prover(facts, timeout).counterexample(condition)
        except Undecided:
            return ()
    return None if found is None else tuple(found.items())


@functools.lru_cache(maxsize=8)
def _prover(facts: Facts, timeout: int) -> Prover:
    return Prover(facts, timeout, _OWNER)


def _error(
    trace: SymbolicTrace, condition: str, sizes: dict[str, int], place: Place
) -> GuardValidationError:
    values = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    guards = ", ".join(trace.assumptions.guards) or "none"
    return GuardValidationError(
        f"{trace.assumptions.owner}: the program relies on {condition}, which its "
        f"guards do not imply: {values}.\n"
        f"  at {place}\n"
        f"guards: {guards}\n"
        "This is a mistake of pliax, not of the program. Results for such sizes may be "
        "wrong: please report it with these lines.",
        condition,
        sizes,
        place,
    )
