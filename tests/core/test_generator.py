"""The laws of Generator: positions, placement, transformations, children, doors."""

import copy
import itertools
import math
import pickle
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import TypeCheckError

import pliax as px
from pliax.core.generator import Generator
from pliax.core.random_stream import stream_at


COLLECTIVE = re.compile(
    r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    r"|collective-broadcast"
)
SHAPES = [(12,), (3, 4), (2, 2, 3)]
offsets = st.one_of(
    st.integers(0, 64),
    st.integers(2**32 - 16, 2**32 + 4),
    st.integers(0, 2**64 - 64),
    st.sampled_from([k * 2**32 - 8 for k in (1, 2, 2**31, 2**32 - 1)]),
)
seeds = st.integers(-(2**63), 2**64 - 1)
SCALAR_DRAWS = {
    "bits": lambda g, shape: g.bits(shape),
    "bits8": lambda g, shape: g.bits(shape, jnp.uint8),
    "uniform": lambda g, shape: g.uniform(shape, minval=-0.3, maxval=2.7),
    "bfloat16": lambda g, shape: g.uniform(shape, jnp.bfloat16),
    "randint": lambda g, shape: g.randint(shape, -5, 1000),
    "int8": lambda g, shape: g.randint(shape, 0, 100, jnp.int8),
    "bernoulli": lambda g, shape: g.bernoulli(0.3, shape),
    "high": lambda g, shape: g.bernoulli(0.3, shape, "high"),
    "normal": lambda g, shape: g.normal(shape),
    "complex": lambda g, shape: g.normal(shape, jnp.complex64),
}
INEXACT = ("normal", "complex")


def at(seed, offset):
    return Generator.from_key(words(seed), offset=offset)


def collectives(compiled):
    return COLLECTIVE.findall(compiled.as_text())


def words(number):
    return np.array([number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF], np.uint32)


def ulp(x, y):
    """The largest distance of two float32 arrays, in units of the last place."""
    lines = (np.asarray(a).view(np.int32).astype(np.int64) for a in (x, y))
    ordered = (np.where(a < 0, -(2**31) - a, a) for a in lines)
    return np.max(np.abs(np.subtract(*ordered)), initial=0)


def same(name, x, y):
    if name in INEXACT:
        assert x.shape == y.shape and ulp(x, y) <= 4
    else:
        np.testing.assert_array_equal(x, y)


def threefry(key, counter):
    """Salmon et al. 2011, section 4: the oracle, on numpy uint32."""
    x0, x1 = (np.asarray(c, np.uint32) for c in counter)
    schedule = [*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for block in range(5):
        for r in rotations[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(r) | x1 >> np.uint32(32 - r)) ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def stream(seed, offset, n):
    """Words offset, ..., offset + n - 1 by the oracle, as the two outputs of T."""
    position = np.uint64(offset) + np.arange(n, dtype=np.uint64)
    counter = (position >> np.uint64(32)), position & np.uint64(0xFFFFFFFF)
    with np.errstate(over="ignore"):
        return threefry(words(seed), [c.astype(np.uint32) for c in counter])


# The stream and its positions.


def test_oracle_answers_the_known_vectors_of_random123():
    with np.errstate(over="ignore"):
        zero = threefry(words(0), (0, 0))
        ones = threefry(words(2**64 - 1), (2**32 - 1, 2**32 - 1))
        pi = threefry(words(0x13198A2E03707344), (0x243F6A88, 0x85A308D3))
    assert [*map(int, zero)] == [0x6B200159, 0x99BA4EFE]
    assert [*map(int, ones)] == [0x1CB996FC, 0xBB002BE7]
    assert [*map(int, pi)] == [0xC4923A9C, 0x483DF7A0]


@given(seed=seeds, offset=offsets, shape=st.sampled_from(SHAPES))
def test_word_j_of_a_draw_is_word_offset_plus_j(seed, offset, shape):
    gen = at(seed, offset)
    first, second = stream(seed, offset, math.prod(shape))
    np.testing.assert_array_equal(gen.bits(shape)[1].ravel(), first ^ second)
    byte = (first ^ second).astype(np.uint8)
    np.testing.assert_array_equal(gen.bits(shape, jnp.uint8)[1].ravel(), byte)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALAR_DRAWS)
