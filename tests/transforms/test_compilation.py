"""px.compile means what jax.jit means, and says truly what it compiled."""

import collections
import copy
import dataclasses
import functools
import inspect
import pickle
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

import pliax as px
from pliax.transforms import CompiledFunction, _reports, compile as px_compile
from pliax.transforms._arguments import check_callable, read_parameters


ones = functools.partial(jnp.ones, dtype=jnp.float32)


def counts(f):
    stats = f.stats
    return stats.calls, stats.traces, stats.compilations


def leaves_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def xla_compilations():
    """Counts what XLA really compiles, independently of pliax."""
    seen = []

    def listen(event, duration_secs, **kwargs):
        if event.endswith("backend_compile_duration"):
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# Laws -------------------------------------------------------------------------------

DTYPES = (np.float32, np.int32, np.bool_, np.complex64, jnp.bfloat16, np.uint8)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    value = np.full(shape, draw(st.integers(0, 5))).astype(dtype)
    return draw(st.sampled_from([np.asarray, jnp.asarray]))(value)


LEAVES = arrays() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.none()
TREES = st.recursive(
    LEAVES,
    lambda t: (
        st.lists(t, max_size=3)
        | st.lists(t, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), t, max_size=3)
    ),
    max_leaves=5,
)


@given(tree=TREES, extra=LEAVES)
def test_equals_jit_and_never_compiles_twice(tree, extra):
    def f(tree, *, extra):
        return jax.tree.map(lambda x: (x, jnp.sin(jnp.sum(x) * 2)), (tree, extra))

    compiled = px_compile(f)
    leaves_equal(compiled(tree, extra=extra), jax.jit(f)(tree, extra=extra))
    assert counts(compiled) == (1, 1, 1)
    compiled(copy.deepcopy(tree), extra=extra)
    assert counts(compiled) == (2, 1, 1)


@given(sizes=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=6))
def test_groups_add_up(sizes):
    f = px_compile(lambda x: x + 1.0, dims={"x": "b, _"}, dynamic=False)
    for size in sizes:
        f(ones((size, 2)))
    stats = f.stats
    assert counts(f) == (len(sizes), len(set(sizes)), len(set(sizes)))
    assert set(stats.groups) == {f"b={size}" for size in sizes}
    for field in dataclasses.fields(stats):
        if field.name != "groups":
            parts = [getattr(group, field.name) for group in stats.groups.values()]
            assert getattr(stats, field.name) == pytest.approx(sum(parts))


def test_counts_agree_with_xla(xla_compilations):
    f = px_compile(lambda x, y: x * y)
    inputs = [np.ones((3,), np.float32), np.ones((4,), np.float32), jnp.int32(2)]
    shared = [jnp.asarray(x) for x in inputs]
    xla_compilations.clear()
    for _ in range(3):
        for x, y in zip(inputs, shared, strict=True):
            f(x, y)
    assert len(xla_compilations) == f.stats.compilations == 3
    assert counts(f) == (9, 3, 3)


# Arguments --------------------------------------------------------------------------


def test_keyword_positional_and_default_arguments():
    f = px_compile(lambda x, y=2.0, *rest, z, **more: (x * y + z, rest, more))
    x = ones((2,))
    np.testing.assert_array_equal(f(x, z=1.0)[0], 3 * x)
    np.testing.assert_array_equal(f(x, 3.0, z=1.0)[0], 4 * x)
    assert f(x, 3.0, x, z=1.0, w=x)[2].keys() == {"w"}
    f(x, z=2.0)
    assert counts(f) == (4, 3, 3)


@pytest.mark.parametrize(
    "x", [1, 2.5, True, 1j, np.float32(3), np.int32(3), np.ones(3)]
)
def test_scalars_and_numpy(x):
    f = px_compile(lambda x: ~x if jnp.asarray(x).dtype == bool else x + x)
    leaves_equal(f(x), jax.jit(f.__wrapped__)(x))
    f(x)
    assert counts(f) == (2, 1, 1)


def test_numpy_and_jax_arrays_share_an_executable():
    f = px_compile(lambda x: x + 1)
    f(np.ones(3, np.float32))
    f(ones(3))
    f(np.ones(3))  # float64, which JAX reads as float32
    assert counts(f) == (3, 1, 1)


def test_weak_type_is_its_own_entry():
    f = px_compile(lambda x: x)
    f(1.0)
    f(jnp.float32(1.0))
    assert counts(f) == (2, 2, 2)
    assert "new weak type: `x`: weak f32[] -> f32[]" in f.explain()


Pair = collections.namedtuple("Pair", ["a", "b"])


def test_a_mark_is_told_as_what_is_new():
    f = px_compile(lambda x: x)
    f(ones(4))
    f(px.dynamic(ones(4), 0))
    assert "new mark: `x`: none -> px.dynamic on axes (0)" in f.explain()


@pytest.mark.parametrize(
    "contain",
    [
        collections.OrderedDict,
        lambda d: collections.defaultdict(int, d),
        flax.core.freeze,
        lambda d: [Pair(**d), d],
    ],
)
def test_containers_of_any_kind_are_padded(contain):
    f = px_compile(lambda tree: sum(x.sum() for x in jax.tree.leaves(tree)))
    for n in (3, 4, 6, 8, 7):
        assert f(contain({"a": ones(n), "b": ones(2)})) == f.__wrapped__(
            contain({"a": ones(n), "b": ones(2)})
        )
    assert f.stats.traces == 2


@pytest.mark.parametrize("known", [list, tuple])
@pytest.mark.parametrize("array", [jnp.ones, lambda n: np.ones(n, np.float32)])
def test_a_known_size_in_a_container_of_another_kind_is_served(known, array):
    f = px_compile(lambda pair: (pair, pair[0].sum()), dims={"pair": "t"})
    for contain in (known, known, tuple, list, lambda pair: Pair(*pair), known):
        pair = contain((array(7), array(7)))
        same, total = f(pair)
        assert type(same) is type(pair) and total == 7
        np.testing.assert_array_equal(same[0], np.ones(7))
    assert f.stats.calls == 6


