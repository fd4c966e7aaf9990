"""One trace for many sizes: a function and symbolic shapes become a jaxpr with guards.

trace : (a -> b), arguments with symbolic shapes  ->  SymbolicTrace
"""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

import pliax.core.size_functions  # noqa: F401  (JAX's functions, for symbolic sizes)
from pliax.core._jax import dce_jaxpr, dim_as_value_p
from pliax.core.caught_errors import Notes, noticing
from pliax.core.collapse import ConstraintViolationError
from pliax.core.conditions import Condition, FailedCheckError
from pliax.core.config import dynamic_log
from pliax.core.dims import Size
from pliax.core.guards import Assumptions, Guard
from pliax.core.other_traces import UnknownSizeError
from pliax.core.provenance import (
    NOWHERE,
    calling_place,
    equation_place,
)
from pliax.core.ragged import as_result, logical
from pliax.core.reals import real_p
from pliax.core.size_expressions import variables
from pliax.core.symbols import Symbol
from pliax.core.unbacked import (
    NeedsSizesError,
    asserts,
    births,
    every_equation,
    numbers_of_cases,
    tracing_context,
)

from ._families import is_number
from ._leaves import on_leaves
from ._other_sizes import args_at, error_at, other_sizes
from ._result_trees import without_sizes
from ._trace_errors import (
    GoesOnError,
    NotSymbolicError,
    note_births,
    place_of,
    reason_of,
)


@dataclasses.dataclass(frozen=True)
class SymbolicTrace:
    """A function of arrays whose sizes are symbolic.

    Attributes:
        jaxpr: the program; shapes and parameters hold `Size`s.
        consts: the arrays it captured.
        inputs: which of the flat arguments are its arguments: arrays and floats.
            Integers and sizes among the others are part of the program.
        out_tree: the structure of its results.
        assumptions: what was assumed of the sizes on the way.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    inputs: tuple[int, ...]
    out_tree: Any
    assumptions: Assumptions

    @functools.cached_property
    def equal(self) -> dict[str, Any]:
        """Named sizes that equal others, or a constant, under the guards."""
        return self.assumptions.known.solved

    @property
    def equal_if_unbacked(self) -> dict[str, Any]:
        """Those of them that are born from data."""
        unbacked = self.assumptions.known.unbacked
        return {name: x for name, x in self.equal.items() if name in unbacked}

    @functools.cached_property
    def is_checked(self) -> bool:
        """Whether it asserts something at run time."""
        return bool(self.assumptions.known.unbacked) and asserts(self.jaxpr)

    @property
    def born_from_data(self) -> list[str]:
        """The sizes that only the device knows: their bounds, and what counts them."""
        known, cases = self.assumptions.known, numbers_of_cases(self.jaxpr)
        return [
            f"{name} <= {bound}{_cases_text(cases.get(name, 0))}  # "
            f"{known.symbols[name].origin}"
            for name, bound in known.unbacked.items()
        ]

    @functools.cached_property
    def shaped_by(self) -> frozenset[str]:
        """The named sizes that some shape depends on; others are mere values."""
        return _names_in_shapes(self.jaxpr)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions under which the trace is right."""
        return tuple(self.assumptions.guards.values())


def _names_in_shapes(jaxpr: Any) -> frozenset[str]:
    names: set[str] = set()
    seen = [*jaxpr.invars, *jaxpr.outvars]
    for eqn in jaxpr.eqns:
        seen += eqn.outvars
        if eqn.primitive not in (dim_as_value_p, real_p):
            names |= _names_in(list(eqn.params.values()))
    for variable in seen:
        names |= _names_in(list(getattr(variable.aval, "shape", ())))
    return frozenset(names)


def _names_in(values: list[Any]) -> set[str]:
    names: set[str] = set()
    for value in values:
        if isinstance(value, Size):
            names |= variables(value)
        elif isinstance(value, list | tuple):
            names |= _names_in(list(value))
        elif hasattr(value, "eqns"):
            names |= _names_in_shapes(getattr(value, "jaxpr", value))
    return names


def trace(
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    symbols: Iterable[Symbol],
    constraints: Sequence[str] = (),
    *,
    owner: str = "px.compile",
) -> SymbolicTrace:
    """Traces f once for all sizes that its guards allow.

    Args:
        f: the function.
        make_args: gives the arguments, abstract arrays in place of arrays, with sizes
          of the assumptions it is called with.
        symbols: the named sizes.
        constraints: what is known about them.
        owner: how errors name the function.

    Raises:
        ConstraintViolationError: where f fixes a size that was declared dynamic.
        NotSymbolicError: where f, or JAX in it, cannot do without the sizes' values.
    """
    found = _traced(f, make_args, tuple(symbols), constraints, owner)
    validate_if_asked(found)
    return found


def validate_if_asked(found: SymbolicTrace) -> None:
    """Proves the guards of a trace if PLIAX_VALIDATE_GUARDS is set, and not to 0."""
    if os.environ.get("PLIAX_VALIDATE_GUARDS", "0") not in ("", "0"):
        from .guard_validation import validate_guards  # which loads Z3

        validate_guards(found)