@given(offset=offsets, shape=st.sampled_from(SHAPES))
def test_a_draw_is_a_window_of_the_stream_whatever_its_shape(name, offset, shape):
    draw = SCALAR_DRAWS[name]
    _, whole = draw(at(3, offset), (12,))
    same(name, draw(at(3, offset), shape)[1].ravel(), whole)
    advanced, head = draw(at(3, offset), (8,))
    same(name, head, whole[:8])
    same(name, draw(advanced, (4,))[1], whole[8:])


def test_64_bit_draws_take_one_position_an_element():
    with jax.enable_x64(True):
        gen, x = at(9, 2**32 - 4).bits((8,), jnp.uint64)
        first, second = stream(9, 2**32 - 4, 8)
        expected = (first.astype(np.uint64) << np.uint64(32)) | second
        np.testing.assert_array_equal(x, expected)
        assert gen.offset == 2**32 + 4
        _, u = at(9, 0).uniform((8,), jnp.float64)
        tail = at(9, 4).uniform((4,), jnp.float64)[1]
        np.testing.assert_array_equal(u[4:], tail)
        assert at(9, 0).randint((3,), 0, 2**40)[1].dtype == jnp.int64


@pytest.mark.parametrize("offset", [0, 4, 2**32 - 4, 2**64 - 8])
@pytest.mark.parametrize(
    ("size", "draw"),
    [
        (0, lambda g: g.normal((0, 3))),
        (1, lambda g: g.uniform()),
        (5, lambda g: g.bits(5)),
        (6, lambda g: g.randint((2, 3), 0, 9)),
        (4, lambda g: g.bernoulli(jnp.full(4, 0.5))),
        (6, lambda g: g.bernoulli(jnp.full(3, 0.5), (2, 3), "high")),
        (7, lambda g: g.permutation(7)),
        (6, lambda g: g.permutation(jnp.zeros((3, 2)))),
        (4, lambda g: g.key()),
        (4, lambda g: g.split(5)),
        (4, lambda g: g.fold_in(5)),
    ],
)
def test_offset_advances_by_the_elements_rounded_up_to_4(offset, size, draw):
    gen, _ = draw(at(1, offset))
    assert type(gen.offset) is int
    assert gen.offset == (offset + -(-size // 4) * 4) % 2**64


def test_formulas_are_those_of_jax_random():
    key = jax.random.key(11)
    gen = Generator.from_key(key)
    pairs = [
        (gen.bits((5,))[1], jax.random.bits(key, (5,))),
        (gen.uniform((5,))[1], jax.random.uniform(key, (5,))),
        (gen.normal((5,))[1], jax.random.normal(key, (5,))),
        (gen.bernoulli(0.4, (5,))[1], jax.random.bernoulli(key, 0.4, (5,))),
    ]
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


# Placement.


def specs(shape):
    """Every PartitionSpec over x and y that divides the shape."""
    sizes = {None: 1, "x": 4, "y": 2, ("x", "y"): 8}
    for entries in itertools.product(sizes, repeat=len(shape)):
        axes = [a for e in entries if e for a in (e if type(e) is tuple else (e,))]
        divides = all(n % sizes[e] == 0 for n, e in zip(shape, entries, strict=True))
        if divides and len(set(axes)) == len(axes):
            yield P(*entries)


def everything(gen, shape):
    gen, bits = gen.bits(shape)
    gen, uniform = gen.uniform(shape, minval=-0.3, maxval=2.7)
    gen, integers = gen.randint(shape, 0, 1000)
    gen, coins = gen.bernoulli(0.3, shape)
    gen, rows = gen.permutation(jnp.arange(math.prod(shape)).reshape(shape))
    gen, order = gen.permutation(shape[0])
    gen, normal = gen.normal(shape)
    return order, bits, uniform, integers, coins, rows, normal


def essentials(gen, shape):
    gen, bits = gen.bits(shape)
    gen, uniform = gen.uniform(shape)
    gen, coins = gen.bernoulli(0.3, shape)
    gen, order = gen.permutation(shape[0])
    gen, normal = gen.normal(shape)
    return order, bits, uniform, coins, normal


def rarities(gen, shape):
    gen, order = gen.permutation(shape[0])
    gen, fine = gen.bernoulli(0.3, shape, "high")
    gen, apart = gen.permutation(jnp.zeros(shape).at[0].set(1.0), independent=True)
    gen, columns = gen.permutation(jnp.zeros(shape).at[:, 0].set(1.0), 1)
    gen, normal = gen.normal(shape)
    return order, fine, apart, columns, normal


@pytest.mark.parametrize(
    ("draws", "shape"),
    [
        (everything, (8,)),
        (everything, (16, 24)),
        (essentials, (64, 8)),
        pytest.param(rarities, (16, 24), marks=pytest.mark.slow),
        pytest.param(essentials, (4, 2, 8), marks=pytest.mark.slow),
    ],
)
def test_every_placement_draws_the_same_without_a_collective(draws, shape, mesh_4x2):
    draw = partial(draws, shape=shape)
    expected = jax.jit(draw)(Generator(5))
    for i, spec in enumerate(specs(shape)):
        place = NamedSharding(mesh_4x2, spec)
        order = NamedSharding(mesh_4x2, P(spec[0]))
        gen = Generator(5)
        if i % 2:
            gen = jax.device_put(gen, NamedSharding(mesh_4x2, P()))
        out = (order, *[place] * (len(expected) - 1))
        compiled = jax.jit(draw, out_shardings=out).lower(gen).compile()
        assert not collectives(compiled), spec
        *values, normal = compiled(gen)
        assert normal.sharding.is_equivalent_to(place, len(shape))
        jax.tree.map(np.testing.assert_array_equal, values, [*expected[:-1]])
        assert ulp(normal, expected[-1]) <= 4, spec


@pytest.mark.parametrize("where", ["one device", "mesh", "committed"])
def test_one_device_and_replicated_generators_draw_alike(where, mesh_4x2):
    gen = Generator(2)
    if where == "mesh":
        gen = jax.device_put(gen, NamedSharding(mesh_4x2, P()))
    if where == "committed":
        gen = jax.device_put(gen, jax.devices()[3])
    place = NamedSharding(mesh_4x2, P("x", "y"))
    draw = jax.jit(lambda g: g.bits((16, 24)), out_shardings=(None, place))
    advanced, x = gen.bits((16, 24), out_sharding=place)
    assert x.sharding.is_equivalent_to(place, 2)
    assert jax.tree.leaves(advanced)[1].sharding == gen._offset.sharding
    np.testing.assert_array_equal(x, Generator(2).bits((16, 24))[1])
    if where != "committed":  # jit itself refuses a generator bound to another device
        np.testing.assert_array_equal(x, draw(gen)[1])


@pytest.mark.slow
@pytest.mark.parametrize("types", ["Auto Auto", "Explicit Explicit", "Explicit Auto"])
def test_out_sharding_of_every_kind_of_axis(types):
    kinds = tuple(getattr(AxisType, name) for name in types.split())
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    place = NamedSharding(mesh, P("x", "y"))
    gen = Generator(4)
    expected = gen.uniform((16, 24))[1], gen.permutation(16)[1]
    rows = NamedSharding(mesh, P("y"))

    def check(x, order):
        assert x.sharding.is_equivalent_to(place, 2)
        assert order.sharding.is_equivalent_to(rows, 1)
        np.testing.assert_array_equal(x, expected[0])
        np.testing.assert_array_equal(order, expected[1])

    def draw(g, a, b):
        _, x = g.uniform((16, 24), out_sharding=a)
        return x, g.permutation(16, out_sharding=b)[1]

    check(*draw(gen, place, rows))
    with jax.set_mesh(mesh):
        check(*draw(gen, place.spec, rows.spec))
        jitted = jax.jit(lambda g: draw(g, place.spec, rows.spec))
        check(*jitted(gen))
        assert not collectives(jitted.lower(gen).compile())


def test_out_sharding_is_refused_clearly(mesh_4x2):
    gen = Generator(0)
    with pytest.raises(ValueError, match=r"no mesh is set.\nPass NamedSharding"):
        gen.normal((8,), out_sharding=P("x"))
    with pytest.raises(ValueError, match="evenly divide"):
        gen.normal((6,), out_sharding=NamedSharding(mesh_4x2, P("x")))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises((TypeError, TypeCheckError)):
        gen.normal((8,), out_sharding=single)  # pyright: ignore[reportArgumentType]


# Transformations.


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALAR_DRAWS)
def test_jit_vmap_scan_and_remat_draw_what_a_loop_draws(name):
    def draw(gen):
        return SCALAR_DRAWS[name](gen, (6,))

    gen, loop = at(6, 2**32 - 8), []
    start = gen
    for _ in range(3):
        gen, x = draw(gen)
        loop.append(x)
    jitted, first = jax.jit(draw)(start)
    same(name, first, loop[0])
    same(name, jax.checkpoint(draw)(start)[1], loop[0])
    scanned, xs = jax.lax.scan(lambda g, _: draw(g), start, length=3)
    for x, y in zip(xs, loop, strict=True):
        same(name, x, y)
    assert scanned == gen and jitted.offset == 2**32
    _, batch = start.split(3)
    ends, xs = jax.vmap(draw)(batch)
    for child, end, x in zip(batch, ends, xs, strict=True):
        same(name, draw(child)[1], x)
        assert draw(child)[0] == end


def test_children_are_alike_under_jit_and_vmap():
    gen = Generator(1)
    assert jax.jit(lambda g: g.split(3))(gen) == gen.split(3)
    assert jax.jit(Generator.fold_in)(gen, 7) == gen.fold_in(7)
    folded = jax.vmap(lambda i: gen.fold_in(i)[1])(jnp.arange(3))
    assert [*folded] == [gen.fold_in(i)[1] for i in range(3)]
    _, batch = gen.split(2)
    nested = jax.vmap(lambda g: g.split(2)[1])(batch)
    assert nested[1, 0] == batch[1].split(2)[1][0]
    later: Any = jax.vmap(Generator.key)(batch)[0]
    assert later.offset.tolist() == [4, 4]
    assert jax.vmap(Generator)(jnp.arange(3))[2] == Generator(2)
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.vmap(Generator.from_key)(keys)[1] == Generator.from_key(keys[1])


def test_remat_redraws_the_same_words_in_the_backward_pass():
    def loss(w, gen):
        _, mask = gen.bernoulli(0.5, w.shape)
        return jnp.sum(jnp.where(mask, w, 0.0) ** 2)

    w = jnp.arange(1.0, 9.0)
    plain = jax.grad(loss)(w, Generator(3))
    np.testing.assert_array_equal(
        jax.grad(jax.checkpoint(loss))(w, Generator(3)), plain
    )
    assert 0 < np.count_nonzero(plain) < 8


def test_key_reuse_checks_find_no_reuse():
    gen = Generator(3)
    with jax.debug_key_reuse(True):
        jax.jit(lambda g: [draw(g, (12,)) for draw in SCALAR_DRAWS.values()])(gen)
        jax.jit(lambda g: (g.permutation(4), g.split(2), g.fold_in(1), g.key()))(gen)


def test_shard_map_devices_fold_in_their_rank(mesh_4x2):
    def local(gen):
        _, child = gen.fold_in(jax.lax.axis_index("x"))
        return child.bits((3,))[1]

    sharded = jax.shard_map(local, mesh=mesh_4x2, in_specs=P(), out_specs=P("x"))
    expected = [Generator(8).fold_in(i)[1].bits((3,))[1] for i in range(4)]
    np.testing.assert_array_equal(jax.jit(sharded)(Generator(8)), np.hstack(expected))


def test_export_with_a_symbolic_size_draws_the_same():
    (n,) = jax.export.symbolic_shape("n")
    draw = jax.jit(lambda gen, x: gen.bits(x.shape))
    gen = Generator(0)
    abstract = jax.eval_shape(lambda g: g, gen)
    x = jax.ShapeDtypeStruct((n, 4), jnp.float32)
    exported = jax.export.export(draw)(abstract, x)
    advanced: Any
    advanced, bits = exported.call(gen, jnp.zeros((3, 4)))
    assert advanced.offset == 12
    np.testing.assert_array_equal(bits, gen.bits((3, 4))[1])


# A pytree and a value.


@given(seed=seeds, offset=offsets)
def test_checkpoint_round_trip(seed, offset, tmp_path_factory):
    gen = at(seed, offset)
    path = tmp_path_factory.getbasetemp() / "generator.npz"
    leaves, tree = jax.tree.flatten(gen)
    np.savez(path, *leaves)
    with np.load(path) as saved:
        restored = jax.tree.unflatten(tree, [saved[name] for name in saved.files])
    assert restored == gen and hash(restored) == hash(gen)
    assert restored.offset == offset
    np.testing.assert_array_equal(restored.bits((12,))[1], gen.bits((12,))[1])


def test_orbax_round_trip(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    gen, _ = Generator(5).normal((3,))
    state = {"gen": gen, "w": jnp.ones(2)}
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    assert restored["gen"] == gen


def test_leaves_are_plain_uint32_arrays_under_their_names():
    paths, _ = jax.tree_util.tree_flatten_with_path(Generator(2**32 + 5))
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".key", ".offset"]
    assert [leaf.tolist() for _, leaf in paths] == [[1, 5], [0, 0]]
    assert all(leaf.dtype == jnp.uint32 for _, leaf in paths)


def test_tree_transformations_never_validate():
    gen = Generator(0)
    abstract, x = jax.eval_shape(lambda g: g.normal((3,)), gen)
    assert isinstance(abstract, Generator) and x.shape == (3,)
    jax.tree.map(lambda _: None, gen)
    assert jax.tree.map(lambda x, y: x, gen, gen) == gen
    assert pickle.loads(pickle.dumps(gen)) == gen == copy.deepcopy(gen)
    donated = Generator(1)
    jax.jit(lambda g: g.normal((3,)), donate_argnums=0)(donated)
    assert "Generator" in repr(donated)


def test_equality_hash_repr_and_freezing():
    gen = Generator(7)
    assert gen == Generator(7) != Generator(8)
    assert gen != gen.key()[0] and gen != 7 and bool(gen)
    assert {gen: 1}[Generator(7)] == 1
    assert repr(gen) == "Generator(key=0x0000000000000007, offset=0)"
    texts = []
    jax.jit(lambda g: texts.append(repr(g)))(gen)
    assert "uint32[2]" in texts[0]
    with pytest.raises(AttributeError):
        gen._key = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_batch_has_length_items_and_offsets():
    _, batch = Generator(0).split(4)
    first, *_, last = batch
    assert len(batch) == 4 and batch[0] == first and batch[-1] == last == batch[3]
    assert len(batch[1:]) == 3 and batch[1:][0] == batch[1]
    np.testing.assert_array_equal(batch.offset, np.zeros(4, np.uint64), strict=True)
    _, grid = Generator(0).split((2, 3))
    assert np.shape(grid.offset) == (2, 3) and len(grid[..., 0]) == 2
    with pytest.raises(IndexError, match="index 4 of a batch of 4"):
        batch[4]
    with pytest.raises(TypeError, match="one generator has no length"):
        len(first)
    with pytest.raises(ValueError, match=r"batch of generators of shape \(4,\)"):
        batch.normal((3,))


def test_offset_of_a_trace_is_refused_clearly():
    with pytest.raises(TypeError, match=r"traced.*\n.*outside"):
        jax.jit(lambda g: g.offset)(Generator(0))


# Doors.


@given(seed=st.integers(0, 2**32 - 1))
def test_a_seed_is_the_key_of_jax_random(seed):
    gen = Generator(seed)
    key = jax.random.wrap_key_data(jnp.asarray(words(seed)))
    assert gen == Generator.from_key(key) == Generator(np.uint32(seed))
    assert gen == Generator.from_key(jax.random.key_data(key))
    assert gen == jax.jit(Generator)(np.uint32(seed))


@given(seed=st.integers(-(2**31), -1))
def test_negative_seeds_are_twos_complement_everywhere(seed):
    gen = Generator(seed)
    assert gen == Generator(2**64 + seed) == Generator(np.int64(seed))
    assert gen == Generator(jnp.int32(seed)) == jax.jit(Generator)(np.int32(seed))


def test_seed_of_jax_random_key_itself():
    for seed in (0, 1, 2**31 - 1):
        assert Generator(seed) == Generator.from_key(jax.random.key(seed))
        assert Generator(seed) == Generator.from_key(jax.random.PRNGKey(seed))


@pytest.mark.parametrize("seed", [1.5, "3", True, None, [1], np.float32(1), 1j])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match=r"must be an integer.*\nPass a Python int"):
        Generator(seed)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, np.arange(2), jnp.arange(2)])