@jax.tree_util.register_pytree_node_class
class Converting:
    """A container that makes arrays of whatever it is given."""

    def __init__(self, value):
        self.value = jnp.asarray(value)

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_containers_that_convert_what_they_hold_are_served_as_by_jit():
    f = px_compile(lambda x: 2 * x.value)
    for n in (3, 4, 5):
        np.testing.assert_array_equal(f(Converting(np.ones(n))), 2 * np.ones(n))
    assert "of classes that hold nothing but arrays" in f.explain()
    required = px.compile(f.__wrapped__, padding="require")
    with pytest.raises(px.PaddingRefused, match=r"converts(.|\n)*test_compilation.py"):
        required(Converting(np.ones(3)))


def test_prng_keys():
    f = px_compile(lambda key: jax.random.normal(key, (3,)))
    key = jax.random.key(0)
    np.testing.assert_allclose(f(key), jax.random.normal(key, (3,)), rtol=1e-6)
    f(jax.random.split(key)[1])
    assert counts(f) == (2, 1, 1)
    keys = jax.device_put(key, jax.devices()[1])
    assert f(keys).devices() == {jax.devices()[1]}


def test_outputs_fed_back_do_not_recompile():
    f = px_compile(lambda state: jax.tree.map(lambda x: x * 2, state))
    state = {"w": ones((3, 2)), "step": 1.0}
    for _ in range(4):
        state = f(state)
    assert counts(f) == (4, 1, 1)


def test_closed_over_arrays():
    c = jnp.arange(3.0)
    f = px_compile(lambda x: x + c)
    np.testing.assert_array_equal(f(ones(3)), f(ones(3)))
    assert counts(f) == (2, 1, 1)


def test_outputs_that_are_not_arrays():
    assert px_compile(lambda x: None)(1.0) is None
    assert px_compile(lambda x: ())(1.0) == ()
    assert px_compile(lambda: 3)() == 3
    with pytest.raises(TypeError, match="not a valid JAX type"):
        px_compile(lambda x: "text")(1.0)


def test_references():
    def f(ref, x):
        ref[...] += x

    ref = jax.new_ref(jnp.zeros(3))
    compiled = px_compile(f)
    compiled(ref, ones(3))
    compiled(ref, ones(3))
    np.testing.assert_array_equal(ref[...], 2 * ones(3))
    assert counts(compiled) == (2, 1, 1)
    assert "first call" in compiled.explain()


# Static arguments -------------------------------------------------------------------


@pytest.mark.parametrize("call", ["position", "keyword"])
@pytest.mark.parametrize(
    "static",
    [
        {"static_argnames": ("n", "mode")},
        {"static_argnums": 1, "static_argnames": "mode"},
        {"static_argnums": (-1,), "static_argnames": ["mode"]},
    ],
    ids=str,
)
def test_static_arguments(call, static):
    seen = []

    @functools.partial(px_compile, **static)
    def f(x, n=2, *, mode="add"):
        seen.append((n, mode))
        return x + n if mode == "add" else x * n

    def run(x, n, mode):
        return f(x, n, mode=mode) if call == "position" else f(x, n=n, mode=mode)

    x = ones(3)
    for _ in range(2):
        np.testing.assert_array_equal(run(x, 3, "add"), x + 3)
        np.testing.assert_array_equal(run(x, 3, "mul"), x * 3)
        np.testing.assert_array_equal(f(x), x + 2)
    assert seen == [(3, "add"), (3, "mul"), (2, "add")]
    assert counts(f) == (6, 3, 3)
    assert "new static value: `mode`: 'add' -> 'mul'" in f.explain()


@pytest.mark.parametrize(
    "values",
    [(1, 1.0, True), ((1, 2), (1.0, 2.0)), (0.0, -0.0), (float("nan"), float("inf"))],
)
def test_equal_static_values_of_other_types_are_other_values(values):
    f = px_compile(lambda x, n: jnp.zeros(len(repr(n))), static_argnames="n")
    for _ in range(2):
        for value in values:
            assert f(1.0, value).shape == (len(repr(value)),)
    assert counts(f) == (2 * len(values), len(values), len(values))


def test_unhashable_static_value():
    f = px_compile(lambda x, n: x, static_argnames="n")
    with pytest.raises(ValueError, match=r"static argument 'n' is \[1\] of type list"):
        f(1.0, [1])
    assert counts(f) == (0, 0, 0)


def test_a_string_names_its_path_and_the_remedy():
    f = px_compile(lambda batch, mode: batch)
    with pytest.raises(
        TypeError, match=r'(?s)`batch\[\'a\'\]`.*static_argnames="batch"'
    ):
        f({"a": "text"}, 1)
    with pytest.raises(TypeError, match=r'`mode` has type str.*\n.*"mode"'):
        f(1.0, mode="text")
    with pytest.raises(TypeError, match=r"`batch` has type ndarray"):
        f(np.array(["a"]), 1)
    with pytest.raises(OverflowError, match=r"`batch`"):
        f(2**40, 1)
    with pytest.raises(TypeError, match=r"`mode` has type str"):
        jax.jit(lambda x: f(x, "text"))(1.0)
    assert counts(f) == (0, 0, 0)


