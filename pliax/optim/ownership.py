"""Newton-Schulz on several devices: each owns a share of the matrices of each shape.

A matrix that is sharded over the owners is gathered on one of them instead of on all.
For each shape of matrix that takes one all-to-all there and one back, in the working
dtype. Parameters that every device has whole take one all-gather back; layers or
experts that lie on different devices take nothing, as whole matrices lie there already.
One shape travels while another is multiplied (`exchanges`).

Which of these holds is read from the shardings that the compiler has found, by
`jax.experimental.custom_partitioning`, so that nothing has to be said twice. Whatever
else a parameter's sharding may be (over other mesh axes, across the parts of a fused
projection), the compiler first makes it one of the three.
"""

import dataclasses
import itertools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jaxtyping import Array

from pliax.core.manual_axes import program_of_one_device

from .exchanges import exchange
from .matrix_axes import Matrices, MatrixAxes, matrices
from .momentum import Momentum
from .newton_schulz import NewtonSchulz
from .one_pass import Fresh, is_served
from .parcels import Owners
from .stacks import Stack, apply_to_stacks


P = jax.sharding.PartitionSpec
_NO_MESH = jax.sharding.AbstractMesh((), ())
Pair = tuple[Array, Array]
Local = Callable[[Sequence[Stack], NewtonSchulz], Sequence[Stack]]


