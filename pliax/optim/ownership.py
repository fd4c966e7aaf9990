"""Newton-Schulz on several devices: each owns a share of the matrices of each shape.

A matrix that is sharded over the owners is gathered on one of them instead of on all.
For each shape of matrix that takes one all-to-all there and one back, in the working
dtype. Parameters that every device has whole take one all-gather at the end; layers or
experts that lie on different devices take nothing, as whole matrices lie there already.

Which of these holds is read from the shardings that the compiler has found, by
`jax.experimental.custom_partitioning`, so that nothing has to be said twice. Whatever
else a parameter's sharding may be (over other mesh axes, across the parts of a fused
projection), the compiler first makes it one of the three.
"""

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jaxtyping import Array

from .matrix_axes import Matrices, MatrixAxes, matrices
from .newton_schulz import NewtonSchulz
from .stacks import Stack, apply_to_stacks, by_shape, cut


P = jax.sharding.PartitionSpec
_NO_MESH = jax.sharding.AbstractMesh((), ())
Local = Callable[[Sequence[Stack], NewtonSchulz], Sequence[Stack]]


def by_owners(
    leaves: Sequence[Array],
    how: NewtonSchulz,
    axes: Sequence[MatrixAxes],
    owners: tuple[str, ...],
    local: Local,
) -> tuple[Array, ...]:
    """Each leaf orthogonalised; on several devices, each matrix by its owner.

    Args:
        leaves: in the working dtype.
        how: the iteration, whose numbers may be traced.
        axes: of each leaf.
        owners: the mesh axes whose devices own matrices.
        local: what one device does with stacks.
    """
    numbers, structure = jax.tree.flatten(how)
    traced = [i for i, x in enumerate(numbers) if isinstance(x, jax.Array)]

    def iteration(values: Sequence[Array]) -> NewtonSchulz:
        found = list(numbers)
        for i, value in zip(traced, values, strict=True):
            found[i] = value.reshape(())
        return jax.tree.unflatten(structure, found)

    def on_one_device(*arrays: Array) -> tuple[Array, ...]:
        leaves, how = arrays[: len(axes)], iteration(arrays[len(axes) :])
        recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
        return apply_to_stacks(recipes, leaves, lambda stacks: local(stacks, how))

    def partition(mesh: Any, arguments: Any, results: Any) -> tuple:
        del results
        these = _owners(mesh, owners)
        placements = [
            _place(a, x.shape, x.sharding, these)
            for a, x in zip(axes, arguments, strict=False)
        ]
        shardings = tuple(NamedSharding(mesh, place.spec) for place in placements)
        whole = (NamedSharding(mesh, P()),) * len(traced)

        def on_each_device(*arrays: Array) -> tuple[Array, ...]:
            leaves, how = arrays[: len(axes)], iteration(arrays[len(axes) :])
            recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
            run = lambda stacks: local(stacks, how)  # noqa: E731
            with jax.sharding.use_abstract_mesh(
                _NO_MESH
            ):  # else Explicit axes are here
                return _exchange(recipes, leaves, placements, these, run)

        return mesh, on_each_device, shardings, (*shardings, *whole)

    def keep(mesh: Any, arguments: Any, results: Any) -> tuple:
        del mesh, results
        return tuple(x.sharding for x in arguments[: len(axes)])

    function = custom_partitioning(on_one_device)
    function.def_partition(
        partition,
        infer_sharding_from_operands=keep,
        sharding_rule=_rule([x.ndim for x in leaves], len(traced)),
    )
    return tuple(function(*leaves, *(numbers[i].reshape(1) for i in traced)))


def _rule(ranks: Sequence[int], numbers: int) -> str:
    """Results are sharded as the leaves are; no two axes have to agree."""
    leaves = [
        " ".join(f"{letter}{i}" for letter in string.ascii_lowercase[:rank])
        for i, rank in enumerate(ranks)
    ]
    operands = [*leaves, *(f"z{i}" for i in range(numbers))]
    return f"{', '.join(operands)} -> {', '.join(leaves)}"


# --- where a leaf lies ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Owners:
    """The mesh axes whose devices own matrices, and how many devices those are."""

    names: tuple[str, ...]
    count: int


def _owners(mesh: Any, names: tuple[str, ...]) -> _Owners:
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"muon: matrices are owned along the mesh axis {missing[0]!r}, but the "
            f"parameters lie on a mesh of {dict(mesh.shape)}. Pass that mesh."
        )
    return _Owners(names, math.prod(mesh.shape[name] for name in names))


@dataclasses.dataclass(frozen=True)
class _Placement:
    """What each device has of a leaf.

    Attributes:
        spec: the sharding, over the owners or over nothing.
        kind: "whole", if every device has everything; "batch", if it has some of the
            matrices; "rows" or "columns", if it has a range of those of each matrix.
    """

    spec: P
    kind: str


def _place(
    axes: MatrixAxes, shape: tuple[int, ...], sharding: Any, owners: _Owners
) -> _Placement:
    """The placement nearest to a sharding."""
    rank = len(shape)
    batch, rows, columns = axes.places(shape)
    allowed = dict.fromkeys(batch, "batch") | {columns[0]: "columns"}
    if not axes.split:
        allowed[rows[0]] = "rows"  # a range of the flattened rows, as it comes first
    for axis, entry in enumerate(getattr(sharding, "spec", ())):
        names = entry if isinstance(entry, tuple) else (entry,)
        fits = axis in allowed and shape[axis] % owners.count == 0
        if names == owners.names and fits:
            spec = [None] * rank
            spec[axis] = entry
            return _Placement(P(*spec), allowed[axis])
    return _Placement(P(*[None] * rank), "whole")