# Decoration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"static_argnames": "z"}, ValueError, "'z', which is not a parameter"),
        ({"donate_argnums": 2}, ValueError, "donate_argnums holds 2, but"),
        ({"donate_argnums": (0, -3)}, ValueError, "donate_argnums holds -3, but"),
        ({"donate_argnums": 0, "static_argnames": "x"}, ValueError, "both static and"),
        ({"static_argnums": 2}, ValueError, "static_argnums holds 2, but.* x, y"),
        ({"static_argnums": (True,)}, TypeError, "static_argnums holds True of type"),
        ({"donate_argnames": "z"}, ValueError, "donate_argnames names 'z', but.* x, y"),
        ({"donate_argnames": "x", "static_argnums": 0}, ValueError, "both static and"),
        ({"dims": {"z": "b"}}, ValueError, "'z', which is not a parameter"),
        ({"dims": {"x": "2*"}}, ValueError, "'2\\*' cannot be read"),
        ({"dims": {"x": "b, ..., t"}}, ValueError, r"'\.\.\.' cannot be read"),
        ({"dims": {"x": "b,, t"}}, ValueError, "'' cannot be read"),
        ({"dims": {"x y": "b"}}, ValueError, "not an argument path"),
        ({"dims": {"x": 3}}, TypeError, "is 3 of type int"),
        ({"dims": {"y": "b"}, "static_argnames": "y"}, ValueError, "static and has no"),
        ({"static_argnames": (1,)}, TypeError, "static_argnames"),
        ({"donate_argnums": (True,)}, TypeError, "donate_argnums holds True"),
        ({"dynamic": 3}, TypeError, "dynamic"),
        ({"dims": "b"}, TypeError, "dims"),
    ],
)
def test_wrong_options_are_refused_at_decoration(options, error, text):
    def f(x, y):
        return x

    with pytest.raises(error, match=text):
        px_compile(f, **options)


def test_not_callable():
    with pytest.raises(TypeError):
        px_compile(3)  # pyright: ignore[reportArgumentType]


def double(x):
    return 2 * x


def test_a_compiled_function_is_pickled_by_its_name_as_functions_are():
    named = px_compile(double)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "double", named)
        assert pickle.loads(pickle.dumps(named)) is named
    for f in (named, px_compile(lambda x: x)):
        with pytest.raises(pickle.PicklingError, match=r"by its name.*\n.*__wrapped__"):
            pickle.dumps(f)


@pytest.mark.parametrize("nothing", [None, ()])
def test_no_static_and_no_donated_arguments(nothing):
    f = px_compile(lambda x: x + 1, static_argnames=nothing, donate_argnums=nothing)
    x = ones(3)
    np.testing.assert_array_equal(f(x), f(x))
    assert counts(f) == (2, 1, 1)


@pytest.mark.parametrize(
    ("static", "donated", "text"),
    [
        (3, (), "static_argnames holds 3 of type int"),
        (b"x", (), "static_argnames holds 120 of type int"),
        ((None,), (), "static_argnames holds None"),
        ((), "x", "donate_argnums holds 'x' of type str"),
        ((), 1.0, "donate_argnums holds 1.0 of type float"),
        ((), (None,), "donate_argnums holds None"),
    ],
)
def test_options_of_a_wrong_type_are_named(static, donated, text):
    with pytest.raises(TypeError, match=rf"px\.compile\(f\): {text}"):
        read_parameters(lambda x: x, static, donated, "px.compile(f)")


@pytest.mark.parametrize("given", [range(1, 3), (1, 2), [1, -1]])
def test_static_positions_come_in_any_collection(given):
    f = px_compile(lambda x, n, m: x * n + m, static_argnums=given)
    assert float(f(jnp.float32(3), 2, 1)) == 7
    assert f.stats.traces == 1


def test_a_name_that_two_arguments_may_have_is_refused():
    def f(x, /, **others):
        return others.get("x", x)

    assert px_compile(f, static_argnames="x")(1.0, y=2.0) == 1.0
    with pytest.raises(ValueError, match=r"'x' is passed by name, into \*\*others"):
        px_compile(f)(1.0, x=2.0)
    assert px_compile(f, static_argnums=0)(1.0, y=2.0) == 1.0


def test_static_positions_from_the_end_need_an_end():
    with pytest.raises(
        ValueError, match=r"holds -1, which counts from the end, .*rest"
    ):
        px_compile(lambda x, *rest: x, static_argnums=-1)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (staticmethod, r"Put @staticmethod outside, above @px\.compile\.$"),
        (classmethod, r'above @px\.compile\(static_argnames="cls"\)\.$'),
    ],
)
def test_method_descriptors_belong_outside(kind, remedy):
    def method(cls, x):
        return x

    with pytest.raises(TypeError, match=f"method is a {kind.__name__} object") as e:
        check_callable(kind(method))
    assert re.search(remedy, str(e.value))
    for decorate in (px_compile, px_compile(dims={"x": "b"})):
        with pytest.raises(TypeError):
            decorate(kind(method))


def test_classmethod_outside():
    class Shift:
        by = 3

        @classmethod
        @px_compile(static_argnames="cls")
        def add(cls, x):
            return x + cls.by

    assert Shift.add(1) == Shift().add(1) == 4


def test_decorator_forms_keep_the_function():
    @px_compile(dims={"x": "b"}, dynamic=False)
    def f(x: jax.Array, *, scale: float = 2.0) -> jax.Array:
        """Scales."""
        return x * scale

    assert isinstance(f, CompiledFunction)
    names = [getattr(f, f"__{name}__") for name in ("name", "doc", "module")]
    assert names == ["f", "Scales.", __name__]
    assert list(inspect.signature(f).parameters) == ["x", "scale"]
    assert f.__wrapped__(3, scale=2) == 6
    assert "px.compile" in repr(f)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(f, "__wrapped__", None)  # noqa: B010
    with pytest.raises(AttributeError):
        setattr(f, "stats", None)  # noqa: B010
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(f.stats, "calls", 3)  # noqa: B010
    assert copy.deepcopy({"f": f})["f"] is f
    assert copy.copy(f) is f


