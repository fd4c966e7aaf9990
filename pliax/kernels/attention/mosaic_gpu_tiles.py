"""What the Mosaic GPU kernels share: a tile of scores, its mods, and products.

A tile has rows and columns; one on its side has keys as its rows. A warpgroup holds it
in registers as the tensor cores leave it, a row as what a sum along it leaves, and a
column likewise.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pliax.core._jax import load_elements, vote_not_finite
from pliax.core.jaxprs import ClosedFunction
from pliax.core.manual_axes import vary, varying_axes

from .block_lists import MET_BITS, BlockLists, TellingLists
from .configs import Config
from .mosaic_gpu_conditions import Condition
from .separation import Hoisted, Separated, compute_outside, separate
from .tile_evaluation import Space, compute_inside, guess_holds


TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
MOVED = 32  # of what a tile shares the copy engine brings so many, which are aligned
_PIECE = 64  # rows and columns that a warpgroup's registers have room for besides
i32 = partial(jnp.asarray, dtype=jnp.int32)


# --- mods -----------------------------------------------------------------------------


class Operands(NamedTuple):
    """A mod, and the arrays a kernel is given for it."""

    separated: Separated
    arrays: tuple[Array, ...]


def operands(
    mod: ClosedFunction,
    roles: str,
    sizes: Mapping[str, int],
    blocks: Mapping[str, int],
    *,
    apart: bool = False,
    keys: int = 0,
) -> Operands:
    """What a kernel needs of a mod.

    Args:
        mod: The mod.
        roles: What its arguments are.
        sizes: Sequences, heads, queries and keys, by "bhqk".
        blocks: Queries and keys that are loaded at once, by "qk".
        apart: Whether the conditions of a mask are a result each.
        keys: As of `separate`.
    """
    separated = separate(mod, roles, apart=apart, keys=keys)
    values = compute_outside(separated, mod.captured, sizes)
    pairs = zip(separated.hoisted, values, strict=True)
    return Operands(separated, tuple(_loadable(x, v, blocks) for x, v in pairs))


def _loadable(item: Any, x: Array, blocks: Mapping[str, int]) -> Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
    if item.is_looked_up:
        return x.reshape(-1)
    x = x.reshape(x.shape[: len(item.axes)] or (1,))
    if x.dtype in (jnp.bfloat16, jnp.float16):
        x = x.astype(jnp.float32)
    last = item.axes[-1] if item.axes else "b"
    if last not in blocks:
        return x
    rest = -x.shape[-1] % blocks[last]
    if item.keys > 1:  # there is a block beyond the end where a visit is
        rest = -(-blocks[last] // item.keys)
        rest += -(x.shape[-1] + rest) % MOVED
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)], "edge")


@dataclass(frozen=True)
class Tile:
    """The tile of scores of a warpgroup.

    Attributes:
        b: Sequence.
        h: Query head.
        first: The first of its rows.
        config: Its size.
        reach: Columns that are visited together: the last ones may be beyond the end.
        rows: "q", or "k" if it lies on its side.
        sizes: Sequences, heads, queries and keys, by "bhqk".
        interpret: Whether the kernel runs in JAX's interpreter.
    """

    b: Any
    h: Any
    first: Any
    config: Config
    reach: int
    rows: str
    sizes: Mapping[str, int]
    interpret: bool

    @property
    def columns(self) -> str:
        """The index of its columns."""
        return "k" if self.rows == "q" else "q"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.config.rows, self.config.columns

    def spread(self, x: Any, kind: str, to: str) -> Any:
        """A scalar, row or column as something larger."""
        if kind == to:
            return x
        shape = {"row": self.shape[:1], "column": self.shape[1:], "tile": self.shape}[
            to
        ]
        axes = {"scalar": (), "row": (0,), "column": (1,)}[kind]
        return lax.broadcast_in_dim(x, shape, axes)

    def row_index(self) -> Any:
        """Of each row; of those beyond the end, the last."""
        index = plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=ROW)
        return self._inside(index + self.first, self.rows, self.config.span)

    def column_index(self, first: Any) -> Any:
        """Of each column, likewise."""
        index = plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=COLUMN)
        return self._inside(index + first, self.columns, self.reach)

    def _inside(self, index: Any, axis: str, block: int) -> Any:
        n = self.sizes[axis]
        return jnp.minimum(index, n - 1) if n % block else index

    def is_row_real(self) -> Any:
        """Which rows are not beyond the end; None if none can be."""
        n = self.sizes[self.rows]
        if n % self.config.span == 0:
            return None
        index = plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=ROW)
        return self.spread(index + self.first < n, "row", "tile")

    def is_column_real(self, first: Any) -> Any:
        """Which columns are not beyond the end; None if none can be."""
        n = self.sizes[self.columns]
        if n % self.reach == 0:
            return None
        index = plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=COLUMN)
        return self.spread(index + first < n, "column", "tile")


@dataclass(frozen=True)
class ModOnTile:
    """A mod in a kernel; scalars and rows are loaded when it is made."""

    tile: Tile
    separated: Separated
    refs: Sequence[Any]
    guesses: bool = False  # that numbers loaded once are small
    loaded: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, item in enumerate(self.separated.hoisted):
            is_of_columns = item.is_looked_up or self.tile.columns in item.axes
            if number not in self.loaded and not is_of_columns:
                self.loaded[number] = self._load(number, self.tile.first, ROW)

    def columns_in(self, refs: Mapping[int, Any], first: Any) -> dict[int, Any]:
        """What it knows of the columns from `first` on, by the number of a value."""
        load = partial(self._load, first=first, layout=COLUMN)
        return {n: load(n, here=ref) for n, ref in refs.items()}

    def conditions(
        self, first: Any, known: Mapping[int, Any], met: Any
    ) -> list[Condition]:
        """Those of a mask on the tile whose first column this is.

        Args:
            first: The column.
            known: Of `columns_in`.
            met: A bit for each: whether all scores meet it; None if no list tells.
        """
        found = []
        for n in range(len(self.separated.jaxpr.outvars)):
            is_met = None
            if met is not None and n < MET_BITS:
                is_met = ((met >> n) & 1) == 1
            found.append(Condition(partial(self._one, n, first, known), is_met))
        return found

    def _one(self, n: int, first: Any, known: Mapping[int, Any]) -> Any:
        return self(first, known=known, which=(n,))[0]

    def __call__(
        self,
        first: Any,
        scores: Any = None,
        known: Mapping[int, Any] | None = None,
        which: Sequence[int] | None = None,
    ) -> list[Any]:
        """Its values on the tile whose first column this is.

        Args:
            first: The column.
            scores: What a score_mod is asked about.
            known: Of `columns_in`; what is not in it is loaded.
            which: Of its results; None for all.
        """
        return compute_inside(self.separated, self._space(first, scores, known), which)

    @property
    def guess_holds(self) -> Any:
        """Whether what it may guess is so; None if it gains nothing by that."""
        return guess_holds(self.separated, self._space(i32(0)))

    def _space(
        self, first: Any, scores: Any = None, known: Mapping[int, Any] | None = None
    ) -> Space:
        tile, known = self.tile, known or {}
        given: dict[str, Callable[[], Any]] = {
            "s": lambda: scores,
            "b": lambda: tile.b,
            "h": lambda: tile.h,
            tile.rows: tile.row_index,
            tile.columns: lambda: tile.column_index(first),
        }

        def load(number: int) -> Any:
            if number in self.loaded:
                return self.loaded[number]
            if number in known:
                return known[number]
            return self._load(number, first, COLUMN)

        return Space(
            rows=tile.rows,
            limits={axis: n - 1 for axis, n in tile.sizes.items()},
            argument=lambda role: given[role](),
            load=load,
            look_up=self._look_up,
            spread=tile.spread,
            guesses=self.guesses,
        )

    def _load(self, number: int, first: Any, layout: Any, here: Any = None) -> Any:
        """From shared memory, `here`, if it came along."""
        item, ref, tile = self.separated.hoisted[number], self.refs[number], self.tile
        place, is_far = _matrix(item, tile.b, tile.h), here is None
        if item.keys > 1:
            block = lax.div(first, i32(item.keys))
            x = ref[(*place, block)] if is_far else here[lax.rem(block, i32(MOVED))]
        elif set(item.axes) & {"q", "k"}:
            n = tile.shape[0] if layout is ROW else tile.shape[1]
            here = window(item, ref, (tile.b, tile.h), first, n) if is_far else here
            x = plgpu.load(here, layout=layout, optimized=False)
        else:
            x = ref[place or (0,)]
        return self._as_declared(number, x)

    def _as_declared(self, number: int, x: Any) -> Any:
        is_bool = self.separated.hoisted[number].variable.aval.dtype == jnp.bool_
        return x != 0 if is_bool else x

    def _look_up(self, number: int, indices: Sequence[Any]) -> Any:
        item, tile = self.separated.hoisted[number], self.tile
        aval, ref = item.variable.aval, self.refs[number]
        place, *rest = indices
        for index, n in zip(rest, aval.shape[1:], strict=True):
            place = place * n + index
        matrix = i32(0)  # an array for each sequence and head that it depends on
        for axis in item.axes:
            matrix = matrix * tile.sizes[axis] + (tile.b if axis == "b" else tile.h)
        if item.axes:
            place += tile.spread(matrix * aval.size, "scalar", "tile")
        is_bool = aval.dtype == jnp.bool_
        dtype = jnp.dtype(jnp.int32) if is_bool else aval.dtype
        if tile.interpret:
            x = ref[...][place]
        else:
            x = load_elements(ref, place, dtype, TILE)
        return x != 0 if is_bool else x


def window(item: Hoisted, ref: Any, place: Any, first: Any, n: int) -> Any:
    """Of a value that there is one of for each row or column, n from `first` on."""
    return ref.at[(*_matrix(item, *place), pl.ds(first, n))]


def _matrix(item: Hoisted, b: Any, h: Any) -> tuple[Any, ...]:
    return tuple(b if a == "b" else h for a in item.axes if a in "bh")


def on_tile(
    tile: Tile, mods: Sequence[Operands | None], refs: Sequence[Any]
) -> list[ModOnTile | None]:
    """Mods in a kernel; `refs` are the arrays of those that there are."""
    rest = iter(refs)
    return [mod and ModOnTile(tile, mod.separated, next(rest)) for mod in mods]


# --- what is not finite ---------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the warpgroups of a thread block agree on: whether sums were spoiled.

    A key that nobody sees may hold anything. Its weight is 0, and 0 times NaN is not:
    where a sum is not finite the thread block computes it once more, with care. If it
    is not finite then either, somebody sees what it holds.

    Attributes:
        flags: In shared memory, of each warpgroup.
        met: The barrier where they meet; () on a GPU, whose vote is one.
    """

    flags: Any
    met: Any

    @staticmethod
    def scratch(config: Config, *, interpret: bool) -> tuple[Any, Any]:
        """The shared memory and the barrier it needs."""
        groups = config.threads
        met = plgpu.Barrier(num_arrivals=groups) if interpret else ()
        return plgpu.SMEM((groups,), jnp.int32), met

    def __call__(self, group: Any, sums: Any = None) -> Any:
        """Whether a warpgroup found sums that are not finite; each asks once."""
        if isinstance(self.met, tuple):
            vote_not_finite(self.flags, group, sums, TILE)
            return self.flags[group] != 0
        self.flags[group] = i32(0 if sums is None else jnp.any(~jnp.isfinite(sums)))
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)
        return functools.reduce(
            jnp.logical_or, [self.flags[n] != 0 for n in range(self.flags.shape[0])]
        )


