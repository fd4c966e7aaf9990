"""Test data for a program at concrete sizes."""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._program import Argument, Program


_FUNCTIONS = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def evaluate(expression: str, sizes: dict[str, int]) -> int:
    """A size expression at concrete sizes.

    Example:
        >>> evaluate("2*b + floordiv(t, 2)", {"b": 3, "t": 7})
        9
    """
    return eval(expression, {"__builtins__": {}}, _FUNCTIONS | sizes)


def concrete_shape(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """``"b, t, 4"`` at concrete sizes; a comma inside brackets does not separate."""
    parts = re.split(r",(?![^(]*\))", shape)
    return tuple(evaluate(part, sizes) for part in parts if part.strip())


def make_arguments(
    program: Program, sizes: dict[str, int], seed: int, *, dyadic: bool = False
) -> tuple[Any, ...]:
    """Arrays for the program at these sizes.

    Args:
        program: whose arguments to draw.
        sizes: the value of each letter.
        seed: two calls with one seed and the same sizes give the same arrays.
        dyadic: floats are small multiples of 1/8, so that float sums are exact.
    """
    rng = np.random.default_rng(seed)
    return tuple(_draw(rng, a, sizes, dyadic) for a in program.arguments)


def _draw(
    rng: np.random.Generator, argument: Argument, sizes: dict[str, int], dyadic: bool
) -> Any:
    shape = concrete_shape(argument.shape, sizes)
    kind, _, bound = argument.values.partition(":")
    if kind == "key":
        return jax.random.key(int(rng.integers(2**31)))
    if kind == "index":
        return rng.integers(0, evaluate(bound, sizes), shape).astype(argument.dtype)
    if kind in _DISCRETE:
        return np.asarray(_DISCRETE[kind](rng, shape)).astype(argument.dtype)
    draw = functools.partial(_FLOATS[kind], rng, shape, dyadic)
    if argument.dtype.startswith("complex"):
        return np.asarray(draw() + 1j * draw()).astype(argument.dtype)
    return np.asarray(draw()).astype(jax.numpy.dtype(argument.dtype))


def _permutation(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.argsort(rng.random(shape), axis=-1)


_DISCRETE: dict[str, Callable[..., Any]] = {
    "boolean": lambda rng, shape: rng.random(shape) < 0.5,
    "integer": lambda rng, shape: rng.integers(-5, 6, shape),
    "permutation": _permutation,
}


def _between(low: float, high: float, rng, shape, dyadic: bool) -> np.ndarray:
    if dyadic:
        return rng.integers(np.ceil(low * 8), np.floor(high * 8) + 1, shape) / 8
    return rng.uniform(low, high, shape)


def _normal(rng, shape, dyadic: bool) -> np.ndarray:
    return _between(-2, 2, rng, shape, True) if dyadic else rng.normal(size=shape)


def _spd(rng, shape, dyadic: bool) -> np.ndarray:
    """Diagonally dominant where dyadic; else A Aᵀ / n + I."""
    n = shape[-1]
    a = _normal(rng, shape, dyadic)
    if dyadic:
        return np.tril(a) + np.swapaxes(np.tril(a, -1), -1, -2) + 4 * n * np.eye(n)
    return a @ np.swapaxes(a, -1, -2) / n + np.eye(n)


def _well_conditioned(rng, shape, dyadic: bool) -> np.ndarray:
    """2 I plus a part whose spectral norm is about 1 (4 n I where dyadic)."""
    n = shape[-1]
    a = _normal(rng, shape, dyadic)
    return a + 4 * n * np.eye(n) if dyadic else a / (2 * np.sqrt(n)) + 2 * np.eye(n)


_FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "normal": _normal,
    "positive": functools.partial(_between, 0.5, 2),
    "unit": functools.partial(_between, -0.95, 0.95),
    "probability": functools.partial(_between, 0.05, 0.95),
    "sorted": lambda *drawing: np.sort(_normal(*drawing), axis=-1),
    "spd": _spd,
    "well_conditioned": _well_conditioned,
}
