"""Laws of the mask library: each mask is its picture, drawn here key by key."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations, normal
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels.attention import masks
from pliax.kernels.attention.arguments import close_mask_mod


B, H, T, D = 2, 2, 37, 8


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def drawn(mask_mod, batch=B, rows=T, columns=T):
    """A mask_mod evaluated everywhere, (B, T, S)."""
    return np.asarray(_drawn(close_mask_mod(mask_mod), (batch, rows, columns)))


@functools.partial(jax.jit, static_argnames="shape")
def _drawn(mask_mod, shape):
    def each(b, q, k):
        return mask_mod(b, jnp.int32(0), q, k)

    over_keys = jax.vmap(each, (None, None, 0))
    over_queries = jax.vmap(over_keys, (None, 0, None))
    indices = (jnp.arange(n, dtype=jnp.int32) for n in shape)
    return jax.vmap(over_queries, (0, None, None))(*indices)


# --- pictures -------------------------------------------------------------------------


IDS = np.array([[0] * 9 + [1] * 20 + [2] * 8, [4] * 30 + [1] * 1 + [4] * 6])
LENGTHS = [9, 0, 20, 4]  # of 37 positions the last 4 belong to none
STARTS = [0, 9, 9, 29, 33]


def same_id(b, q):
    return [k for k in range(T) if IDS[b, k] == IDS[b, q]]


def own_document(b, q, first=0):
    for start, end in pairwise(STARTS):
        if start <= q - first < end:
            return range(first + start, first + end)
    return []


def after_prefix(b, q):
    if q < 3:
        return range(3)
    own = own_document(b, q, first=3)
    return [*range(3), *own] if own else []


def noised_and_clean(b, q):
    blocks = [range(i, min(i + 4, 18)) for i in range(0, 18, 4)]
    (mine,) = [i for i, block in enumerate(blocks) if q % 18 in block]
    if q >= 18:
        return [18 + k for block in blocks[: mine + 1] for k in block]
    return [*blocks[mine], *(18 + k for block in blocks[:mine] for k in block)]


def neighbours(sizes, kernels):
    def keys(b, q):
        windows = []
        for i, n, kernel in zip(
            np.unravel_index(q, sizes), sizes, kernels, strict=True
        ):
            starts = range(n - kernel + 1)
            best = min(starts, key=lambda start: abs(i - start - kernel // 2))
            windows.append(range(best, best + kernel))
        return [np.ravel_multi_index(place, sizes) for place in product(*windows)]

    return keys


@dataclass(frozen=True)
class Case:
    """A mask, and from (sequence, query) the keys it shows."""

    make: Callable[[], Any]
    keys: Callable[[int, int], Any]
    length: int = T

    @functools.cached_property
    def picture(self):
        visible = np.zeros((B, self.length, self.length), bool)
        for b, q in product(range(B), range(self.length)):
            for k in self.keys(b, q):
                visible[b, q, k] |= 0 <= k < self.length
        return visible


CASES = {
    "noop": Case(lambda: masks.noop_mask, lambda b, q: range(T)),
    "causal": Case(lambda: masks.causal, lambda b, q: range(q + 1)),
    "not": Case(lambda: masks.not_mask(masks.causal), lambda b, q: range(q + 1, T)),
    "and": Case(
        lambda: masks.and_masks(masks.causal, masks.dilated((9, 9), 2)),
        lambda b, q: range(max(q - 18, q % 2), q + 1, 2),
    ),
    "or": Case(
        lambda: masks.or_masks(masks.causal, masks.padding(ints(9, 0))),
        lambda b, q: {*range(q + 1), *range([9, 0][b])},
    ),
    "offset": Case(
        lambda: masks.with_offset(masks.causal, ints(5, 11)),
        lambda b, q: range(min(q + [5, 11][b] + 1, T)),
    ),
    "window": Case(
        lambda: masks.sliding_window(7), lambda b, q: range(max(q - 6, 0), q + 1)
    ),
    "window of data": Case(
        lambda: masks.sliding_window((jnp.int32(4), 2)),
        lambda b, q: range(max(q - 4, 0), min(q + 3, T)),
    ),
    "dilated": Case(
        lambda: masks.dilated(5, 3),
        lambda b, q: [k for k in (q, q - 3, q - 6, q - 9, q - 12) if k >= 0],
    ),
    "prefix": Case(
        lambda: masks.prefix_lm(ints(3, 20)),
        lambda b, q: {*range([3, 20][b]), *range(q + 1)},
    ),
    "global": Case(
        lambda: masks.global_and_window(2, 6),
        lambda b, q: [k for k in range(T) if k < 2 or q < 2 or abs(q - k) in range(4)],
    ),
    "ids": Case(lambda: masks.document(jnp.asarray(IDS, jnp.int32)), same_id),
    "lengths": Case(
        lambda: masks.document(lengths=ints(*LENGTHS), total_length=T), own_document
    ),
    "shared prefix": Case(
        lambda: masks.shared_prefix(3, lengths=ints(*LENGTHS[:3]), total_length=T),
        lambda b, q: after_prefix(b, q) if q < 3 + STARTS[3] else [],
    ),
    "block diffusion": Case(lambda: masks.block_diffusion(18, 4), noised_and_clean, 36),
    "image": Case(
        lambda: masks.neighborhood_2d((5, 7), (3, 4)), neighbours((5, 7), (3, 4)), 35
    ),
    "volume": Case(
        lambda: masks.neighborhood_3d((2, 3, 6), (2, 1, 3)),
        neighbours((2, 3, 6), (2, 1, 3)),
        36,
    ),
    "padding": Case(lambda: masks.padding(ints(37, 6)), lambda b, q: range([37, 6][b])),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_its_picture(name):
    case = CASES[name]
    found = drawn(case.make(), rows=case.length, columns=case.length)
    np.testing.assert_array_equal(found, case.picture)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_attention_sees_the_picture(name):
    case = CASES[name]
    q, k, v = (normal(i, (B, case.length, H, D)) for i in range(3))

    @jax.jit
    def attend(mask_mod):
        lengths = (case.length, case.length)
        mask = px.create_block_mask(mask_mod, B, None, *lengths, block_size=16)
        return [
            px.flex_attention(q, k, v, block_mask=mask, implementation=name)
            for name in ("reference", "xla")
        ]

    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    s = np.einsum("bthd,bshd->bhts", *wide[:2]) * D**-0.5
    weights = np.exp(s) * case.picture[:, None]
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    expected = np.einsum("bhts,bshd->bthd", weights, wide[2])
    for out in attend(close_mask_mod(case.make())):
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_every_query_has_the_whole_window_of_its_neighborhood():
    for name, keys in (("image", 3 * 4), ("volume", 2 * 1 * 3)):
        assert (CASES[name].picture.sum(-1) == keys).all()
        assert CASES[name].picture[:, range(35), range(35)].all()


# --- laws -----------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)
)
def test_combinations_are_those_of_sets(windows):
    mods = [masks.sliding_window(window) for window in windows]
    each = np.stack([drawn(mod, 1, 12, 12) for mod in mods])
    neither = masks.not_mask(masks.or_masks(*mods))
    np.testing.assert_array_equal(drawn(masks.and_masks(*mods), 1, 12, 12), each.all(0))
    np.testing.assert_array_equal(drawn(masks.or_masks(*mods), 1, 12, 12), each.any(0))
    np.testing.assert_array_equal(drawn(neither, 1, 12, 12), ~each.any(0))


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_documents_are_one_mask_by_ids_lengths_or_starts(lengths):
    total = 4 * 12
    ids = np.repeat(np.arange(5), [*lengths, total - sum(lengths)])
    real = np.asarray(ids) < 4
    expected = (ids[:, None] == ids[None]) & real[:, None]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    by_id = masks.and_masks(
        masks.document(jnp.asarray(ids, jnp.int32)),
        masks.padding(ints(sum(lengths))),
    )
    for mask in (
        by_id,
        masks.document(lengths=ints(*lengths), total_length=total),
        masks.document(cu_seqlens=jnp.asarray(starts, jnp.int32), total_length=total),
        masks.shared_prefix(0, lengths=ints(*lengths), total_length=total),
    ):
        np.testing.assert_array_equal(drawn(mask, 1, total, total)[0], expected)


def test_rows_of_a_batch_are_packed_differently():
    lengths = ints([9, 20], [30, 7])
    found = drawn(masks.document(lengths=lengths, total_length=T))
    for b in range(B):
        alone = masks.document(lengths=lengths[b], total_length=T)
        np.testing.assert_array_equal(found[b], drawn(alone, 1)[0])
    found = drawn(masks.shared_prefix(ints(2, 5), lengths=ints(9, 9), total_length=T))
    for b in range(B):
        alone = masks.shared_prefix([2, 5][b], lengths=ints(9, 9), total_length=T)
        np.testing.assert_array_equal(found[b], drawn(alone, 1)[0])


def test_ids_of_a_shared_prefix_are_not_looked_at():
    ids = ints(7, 7, 7, 7, 7, 2, 2)
    found = drawn(masks.shared_prefix(3, ids), 1, 7, 7)[0]
    own = np.asarray(ids)[:, None] == np.asarray(ids)[None]
    np.testing.assert_array_equal(found[:3], np.arange(7)[None].repeat(3, 0) < 3)
    np.testing.assert_array_equal(found[3:, 3:], own[3:, 3:])
    assert found[:, :3].all()


@given(st.integers(0, 20), st.sampled_from(["causal", "window", "prefix", "lengths"]))
def test_an_offset_takes_later_rows(offset, name):
    whole = CASES[name].picture
    found = drawn(masks.with_offset(CASES[name].make(), jnp.int32(offset)), rows=17)
    np.testing.assert_array_equal(found, whole[:, offset : offset + 17])


DATA = {
    "with_offset": (lambda x: masks.with_offset(masks.causal, x), [ints(3), ints(9)]),
    "sliding_window": (masks.sliding_window, [jnp.int32(3), jnp.int32(9)]),
    "dilated": (lambda x: masks.dilated(x, 2), [jnp.int32(3), jnp.int32(9)]),
    "prefix_lm": (masks.prefix_lm, [ints(3), ints(9)]),
    "global": (lambda x: masks.global_and_window(x, 4), [ints(3), ints(9)]),
    "padding": (masks.padding, [ints(3), ints(9)]),
    "ids": (masks.document, [jnp.arange(T) // n for n in (3, 9)]),
    "lengths": (
        lambda x: masks.document(lengths=x, total_length=T), [ints(3, 30), ints(9, 20)]
    ),
    "cu_seqlens": (
        lambda x: masks.document(cu_seqlens=x, total_length=T), [ints(0, 30), ints(0, 20)]
    ),
    "shared_prefix": (
        lambda x: masks.shared_prefix(x, lengths=ints(5, 5), total_length=T),
        [ints(3), ints(9)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_other_contents_are_the_same_program_and_another_mask(name):
    make, contents = DATA[name]
    one, other = (close_mask_mod(make(x)) for x in contents)
    assert one.program == other.program
    assert (drawn(one, 1) != drawn(other, 1)).any()


@pytest.mark.parametrize("name", ["sliding_window", "ids", "lengths", "shared_prefix"])
def test_vmap_over_contents_is_a_loop(name):
    make, contents = DATA[name]
    over_contents = jax.vmap(lambda x: _drawn(close_mask_mod(make(x)), (1, T, T)))
    expected = [drawn(make(x), 1) for x in contents]
    np.testing.assert_array_equal(over_contents(jnp.stack(contents)), expected)


def test_new_documents_compile_nothing():
    q, k, v = (normal(i, (1, T, H, D)) for i in range(3))

    def attend(lengths):
        packed = masks.document(lengths=lengths, total_length=T)
        mod = masks.and_masks(masks.causal, packed)
        mask = px.create_block_mask(mod, None, None, T, T, block_size=16)
        return px.flex_attention(q, k, v, block_mask=mask)

    first = attend(ints(20, 17))
    with compilations() as compiled:
        second = attend(ints(3, 34))
    assert not compiled
    assert np.abs(first - second).max() > 1e-2


# --- errors ---------------------------------------------------------------------------


FOUR = r"mask_mod\(b, h, q_idx, kv_idx\)"
ERRORS = {
    "no masks": (TypeError, "and_masks: expected at least one mask_mod, found none.\nPass",
                 lambda: masks.and_masks()),
    "a mask made": (TypeError, f"or_masks: mask_mod must be a function {FOUR}, found Block",
                    lambda: masks.or_masks(px.create_block_mask(masks.causal, None, None, 8, 8))),
    "a score_mod": (TypeError, f"not_mask: .*expected 4 positional .*{FOUR}, got 5",
                    lambda: masks.not_mask(lambda s, b, h, q, k: s)),
    "offset float": (TypeError, "offset must be an integer, found float 1.5.\nPass",
                     lambda: masks.with_offset(masks.causal, 1.5)),
    "offset rank": (ValueError, r"integer array \(\) or \(B\), found i32\[1,1\].\nMap",
                    lambda: masks.with_offset(masks.causal, ints([1]))),
    "window zero": (ValueError, "sliding_window: window must be at least 1, found 0.\nPass",
                    lambda: masks.sliding_window(0)),
    "window side": (ValueError, "at least 0, found -1", lambda: masks.sliding_window((3, -1))),
    "window three": (ValueError, r"pair \(left, right\), found \(1, 2, 3\)",
                     lambda: masks.dilated((1, 2, 3), 1)),
    "window float array": (TypeError, r"f32\[\].\nCast it with window.astype",
                           lambda: masks.sliding_window(jnp.float32(3))),
    "dilation": (ValueError, "dilation must be at least 1, found 0", lambda: masks.dilated(3, 0)),
    "prefix": (ValueError, "prefix_length must be at least 0, found -2",
               lambda: masks.prefix_lm(-2)),
    "global window": (ValueError, "window must be at least 1",
                      lambda: masks.global_and_window(2, 0)),
    "no description": (ValueError, "exactly one of ids, lengths and cu_seqlens, found none",
                       lambda: masks.document()),
    "two": (ValueError, "found ids and lengths.\nPass ids for",
            lambda: masks.document(ints(1), lengths=ints(1))),
    "float ids": (TypeError, r"integer array \(S\) or \(B, S\), found f32\[4\].\nCast",
                  lambda: masks.document(jnp.zeros(4))),
    "listed ids": (TypeError, r"found list \[0, 1\].\nMake one with jnp.asarray\(ids\)",
                   lambda: masks.document([0, 1])),
    "ids rank": (ValueError, r"found i32\[\].\n", lambda: masks.document(jnp.int32(3))),
    "no total": (ValueError, "found lengths with total_length=None.\nWith",
                 lambda: masks.document(lengths=ints(3))),
    "a total": (ValueError, "found ids with total_length=3",
                lambda: masks.document(ints(3), total_length=3)),
    "no documents": (ValueError, r"cu_seqlens must name at least one.*i32\[1\]",
                     lambda: masks.document(cu_seqlens=ints(0), total_length=3)),
    "padding": (TypeError, r"padding: lengths must be an integer array \(B\), found int 3",
                lambda: masks.padding(3)),
    "diffusion": (TypeError, "block must be an integer, found float 2.0",
                  lambda: masks.block_diffusion(8, 2.0)),
    "axes": (ValueError, r"size must be 2 integers, found int 8.\nPass \(height, width\)",
             lambda: masks.neighborhood_2d(8, (3, 3))),
    "kernel": (ValueError, r"fit into size \(4, 4, 2\), found \(3, 3, 3\)",
               lambda: masks.neighborhood_3d((4, 4, 2), (3, 3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_say_what_was_found(name):
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()


def test_traced_sizes_say_that_they_are_static():
    with pytest.raises(TypeError, match=r"dilation .*traced value i32\[\]"):
        jax.jit(lambda n: masks.dilated(3, n)(0, 0, 1, 1))(2)
