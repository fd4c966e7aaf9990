"""What Pallas's Mosaic GPU kernels lack: single elements, atomic numbers, votes."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np


def load_elements(ref: Any, index: Any, dtype: Any, layout: Any) -> Any:
    """In a Mosaic GPU kernel: elements of an array in global memory, one by one.

    Args:
        ref: The array, of one dimension.
        index: A tile of indices inside it, int32.
        dtype: The array's.
        layout: How the tile lies in registers.
    """
    import jax.experimental.mosaic.gpu as mosaic
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref, vector

    signed = jnp.issubdtype(dtype, jnp.signedinteger) or None
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        signed = False

    inline: Any = plgpu.inline_mgpu

    @inline(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout),
    )
    def load(_: Any, ref: Any, index: Any) -> Any:
        element = ir.MemRefType(ref.type).element_type
        registers = np.empty_like(index.registers)
        for place, places in np.ndenumerate(index.registers):
            (count,) = ir.VectorType(places.type).shape
            found = llvm.mlir_undef(ir.VectorType.get((count,), element))
            for i in range(count):
                at = {"dynamic_position": [], "static_position": [i]}
                where = arith.index_cast(
                    ir.IndexType.get(), vector.extract(places, **at)
                )
                found = vector.insert(memref.load(ref, [where]), found, **at)
            registers[place] = found
        return mosaic.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=signed
        )

    return load(ref, index)


def add_diagonals(tile: Any, layout: Any, memory: Any, out: Any) -> None:
    """In a Mosaic GPU kernel: sums over the elements of each diagonal of a tile.

    Of a tile of 64 rows and N columns, 64 or 128, the sum over row - column = n is at
    n + N - 1; of two numbers at the same place, where N is 64, one is of the first 32
    rows and one of the others.

    Args:
        tile: Float32 numbers, (64, N).
        layout: How they lie in registers.
        memory: Float32, (64, N + 8), shared memory that only this warpgroup uses: a
            row begins 8 banks behind the one before, so that writes do not collide.
        out: Float32, (128 / N, 64 + N), in global memory; the last of each is 0.

    Every thread adds two diagonals, which fill a column together; neighbours read
    neighbouring elements of a row.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, memref
    from jax.experimental.mosaic.gpu import utils

    inline: Any = plgpu.inline_mgpu
    rows, columns = tile.shape
    parts = 128 // columns

    @inline(arg_types=(layout, plgpu.RefType(), plgpu.RefType()))
    def add(_: Any, tile: Any, memory: Any, out: Any) -> None:
        integer, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        number, below = ir.F32Type.get(), arith.CmpIPredicate.slt

        def constant(x: int) -> Any:
            return arith.constant(integer, ir.IntegerAttr.get(integer, x))

        def place(x: Any) -> Any:
            return arith.index_cast(index, x)

        utils.warpgroup_barrier()  # all have read what was there
        whole = utils.memref_slice(memory, (slice(None), slice(0, columns)))
        tile.store_untiled(whole, optimized=False)
        utils.warpgroup_barrier()
        thread = arith.remui(utils.thread_idx(), constant(128))
        mine = arith.remui(thread, constant(columns))
        part = arith.divui(thread, constant(columns))
        start = arith.muli(part, constant(rows // parts))
        zero = arith.constant(number, ir.FloatAttr.get(number, 0.0))
        above, under = zero, zero
        for n in range(rows // parts):
            row = arith.addi(start, constant(n))
            column = arith.andi(arith.subi(row, mine), constant(columns - 1))
            x = memref.load(memory, [place(row), place(column)])
            is_above = arith.cmpi(below, row, mine)
            above = arith.addf(above, arith.select(is_above, x, zero))
            under = arith.addf(under, arith.select(is_above, zero, x))
        last = constant(rows + columns - 1)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, mine, constant(0))
        at = arith.select(is_first, last, arith.subi(mine, constant(1)))
        memref.store(above, out, [place(part), place(at)])
        with utils.when(arith.cmpi(below, mine, constant(rows))):
            at = arith.addi(mine, constant(columns - 1))
            memref.store(under, out, [place(part), place(at)])

    add(tile, memory, out)


def store_registers(ref: Any, numbers: Any) -> None:
    """In a Mosaic GPU kernel: writes registers to an array in global memory.

    Args:
        ref: The array, rows or a tile, which may lie in strides.
        numbers: As many, of its dtype.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    store = getattr(plgpu, "store", None)  # since 0.12, which refuses the other form
    if store is None:
        ref[...] = numbers
    else:
        store(ref, numbers, optimized=False)


def take_number(counter: Any, to: Any, start: int) -> None:
    """In a Mosaic GPU kernel: writes the next number that no thread block has taken.

    All of a warpgroup call it, and can read the number then.

    Args:
        counter: A semaphore in global memory: how many were taken, since the launch.
        to: An int32 in shared memory.
        start: The first number.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref
    from jax.experimental.mosaic.gpu import utils

    inline: Any = plgpu.inline_mgpu

    @inline(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_: Any, counter: Any, to: Any) -> None:
        integer = ir.IntegerType.get_signless(32)

        def constant(x: int) -> Any:
            return arith.constant(integer, ir.IntegerAttr.get(integer, x))

        is_first = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        with utils.when(is_first):
            add, order = llvm.AtomicBinOp.add, llvm.AtomicOrdering.monotonic
            taken = llvm.atomicrmw(add, utils.memref_ptr(counter), constant(1), order)
            memref.store(arith.addi(taken, constant(start)), to, [])
        utils.warpgroup_barrier()

    take(counter, to)


def any_exceeds(tile: Any, limits: Any, layout: Any) -> Any:
    """In a Mosaic GPU kernel: whether any number that a warp holds exceeds its limit.

    Warps may get different answers: what is done on a `True` must not need the others.

    Args:
        tile: Float32 numbers; NaN exceeds nothing.
        limits: As many, equal along rows.
        layout: How both lie: the numbers of a register are of one row, whose limit is
            read once.
    """
    import jax.experimental.mosaic.gpu as mosaic
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm

    inline: Any = plgpu.inline_mgpu
    scalar: Any = {"dtype": jnp.int32, "layout": plgpu.Layout.WG_SPLAT}

    @inline(
        arg_types=(layout, layout), return_type=plgpu.ShapeDtypeStruct((), **scalar)
    )
    def vote(_: Any, tile: Any, limits: Any) -> Any:
        integer = ir.IntegerType.get_signless(32)
        mine = arith.constant(integer, ir.IntegerAttr.get(integer, 0))
        for row, limit in zip(tile.registers.flat, limits.registers.flat, strict=True):
            largest = functools.reduce(arith.maxnumf, _numbers(row))
            more = arith.cmpf(arith.CmpFPredicate.OGT, largest, _numbers(limit)[0])
            mine = arith.ori(mine, arith.extui(integer, more))
        found = llvm.inline_asm(
            integer,
            [mine],
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            "vote.sync.any.pred q, p, 0xffffffff; selp.s32 $0, 1, 0, q; }",
            "=r,r",
            has_side_effects=True,
        )
        return mosaic.FragmentedArray.splat(found, (), is_signed=True)

    return vote(tile, limits) != 0


def _numbers(register: Any) -> list[Any]:
    """Those of a register that holds several."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import vector

    (count,) = ir.VectorType(register.type).shape
    at = [{"dynamic_position": [], "static_position": [i]} for i in range(count)]
    return [vector.extract(register, **place) for place in at]


def settle(tile: Any, layout: Any) -> None:
    """In a Mosaic GPU kernel: numbers are known before what follows has an effect.

    An optimization barrier binds LLVM alone. ptxas delays what nobody needs yet, beyond
    waits too; it cannot where something that has an effect depends on it. Here that is
    a fence, for numbers below zero: there are none, and it would change nothing.

    Args:
        tile: Float32 numbers, whose signs are not set.
        layout: How they lie in registers.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm

    inline: Any = plgpu.inline_mgpu

    @inline(arg_types=(layout,))
    def ask(_: Any, tile: Any) -> None:
        integer = ir.IntegerType.get_signless(32)
        numbers = (x for register in tile.registers.flat for x in _numbers(register))
        signs = functools.reduce(
            arith.ori, (arith.bitcast(integer, x) for x in numbers)
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [signs],
            "{ .reg .pred p; setp.lt.s32 p, $0, 0; @p fence.acq_rel.cta; }",
            "r",
            has_side_effects=True,
        )

    ask(tile)


def await_warps() -> None:
    """In a Mosaic GPU kernel that has its own barriers: a warpgroup's warps meet."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental.mosaic.gpu import utils

    inline: Any = plgpu.inline_mgpu

    @inline()
    def wait(_: Any) -> None:
        utils.warpgroup_barrier()

    wait()


def vote_not_finite(flags: Any, group: Any, sums: Any, layout: Any) -> None:
    """In a Mosaic GPU kernel: whether any number of any warpgroup is not finite.

    Every warpgroup of the thread block takes part, and waits for the others; 1 or 0 is
    written to its own flag, which it can read at once.

    Args:
        flags: Integers in shared memory, one for each warpgroup.
        group: The number of this one.
        sums: Its float32 numbers; None if it has none. If only their sum is not finite
            they count as such.
        layout: How they lie in registers.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref

    inline: Any = plgpu.inline_mgpu
    scalar = plgpu.Layout.WG_SPLAT
    types = plgpu.RefType(), scalar, *(() if sums is None else (layout,))

    def is_odd(registers: Any) -> Any:
        *rest, total = registers
        for register in rest:
            total = arith.addf(total, register)
        total, *rest = _numbers(total)
        for x in rest:
            total = arith.addf(total, x)
        nothing = arith.subf(total, total)
        return arith.cmpf(arith.CmpFPredicate.UNE, nothing, nothing)

    @inline(arg_types=types)
    def vote(_: Any, flags: Any, group: Any, *sums: Any) -> None:
        integer = ir.IntegerType.get_signless(32)

        def constant(x: int) -> Any:
            return arith.constant(integer, ir.IntegerAttr.get(integer, x))

        mine = constant(0)
        for x in sums:
            mine = arith.extui(integer, is_odd(x.registers.flat))
        (groups,) = ir.MemRefType(flags.type).shape
        ours = llvm.inline_asm(
            integer,
            [mine, constant(128 * groups)],
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            "bar.red.or.pred q, 15, $2, p; selp.s32 $0, 1, 0, q; }",
            "=r,r,r",
            has_side_effects=True,
        )
        (place,) = group.registers.flat
        memref.store(ours, flags, [arith.index_cast(ir.IndexType.get(), place)])

    vote(flags, group, *(() if sums is None else (sums,)))
