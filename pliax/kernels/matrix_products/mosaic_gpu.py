"""alpha A B + beta C + gamma I on Hopper GPUs: a kernel of Pallas's Mosaic GPU.

One warpgroup moves pieces of A and B, 64 deep, into shared memory. Two others make
tiles of 128 x 128 by turns: while one rounds and stores its tile, the tensor cores work
for the other. They need no barrier for that: pieces come in the order of the tiles. Of
a symmetric product the tiles on and below the diagonal are made, and each is stored a
second time, transposed. What the last round lacks for all multiprocessors is made as
quarters of tiles.

Two thread blocks may make neighbouring tiles: each loads a half of the rows that both
need, for both (TMA multicast). Without that the second-level cache is the limit: 72
products of (896, 896) with (896, 4864) took 0.86 instead of 0.99 ms on an H200.

References:
    Thakkar et al., "CUTLASS", 2023, the ping-pong schedule for Hopper.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pliax.kernels._hopper import MULTIPROCESSORS, shared_memory

from .backends import Kind
from .schedules import HALF, TILE, Schedule, rectangle, triangle


DEPTH = 64  # of a piece: 128 bytes, the widest swizzle
STAGES = 5  # pieces in shared memory, which with two tiles of results is then full
MOVER = 2  # the warpgroup that moves data; 0 and 1 compute
REGISTERS = 232, 40  # of a thread that computes, and of one that moves data: 64K in all
MAKERS = 2
i32 = partial(jnp.asarray, dtype=jnp.int32)


def add_product(
    A: Float[Array, "L _ _"],
    B: Float[Array, "L _ _"],
    C: Float[Array, "L M N"] | None,
    factors: Float[Array, "L 3"],
    *,
    kind: Kind,
    interpret: bool,
) -> Float[Array, "L M N"]:
    """The sum alpha A B + beta C + gamma I, C zero if it is None.

    A or B is given as its transpose if the kind says so.
    """
    # The kernel has a factor anyway: kinds that differ in that alone share it.
    kind = replace(kind, has_scale=True)
    return _add_product(A, B, C, factors, kind=kind, interpret=interpret)


@partial(jax.jit, static_argnames=("kind", "interpret"))
def _add_product(
    A: Array, B: Array, C: Array | None, factors: Array, *, kind: Kind, interpret: bool
) -> Array:
    rows, columns, _ = kind.sizes(A, B)
    A, B, C = _padded(A), _padded(B), None if C is None else _padded(C)
    L, (M, N, K) = len(A), kind.sizes(A, B)
    blocks = 8 if interpret else MULTIPROCESSORS  # which it runs one after another
    schedule, in_pairs = triangle(L, M, blocks), False
    if not kind.is_symmetric:
        schedule = rectangle(L, M, N, blocks=blocks)
        in_pairs = N % (2 * TILE) == 0  # else the last of each row would do nothing
    if in_pairs:
        schedule = rectangle(L, M, N, width=2 * TILE, blocks=blocks // 2)
    kernel = _Kernel(schedule, A.dtype, K // DEPTH, kind, in_pairs, interpret)
    return kernel(A, B, C, factors, (L, M, N))[:, :rows, :columns]


def _padded(X: Array) -> Array:
    """Filled with zeros up to whole swizzled rows, which Mosaic asks for.

    And to a tile at least: a store of 64 columns that begins behind the last of 64 is
    not left out, but lands on those (an H200 with jax 0.11.2; JAX's interpreter leaves
    it out).
    """
    widths = [(0, 0), *((0, max(TILE, n + -n % DEPTH) - n) for n in X.shape[1:])]
    return jnp.pad(X, widths) if any(w for _, w in widths) else X


@dataclass(frozen=True)
class _Kernel:
    schedule: Schedule
    dtype: Any
    steps: int  # pieces of a row of A
    kind: Kind
    in_pairs: bool
    interpret: bool

    def __call__(
        self, A: Array, B: Array, C: Array | None, factors: Array, shape: Any
    ) -> Array:
        order = jnp.asarray(self.schedule.order.reshape(-1))
        arrays = {"A": A, "B": B, "C": C, "factors": factors, "order": order}
        given = {name: x for name, x in arrays.items() if x is not None}

        def body(*refs: Any) -> None:
            here = dict(zip(given, refs, strict=False))
            run = partial(pl.run_scoped, collective_axes="wg")
            block = partial(_ThreadBlock, self, here, refs[-1])
            run(lambda *s: block(_Scratch(*s)).run(), *self.scratch())

        options: dict[str, Any] = {}
        if self.in_pairs:
            options |= {"cluster": (2,), "cluster_names": ("pair",)}
        if self.interpret:
            options["interpret"] = plgpu.InterpretGPUParams()
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, self.dtype),
            grid=(self.schedule.blocks,),
            grid_names=("blocks",),
            num_threads=MAKERS + 1,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            **options,
        )(*given.values())

    def together(self, side: int) -> int:
        """How many pieces of a tile, or of a quarter, a stage holds.

        Two of a quarter, one below the other, in the place of one of a tile: with one
        X X^T of (2048, 2048) took 19.2 us on an H200, and 18.3 with two. Only rows can
        be halved so, of factors that both have the depth last.
        """
        have_rows = self.kind.transposed == "right"
        return 2 if side == HALF and have_rows and self.steps % 2 == 0 else 1

    def fillings(self, side: int) -> int:
        """Of stages, for a tile or for a quarter."""
        return self.steps // self.together(side)

    def scratch(self) -> tuple[Any, ...]:
        """Shared memory and barriers, as `_Scratch` names them."""
        memory = partial(shared_memory, self.dtype)
        left, right = (TILE, DEPTH), (DEPTH, TILE)
        left = left[::-1] if self.kind.transposed == "left" else left
        right = right[::-1] if self.kind.transposed == "right" else right
        free: Any = plgpu.Barrier(num_barriers=STAGES)
        if self.in_pairs:
            free = plgpu.ClusterBarrier(collective_axes=("pair",), num_barriers=STAGES)
        return (
            memory(STAGES, *left),
            memory(STAGES, *right),
            memory(MAKERS, TILE // HALF, TILE, HALF),
            plgpu.Barrier(num_barriers=MAKERS * STAGES, num_arrivals=2),
            plgpu.Barrier(
                num_barriers=MAKERS * STAGES, num_arrivals=2 * self.together(HALF)
            ),
            free,
            plgpu.Barrier(num_barriers=MAKERS, num_arrivals=TILE // HALF),
        )


@dataclass(frozen=True)
class _Scratch:
    left: Any
    right: Any
    tiles: Any  # of each maker, as panels of 64 columns
    here: Any  # barriers of a stage: loaded, for the maker whose tile it is
    quarter_here: Any  # or whose quarter
    free: Any  # of a stage: read, by all who share it
    addend_here: Any


@dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: `run` is what each of its warpgroups does."""

    kernel: _Kernel
    arrays: dict[str, Any]
    result: Any
    scratch: _Scratch

    def run(self) -> None:
        group = lax.axis_index("wg")

        @pl.when(group == MOVER)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            whole, total = self.counts
            pl.loop(i32(0), whole)(partial(self.move, side=TILE))
            if self.kernel.schedule.quarters:
                pl.loop(whole, total)(partial(self.move, side=HALF))
            end = self.first_filling(total, HALF)

            @pl.loop(jnp.maximum(end - STAGES, 0), end)
            def _(filling: Any) -> None:  # nobody leaves before all have read
                plgpu.barrier_wait(self.scratch.free.at[_stage(filling)])

        @pl.when(group != MOVER)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            whole, total = self.counts
            self.make_mine(group, i32(0), whole, TILE)
            if self.kernel.schedule.quarters:
                self.make_mine(group, whole, total, HALF)
            plgpu.wait_smem_to_gmem(0)

    @property
    def counts(self) -> tuple[Any, Any]:
        """How many whole tiles this thread block makes, and how many with quarters."""
        schedule, block = self.kernel.schedule, lax.axis_index("blocks")

        def share(n: int) -> Any:
            return lax.div(n - block + schedule.blocks - 1, i32(schedule.blocks))

        whole = share(schedule.whole)
        return whole, whole + share(schedule.quarters)

    def place(self, n: Any, side: int) -> tuple[Any, Any, Any]:
        """Matrix, first row and first column of the n-th tile or quarter."""
        schedule, below, beside = self.kernel.schedule, i32(0), i32(0)
        tile = lax.axis_index("blocks") + n * schedule.blocks
        if side == HALF:
            quarter = tile - self.counts[0] * schedule.blocks
            tile = schedule.whole + lax.div(quarter, i32(4))
            quarter = lax.rem(quarter, i32(4))
            below, beside = (f(quarter, i32(2)) * HALF for f in (lax.div, lax.rem))
        matrix, at = (f(tile, i32(schedule.tiles)) for f in (lax.div, lax.rem))
        row, column = (self.arrays["order"][2 * at + i] for i in range(2))
        if self.kernel.in_pairs:
            column = 2 * column + lax.axis_index("pair")
        return matrix, row * TILE + below, column * TILE + beside

    def first_filling(self, n: Any, side: int) -> Any:
        """How often stages are filled before the n-th tile, a quarter from `side`."""
        whole = n if side == TILE else self.counts[0]
        quarters = (n - whole) * self.kernel.fillings(HALF)
        return whole * self.kernel.fillings(TILE) + quarters

    def here(self, group: Any, filling: Any, side: int) -> Any:
        """The barrier at which a maker waits for what fills a stage."""
        scratch = self.scratch
        barriers = scratch.here if side == TILE else scratch.quarter_here
        return barriers.at[group * STAGES + _stage(filling)]

    # --- the warpgroup that moves pieces ---

    def move(self, n: Any, side: int) -> None:
        matrix, row, column = self.place(n, side)
        scratch, left, right = self.scratch, self.arrays["A"], self.arrays["B"]
        sharing = "pair" if self.kernel.in_pairs else None
        # Half of the columns of what is not transposed would not lie together.
        transposed = self.kernel.kind.transposed
        rows = TILE if transposed == "left" else side
        columns = side if transposed == "right" else TILE

        together, first = self.kernel.together(side), self.first_filling(n, side)

        @pl.loop(i32(0), i32(self.kernel.fillings(side)))
        def _(turn: Any) -> None:
            filling = first + turn
            stage, group = _stage(filling), lax.rem(n, i32(MAKERS))
            wait = partial(plgpu.barrier_wait, scratch.free.at[stage])
            pl.when(filling >= STAGES)(wait)
            for part in range(together):
                deep = pl.ds((turn * together + part) * DEPTH, DEPTH)
                at = self.turned("left", pl.ds(row, rows), deep)
                to = self.turned("left", pl.ds(part * HALF, rows), slice(None))
                plgpu.copy_gmem_to_smem(
                    left.at[(matrix, *at)], scratch.left.at[(stage, *to)],
                    self.here(group, filling, side), collective_axes=sharing,
                )  # fmt: skip
                at = self.turned("right", deep, pl.ds(column, columns))
                to = self.turned("right", slice(None), pl.ds(part * HALF, columns))
                plgpu.copy_gmem_to_smem(
                    right.at[(matrix, *at)], scratch.right.at[(stage, *to)],
                    self.here(group, filling, side),
                )  # fmt: skip

    def turned(self, factor: str, *place: Any) -> tuple[Any, ...]:
        """A place in one of the factors, of which the transpose may be given."""
        return place[::-1] if self.kernel.kind.transposed == factor else place

    # --- the warpgroups that make tiles ---

    def make_mine(self, group: Any, start: Any, stop: Any, side: int) -> None:
        """Every other tile."""
        first = start + lax.rem(start + group, i32(MAKERS))
        count = lax.div(stop - first + MAKERS - 1, i32(MAKERS))

        @pl.loop(i32(0), count)
        def _(n: Any) -> None:
            self.make(group, first + n * MAKERS, side)

    def make(self, group: Any, n: Any, side: int) -> None:
        place, panels = self.place(n, side), self.panels(group, side)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile has gone
        self.await_addend(group, *place, panels, start=True)
        x = pl.run_scoped(
            partial(self.multiply, group, n, side), plgpu.ACC((side, side), jnp.float32)
        )
        alpha, beta, gamma = (self.arrays["factors"][place[0], i] for i in range(3))
        x = x * alpha
        if self.kernel.kind.is_symmetric:  # as in BLAS; Muon's others never overflow
            x = jnp.where(jnp.broadcast_to(alpha, x.shape) == 0, 0.0, x)
        if self.kernel.kind.has_shift:
            x = jnp.where(_on_diagonal(x.shape, *place[1:]), x + gamma, x)
        parts = [x[:, p : p + HALF] for p in range(0, side, HALF)]
        if "C" in self.arrays:
            self.await_addend(group, *place, panels, start=False)
            given = [panel[...].astype(jnp.float32) for panel in panels]
            parts = [x + beta * c for x, c in zip(parts, given, strict=True)]
        self.store(*place, panels, [x.astype(self.kernel.dtype) for x in parts])

    def panels(self, group: Any, side: int) -> list[Any]:
        """A maker's tile or quarter in shared memory: 64 columns each."""
        tiles = self.scratch.tiles
        return [tiles.at[group, p, pl.ds(0, side)] for p in range(side // HALF)]

    def await_addend(
        self, group: Any, matrix: Any, row: Any, column: Any, panels: Any, start: bool
    ) -> None:
        """Starts to load the tile of C, or waits for it."""
        if "C" not in self.arrays:
            return
        here = self.scratch.addend_here.at[group]
        if not start:
            plgpu.barrier_wait(here)
            return
        sources = _columns(self.arrays["C"].at[matrix], row, column, panels)
        copies = zip(sources, panels, strict=True)
        if len(panels) == 1:  # the barrier waits for two copies
            halves = [pl.ds(0, HALF // 2), pl.ds(HALF // 2, HALF // 2)]
            copies = [(sources[0].at[x], panels[0].at[x]) for x in halves]
        for source, panel in copies:
            plgpu.copy_gmem_to_smem(source, panel, here)

    def multiply(self, group: Any, n: Any, side: int, acc: Any) -> Any:
        """The sum of all pieces, in float32."""
        first, fillings = self.first_filling(n, side), i32(self.kernel.fillings(side))

        @pl.loop(i32(0), fillings)
        def _(turn: Any) -> None:
            filling = first + turn
            plgpu.barrier_wait(self.here(group, filling, side))
            for part in range(self.kernel.together(side)):
                plgpu.wgmma(acc, *self.factors(_stage(filling), part, side))
            plgpu.wgmma_wait(self.kernel.together(side))
            pl.when(turn > 0)(lambda: self.release(filling - 1))

        plgpu.wgmma_wait(0)
        self.release(first + fillings - 1)
        return acc[...]

    def factors(self, stage: Any, part: int, side: int) -> list[Any]:
        """Pieces of both, as they are multiplied."""
        scratch, rows = self.scratch, pl.ds(part * HALF, side)
        left = scratch.left.at[(stage, *self.turned("left", rows, slice(None)))]
        right = scratch.right.at[(stage, *self.turned("right", slice(None), rows))]
        pieces = {"left": left, "right": right}
        is_turned = self.kernel.kind.transposed
        return [
            x.transpose((1, 0)) if is_turned == factor else x
            for factor, x in pieces.items()
        ]

    def release(self, filling: Any) -> None:
        """Its shared memory may be written."""
        plgpu.barrier_arrive(self.scratch.free.at[_stage(filling)])

    def store(
        self, matrix: Any, row: Any, column: Any, panels: list[Any], parts: list[Any]
    ) -> None:
        """Parts of 64 columns, and their transposes on the other side."""
        result = self.result.at[matrix]
        for x, panel in zip(parts, panels, strict=True):
            panel[...] = x
        _send(panels, _columns(result, row, column, panels))
        if not self.kernel.kind.is_symmetric:
            return

        @pl.when(lax.div(row, i32(TILE)) != lax.div(column, i32(TILE)))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for p, panel in enumerate(panels):
                for q, x in enumerate(parts):
                    target = panel.at[pl.ds(q * HALF, HALF)].transpose((1, 0))
                    target[...] = x[p * HALF : (p + 1) * HALF]
            _send(panels, _columns(result, column, row, panels))


def _stage(filling: Any) -> Any:
    return lax.rem(filling, i32(STAGES))


def _on_diagonal(shape: tuple[int, ...], row: Any, column: Any) -> Any:
    iota = partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=plgpu.Layout.WGMMA)
    return iota(0) + row == iota(1) + column


def _columns(matrix: Any, row: Any, column: Any, panels: list[Any]) -> list[Any]:
    """The parts of a matrix in device memory that panels stand for."""
    return [
        matrix.at[pl.ds(row, panel.shape[0]), pl.ds(column + p * HALF, HALF)]
        for p, panel in enumerate(panels)
    ]


def _send(panels: list[Any], targets: list[Any]) -> None:
    plgpu.commit_smem()
    for panel, target in zip(panels, targets, strict=True):
        plgpu.copy_smem_to_gmem(panel, target)
