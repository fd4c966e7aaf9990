"""Equations that hold programs: calls, loops and branches.

A call is run in place; custom derivatives are done with. Loops and branches are JAX's
own around the padded program, with one factor for each axis of what they carry, so that
a step ends in the layout in which it began. What a body computes of the bucket (masks,
sizes) stays in it: each has an inner scope.

No step is made, and no predicate asked, on behalf of padding: a scan over a padded axis
ends with its valid steps, and a batched loop with its valid elements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from pliax.core.size_expressions import variables
from pliax.core.unbacked import births

from .interpreter import HIGHER_ORDER, run
from .layouts import Bucket, Factors, Padded
from .placements import placed
from .rules import bind, explicit_sharding, refuse, rule


_CALLS = {"jit": "jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr", "linear_call": "callee"}
_CALLS |= {"remat_opt": "fwd_jaxpr", "custom_vmap_call": "call"}
_CALLS |= dict.fromkeys(
    (
        "closed_call",
        "composite",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "eval_jaxpr",
    ),
    "call_jaxpr",
)
HIGHER_ORDER |= _CALLS.keys()


def run_inner(bucket: Bucket, inner: Any, operands: Sequence[Padded]) -> list[Padded]:
    """The results of a program that an equation holds."""
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    return run(bucket, jaxpr, consts, operands)


# --- calls ----------------------------------------------------------------------------


@rule(*_CALLS)
def call(bucket: Bucket, eqn: Any, *operands: Padded) -> Sequence[Padded]:
    """A function of its own: what it computes, in place; its placements are kept."""
    params = eqn.params
    inner = params[_CALLS[eqn.primitive.name]]
    _refuse_second_birth(bucket, eqn)
    xs = placed(bucket, eqn, operands, params.get("in_shardings"))
    results = run_inner(bucket, inner, xs)
    return placed(bucket, eqn, results, params.get("out_shardings"))


def _refuse_second_birth(bucket: Bucket, eqn: Any) -> None:
    """One trace of an inner function serves two calls, and names their sizes alike.

    That is right as long as no result has such a size.
    """
    given = _names(eqn.invars)
    again = _names(eqn.outvars) & bucket.values.keys() - given
    if again and (again := again & births(eqn)):
        raise refuse(
            eqn,
            f"it is called again with arguments of the same types, and its result has "
            f"a size born from data in it ({min(again)}), but JAX traced it once; "
            "give each call a trace of its own (px.compile in place of jax.jit, "
            "jax.checkpoint of a new function, lambda x: f(x)), reduce in it what has "
            "this size, or call px.ragged outside of this inner function",
        )


def _names(variables_: Sequence[Any]) -> frozenset[str]:
    """The named sizes in the shapes of variables."""
    shapes = [getattr(v.aval, "shape", ()) for v in variables_]
    return frozenset().union(*(variables(n) for shape in shapes for n in shape))


@rule("custom_linear_solve")
def custom_linear_solve(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """The user's solver; the other three functions serve derivatives."""
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = operands[start : start + lengths.solve]
    unknowns = operands[sum(lengths) :]
    return run_inner(bucket, eqn.params["jaxprs"].solve, [*consts, *unknowns])


