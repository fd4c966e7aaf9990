"""Gathers, scatters and slices: clamped, filled and dropped at the logical size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from transforms.padding.checking import check_each, run_padded, symbolic

import pliax as px
from pliax.transforms.padding.rules import PaddingRefused


HIGH = {"b": 4, "t": 8, "s": 7}
SMALL = [{"b": 1, "t": 1, "s": 1}, {"b": 1, "t": 2, "s": 5}]
LARGE = [
    {"b": 3, "t": 5, "s": 2},
    {"b": 3, "t": 7, "s": 6},
    {"b": 4, "t": 8, "s": 7},
]
CHOICES = [*LARGE, *SMALL]
FEW = [LARGE[0], LARGE[2], SMALL[0]]


def argument(text: str, sizes: Mapping[str, int]) -> Any:
    """An array: "b, t" of eighths, "s; 2*t" of indices from -2*t to 2*t, "t; keys"."""
    shape, _, values = text.partition(";")
    shape = tuple(eval(f"({shape},)" if shape else "()", {}, dict(sizes)))
    rng = np.random.default_rng(sum(shape))
    if "keys" in values:
        return jax.random.split(jax.random.key(3), shape)
    if values:
        values, _, dtype = values.partition(":")
        n = eval(values, {}, dict(sizes))
        low = 0 if dtype.startswith("uint") else -n
        return np.asarray(rng.integers(low, n, shape), dtype or np.int32)
    x = rng.integers(-16, 17, shape) / 8
    return np.asarray(np.where(x == 0, -0.0, x), np.float32)  # adding 0 would show


def obey(
    f: Callable[..., Any],
    *texts: str,
    choices: Sequence[Mapping[str, int]] = CHOICES,
    high: Mapping[str, int] = HIGH,
) -> None:
    """Asserts the law for the bits of the results: -0.0 is not 0.0."""
    specs = [text.partition(";")[0].strip() for text in texts]
    args_of = lambda sizes: [argument(text, sizes) for text in texts]  # noqa: E731
    check_each(lambda *xs: jax.tree.map(bits, f(*xs)), specs, args_of, choices, high)


def bits(x: Any) -> Any:
    """Floats as integers, every NaN as the same."""
    if x.dtype != np.float32:
        return x
    x = lax.select(lax.ne(x, x), lax.full_like(x, jnp.nan), x)
    return lax.bitcast_convert_type(x, np.int32)


def table(*rows: tuple) -> Any:
    return pytest.mark.parametrize("row", [pytest.param(r[1:], id=r[0]) for r in rows])


def gradient(f: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """The cotangents of the first arguments, for one of no special form."""

    def of(*args: Any) -> Any:
        inner = lambda *xs: f(*xs, *args[count:])  # noqa: E731
        result, pull = jax.vjp(inner, *args[:count])
        return pull(0.5 * jnp.ones_like(result) + jnp.square(result))

    return of


# --- reading --------------------------------------------------------------------------


SLICES = [
    ("x[:, 1:]", lambda x: x[:, 1:], "b, t"),
    ("x[:, :-1]", lambda x: x[:, :-1], "b, t"),
    ("x[::2]", lambda x: x[::2], "t, b"),
    ("x[::-1]", lambda x: x[::-1], "t, b"),
    ("x[0]", lambda x: x[0], "t, 3"),
    ("x[-1]", lambda x: x[-1], "t, 3"),
    ("x[..., -1]", lambda x: x[..., -1], "b, t"),
    ("x[b // 2]", lambda x: x[x.shape[0] // 2], "b, t"),
    ("x[t // 2 :]", lambda x: x[x.shape[0] // 2 :], "t, b"),
    ("x[b:]", lambda x, y: y[x.shape[0] :], "b", "b + t"),
    ("x[1:] of merged axes", lambda x: x.reshape(-1)[1:], "b, t"),
]


@pytest.mark.slow
@table(*SLICES)
def test_slices(row):
    f, *texts = row
    obey(f, *texts, choices=FEW)
    obey(gradient(f, len(texts)), *texts, choices=FEW)


@pytest.mark.slow
@table(*SLICES)
def test_slices_of_more_sizes(row):
    f, *texts = row
    obey(f, *texts)
    obey(gradient(f, len(texts)), *texts)


LOOKUPS = [
    ("embedding", lambda x, i: x[i], "5, 3", "b, t; 10"),
    ("embedding filled", lambda x, i: jnp.take(x, i, axis=0), "5, 3", "b, t; 10"),
    ("embedding clipped", lambda x, i: x.at[i].get(mode="clip"), "5, 3", "b, t; 10"),
    ("x[i]", lambda x, i: x[i], "t, 3", "s; 2*t"),
    ("x[i, j]", lambda x, i, j: x[i, j], "b, t", "s; 2*b", "s; 2*t"),
    ("x[1:, i]", lambda x, i: x[1:, i], "t, b", "s; 2*b"),
    ("x[i, 1:]", lambda x, i: x[i, 1:], "b, t", "s; 2*b"),
    ("fill", lambda x, i: x.at[i].get(mode="fill", fill_value=7), "t, b", "b, s; 2*t"),
    ("clip", lambda x, i: x.at[i].get(mode="clip"), "t, b", "b, s; 2*t"),
    ("int8", lambda x, i: x.at[i].get(mode="fill"), "t", "s; 2*t:int8"),
    ("uint8", lambda x, i: x[i], "t", "s; 2*t:uint8"),
    ("take of merged axes", jnp.take, "b, t", "s; 2*b*t"),
    ("merged indices", lambda x, i: x[i.reshape(-1)], "t, 2", "b, s; 2*t"),
    ("merged rows", lambda x, i: x.reshape(-1, 2)[i], "b, t, 2", "s; 2*b*t"),
    ("along axis", lambda x, i: along(x, i, 1), "b, t", "b, s; 2*t"),
    ("along first axis", lambda x, i: along(x, i, 0), "t, b", "s, b; 2*t"),
    ("along all", lambda x, i: along(x, i, None), "b, t", "s; 2*b*t"),
    ("along merged", lambda x, i: along(rows(x), rows(i), 1), "b, t, 3", "b, t, 1; 3"),
    ("vmap x[i]", jax.vmap(lambda x, i: x[i]), "b, t, 2", "b, s; 2*t"),
    ("vmap merged", lambda x, i: pick(rows(x), rows(i)), "b, t, 4", "b, t, 2; 8"),
]
along = jnp.take_along_axis
pick = jax.vmap(lambda x, i: x[i])


def rows(x):
    return x.reshape(-1, x.shape[-1])


@pytest.mark.slow
@table(*LOOKUPS)
def test_lookups(row):
    obey(*row, choices=FEW)


@table(*LOOKUPS[:2], LOOKUPS[3], LOOKUPS[14])
def test_gradients_of_common_lookups(row):
    obey(gradient(row[0]), *row[1:], choices=FEW)


@pytest.mark.slow
@table(*LOOKUPS)
def test_gradients_of_lookups(row):
    obey(*row)
    obey(gradient(row[0]), *row[1:])


# --- writing --------------------------------------------------------------------------


def at(kind: str, **options: Any) -> Callable[..., Any]:
    return lambda x, i, u: getattr(x.at[i], kind)(u, **options)


def flat(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, i, u: f(x, i.reshape(-1), u.reshape(-1))


def in_table(x, i, u):
    return x.reshape(5, -1).at[i].add(u.reshape(u.shape[0], -1))


def in_part(x, i, u):
    u = u.reshape(u.shape[0], -1)
    return x.at[i, 1 : 1 + u.shape[1]].add(u)


WRITES = [
    ("set, the last wins", at("set"), "t", "b, s; 2*t", "b, s"),
    ("set rows of a table", at("set"), "5, t", "b, s; 10", "b, s, t"),
    ("set merged", flat(at("set")), "t", "b, s; 2*t", "b, s"),
    ("add", at("add"), "t", "b, s; 2*t", "b, s"),
    ("add merged rows", in_table, "5, b, t", "s; 10", "s, b, t"),
    ("add to merged", lambda x, i, u: at("add")(rows(x), i, u), "b, t, 2", "s; 2*b*t", "s, 2"),
    ("add clipped", at("add", mode="clip"), "5, 3", "b, s; 10", "b, s, 3"),
    ("add NaN", lambda x, i, u: at("add")(x, i, jnp.log(u)), "t", "b, s; 2*t", "b, s"),
    ("subtract", at("subtract"), "t", "b, s; 2*t", "b, s"),
    ("multiply", at("mul"), "t", "s; 2*t", "s"),
    ("min", at("min"), "t, 3", "b, s; 2*t", "b, s, 3"),
    ("max clipped", at("max", mode="clip"), "t, 3", "b, s; 2*t", "b, s, 3"),
    ("the only row", at("add"), "1, 3", "s; 1", "s, 3"),
    ("int8", at("set"), "t", "s; 2*t:int8", "s"),
    ("[i, j]", lambda x, i, j, u: x.at[i, j].set(u), "b, t", "s; 2*b", "s; 2*t", "s"),
    ("[1:]", lambda x: x.at[1:].set(x[:-1]), "t"),
    ("[:, 1:]", lambda x, u: x.at[:, 1:].add(u), "b, t", "b, t - 1"),
    ("[::2]", lambda x: x.at[::2].mul(2.0), "t"),
    ("[i, 1:]", lambda x, i, u: x.at[i, 1:].set(u), "b, t", "s; 2*b", "s, t - 1"),
    ("[1:, i]", lambda x, i, u: x.at[1:, i].add(u), "t, b", "s; 2*b", "t - 1, s"),
    ("[i, 1:, :]", lambda x, i, u: x.at[i, 1:].add(u), "b, t, 2", "s; 2*b", "s, t - 1, 2"),
    ("merged part", in_part, "5, b*t + 2", "s; 10", "s, b, t"),
    ("vmap set", jax.vmap(at("set")), "b, t", "b, s; 2*t", "b, s"),
    ("vmap set at shared", jax.vmap(at("set"), (0, None, 0)), "b, t", "s; 2*t", "b, s"),
    ("vmap set of shared", jax.vmap(at("set"), (None, 0, None)), "t", "b, s; 2*t", "s"),
    ("apply to one", lambda x, i: x.at[i].apply(jnp.abs), "t", "; t"),
    ("apply to many", lambda x, i: x.at[i].apply(lambda v: 2 * v + 1), "t, 3", "s; 2*t"),
    ("apply to [1:]", lambda x: x.at[1:].apply(lambda v: jnp.where(v > 0, v, 3 - v)), "t"),
]  # fmt: skip


@pytest.mark.slow
@table(*WRITES)
def test_writes(row):
    obey(*row, choices=FEW)


@pytest.mark.slow
@table(*WRITES)
def test_writes_of_more_sizes(row):
    obey(*row)


@table(
    ("set", at("set"), "t", "s", "s; 2*t"),
    ("add", at("add"), "t, b", "s, b", "s; 2*t"),
    ("max", at("max"), "t", "s", "s; 2*t"),
)
def test_gradients_of_writes(row):
    f, *texts = row
    obey(gradient(lambda x, u, i: f(x, i, u), 2), *texts, choices=FEW)


def segments(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, i, y: f(x, i, y.shape[0])


def one_hot(i):
    return jnp.zeros((i.shape[0], 6)).at[jnp.arange(i.shape[0]), i].set(1)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_indices_beyond_int32(mode):
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))

    def f(x, i, u):
        i = lax.select(i > 3, i - jnp.uint32(4), jnp.invert(i))
        read = lax.gather(x, i, numbers, (1,), mode=mode)
        scattered = lax.ScatterDimensionNumbers(*numbers)
        return read, lax.scatter(x, i, u, scattered, mode=mode)

    obey(f, "t", "s, 1; 9:uint32", "s", choices=FEW)


@table(
    ("segment_sum", segments(jax.ops.segment_sum), "t, 2", "t; 8", "4"),
    ("segment_max", segments(jax.ops.segment_max), "t", "t; 8", "4"),
    ("symbolic segments", segments(jax.ops.segment_sum), "t", "t; s", "s"),
    ("bincount", lambda i: jnp.bincount(i, length=5), "t; 10"),
    ("bincount of merged", lambda i: jnp.bincount(i.ravel(), length=5), "b, t; 10"),
    ("one-hot", one_hot, "t; 6"),
)
def test_counts(row):
    obey(*row, choices=FEW)


@table(
    ("gather", lambda k, i: k[i], "t; keys", "s; 2*t"),
    ("fill", lambda k, i: k.at[i].get(mode="fill"), "t; keys", "s; 2*t"),
    ("half", lambda k, i: lax.dynamic_slice(k, (i,), (k.shape[0] // 2,)), "t; keys", "; t"),
    ("set", lambda k, i: k.at[i].set(k[0]), "t; keys", "s; 2*t"),
    ("move", lambda k: k.at[1:].set(k[:-1]), "t; keys"),
)  # fmt: skip
def test_keys(row):
    obey(*row, choices=FEW)


# --- dynamic slices -------------------------------------------------------------------


def cut(x, i):
    return lax.dynamic_slice(x, (i,), (3,))


def like(x, y, i):
    return lax.dynamic_slice(x, (i,), y.shape)


def put(x, u, i):
    return lax.dynamic_update_slice(x, u, (i,))


DYNAMIC = [
    ("slice", cut, "t", "; 2*t"),
    ("slice of merged", lambda x, i: cut(x.reshape(-1), i), "b, t", "; 2*b*t"),
    ("symbolic slice", like, "t + s", "t", "; 2*t"),
    ("loosely bounded", lambda x, i: like(x, x[::2], i), "t", "; t"),
    ("vmap slice", jax.vmap(cut), "b, t", "b; 2*t"),
    ("vmap slice of shared", jax.vmap(cut, (None, 0)), "t", "b; 2*t"),
    ("vmap symbolic slice", jax.vmap(like, (None, None, 0)), "t + s", "t", "b; 2*t"),
    ("index", lambda x, i: lax.dynamic_index_in_dim(x, i, 1), "b, t", "; 2*t"),
    ("update", put, "t", "3", "; 2*t"),
    ("symbolic update", put, "t + s", "s", "; 2*t"),
    ("update of merged", lambda x, u, i: put(x.ravel(), u, i), "b, t", "t", "; 2*t"),
    ("vmap update", jax.vmap(put), "b, t", "b, 3", "b; 2*t"),
    ("vmap symbolic update", jax.vmap(put), "b, t + s", "b, s", "b; 2*t"),
    ("vmap update of shared", jax.vmap(put, (None, 0, 0)), "t + s", "b, s", "b; 2*t"),
    ("rows", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 1)), "t, 3", "3, 2", "; 9"),
]  # fmt: skip


@pytest.mark.slow
@table(*DYNAMIC)
def test_dynamic_slices(row):
    obey(*row, choices=LARGE)


@pytest.mark.slow
@table(*DYNAMIC)
def test_gradients_of_dynamic_slices(row):
    f, *texts = row
    count = sum(";" not in text for text in texts)
    obey(gradient(f, count), *texts, choices=LARGE)


@table(
    ("read", like, "8", "t", "; 16"),
    ("written", put, "8", "t", "; 16"),
    ("gradient", gradient(put, 2), "8", "t", "; 16"),
)
def test_a_window_that_could_be_longer_than_its_array(row):
    high = {"b": 4, "t": 19, "s": 7}
    obey(*row, choices=LARGE, high=high)


def test_no_mode_that_jax_does_not_lower():
    if not hasattr(lax.GatherScatterMode, "ONE_HOT"):
        pytest.skip("this JAX has no such mode")
    f = lambda x, i: x.at[i].get(mode="one_hot")  # noqa: E731
    args = [argument("t", LARGE[0]), argument("s; t", LARGE[0])]
    traced = symbolic(f, ["t", "s"], args, LARGE[0])
    with pytest.raises(
        PaddingRefused, match=r"gather: JAX itself lowers no .* ONE_HOT"
    ):
        run_padded(traced, args, LARGE[0], HIGH)


# --- any dimension numbers ------------------------------------------------------------


@st.composite
def requests(draw):
    """Sizes of the operand, its windows and the batch, and how they are numbered.

    Every axis of the operand is one of: along an axis of the batch, whole, one row, or
    a part of known or symbolic size; it is indexed or not.
    """
    kinds = ["paired", "whole", "row", "part", "symbolic part"]
    axes = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    free = draw(st.lists(st.sampled_from(["s", "b", "2"]), max_size=2))
    size = st.sampled_from(["t", "b", "3"])
    choices = {"part": ["t + 2", "4"], "symbolic part": ["t + 2", "t + s"]}
    operand = [
        draw(st.sampled_from(choices[k]) if k in choices else size) for k in axes
    ]
    window = {"paired": "1", "row": "1", "part": "2", "symbolic part": "t"}
    sizes = [window.get(k, n) for k, n in zip(axes, operand, strict=True)]
    batch = [(n, None) for n in free]
    paired = [i for i, kind in enumerate(axes) if kind == "paired"]
    batch = draw(st.permutations([*batch, *((operand[i], i) for i in paired)]))
    unpaired = [i for i in range(len(axes)) if i not in paired]
    collapsed = [i for i in unpaired if axes[i] == "row" and draw(st.booleans())]
    indexed = [i for i in unpaired if draw(st.integers(0, 3))]
    rank = len(batch) + len(unpaired) - len(collapsed)
    positions = draw(st.permutations(range(rank)))[: rank - len(batch)]
    numbers = lax.GatherDimensionNumbers(
        tuple(sorted(positions)),
        tuple(collapsed),
        tuple(draw(st.permutations(indexed))),
        tuple(paired),
        tuple([i for _, i in batch].index(axis) for axis in paired),
    )
    one = iter(n for i, n in enumerate(sizes) if i not in (*collapsed, *paired))
    rest = iter(n for n, _ in batch)
    result = [next(one if i in positions else rest) for i in range(rank)]
    indices = [*(n for n, _ in batch), str(len(indexed))]
    return numbers, operand, sizes, indices, result


def named(probes: Any) -> dict[str, Any]:
    """Sizes by name, off arrays that have them."""
    return {name: x.shape[0] for name, x in zip("bts", probes, strict=True)}


MODES = st.sampled_from(["clip", "fill", "promise_in_bounds"])
SCATTERS = st.sampled_from(["", "_add", "_sub", "_mul", "_min", "_max"])


@settings(max_examples=settings().max_examples // 3)
@given(requests(), MODES)
def test_any_gather(request, mode):
    numbers, operand, sizes, indices, _ = request

    def f(x, i, *probes):
        lengths = [eval(n, {}, named(probes)) for n in sizes]
        return lax.gather(x, i, numbers, lengths, mode=mode)

    obey(f, ", ".join(operand), ", ".join(indices) + "; 5", "b", "t", "s")


@settings(max_examples=settings().max_examples // 3)
@given(requests(), MODES, SCATTERS)
def test_any_scatter(request, mode, kind):
    numbers, operand, _, indices, result = request
    numbers = lax.ScatterDimensionNumbers(*numbers)

    def f(x, i, u):
        return getattr(lax, f"scatter{kind}")(x, i, u, numbers, mode=mode)

    texts = (", ".join(operand), ", ".join(indices) + "; 5", ", ".join(result))
    obey(f, *texts)


BEYOND_INT32 = {
    "write": lambda x, i: x.at[i].set(3.0),
    "write clipped": lambda x, i: x.at[i].set(3.0, mode="clip"),
    "add": lambda x, i: x.at[i].add(3.0, mode="drop"),
    "read": lambda x, i: x[i],
    "read or fill": lambda x, i: x.at[i].get(mode="fill", fill_value=-1.0),
    "along an axis": lambda x, i: jnp.take_along_axis(x, i, 0),
    "one place": lambda x, i: x[i[0]],
    "types": lambda x, i: (
        jnp.argsort(x),
        jnp.nonzero(x, size=2),
        jnp.unique(x, size=2),
    ),
    "diagonal": lambda x, i: (jnp.diag(x), jnp.tril_indices(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("f", BEYOND_INT32.values(), ids=BEYOND_INT32)
def test_indices_of_64_bits_are_cast_as_jax_casts_them(f):
    """To int32, along an axis that has no more elements than that."""
    with jax.enable_x64(True):
        compiled = px.compile(f, dims={"x": "t"}, padding="require")
        for t in (5, 3, 7):
            x = np.arange(1.0, t + 1)
            for i in (2**33 + 1, -(2**33) - 1, 2**31 + 1, -1):
                found, wanted = (g(x, np.array([i])) for g in (compiled, jax.jit(f)))
                jax.tree.map(np.testing.assert_array_equal, found, wanted)
                types = jax.tree.map(lambda x: (x.dtype, x.weak_type), (found, wanted))
                assert types[0] == types[1]


WITH_SIZES = {
    "indices": lambda x: jnp.indices(x.shape),
    "sparse indices": lambda x: jnp.indices((x.shape[0], 4), jnp.float32, sparse=True),
    "put_along_axis": lambda x: jnp.put_along_axis(
        x, jnp.argmax(x, 1, keepdims=True), jnp.float32(9), axis=1, inplace=False
    ),
    "fill_diagonal": lambda x: jnp.fill_diagonal(
        x + x[:, :1], jnp.float32(7), inplace=False
    ),
    "take, wrapped": lambda x: jnp.take(
        x, jnp.array([-7, 3, 100]), axis=0, mode="wrap"
    ),
    "take, flat": lambda x: jnp.take(x, jnp.array([-7, 3, 100]), mode="wrap"),
    "pad, wrapped": lambda x: jnp.pad(x, ((7, 0), (1, 9)), mode="wrap"),
    "pad by a size": lambda x: jnp.pad(x, (x.shape[0], 2), mode="wrap"),
}


@pytest.mark.slow
@pytest.mark.parametrize("f", WITH_SIZES.values(), ids=WITH_SIZES)
def test_functions_that_ask_for_integers_take_sizes(f):
    compiled = px.compile(f, dims={"x": "b, t"}, padding="require")
    for shape in ((3, 5), (4, 7), (2, 9), (1, 1)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        found, wanted = compiled(x), jax.jit(f)(x)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.dtype == b.dtype, found, wanted)
        )
