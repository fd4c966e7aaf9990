"""Runs a symbolic jaxpr on padded arrays, equation by equation.

    run : bucket, jaxpr, constants, padded arguments  ->  padded results

With a bucket that holds one size only, every size is an integer and nothing is padded:
the same loop gives the program of exactly that size.
"""

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pliax.core._jax import weakly_typed_as
from pliax.core.dataflow import is_literal
from pliax.core.provenance import NOWHERE, calling_place, equation_place
from pliax.core.size_expressions import variables
from pliax.core.unbacked import count_p

from . import rules
from .cases import Cases, cases_of, in_cases
from .layouts import (
    Bucket,
    Padded,
    ScopeError,
    UnboundedSizeError,
    UnrepresentableError,
    physical_shape,
)
from .rules import RULES, PaddingRefused, bind, refuse, sizes_of, static


# Always by rule: primitives whose parameters hold programs, which hold sizes in turn.
# The others are about sizes themselves.
HIGHER_ORDER: set[str] = {"dim_as_value", "real_of_sizes"}


_MODULES = ("contractions", "convolutions", "elementwise", "high_level", "indexing")
_MODULES += ("linear_algebra", "placements", "programs", "random_bits", "reductions")
_MODULES += ("shapes", "sorting", "unbacked", "windows")


@functools.cache
def load_rules() -> None:
    """Enters all rules into the table; importing pliax does not wait for it."""
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")