def make_finite(matrix: Any, to: Any) -> None:
    """A copy in shared memory, of what is finite: 0 for the rest.

    The largest number instead of infinity has products which are infinite.
    """
    for part, target in zip(pieces(matrix), pieces(to), strict=True):
        x = plgpu.load(part, layout=TILE).astype(jnp.float32)
        x = jnp.where(abs(x) < jnp.inf, x, 0.0)
        target[...] = x.astype(matrix.dtype)
    plgpu.commit_smem()


def clear_rows(matrix: Any, chosen: Callable[[int, int], Any]) -> None:
    """0 in rows of shared memory. Several warpgroups may do so: they write the same.

    Args:
        matrix: The rows.
        chosen: From the first of some rows and their number to which are cleared.
    """
    for part, (row, _) in zip(pieces(matrix), _starts(matrix), strict=True):
        x = plgpu.load(part, layout=TILE)
        is_chosen = lax.broadcast_in_dim(chosen(row, _PIECE), x.shape, [0])
        part[...] = jnp.where(is_chosen, 0.0, x.astype(jnp.float32)).astype(x.dtype)
    plgpu.commit_smem()


def pieces(matrix: Any) -> list[Any]:
    """Its parts of 64 rows and columns, which registers have room for besides."""
    return [
        matrix.at[pl.ds(row, _PIECE), pl.ds(column, _PIECE)]
        for row, column in _starts(matrix)
    ]