@pytest.mark.parametrize(("dynamic", "traces"), [(None, 2), (True, 1), (False, 4)])
def test_dynamic_decides_how_many_traces_changing_sizes_take(dynamic, traces):
    f = px_compile(lambda x: x + 1, dynamic=dynamic)
    for size in (3, 4, 5, 6):
        np.testing.assert_array_equal(f(np.arange(size)), np.arange(size) + 1)
    assert f.stats.traces == traces


def test_partials_and_callable_objects():
    f = px_compile(functools.partial(lambda a, x, k: a * x + k, 2.0, k=1.0))
    np.testing.assert_array_equal(f(ones(3)), 3 * ones(3))
    assert f(ones(3), k=3.0)[0] == 5.0

    class Model:
        def __call__(self, x):
            return x * 2

    g = px_compile(Model())
    np.testing.assert_array_equal(g(ones(3)), 2 * ones(3))
    assert "px.compile(Model)" in g.explain()
    h = px_compile(jnp.add)
    np.testing.assert_array_equal(h(ones(3), ones(3)), 2 * ones(3))


def test_callables_without_a_signature():
    class Opaque:
        __signature__ = "none"

        def __call__(self, *args, **kwargs):
            return args[0] * kwargs["n"]

    f = px_compile(Opaque(), static_argnames="n", dims={"args[0]": "b"})
    np.testing.assert_array_equal(f(ones(3), n=2), 2 * ones(3))
    assert list(f.stats.groups) == ["b<=3"]
    with pytest.raises(TypeError, match=r"`args\[0\]` has type str"):
        f("text", n=2)


def test_methods():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Linear:
        w: jax.Array

        @px_compile(dims={"x": "b, _"}, donate_argnums=1)
        def __call__(self, x):
            return x @ self.w

        @staticmethod
        @px_compile
        def double(x):
            return 2 * x

    layer, x = Linear(ones((3, 3))), ones((4, 3))
    np.testing.assert_array_equal(layer(x), 3 * ones((4, 3)))
    layer.__call__(ones((4, 3)))
    assert x.is_deleted()
    assert counts(Linear.__call__) == (2, 1, 1)
    assert layer.__call__.stats.groups["b<=4"].calls == 2
    assert Linear.double(2.0) == 4.0

    class Plain:
        @px_compile
        def method(self, x):
            return x

    with pytest.raises(TypeError, match="`self` has type Plain"):
        Plain().method(1.0)


def test_two_compilations_of_one_function_are_independent():
    def f(x):
        return x + 1

    first, second = px_compile(f), px_compile(f)
    first(1.0)
    second(1.0)
    assert counts(first) == counts(second) == (1, 1, 1)


# Donation ---------------------------------------------------------------------------


