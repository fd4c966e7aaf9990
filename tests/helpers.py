"""What several laws share: the error rule, compilations counted, random arrays."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def errors(x: Any, golden: Any) -> np.ndarray:
    """Absolute differences in float64; places that are infinite must agree."""
    x, golden = (np.asarray(a, np.float64) for a in (x, golden))
    assert np.array_equal(np.isinf(x), np.isinf(golden))
    assert not np.isnan(x).any()
    finite = np.isfinite(golden)
    return np.abs(x[finite] - golden[finite]) if finite.any() else np.zeros(1)


def assert_error_rule(actual: Any, plain: Any, golden: Any) -> None:
    """Every array is about as close to the golden as the plain formula is.

    The mean error may be 1.1 times (half precision) or 10 times (float32) that of the
    plain formula in the working dtype; a float32 rounding of the largest value is free.
    The largest error may be 10 times the plain formula's, so that no single place hides
    behind the mean.
    """
    trees = (jax.tree.leaves(tree) for tree in (actual, plain, golden))
    for one, other, exact in zip(*trees, strict=True):
        factor = 10 if one.dtype.itemsize >= 4 else 1.1
        exact64 = np.asarray(exact, np.float64)
        scale = np.abs(exact64[np.isfinite(exact64)]).max(initial=0.0)
        free = scale * np.finfo(np.float32).eps
        ours, theirs = errors(one, exact), errors(other, exact)
        assert ours.mean() <= factor * theirs.mean() + free
        assert ours.max() <= 10 * theirs.max() + 4 * free


def in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """A function of arrays evaluated in float64, as NumPy arrays."""
    with jax.enable_x64(True):
        wide = jax.tree.map(_widen, args)
        return jax.tree.map(np.asarray, function(*wide))


def _widen(x: Any) -> Any:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(np.asarray(x), jnp.float64 if floating else x.dtype)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Standard normal numbers of a seed."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays_made(function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
    """The primitive of each outermost equation and the shape of what it makes."""
    made: list[tuple[str, Any]] = []
    for eqn in jax.make_jaxpr(function)(*args).eqns:
        avals: list[Any] = [v.aval for v in eqn.outvars]
        made += [(eqn.primitive.name, aval.shape) for aval in avals]
    return made


def equations(function: Callable[..., Any], *args: Any) -> list[Any]:
    """All equations of a function, those of inner programs as often as they stand."""

    def inside(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from inside(inner)

    return list(inside(jax.make_jaxpr(function)(*args).jaxpr))


# All of LLVM's passes, for slow laws: conftest.py leaves them out of the others.
OPTIMISED = {"xla_backend_optimization_level": 3}
_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """A list that grows by one for each executable XLA builds."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED:
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