def test_a_seed_of_the_wrong_size_is_refused(seed):
    with pytest.raises(ValueError, match=r"must fit in 64 bits|must be one integer"):
        Generator(seed)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_implementations_are_hashed(impl):
    gens = [Generator.from_key(jax.random.key(s, impl=impl)) for s in range(4)]
    assert len({*gens}) == 4
    raw = jax.random.key_data(jax.random.key(0, impl=impl))
    assert Generator.from_key(raw) == gens[0]
    traced = jax.jit(Generator.from_key)(jax.random.key(2, impl=impl))
    assert traced == gens[2]


@pytest.mark.parametrize("key", [3, "k", jnp.zeros(2), np.uint32(3), Generator])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match=r"a key of jax.random was asked for.*\n"):
        Generator.from_key(key)


@pytest.mark.parametrize("new", [jax.random.key, jax.random.PRNGKey])
def test_batches_of_keys_are_refused(new):
    with pytest.raises(ValueError, match=r"shape \(3,\).\n.*jax.vmap"):
        Generator.from_key(jax.random.split(new(0), 3))


@pytest.mark.parametrize("shape", [5, (5,), [5], np.int64(5), np.array([5])])
def test_shapes_of_every_spelling(shape):
    assert Generator(0).uniform(shape)[1].shape == (5,)


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="no size is negative"):
        Generator(0).normal((-1,))


