"""Laws of px.compile where sizes are born from data."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pliax as px
from pliax.core.other_traces import UnknownSizeError
from pliax.ragged import Ragged, boolean_mask, nonzero, repeat, unique
from pliax.transforms import _inside


X = np.array([3.0, -1.0, 2.0, -5.0, 1.5, 0.5], np.float32)
POSITIVE = X[X > 0]


def positive(x):
    return boolean_mask(x, x > 0)


def mean(x):
    return positive(x).mean()


# One executable for all contents ------------------------------------------------------


def test_a_plain_function_is_compiled_once_for_a_size():
    f = px.compile(mean)
    for x in (X, -X, np.abs(X)):
        assert np.isclose(f(x), x[x > 0].mean())
    assert np.isnan(f(-np.abs(X)))
    assert f.stats.compilations == 1 and f.stats.calls == 4
    assert "born from data: u0 <= 6  # px.ragged.boolean_mask at" in f.explain()


@pytest.mark.parametrize("padding", ["require", "never"])
def test_sizes_of_calls_and_of_data_together(padding):
    f = px.compile(lambda x: (mean(x), positive(x)), dims={"x": "t"}, padding=padding)
    for length in (6, 5, 3, 4, 6):
        x = X[:length]
        found, selected = f(x)
        assert np.isclose(found, x[x > 0].mean()) and selected.bound == length
        assert np.array_equal(selected.to_numpy(), x[x > 0])
    assert f.stats.traces == 1


def test_empty_arrays_have_nothing_to_select():
    f = px.compile(lambda x: (positive(x), nonzero(x)[0], positive(x).sum()))
    selected, places, total = f(X[:0])
    assert selected.to_numpy().shape == places.to_numpy().shape == (0,)
    assert total == 0


SELECTS = {
    "boolean_mask": (positive, lambda x: x[x > 0]),
    "nonzero": (lambda x: nonzero(x > 0)[0], lambda x: jnp.nonzero(x > 0)[0]),
    "indexed": (lambda x: x[nonzero(x > 0)[0]], lambda x: x[x > 0]),
    "unique": (unique, jnp.unique),
    "repeat": (lambda x: repeat(x, 2, bound=9), lambda x: jnp.repeat(x, 2)),
    "repeated selection": (
        lambda x: repeat(positive(x), 2, bound=9),
        lambda x: jnp.repeat(x[x > 0], 2),
    ),
    "searchsorted": (
        lambda x: jnp.searchsorted(jnp.sort(positive(x)), 1.0),
        lambda x: jnp.searchsorted(jnp.sort(x[x > 0]), 1.0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 4), (1, 5)], ids=str)
@pytest.mark.parametrize("name", SELECTS)
def test_what_is_left_of_one_element_may_be_nothing(name, lengths):
    selects, plain = SELECTS[name]
    declared = px.compile(lambda x: selects(x[1:]), dims={"x": "t"})
    changing = px.compile(selects)
    for length in lengths:
        x = jnp.asarray(X[:length])
        for found in (declared(x), changing(x[1:])):
            np.testing.assert_array_equal(found, plain(x[1:]))


def test_what_is_read_of_nothing_is_what_jax_fills_with():
    def f(x):
        y = positive(x)
        return y[0], y[-1], y[jnp.array([0, 1])], nonzero(x > 0)[0][0]

    f = px.compile(f, dims={"x": "t"})
    first, last, both, place = f(X)
    assert (first, last, place) == (3, 0.5, 0) and np.array_equal(both, [3, 2])
    first, last, both, place = f(-np.abs(X))
    assert np.isnan([first, last, *both]).all() and place == np.iinfo(np.int32).min


def _windows(y):
    return jax.vmap(lambda i: lax.dynamic_slice(y, (i,), (2,)))(jnp.arange(2))


READS = {
    "first": (lambda y: y[0], 1),
    "last": (lambda y: y[-1], 1),
    "window": (lambda y: lax.dynamic_slice(y, (1,), (2,)).sum(), 2),
    "windows": (lambda y: _windows(y).sum(), 2),
    "place": (lambda y: lax.dynamic_index_in_dim(y, 2, keepdims=False), 1),
    "row": (lambda y: jnp.stack([y, 3 * y], 1)[-1].sum(), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("read", "least"), READS.values(), ids=READS)
def test_the_derivative_of_what_is_read_of_nothing_is_0(read, least):
    compiled = px.compile(
        jax.grad(lambda x: read(boolean_mask(x, x > 0) ** 2)), dims={"x": "t"}
    )
    for values in ([1, -2, 3, 4], [-1, -2], [-1, 2, -1], [5, 3], [1, 2, 3, 4, 5], [1]):
        x = np.array(values, np.float32)
        kept, wanted = x[x > 0], np.zeros_like(x)
        if kept.size >= least:
            wanted[x > 0] = jax.grad(lambda y: read(y**2))(kept)
        np.testing.assert_array_equal(compiled(x), wanted)


def test_a_window_longer_than_the_bucket_is_what_jax_fills_with():
    compiled = px.compile(
        lambda x: (READS["window"][0](boolean_mask(x, x > 0)), boolean_mask(x, x > 0)),
        dims={"x": "t"},
    )
    for x in (np.ones(1, np.float32), np.ones(4, np.float32)):
        assert np.isnan(compiled(x)[0]) == (x.size < 2)


def test_what_does_not_fit_is_not_written():
    def write(x, new):
        def put(new):
            return lax.dynamic_update_slice(boolean_mask(x, x > 0), new, (1,))

        return put(new[0]).sum(), jax.vmap(put)(new).sum(1)

    compiled = px.compile(write, dims={"x": "t"})
    new = np.array([[10, 20], [30, 40]], np.float32)
    for values in ([1, -2, 3, 4], [-1, 2, -1], [5, 3], [-1]):
        x = np.array(values, np.float32)
        y = x[x > 0]
        first = y[:1].sum() if y.size > 2 else 0
        wanted = first + new.sum(1) if y.size > 1 else np.full(2, y.sum())
        one, all_of_them = compiled(x, new)
        np.testing.assert_array_equal(one, wanted[0])
        np.testing.assert_array_equal(all_of_them, wanted)


def test_a_value_born_from_data_is_a_scalar():
    f = px.compile(lambda x: (positive(x).shape[0], positive(x).shape[0] / 2))
    assert f(X) == (4, 2.0)


@pytest.mark.parametrize("dims", [None, {"x": "t, _", "kept": "t"}])
def test_attention_among_selected_tokens(dims):
    def attend(x, kept):
        tokens = boolean_mask(x, kept)[None, :, None, :]
        return px.flex_attention(tokens, tokens, tokens)[0, :, 0]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 8)).astype(np.float32)
    f = px.compile(attend, dims=dims)
    for kept in (rng.random(12) < 0.5, np.arange(12) == 3, np.ones(12, bool)):
        tokens = x[kept]
        weights = jax.nn.softmax(tokens @ tokens.T / np.sqrt(np.float32(8)))
        np.testing.assert_allclose(f(x, kept).to_numpy(), weights @ tokens, atol=1e-6)
    assert f(x, np.zeros(12, bool)).to_numpy().shape == (0, 8)
    assert f.stats.compilations == 1


def test_an_argument_born_elsewhere_is_named_by_the_line_of_the_call():
    f = px.compile(jnp.mean)
    f(positive(X))  # this line
    assert "u0 <= 6  # px.compile(mean): an argument at" in f.explain()
    assert "# this line" in f.explain()


# Questions ----------------------------------------------------------------------------


def test_branching_names_the_line_the_size_and_the_remedies():
    def f(x):
        y = positive(x)
        if y.shape[0] > 2:  # the question
            return y.sum()
        return y.max()

    pattern = (
        r"branches on u0 > 2, but only the device knows u0 \(px.ragged.boolean_mask at "
        r".*test_born_sizes.py:\d+ in positive: return boolean_mask\(x, x > 0\)\).\n"
        r"  at .*in test_branching.*# the question\n"
        r".*px.guard_or_false.*px.guard_or_true.*px.check"
    )
    with pytest.raises(UnknownSizeError, match=pattern):
        px.compile(f)(X)
    with pytest.raises(UnknownSizeError, match="needs the value of u0") as found:
        px.compile(lambda x: int(positive(x).shape[0]))(X)
    assert isinstance(found.value, TypeError)  # as JAX's own of a tracer


@pytest.mark.parametrize(
    "use",
    [np.zeros, np.empty, lambda n: np.ones((n, 2)), lambda n: jnp.sin(np.array(n))],
    ids=["zeros", "empty", "ones", "array"],
)
def test_what_numpy_needs_of_such_a_size_is_an_error_that_names_it(use):
    pattern = "needs the value of u0 .*only the device knows u0 (?s:.*)jnp.asarray"
    with pytest.raises(UnknownSizeError, match=pattern):
        px.compile(lambda x: X.sum() + use(positive(x).shape[0]))(X)


def two_masks(x):
    return boolean_mask(x, x > 0) * boolean_mask(x, x > 0)  # two sizes


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("dims", [{"x": "t"}, None], ids=["declared", "constant"])
def test_a_mistake_is_the_same_error_at_every_size(length, dims):
    f = px.compile(two_masks, dims=dims)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"incompatible shapes .*\(u0,\), \(u1,\)"):
            f(np.ones(length, np.float32))


def stacked(x):
    return jnp.stack([positive(x), x])  # needs a length


@pytest.mark.parametrize("dims", [{"x": "t"}, None], ids=["declared", "constant"])
def test_an_error_about_a_size_born_from_data_says_where_it_was_and_what_to_do(dims):
    with pytest.raises(TypeError) as caught:
        px.compile(two_masks, dims=dims)(X)
    text = "".join(caught.value.__notes__)
    assert len(re.findall(r"u\d: px.ragged.boolean_mask at .*# two sizes", text)) == 2
    assert re.search("used at .* in two_masks: .*\n.*px.check", text)
    with pytest.raises(ValueError, match=r"the same shape.*\(u0,\)") as caught:
        px.compile(stacked, dims=dims)(X)
    text = "".join(caught.value.__notes__)
    assert re.search("used at .*# needs a length\n.*jnp.where", text)
    with pytest.raises(TypeError) as caught:
        jax.jit(px.compile(two_masks))(X)
    assert "px.check(a.shape[0] == b.shape[0])" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("dims", [{"x": "t"}, None], ids=["declared", "learned"])
def test_what_has_no_room_at_some_sizes_is_traced_size_by_size_and_says_why(dims):
    def into_buffer(x):
        y = positive(x)
        return jnp.full(8, -1.0).at[: y.shape[0]].set(y)

    f = px.compile(into_buffer, dims=dims)
    for length in (4, 5, 6):
        x = X[:length]
        wanted = np.full(8, -1.0, np.float32)
        wanted[: (x > 0).sum()] = x[x > 0]
        np.testing.assert_array_equal(f(x), wanted)
    assert f.stats.compilations == 3
    reason = r"not padded: traced size by size: .*min\(u0, 8\).*\n.*into_buffer: "
    assert re.search(reason, f.explain())


def test_equal_sizes_born_from_data_are_used_together_once_that_is_stated():
    def f(x):
        a, b = positive(x), boolean_mask(-x, x > 0)
        px.check(a.shape[0] == b.shape[0])
        return (a * b).sum()

    np.testing.assert_allclose(px.compile(f)(X), -(POSITIVE**2).sum(), rtol=1e-6)


def test_a_declared_size_that_must_be_one_is_an_error_beside_sizes_born_from_data():
    def f(x):
        return boolean_mask(x, x > 0), jnp.zeros((2, 1)) @ x

    with pytest.raises(px.ConstraintViolationError, match='declare "t = 1"'):
        px.compile(f, dims={"x": "t"})(np.ones(1, np.float32))


def test_the_other_ways_to_decide():
    def f(x):
        y = positive(x)
        few = px.guard_or_false(y.shape[0] < 3)
        some = px.guard_or_true(y.shape[0] >= 1)
        return y.sum(), 1.0 if few else 2.0, 1.0 if some else 2.0

    assert px.compile(f)(X) == (7, 2, 1)


def checked(x):
    y = positive(x)
    px.check(y.shape[0] >= 1, "nothing is positive")
    px.check(px.sym_or(y.shape[0] <= 3, y.shape[0] == 6), "neither few nor all")
    return y.max()


@pytest.mark.parametrize("dims", [None, {"x": "t"}])
def test_a_check_is_a_run_time_assertion_with_the_users_message(dims):
    f = px.compile(checked, dims=dims)
    few, all_of_them = np.sort(X)[:5], np.abs(X)
    assert f(few) == 2 and f(all_of_them) == 5
    for _ in range(2):  # also once it is known
        pattern = (
            "^px.check: nothing is positive\n  at .*test_born_sizes.py:.*in checked"
        )
        with pytest.raises(ValueError, match=pattern):
            f(-np.abs(X))
        with pytest.raises(ValueError, match="neither few nor all"):
            f(X)
    assert f(all_of_them) == 5


def test_a_check_that_follows_is_none():
    def f(x):
        y = positive(x)
        px.check(y.shape[0] <= x.shape[0], "more than all")
        px.check(y.shape[0] <= 3, "more than 3")
        px.check(y.shape[0] < 5, "more than 4")
        return y

    f = px.compile(f)
    assert f(X[:3]).bound == 3  # room for what was stated, not for the whole array
    (plan,) = f._executables.plans
    assert [text.partition("\n")[0] for text in plan.checks] == []


def test_what_is_read_beyond_a_stated_size_is_what_jax_fills_with():
    def f(x):
        y = positive(x)
        px.check(y.shape[0] >= 1, "none")
        return y[0], y[1:][0]

    f = px.compile(f)
    assert f(X) == (3, 2)
    first, second = f(np.where(X > 2, X, -1))
    assert first == 3 and np.isnan(second)


def test_what_is_stated_makes_the_room_and_may_equate_sizes():
    def f(x, y):
        a, b = positive(x), positive(y)
        px.check(a.shape[0] == b.shape[0], "not as many")
        px.check(a.shape[0] <= 4, "more than 4")
        return a * b

    f = px.compile(f)
    found = f(X, X[::-1].copy())
    assert found.bound == 4
    assert np.array_equal(found.to_numpy(), POSITIVE * X[::-1][X[::-1] > 0])
    with pytest.raises(ValueError, match="not as many"):
        f(X, -X)
    with pytest.raises(ValueError, match="more than 4"):
        f(np.abs(X), np.abs(X))


def test_px_pad_checks_too_unless_it_is_traced():
    padded = px.pad(checked, dims={"x": "t"})
    assert padded(np.append(np.sort(X)[:5], np.float32(np.nan)), sizes={"t": 5}) == 2
    with pytest.raises(ValueError, match="nothing is positive"):
        padded(-np.abs(X), sizes={"t": 6})
    with pytest.raises(
        px.PaddingRefused, match=r"inside jax.jit .*nothing is positive"
    ):
        jax.jit(lambda x: padded(x, sizes={"t": 6}))(X)


# Programs within programs -------------------------------------------------------------


def rows(x):
    return x.reshape(2, -1)


def by_scan(x):
    def step(total, row):
        y = positive(row)
        return total + y.sum(), y.shape[0]

    return lax.scan(step, 0.0, rows(x))


def by_while(x):
    def step(i, total):
        return total + boolean_mask(x, x > i).sum()

    return lax.fori_loop(0, 3, step, 0.0)


def by_cond(x):
    return lax.cond(
        x[0] > 1, lambda: positive(x).sum(), lambda: boolean_mask(x, x < 0).prod()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f", "wanted"),
    [
        (by_scan, (7.0, np.array([2, 2]))),
        (by_while, sum(X[i < X].sum() for i in range(3))),
        (by_cond, 7.0),
        (lambda x: lax.map(mean, rows(x)), np.array([2.5, 1.0])),
        (lambda x: jax.checkpoint(positive)(x).sum(), 7.0),
        (lambda x: lax.scan(lambda c, a: (c + a, None), 0.0, positive(x))[0], 7.0),
        (lambda x: lax.fori_loop(0, positive(x).shape[0], lambda i, c: c + x[i], 0.0),
         X[:4].sum()),
    ],
)  # fmt: skip
def test_a_size_may_be_born_in_the_body_of_a_loop(f, wanted):
    for found in (px.compile(f)(X), px.compile(f, dims={"x": "t"})(X)):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: lax.scan(lambda c, r: (c, positive(r)), 0.0, rows(x)),
         "scan: the size u0 is born from data in the body of a loop"),
        (lambda x: lax.map(lambda r: repeat(r, 2, bound=6).sum(), rows(x)),
         "size_from_data: what is checked at run time cannot get out of the body"),
    ],
)  # fmt: skip
def test_what_would_escape_the_body_is_refused_with_its_line(f, reason):
    with pytest.raises(px.PaddingRefused, match=f"{reason}.*\n  at .*test_born_sizes"):
        px.compile(f)(X)


def test_a_batch_of_sizes_is_refused():
    pattern = re.escape("under jax.vmap every row has a size of its own")
    with pytest.raises(ValueError, match=f"px.ragged.boolean_mask at .*{pattern}"):
        px.compile(jax.vmap(mean))(rows(X))
    f = px.compile(lambda x: jax.vmap(lambda a: (positive(x) * a).sum())(x))
    np.testing.assert_allclose(f(X), POSITIVE.sum() * X)  # no batch of sizes


def test_a_jit_inside_is_traced_for_this_trace_alone():
    inner = jax.jit(positive)
    assert isinstance(
        inner(X), Ragged
    )  # its plain trace is not taken for a symbolic one
    assert px.compile(lambda x: inner(x).sum())(X) == 7
    assert px.compile(lambda x: inner(x).sum() + 1)(X) == 8
    assert px.compile(lambda x: jnp.ones(inner(x).shape[0]).sum())(X) == 4
    assert isinstance(inner(X), Ragged)


def test_two_calls_of_one_inner_trace_may_not_share_a_size():
    total, selected = jax.jit(lambda x: positive(x).sum()), jax.jit(positive)
    assert px.compile(lambda x: total(x) + total(-x))(X) == 13
    with pytest.raises(px.PaddingRefused, match="jit: it is called again with"):
        px.compile(lambda x: selected(x).sum() + selected(-x).sum())(X)


@pytest.mark.slow
@pytest.mark.parametrize("take", [lambda f: f, jax.grad])
@pytest.mark.parametrize(
    ("refused", "own"),
    [
        (jax.jit(positive), lambda x: OWN(x)),
        (jax.checkpoint(positive), lambda x: jax.checkpoint(lambda x: positive(x))(x)),
        (
            jax.checkpoint(px.compile(positive)),
            lambda x: jax.checkpoint(px.compile(lambda x: positive(x)))(x),
        ),
    ],
    ids=["jit", "checkpoint", "both"],
)
def test_what_the_refusal_of_a_second_call_says_works(refused, own, take):
    def twice(f):
        return take(lambda x: (f(x) ** 2).sum() + (f(2 * x) ** 3).sum())

    wanted = twice(lambda x: jnp.where(x > 0, x, 0))(X)
    np.testing.assert_allclose(px.compile(twice(own))(X), wanted, rtol=1e-6)
    with pytest.raises(px.PaddingRefused, match="traced it once; give each call"):
        px.compile(lambda x: refused(x).sum() + refused(-x).sum())(X)


OWN = px.compile(positive)


@pytest.mark.parametrize("dims", [None, {"x": "t"}], ids=["plain", "declared"])
def test_a_compiled_function_may_be_called_again_in_another_with_a_size_of_its_own(
    dims,
):
    selects = px.compile(positive, dims=dims)
    doubled = px.compile(lambda x: 2 * selects(x))

    def both(x):
        return jnp.concatenate([selects(x), doubled(-x), doubled(x)])

    f = px.compile(both, dims={"x": "t"})
    for length in (6, 5, 4):
        x = X[:length]
        wanted = np.concatenate([x[x > 0], -2 * x[x < 0], 2 * x[x > 0]])
        np.testing.assert_array_equal(f(x), wanted)
    assert f.stats.traces == 1
    padded = px.pad(both, dims={"x": "t"})(X, sizes={"t": 6})
    np.testing.assert_array_equal(padded, [*POSITIVE, 2, 10, *(2 * POSITIVE)])
    found = jax.grad(px.compile(lambda x: (both(x) ** 2).sum()))(X)
    np.testing.assert_allclose(found, np.where(X > 0, 10, 8) * X)


def in_two_calls(inner):
    def f(x):
        a, b = inner(x), inner(-x)  # both alive
        return (a**2).sum() + (b**3).sum()

    return f


@pytest.mark.slow
@pytest.mark.parametrize("take", [lambda f: f, jax.grad])
@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(f, inline=True),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    ],
)
def test_two_calls_of_one_inner_trace_are_right_or_refused(take, wrap):
    plain = take(in_two_calls(lambda x: jnp.sin(positive(x))))
    wanted = px.compile(plain)(X)
    try:
        found = px.compile(take(in_two_calls(wrap(lambda x: jnp.sin(positive(x))))))(X)
    except px.PaddingRefused as refusal:
        assert "outside of" in str(refusal)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))]
)
def test_gradients_through_inner_programs(wrap):
    f = px.compile(jax.grad(wrap(lambda x: jnp.sin(positive(x)).sum())))
    np.testing.assert_allclose(f(X), np.where(X > 0, np.cos(X), 0), rtol=1e-5)


# Inside other transformations ---------------------------------------------------------


def logs(x):
    return jnp.log(positive(x)).sum()


def test_inside_jit_vmap_and_grad_it_means_what_it_meant():
    f, g = px.compile(mean), px.compile(logs)
    assert jax.jit(f)(X) == f(X)
    np.testing.assert_allclose(jax.vmap(f)(np.stack([X, -X])), [f(X), f(-X)])
    wanted = np.where(X > 0, 1 / X, 0)
    for take in (jax.grad(g), jax.jit(jax.grad(g)), jax.grad(jax.jit(g))):
        np.testing.assert_allclose(take(X), wanted, rtol=1e-6)
    twice = jax.grad(lambda x: (jax.grad(g)(x) * jnp.arange(6.0)).sum())(X)
    np.testing.assert_allclose(twice, -(wanted**2) * np.arange(6), rtol=1e-5)


def powers(x):
    y = positive(x)
    return (jnp.log(y) ** 2).sum() * y.mean()


def powers_by_mask(x):
    y = jnp.where(x > 0, x, 1)
    return (jnp.log(y) ** 2).sum() * x.mean(where=x > 0)


V = np.arange(6, dtype=np.float32)
DERIVATIVES = {
    "jvp": lambda f: jax.jvp(f, (X,), (V,)),
    "linearize": lambda f: jax.linearize(f, X)[1](V),
    "jacfwd of jacrev": lambda f: jax.jacfwd(jax.jacrev(f))(X),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f))(X),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f))(X),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f))(X),
    "third order": lambda f: jax.jacfwd(jax.hessian(f))(X),
    "jit": lambda f: jax.jit(jax.hessian(f))(X),
    "vmap": lambda f: jax.vmap(jax.hessian(f))(np.stack([X, X[::-1]])),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "closure": lambda f: jax.hessian(lambda w: f(X * w))(jnp.float32(1.5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_every_mode_are_those_of_a_mask(name):
    take = DERIVATIVES[name]
    found, wanted = take(px.compile(powers)), take(powers_by_mask)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        found,
        wanted,
    )


@jax.custom_vjp
def doubled(y):
    return 2 * y


def _doubled_backward(y, d):
    return (jnp.full(y.shape, 7.0) * y.shape[0] * d,)


doubled.defvjp(lambda y: (2 * y, y), _doubled_backward)


def test_rules_of_custom_derivatives_may_use_sizes_born_from_data():
    f = px.compile(lambda x: doubled(positive(x)).sum())
    np.testing.assert_array_equal(jax.grad(f)(X), np.where(X > 0, 28, 0))


def with_tangents_times(scale, selected):
    """A loss whose rule closes over what the selecting function does not."""
    kept = jax.custom_jvp(lambda v: v)
    kept.defjvp(lambda v, dot: (v[0], dot[0] * scale))
    if selected:
        return px.compile(lambda x: (kept(positive(x)) ** 2).sum())
    return lambda x: (kept(x) ** 2).sum(where=x > 0)


@pytest.mark.parametrize("take", [jax.grad, jax.jacfwd, jax.hessian])
def test_a_rule_may_close_over_what_another_transformation_passes(take):
    found, wanted = (
        jax.jit(lambda x, scale, n=n: take(with_tangents_times(scale, n))(x))
        for n in (True, False)
    )
    np.testing.assert_allclose(found(X, 0.5), wanted(X, 0.5), rtol=1e-6)


def test_threads_may_call_one_pullback_at_once():
    out, pull = jax.vjp(px.compile(lambda x: doubled(positive(x)).sum()), X)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: pull(jnp.ones_like(out))[0], range(12)))
    for gradient in found:
        np.testing.assert_array_equal(gradient, np.where(X > 0, 28, 0))


@jax.custom_vjp
def weighed(y):
    return 2 * y


weighed.defvjp(lambda y: (2 * y, y), lambda y, d: (d * positive(y).sum(),))


def test_a_pullback_is_traced_once_however_often_it_is_called(monkeypatch):
    traced, program_under = [], _inside.program_under

    def counting(assumptions, *given):
        traced.append(assumptions)
        return program_under(assumptions, *given)

    monkeypatch.setattr(_inside, "program_under", counting)
    out, pull = jax.vjp(px.compile(lambda x: weighed(positive(x)).sum()), X)
    before = len(traced)
    for scale in (1, 2, 3):
        (gradient,) = pull(scale * jnp.ones_like(out))
        np.testing.assert_array_equal(gradient, np.where(X > 0, 7 * scale, 0))
        assert len(traced) == before + 1 and len(traced[-1].known.unbacked) == 2


def test_a_function_that_bears_sizes_at_times_has_one_trace_under_jit_at_others():
    some = px.compile(
        lambda x, born: positive(x) if born else jnp.sin(x), static_argnames="born"
    )
    px.compile(lambda x: some(x, True).sum())(X)

    def layers(x):
        for _ in range(4):
            x = some(x, False)
        return x

    before = some.stats.traces
    jax.jit(layers)(X)
    assert some.stats.traces == before + 1


def scaled(w):
    """A compiled function of X that captures what another transformation passes."""
    return px.compile(lambda x: (jnp.sin(w) * positive(x) ** 2).sum())(X * w)


def scaled_by_mask(w):
    return jnp.sin(w) * ((X * w) ** 2).sum(where=X * w > 0)


@pytest.mark.slow
@pytest.mark.parametrize("take", [jax.grad, jax.hessian, jax.jacfwd])
def test_what_a_function_closes_over_has_derivatives(take):
    w = np.float32(1.5)
    np.testing.assert_allclose(take(scaled)(w), take(scaled_by_mask)(w), rtol=1e-5)
    many = np.array([0.5, 1.5], np.float32)
    found, wanted = (jax.vmap(take(f))(many) for f in (scaled, scaled_by_mask))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_tangents_of_ragged_results_are_as_long_and_derivatives_trace_once():
    f = px.compile(lambda x, n: (positive(x) ** 2, n))
    (found, _), (d_found, _) = jax.jvp(lambda x: f(x, 3), (X,), (V,))
    traces = f.stats.traces
    size = int(found.size)
    np.testing.assert_array_equal(found.data[:size], POSITIVE**2)
    np.testing.assert_array_equal(d_found.data[:size], (2 * X * V)[X > 0])
    jax.linearize(lambda x: f(x, 3)[0].data, X)
    assert f.stats.traces == 2 * traces


def test_a_ragged_argument_inside_other_transformations_is_an_array():
    f, rows = px.compile(lambda r: (r**2).sum()), np.stack([X, -X])
    r = boolean_mask(X, X > 0)
    assert jax.jit(f)(r) == f(r)
    d_data = jax.grad(lambda data: f(Ragged(data, r.size)))(r.data)
    is_valid = np.arange(len(r.data)) < r.size
    np.testing.assert_array_equal(d_data, np.where(is_valid, 2 * r.data, 0))
    many = jax.vmap(lambda x: boolean_mask(x, x > 0))(rows)
    wanted = [(row[row > 0] ** 2).sum() for row in np.asarray(rows)]
    for found in (jax.vmap(f)(many), jax.lax.map(f, many)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.at[0].set(9.0).sum(),
        lambda y: y.at[1].add(2.0).sum(),
        lambda y: y.at[20].get(mode="fill", fill_value=3.0),
        lambda y: y[: y.shape[0] // 2].sum(),
        lambda y: jax.lax.dynamic_update_slice(jnp.zeros(20), y, (3,)).sum(),
    ],
    ids=["set", "add", "get", "slice", "update"],
)
def test_under_vmap_each_row_has_its_own_size_at_a_constant_index(use):
    f = px.compile(lambda x: use(boolean_mask(x, x > 0)))
    rows = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    np.testing.assert_allclose(jax.vmap(f)(rows), [f(x) for x in rows], rtol=1e-6)


def test_gradients_of_ragged_results_inside_other_transformations():
    f = px.compile(lambda x, n: (positive(x) ** 2, n * 2))
    found = jax.grad(lambda x: f(x, jnp.int32(3))[0].data[:2].sum())(X)
    np.testing.assert_allclose(found, [6, 0, 4, 0, 0, 0])


def test_a_compiled_function_inside_another():
    inner, reduced = px.compile(positive), px.compile(mean)
    assert px.compile(lambda x: inner(x).sum() + 1)(X) == 8
    assert px.compile(lambda x: reduced(x) + 1)(X) == POSITIVE.mean() + 1
    assert px.compile(lambda x: inner(x).sum(), dims={"x": "t"})(X) == 7


def test_without_jit_every_size_has_its_value():
    with jax.disable_jit():
        f = px.compile(lambda x: (positive(x), repeat(x, 2, bound=12)))
        found, repeated = f(X)
        assert np.array_equal(found, POSITIVE)
        assert np.array_equal(repeated, np.repeat(X, 2))
        with pytest.raises(ValueError, match="more than bound=3"):
            px.compile(lambda x: repeat(x, 2, bound=3))(X)


def test_the_users_errors_are_their_own():
    with pytest.raises(TypeError, match="incompatible shapes"):
        px.compile(lambda x: positive(x) + jnp.ones(3))(X)
    with pytest.raises(KeyError, match="mine"):
        px.compile(lambda x: {}["mine"] + positive(x))(X)


def test_what_no_rule_pads_is_refused_since_nothing_else_can_run_it():
    f = px.compile(lambda x: jnp.linalg.eigh(jnp.outer(*[positive(x)] * 2))[0].sum())
    with pytest.raises(px.PaddingRefused, match="eigh"):
        f(X)


def test_a_loop_up_to_a_size_born_from_data_has_derivatives_in_one_trace():
    def weighted(x, mask):
        y = px.ragged.boolean_mask(x, mask)
        return lax.fori_loop(0, y.shape[0], lambda i, c: c + y[i] * i, jnp.float32(0))

    f = px.compile(jax.grad(weighted), dims={"x": "t", "mask": "t"})
    for n in (5, 6, 13):
        mask = np.arange(n) % 2 == 0
        wanted = np.where(mask, np.arange(n) // 2, 0)
        np.testing.assert_array_equal(f(np.ones(n, np.float32), mask), wanted)
    assert f.stats.traces == 1


# What JAX asks of them -----------------------------------------------------------------


def rows_of_four(x):
    """The elements in rows of 4, the last filled up with 0."""
    return jnp.pad(x, (0, -x.shape[0] % 4)).reshape(-1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("count", range(9))
def test_a_size_that_is_rounded_up_divides_whatever_it_is(count):
    x = np.arange(9, dtype=np.float32) + 0.5 - count
    selected = px.compile(lambda x: rows_of_four(positive(x)))
    np.testing.assert_array_equal(selected(x).to_numpy(), rows_of_four(x[x > 0]))
    declared = px.compile(rows_of_four, dims={"x": "t"})
    part = x[: max(count, 1)]
    np.testing.assert_array_equal(declared(part), rows_of_four(part))
    assert not declared.guards


ASKED = {
    "linspace": lambda y: jnp.linspace(0, 1, y.shape[0]).sum(),
    "convolve": lambda y: jnp.convolve(y, jnp.ones(3)).sum(),
    "correlate": lambda y: jnp.correlate(y, jnp.ones(3)).sum(),
    "digitize": lambda y: jnp.digitize(jnp.arange(4.0), jnp.sort(y)).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_branch_of_jax_is_named_and_taken_where_a_check_says_which(name):
    f = ASKED[name]
    with pytest.raises(
        ValueError, match=rf"JAX's {name} branches on u0 (?s:.*)px.check"
    ):
        px.compile(lambda x: f(positive(x)))(X)

    def stated(x):
        y = positive(x)
        px.check(y.shape[0] >= 3, "at least 3")
        return f(y)

    np.testing.assert_allclose(px.compile(stated)(X), f(POSITIVE), rtol=1e-6)
    with pytest.raises(ValueError, match="at least 3"):
        px.compile(stated)(-X)


def test_the_function_of_jax_that_needs_an_integer_is_named():
    f = px.compile(jnp.vander, dims={"x": "t"})
    f(X)
    assert "has no value while it is traced, which JAX's vander needs" in f.explain()