def run(
    bucket: Bucket, jaxpr: Any, consts: Sequence[Any], args: Sequence[Padded]
) -> list[Padded]:
    """The results of a jaxpr on padded arguments.

    Raises:
        PaddingRefused: at the first equation that cannot be padded exactly.
    """
    load_rules()
    env: dict[Any, Padded] = {}
    env.update(zip(jaxpr.constvars, map(bucket.exact, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    return _run_from(0, bucket, jaxpr, env)


def run_whole(
    bucket: Bucket, jaxpr: Any, consts: Sequence[Any], args: Sequence[Padded]
) -> list[Any]:
    """The arrays of the results of a user's program, weakly typed where JAX's are.

    Raises:
        PaddingRefused: as `run` does; where all of the program is JAX's, with the line
            that called it.
    """
    try:
        results = run(bucket, jaxpr, consts, args)
    except PaddingRefused as refusal:
        if refusal.place is not NOWHERE:
            raise
        name, reason = refusal.primitive, refusal.reason
        raise PaddingRefused(name, reason, calling_place()) from refusal.__cause__
    pairs = zip(results, jaxpr.outvars, strict=True)
    return [weakly_typed_as(_as_long_as(bucket, x, v), v.aval) for x, v in pairs]


def _as_long_as(bucket: Bucket, x: Padded, variable: Any) -> Any:
    """A result's array, whose lengths follow from its own sizes alone."""
    sizes = sizes_of(variable)
    data = bucket.simplified(x).data
    for axis, length in enumerate(physical_shape(bucket, sizes)):
        if data.shape[axis] != length:
            index = np.minimum(np.arange(length), data.shape[axis] - 1)
            data = data[(slice(None),) * axis + (index,)]
    return data


def _run_from(
    start: int, bucket: Bucket, jaxpr: Any, env: dict[Any, Padded]
) -> list[Padded]:
    """The rest of a program, in an environment that is its own."""

    def read(x: Any) -> Padded:
        return _literal(x.val) if is_literal(x) else env[x]

    for place, eqn in enumerate(jaxpr.eqns[start:], start):
        eqn = _with_integers(eqn)
        is_birth = eqn.primitive is count_p
        if is_birth and not bucket.recomputes:
            _refuse_second_value(bucket, eqn, env, jaxpr.eqns[place:], jaxpr.outvars)
        results = _results(bucket, eqn, [read(x) for x in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
        if is_birth and (cases := cases_of(bucket, eqn, jaxpr.eqns[place + 1 :])):
            return _in_cases(place, bucket, cases, jaxpr, env)
    return [read(x) for x in jaxpr.outvars]


def _in_cases(
    place: int, bucket: Bucket, cases: Cases, jaxpr: Any, env: dict[Any, Padded]
) -> list[Padded]:
    """What follows an equation, once for each case."""

    def rest(case: Bucket) -> list[Padded]:
        return _run_from(place + 1, case, jaxpr, dict(env))

    try:
        return in_cases(bucket, cases, rest, [sizes_of(v) for v in jaxpr.outvars])
    except PaddingRefused:
        raise
    except Exception as error:  # a mistake of ours, as in `_results`
        raise refuse(jaxpr.eqns[place], str(error)) from error


def _refuse_second_value(
    bucket: Bucket,
    eqn: Any,
    env: Mapping[Any, Padded],
    following: Sequence[Any],
    outvars: Sequence[Any],
) -> None:
    """A size that gets another value while there are arrays as long as the first one.

    JAX traces an inner function once for two calls and puts what it computes in place.
    """
    name = str(eqn.params["size"])
    if name not in bucket.values:
        return
    read = [x for e in following for x in e.invars] + list(outvars)
    alive = [env[x] for x in read if not is_literal(x) and x in env]
    if any(name in variables(f) for x in alive for f in x.factors):
        raise refuse(
            eqn,
            f"the size {name} gets another value while arrays of it are in use; call "
            "px.ragged outside of the inner function that is called twice",
        )


def _with_integers(eqn: Any) -> Any:
    """The equation with Python integers where NumPy's have got into its axes."""
    changed = {k: _integers(v) for k, v in eqn.params.items() if _has_numpy(v)}
    return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def _has_numpy(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_numpy, value))
    return isinstance(value, np.integer)


def _integers(value: Any) -> Any:
    if isinstance(value, np.integer):
        return int(value)
    if not isinstance(value, tuple | list):
        return value
    items = map(_integers, value)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _literal(value: Any) -> Padded:
    fill = value if isinstance(value, bool | int | float) else np.asarray(value).item()
    return Padded(np.asarray(value) if np.ndim(value) == 0 else value, (), fill)


def _results(bucket: Bucket, eqn: Any, operands: list[Padded]) -> Sequence[Padded]:
    try:
        results = _by_rule(bucket, eqn, operands)
    except PaddingRefused as refusal:
        if refusal.place is not NOWHERE:
            raise
        # JAX keeps the trace of an inner jit, but not the line that called it.
        name, reason = refusal.primitive, refusal.reason
        raise PaddingRefused(name, reason, equation_place(eqn)) from refusal.__cause__
    except (ScopeError, UnboundedSizeError, UnrepresentableError) as error:
        raise refuse(eqn, str(error)) from error
    except FloatingPointError:  # what jax_debug_nans looks for
        raise
    except Exception as error:  # a mistake of ours must not stop the user's program
        reason = f"its rule failed with {type(error).__name__}: {error}"
        raise refuse(eqn, reason) from error
    return [results] if isinstance(results, Padded) else results


def _by_rule(
    bucket: Bucket, eqn: Any, operands: list[Padded]
) -> Padded | Sequence[Padded]:
    """The equation as it is where nothing is padded, else what its rule makes of it."""
    name = eqn.primitive.name
    if name not in HIGHER_ORDER and all(x.is_exact for x in operands):
        exact = _exactly(bucket, eqn, operands)
        if exact is not None:
            return exact
    found = RULES.get(name)
    if found is None:
        raise refuse(eqn, "there is no rule for it yet")
    return found(bucket, eqn, *operands)


def _exactly(
    bucket: Bucket, eqn: Any, operands: list[Padded]
) -> Sequence[Padded] | None:
    """The equation as it is, if no size is left symbolic in it."""
    try:
        params = static(bucket, eqn.params)
        static(bucket, [sizes_of(v) for v in eqn.outvars])
    except KeyError:
        return None
    values = [bucket.simplified(x).data for x in operands]
    results = bind(eqn, *values, **params)
    many = eqn.primitive.multiple_results
    return [bucket.exact(x) for x in (results if many else [results])]


__all__ = ["HIGHER_ORDER", "rules", "run"]