def _starts(matrix: Any) -> list[tuple[int, int]]:
    rows, columns = (range(0, n, _PIECE) for n in matrix.shape)
    return [(row, column) for row in rows for column in columns]


def load_row(array: Any, place: Any, first: Any, length: int, n: Any) -> Any:
    """The channels of the n-th row from `first` on; beyond the end, of the last."""
    b, h = place
    at = array.at[b, jnp.minimum(first + n, length - 1), h]
    return plgpu.load(at, layout=COLUMN, optimized=False).astype(jnp.float32)


def add_seen(acc: Any, weights: Any, seen: Any, row: Callable[[Any], Any]) -> Any:
    """`acc + weights @ rows`, one row after another, of the weights that are seen.

    Args:
        acc: Float32 sums, in registers.
        weights: Numbers in registers; hidden ones may be anything.
        seen: Which are not hidden.
        row: From a column of the weights to the row, as a column of the sums.
    """
    column = plgpu.broadcasted_iota(jnp.int32, weights.shape[1:], 0, layout=COLUMN)
    column = lax.broadcast_in_dim(column, weights.shape, [1])

    def one(n: Any, acc: Any) -> Any:
        of_column = lambda x: jnp.where(column == n, x, 0.0).sum(axis=1)  # noqa: E731
        weight, is_seen = of_column(weights), of_column(jnp.where(seen, 1.0, 0.0))
        weight, is_seen = (
            lax.broadcast_in_dim(x, acc.shape, [0]) for x in (weight, is_seen)
        )
        added = weight * lax.broadcast_in_dim(row(n), acc.shape, [1])
        return jnp.where(is_seen > 0, acc + added, acc)

    return lax.fori_loop(i32(0), i32(weights.shape[1]), one, acc)