def test_donated_buffers_are_deleted():
    f = px_compile(lambda s, x: jax.tree.map(lambda a: a + x, s), donate_argnums=(0,))
    state, x = {"w": ones((4, 4)), "b": ones((4, 4))}, jnp.float32(1.0)
    for _ in range(3):
        old, state = state, f(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert not x.is_deleted()
    np.testing.assert_array_equal(state["w"], 4 * ones((4, 4)))
    assert counts(f) == (3, 1, 1)
    with pytest.raises(RuntimeError, match="deleted"):
        f(old, x)


def note_of(f, *args, **kwargs):
    with pytest.raises(RuntimeError, match="Array has been deleted") as caught:
        f(*args, **kwargs)
    assert type(caught.value) is RuntimeError
    return "\n".join(getattr(caught.value, "__notes__", []))


def test_a_donated_argument_used_again_is_named():
    f = px_compile(lambda s, x: jax.tree.map(lambda a: a + x, s), donate_argnums=0)
    state = {"b": ones(3), "w": ones(3)}
    f(state, 1.0)
    cause = "donate_argnums (0) gave it away at an earlier call."
    assert "argument `s['b']` and 1 more cannot" in note_of(f, state, 1.0)
    assert cause in note_of(f, s=state, x=1.0)
    assert cause in note_of(
        f, state, 2
    )  # a new kind of call, refused while it compiles
    assert "argument `s['w']` cannot" in note_of(f, state | {"b": ones(3)}, 1.0)
    with jax.disable_jit():
        assert cause in note_of(f, state, 1.0)
    for use in (px_compile(lambda p: p["w"] * 2), px_compile(lambda *a: a[0]["w"] * 2)):
        assert "an earlier call gave it away through" in note_of(use, state)
    assert "argument `x` cannot" in note_of(f, {"w": ones(3)}, state["w"])


def test_donated_rest_arguments_are_named():
    f = px_compile(lambda x, *rest: [a + x for a in rest], donate_argnums=2)
    x = ones(3)
    f(1.0, ones(3), x)
    assert "`rest[1]` cannot be read again: donate_argnums (2)" in note_of(
        f, 1.0, ones(3), x
    )


def test_other_errors_get_no_note():
    gone = ones(3)
    gone.delete()
    closed = px_compile(lambda x: x + gone, donate_argnums=0)
    assert "px.compile" not in note_of(closed, ones(3))

    def fail(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        px_compile(fail)(ones(3))
    notes = getattr(caught.value, "__notes__", [])  # JAX has one on its traceback
    assert not any("px.compile" in note for note in notes)


@pytest.mark.parametrize(
    "donated", [{"donate_argnums": -1}, {"donate_argnames": "y"}], ids=str
)
def test_donation_counts_from_the_end_and_by_keyword(donated):
    f = px_compile(lambda x, y: x + y, **donated)
    x, y, z = ones(3), ones(3), ones(3)
    f(x, y)
    f(x, y=z)
    assert (x.is_deleted(), y.is_deleted(), z.is_deleted()) == (False, True, True)


def test_donation_with_static_arguments_before():
    f = px_compile(lambda n, x: x + n, donate_argnums=1, static_argnames="n")
    x = ones(3)
    np.testing.assert_array_equal(f(2, x), 3 * ones(3))
    assert x.is_deleted()


# Placement --------------------------------------------------------------------------


def test_committed_arrays_have_their_own_entry():
    f = px_compile(lambda x: x + 1)
    x = ones(3)
    for device in jax.devices()[1:3]:
        assert f(jax.device_put(x, device)).devices() == {device}
    f(x)
    f(jax.device_put(x, jax.devices()[1]))
    assert f.stats.compilations == 3
    assert "new sharding: `x`: " in f.explain()


def test_default_device():
    f = px_compile(lambda x: x + 1)
    x = np.ones(3, np.float32)
    f(x)
    with jax.default_device(jax.devices()[2]):
        assert f(x).devices() == {jax.devices()[2]}
    f(x)
    assert f.stats.compilations == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    f = px_compile(lambda a: a * 2 + 1)
    a = np.arange(32, dtype=np.float32).reshape(8, 4)
    specs = [jax.P("x"), jax.P("x", None), jax.P(None, "y"), jax.P(), jax.P(None, None)]
    with jax.set_mesh(mesh):
        for spec in specs:
            out = f(jax.device_put(a, NamedSharding(mesh, spec)))
            np.testing.assert_array_equal(out, a * 2 + 1)
            again = f(out)
            wanted = NamedSharding(mesh, spec)
            assert again.sharding.is_equivalent_to(wanted, 2)
    assert (f.stats.calls, f.stats.compilations) == (10, 3)
    assert "P('x') on mesh x=4, y=2 -> P(None, 'y')" in f.explain()


def test_incompatible_devices_raise_as_in_jit():
    f = px_compile(lambda x, y: x + y)
    x, y = (jax.device_put(ones(3), d) for d in jax.devices()[:2])
    with pytest.raises(ValueError, match="incompatible devices"):
        f(x, y)
    assert (f.stats.calls, f.stats.compilations) == (0, 0)
    f(x, x)


# Ambient state ----------------------------------------------------------------------


def test_x64_is_its_own_entry():
    f = px_compile(lambda x: x + np.float64(1))
    x = np.ones(3)
    for _ in range(2):
        assert f(x).dtype == np.float32
        with jax.enable_x64(True):
            assert f(x).dtype == np.float64
    assert f.stats.compilations == 2
    assert "jax_enable_x64: False -> True" in f.explain()


def test_disable_jit_runs_eagerly():
    seen = []

    @px_compile
    def f(x):
        seen.append(x)
        return x + 1

    for _ in range(2):
        with jax.disable_jit():
            assert f(ones(())) == 2
    assert all(not isinstance(x, Tracer) for x in seen)
    assert counts(f) == (2, 0, 0)
    assert f(ones(())) == 2
    assert counts(f) == (3, 1, 1)


def test_debug_nans():
    f = px_compile(lambda x: jnp.log(x))
    f(ones(3))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(-ones(3))


def test_effects():
    seen = []

    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x + 1

    compiled = px_compile(f)
    for _ in range(3):
        compiled(jnp.float32(2.0))
    jax.effects_barrier()
    assert seen == [2.0] * 3
    assert counts(compiled) == (3, 1, 1)


# Transformations --------------------------------------------------------------------


def test_inside_transformations():
    f = px_compile(lambda x, n=3: jnp.sum(x**n), static_argnames="n", dims={"x": "b"})
    x = jnp.arange(1.0, 4.0)
    for _ in range(2):
        np.testing.assert_allclose(jax.grad(f)(x), 3 * x**2)
        np.testing.assert_allclose(jax.jit(f)(x), 36.0)
        np.testing.assert_allclose(jax.vmap(f)(x[:, None]), x**3)
        np.testing.assert_allclose(
            jax.vmap(jax.grad(f))(x[:, None]), 3 * x[:, None] ** 2
        )
        np.testing.assert_allclose(jax.hessian(f)(x), jnp.diag(6 * x))
        assert jax.eval_shape(f, x).shape == ()
    total = jax.lax.scan(lambda c, row: (c + f(row), None), 0.0, x[:, None])[0]
    np.testing.assert_allclose(total, 36.0)
    assert f.stats.compilations == 0
    assert f.stats.traces == 2  # b=3 and b=1, shared by every transformation
    assert sum(g.calls for g in f.stats.groups.values()) == f.stats.calls
    assert "inside other transformations" in f.explain()


def test_transformations_inside_and_closed_over_tracers():
    value = px_compile(jax.value_and_grad(lambda x: jnp.sum(x * x)))
    np.testing.assert_array_equal(value(ones(3))[1], 2 * ones(3))
    out = jax.vmap(lambda a: px_compile(lambda b: a + b)(1.0))(ones(3))
    np.testing.assert_array_equal(out, 2 * ones(3))


def test_leaked_tracers_raise_as_in_jit():
    leaked = []
    jax.jit(lambda x: leaked.append(x))(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        px_compile(lambda x: x)(leaked[0])


def test_calls_from_host_callbacks():
    inner = px_compile(lambda x: x * 2)

    def f(x):
        return jax.pure_callback(lambda v: np.asarray(inner(np.asarray(v))), x, x)

    outer = px_compile(f)
    for _ in range(2):
        np.testing.assert_array_equal(outer(ones(3)), 2 * ones(3))
    assert counts(inner) == counts(outer) == (2, 1, 1)


def test_nested():
    inner = px_compile(lambda x: x + 1, dims={"x": "b"})
    outer = px_compile(lambda x: inner(inner(x)) * 2)
    np.testing.assert_array_equal(outer(ones(3)), 6 * ones(3))
    outer(ones(3))
    assert counts(outer) == (2, 1, 1)
    assert counts(inner) == (2, 1, 0)
    inner(ones(3))
    assert inner.stats.compilations == 1


def test_recursion():
    @px_compile(static_argnames="n")
    def factorial(x, n):
        return x if n <= 1 else n * factorial(x, n - 1)

    assert factorial(1.0, 5) == 120.0
    assert factorial(1.0, 5) == 120.0
    assert (factorial.stats.traces, factorial.stats.compilations) == (5, 1)
    assert factorial.stats.calls == 6


# Failures, threads, statistics ------------------------------------------------------


def test_user_errors_keep_type_and_traceback():
    class BoomError(Exception):
        pass

    healthy = False

    def broken(x):
        if not healthy:
            raise BoomError("here")
        return x

    f = px_compile(broken)
    for _ in range(2):
        with pytest.raises(BoomError, match="here") as caught:
            f(1.0)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "broken"
    assert counts(f) == (0, 2, 0)
    healthy = True
    f(1.0)
    assert counts(f) == (1, 3, 1)


def test_wrong_number_of_arguments():
    f = px_compile(lambda x: x)
    with pytest.raises(TypeError):
        f(1.0, 2.0)
    with pytest.raises(TypeError):
        f()
    assert f.stats.calls == 0


def in_threads(work, count=8):
    """The errors of so many calls at once."""
    errors = []

    def one(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_share_one_compilation():
    start = threading.Barrier(8)

    @px_compile
    def f(x):
        time.sleep(0.02)
        return x * 2

    def work(i):
        start.wait()
        for size in (2, 3, 2):
            np.testing.assert_array_equal(f(np.full(size, i)), np.full(size, 2 * i))

    assert not in_threads(work)
    assert counts(f) == (24, 2, 2)


def test_threads_may_call_with_new_kinds_of_arguments_at_once():
    """Each static value is a kind of its own, and all are looked through for each."""
    f = px_compile(lambda x, n: x, static_argnames="n", recompile_limit=10**6)

    def work(i):
        for k in range(40):
            f(1.0, (i, k))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert not in_threads(work)
    finally:
        sys.setswitchinterval(interval)
    assert f.stats.traces == 320


def test_a_report_lists_all_that_its_title_counts(monkeypatch):
    """Though another thread builds an executable while it is written."""
    f = px_compile(lambda x: x + 1)
    f(jnp.ones(3))
    make = _reports.table

    def interrupted(*columns):
        assert not in_threads(lambda i: f(jnp.ones(50)), 1)
        return make(*columns)

    monkeypatch.setattr(_reports, "table", interrupted)
    assert "1 calls, 1 traces, 1 compilations" in f.explain()


def test_a_static_argument_by_name_is_told_from_one_by_position():
    f = px_compile(lambda x, n: x * n, static_argnames="n")
    f(1.0, 2)
    f(1.0, n=2)
    assert "new structure: `n` by name, not by position" in f.explain()
    assert "new configuration" not in f.explain()


def test_seconds():
    def f(x):
        time.sleep(0.05)
        return x + 1

    compiled = px_compile(f)
    compiled(1.0)
    first = compiled.stats
    assert first.trace_seconds >= 0.05
    assert first.lower_seconds > 0
    assert first.compile_seconds > 0
    assert 0 < first.call_seconds < 0.05
    compiled(1.0)
    second = compiled.stats
    assert second.call_seconds > first.call_seconds
    assert second.trace_seconds == first.trace_seconds
    assert first.calls == 1  # a snapshot
    assert type(first.calls) is type(first.traces) is type(first.compilations) is int
    traced = px_compile(f)
    jax.eval_shape(traced, 1.0)
    assert traced.stats.trace_seconds >= 0.05
    assert traced.stats.call_seconds < 0.05


def test_size_classes():
    f = px_compile(
        lambda batch, mask=None, *, k=1: batch["tokens"].sum(),
        dims={"batch": {"tokens": "b, t", "w": None}, "mask": "(b, ...)", "k": ""},
        dynamic=False,
    )
    batch = {"tokens": ones((8, 4)), "w": ones(3)}
    f(batch)
    f(batch, ones((8, 4, 2)), k=2)
    f({"tokens": ones((2, 4)), "w": ones(3)})
    groups = f.stats.groups
    assert list(groups) == ["b=8, t=4", "b=2, t=4"]
    assert (groups["b=8, t=4"].calls, groups["b=8, t=4"].compilations) == (2, 2)
    assert groups["b=2, t=4"].groups == {}
    with pytest.raises(TypeError, match="a snapshot"):
        groups["x"] = groups["b=2, t=4"]
    assert pickle.loads(pickle.dumps(f.stats)) == copy.deepcopy(f.stats) == f.stats
    assert dataclasses.asdict(f.stats)["groups"]["b=8, t=4"]["calls"] == 2
    assert "b=8, t=4" in f.explain()
    assert px_compile(lambda x: x).stats.groups == {}


@pytest.mark.parametrize("path", ["batch.tokens", "batch['tokens']", 'batch["tokens"]'])
def test_pytree_paths(path):
    f = px_compile(lambda batch: batch, dims={path: "b, 4"})
    f({"tokens": ones((8, 4))})
    assert list(f.stats.groups) == ["b<=9"]
    with pytest.raises(ValueError, match="no array there"):
        f({"other": ones((8, 4))})
    with pytest.raises(ValueError, match=r"dimension 1 of batch\['tokens'\] is 4, but"):
        f({"tokens": ones((8, 5))})


def test_disagreeing_sizes():
    f = px_compile(lambda x, y: (x, y), dims={"x": "b, _", "y": "b"})
    text = r"binds 'b' to 8 in x: f32\[8,2\] and to 6 in y: f32\[6\]"
    with pytest.raises(ValueError, match=text):
        f(ones((8, 2)), ones((6,)))
    with pytest.raises(ValueError, match="has 3 dimensions"):
        f(ones((8, 2, 1)), ones((8,)))
    with pytest.raises(ValueError, match="binds 'b'"):
        jax.jit(f)(ones((8, 2)), ones((6,)))
    assert counts(f) == (0, 0, 0)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (("b", "t"), '"b, t"'),
        (["b", None], '"b, _"'),
        (("b", "..."), r'"b, \.\.\."'),
        ((), '""'),
    ],
)
def test_a_tuple_of_names_for_one_array_suggests_the_string(spec, text):
    f = px_compile(lambda x: x, dims={"x": spec})
    with pytest.raises(ValueError, match=f"Write its shape as one string, {text}"):
        f(ones((2, 3)))
    assert counts(f) == (0, 0, 0)
    g = px_compile(lambda batch: batch, dims={"batch": {"x": spec}})
    with pytest.raises(ValueError, match=rf"batch\['x'\] the {type(spec).__name__} .*"):
        g({"x": ones((2, 3))})


def test_a_tuple_of_dims_for_one_array_suggests_axes():
    f = px_compile(lambda x: x, dims={"x": (px.Dim("b"), None)})
    with pytest.raises(ValueError, match=r'axis is which, {0: Dim\("b", …\)}'):
        f(ones((2, 3)))


def test_a_tuple_of_shapes_for_a_tuple():
    f = px_compile(lambda x: x, dims={"x": ("b", "t")})
    f((ones(2), ones(3)))
    f(x=[ones(2), ones(4)])
    assert list(f.stats.groups) == ["b<=2, t<=3", "b<=2, t<=4"]
    with pytest.raises(ValueError, match="it has 2 dimensions"):
        f((ones((2, 3)), ones(3)))


# Explanations -----------------------------------------------------------------------


def tokens(b, t):
    names = ("inputs", "positions", "segments", "targets")
    return {name: np.ones((b, t), np.int32) for name in names} | {"scale": ones(7)}


@pytest.mark.parametrize(
    "dims",
    [
        {"batch['segments']": "b, t"},
        {"batch": {"segments": "b, t", "scale": "_"}},
    ],
)
def test_named_sizes_fold_what_changes_along(dims):
    f = px_compile(lambda batch: batch, dims=dims, dynamic=False)
    for b, t in [(8, 448), (8, 512), (4, 512), (2, 16)]:
        f(tokens(b, t))
    lines = [x.rstrip() for x in f.explain().splitlines() if "new" in x]
    folded = "in batch['segments'] and 3 more"
    wanted = ["t: 448 -> 512", "b: 8 -> 4", "b: 4 -> 2, t: 512 -> 16"]
    for line, sizes in zip(lines, wanted, strict=True):
        assert line.endswith(f"  new size: {sizes} {folded}")


def test_a_prefix_names_every_array_below():
    f = px_compile(lambda batch, n: batch, dims={"batch": "b, ..."}, dynamic=False)
    f({"x": ones((8, 2)), "y": ones(8)}, ones(3))
    f({"x": ones((4, 2)), "y": ones(4)}, ones(3))
    assert "new size: b: 8 -> 4 in batch['x'] and 1 more\n" in f.explain()


def test_what_named_sizes_do_not_explain_is_listed():
    f = px_compile(lambda x, y, z: x, dims={"x": "b, t"}, dynamic=False)
    f(ones((8, 4)), ones((8, 4)), ones((4, 3)))
    f(ones((8, 6)), ones((7, 6)), jnp.ones((6, 3), jnp.int32))
    for reason in (
        "new size: t: 4 -> 6 in x and 1 more\n",
        "new size: `y`: f32[8,4] -> f32[7,6]",
        "new dtype: `z`: f32[4,3] -> i32[6,3]",
    ):
        assert reason in f.explain()
    assert f.explain().count("new") == 3


def test_sizes_that_stayed_name_nothing():
    f = px_compile(lambda x, y: x, dims={"x": "b, _"}, dynamic=False)
    f(ones((8, 4)), ones(4))
    f(ones((8, 6)), ones((4, 1)))
    assert "new size: `x`: f32[8,4] -> f32[8,6]" in f.explain()
    assert "new rank: `y`: f32[4] -> f32[4,1]" in f.explain()
    f(ones((9, 7)), ones(4))
    assert "new size: `x`: f32[8,6] -> f32[9,7]" not in f.explain()
    assert "new size: `x`: f32[8,4] -> f32[9,7]" in f.explain()


def test_the_most_similar_call_changes_the_fewest_sizes():
    f = px_compile(lambda x: x, dims={"x": "b, t"}, dynamic=False)
    for shape in [(8, 16), (4, 64), (8, 32)]:
        f(ones(shape))
    assert "new size: t: 16 -> 32 in x\n" in f.explain()


def test_explain_names_each_reason():
    f = px_compile(lambda x, y=None: x)
    f(ones((8, 128)))
    f(ones((8, 256)))
    f(jnp.ones((8, 256), jnp.int32))
    f(ones((8, 256, 1)))
    f({"a": ones((8, 256))})
    f([ones((8, 256))])
    f((ones((8, 256)),))
    f(ones((8, 128)), ones(1))
    text = f.explain()
    for reason in (
        "first call",
        "new size: `x`: f32[8,128] -> f32[8,256]",
        "new dtype: `x`: f32[8,256] -> i32[8,256]",
        "new rank: `x`: f32[8,256] -> f32[8,256,1]",
        "new structure: `x['a']` added",
        "new structure: `x[0]` added",
        "new structure: PyTreeDef((([*],), {})) -> PyTreeDef((((*,),), {}))",
        "new structure: `y` added",
        "px.compile(<lambda>): 8 calls, 8 traces, 8 compilations",
        "compile ms",
    ):
        assert reason in text
    assert "\x1b" not in text


def test_explain_before_any_call():
    assert "0 calls, 0 traces, 0 compilations" in px_compile(lambda x: x).explain()


def test_unused_donation_warns_once():
    f = px_compile(lambda x: jnp.sum(x), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        f(ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(ones(3))


def test_importing_does_not_load_rich():
    code = "import sys, pliax.transforms; sys.exit('rich' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_forms_than_are_dispatched_at_once_are_served():
    compiled = px_compile(lambda *xs: sum(xs))
    for _ in range(2):
        for count in range(1, 21):
            assert compiled(*[1.0] * count) == count
    assert compiled.stats.compilations == 20


def test_a_known_call_with_something_more_says_what_is_wrong_with_it():
    compiled = px_compile(lambda x, y=1.0: x * y)
    x = jnp.ones(3)
    for _ in range(2):
        compiled(x)
        with pytest.raises(TypeError, match="argument `y` has type str"):
            compiled(x, "text")
        compiled(x, x)


def test_calls_of_every_form_find_their_own_executables():
    """By position, by name and by default, in any order, also after a wrong call."""

    def f(x, y=1.0, *, z=None):
        return x * y if z is None else x * y + z["a"]

    compiled, jitted = px_compile(f, dynamic=True), jax.jit(f)
    built = []
    for _ in range(3):
        for n in (3, 5):
            x = jnp.arange(n, dtype=jnp.float32)
            forms = [((x,), {}), ((x, x), {}), ((x,), {"y": x}), ((), {"x": x, "y": x})]
            forms += [((), {"y": x, "x": x}), ((x,), {"z": {"a": x}})]
            for args, kwargs in forms:
                found = compiled(*args, **kwargs)
                assert found.tolist() == jitted(*args, **kwargs).tolist()
            with pytest.raises(TypeError):
                compiled(x, x, x)
            with pytest.raises(TypeError):
                compiled(z={"a": x})
        built.append(compiled.stats.compilations)
    assert built[0] == built[-1]
    assert compiled.stats.calls == 36


def test_an_executable_for_another_device_is_counted_in_whatever_call_it_is_built():
    for before in (1, 2, 5, 16, 17, 18, 40):
        f = px_compile(lambda x: x + 1)
        for _ in range(before):
            f(ones(3))
        assert f.stats.compilations == 1
        f(jax.device_put(ones(3), jax.devices()[1]))
        assert (f.stats.calls, f.stats.compilations) == (before + 1, 2)
        assert f.stats.traces == 1 and 0 < f.stats.call_seconds < 1


def test_a_partial_of_a_compiled_function_finds_what_it_learns_later():
    f = px_compile(lambda x, k: x.sum() * k)
    doubled = functools.partial(f, k=2)
    for n in (3, 4, 5, 6, 3):
        assert doubled(ones(n)) == 2 * n
    assert doubled.func is f and inspect.unwrap(f) is f.__wrapped__
    assert f.stats.calls == 5 and f.stats.traces == 2


@pytest.mark.parametrize("count", [1, 8, 9])
def test_wrong_numbers_of_arguments_are_told_as_jax_tells_them(count):
    names = [f"x{i}" for i in range(count)]
    f = eval(f"lambda {', '.join(names)}: {' + '.join(names)}")
    compiled, args = px_compile(f), [ones(3)] * count
    compiled(*args)
    assert (compiled(*args) == count).all()
    for wrong in (args[1:], [*args, ones(3)]):
        with pytest.raises(TypeError) as expected:
            jax.jit(f)(*wrong)
        with pytest.raises(TypeError, match=re.escape(str(expected.value))):
            compiled(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'a0'"):
        compiled(*args, a0=1)
    assert (compiled(*args) == count).all()


# Axes counted from the end ------------------------------------------------------------


@given(rank=st.integers(1, 4), data=st.data())
def test_a_negative_axis_is_the_one_counted_from_the_end(rank, data):
    axis = data.draw(st.integers(-rank, -1))
    f = px.compile(lambda x: x.sum(axis), dims={"x": {axis: px.Dim("t", max=64)}})
    shape = [2] * rank
    for shape[axis] in (5, 6, 7):
        f(np.ones(shape, np.float32))
    assert (f.stats.traces, f.stats.compilations) == (1, 2)


def test_negative_axes_are_read_off_arrays_of_any_rank():
    f = px.compile(lambda x: jnp.cumsum(x, -1), dims={"x": {-1: "t"}})
    for shape in ((5,), (3, 6), (2, 2, 7)):
        x = np.ones(shape, np.float32)
        np.testing.assert_array_equal(f(x), np.cumsum(x, -1))
    assert f.stats.groups.keys() == {"t<=5", "t<=7"}


def test_negative_axes_bind_names_as_others_do():
    f = px.compile(lambda x, y: x + y, dims={"x": {-1: "t"}, "y": "t"})
    with pytest.raises(ValueError, match=r"binds 't' to 3 in x.*and to 4 in y"):
        f(np.ones((2, 3), np.float32), np.ones(4, np.float32))


@pytest.mark.parametrize(
    "axes, shape, text",
    [
        ({-3: "t"}, (3, 5), r"has 2 dimensions.*\nCount axes from 0 to 1, or from -1"),
        ({-1: "t", 2: "s"}, (3, 5), r"has 2 dimensions.*\nCount axes from 0 to 1"),
        ({-1: "t", 1: "t"}, (3, 5), "the axis 1 is -1 as well.\nName it once"),
        ({0: "b", -1: "t"}, (5,), "the axis 0 is -1 as well.\nName it once"),
        ({-1: 4}, (3, 5), "dims says that dimension 1 of x is 4, but it is 5"),
        ({-1: "2*t"}, (3, 5), r"dimension 1 of x is 2\*t, but it is 5"),
    ],
)
def test_axes_that_are_none_or_named_twice_are_refused(axes, shape, text):
    with pytest.raises(ValueError, match=text):
        px.compile(lambda x: 2 * x, dims={"x": axes})(np.ones(shape, np.float32))
