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
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jaxtyping import Array

from pliax.core.manual_axes import program_of_one_device

from .exchanges import Owners, exchange
from .matrix_axes import MatrixAxes, matrices
from .newton_schulz import NewtonSchulz
from .stacks import Stack, apply_to_stacks


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
    owned = _Owned(tuple(axes), owners, local, *jax.tree.flatten(how))
    function = custom_partitioning(owned.on_one_device)
    function.def_partition(
        owned.partition,
        infer_sharding_from_operands=owned.shardings,
        sharding_rule=_rule([x.ndim for x in leaves], len(owned.traced)),
    )
    return tuple(function(*leaves, *owned.traced_numbers))


@dataclasses.dataclass(frozen=True, eq=False)
class _Owned:
    """What the compiler is told of leaves whose matrices have owners.

    Its arrays are the leaves and, behind them, those numbers of the iteration that are
    traced: what is partitioned may not close over them.

    Attributes:
        axes: of each leaf.
        owners: the names of their mesh axes.
        local: what one device does with stacks.
        numbers: of the iteration.
        structure: which makes the iteration of them.
    """

    axes: tuple[MatrixAxes, ...]
    owners: tuple[str, ...]
    local: Local
    numbers: list[Any]
    structure: Any

    @property
    def traced(self) -> list[int]:
        """Which numbers are arrays."""
        return [i for i, x in enumerate(self.numbers) if isinstance(x, jax.Array)]

    @property
    def traced_numbers(self) -> list[Array]:
        """Those, each with an axis, as partitioning wants them."""
        return [self.numbers[i].reshape(1) for i in self.traced]

    def _read(self, arrays: Sequence[Array]) -> tuple[Any, Any, Any]:
        """The leaves, how they are taken apart, and what is done with stacks."""
        leaves, values = arrays[: len(self.axes)], arrays[len(self.axes) :]
        numbers = list(self.numbers)
        for i, value in zip(self.traced, values, strict=True):
            numbers[i] = value.reshape(())
        how = jax.tree.unflatten(self.structure, numbers)
        recipes = [matrices(a, x.shape) for a, x in zip(self.axes, leaves, strict=True)]
        return leaves, recipes, lambda stacks: self.local(stacks, how)

    def on_one_device(self, *arrays: Array) -> tuple[Array, ...]:
        """The meaning: all matrices where the leaves are whole."""
        leaves, recipes, run = self._read(arrays)
        return apply_to_stacks(recipes, leaves, run)

    def shardings(self, mesh: Any, arguments: Any, results: Any) -> tuple:
        """The results': those of the leaves."""
        del mesh, results
        return tuple(x.sharding for x in arguments[: len(self.axes)])

    def partition(self, mesh: Any, arguments: Any, results: Any) -> tuple:
        """What each device does, and where its arrays have to be."""
        del results
        owners = _owners(mesh, self.owners)
        leaves = arguments[: len(self.axes)]
        placements = [
            _place(a, x.shape, x.sharding, owners)
            for a, x in zip(self.axes, leaves, strict=True)
        ]

        def on_each_device(*arrays: Array) -> tuple[Array, ...]:
            # Or Explicit axes are here.
            without = jax.sharding.use_abstract_mesh(_NO_MESH)
            with without, program_of_one_device():
                leaves, recipes, run = self._read(arrays)
                return exchange(recipes, leaves, kinds, owners, run)

        kinds = [place.kind for place in placements]
        places = tuple(NamedSharding(mesh, place.spec) for place in placements)
        whole = (NamedSharding(mesh, P()),) * len(self.traced)
        return mesh, on_each_device, places, (*places, *whole)


def _rule(ranks: Sequence[int], numbers: int) -> str:
    """Results are sharded as the leaves are; no two axes have to agree."""
    leaves = [
        " ".join(f"{letter}{i}" for letter in string.ascii_lowercase[:rank])
        for i, rank in enumerate(ranks)
    ]
    operands = [*leaves, *(f"z{i}" for i in range(numbers))]
    return f"{', '.join(operands)} -> {', '.join(leaves)}"


# --- where a leaf lies ----------------------------------------------------------------


def _owners(mesh: Any, names: tuple[str, ...]) -> Owners:
    missing = [name for name in names if name not in mesh.shape]
    if missing:
        raise ValueError(
            f"muon: matrices are owned along the mesh axis {missing[0]!r}, but the "
            f"parameters lie on a mesh of {dict(mesh.shape)}. Pass that mesh."
        )
    return Owners(names, math.prod(mesh.shape[name] for name in names))


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
    axes: MatrixAxes, shape: tuple[int, ...], sharding: Any, owners: Owners
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
