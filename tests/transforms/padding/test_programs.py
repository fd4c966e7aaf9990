"""Loops, branches and calls: no step is made, and none decided, for the padding."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P
from transforms.padding.checking import (
    check,
    check_each,
    compiled,
    run_padded,
    symbolic,
)

import pliax as px
from pliax.transforms.padding.interpreter import run
from pliax.transforms.padding.layouts import Bucket
from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 4, "t": 8}
CHOICES = [{"b": b, "t": t} for b, t in ((3, 5), (1, 1), (4, 8), (2, 7))]


def dyadic(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Floats whose small sums and products are exact in any order."""
    rng = np.random.default_rng((seed, *shape))
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def positive(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).integers(1, 50, shape, np.int32)


def law(
    f: Callable[..., Any], *specs: str, tolerance: float = 0.0, draw: Any = dyadic
) -> None:
    """What is valid equals plain JAX at all sizes, with one executable."""

    def args(sizes: Mapping[str, int]) -> list[np.ndarray]:
        shapes = [eval(f"({spec},)", {}, dict(sizes)) for spec in specs]
        return [draw(i, shape) for i, shape in enumerate(shapes)]

    check_each(f, specs, args, CHOICES, HIGH, tolerance=tolerance)


# --- scans ----------------------------------------------------------------------------


def _rows(x: Any, reverse: bool = False) -> Any:
    """Reductions of the carry, whose axis may be padded as well."""
    step = lambda c, v: (jnp.maximum(c, v), (c.sum(), c.max()))  # noqa: E731
    return lax.scan(step, x.sum(0), x, reverse=reverse)


def _layers(x: Any, w: Any) -> Any:
    return lax.scan(lambda h, v: (h @ v, h.mean() if v.shape[0] == 9 else None), x, w)


def _edit_distance(x: Any, y: Any) -> Any:
    """Levenshtein distance, a scan of scans; its rows have t + 1 cells."""

    def row(previous: Any, letter: Any) -> Any:
        costs = previous[:-1] + (y != letter).astype(jnp.int32)
        start = previous[0] + 1

        def cell(left: Any, pair: Any) -> Any:
            best = jnp.minimum(jnp.minimum(left + 1, pair[0] + 1), pair[1])
            return best, best

        _, rest = lax.scan(cell, start, (previous[1:], costs))
        return jnp.concatenate([start[None], rest]), previous[0]

    return lax.scan(row, jnp.arange(y.shape[0] + 1, dtype=jnp.int32), x)


def _keys(x: Any) -> Any:
    def step(key: Any, v: Any) -> Any:
        key, child = jax.random.split(key)
        return key, (child, jax.random.bits(child, v.shape))

    return lax.scan(step, jax.random.key(7), x)


SCANS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "over padded rows": (_rows, ("b, t",)),
    "over padded rows, reverse": (partial(_rows, reverse=True), ("b, t",)),
    "over a fixed number of padded rows": (_rows, ("3, t",)),
    "fixed, reverse": (partial(_rows, reverse=True), ("3, t",)),
    "no step where t is 1": (lambda x: _rows(x[1:] - x[:-1]), ("t, b",)),
    "layers": (_layers, ("b, t, 4", "3, 4, 4")),
    "unrolled": (
        lambda x: lax.scan(lambda c, v: (c + v, c), 0.0, x.sum(1), unroll=2),
        ("b, t",),
    ),
    "fixed and unrolled": (
        lambda x: lax.scan(lambda c, v: (c + v, c), x[0], x, unroll=2),
        ("5, t",),
    ),
    "constants of the body": (
        lambda x, y: lax.scan(lambda c, v: (c + y @ v, y.sum(0) * v), y[:, 0], x),
        ("b, t", "b, t"),
    ),
    "a merged axis in the carry": (
        lambda x: lax.scan(lambda c, _: (c[::-1] + 1, c.sum()), x.ravel(), length=3),
        ("b, t",),
    ),
    "a merged axis in the outputs": (
        lambda x: lax.scan(lambda c, v: (c, v.ravel()), 0.0, x),
        ("t, b, t",),
    ),
    "a carry of another size than its inputs": (
        lambda x: lax.scan(lambda c, v: (c + v.sum(), c), x[0, :-1], x[:, 1:]),
        ("b, t",),
    ),
    "booleans and integers": (
        lambda x: lax.scan(
            lambda c, v: ((c[0] | (v > 0), c[1] + 1), c[0].any()),
            (jnp.zeros(x.shape[1:], bool), jnp.int32(0)),
            x,
        ),
        ("b, t",),
    ),
    "keys": (_keys, ("b, t",)),
    "map": (lambda x: lax.map(jnp.cumsum, x), ("b, t",)),
    "fori_loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, v: v + i - v.mean() * 0, x),
        ("b, t",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SCANS)