# --- from hand to hand ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one device has of a stack of wide matrices.

    Attributes:
        stack: [L, M, N], of which one axis may be divided among the owners.
        divided: that axis: the matrices, their rows or columns; None if it is whole.
        is_turned: whether these are the transposes of the matrices.
    """

    stack: Stack
    divided: int | None
    is_turned: bool

    def restored(self, stack: Stack) -> Stack:
        """A result as the matrices lie."""
        return stack.mT if self.is_turned else stack


def _exchange(
    recipes: Sequence[Matrices],
    leaves: Sequence[Array],
    placements: Sequence[_Placement],
    owners: _Owners,
    run: Callable[[list[Stack]], Sequence[Stack]],
) -> tuple[Array, ...]:
    """What one device does: its own matrices, of what all devices have."""
    divided = [
        _divided(recipe, place.kind)
        for recipe, place in zip(recipes, placements, strict=True)
        for _ in recipe.parts
    ]

    def orthogonalized(stacks: list[Stack]) -> list[Stack]:
        pairs = list(zip(stacks, divided, strict=True))
        shapes = [_whole_shape(x, axis, owners.count) for x, axis in pairs]
        results: list[Any] = [None] * len(stacks)
        for numbers in by_shape(shapes):
            held = [_hold(*pairs[i], shapes[i]) for i in numbers]
            for i, x in zip(numbers, _one_shape(held, owners, run), strict=True):
                results[i] = x
        return results

    return apply_to_stacks(recipes, leaves, orthogonalized)


def _divided(recipe: Matrices, kind: str) -> int | None:
    if kind in ("whole", "batch"):
        return None if kind == "whole" else 0
    return 1 + (recipe.row_side if kind == "rows" else 1 - recipe.row_side)


def _whole_shape(x: Stack, divided: int | None, count: int) -> tuple[int, ...]:
    """The rows and columns of the matrices of which a device may have a part."""
    return tuple(n * count if i == divided else n for i, n in enumerate(x.shape))[1:]


def _hold(x: Stack, divided: int | None, shape: tuple[int, ...]) -> _Held:
    if shape[0] <= shape[1]:
        return _Held(x, divided, is_turned=False)
    turned = 3 - divided if divided in (1, 2) else divided
    return _Held(x.mT, turned, is_turned=True)


def _one_shape(
    held: Sequence[_Held],
    owners: _Owners,
    run: Callable[[list[Stack]], Sequence[Stack]],
) -> list[Stack]:
    """Results for stacks of matrices of one shape, as the stacks are held."""
    groups = {
        axis: [i for i, x in enumerate(held) if x.divided == axis]
        for axis in (0, None, 1, 2)
    }
    groups = {axis: numbers for axis, numbers in groups.items() if numbers}
    stacks = {
        axis: jnp.concatenate([held[i].stack for i in numbers])
        for axis, numbers in groups.items()
    }
    own = _given_to_owners(stacks, owners)
    (done,) = run([jnp.concatenate(list(own.values()))])
    parts = cut(done, [len(x) for x in own.values()])
    back = _given_back(dict(zip(own, parts, strict=True)), owners)
    results: list[Any] = [None] * len(held)
    for axis, numbers in groups.items():
        lengths = [len(held[i].stack) for i in numbers]
        for i, x in zip(numbers, cut(back[axis], lengths), strict=True):
            results[i] = held[i].restored(x)
    return results


def _given_to_owners(stacks: dict[Any, Stack], owners: _Owners) -> dict[Any, Stack]:
    """The matrices that this device owns, by how they were divided."""
    own = dict(stacks)
    if None in own:
        shares = _in_shares(own[None], owners.count)
        own[None] = shares[lax.axis_index(owners.names)]
    parts = {
        axis: _in_shares(own[axis], owners.count) for axis in (1, 2) if axis in own
    }
    for axis, x in _all_to_all(parts, owners).items():
        x = jnp.moveaxis(x, 0, axis)
        shape = list(x.shape)
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        own[axis] = x.reshape(shape)
    return own


def _given_back(own: dict[Any, Stack], owners: _Owners) -> dict[Any, Stack]:
    """What `_given_to_owners` was given, and perhaps more matrices behind it."""
    back = dict(own)
    if None in back:
        back[None] = lax.all_gather(back[None], owners.names, tiled=True)
    parts = {}
    for axis in (1, 2):
        if axis in back:
            shape = list(back[axis].shape)
            shape[axis : axis + 1] = [owners.count, shape[axis] // owners.count]
            parts[axis] = jnp.moveaxis(back[axis].reshape(shape), axis, 0)
    for axis, x in _all_to_all(parts, owners).items():
        back[axis] = x.reshape(-1, *x.shape[2:])
    return back


def _in_shares(x: Stack, count: int) -> Array:
    """The matrices of each owner: [owners, L, M, N], zeros at the end."""
    more = -len(x) % count
    x = jnp.pad(x, ((0, more), (0, 0), (0, 0)))
    return x.reshape(count, -1, *x.shape[1:])


def _all_to_all(parts: dict[Any, Array], owners: _Owners) -> dict[Any, Array]:
    """Arrays [owners, ...], of which each owner gets its own from all, in one go."""
    if not parts:
        return {}
    flat = [x.reshape(owners.count, -1) for x in parts.values()]
    sent = jnp.concatenate(flat, axis=1)
    got = lax.all_to_all(sent, owners.names, 0, 0, tiled=True)
    widths = np.cumsum([x.shape[1] for x in flat])[:-1]
    cuts = jnp.split(got, widths, axis=1)
    pairs = zip(parts.items(), cuts, strict=True)
    return {axis: x.reshape(part.shape) for (axis, part), x in pairs}