def test_permutation_permutes():
    gen = Generator(12)
    order = gen.permutation(50)[1]
    assert sorted(order.tolist()) == [*range(50)] and order.tolist() != [*range(50)]
    x = jnp.arange(12.0).reshape(6, 2)
    by_rows, by_columns = gen.permutation(x)[1], gen.permutation(x, 1)[1]
    assert {*map(tuple, by_rows.tolist())} == {*map(tuple, x.tolist())}
    assert {*map(tuple, by_columns.T.tolist())} == {*map(tuple, x.T.tolist())}
    apart = gen.permutation(jnp.tile(jnp.arange(32)[:, None], 2), independent=True)[1]
    np.testing.assert_array_equal(jnp.sort(apart, 0)[:, 0], jnp.arange(32))
    assert (apart[:, 0] != apart[:, 1]).any()
    grad = jax.grad(lambda x: (gen.permutation(x)[1] * x).sum())(x)
    assert grad.shape == x.shape


# Children and chance.


@given(seed=seeds, offset=offsets)
def test_children_differ_from_one_another_and_from_the_parent(seed, offset):
    gen = at(seed, offset)
    later, _ = gen.bits((4,))
    family = [gen, *gen.split(4)[1], *later.split(4)[1]]
    for g in (gen, later):
        family += [Generator.from_key(g.key()[1])]
        family += [g.fold_in(data)[1] for data in (0, 1, -1, 2**32, 2**32 - 1)]
    keys = {tuple(np.asarray(g._key).tolist()) for g in family}
    assert len(keys) == len(family)
    assert all(g.offset == 0 for g in family[1:])


