"""Laws of what block masks can do: made from lists, selected from, cut, grown, drawn."""

import sys

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import compilations
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels.attention.block_mask import BlockMask, create_mask


matplotlib.use("agg")

B, H, D = 2, 3, 4
SHAPES = [((24, 32), (8, 8)), ((21, 30), (8, 16))]
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def random_table(seed, lengths, sizes, batch=B, heads=H):
    """Blocks that are empty, partial or full, with noise in the partial ones."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // size) for n, size in zip(lengths, sizes, strict=True)]
    share = rng.choice([0.0, 0.3, 1.0], (batch, heads, *counts))
    share = share.repeat(sizes[0], 2).repeat(sizes[1], 3)
    return (
        rng.random((batch, heads, *lengths)) < share[:, :, : lengths[0], : lengths[1]]
    )


def lookup(table):
    table = jnp.asarray(table)
    return lambda b, h, q, k: table[b, h, q, k]


def make(table, sizes, **options):
    return px.create_block_mask(
        lookup(table), *table.shape, block_size=sizes, **options
    )


def classified(table, sizes):
    """Which blocks hold something visible, and which nothing masked, by hand."""
    (q, k), (m, n) = table.shape[2:], sizes
    padded = np.pad(table, ((0, 0), (0, 0), (0, -q % m), (0, -k % n)))
    blocks = padded.reshape(*table.shape[:2], -(-q // m), m, -(-k // n), n)
    return blocks.any(axis=(3, 5)), blocks.all(axis=(3, 5))


def blocks(mask, transposed=False):
    """Partial and full blocks of the lists, which must be ascending and unique."""
    num, indices, full_num, full_indices = map(
        np.asarray, mask.lists(transposed=transposed)
    )
    found = []
    for n, columns in ((num, indices), (full_num, full_indices)):
        matrix = np.zeros(columns.shape, bool)
        for place in np.ndindex(n.shape):
            named = columns[place][: n[place]]
            assert list(named) == sorted(set(named))
            matrix[place][named] = True
        found.append(matrix)
    return found


def assert_same_blocks(one, other):
    assert one.seq_lengths == other.seq_lengths
    assert one.block_size == other.block_size
    for transposed in (False, True):
        for x, y in zip(
            blocks(one, transposed), blocks(other, transposed), strict=True
        ):
            np.testing.assert_array_equal(x, y)
    for x, y in zip(blocks(one), blocks(one, transposed=True), strict=True):
        np.testing.assert_array_equal(x, np.swapaxes(y, 2, 3))


def seen(mask):
    return np.asarray(create_mask(mask.visible, *mask.shape))


def arrays(lengths, batch=B, heads=H):
    rng = np.random.default_rng(0)
    shapes = [(batch, lengths[n], heads, D) for n in (0, 1, 1)]
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def attend(arrays, mask):
    return px.flex_attention(*arrays, block_mask=mask, implementation="xla")


def by_hand(arrays, table):
    """Attention in float64 where a table of bools says True."""
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    s = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D)
    weights = np.where(table, np.exp(s), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    return np.einsum("bhts,bshd->bthd", weights, v)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


# --- lists and matrices ---------------------------------------------------------------


def from_lists(lists, mask_mod, sizes, lengths):
    return BlockMask.from_kv_blocks(
        *lists, block_size=sizes, mask_mod=mask_mod, seq_lengths=lengths
    )


WAYS = {False: from_lists, True: jax.jit(from_lists, static_argnums=(2, 3))}


@given(seed=seeds, shape=shapes, separate=st.booleans(), traced=st.booleans())
def test_a_mask_from_the_lists_of_a_mask_is_that_mask(seed, shape, separate, traced):
    lengths, sizes = shape
    table = random_table(seed, lengths, sizes)
    mask = make(table, sizes, separate_full_blocks=separate)

    lists = [getattr(mask, name) for name in LISTS]
    rebuilt = WAYS[traced](lists, mask.mask_mod, sizes, lengths)
    assert_same_blocks(rebuilt, mask)
    np.testing.assert_array_equal(seen(rebuilt), table)


@given(seed=seeds, shape=shapes, traced=st.booleans())
def test_lists_in_any_order_hide_what_they_leave_out(seed, shape, traced):
    """Shuffled lists with junk behind their end, against a matrix of blocks."""
    lengths, sizes = shape
    rng = np.random.default_rng(seed)
    table = random_table(seed, lengths, sizes)
    counts = classified(table, sizes)[0].shape
    states = rng.integers(0, 3, counts)
    lists = []
    for state in (1, 2):
        order = np.argsort(rng.random(counts) - 2 * (states == state), axis=-1)
        lists += [(states == state).sum(-1, dtype=np.int32), order.astype(np.int32)]
    expanded = states.repeat(sizes[0], 2).repeat(sizes[1], 3)
    expanded = expanded[:, :, : lengths[0], : lengths[1]]
    table |= expanded == 2  # a full block promises that mask_mod is True

    mask_mod = make(table, sizes).mask_mod
    mask = WAYS[traced](lists, mask_mod, sizes, lengths)
    partial, full = blocks(mask)
    np.testing.assert_array_equal(partial | full, states > 0)
    whole = classified(np.ones(table.shape, bool), sizes)[1]
    np.testing.assert_array_equal(full, (states == 2) & whole)
    expected = table & (expanded > 0)
    np.testing.assert_array_equal(seen(mask), expected)
    assert_close(attend(arrays(lengths), mask), by_hand(arrays(lengths), expected))


def test_without_a_mask_mod_listed_blocks_are_seen_and_the_ragged_end_is_not():
    num = np.array([[[1, 2]]], np.int32)
    indices = np.array([[[[1, 0], [1, 0]]]], np.int32)
    lists = (np.zeros_like(num), np.zeros_like(indices), num, indices)
    mask = BlockMask.from_kv_blocks(*lists, block_size=8, seq_lengths=(13, 11))
    expected = np.zeros((1, 1, 13, 11), bool)
    expected[:, :, :, 8:] = expected[:, :, 8:] = True
    np.testing.assert_array_equal(seen(mask), expected)
    assert int(mask.full_kv_num_blocks.sum()) == 0
    inputs = arrays((13, 11))
    assert_close(attend(inputs, mask), by_hand(inputs, expected))
    whole = BlockMask.from_kv_blocks(num, indices, block_size=8)
    assert whole.shape == (1, 1, 16, 16)


def test_lists_for_all_of_the_batch_may_have_a_mask_mod_for_each_sequence():
    mask = BlockMask.from_kv_blocks(
        np.full((1, 1, 2), 2, np.int32),
        np.tile(np.arange(2, dtype=np.int32), (1, 1, 2, 1)),
        block_size=8,
        mask_mod=lambda b, h, q, k: q >= k * (b + 1),
    )
    inputs = arrays((16, 16))
    q, k = np.arange(16)[:, None], np.arange(16)[None]
    table = np.stack([q >= k, q >= 2 * k])[:, None]
    assert_close(attend(inputs, mask), by_hand(inputs, table))


def test_lists_may_be_narrower_than_the_keys():
    """As when each row takes its few best blocks."""
    num, indices = np.ones((1, 1, 2), np.int32), np.array([[[[3], [1]]]], np.int32)
    mask = BlockMask.from_kv_blocks(num, indices, block_size=8, seq_lengths=(16, 32))
    assert mask.to_dense().tolist() == [[[[0, 0, 0, 1], [0, 1, 0, 0]]]]
    assert mask.q_indices.shape == (1, 1, 4, 2)


@given(seed=seeds, shape=shapes)
def test_to_dense_sparsity_and_numel_count_the_dense_mask(seed, shape):
    lengths, sizes = shape
    table = random_table(seed, lengths, sizes)
    mask = make(table, sizes)
    np.testing.assert_array_equal(
        create_mask(lookup(table), B, H, *lengths), table, strict=True
    )
    some, _ = classified(table, sizes)
    np.testing.assert_array_equal(mask.to_dense(), some.astype(np.int32), strict=True)
    assert mask.sparsity() == pytest.approx(100 * (1 - some.mean()))
    assert isinstance(mask.sparsity(), float)
    assert mask.numel() == table.size


# --- indexing -------------------------------------------------------------------------


def index_of(n):
    integers = st.integers(-n, n - 1)
    lists = st.lists(integers, min_size=1, max_size=3)
    slices = st.slices(n).filter(lambda s: len(range(n)[s]) > 0)
    return st.one_of(
        integers, integers.map(np.int32), slices, lists, lists.map(np.array)
    )


def taken(index, n):
    return np.arange(n)[index].reshape(-1)


@given(seed=seeds, data=st.data())
def test_a_sliced_mask_is_the_mask_of_the_slice(seed, data):
    (lengths, sizes), counts = ((24, 32), (8, 8)), (B, H, 3)
    table = random_table(seed, lengths, sizes)
    n = data.draw(st.integers(1, 3))
    index = tuple(data.draw(index_of(size)) for size in counts[:n])
    picks = [taken(i, size) for i, size in zip(index, counts, strict=False)]
    picks += [np.arange(size) for size in counts[n:]]
    queries = (picks[2][:, None] * sizes[0] + np.arange(sizes[0])).reshape(-1)
    selected = table[np.ix_(picks[0], picks[1], queries)]
    mask = make(table, sizes)
    assert_same_blocks(mask[index if n > 1 else index[0]], make(selected, sizes))
    assert mask[index].shape == selected.shape


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_attention_on_a_slice_is_the_slice_of_attention(implementation):
    lengths, sizes = (21, 30), (8, 16)
    table = random_table(5, lengths, sizes)
    mask, (query, key, value) = make(table, sizes), arrays(lengths)
    old = mask.mask_mod

    def run(query, key, value, mask):
        return px.flex_attention(
            query, key, value, block_mask=mask, implementation=implementation
        )

    expected = run(query, key, value, mask)[1:, 8:, :2]
    sliced = mask[1, :2, 1:].with_mask_mod(lambda b, h, q, k: old(b + 1, h, q + 8, k))
    actual = run(query[1:, 8:, :2], key[1:, :, :2], value[1:, :, :2], sliced)
    assert_close(actual, expected)
    assert sliced.seq_lengths == (13, 30)


def test_a_traced_index_selects_like_a_concrete_one_without_compiling_again():
    table = random_table(1, (24, 32), (8, 8))
    mask = make(table, (8, 8))
    select = jax.jit(lambda mask, b, q: mask[b, :, q])
    rows = np.array([2, 0], np.int32)
    assert_same_blocks(select(mask, np.int32(-1), rows), mask[-1, :, rows])
    with compilations() as compiled:
        again = select(mask, np.int32(0), rows[::-1])
    assert not compiled
    assert_same_blocks(again, mask[0, :, [0, 2]])


def test_the_ragged_last_block_must_stay_last():
    mask = make(random_table(2, (21, 30), (8, 16)), (8, 16))
    assert mask[:, :, [1, 0]].seq_lengths == (16, 30)
    assert mask[:, :, [0, -1]].seq_lengths == (13, 30)
    with pytest.raises(ValueError, match=r"\[2, 0\].*block 2 is shorter"):
        mask[:, :, ::-2]
    with pytest.raises(ValueError, match="traced query blocks of 21"):
        jax.jit(lambda mask, q: mask[:, :, q])(mask, jnp.int32(0))


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ((0, 0, 0, 0), r"found 4 indices.*mask\[b, h, q_block\].\n.*adjust"),
        (2, "batch index 2 is out of range: the mask has 2, from -2 to 1.\n"),
        ((0, -4), "head index -4 is out of range: the mask has 3"),
        ((0, 0, [0, 3]), "query block 3 is out of range"),
        (slice(2, None), r"slice\(2, None, None\) selects none of 2 .* batch index"),
        (..., "must be an integer, a slice .*found ellipsis"),
        (None, "found NoneType"),
        (True, "found bool True"),
        (1.0, "found float"),
        ([[0]], "of one dimension, found list"),
    ],
)
def test_an_index_that_selects_nothing_sensible_is_refused(index, text):
    mask = make(random_table(0, (24, 32), (8, 8)), (8, 8))
    with pytest.raises(IndexError, match=text):
        mask[index]


def test_a_sliced_mask_refuses_to_run_until_it_gets_a_mask_mod():
    mask = make(random_table(0, (24, 32), (8, 8)), (8, 8))[0]
    for use in (
        lambda: attend(arrays((24, 32), batch=1), mask),
        lambda: create_mask(mask.visible, *mask.shape),
        lambda: jax.jit(attend)(arrays((24, 32), batch=1), mask),
    ):
        with pytest.raises(
            ValueError, match=r"no mask_mod: it was indexed(.|\n)*with_m"
        ):
            use()
    with pytest.raises(TypeError, match=r"expected 4 .*got 2"):
        mask.with_mask_mod(lambda q, k: q >= k)


# --- other lengths --------------------------------------------------------------------


ADJUST = jax.jit(BlockMask.adjust, static_argnums=(1, 2))


@given(
    seed=seeds,
    shape=shapes,
    lengths=st.sampled_from([(24, 30), (16, 32), (13, 9), (40, 5), (23, 40)]),
    separate=st.booleans(),
    traced=st.booleans(),
)
def test_an_adjusted_mask_is_the_mask_of_the_new_lengths(
    seed, shape, lengths, separate, traced
):
    (old, sizes) = shape
    table = random_table(seed, (40, 40), sizes)
    mask = px.create_block_mask(
        lookup(table), B, H, *old, block_size=sizes, separate_full_blocks=separate
    )
    adjusted = (ADJUST if traced else BlockMask.adjust)(mask, *lengths)
    assert adjusted.shape == (B, H, *lengths)
    cut = table[:, :, : lengths[0], : lengths[1]]
    np.testing.assert_array_equal(seen(adjusted), cut)
    some, every = classified(cut, sizes)
    partial, full = blocks(adjusted)
    assert not (full & ~every).any()
    assert not (some & ~(partial | full)).any()
    assert not (partial & full).any()
    if separate:
        np.testing.assert_array_equal(full, every)
    assert_same_blocks(adjusted, adjusted)  # by row as by column
    if any(new > n for new, n in zip(lengths, old, strict=True)):
        assert_same_blocks(adjusted, make(cut, sizes))


@pytest.mark.parametrize("lengths", [(16, 17), (30, 30)])
def test_attention_with_an_adjusted_mask_is_attention_with_a_new_one(lengths):
    sizes = (8, 16)
    table = random_table(3, (40, 40), sizes)
    mask = px.create_block_mask(lookup(table), B, H, 21, 30, block_size=sizes)
    inputs = arrays(lengths)
    expected = by_hand(inputs, table[:, :, : lengths[0], : lengths[1]])
    assert_close(attend(inputs, mask.adjust(*lengths)), expected)


def test_a_mask_of_another_length_is_refused_with_what_would_adjust_it():
    mask = make(random_table(0, (24, 32), (8, 8)), (8, 8))
    with pytest.raises(
        ValueError, match=r"24, 32\).*\nPass block_mask.adjust\(20, 32\)"
    ):
        attend(arrays((20, 32)), mask)
    with pytest.raises(
        ValueError, match=r"made for.*\nMake the mask with create_block"
    ):
        attend(arrays((24, 32), batch=3), mask)


def test_a_mask_whose_lists_decide_is_cut_but_does_not_grow():
    mask = make(random_table(0, (24, 32), (8, 8)), (8, 8))
    for given_lists in (mask[0], mask.with_mask_mod(mask.mask_mod)):
        cut = given_lists.adjust(16, 20)
        np.testing.assert_array_equal(
            cut.to_dense(), np.asarray(given_lists.to_dense())[:, :, :2, :3]
        )
        with pytest.raises(
            ValueError, match=r"\(24, 40\).*they say nothing(.|\n)*Make"
        ):
            given_lists.adjust(24, 40)
    with pytest.raises(ValueError, match=r"adjust: sizes must be .*{'q_len': 0}"):
        mask.adjust(0, 8)
    with pytest.raises(
        TypeError, match="adjust: kv_len must be an integer, found float"
    ):
        mask.adjust(8, 8.0)


def test_blocks_that_were_full_stay_unasked_when_they_become_ragged():
    """What with_mask_mod gave is for partial blocks alone."""

    def quarter(b, h, q, k):
        return (q < 4) & (k < 4)

    def diagonal(b, h, q, k):
        return q == k

    mask = px.create_block_mask(quarter, None, None, 8, 8, block_size=4)
    partial = px.BlockMask.from_kv_blocks(
        jnp.asarray([[[1, 1]]]), jnp.asarray([[[[1, 0], [1, 0]]]]),
        mask.full_kv_num_blocks, mask.full_kv_indices, block_size=4,
    ).with_mask_mod(diagonal)  # fmt: skip
    q, k = np.arange(7)[:, None], np.arange(3)[None]
    cut = partial.adjust(7, 3)
    assert int(cut.full_kv_num_blocks.sum()) == 0
    seen = [[bool(cut.visible(0, 0, i, j)) for j in range(3)] for i in range(7)]
    np.testing.assert_array_equal(seen, (q < 4) & (k < 4))


# --- a pytree -------------------------------------------------------------------------


def test_every_way_to_make_a_mask_is_an_argument_of_jit_by_structure():
    sizes = (8, 8)

    def ways(seed):
        mask = make(random_table(seed, (24, 32), sizes), sizes)
        lists = (getattr(mask, name) for name in LISTS)
        again = BlockMask.from_kv_blocks(*lists, block_size=8, mask_mod=mask.mask_mod)
        cut = mask[0].with_mask_mod(lambda b, h, q, k: q >= k)
        return mask, again, mask[0], cut, mask.adjust(20, 32)

    count = jax.jit(lambda masks: [jnp.sum(mask.to_dense()) for mask in masks])
    first, second = ways(0), ways(1)
    expected = [int(np.sum(mask.to_dense())) for mask in second]
    count(first)
    with compilations() as compiled:
        found = count(second)
    assert not compiled
    assert [int(n) for n in found] == expected
    shapes = jax.eval_shape(lambda masks: [mask[0] for mask in masks], second)
    assert [mask.shape[0] for mask in shapes] == [1] * len(second)


def test_masks_of_a_stack_are_used_one_at_a_time():
    masks = [make(random_table(seed, (24, 32), (8, 8)), (8, 8)) for seed in range(3)]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *masks)

    def selected(mask):
        return mask[0].adjust(16, 32).to_dense()

    expected = np.stack([selected(mask) for mask in masks])
    np.testing.assert_array_equal(jax.vmap(selected)(stack), expected)
    _, scanned = jax.lax.scan(lambda c, mask: (c, selected(mask)), None, stack)
    np.testing.assert_array_equal(scanned, expected)
    for use in (
        lambda: stack.shape,
        lambda: stack.numel(),
        lambda: stack[0],
        lambda: stack.to_dense(),
        lambda: stack.sparsity(),
        lambda: stack.adjust(16, 16),
        lambda: stack.visible(0, 0, 0, 0),
        lambda: stack.plot(),
    ):
        with pytest.raises(ValueError, match=r"i32\[3,2,3,3\]: a stack of masks.\nMap"):
            use()
    assert "i32[3,2,3,3]" in str(stack)


# --- pictures -------------------------------------------------------------------------


def test_a_drawing_shows_empty_partial_and_full_blocks():
    window = px.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k <= 12), None, None, 32, 32, block_size=8
    )
    assert str(window).splitlines() == [
        "BlockMask(shape=(1, 1, 32, 32), block_size=(8, 8), sparsity=43.8%)",
        "b=0, h=0",
        "░░",
        "░░░░",
        "░░░░░░",
        "  ░░░░░░",
        "██ full, ░░ partial, blank empty: each cell a block of 8 x 8",
    ]
    full = str(window.with_mask_mod(lambda *_: True).adjust(8, 8))
    assert full.splitlines()[2] == "░░"


def test_a_drawing_stays_small():
    mask = px.create_block_mask(
        lambda b, h, q, k: (q >= k) & (h < 5), 3, 6, 900, 1000, block_size=8
    )
    text = str(mask)
    assert "and 14 more: index the mask" in text
    assert "each cell 6 x 7 blocks of 8 x 8" in text
    assert len(text.splitlines()) == 1 + 4 * (1 + 19) + 1 + 1
    assert max(map(len, text.splitlines())) < 80
    assert text.splitlines()[10].startswith("█" * 12)


def test_repr_and_str_never_fail_and_never_read_a_traced_mask():
    mask = make(random_table(0, (24, 32), (8, 8)), (8, 8))
    short = "BlockMask(shape=(2, 3, 24, 32), block_size=(8, 8))"
    texts = []
    jax.jit(lambda mask: texts.extend([str(mask), repr(mask)]))(mask)
    abstract = jax.eval_shape(lambda mask: mask, mask)
    empty = jax.tree.map(lambda x: None, mask)
    assert texts == [short] * 2 == [str(abstract), repr(abstract)]
    assert repr(mask) == short
    assert repr(mask[0]) == f"{short[:-1].replace('(2,', '(1,')}, mask_mod=None)"
    assert "None" in str(empty)
    for method in (mask.sparsity, mask.plot):
        with pytest.raises(
            TypeError, match=r"not known: it is traced.*\n.*outside jax"
        ):
            jax.jit(lambda mask, name: getattr(mask, name)(), static_argnums=1)(
                mask, method.__name__
            )


@given(seed=seeds)
def test_a_plot_shows_the_blocks_of_one_head(seed):
    lengths, sizes = (21, 30), (8, 16)
    table = random_table(seed, lengths, sizes)
    figure, ax = plt.subplots()
    assert make(table, sizes).plot(b=-1, h=2, ax=ax) is ax
    some, every = (x[1, 2] for x in classified(table, sizes))
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), some.astype(int) + every)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key block", "query block")
    assert ax.get_title() == f"b = 1, h = 2: sparsity {100 * (1 - some.mean()):.1f} %"
    figure.canvas.draw()
    plt.close(figure)


def test_a_plot_makes_its_own_figure_and_refuses_a_head_that_is_not_there():
    mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    ax = mask.plot()
    assert ax.get_title() == "sparsity 25.0 %"
    plt.close("all")
    with pytest.raises(IndexError, match="head index 1 is out of range"):
        mask.plot(h=1)


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    mask = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(
        ImportError, match=r"matplotlib.*\n.*pip install pliax\[plots\]"
    ):
        mask.plot()


# --- refusals of lists ----------------------------------------------------------------


NUM = np.array([[[1, 2]]], np.int32)
INDICES = np.array([[[[1, 0], [0, 1]]]], np.int32)
BAD_LISTS = {
    "rank": (ValueError, r"kv_num_blocks must have 3 dimensions \(B, H, rows\).*\nAdd",
             (NUM[0], INDICES), {}),
    "rank of indices": (ValueError, "kv_indices must have 4 dimensions",
                        (NUM, INDICES[0]), {}),
    "dtype": (TypeError, r"kv_indices must be an int32 array, found a NumPy array int64",
              (NUM, INDICES.astype(np.int64)), {}),
    "lists": (TypeError, "kv_num_blocks must be an int32 array, found list",
              (NUM.tolist(), INDICES), {}),
    "rows": (ValueError, r"agree in \(B, H, rows\), found kv_num_blocks a NumPy",
             (NUM[:, :, :1], INDICES), {}),
    "half of full": (ValueError, "full_kv_num_blocks was given alone.\nPass both",
                     (NUM, INDICES, NUM), {}),
    "lengths": (ValueError, r"2 rows of at most 2 blocks, .*\(16, 32\).* 4 rows and 8 col",
                (NUM, INDICES), {"seq_lengths": (16, 32), "block_size": 4}),
    "no pair": (ValueError, "seq_lengths must be a pair, found 16",
                (NUM, INDICES), {"seq_lengths": 16}),
    "zero length": (ValueError, "from_kv_blocks: sizes must be .*{'q_len': 0}",
                    (NUM, INDICES), {"seq_lengths": (0, 8)}),
    "block size": (ValueError, "from_kv_blocks: block_size must be at least 1",
                   (NUM, INDICES), {"block_size": 0}),
    "too many": (ValueError, r"kv_num_blocks has 3 at \(0, 0, 1\), but 0 to 2 can be",
                 (NUM + 1, INDICES), {}),
    "outside": (ValueError, r"kv_indices has 2 at \(0, 0, 0, 0\), but columns are 0 to 1",
                (NUM, INDICES + 1), {}),
    "negative": (ValueError, "kv_indices has -1", (NUM, INDICES - 1), {}),
    "twice": (ValueError, r"2 at \(0, 0, 1, 0\), but a block is listed at most once",
              (NUM, INDICES * 0), {}),
    "partial and full": (ValueError, "listed at most once",
                         (NUM, INDICES, NUM, INDICES), {}),
    "mask_mod": (TypeError, "expected 4 .*got 1", (NUM, INDICES),
                 {"mask_mod": lambda b: True}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LISTS)
def test_from_kv_blocks_refuses(name):
    kind, text, lists, options = BAD_LISTS[name]
    with pytest.raises(kind, match=text):
        BlockMask.from_kv_blocks(*lists, **options)


def test_traced_lists_that_cannot_be_checked_are_read_leniently():
    """Twice counts once, outside is left out, partial and full is full."""
    mask = jax.jit(lambda *x: BlockMask.from_kv_blocks(*x, block_size=8))(
        np.array([[[2, 2]]], np.int32),
        np.array([[[[1, 1], [-1, 5]]]], np.int32),
        np.array([[[1, 0]]], np.int32),
        np.array([[[[1, 0], [0, 0]]]], np.int32),
    )
    partial, full = blocks(mask)
    assert not partial.any()
    np.testing.assert_array_equal(full, [[[[0, 1], [0, 0]]]])