@rule("remat2", "checkpoint", "remat")
def remat(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """After a derivative a barrier, as JAX lowers it; before, a checkpoint again."""
    params = eqn.params
    if not params["differentiated"]:
        _refuse_second_birth(bucket, eqn)
        return _checkpoint(bucket, eqn, operands)
    kept = params["prevent_cse"]
    if isinstance(kept, bool):
        kept = (kept,) * len(operands)
    with bucket.recomputing():
        return run_inner(bucket, params["jaxpr"], _behind_barrier(operands, kept))


def _behind_barrier(xs: Sequence[Padded], kept: Sequence[bool]) -> list[Padded]:
    data = [x.data for x, k in zip(xs, kept, strict=True) if k]
    behind = iter(lax.optimization_barrier(data) if data else ())
    return [
        Padded(next(behind), x.axes, x.fill) if k else x
        for x, k in zip(xs, kept, strict=True)
    ]


def _checkpoint(bucket: Bucket, eqn: Any, operands: Sequence[Padded]) -> list[Padded]:
    layouts: list[tuple[tuple[Factors, ...], Any]] = []
    texts: list[str] = []

    def inner(*data: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
        xs, scope = _with_data(operands, data), bucket.inner()
        scope.checks = []
        results = run_inner(scope, eqn.params["jaxpr"], xs)
        layouts[:] = [(x.axes, x.fill) for x in results]
        texts[:] = [text for text, _ in scope.checks]
        born = {n: v for n, v in scope.values.items() if v is not bucket.values.get(n)}
        return _data(results), born, [held for _, held in scope.checks]

    options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    data, born, held = jax.checkpoint(inner, **options)(*_data(operands))
    for name, value in born.items():
        bucket.count(name, value)
    for text, holds in zip(texts, held, strict=True):
        bucket.check(text, holds)
    return [Padded(x, *layout) for x, layout in zip(data, layouts, strict=True)]


@rule("name")
def name(bucket: Bucket, eqn: Any, x: Padded) -> Padded:
    """The identity, which policies of `jax.checkpoint` know by a name."""
    return Padded(bind(eqn, x.data), x.axes, x.fill)


# --- loops ----------------------------------------------------------------------------


@rule("scan")
def scan(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """JAX's scan; over a padded axis a loop of as many steps as are valid."""
    _keep_inside(bucket, eqn)
    consts, carry, xs = _parts(eqn.params["ft_in"], operands)
    length = bucket.size(eqn.params["length"])
    carry = _settled(bucket, carry, eqn.outvars)
    xs = [bucket.arranged(x, ((length,), *x.axes[1:])) for x in xs]
    rows: list[tuple[Factors, ...]] = []

    def step(state: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        scope = bucket.inner()
        elements = [
            Padded(data, x.axes[1:], x.fill) for data, x in zip(row, xs, strict=True)
        ]
        given = [*consts, *_with_data(carry, state), *elements]
        results = run_inner(scope, eqn.params["jaxpr"], given)
        rows[:] = [y.axes for y in results[len(carry) :]]
        return _data(_settled(scope, results, eqn.outvars[: len(carry)])), [
            y.data for y in results[len(carry) :]
        ]

    over = _all_steps if isinstance(length, int) else _valid_steps
    state, ys = over(bucket, eqn, step, _data(carry), _data(xs))
    stacked = [Padded(y, ((length,), *axes)) for y, axes in zip(ys, rows, strict=True)]
    return [*_with_data(carry, state), *stacked]


def _all_steps(
    bucket: Bucket, eqn: Any, step: Callable[..., Any], carry: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    options["length"] = bucket.length(options["length"])
    return lax.scan(step, carry, xs, **options)


def _valid_steps(
    bucket: Bucket, eqn: Any, step: Callable[..., Any], carry: list[Any], xs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """A loop with its end known at run time: no body ever sees a row of padding."""
    length = eqn.params["length"]
    count, physical = bucket.scalar(length), bucket.length(length)
    _, made = jax.eval_shape(lambda c, xs: step(c, [_row(x, 0) for x in xs]), carry, xs)
    ys = [_rows_to_come(eqn, physical, y) for y in made]

    def body(state: Any) -> Any:
        i, carry, ys = state
        place = count - 1 - i if eqn.params["reverse"] else i
        carry, new = step(carry, [_row(x, place) for x in xs])
        pairs = zip(ys, new, strict=True)
        return i + 1, carry, [_with_row(y, row, place) for y, row in pairs]

    start = (jnp.int32(0), carry, ys)
    _, carry, ys = lax.while_loop(lambda state: lax.lt(state[0], count), body, start)
    return carry, ys


def _rows_to_come(eqn: Any, physical: int, row: Any) -> Any:
    """Zeros, as many rows as there may be steps, placed as what a step makes."""
    shape, given = (physical, *row.shape), row.sharding
    if given is not None:
        given = NamedSharding(given.mesh, P(None, *given.spec))
    spread = explicit_sharding(eqn, given, [(n,) for n in shape])
    return lax.full(shape, 0, row.dtype, sharding=spread)


def _row(x: Any, place: Any) -> Any:
    return lax.dynamic_index_in_dim(
        x, place, 0, keepdims=False, allow_negative_indices=False
    )


def _with_row(x: Any, row: Any, place: Any) -> Any:
    return lax.dynamic_update_index_in_dim(
        x, row, place, 0, allow_negative_indices=False
    )


@rule("while")
def while_loop(bucket: Bucket, eqn: Any, *operands: Padded) -> list[Padded]:
    """JAX's loop; a batched predicate ends with the last valid element."""
    _keep_inside(bucket, eqn)
    params = eqn.params
    ends = np.cumsum([params["cond_nconsts"], params["body_nconsts"]])
    cond_consts, body_consts = operands[: ends[0]], operands[ends[0] : ends[1]]
    carry = _settled(bucket, operands[ends[1] :], eqn.outvars)
    (decision,) = _outvars(params["cond_jaxpr"])

    def goes_on(state: Sequence[Any]) -> Any:
        scope = bucket.inner()
        given = [*cond_consts, *_with_data(carry, state)]
        results = run_inner(scope, params["cond_jaxpr"], given)
        (answer,) = _settled(scope, results, [decision])
        return scope.filled(answer, False).data

    def step(state: Sequence[Any]) -> list[Any]:
        scope = bucket.inner()
        given = [*body_consts, *_with_data(carry, state)]
        results = run_inner(scope, params["body_jaxpr"], given)
        return _data(_settled(scope, results, eqn.outvars))

    loop = _batched_while if decision.aval.shape else lax.while_loop
    return _with_data(carry, loop(goes_on, step, _data(carry)))


def _batched_while(
    goes_on: Callable[..., Any], step: Callable[..., Any], state: list[Any]
) -> list[Any]:
    """Elements that are done keep their state; padding is done from the start."""

    def body(both: Any) -> Any:
        active, state = both
        new = [_chosen(active, x, y) for x, y in zip(step(state), state, strict=True)]
        return goes_on(new), new

    return lax.while_loop(lambda both: jnp.any(both[0]), body, (goes_on(state), state))[
        1
    ]


def _chosen(which: Any, x: Any, y: Any) -> Any:
    which = lax.broadcast_in_dim(which, x.shape, range(which.ndim))
    return lax.select(which, x, y)


# --- branches -------------------------------------------------------------------------


@rule("cond")
def cond(bucket: Bucket, eqn: Any, index: Padded, *operands: Padded) -> list[Padded]:
    """JAX's switch: the branches agree on one factor for each axis."""
    _keep_inside(bucket, eqn)

    def branch(inner: Any) -> Callable[..., list[Any]]:
        def call(*data: Any) -> list[Any]:
            scope = bucket.inner()
            results = run_inner(scope, inner, _with_data(operands, data))
            return _data(_settled(scope, results, eqn.outvars))

        return call

    branches = [branch(inner) for inner in eqn.params["branches"]]
    platforms = eqn.params.get("branches_platforms")
    data = [x.data for x in operands]
    if platforms is None:
        results = lax.switch(index.data, branches, *data)
    else:
        results = lax.platform_dependent(*data, **_by_platform(platforms, branches))
    axes = [_axes(bucket, v) for v in eqn.outvars]
    return [Padded(x, a) for x, a in zip(results, axes, strict=True)]


def _by_platform(platforms: Any, branches: Sequence[Any]) -> dict[str, Any]:
    pairs = zip(platforms, branches, strict=True)
    return {name: f for names, f in pairs for name in names or ("default",)}


# --- layouts --------------------------------------------------------------------------


def _parts(tree: Any, values: Sequence[Any]) -> list[list[Any]]:
    """Values in consecutive groups, as long as those of a scan's flat tree."""
    rest = iter(values)
    return [[next(rest) for _ in range(len(part))] for part in tree.unpack()]


def _axes(bucket: Bucket, variable: Any) -> tuple[Factors, ...]:
    """One factor for each axis of a variable."""
    return tuple((bucket.size(n),) for n in variable.aval.shape)


def _settled(
    bucket: Bucket, xs: Sequence[Padded], variables: Sequence[Any]
) -> list[Padded]:
    """Arrays in the layout and the dtype of variables, of which there may be more."""
    pairs = zip(xs, variables, strict=False)
    return [_in_layout(bucket, x, v) for x, v in pairs]


def _keep_inside(bucket: Bucket, eqn: Any) -> None:
    """Refuses a result of a loop or a branch with a size that is born in its body."""
    for size in (n for v in eqn.outvars for n in v.aval.shape):
        bucket.require(size)


def _in_layout(bucket: Bucket, x: Padded, variable: Any) -> Padded:
    x = bucket.arranged(x, _axes(bucket, variable))
    return Padded(x.data, x.axes)  # what padding holds may change from step to step


def _data(xs: Sequence[Padded]) -> list[Any]:
    return [x.data for x in xs]


def _with_data(xs: Sequence[Padded], data: Sequence[Any]) -> list[Padded]:
    """Other arrays in the layouts of these."""
    return [Padded(d, x.axes, x.fill) for d, x in zip(data, xs, strict=True)]


def _outvars(inner: Any) -> Any:
    return getattr(inner, "jaxpr", inner).outvars