# --- arrays ---------------------------------------------------------------------------


def accumulate(
    acc: Any, left: Any, right: Any, interpret: bool, after: Any = None
) -> Any:
    """`acc + left @ right` on the tensor cores; `after` runs while they do.

    Args:
        acc: Float32 sums, in registers.
        left: Half-precision numbers in registers.
        right: The same in shared memory.
        interpret: The interpreter takes operands from shared memory alone.
        after: What does not need the result.
    """

    def body(add: Any) -> None:
        add(0, left, right)
        if after is not None:
            after()

    (total,) = sums([acc], body, interpret)
    return total


def sums(given: Sequence[Any], body: Any, interpret: bool) -> list[Any]:
    """Sums on the tensor cores, which work while `body` goes on.

    Args:
        given: What there is already: float32, in registers.
        body: Gets `add(n, left, right)`, which starts to add a product to the n-th;
            `left` is in registers or shared memory, `right` is in shared memory.
        interpret: The interpreter takes operands from shared memory alone.
    """

    def issue(refs: Any) -> None:
        body(lambda n, left, right: plgpu.wgmma(refs[n], left, right))

    if not interpret:
        return pl.run_state(issue)([plgpu.ACC.init(x) for x in given])
    found = list(given)

    def add(n: int, left: Any, right: Any) -> None:
        found[n] += jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    body(add)
    return found