def test_a_scan_sees_valid_steps_only(case: str) -> None:
    f, specs = SCANS[case]
    law(f, *specs)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 9), (4, 4)])
def test_a_map_in_batches_as_long_as_another_axis(shape: tuple[int, int]) -> None:
    b, t = (px.Dim(name, buckets=[4, 9]) for name in "bt")
    double = px.compile(
        lambda x: lax.map(lambda row: 2 * row, x, batch_size=x.shape[1]),
        dims={"x": {0: b, 1: t}},
        padding="require",
    )
    assert np.array_equal(double(x := dyadic(0, shape)), 2 * x)


def test_scans_of_scans_over_integers() -> None:
    draw = lambda seed, shape: positive(seed, shape) % 4  # noqa: E731
    law(_edit_distance, "b", "t", draw=draw)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_derivatives_of_scans(wrap: Callable[..., Any]) -> None:
    def f(x: Any, w: Any) -> Any:
        step = wrap(lambda c, v: (0.5 * c * v + w @ c, (c * v).sum()))
        c, ys = lax.scan(step, x.sum(0), x)
        return c.sum() + (ys**2).sum()

    law(jax.grad(f, (0, 1)), "b, t", "t, t", tolerance=1e-4)


def test_sizes_that_agree_are_one_in_a_loop() -> None:
    """t and s are equal by a guard; their buckets are not."""

    def f(x: Any, y: Any) -> Any:
        first = lax.scan(lambda c, v: (v, (c * v).sum()), x[0], y)
        return first, lax.cond(x.sum() > 0, lambda: x, lambda: y)

    sizes, high = {"b": 3, "t": 5, "s": 5}, {"b": 4, "t": 8, "s": 16}
    args = [dyadic(0, (3, 5)), dyadic(1, (3, 5))]
    traced = check(f, ["b, t", "b, s"], args, sizes, high)
    assert "t == s" in [guard.condition for guard in traced.guards]


@pytest.mark.parametrize("case", ["over padded rows", "a merged axis in the carry"])
def test_a_bucket_of_one_size_has_no_padding(case: str) -> None:
    f, specs = SCANS[case]
    sizes = {"b": 3, "t": 5}
    check(f, specs, [dyadic(0, (3, 5))], sizes, sizes, low=sizes)


def _collatz(n: Any) -> Any:
    """How many steps lead to 1; from 0 and from most negative numbers none do."""

    def step(state: Any) -> Any:
        n, count = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda s: s[0] != 1, step, (n, jnp.int32(0)))[1]


@pytest.mark.parametrize("over", [lax.map, lambda f, x: jax.vmap(f)(x)])
def test_loops_that_would_never_end_for_the_padding(over: Callable[..., Any]) -> None:
    law(lambda x: over(_collatz, x), "t", draw=positive)
    law(lambda x: over(lambda v: over(_collatz, v), x), "b, t", draw=positive)


def test_a_scan_makes_as_many_steps_as_are_valid_in_order() -> None:
    seen: list[int] = []

    def f(x: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            io_callback(lambda i: seen.append(int(i)), None, c, ordered=True)
            return c + 1, v.sum()

        return lax.scan(step, jnp.int32(0), x)

    x = dyadic(0, (3, 5))
    traced = symbolic(f, ["b, t"], [x], {"b": 3, "t": 5})
    run_padded(traced, [x], {"b": 3, "t": 5}, HIGH)
    jax.effects_barrier()
    assert seen == [0, 1, 2]


# --- while ----------------------------------------------------------------------------


def _halve(x: Any) -> Any:
    return lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.1, lambda v: v / 2, x)


def _rounds(x: Any, n: Any) -> Any:
    """As many steps as an element says; a nested loop inside."""
    step = lambda _, v: _halve(v) + v * 2  # noqa: E731
    return lax.fori_loop(0, n % 4, step, x)