def by_owners(
    pairs: Sequence[Pair],
    moved: Sequence[Pair],
    how: NewtonSchulz,
    rule: Momentum,
    axes: Sequence[MatrixAxes],
    owners: tuple[str, ...],
    local: Local,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Each leaf orthogonalised; on several devices, each matrix by its owner.

    Args:
        pairs: of each leaf its gradient, and its momentum before it moves.
        moved: what `rule` makes of them: look-aheads, in the working dtype, and the
            next momenta. Nobody makes them where devices do it with their own parts,
            which then are stacked in the same pass.
        how: the iteration, whose numbers may be traced.
        rule: the momentum's, which also may.
        axes: of each leaf.
        owners: the mesh axes whose devices own matrices.
        local: what one device does with stacks.

    Returns:
        The leaves, and the next momenta.
    """
    owned = _Owned(tuple(axes), owners, local, *jax.tree.flatten((how, rule)))
    function = custom_partitioning(owned.on_one_device)
    blocks = [*zip(*moved, strict=True), *zip(*pairs, strict=True)]
    function.def_partition(
        owned.partition,
        infer_sharding_from_operands=owned.shardings,
        sharding_rule=_rule([x.ndim for x in blocks[0]], len(owned.traced)),
    )
    arrays = [x for block in blocks for x in block]
    done, buffers = owned.in_blocks(function(*arrays, *owned.traced_numbers))
    return tuple(done), tuple(buffers)


@dataclasses.dataclass(frozen=True, eq=False)
class _Owned:
    """What the compiler is told of leaves whose matrices have owners.

    Its arrays are the look-aheads of all leaves, their next momenta, gradients and
    momenta and, behind them, those numbers that are traced: what is partitioned may not
    close over them. What a device makes no use of costs nothing.

    Attributes:
        axes: of each leaf.
        owners: the names of their mesh axes.
        local: what one device does with stacks.
        numbers: of the iteration and the momentum.
        structure: which makes both of them.
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

    def in_blocks(self, arrays: Sequence[Any]) -> list[Sequence[Any]]:
        """Blocks of as many as there are leaves."""
        return list(itertools.batched(arrays, len(self.axes)))

    def _read(self, arrays: Sequence[Array]) -> tuple[Any, NewtonSchulz, Momentum, Any]:
        """Blocks of arrays, what is done with them, and how they are taken apart."""
        count = 4 * len(self.axes)
        numbers = list(self.numbers)
        for i, value in zip(self.traced, arrays[count:], strict=True):
            numbers[i] = value.reshape(())
        how, rule = jax.tree.unflatten(self.structure, numbers)
        blocks = self.in_blocks(arrays[:count])
        pairs = zip(self.axes, blocks[0], strict=True)
        return blocks, how, rule, [matrices(axes, x.shape) for axes, x in pairs]

    def on_one_device(self, *arrays: Array) -> tuple[Array, ...]:
        """The meaning: all matrices where the leaves are whole."""
        (ahead, buffers, *_), how, _, recipes = self._read(arrays)
        done = apply_to_stacks(recipes, ahead, lambda x: self.local(x, how))
        return *done, *buffers

    def shardings(self, mesh: Any, arguments: Any, results: Any) -> tuple:
        """The results': those of look-aheads and next momenta that are made outside."""
        del mesh, results
        return tuple(x.sharding for x in arguments[: 2 * len(self.axes)])

    def partition(self, mesh: Any, arguments: Any, results: Any) -> tuple:
        """What each device does, and where its arrays have to be."""
        del results
        owners = _owners(mesh, self.owners)
        given = self.in_blocks(arguments[: 4 * len(self.axes)])
        placements = [
            _place(axes, x.shape, x.sharding, owners)
            for axes, x in zip(self.axes, given[0], strict=True)
        ]
        kinds = [placement.kind for placement in placements]
        leaves = [NamedSharding(mesh, placement.spec) for placement in placements]
        # Momenta move there if a device has its part of all that takes; else outside.
        is_there = [
            all(x.sharding.is_equivalent_to(leaf, x.ndim) for x in (ahead, G, M))
            for leaf, ahead, _, G, M in zip(leaves, *given, strict=True)
        ]

        def on_each_device(*arrays: Array) -> tuple[Array, ...]:
            # Or Explicit axes are here.
            without = jax.sharding.use_abstract_mesh(_NO_MESH)
            with without, program_of_one_device():
                blocks, how, rule, recipes = self._read(arrays)
                parts, buffers = _moved_here(blocks, how, rule, recipes, is_there)
                run = lambda stacks: self.local(stacks, how)  # noqa: E731
                done, moved = exchange(recipes, parts, kinds, owners, run)
                pairs = zip(moved, buffers, strict=True)
                return *done, *(
                    B if x is None else x.reshape(B.shape) for x, B in pairs
                )

        _, outside, *pairs = ([x.sharding for x in block] for block in given)
        buffers = [
            leaf if there else usual
            for there, leaf, usual in zip(is_there, leaves, outside, strict=True)
        ]
        numbers = [NamedSharding(mesh, P())] * len(self.traced)
        taken = *leaves, *buffers, *itertools.chain(*pairs), *numbers
        return mesh, on_each_device, (*leaves, *buffers), taken


def _moved_here(
    blocks: Sequence[Sequence[Array]],
    how: NewtonSchulz,
    rule: Momentum,
    recipes: Sequence[Matrices],
    is_there: Sequence[bool],
) -> tuple[list[Array | Fresh], list[Array]]:
    """What is orthogonalised, and momenta: made here where what makes them is."""
    leaves, buffers = list[Any](blocks[0]), list(blocks[1])
    for i, (G, M) in enumerate(zip(*blocks[2:], strict=True)):
        if is_there[i] and is_served(G, M, recipes[i], how):
            leaves[i] = Fresh(G, M, rule)
        elif is_there[i]:
            buffers[i], ahead = rule(G, M)
            leaves[i] = how.round(ahead)
    return leaves, buffers


def _rule(ranks: Sequence[int], numbers: int) -> str:
    """Results are sharded as those made outside; no two axes have to agree."""
    blocks = [
        " ".join(f"{letter}{block}_{i}" for letter in string.ascii_lowercase[:rank])
        for block in range(4)
        for i, rank in enumerate(ranks)
    ]
    operands = [*blocks, *(f"z{i}" for i in range(numbers))]
    return f"{', '.join(operands)} -> {', '.join(blocks[: 2 * len(ranks)])}"


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