def relatives(gen):
    """Streams that must not meet: the parent, its children, the streams of randint."""
    inner = jax.random.split(stream_at(gen._key, gen._offset), 4)

    def draw(g):
        return g.bits((4096,))[1]

    children = [*gen.split(8)[1], *[gen.fold_in(i)[1] for i in range(8)]]
    streams = [draw(gen), jax.random.bits(gen.key()[1], (4096,))]
    streams += [jax.random.bits(key, (4096,)) for key in inner]
    return np.stack([*streams, *map(draw, children)])


def test_streams_of_relatives_share_no_run_and_no_correlation():
    streams = relatives(Generator(2024)).astype(np.uint64)
    pairs = (streams[:, :-1] << np.uint64(32)) | streams[:, 1:]
    assert len(np.unique(pairs)) == pairs.size
    centred = streams / 2**32 - 0.5
    m, n = centred.shape
    correlation = np.corrcoef(centred) - np.eye(m)
    assert np.abs(correlation).max() < 5 / math.sqrt(n)
    lagged = (centred[:, :-1] * centred[:, 1:]).mean(1) * 12
    assert np.abs(lagged).max() < 5 / math.sqrt(n)


def test_bytes_of_relatives_are_uniform():
    octets = relatives(Generator(7)).astype("<u4").view(np.uint8)
    for row in octets:
        counts = np.bincount(row, minlength=256)
        chi2 = ((counts - row.size / 256) ** 2).sum() / (row.size / 256)
        assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)


