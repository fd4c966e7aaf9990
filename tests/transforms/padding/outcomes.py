"""What becomes of one function under the padding transform.

    examine : Subject -> Outcome

The function is traced once for all sizes and run in a bucket at several of them, with two
kinds of poison in the padding. It is *padded* if its valid results are the same bits with
either and those of plain JAX, *refused* or *size by size* if the transform, or JAX's trace,
says why not. *wrong*, *dependent* (on the padding) and *crash* are mistakes of ours.

Floats may differ by the order of additions. On inputs whose sums are exact in any order
(`exact_sums.py`) they may not: there the same numbers are asked for.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transforms.padding.checking import compiled, run_compiled
from transforms.padding.exact_sums import sums_exactly
from transforms.programs import Program

import pliax as px
from pliax.core.collapse import ConstraintViolationError
from pliax.core.constraints import constraint
from pliax.core.provenance import NOWHERE
from pliax.core.symbols import Symbol
from pliax.transforms._trace_errors import NotSymbolicError
from pliax.transforms.padding import PaddingRefused
from pliax.transforms.padding.layouts import Bucket
from pliax.transforms.tracing import SymbolicTrace, trace


PADDED, REFUSED, STATIC = "padded", "refused", "size by size"
MISTAKES = WRONG, DEPENDENT, CRASH = "wrong", "dependent", "crash"
FAILED_RULE = "its rule failed"  # how the interpreter reports an exception in a rule
SAME_NUMBERS = 1e-30  # no difference but the sign of a zero, which no sum keeps
Choice = Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Subject:
    """A function to pad, and how to call it.

    Attributes:
        name: unique in its inventory.
        function: of arrays.
        shapes: of each array, in `jax.export`'s notation.
        draw: the arrays for some sizes and a seed.
        choices: sizes to run it at; the first are those it is traced with.
        draw_dyadic: arrays of small multiples of 1/8 in the same way.
        where: what is known of the sizes, as Python comparisons.
        tolerance: by how much floats may differ from those of plain JAX, relatively and
            absolutely, as additions come in another order; 0 asks for the same bits.
        settings: JAX's settings it needs, by their names in `jax.config`.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[str, ...]
    draw: Callable[[Choice, int], tuple[Any, ...]]
    choices: tuple[Choice, ...]
    draw_dyadic: Callable[[Choice, int], tuple[Any, ...]]
    where: tuple[str, ...] = ()
    tolerance: float = Program.tolerance
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """One row of an inventory.

    Attributes:
        name: the subject's.
        kind: "padded", "refused", "size by size", "wrong", "dependent" or "crash".
        reason: why it is not padded, or what is wrong.
        place: the line that asked for what cannot be padded; that of the call where all is JAX's.
        served: whether `px.compile` gives plain JAX's results where it is not padded.
        sizes: how many choices of sizes were compared.
        dyadic: whether they were also the same on inputs whose sums are exact.
    """

    name: str
    kind: str
    reason: str = ""
    place: str = ""
    served: bool | None = None
    sizes: int = 0
    dyadic: bool = False


class _MistakeError(Exception):
    def __init__(self, kind: str, sizes: Choice, detail: Any = ""):
        self.kind = kind
        super().__init__(f"at {dict(sizes)} {detail}".strip())


def examine(subject: Subject, *, serve: bool = False) -> Outcome:
    """Traces, pads, runs and compares.

    Args:
        subject: the function and its calls.
        serve: whether to call it under `px.compile` as well where it is not padded.
    """
    with settings(subject.settings):
        try:
            found = traced(subject)
            is_exact = sums_exactly(found.jaxpr, found.consts)
            count = _compare(subject, found, is_exact)
            return Outcome(subject.name, PADDED, sizes=count, dyadic=is_exact)
        except (PaddingRefused, NotSymbolicError, ConstraintViolationError) as refusal:
            return _refused(subject, refusal, serve)
        except _MistakeError as mistake:
            return Outcome(subject.name, mistake.kind, str(mistake))
        except Exception as error:
            return Outcome(subject.name, CRASH, f"{type(error).__name__}: {error}")


def _refused(subject: Subject, refusal: Exception, serve: bool) -> Outcome:
    reason, _, place = str(refusal).partition("\n  at ")
    place = "" if place.startswith(NOWHERE.file) else place
    if FAILED_RULE in reason:
        return Outcome(subject.name, CRASH, reason, place)
    kind = REFUSED if isinstance(refusal, PaddingRefused) else STATIC
    try:
        served = is_served(subject) if serve else None
    except Exception as error:
        text = f"under px.compile: {type(error).__name__}: {error}"
        return Outcome(subject.name, CRASH, text, place)
    return Outcome(subject.name, kind, reason, place.partition("\n")[0], served)