def _traced(
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    symbols: tuple[Symbol, ...],
    constraints: Sequence[str],
    owner: str,
) -> SymbolicTrace:
    assumptions = Assumptions(symbols, constraints, owner=owner)
    try:
        return trace_under(assumptions, f, make_args)
    except (UnknownSizeError, FailedCheckError):
        raise
    except ConstraintViolationError as violation:
        own = _error_at(assumptions.known.hints, f, make_args, assumptions)
        if own is None:
            raise
        place = place_of(own)  # a call that is wrong in itself fixes no size
        raise NotSymbolicError(reason_of(own), place, own, True) from violation
    except Exception as error:
        first, first_assumptions = error, assumptions
    # JAX found sizes different that agree in this call: once more, with guards.
    again = (
        "%s: traced again, sizes that agree in this call taken as equal: %s\n  at %s"
    )
    dynamic_log.debug(again, owner, reason_of(first), place_of(first))
    assumptions = Assumptions(symbols, constraints, unify=True, owner=owner)
    others = None
    try:
        return trace_under(assumptions, f, make_args)
    except ConstraintViolationError as second:
        others = other_sizes(assumptions)
        is_needed = others is None or _error_at(others, f, make_args, assumptions)
        own = _error_at(assumptions.known.hints, f, make_args, assumptions)
        if is_needed and own is None:
            raise second from first
    except Exception as second:  # what went wrong first is the reason
        dynamic_log.debug("%s: nor so: %s", owner, reason_of(second))
    place = place_of(first)
    place = calling_place() if place is NOWHERE else place
    note_births(first, first_assumptions, place)
    raise NotSymbolicError(
        reason_of(first),
        place,
        first,
        others is not None and _is_symbolic(f, make_args, assumptions, others),
    ) from first


def _error_at(
    sizes: Mapping[str, int],
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    assumptions: Assumptions,
) -> Exception | None:
    """What a program raises where its named sizes have these values."""
    error = error_at(sizes, f, make_args, assumptions)
    if not isinstance(error, NeedsSizesError):
        return error
    args = args_at(sizes, make_args, assumptions)  # plain JAX cannot tell
    try:
        trace_under(Assumptions((), owner=assumptions.owner), f, lambda _: args)
    except Exception as error:  # whatever a user's function raises
        return error
    return None


def _is_symbolic(
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
    assumptions: Assumptions,
    sizes: Mapping[str, int],
) -> bool:
    """Whether a program can be traced for all sizes where a call has others."""
    symbols = [
        dataclasses.replace(s, hint=sizes.get(s.name, s.hint))
        for s in assumptions.known.symbols.values()
    ]
    known, owner = assumptions.known.constraints, assumptions.owner
    for unify in (False, True):
        elsewhere = Assumptions(symbols, known, unify=unify, owner=owner)
        with contextlib.suppress(Exception):  # whatever a user's function raises
            trace_under(elsewhere, f, make_args)
            return True
    return False


def trace_under(
    assumptions: Assumptions,
    f: Callable[..., Any],
    make_args: Callable[[Assumptions], tuple[tuple, dict]],
) -> SymbolicTrace:
    """Traces f once; what it asks of sizes is put to these assumptions."""
    leaves, tree = jax.tree.flatten(make_args(assumptions))
    owner = assumptions.owner
    inputs = [i for i, x in enumerate(leaves) if not is_number(x)]
    out_trees = []

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        args, kwargs = logical((args, kwargs), owner)
        results = jax.tree.map(
            lambda x: as_result(x, assumptions, owner), f(*args, **kwargs)
        )
        results, out_tree = jax.tree.flatten(results)
        out_trees.append(without_sizes(out_tree, assumptions))
        return results

    flat = on_leaves(call, leaves, tree, inputs)
    jaxpr, consts = program_under(assumptions, flat, [leaves[i] for i in inputs])
    return SymbolicTrace(
        jaxpr=jaxpr,
        consts=consts,
        inputs=tuple(inputs),
        out_tree=out_trees[-1],
        assumptions=assumptions,
    )


def program_under(
    assumptions: Assumptions, f: Callable[..., Any], args: Sequence[Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The jaxpr of a function of arrays and what it captured, after which none asks."""
    with tracing_context(assumptions), noticing() as notes:
        closed = jax.make_jaxpr(f)(*args)
    if assumptions.collapses.violation is not None:  # somebody caught it and went on
        raise assumptions.collapses.violation
    _refuse_caught(notes, assumptions)
    _require_shapes(closed.jaxpr, assumptions)
    assumptions.close()
    return _without_unused(closed.jaxpr, assumptions), tuple(closed.consts)


def _refuse_caught(notes: Notes, assumptions: Assumptions) -> None:
    """Raises where the program goes on after an error that no guard tells about."""
    for found in notes.caught:
        is_guarded = assumptions.split and not found.is_about_values
        if assumptions.known.symbols and not is_guarded:
            raise GoesOnError(found)


def _require_shapes(jaxpr: Any, assumptions: Assumptions) -> None:
    """That reshapes keep the number of elements, which JAX asks of integers alone.

    Raises:
        TypeError: where one does not for the sizes at hand, as `jax.jit` does.
    """
    for eqn in every_equation(jaxpr):
        if eqn.primitive.name != "reshape":
            continue
        before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
        pair = math.prod(before), math.prod(after)
        if not any(isinstance(n, Size) for n in pair):
            continue
        place = equation_place(eqn)
        place = calling_place() if place is NOWHERE else place
        if not assumptions.require(Condition("==", pair, assumptions), place):
            raise TypeError(
                f"cannot reshape array of shape {before} (size {pair[0]}) into shape "
                f"{after} (size {pair[1]})\n  at {place}"
            )


def _cases_text(number: int) -> str:
    return f", {number} specialised" if number else ""


def _without_unused(jaxpr: Any, assumptions: Assumptions) -> Any:
    """The program without what nobody reads.

    Inner programs that count a size stay, though only shapes may depend on them.
    """
    if any(births(eqn) for eqn in jaxpr.eqns if assumptions.known.unbacked):
        return jaxpr
    return dce_jaxpr(jaxpr)