def test_draws_have_their_moments():
    gen, n = Generator(99), 1 << 16
    bound = 5 / math.sqrt(n)
    x = gen.normal(n)[1]
    assert abs(x.mean()) < bound and abs(x.var() - 1) < bound * math.sqrt(2)
    assert abs(gen.uniform(n)[1].mean() - 0.5) < bound * math.sqrt(1 / 12)
    for mode in ("low", "high"):
        assert abs(gen.bernoulli(0.3, n, mode)[1].mean() - 0.3) < bound * 0.46
    counts = np.bincount(gen.randint(n, 0, 10)[1], minlength=10)
    assert ((counts - n / 10) ** 2).sum() / (n / 10) < 9 + 5 * math.sqrt(18)


def test_high_resolution_resolves_small_probabilities():
    """2^-25 is below the resolution of one float32 uniform number, 2^-23."""
    p, n = 2.0**-16 + 2.0**-25, 1 << 20
    low, high = (Generator(1).bernoulli(p, n, mode)[1] for mode in ("low", "high"))
    assert abs(int(high.sum()) - n * p) < 5 * math.sqrt(n * p)
    assert not np.any(high & ~low)  # a second number only refines the first


def test_as_many_numbers_are_permuted_as_an_array_is_long():
    f = px.compile(
        lambda x: Generator(0).permutation(x.shape[0])[1],
        dims={"x": "t"},
        padding="require",
    )
    for t in (1, 5, 8, 13):
        order = f(jnp.zeros(t))
        np.testing.assert_array_equal(order, Generator(0).permutation(t)[1])
    assert f.stats.traces == 1