def accumulate_beside(
    acc: Any, left: Any, right: Any, make: Any, interpret: bool
) -> tuple[Any, Any]:
    """`acc + left @ right`, and what `make` returns meanwhile: a tile like `acc`."""
    if interpret:
        return accumulate(acc, left, right, interpret), make()

    def issue(refs: Any) -> None:
        plgpu.wgmma(refs[0], left, right)
        refs[1][...] = make()

    return pl.run_state(issue)((plgpu.ACC.init(acc), jnp.zeros_like(acc)))


def multiply(left: Any, right: Any, after: Any = None) -> Any:
    """`left @ right^T` on the tensor cores, both in shared memory.

    `after` runs while they work; then the pair of the product and what it returns.
    """
    shape = left.shape[0], right.shape[0]

    def issue(ref: Any) -> Any:
        plgpu.wgmma(ref, left, right.transpose((1, 0)))
        if after is None:
            return ref[...]
        found = after()
        return ref[...], found

    return pl.run_scoped(issue, plgpu.ACC(shape, jnp.float32))


def zeros(*shape: int, value: float = 0.0) -> Any:
    """Registers full of a number: a tile, or a row."""
    layout = TILE if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def run_kernel(
    body: Any,
    scratch: Any,
    grid: Any,
    config: Config,
    interpret: bool,
    *,
    out_type: Sequence[jax.ShapeDtypeStruct],
    counters: tuple[int, ...] | None = None,
    has_own_barriers: bool = False,
) -> Callable[..., Any]:
    """A kernel of warpgroups that compute and, if there are any, others that move data.

    Args:
        body: `(references, scratch)` to nothing, run by each warpgroup.
        scratch: What they share.
        grid: Names and sizes; thread blocks start with the last name's fastest.
        config: How many warpgroups.
        interpret: Whether JAX's interpreter runs it, on any device, one thread block
            after another.
        out_type: Shapes and dtypes of its results.
        counters: How many semaphores all thread blocks share. They are the last of the
            scratch, where the interpreter, which has none, puts None.
        has_own_barriers: Whether the kernel says itself where its warps wait for each
            other.
    """
    has_counters = counters is not None

    def entry(*refs: Any) -> None:
        shared = [None] if has_counters else []
        if counters is not None and not interpret:
            shared = [pl.get_global(plgpu.SemaphoreType.REGULAR(counters))]
        run = partial(pl.run_scoped, collective_axes="wg")
        run(lambda *s: body(refs, (*s, *shared)), *scratch)

    kw: Any = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
    run = plgpu.kernel(
        entry,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=config.threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=has_own_barriers
        ),
        **kw,
    )
    if counters is not None:  # which the copies that vmap makes would share
        run = jax.custom_batching.custom_vmap(run)

        @run.def_vmap
        def _(size: int, is_batched: Sequence[bool], *arrays: Any) -> Any:
            copies = f"copies {len(grid)}"
            many = [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in out_type]
            run = run_kernel(
                _of_copy(body, copies, is_batched), scratch, {copies: size, **grid},
                config, interpret, out_type=many, counters=(size, *counters),
                has_own_barriers=has_own_barriers,
            )  # fmt: skip
            return run(*arrays), [True] * len(many)

    return lambda *arrays: vary(run(*arrays), varying_axes(arrays))


def _of_copy(body: Any, copies: str, is_batched: Sequence[bool]) -> Any:
    """The body of one of the copies that vmap makes; all have results and counters."""

    def of_copy(refs: Any, scratch: Any) -> None:
        n = lax.axis_index(copies)
        given = [
            x.at[n] if is_many else x
            for x, is_many in zip(refs, is_batched, strict=False)
        ]
        results = [x.at[n] for x in refs[len(is_batched) :]]
        *own, shared = scratch
        body([*given, *results], (*own, None if shared is None else shared.at[n]))

    return of_copy


def as_lists(lists: BlockLists | TellingLists | None) -> tuple[jax.Array, ...]:
    """A mask's lists as a kernel's operands."""
    return () if lists is None else tuple(jnp.asarray(x, jnp.int32) for x in lists)
