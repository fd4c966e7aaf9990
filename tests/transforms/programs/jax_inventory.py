"""JAX's own inventory of functions with symbolic sizes, read from a checkout.

    export PLIAX_JAX_CHECKOUT=…/jax    # a clone at the tag below; nothing of it is copied

`tests/shape_poly_test.py` lists "harnesses": a function, its arrays, and their shapes with
named sizes. Here each becomes a subject, drawn also at sizes other than its own.
"""

import functools
import importlib.util
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transforms.padding.outcomes import Subject, settings


TAG = "jax-v0.11.2"
VARIABLE = "PLIAX_JAX_CHECKOUT"
SMALLER = (
    1,
    2,
    5,
    7,
    3,
    4,
    6,
    8,
    9,
    12,
)  # to draw a harness's sizes from, then its own
ERROR = "its test asserts an error, and there is no plain result to compare with"
NO_SIZE = "no size in it is symbolic"
UNDEFINED = "JAX leaves its result undefined"
EXCLUSIONS = {
    "gather_1d": f"{UNDEFINED}: random starts, out of bounds, under promise_in_bounds",
}


def checkout() -> Path | None:
    """The checkout that the environment names."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


@functools.cache
def harnesses(root: Path) -> tuple[Any, ...]:
    """All harnesses of a checkout, by name: its own order goes through sets."""
    path = root / "tests" / "shape_poly_test.py"
    spec = importlib.util.spec_from_file_location("jax_shape_poly_test", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"{VARIABLE}: there is no {path}; check out {TAG}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = _flat(module._POLY_SHAPE_TEST_HARNESSES)
    return tuple(sorted(found, key=lambda harness: harness.fullname))


def _flat(nested: Any) -> Iterator[Any]:
    for item in nested:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def exclusion(harness: Any) -> str:
    """Why a harness is left out, or nothing."""
    if harness.fullname in EXCLUSIONS:
        return EXCLUSIONS[harness.fullname]
    if not any(_names(shape) for shape in shapes_of(harness)):
        return NO_SIZE
    if harness.expect_error is not None and not _runs(harness):
        return ERROR
    return ""


def _runs(harness: Any) -> bool:
    """Whether plain JAX takes the harness at its own sizes, and these are allowed."""
    own = _own_sizes(harness, shapes_of(harness))
    if not _admits(harness.symbolic_constraints, own):
        return False
    with settings(harness.override_jax_config_flags):
        try:
            jax.eval_shape(harness.dyn_fun, *_arrays(harness, 0))
        except Exception:
            return False
    return True


def subject_of(harness: Any) -> Subject:
    """A harness at its own sizes and at others that it admits."""
    shapes = shapes_of(harness)
    texts = tuple(", ".join(map(str, shape)) for shape in shapes)
    return Subject(
        name=harness.fullname,
        function=harness.dyn_fun,
        shapes=texts,
        draw=functools.partial(_draw, harness, shapes),
        choices=choices(harness, shapes),
        draw_dyadic=functools.partial(_draw, harness, shapes),
        where=tuple(
            c for c in harness.symbolic_constraints if any(map(str.isalpha, c))
        ),
        settings=harness.override_jax_config_flags,
    )


def shapes_of(harness: Any) -> tuple[tuple[Any, ...], ...]:
    """The symbolic shape of each array."""
    scope = jax.export.SymbolicScope()
    arrays = _arrays(harness, 0)
    specs = (*harness.polymorphic_shapes, *(None,) * len(arrays))
    return tuple(
        tuple(jax.export.symbolic_shape(spec, like=x.shape, scope=scope))
        for spec, x in zip(specs, arrays, strict=False)
    )


def _arrays(harness: Any, seed: int) -> list[np.ndarray]:
    rng = np.random.RandomState(seed)
    arrays = map(np.asarray, harness.dyn_args_maker(rng))
    return [x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays]


def _draw(
    harness: Any, shapes: tuple[Any, ...], sizes: Mapping[str, int], seed: int
) -> tuple[Any, ...]:
    """The harness's arrays, cut or repeated to other sizes, with dyadic floats."""
    wanted = [tuple(_value(n, sizes) for n in shape) for shape in shapes]
    pairs = zip(_arrays(harness, seed), wanted, strict=True)
    return tuple(_dyadic(_resized(x, shape)) for x, shape in pairs)


def _resized(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, (old, new) in enumerate(zip(x.shape, shape, strict=True)):
        if old != new:
            x = np.take(x, np.arange(new) % max(old, 1), axis=axis)
    return x


def _dyadic(x: np.ndarray) -> np.ndarray:
    """Multiples of 1/8 where floats are of a usual size, so that sums are exact."""
    if not np.issubdtype(x.dtype, np.inexact) or not np.all(np.abs(x) < 64):
        return x
    return (np.round(x * 8) / 8).astype(x.dtype)


def choices(harness: Any, shapes: tuple[Any, ...]) -> tuple[dict[str, int], ...]:
    """The harness's own sizes first, then all small, mixed, and one less than its own."""
    own = _own_sizes(harness, shapes)
    names = sorted(own)
    less = [max(own[n] - 1, 1) for n in names]
    wishes = (
        [1] * len(names),
        [(5, 2, 7, 3, 4)[i % 5] for i in range(len(names))],
        less,
    )
    found = [own]
    for wish in wishes:
        chosen = _nearest(harness, names, wish, own)
        if chosen not in found:
            found.append(chosen)
    return tuple(found)


def _nearest(
    harness: Any, names: list[str], wish: list[int], own: dict[str, int]
) -> dict[str, int]:
    """The first admissible sizes, tried from those wished for."""
    tried = [[size, *SMALLER, own[n]] for n, size in zip(names, wish, strict=True)]
    for values in itertools.islice(itertools.product(*tried), 50_000):
        sizes = dict(zip(names, values, strict=True))
        if _admits(harness.symbolic_constraints, sizes):
            return sizes
    return own


def _admits(constraints: Any, sizes: dict[str, int]) -> bool:
    return all(eval(c, {"__builtins__": {}}, dict(sizes)) for c in constraints)


def _own_sizes(harness: Any, shapes: tuple[Any, ...]) -> dict[str, int]:
    """The values of the named sizes that give the arrays the shapes they have."""
    found: dict[str, int] = {}
    for shape, x in zip(shapes, _arrays(harness, 0), strict=True):
        for size, length in zip(shape, x.shape, strict=True):
            names = _names((size,)) - found.keys()
            for name in names:  # each expression of the inventory has one new name
                tries = ({**found, name: n} for n in range(1, length + 1))
                found = next(t for t in tries if _value(size, t) == length)
    return found


def _names(shape: tuple[Any, ...]) -> set[str]:
    return {n for size in shape if not isinstance(size, int) for n in _words(size)}


def _words(size: Any) -> set[str]:
    text = "".join(c if c.isalnum() else " " for c in str(size))
    return {word for word in text.split() if not word.isdigit()}


def _value(size: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    return int(eval(str(size), {"__builtins__": {}}, dict(sizes)))