WHILES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "all decide": (_halve, ("b, t",)),
    "each row decides": (jax.vmap(_halve), ("b, t",)),
    "each column decides": (jax.vmap(_halve, 1, 1), ("b, t",)),
    "each element decides": (jax.vmap(jax.vmap(_halve)), ("b, t",)),
    "rows of rows": (jax.vmap(jax.vmap(_halve)), ("b, 2, t",)),
    "a fixed batch": (jax.vmap(_halve), ("3, t",)),
    "constants of both": (
        lambda x, y: lax.while_loop(
            lambda v: v.sum() < y.sum(), lambda v: v + jnp.abs(y) + 1, x
        ),
        ("b, t", "b, t"),
    ),
    "constants in a batch": (
        jax.vmap(
            lambda x, y: lax.while_loop(
                lambda v: v.sum() < y.sum(), lambda v: v + jnp.abs(y) + 1, x
            )
        ),
        ("b, t", "b, t"),
    ),
    "merged": (lambda x: jax.vmap(_halve)(x.reshape(-1, 3)), ("b, t, 3",)),
    "sizes decide": (
        lambda x: lax.while_loop(
            lambda s: s[0] < x.shape[1],
            lambda s: (s[0] + 1, s[1] + x[:, 0]),
            (0, x[:, 0]),
        ),
        ("b, t",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WHILES)
def test_padding_has_no_say_in_a_predicate(case: str) -> None:
    f, specs = WHILES[case]
    law(f, *specs)


def test_each_element_makes_its_own_number_of_steps() -> None:
    def f(x: Any, n: Any) -> Any:
        return jax.vmap(_rounds)(x, (jnp.abs(n) * 8).astype(jnp.int32))

    law(f, "b, t", "b")


# --- branches and calls ---------------------------------------------------------------


@jax.custom_jvp
def _tripled(x: Any) -> Any:
    return 3 * x


_tripled.defjvps(lambda t, _, x: t * x.sum())


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return x.sum(0)


_clipped.defvjp(lambda x: (x.sum(0), x), lambda x, g: (g[None] * x * 2,))


def _branch(x: Any) -> Any:
    return lax.cond(x.sum() > 0, lambda v: v.sum(0), lambda v: v.max(0), x)


CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "cond": (_branch, ("b, t",)),
    "cond of a batch": (jax.vmap(_branch), ("b, t, 2",)),
    "switch": (
        lambda x: lax.switch(
            x.shape[0] % 3, [jnp.sort, jnp.negative, lambda v: v - v.max()], x
        ),
        ("b, t",),
    ),
    "branches of other layouts": (
        lambda x: lax.cond(
            x[0, 0] > 0, jnp.ravel, lambda v: jnp.zeros(v.size) + v.sum(), x
        ),
        ("b, t",),
    ),
    "platforms": (
        lambda x: lax.platform_dependent(
            x, cpu=lambda v: v.sum(1), default=lambda v: v[:, 0]
        ),
        ("b, t",),
    ),
    "jit in jit": (lambda x: jax.jit(lambda v: jax.jit(jnp.sum)(v) + v)(x), ("b, t",)),
    "checkpoint": (jax.checkpoint(lambda x: (x * x).sum(0)), ("b, t",)),
    "derivative of a checkpoint": (
        jax.grad(lambda x: (jax.checkpoint(lambda v: v * v * v)(x)).sum()),
        ("b, t",),
    ),
    "custom_jvp": (jax.grad(lambda x: _tripled(x).sum()), ("b, t",)),
    "custom_vjp": (jax.grad(lambda x: _clipped(x).sum()), ("b, t",)),
    "custom_vjp, forwards": (_clipped, ("b, t",)),
    "custom_linear_solve": (
        lambda d, y: lax.custom_linear_solve(
            lambda v: (d * d + 1) * v, y, lambda _, v: v * (d + 2)
        ),
        ("t", "t"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CALLS)
def test_calls_and_branches(case: str) -> None:
    f, specs = CALLS[case]
    law(f, *specs)


def jaxpr_of(f: Callable[..., Any], spec: str = "b, t", **options: Any) -> Any:
    """The padded program of a function of one array."""
    x = dyadic(0, (3, 5))
    traced = symbolic(f, [spec], [x], {"b": 3, "t": 5}, **options)

    def program(values: Any, x: Any) -> Any:
        bucket = Bucket({n: (1, high) for n, high in HIGH.items()}, values)
        padded = bucket.simple(x, traced.jaxpr.invars[0].aval.shape)
        return [y.data for y in run(bucket, traced.jaxpr, traced.consts, [padded])]

    physical = jax.ShapeDtypeStruct((4, 8), np.float32)
    return jax.make_jaxpr(program)({"b": np.int32(3), "t": np.int32(5)}, physical)


def test_a_checkpoint_stays_one_and_its_derivative_stands_behind_a_barrier() -> None:
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    assert "remat2" in str(jaxpr_of(f)) or "checkpoint" in str(jaxpr_of(f))
    backwards = str(jaxpr_of(jax.grad(lambda x: f(x).sum())))
    assert backwards.count("optimization_barrier") == 1
    assert "remat2" not in backwards

    loose = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False)
    backwards = str(jaxpr_of(jax.grad(lambda x: loose(x).sum())))
    assert "optimization_barrier" not in backwards


def test_loops_without_padding_and_symbolic_sizes_are_kept_as_they_are() -> None:
    def f(x: Any) -> Any:
        return lax.scan(lambda c, v: (c * v, c), x.sum(), jnp.ones(6), unroll=3)[1]

    (scan,) = [e for e in jaxpr_of(f).eqns if e.primitive.name == "scan"]
    assert scan.params["unroll"] == 3


def test_masks_made_in_a_body_stay_in_it() -> None:
    """The same mask inside and outside: a leak would be an error of JAX."""

    def f(x: Any) -> Any:
        inside = lax.cond(x[0, 0] > 0, jnp.sum, jnp.max, x)
        loop = lax.scan(lambda c, v: (c + v.sum(), x.sum()), 0.0, x)
        loops = jax.vmap(_halve)(x)
        return inside, loop, loops, x.sum(), jax.checkpoint(lambda v: v.max(1))(x)

    x = dyadic(0, (3, 5))
    with jax.checking_leaks():
        traced = symbolic(f, ["b, t"], [x], {"b": 3, "t": 5})
        run_padded(traced, [x], {"b": 3, "t": 5}, HIGH)


# --- the host, devices, references ----------------------------------------------------


def _shown(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda v: np.asarray(v) * 2, shape, x)


def test_a_callback_on_exact_arrays_stays() -> None:
    law(lambda x: _shown(x.sum()) + x, "b, t")
    law(lambda x: _shown(x.sum(0))[:2] + x[0, 0], "b, 3")


def test_a_callback_where_the_bucket_leaves_one_size() -> None:
    """Sizes in the parameters of an exact equation become integers."""
    x = dyadic(0, (4, 5))
    sizes, high = {"b": 4, "t": 5}, {"b": 4, "t": 8}
    check(lambda x: _shown(x.sum(1)), ["b, t"], [x], sizes, high, low={"b": 4})


def _printed(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


def _referenced(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] + 1
    return ref[...]


REFUSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "pure_callback": (_shown, "pure_callback: the host would see the padding"),
    "debug.print": (_printed, "the host would see the padding"),
    "in a loop": (lambda x: lax.map(_shown, x), "pure_callback: the host would see"),
    "a reference": (_referenced, "references to padded arrays"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_hand_out_the_padding_is_refused(case: str) -> None:
    f, reason = REFUSALS[case]
    with pytest.raises(PaddingRefused, match=reason) as refusal:
        law(f, "b, t")
    assert "test_programs.py" in str(refusal.value)


def _on_each(mesh: Any, spec: Any) -> Callable[..., Any]:
    def part(x: Any, total: Any) -> Any:
        whole = lax.psum(x.sum(keepdims=True), "x") * lax.axis_size("y")
        return jnp.cumsum(x, -1) - whole + lax.pmax(total, "x")

    return jax.shard_map(part, mesh=mesh, in_specs=(spec, P()), out_specs=spec)


def test_shards_along_whole_axes_are_padded_alike(mesh_4x2: Any) -> None:
    def f(x: Any) -> Any:
        return _on_each(mesh_4x2, P(("x", "y")))(x, x.sum()) * 2

    law(f, "8, t")
    law(lambda x: _on_each(mesh_4x2, P(None, None, "x"))(x, x.sum()), "b, t, 4")
    law(lambda x: f(jnp.ones((8, 1)) * x.sum()).sum() + x, "8, t")


def test_shards_of_padded_axes_are_refused(mesh_4x2: Any) -> None:
    with pytest.raises(PaddingRefused, match=r"the size 4 \* b is divided among"):
        law(lambda x: _on_each(mesh_4x2, P("x"))(x, x.sum()), "4*b, t")


def test_sharding_constraints_are_those_of_the_bucket(mesh_4x2: Any) -> None:
    def f(x: Any, spec: Any) -> Any:
        return lax.with_sharding_constraint(2 * x, NamedSharding(mesh_4x2, spec))

    law(partial(f, spec=P("x", "y")), "4*b, 2*t")
    law(partial(f, spec=P(None, None)), "b, t")


def test_the_shardings_of_an_inner_jit_are_those_of_the_bucket(mesh_4x2: Any) -> None:
    sharding = NamedSharding(mesh_4x2, P("x", "y"))
    inner = jax.jit(lambda x: 2 * x, out_shardings=sharding)
    x = dyadic(0, (12, 10))
    sizes = {"b": 3, "t": 5}
    traced = symbolic(inner, ["4*b, 2*t"], [x], sizes)
    program = compiled(traced, {n: (1, high) for n, high in HIGH.items()})
    values = {n: np.int32(size) for n, size in sizes.items()}
    (y,) = program(values, jnp.zeros((16, 16)))
    assert y.sharding.is_equivalent_to(sharding, 2)
