"""The pass on Hopper GPUs: a kernel of Pallas's Mosaic GPU for every few arrays.

A thread block reads `BLOCK` elements, which lie together, and leaves the sum of their
squares. Momenta are written in their place, which costs no copy where a program
donates them; looked-ahead elements go to their place in the stack.
"""

import math
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array

from .api import BLOCK, Stacked, Static, squared


# A kernel's: between two of them a device rests for 2 to 3 us, of 20 that one array of
# (896, 4864) takes; but each array is code of its own.
ARRAYS = 4


def stacked(
    static: Static, factors: Array, gradients: list[Array], momenta: list[Array]
) -> Stacked:
    """The next momenta, the stack of what is rounded, and its sums of squares."""
    blocks = math.prod(static.sides) // BLOCK
    matrices = sum(map(len, momenta))

    @pl.run_state
    def write(refs: Any) -> None:
        *moved, stack, squares = refs
        first = 0
        for several in batched(zip(gradients, moved, strict=True), ARRAYS):
            place = jnp.full((1,), first, jnp.int32)
            flat, taken = zip(*((G.reshape(-1), M) for G, M in several), strict=True)
            options = static.nesterov, static.interpret
            _write(*options, factors, place, flat, taken, stack, squares)
            first += sum(G.size // BLOCK for G in flat)

    X = jax.lax.empty((matrices * blocks * BLOCK,), jnp.bfloat16)
    sums = jax.lax.empty((matrices * blocks,), jnp.float32)
    *buffers, X, sums = write([*(M.reshape(-1) for M in momenta), X, sums])
    buffers = [x.reshape(M.shape) for x, M in zip(buffers, momenta, strict=True)]
    X = X.reshape(matrices, *static.sides)
    return buffers, X, jnp.sum(sums.reshape(matrices, blocks), axis=1)


@partial(jax.jit, static_argnums=(0, 1))  # arrays of the same sizes are one kernel
def _write(
    nesterov: bool,
    interpret: bool,
    factors: Array,
    place: Array,
    gradients: tuple[Array, ...],
    momenta: tuple[Any, ...],
    stack: Any,
    squares: Any,
) -> None:
    options: dict[str, Any] = {}
    if interpret:
        options["interpret"] = plgpu.InterpretGPUParams()
    plgpu.kernel(
        partial(_thread_block, nesterov, len(gradients)),
        grid=(sum(G.size for G in gradients) // BLOCK,),
        grid_names=("blocks",),
        **options,
    )(factors, place, *gradients, *momenta, stack, squares)


def _thread_block(
    nesterov: bool, count: int, factors: Any, place: Any, *refs: Any
) -> None:
    gradients, momenta = refs[:count], refs[count : 2 * count]
    stack, squares = refs[2 * count :]
    block, first = jax.lax.axis_index("blocks"), 0
    for G, M in zip(gradients, momenta, strict=True):
        size = G.shape[0] // BLOCK

        @pl.when((block >= first) & (block < first + size))
        def _(G: Any = G, M: Any = M, first: int = first) -> None:
            here = pl.ds((block - first) * BLOCK, BLOCK)
            ahead = _moved(nesterov, factors, G, M, here).astype(stack.dtype)
            stack[pl.ds((place[0] + block) * BLOCK, BLOCK)] = ahead
            squares[place[0] + block] = jnp.sum(squared(ahead))

        first += size


def _moved(nesterov: bool, factors: Any, G: Any, M: Any, here: Any) -> Any:
    """Moves M, and looks ahead."""
    fresh, kept, gradient = factors[0], factors[1], G[here]
    moved = fresh * gradient + kept * M[here]
    M[here] = moved
    return fresh * gradient + kept * moved if nesterov else moved
