"""Laws of classification: the blocks are those of the dense mask, however found."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st

from pliax.core.jaxprs import close
from pliax.kernels.attention.classification import classify


INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def closed(mask_mod):
    return close(mask_mod, *(INDEX,) * 4)


@jax.jit(static_argnums=(1, 2, 3))
def dense(mask, batch, heads, lengths):
    for axis in (3, 2, 1, 0):
        mask = jax.vmap(mask, [0 if i == axis else None for i in range(4)])
    return mask(*(jnp.arange(n, dtype=jnp.int32) for n in (batch, heads, *lengths)))


def expected(mask, batch, heads, lengths, sizes):
    """Any and all by block, with NumPy; what lies beyond the end is masked."""
    visible = np.asarray(dense(mask, batch, heads, lengths))
    (q, k), (m, n) = lengths, sizes
    padded = np.pad(visible, ((0, 0), (0, 0), (0, -q % m), (0, -k % n)))
    blocks = padded.reshape(batch, heads, -(-q // m), m, -(-k // n), n)
    return blocks.any(axis=(3, 5)), blocks.all(axis=(3, 5))


# --- random masks ---------------------------------------------------------------------


def table(seed, kind):
    """Captured contents: sorted, mixed, bytes, floats with NaN, bools, two rows."""
    rng = np.random.default_rng(seed)
    if kind == "sorted":
        return jnp.asarray(np.sort(rng.integers(-3, 9, 40)), jnp.int32)
    if kind == "bytes":
        return jnp.asarray(rng.integers(0, 256, 30), jnp.uint8)
    if kind == "floats":
        values = rng.integers(-8, 8, 25) / 4
        return jnp.asarray(np.where(rng.random(25) < 0.1, np.nan, values), jnp.float32)
    if kind == "bools":
        return jnp.asarray(rng.random(7) < 0.5)
    shape = (2, 33) if kind == "rows" else 37
    return jnp.asarray(rng.integers(-40, 40, shape), jnp.int32)


KINDS = ("sorted", "mixed", "bytes", "rows", "floats", "bools")
ARITHMETIC = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "^": lambda x, y: x ^ y,
    ">>": lambda x, y: x >> (y & 7),
    "min": jnp.minimum,
    "max": jnp.maximum,
    "rem": jax.lax.rem,
}
COMPARISONS = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}
LOGIC = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **COMPARISONS,
    **LOGIC,
    "abs": jnp.abs,
    "neg": jnp.negative,
    "square": lambda x: x**2,
    "not": jnp.logical_not,
}
CASTS = (jnp.int8, jnp.uint8, jnp.uint32, jnp.float32, jnp.bool_)
CONSTANTS = st.one_of(
    st.integers(-9, 60), st.sampled_from([-(2**31), 2**31 - 1, 10**8])
)


def integers():
    """Trees of integer expressions, as nested tuples."""
    leaf = st.one_of(
        st.sampled_from(["q", "k", "q", "k", "b", "h"]).map(lambda name: (name,)),
        st.tuples(st.just("constant"), CONSTANTS),
    )

    def larger(child):
        return st.one_of(
            st.tuples(st.sampled_from(sorted(ARITHMETIC)), child, child),
            st.tuples(st.sampled_from(["abs", "neg", "square"]), child),
            st.tuples(
                st.just("look up"), st.sampled_from(KINDS), st.integers(0, 3), child
            ),
            st.tuples(st.just("cast"), st.sampled_from(CASTS), child),
            st.tuples(st.just("where"), child, child, child, child),
        )

    return st.recursive(leaf, larger, max_leaves=5)


def bools():
    comparison = st.tuples(st.sampled_from(sorted(COMPARISONS)), integers(), integers())

    def larger(child):
        pair = st.tuples(st.sampled_from(sorted(LOGIC)), child, child)
        return st.one_of(pair, st.tuples(st.just("not"), child))

    return st.recursive(comparison, larger, max_leaves=3)


def evaluate(tree, places):
    """The value of an expression at (b, h, q, k)."""
    name, *rest = tree
    if name in places:
        return places[name]
    if name == "constant":
        return jnp.int32(rest[0])
    if name == "look up":
        kind, seed, index = rest
        return look_up(kind, seed, evaluate(index, places), places)
    if name == "cast":
        found = evaluate(rest[1], places).astype(rest[0])
        return (found * 0.5 > 3.0 if rest[0] == jnp.float32 else found).astype(
            jnp.int32
        )
    values: list[Any] = [evaluate(x, places) for x in rest]
    if name == "where":
        low, high, chosen, other = values
        return jnp.where(low < high, chosen, other)
    return OPERATIONS[name](*values)


def look_up(kind, seed, index, places):
    array = table(seed, kind)
    if kind == "rows":
        return array[places["b"], index] if seed % 2 else array[places["b"]][index]
    found = array.at[index].get(mode="fill") if seed == 3 else array[index]
    if kind == "floats":  # exact, whatever the order of evaluation
        return jnp.where(found * 2.0 > 0.5, jnp.int32(5), jnp.int32(-1))
    return found.astype(jnp.int32)


@given(
    tree=bools(),
    lengths=st.sampled_from([(1, 1), (23, 40), (40, 23), (50, 50)]),
    sizes=st.sampled_from([(8, 8), (16, 5), (3, 64), (1, 7)]),
)
def test_blocks_of_random_masks_are_those_of_the_dense_mask(tree, lengths, sizes):
    mask = closed(lambda b, h, q, k: evaluate(tree, {"b": b, "h": h, "q": q, "k": k}))
    found = classify(mask, 2, 2, lengths, sizes)
    for one, other in zip(found, expected(mask, 2, 2, lengths, sizes), strict=True):
        np.testing.assert_array_equal(one, other)


# --- transformations ------------------------------------------------------------------


def same_parity(b, h, q, k):
    return (q - k) % 2 == (b + h) % 2


def test_a_block_larger_than_what_is_evaluated_at_once_is_taken_in_pieces():
    for sizes in ((2048, 1024), (700, 2048), (3, 1500)):
        mask = closed(lambda b, h, q, k: (q * 7 + k * 5) % 1999 == 1998)
        case = (mask, 1, 1, (1500, 1100), sizes)
        np.testing.assert_array_equal(classify(*case), expected(*case))


def test_vmap_over_captured_arrays_equals_a_loop():
    ids = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(0, 5, (3, 60))), jnp.int32
    )

    def blocks(ids):
        mask = closed(lambda b, h, q, k: (ids[q] == ids[k]) & same_parity(b, h, q, k))
        return jnp.stack(classify(mask, 2, 1, (60, 60), (16, 8)))

    looped = jnp.stack([blocks(row) for row in ids])
    np.testing.assert_array_equal(jax.vmap(blocks)(ids), looped)


def test_new_contents_are_not_traced_again():
    traces = 0

    def same(ids):
        def mask_mod(b, h, q, k):
            nonlocal traces
            traces += 1
            return ids[q] == ids[k]

        return mask_mod

    @jax.jit
    def blocks(ids):
        return classify(closed(same(ids)), 1, 1, (64, 64), (16, 16))

    one, _ = blocks(jnp.zeros(64, jnp.int32))
    traced = traces
    other, _ = blocks(jnp.arange(64, dtype=jnp.int32))
    assert traces == traced
    assert (int(one.sum()), int(other.sum())) == (16, 4)


def test_symbolic_lengths_are_exported_once():
    queries, keys = jax.export.symbolic_shape("t, s")

    @jax.jit
    def blocks(query_ids, key_ids):
        lengths = (query_ids.shape[0], key_ids.shape[0])

        def mask_mod(b, h, q, k):
            return (query_ids[q] == key_ids[k]) & (q >= k)

        return classify(closed(mask_mod), 2, 1, lengths, (16, 8))

    shapes = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (queries, keys))
    exported = jax.export.export(blocks)(*shapes)
    for n, m in ((64, 64), (50, 90), (3, 1)):
        ids = [jnp.arange(i, dtype=jnp.int32) // 20 for i in (n, m)]
        mask = closed(lambda b, h, q, k, x=ids[0], y=ids[1]: (x[q] == y[k]) & (q >= k))
        wanted = expected(mask, 2, 1, (n, m), (16, 8))
        np.testing.assert_array_equal(exported.call(*ids), wanted)


def test_shard_map_over_documents_equals_one_device():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ids = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(0, 5, (2, 60))), jnp.int32
    )

    def blocks(ids):
        mask = closed(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & ((q - k) % 3 != 1))
        return classify(mask, ids.shape[0], 1, (60, 60), (16, 8))

    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(blocks, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(ids), blocks(ids))


# --- cost -----------------------------------------------------------------------------


def test_memory_is_far_below_the_dense_mask():
    length = 32768
    ids = jnp.zeros(length, jnp.int32)
    masks = {
        "decided": (lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 128),
        "undecided": (lambda b, h, q, k: jnp.sin(q / 3) > jnp.cos(k / 5), 128),
        "a row of ids": (lambda b, h, q, k: jnp.any(ids[:64] + q == k), 128),
        "one block": (lambda b, h, q, k: (q - k) % 3 == 0, length),
    }
    for name, (mask_mod, size) in masks.items():
        arguments = (closed(mask_mod), 1, 1, (length,) * 2, (size,) * 2)
        analysis = classify.lower(*arguments).compile().memory_analysis()
        assert analysis is not None
        assert analysis.temp_size_in_bytes <= length * length // 16, name
