"""One law for every padding rule: what is valid equals plain JAX, whatever the padding.

    check(f, ("b, t", ""), (x, y), sizes={"b": 3, "t": 5}, high={"b": 8, "t": 8})

traces f once with symbolic sizes, runs it on arrays as long as the bucket with two kinds
of poison in their padding, and compares what is valid with f on the plain arrays.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax.transforms.padding as rules
from pliax.core.size_expressions import evaluate
from pliax.core.symbols import Symbol
from pliax.transforms.padding.interpreter import run_whole
from pliax.transforms.padding.layouts import Bucket
from pliax.transforms.tracing import SymbolicTrace, trace


for module in pkgutil.iter_modules(rules.__path__):
    importlib.import_module(f"{rules.__name__}.{module.name}")


def symbolic(
    f: Callable[..., Any],
    specs: Sequence[str],
    args: Sequence[Any],
    sizes: Mapping[str, int],
    *,
    constraints: Sequence[str] = (),
    low: Mapping[str, int] | None = None,
) -> SymbolicTrace:
    """The trace of f for arguments with the shapes of the specs, one for each."""

    def make(assumptions: Any) -> Any:
        shapes = [assumptions.known.parse(spec) if spec else () for spec in specs]
        avals = [
            jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, x in zip(shapes, args, strict=True)
        ]
        return tuple(avals), {}

    symbols = [
        Symbol(n, hint, n, low=(low or {}).get(n, 1)) for n, hint in sizes.items()
    ]
    return trace(f, make, symbols, constraints)


def run_padded(
    traced: SymbolicTrace,
    args: Sequence[Any],
    sizes: Mapping[str, int],
    high: Mapping[str, int],
    *,
    poison: int = 0,
    low: Mapping[str, int] | None = None,
) -> Any:
    """The valid part of each result, computed in the bucket from poisoned arrays."""
    ranges = {n: ((low or {}).get(n, 1), high[n]) for n in sizes}
    return run_compiled(
        compiled(traced, ranges), ranges, traced, args, sizes, poison=poison
    )


def compiled(traced: SymbolicTrace, ranges: Mapping[str, tuple[int, int]]) -> Any:
    """One program for all sizes in a bucket: (sizes, *physical arrays) -> results."""
    shapes = [v.aval.shape for v in traced.jaxpr.invars]

    def program(values: Mapping[str, Any], *arrays: Any) -> list[Any]:
        bucket = Bucket(ranges, values, traced.equal)
        padded = [bucket.simple(x, s) for x, s in zip(arrays, shapes, strict=True)]
        return run_whole(bucket, traced.jaxpr, traced.consts, padded)

    return jax.jit(program)


def run_compiled(
    program: Any,
    ranges: Mapping[str, tuple[int, int]],
    traced: SymbolicTrace,
    args: Sequence[Any],
    sizes: Mapping[str, int],
    *,
    poison: int = 0,
) -> Any:
    """The valid part of each result of a compiled program, from poisoned arrays."""
    bucket = Bucket(ranges, {}, traced.equal)
    shapes = [v.aval.shape for v in traced.jaxpr.invars]
    arrays = [
        poisoned(x, bucket.shape(shape), poison)
        for x, shape in zip(args, shapes, strict=True)
    ]
    values = {n: np.int32(size) for n, size in sizes.items()}
    results = program(values, *arrays)
    for v, x in zip(traced.jaxpr.outvars, results, strict=True):
        assert x.shape == bucket.shape(v.aval.shape), (x.shape, v.aval.shape)
        assert x.dtype == v.aval.dtype, (x.dtype, v.aval.dtype)
    cut = [
        x[tuple(slice(evaluate(n, sizes)) for n in v.aval.shape)]
        for v, x in zip(traced.jaxpr.outvars, results, strict=True)
    ]
    return jax.tree.unflatten(traced.out_tree, cut)


def poisoned(x: Any, shape: tuple[int, ...], kind: int) -> Any:
    """The array in the corner of one of this shape; the rest is of the worst sort."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        full = poisoned(np.asarray(data), (*shape, *data.shape[x.ndim :]), kind)
        return jax.random.wrap_key_data(full, impl=jax.random.key_impl(x))
    full = np.array(_poison(np.random.default_rng(kind), x.dtype, shape, kind))
    full[tuple(slice(n) for n in x.shape)] = np.asarray(x)
    return jnp.asarray(full)


def _poison(rng: Any, dtype: Any, shape: tuple[int, ...], kind: int) -> np.ndarray:
    """NaN or huge numbers of both signs; integers anywhere, many as small as indices."""
    if dtype == np.bool_:
        return rng.random(shape) < (0.5 if kind else 2)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        if not kind:
            return np.full(shape, info.max, dtype)
        far = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
        return np.where(
            rng.random(shape) < 0.5, far, rng.integers(4, size=shape, dtype=dtype)
        )
    if not kind:
        return np.full(shape, np.nan, dtype)
    huge = float(jnp.finfo(dtype).max)
    return (huge * rng.uniform(-1, 1, shape)).astype(dtype)


def check(
    f: Callable[..., Any],
    specs: Sequence[str],
    args: Sequence[Any],
    sizes: Mapping[str, int],
    high: Mapping[str, int],
    *,
    tolerance: float = 0.0,
    constraints: Sequence[str] = (),
    low: Mapping[str, int] | None = None,
) -> SymbolicTrace:
    """Asserts the law for one choice of sizes; gives the trace.

    Args:
        f: the function.
        specs: the shape of each argument, in `jax.export`'s notation.
        args: arrays of the true sizes.
        sizes: the value of each named size.
        high: the largest value of each: how long the bucket is.
        tolerance: how far floats may be off, absolutely and relatively; 0 is bitwise.
        constraints: what is known about the sizes.
        low: the smallest value of each size, 1 where it is not said.
    """
    traced = symbolic(f, specs, args, sizes, constraints=constraints, low=low)
    results = [
        run_padded(traced, args, sizes, high, poison=kind, low=low) for kind in (0, 1)
    ]
    assert_same(results[0], results[1], 0.0)
    assert_same(results[0], jax.jit(f)(*map(jnp.asarray, args)), tolerance)
    return traced


def check_each(
    f: Callable[..., Any],
    specs: Sequence[str],
    args_of: Callable[[Mapping[str, int]], Sequence[Any]],
    choices: Sequence[Mapping[str, int]],
    high: Mapping[str, int],
    *,
    tolerance: float = 0.0,
) -> None:
    """Asserts the law for many choices of sizes, with one trace and one executable.

    A choice that the guards of the first one's trace forbid gets a trace of its own.
    """
    ranges = {n: (1, high[n]) for n in choices[0]}
    traced = symbolic(f, specs, args_of(choices[0]), choices[0])
    program = compiled(traced, ranges)
    for sizes in choices:
        args = args_of(sizes)
        if not all(guard.holds(sizes) for guard in traced.guards):
            check(f, specs, args, sizes, high, tolerance=tolerance)
            continue
        options = (program, ranges, traced, args, sizes)
        results = [run_compiled(*options, poison=kind) for kind in (0, 1)]
        assert_same(results[0], results[1], 0.0)
        assert_same(results[0], jax.jit(f)(*map(jnp.asarray, args)), tolerance)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Asserts that two trees of arrays are equal, NaN being equal to NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(a.dtype, jnp.inexact) and tolerance:
            options = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
            np.testing.assert_allclose(a, b, **options)
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
