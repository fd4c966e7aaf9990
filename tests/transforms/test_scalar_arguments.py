"""Laws of arguments that are no arrays: truths, numbers, integers inside, references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import pliax as px


WAYS = [
    {},
    {"dims": {"x": "t"}},
    {"dynamic": True},
    {"dynamic": True, "padding": "never"},
]
SCALARS = st.sampled_from(
    [True, False, np.bool_(True), jnp.bool_(False), 0.0, 1.0, np.float32(2), 0, 1]
)


@pytest.mark.parametrize("options", WAYS)
def test_a_parameter_may_have_any_name(options):
    def made(x, _pliax_sizes, _sizes=1):  # the first is what ours is called for JAX
        return x * _pliax_sizes + _sizes

    f = px.compile(made, **options)
    for n in (3, 4, 5):
        found = f(jnp.ones(n), _pliax_sizes=2.0)
        np.testing.assert_array_equal(found, np.full(n, 3))


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("name", ["_sizes", "sizes", "args", "self", "bound"])
def test_what_kwargs_take_may_have_any_name(options, name):
    f = px.compile(lambda x, **rest: x * rest[name], **options)
    for n in (3, 4, 5):
        np.testing.assert_array_equal(f(jnp.ones(n), **{name: 2.0}), np.full(n, 2))


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("where", ["by position", "by name", "inside"])
@given(calls=st.lists(st.tuples(st.integers(3, 6), SCALARS), min_size=2, max_size=5))
def test_a_scalar_is_a_run_time_value_as_in_jit(where, options, calls):
    def f(x, more):
        flag = more["flag"] if where == "inside" else more
        return jnp.where(jnp.asarray(flag).astype(bool), x * 2, x * 3), flag

    compiled, jitted = px.compile(f, **options), jax.jit(f)
    for n, flag in calls:
        more = {"flag": flag} if where == "inside" else flag
        args, kwargs = (jnp.ones(n), more), {}
        if where == "by name":
            args, kwargs = args[:1], {"more": more}
        found, wanted = compiled(*args, **kwargs), jitted(*args, **kwargs)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("options", WAYS)
def test_a_branch_on_a_truth_is_the_error_that_jit_has(options):
    compiled = px.compile(lambda x, s: x if s else -x, **options)
    for n in (3, 4):
        with pytest.raises(jax.errors.TracerBoolConversionError, match="argument s"):
            compiled(jnp.ones(n), True)


USES = {
    "end": lambda x, n: x[:n],
    "axis": lambda x, n: x[None].sum(n - 1),
    "shape": lambda x, n: x.reshape(n, -1),
    "branch": lambda x, n: x * n if n > 1 else -x,
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "within",
    [
        jax.jit,
        jax.vmap,
        jax.jacobian,
        lambda f: lambda x: jax.lax.scan(lambda _, y: (0, f(y)), 0, x)[1],
        px.compile,
        lambda f: px.compile(f, dynamic=True),
    ],
    ids=["jit", "vmap", "jacobian", "scan", "compile", "dynamic"],
)
def test_integers_are_inside_a_transformation_what_they_are_to_the_function(
    use, within
):
    compiled, x = px.compile(use), jnp.arange(12.0).reshape(2, 6)
    for n in (1, 2):
        wanted = within(lambda x, n=n: use(x, n))(x)
        np.testing.assert_array_equal(within(lambda x, n=n: compiled(x, n))(x), wanted)


def test_an_integer_of_an_outer_function_is_one_to_the_inner():
    inner = px.compile(lambda x, n: x[:n])
    outer = px.compile(lambda x, n: inner(x, n) * n)
    for n in (1, 2, 3, 2):
        np.testing.assert_array_equal(outer(jnp.ones(5), n), np.full(n, n))


def test_an_error_inside_a_transformation_is_the_function_s():
    compiled = px.compile(lambda x, n: x @ jnp.ones((n, n)))
    with pytest.raises(TypeError, match="contracting dimensions"):
        jax.jit(lambda x: compiled(x, 2))(jnp.ones(5))


def added_to(ref, x):
    ref[...] += x.sum()
    return x * 2


def added_in_steps(ref, x):
    def step(carry, row):
        ref[...] += 1.0
        return carry + row, row * carry

    return jax.lax.scan(step, 1.0, x)


def set_in_part(ref, x):
    ref[:] = jnp.zeros(16).at[: x.shape[0]].set(x)
    return ref[0] + x


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    "f, shape", [(added_to, ()), (added_in_steps, ()), (set_in_part, (16,))]
)
def test_a_reference_beside_arrays_of_changing_sizes_is_written_as_in_jit(
    f, shape, options
):
    compiled, jitted = px.compile(f, **options), jax.jit(f)
    refs = [jax.new_ref(jnp.zeros(shape)) for _ in range(2)]
    for n in (5, 6, 7, 6):
        x = jnp.arange(1.0, n + 1)
        found, wanted = compiled(refs[0], x), jitted(refs[1], x)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(refs[0][...], refs[1][...])
