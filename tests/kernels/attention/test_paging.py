"""Laws of pages: sequences keep apart, and attention means what it means without."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_error_rule, compilations, in_float64, normal
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels.attention import paging


B, H, K, D, V = 3, 4, 2, 8, 4
PAGES, SIZE, SLOTS = 9, 4, 5
EVERY = np.arange(B, dtype=np.int32)
UNDER_JIT = {
    name: jax.jit(getattr(paging, name)) for name in ("reserve", "assign", "erase")
}


def int32(x):
    return np.asarray(x, np.int32)


def empty(**sizes):
    sizes = {"value_dimension": V, "max_pages": SLOTS} | sizes
    return paging.PagedCache.create(B, PAGES, SIZE, K, D, **sizes)


# --- pages against a dict of lists ----------------------------------------------------


class Model:
    """How many pages every sequence owns, and what it holds, by position."""

    def __init__(self):
        self.pages = dict.fromkeys(range(B), 0)
        self.tokens = {s: {} for s in range(B)}

    def free(self):
        return PAGES - sum(self.pages.values())

    def reserve(self, s, length):
        total = max(-(-length // SIZE), self.pages[s])
        fits = total <= SLOTS and total - self.pages[s] <= self.free()
        if fits:
            self.pages[s] = total
        return fits

    def assign(self, s, positions, first):
        inside = [p < self.pages[s] * SIZE for p in positions]
        for i, p in enumerate(positions):
            if inside[i] and p >= 0:
                self.tokens[s][p] = first + i
        return all(inside)

    def erase(self, s):
        self.pages[s], self.tokens[s] = 0, {}
        return True


def constant(values, dimension):
    values = np.asarray(values, np.float32).reshape(-1, 1, 1)
    return np.broadcast_to(values, (len(values), K, dimension)).copy()


def check(cache, model):
    """The cache holds what the model does, and nothing else."""
    table, free = np.asarray(cache.page_table), np.asarray(cache.free)
    owned = table[table >= 0].tolist()
    assert len(owned) == len(set(owned)) == PAGES - model.free()
    assert np.flatnonzero(free).tolist() == sorted({*range(PAGES)} - {*owned})
    stores = [np.asarray(x).reshape(PAGES, SIZE, K, -1) for x in (cache.keys, cache.values)]  # fmt: skip
    assert not any(store[free].any() for store in stores)
    for s in range(B):
        held, tokens = model.pages[s], model.tokens[s]
        assert cache.capacity[s] == held * SIZE
        assert (table[s] >= 0).tolist() == [True] * held + [False] * (SLOTS - held)
        inverse = np.full(PAGES, -1)
        inverse[table[s, :held]] = np.arange(held)
        np.testing.assert_array_equal(cache.physical_to_logical[s], inverse)
        assert cache.lengths[s] == max(tokens, default=-1) + 1
        marks = np.array([tokens.get(p, 0) for p in range(held * SIZE)])
        for store, sign, dimension in zip(stores, (1, -1), (D, V), strict=True):
            found = store[table[s, :held]].reshape(-1, K, dimension)
            np.testing.assert_array_equal(found, constant(sign * marks, dimension))


_sequence = st.integers(0, B - 1)
_positions = st.integers(-1, SLOTS * SIZE + 1)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), _sequence, st.integers(-1, SLOTS * SIZE + 3)),
        st.tuples(
            st.just("assign"),
            _sequence,
            st.lists(_positions, min_size=3, max_size=3, unique=True),
        ),
        st.tuples(st.just("erase"), _sequence),
    ),
    max_size=30,
)


@given(operations=_operations)
def test_pages_are_those_of_a_dict_of_lists(operations):
    """Under jit what does not fit raises the flag, on the host an error."""
    cache, model = empty(), Model()
    for step, (name, s, *rest) in enumerate(operations):
        arguments = [int32(s), *(np.asarray(x, np.int32) for x in rest)]
        if name == "assign":
            first = 1 + 3 * step
            marks = first + np.arange(3)
            arguments += [constant(marks, D), constant(-marks, V)]
            done = model.assign(s, rest[0], first)
        else:
            done = getattr(model, name)(s, *rest)
        after = UNDER_JIT[name](cache, *arguments)
        assert bool(after.overflow) == (not done)
        after = replace(after, overflow=cache.overflow)
        if done:
            on_host = getattr(paging, name)(cache, *arguments)
            jax.tree.map(np.testing.assert_array_equal, on_host, after)
        else:
            with pytest.raises(ValueError, match=rf"^{name}: .*\n.*\S"):
                getattr(paging, name)(cache, *arguments)
        cache = after
        check(cache, model)


def test_several_sequences_at_once_are_each_in_turn():
    lengths, tokens = int32([9, 1, 6]), normal(0, (B, 5, K, D))
    positions = int32([[4, 5, 6, 7, 8], [0, -1, -1, -1, -1], [5, 4, 3, 2, 1]])
    values = tokens[..., :V]
    once = paging.reserve(empty(), EVERY, lengths)
    once = paging.assign(once, EVERY, positions, tokens, values)
    turn = empty()
    for s in range(B):
        turn = paging.reserve(turn, s, int(lengths[s]))
        turn = paging.assign(turn, s, positions[s], tokens[s], values[s])
    jax.tree.map(np.testing.assert_array_equal, once, turn)
    assert once.lengths.tolist() == [9, 1, 6]
    gone = paging.erase(once, int32([2, 0]))
    turn = paging.erase(paging.erase(turn, 0), 2)
    jax.tree.map(np.testing.assert_array_equal, gone, turn)
    assert gone.lengths.tolist() == [0, 1, 0]


def test_of_several_under_jit_the_first_get_the_last_pages():
    cache = UNDER_JIT["reserve"](empty(), EVERY, int32([17, 16, 4]))
    assert cache.capacity.tolist() == [20, 16, 0]
    assert bool(cache.overflow)
    assert UNDER_JIT["reserve"](cache, 0, 20).capacity.tolist() == [20, 16, 0]
    assert bool(UNDER_JIT["reserve"](cache, 7, 1).overflow)
    idle = UNDER_JIT["reserve"](empty(), int32([-1, 1]), 4)
    assert idle.capacity.tolist() == [0, 4, 0]


def test_a_stack_of_caches_is_mapped():
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), empty())
    lengths = int32([3, 21])
    stack = jax.vmap(paging.reserve, (0, None, 0))(stack, 1, lengths)
    assert stack.overflow.tolist() == [False, True]
    tokens = normal(0, (2, 2, K, D))
    stack = jax.vmap(paging.assign, (0, None, None, 0, 0))(
        stack, 1, int32([0, 1]), tokens, tokens[..., :V]
    )
    one = paging.reserve(empty(), 1, 3)
    one = paging.assign(one, 1, int32([0, 1]), tokens[0], tokens[0, ..., :V])
    first = jax.tree.map(lambda x: x[0], stack)
    jax.tree.map(np.testing.assert_array_equal, first, one)
    assert not stack.keys[1].any()


# --- attention over pages -------------------------------------------------------------

S = 11  # logical keys: the last block is ragged, sequences may be longer


@dataclass(frozen=True)
class Case:
    queries: int
    mask: Any = None
    score: Any = None
    heads: int | None = None


def _alibi(slopes, table):
    return lambda s, b, h, q, k: s - slopes[h] * (k - 3).astype(s.dtype)


def _relative(slopes, table):
    return lambda s, b, h, q, k: s + table[q - k + S] * slopes[h]


def _soft_cap(slopes, table):
    return lambda s, b, h, q, k: 2.0 * jnp.tanh(s / 2.0) + table[k]


def _causal(offset, ids):
    return lambda b, h, q, k: q + offset[b] >= k


def _window(offset, ids):
    return lambda b, h, q, k: abs(q + offset[b] - k) < 2 + h


def _document(offset, ids):
    return lambda b, h, q, k: ids[b, q] == ids[b, k]


CASES = {
    "everything": Case(2),
    "decode_alibi": Case(1, _causal, _alibi),
    "prefill_relative": Case(6, _causal, _relative),
    "window_by_head": Case(5, _window, _soft_cap, H),
    "documents": Case(6, _document, _relative),
}


def visible_to(case, offset, ids):
    factory = case.mask or (lambda *_: lambda b, h, q, k: k >= 0)
    return factory(offset, ids)


def scored_by(case, floats):
    return case.score and case.score(*floats)


def stored(lengths, order, k, v):
    """Tokens in pages in any order, after a life in which every page held NaN."""
    cache = paging.reserve(empty(), int32([0, 1]), int32([20, 16]))
    full = np.tile(np.arange(20, dtype=np.int32), (2, 1))
    full[1, 16:] = -1
    blow = jnp.full((2, 20, K, D), jnp.nan, cache.keys.dtype)
    cache = paging.assign(cache, int32([0, 1]), full, blow, blow[..., :V])
    cache = paging.erase(cache, int32([0, 1]))
    cache = paging.reserve(cache, EVERY, lengths // 2)
    rank = jnp.argsort(order).astype(jnp.int32)
    table = jnp.where(cache.page_table < 0, -1, rank[cache.page_table])
    inverse = cache.physical_to_logical[:, order]
    cache = replace(cache, page_table=table, physical_to_logical=inverse)
    cache = paging.reserve(cache, EVERY, lengths)
    t = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
    return paging.assign(cache, EVERY, jnp.where(t < lengths[:, None], t, -1), k, v)


def over_pages(case, implementation, cache, q, floats, offset, ids):
    mask = px.create_block_mask(
        visible_to(case, offset, ids), B, case.heads, case.queries, S,
        block_size=(4, SIZE),
    )  # fmt: skip
    score_mod = scored_by(case, floats)
    if score_mod is not None:
        score_mod = paging.convert_score_mod(cache, score_mod, kv_len=S)
    mask = paging.convert_block_mask(cache, mask)
    return px.flex_attention(
        q, cache.keys, cache.values, score_mod=score_mod, block_mask=mask,
        enable_gqa=True, implementation=implementation,
    )  # fmt: skip


def over_dense(case, arrays, floats, lengths, offset, ids):
    """The formula as one writes it, on whole arrays."""
    q, k, v = arrays
    k, v = (jnp.repeat(x[:, :S], H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * jnp.asarray(D**-0.5, q.dtype)
    shape = (B, H, case.queries, S)
    b, h, t, s = (
        jnp.arange(n, dtype=jnp.int32).reshape([n if i == j else 1 for j in range(4)])
        for i, n in enumerate(shape)
    )
    if case.score:
        scores = scored_by(case, floats)(scores, b, h, t, s)
    seen = visible_to(case, offset, ids)(b, h, t, s) & (s < lengths[b])
    seen = jnp.broadcast_to(seen, shape)
    scores = jnp.where(seen, scores, 0.0)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


STORED = jax.jit(stored)
DENSE = {name: jax.jit(partial(over_dense, case)) for name, case in CASES.items()}
OVER_PAGES = {
    (name, how): jax.jit(partial(over_pages, case, how))
    for name, case in CASES.items()
    for how in ("reference", "xla")
}


def drawn(case, lengths, offset, seed):
    """Queries and tokens, floats that mods capture, and integers."""
    shapes = (case.queries, H, D), (12, K, D), (12, K, V)
    arrays = tuple(normal(seed + i, (B, *shape)) for i, shape in enumerate(shapes))
    ids = np.sort(np.random.default_rng(seed).integers(0, 3, (B, S)), axis=1)
    floats = normal(seed, (H,)), normal(seed, (2 * S,))
    integers = (jnp.asarray(x, jnp.int32) for x in (lengths, offset, ids))
    return arrays, floats, *integers


@pytest.mark.slow
@given(
    lengths=st.tuples(*[st.integers(0, 12)] * B),
    order=st.permutations(range(PAGES)),
    offset=st.tuples(*[st.integers(0, 12)] * B),
    seed=st.integers(0, 9),
)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_pages_is_attention_over_the_dense_cache(
    name, lengths, order, offset, seed
):
    arguments = drawn(CASES[name], lengths, offset, seed)
    arrays, floats, lengths, offset, ids = arguments
    golden = in_float64(DENSE[name], *arguments)
    plain = DENSE[name](*arguments)
    cache = STORED(lengths, jnp.asarray(order, jnp.int32), *arrays[1:])
    assert not cache.overflow
    for how in ("reference", "xla"):
        out = OVER_PAGES[name, how](cache, arrays[0], floats, offset, ids)
        assert_error_rule(out, plain, golden)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gradients_reach_tokens_before_they_were_stored(implementation):
    case = CASES["prefill_relative"]
    arguments = drawn(case, (7, 12, 0), (1, 6, 3), seed=0)
    order = jnp.asarray([4, 7, 1, 0, 8, 3, 6, 2, 5], jnp.int32)

    def through_pages(arrays, floats, lengths, offset, ids):
        cache = stored(lengths, order, *arrays[1:])
        return over_pages(case, implementation, cache, arrays[0], floats, offset, ids)

    def gradients(attend):
        def loss(arrays, floats, *integers):
            return jnp.sum(jnp.sin(attend(arrays, floats, *integers) + 0.5))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    dense = gradients(partial(over_dense, case))
    golden, plain = in_float64(dense, *arguments), dense(*arguments)
    assert_error_rule(gradients(through_pages)(*arguments), plain, golden)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_batch_may_be_any_sequences_in_any_order_and_idle_places(implementation):
    case = CASES["decode_alibi"]
    arguments = drawn(case, (7, 12, 5), (6, 9, 4), seed=3)
    (q, *tokens), floats, lengths, offset, ids = arguments
    cache = STORED(lengths, jnp.arange(PAGES, dtype=jnp.int32), *tokens)
    every = OVER_PAGES["decode_alibi", implementation](cache, q, floats, offset, ids)
    batch = int32([2, -1, 0, 2])

    mask = px.create_block_mask(
        _causal(offset[batch], ids), 4, None, 1, S, block_size=(1, SIZE)
    )
    mask = paging.convert_block_mask(cache, mask, sequences=batch)
    score_mod = paging.convert_score_mod(
        cache, _alibi(*floats), sequences=batch, kv_len=S
    )
    out = px.flex_attention(
        q[batch], cache.keys, cache.values, score_mod=score_mod, block_mask=mask,
        enable_gqa=True, implementation=implementation,
    )  # fmt: skip
    np.testing.assert_allclose(out[np.array([0, 2, 3])], every[np.array([2, 0, 2])], atol=1e-6)  # fmt: skip
    assert not out[1].any()


@given(
    lengths=st.tuples(*[st.integers(0, 12)] * B),
    order=st.permutations(range(PAGES)),
    offset=st.tuples(*[st.integers(0, 12)] * B),
)
def test_listed_pages_hold_whatever_a_query_sees_and_full_ones_nothing_else(
    lengths, order, offset
):
    tokens = [jnp.zeros((B, 12, K, n)) for n in (D, V)]
    lengths, order, offset = (jnp.asarray(x, jnp.int32) for x in (lengths, order, offset))  # fmt: skip
    cache = STORED(lengths, order, *tokens)
    converted, visible, position = listed(cache, offset)
    visible = np.asarray(visible)[:, None]
    position = np.asarray(position)
    assert position.min() >= 0
    assert position.max() < S
    tiles = np.zeros((B, 1, 2, 4, PAGES, SIZE), bool)
    tiles.reshape(B, 1, 8, PAGES * SIZE)[:, :, :6] = visible
    some = tiles.any(axis=(3, 5))
    every = tiles[:, :, :, :2].all(axis=(3, 5))  # of the queries both rows have
    lists = {}
    for transposed in (False, True):
        num, indices, full_num, full_indices = converted.lists(transposed=transposed)
        for kind, n, i in (("partial", num, indices), ("full", full_num, full_indices)):
            found = np.zeros(i.shape, bool)
            for place in np.ndindex(n.shape):
                named = np.asarray(i[place])[: n[place]].tolist()
                assert named == sorted(set(named))
                found[place][named] = True
            lists[kind, transposed] = found.swapaxes(2, 3) if transposed else found
    for kind in ("partial", "full"):
        np.testing.assert_array_equal(lists[kind, True], lists[kind, False])
    partial, full = lists["partial", False], lists["full", False]
    assert not (partial & full).any()
    assert not (some & ~partial & ~full).any()
    assert not (full & ~every).any()
    unowned = np.asarray(cache.physical_to_logical)[:, None, None] < 0
    assert not ((partial | full) & unowned).any()


@jax.jit
def listed(cache, offset):
    """A converted causal mask, what it sees by rows, and positions mods are asked."""
    logical = px.create_block_mask(
        _causal(offset, None), B, None, 6, S, block_size=(4, SIZE)
    )
    b, t, rows = (jnp.arange(n, dtype=jnp.int32) for n in (B, 6, PAGES * SIZE))
    mod = paging.convert_mask_mod(cache, _causal(offset, None), kv_len=S)
    over_rows = jax.vmap(mod, (None, None, None, 0))
    over_queries = jax.vmap(over_rows, (None, None, 0, None))
    visible = jax.vmap(over_queries, (0, None, None, None))(b, jnp.int32(0), t, rows)
    positions = paging._positions("listed", cache, None, S)
    position_of = jax.vmap(jax.vmap(positions, (None, 0)), (0, None))
    return paging.convert_block_mask(cache, logical), visible, position_of(b, rows)[0]


def test_a_mask_of_lists_alone_keeps_its_lists():
    """The mask_mod of a mask from lists does not know what they leave out."""
    case = Case(4, lambda offset, ids: lambda b, h, q, k: (q >= 0) & (k // SIZE != 1))
    arguments = drawn(case, (7, 11, 5), (0, 0, 0), seed=1)
    (q, *tokens), _, lengths, *_ = arguments
    order = jnp.asarray([3, 1, 8, 0, 2, 7, 4, 6, 5], jnp.int32)
    cache = STORED(lengths, order, *tokens)
    logical = px.BlockMask.from_kv_blocks(
        jnp.asarray([[[2]]], jnp.int32), jnp.asarray([[[[2, 0, 1]]]], jnp.int32),
        block_size=(4, SIZE), seq_lengths=(4, S),
    )  # fmt: skip
    converted = paging.convert_block_mask(cache, logical)
    assert converted.lists_decide
    out = px.flex_attention(
        q, cache.keys, cache.values, enable_gqa=True, implementation="xla",
        block_mask=converted,
    )  # fmt: skip
    np.testing.assert_allclose(out, over_dense(case, *arguments), atol=1e-5)


def test_a_full_block_stays_full_where_its_page_is():
    cache = paging.reserve(empty(), EVERY, 12)
    tokens = jnp.ones((B, 12, K, D))
    t = np.tile(np.arange(12, dtype=np.int32), (B, 1))
    t[1, 6:] = -1
    cache = paging.assign(cache, EVERY, t, tokens, tokens[..., :V])
    mask = px.create_block_mask(
        lambda b, h, q, k: k >= 0, None, None, 4, 12, block_size=(4, SIZE)
    )
    mask = paging.convert_block_mask(cache, mask)
    assert mask.shape == (B, 1, 4, PAGES * SIZE)
    assert mask.full_kv_num_blocks[:, 0, 0].tolist() == [3, 1, 3]
    assert mask.kv_num_blocks[:, 0, 0].tolist() == [0, 1, 0]


def test_a_full_block_is_not_asked_where_its_page_is_not_full():
    """with_mask_mod speaks of partial blocks alone: the lists decide."""
    t = np.tile(np.arange(10, dtype=np.int32), (B, 1))
    tokens = normal(3, (B, 10, K, D))
    cache = paging.assign(
        paging.reserve(empty(), EVERY, 10), EVERY, t, tokens, tokens[..., :V]
    )
    full = px.create_block_mask(
        lambda b, h, q, k: k >= 0, None, None, 4, 12, block_size=(4, SIZE)
    )
    attend = partial(px.flex_attention, normal(4, (B, 4, H, D)), enable_gqa=True)
    over_pages = (
        attend(cache.keys, cache.values, block_mask=paging.convert_block_mask(cache, x))
        for x in (full, full.with_mask_mod(lambda b, h, q, k: (q < 0) & (k < 0)))
    )
    for out in over_pages:
        np.testing.assert_allclose(out, attend(tokens, tokens[..., :V]), atol=1e-5)


def newest(q, k, v):
    """Attention of one query to every key, by head, in NumPy."""
    k, v = (np.repeat(x, H // K, axis=1) for x in (k, v))
    weights = np.exp(np.einsum("thd,shd->hts", q, k) * D**-0.5)
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_serving_loop_is_traced_once_and_writes_in_place(implementation):
    """Prefill two of three places, decode, end one, let another begin."""
    lives = [{0: 20}, {1: 9, 12: 6}, {5: 8}]  # begin: tokens
    traces = 0

    def step(cache, ended, active, q, k, v):
        nonlocal traces
        traces += 1
        for s in range(B):
            erased = paging.erase(cache, s)
            cache = jax.tree.map(lambda x, y, e=ended[s]: jnp.where(e, y, x), cache, erased)  # fmt: skip
        position = jnp.where(active, cache.lengths, -1)
        cache = paging.reserve(cache, EVERY, position + 1)
        cache = paging.assign(cache, EVERY, position[:, None], k, v)
        mask = px.create_block_mask(
            lambda b, h, q, k: q + position[b] >= k, B, None, 1, SLOTS * SIZE,
            block_size=(1, SIZE),
        )  # fmt: skip
        out = px.flex_attention(
            q, cache.keys, cache.values, enable_gqa=True,
            block_mask=paging.convert_block_mask(cache, mask),
            implementation=implementation,
        )  # fmt: skip
        return cache, out

    step = jax.jit(step, donate_argnums=0)
    cache, history, orders = empty(), {}, set()
    for time in range(18):
        running = {
            s: begin
            for s, life in enumerate(lives)
            for begin in life
            if begin <= time < begin + life[begin]
        }
        active = np.array([s in running for s in range(B)])
        ended = np.array([time in life for life in lives])
        q, k, v = (
            normal(3 * time + i, (B, 1, *shape))
            for i, shape in enumerate([(H, D), (K, D), (K, V)])
        )
        before = cache
        if time > 1:
            with compilations() as compiled:
                cache, out = step(cache, ended, active, q, k, v)
            assert not compiled
        else:
            cache, out = step(cache, ended, active, q, k, v)
        assert before.keys.is_deleted()
        assert before.values.is_deleted()
        for s in range(B):
            if ended[s]:
                history[s] = []
            if active[s]:
                history[s].append((k[s], v[s]))
                alone = newest(
                    q[s], *(np.concatenate(x) for x in zip(*history[s], strict=True))
                )
                np.testing.assert_allclose(out[s], alone, atol=1e-5)
        table = np.asarray(cache.page_table)
        orders |= {tuple(row[row >= 0]) for row in table}
    assert traces == 1
    assert not cache.overflow
    assert any(list(x) != sorted(x) for x in orders)  # pages out of order were met


# --- refusals -------------------------------------------------------------------------


def some():
    return paging.reserve(empty(), int32([0, 1]), int32([5, 17]))


def mask(mask_mod=lambda b, h, q, k: q >= k, batch=None, page_size=SIZE):
    return px.create_block_mask(mask_mod, batch, None, 4, 12, block_size=(4, page_size))


T = np.zeros((2, 3), np.int32)
TOKENS = np.zeros((2, 3, K, D), np.float32), np.zeros((2, 3, K, V), np.float32)
REFUSALS = {
    "out_of_pages": (
        lambda: paging.reserve(some(), int32([0, 2]), int32([9, 8])),
        ValueError,
        r"asked for 3 pages of 4 tokens for sequences \[0, 2\], 2 free of 9.\nErase",
    ),
    "max_pages": (
        lambda: paging.reserve(some(), 2, 24),
        ValueError,
        "6 pages of 4 tokens for sequence 2, one sequence may have 5.\nCreate",
    ),
    "no_such_sequence": (
        lambda: paging.reserve(some(), 3, 1),
        ValueError,
        "sequence 3, the cache holds 3.\nPass indices from 0 to 2",
    ),
    "erase_no_such_sequence": (
        lambda: paging.erase(some(), -1), ValueError, "erase: asked for sequence -1",
    ),
    "unequal_lengths": (
        lambda: paging.reserve(some(), EVERY, [1, 2]), ValueError, "3 .* but 2 lengths",
    ),
    "float_length": (
        lambda: paging.reserve(some(), 0, 1.5), TypeError, r"length .* found f32\[\]",
    ),
    "unreserved": (
        lambda: paging.assign(some(), int32([-1, 0]), int32([[-1] * 3, [7, 8, 1]]), *TOKENS),
        ValueError,
        r"position 8 of sequence 0 has no page, 8 .*\n.*reserve\(cache, 0, 9\)",
    ),
    "tokens_shape": (
        lambda: paging.assign(some(), int32([0, 1]), T[:, :2], *TOKENS),
        ValueError,
        r"assign: keys \[2, 3, 2, 8\] do not fit",
    ),
    "tokens_dtype": (
        lambda: paging.assign(empty(dtype=jnp.bfloat16), int32([0, 1]), T, *TOKENS),
        TypeError,
        "keys are float32, the cache holds bfloat16",
    ),
    "page_size": (
        lambda: paging.convert_block_mask(some(), mask(page_size=8)),
        ValueError,
        r"blocks of 8 keys, a page holds 4.\n.*block_size=\(4, 4\)",
    ),
    "mask_batch": (
        lambda: paging.convert_block_mask(some(), mask(batch=2)),
        ValueError,
        "for 2 sequences, asked for 3.\n.*B=3",
    ),
    "mask_reads_b": (
        lambda: paging.convert_block_mask(some(), mask(lambda b, h, q, k: q >= b)),
        ValueError,
        "reads b, .*B=None for 3",
    ),
    "no_mask_mod": (
        lambda: paging.convert_block_mask(some(), replace(mask(), mask_mod=None)),
        ValueError,
        "has no mask_mod",
    ),
    "no_mask": (
        lambda: paging.convert_block_mask(some(), lambda b, h, q, k: q >= k),
        TypeError,
        "found function",
    ),
    "max_pages_of_store": (
        lambda: empty(max_pages=10), ValueError, "max_pages is 10, .* 9 pages",
    ),
    "no_pages": (lambda: empty(max_pages=0), ValueError, "'max_pages': 0"),
    "integer_dtype": (lambda: empty(dtype=jnp.int8), TypeError, "found int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_was_found_and_what_to_do(name):
    call, kind, text = REFUSALS[name]
    with pytest.raises(kind, match=text):
        call()
