"""The padding transform on an inventory of JAX's public functions, written before it.

Each program is traced once for all sizes and run in a bucket, at several sizes, with two
kinds of poison in the padding. Its valid results are the same bits with either, and
those of plain JAX. What is not padded is refused, never wrong and never a crash.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms.padding.checking import compiled, run_compiled
from transforms.programs import Program, choose_sizes, inventory, make_arguments

from pliax.core.constraints import constraint
from pliax.core.guards import ConstraintViolationError, Symbol
from pliax.transforms.padding import PaddingRefused
from pliax.transforms.tracing import NotSymbolicError, trace


BUCKET = 16
SIZES = ((5, 7, 6), (16, 13, 11), (1, 2, 3), (15, 16, 12))  # then whatever `where` asks
OTHERS = (12, 11, 8, 7, 6, 5, 4, 3, 2, 1, 16, 24)
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
PROGRAMS = inventory()
SAMPLE = [
    pytest.param(p, id=p.name, marks=[pytest.mark.slow] if i % 3 else [])
    for i, p in enumerate(PROGRAMS if THOROUGH else PROGRAMS[::9])
]
MISTAKES = ("its rule failed",)


def choices(program: Program) -> list[dict[str, int]]:
    """Different sizes that the program admits."""
    found: list[dict[str, int]] = []
    for sizes in SIZES:
        rest = [(*sizes[i:], *sizes[:i], *OTHERS) for i in range(len(sizes))]
        chosen = choose_sizes(program, *rest)
        if chosen not in found:
            found.append(chosen)
    return found


@functools.cache
def traced(program: Program):
    """The program's trace for all sizes."""
    hints = choices(program)[0]
    args = make_arguments(program, hints, 0)
    shapes = [argument.shape for argument in program.arguments]

    def make(assumptions):
        sizes = [assumptions.parse(shape) if shape else () for shape in shapes]
        pairs = zip(sizes, args, strict=True)
        return tuple(jax.ShapeDtypeStruct(s, x.dtype) for s, x in pairs), {}

    symbols = [Symbol(n, hint, n) for n, hint in hints.items()]
    return trace(
        program.function, make, symbols, [constraint(w) for w in program.where]
    )


def bucket(program: Program) -> dict[str, tuple[int, int]]:
    """Room for every choice of sizes."""
    return {
        n: (1, max(BUCKET, *(c[n] for c in choices(program))))
        for n in choices(program)[0]
    }


def bits(x):
    """An array as bytes, with its shape and dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.shape(x), x.dtype, np.asarray(x).tobytes()


def assert_close(found, wanted):
    """Equal up to the order of float additions, with NaN where NaN is."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        assert bits(found) == bits(wanted)
        return
    found, wanted = (np.asarray(x).astype(np.complex128) for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


def outcome(check) -> tuple[Any, Exception | None]:
    """What a check of a program gives, or why the program is not padded."""
    try:
        return check(), None
    except (PaddingRefused, NotSymbolicError, ConstraintViolationError) as refusal:
        assert not any(mistake in str(refusal) for mistake in MISTAKES), refusal
        return None, refusal


@pytest.mark.parametrize("program", SAMPLE)
def test_padded_programs_equal_plain_ones_whatever_the_padding(program):
    trace_, refusal = outcome(lambda: traced(program))
    if refusal is not None:
        return
    ranges = bucket(program)
    run = compiled(trace_, ranges)
    for sizes in choices(program):
        if not all(guard.holds(sizes) for guard in trace_.guards):
            continue
        args = make_arguments(program, sizes, 1)
        results, refusal = outcome(
            lambda args=args, sizes=sizes: [
                run_compiled(run, ranges, trace_, args, sizes, poison=kind)
                for kind in (0, 1)
            ]
        )
        if refusal is not None:
            return
        one, other = (jax.tree.leaves(r) for r in results)
        plain = jax.tree.leaves(jax.jit(program.function)(*args))
        assert [*map(bits, one)] == [*map(bits, other)]
        for found, wanted in zip(one, plain, strict=True):
            if program.float_order:
                assert_close(found, wanted)
            else:
                assert bits(found) == bits(wanted)


@pytest.mark.slow
def test_at_least_three_quarters_of_the_inventory_are_padded():
    def is_padded(program):
        def abstractly():
            found = traced(program)
            run, ranges = compiled(found, bucket(program)), bucket(program)
            values = {n: jax.ShapeDtypeStruct((), jnp.int32) for n in ranges}
            shapes = [
                tuple(high_of(n, ranges) for n in v.aval.shape)
                for v in found.jaxpr.invars
            ]
            pairs = zip(shapes, found.jaxpr.invars, strict=True)
            arrays = [jax.ShapeDtypeStruct(s, v.aval.dtype) for s, v in pairs]
            jax.eval_shape(run, values, *arrays)
            return True

        return outcome(abstractly)[1] is None

    padded = [is_padded(program) for program in PROGRAMS[::3]]
    assert sum(padded) >= 0.75 * len(padded)


def high_of(size, ranges):
    """The length of a physical axis."""
    from pliax.transforms.padding.layouts import Bucket

    return Bucket(ranges, {}).length(size)