def is_padded(subject: Subject) -> bool:
    """Whether every operation has a rule; nothing is compiled or run."""
    with settings(subject.settings):
        try:
            found, ranges = traced(subject), bucket(subject)
            values = {n: jax.ShapeDtypeStruct((), jnp.int32) for n in ranges}
            room = Bucket(ranges, {})
            avals = [v.aval for v in found.jaxpr.invars]
            arrays = [jax.ShapeDtypeStruct(room.shape(a.shape), a.dtype) for a in avals]
            jax.eval_shape(compiled(found, ranges), values, *arrays)
        except (PaddingRefused, NotSymbolicError, ConstraintViolationError):
            return False
    return True


def traced(subject: Subject) -> SymbolicTrace:
    """The subject's trace for all its sizes.

    Raises:
        NotSymbolicError: also where the trace is for one value of a size only.
    """
    hints = subject.choices[0]
    args = subject.draw(hints, 0)

    def make(assumptions: Any) -> Any:
        sizes = [
            assumptions.known.parse(shape) if shape else () for shape in subject.shapes
        ]
        pairs = zip(sizes, args, strict=True)
        return tuple(jax.ShapeDtypeStruct(s, x.dtype) for s, x in pairs), {}

    symbols = [Symbol(n, hint, n) for n, hint in hints.items()]
    found = trace(subject.function, make, symbols, [*map(constraint, subject.where)])
    fixed = {n: size for n, size in found.equal.items() if isinstance(size, int)}
    for guard in found.guards if fixed else ():
        text = f"a guard fixes a size: {guard.condition}"
        raise NotSymbolicError(text, guard.place, ValueError(text))
    return found


def bucket(subject: Subject) -> dict[str, tuple[int, int]]:
    """Room for every choice of sizes."""
    return {n: (1, max(c[n] for c in subject.choices)) for n in subject.choices[0]}


def _compare(subject: Subject, found: SymbolicTrace, is_exact: bool) -> int:
    """At how many choices the padded results equal the plain ones."""
    ranges, count = bucket(subject), 0
    run = compiled(found, ranges)
    plain = jax.jit(subject.function)
    for sizes in subject.choices:
        if all(guard.holds(sizes) for guard in found.guards):
            call = functools.partial(run_compiled, run, ranges, found)
            draws = [(subject.draw, subject.tolerance)]
            draws += [(subject.draw_dyadic, SAME_NUMBERS)] if is_exact else []
            for draw, tolerance in draws:
                args = draw(sizes, 1)
                results = [call(args, sizes, poison=kind) for kind in (0, 1)]
                one, other = map(jax.tree.leaves, results)
                _require(sizes, one, other, jax.tree.leaves(plain(*args)), tolerance)
            count += 1
    return count


def _require(sizes: Choice, one: Any, other: Any, plain: Any, tolerance: float) -> None:
    if [*map(bits, one)] != [*map(bits, other)]:
        raise _MistakeError(DEPENDENT, sizes)
    for found, wanted in zip(one, plain, strict=True):
        if not close(found, wanted, tolerance):
            raise _MistakeError(WRONG, sizes, f"{found} is not {wanted}"[:400])


def is_served(subject: Subject) -> bool:
    """Whether `px.compile` gives plain JAX's results at the first sizes."""
    names = [f"x{i}" for i in range(len(subject.shapes))]
    args = subject.draw(subject.choices[0], 1)
    given = dict(zip(names, subject.shapes, strict=True))
    dims = {name: shape for name, shape in given.items() if shape}
    where = subject.where
    served = px.compile(with_names(subject.function, names), dims=dims, where=where)
    try:
        found = jax.tree.leaves(served(*args))
    except ConstraintViolationError:  # the program is for one size, and says so
        free = px.compile(subject.function)
        found = jax.tree.leaves(free(*args))
    wanted = jax.tree.leaves(jax.jit(subject.function)(*args))
    return all(map(close, found, wanted, [subject.tolerance] * len(wanted)))


def with_names(f: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A function of positional arguments with parameters of these names."""
    listed = ", ".join(names)
    return eval(f"lambda {listed}: f({listed})", {"f": f})


@contextlib.contextmanager
def settings(values: Mapping[str, Any]) -> Iterator[None]:
    """JAX's settings by their names, put back afterwards."""
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def bits(x: Any) -> tuple[Any, ...]:
    """An array as bytes, with its shape and dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.shape(x), x.dtype, np.asarray(x).tobytes()


def equal(found: Any, wanted: Any) -> bool:
    """Whether two arrays have the same bits."""
    return bits(found) == bits(wanted)


def close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Equal but for the rounding of floats, with NaN where NaN is."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    if not tolerance or not jnp.issubdtype(found.dtype, jnp.inexact):
        return equal(found, wanted)
    found, wanted = (np.asarray(x).astype(np.complex128) for x in (found, wanted))
    return np.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
