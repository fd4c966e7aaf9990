"""Laws of px.infer_sizes: classes are a partition, tell the truth, and are the fewest."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import pliax as px


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Programs that ask ------------------------------------------------------------------


def refuse(x, y):
    if x.shape[0] % 3 == 2:
        raise ValueError(f"{x.shape[0]} rows")
    return x, y


def halve(x, y):
    return x[: x.shape[0] // 2], y


STEPS = {
    "add": lambda x, y: (x + y, y),
    "scale": lambda x, y: (x * x.shape[0], y / y.shape[0]),
    "softmax": lambda x, y: (jax.nn.softmax(x), y),
    "drop": lambda x, y: (x[1:], y),
    "take": lambda x, y: (x[:3], y),
    "halve": halve,
    "join": lambda x, y: (jnp.concatenate([x, y]), y),
    "fold": lambda x, y: (x.reshape(-1, 2).sum(axis=1), y),
    "outer": lambda x, y: ((x[:, None] * y[None, :]).sum(axis=1), y),
    "dot": lambda x, y: (x * (x @ y), y),
    "swap": lambda x, y: (y, x),
    "branch": lambda x, y: (y, x) if x.shape[0] > 4 else (x * 2, y),
    "compare": lambda x, y: (x[2:], y) if x.shape[0] == y.shape[0] + 1 else (x, y),
    "divide": lambda x, y: (jnp.ones(y.shape[0] // (x.shape[0] - 2)), y),
    "refuse": refuse,
}
PROGRAMS = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3)
BOX = [{"a": a, "b": b} for a, b in itertools.product(range(1, 8), repeat=2)]


def program(names):
    def run(x, y):
        for name in names:
            x, y = STEPS[name](x, y)
        return x, y

    return run


def behaviour(f, sizes):
    """The shapes of the results, or the type of the error, at given sizes."""
    try:
        found = jax.eval_shape(f, abstract(sizes["a"]), abstract(sizes["b"]))
        return [x.shape for x in jax.tree.leaves(found)]
    except Exception as error:
        return type(error).__name__


def told(found, sizes):
    """What a class says of them."""
    if found.outcome == "error":
        return found.error.partition(":")[0]
    texts = re.findall(r"\[([^\]]*)\]", found.results)
    names = {"max": max, "min": min, **sizes}
    return [tuple(eval(f"[{text}]", names)) for text in texts]


def order(sizes):
    return sum(sizes.values()), *sizes.values()


@given(names=PROGRAMS)
def test_classes_are_a_partition_that_tells_the_truth_with_least_examples(names):
    f = program(names)
    found = px.infer_sizes(
        f,
        abstract(3),
        abstract(3),
        dims={"x": "a", "y": "b"},
        where=("a <= 7", "b <= 7"),
    )
    assert found.is_complete
    for c in found.classes:
        inside = [sizes for sizes in BOX if c.holds(sizes)]
        assert c.example == min(inside, key=order)
    for sizes in BOX:
        (c,) = (c for c in found.classes if c.holds(sizes))
        assert found.find(sizes) is c
        assert told(c, sizes) == behaviour(f, sizes)


# Examples ---------------------------------------------------------------------------


def class_of(found, **sizes):
    c = found.find(sizes)
    assert c is not None
    return c


def outcomes(found):
    return {" and ".join(c.conditions): c.results or c.error for c in found.classes}


def test_broadcasting_has_four_classes():
    def f(x, y):
        return x + y

    found = px.infer_sizes(f, abstract(3), abstract(3), dims={"x": "a", "y": "b"})
    assert found.is_complete and len(found.classes) == 4
    for sizes, wanted in (
        ({"a": 5, "b": 5}, "f32[a]"),
        ({"a": 1, "b": 5}, "f32[b]"),
        ({"a": 5, "b": 1}, "f32[a]"),
    ):
        assert class_of(found, **sizes).results == wanted
    wrong = class_of(found, a=5, b=6)
    assert wrong.example == {"a": 2, "b": 3}
    assert wrong.error.startswith("TypeError: add got incompatible shapes")
    assert "return x + y" in str(wrong.place)


def test_what_jax_asks_and_does_not_need_makes_no_class():
    def attend(x, y):
        weights = jax.nn.softmax(x @ y.T, axis=-1)
        return weights @ y - x.mean(axis=0, keepdims=True)

    f = jax.grad(lambda x, y: jnp.sum(attend(x, y)))
    found = px.infer_sizes(
        f, abstract(2, 4), abstract(3, 4), dims={"x": "b, _", "y": "t, _"}
    )
    assert outcomes(found) == {"": "f32[b, 4]"} and found.traces > 1
    assert "1 class of sizes" in str(found)


def test_branches_and_errors_of_the_user_are_classes():
    def f(x):
        t = x.shape[0]
        if t % 8:
            raise ValueError(f"{t} is no multiple of 8")
        return x[1:] if px.sym_or(t > 16, t == 8) else x

    found = px.infer_sizes(f, abstract(8), dims={"x": px.Dim("t", min=3)})
    assert outcomes(found) == {
        "t % 8 != 0": "ValueError: t is no multiple of 8",
        "t % 8 == 0 and (t > 16) or (t == 8)": "f32[t - 1]",
        "t % 8 == 0 and (t <= 16) and (t != 8)": "f32[t]",
    }
    assert [c.example["t"] for c in found.classes] == [3, 8, 16]
    assert "raise ValueError" in str(found) and "t % 8 != 0" in str(found)


def test_a_branch_of_the_user_is_a_class_where_jax_asked_before():
    def f(x):
        y = jax.nn.softmax(x)  # JAX asks whether t is 1
        return y * 2 if x.shape[0] == 1 else y

    found = px.infer_sizes(f, abstract(3), dims={"x": "t"})
    assert set(outcomes(found)) == {"t == 1", "t != 1"}


def test_a_size_read_as_a_number_has_a_class_for_each_value():
    def f(x):
        return [x * i for i in range(x.shape[0])]

    found = px.infer_sizes(f, abstract(3), dims={"x": "t"}, where="t <= 3")
    assert found.is_complete
    assert outcomes(found) == {
        "t == 1": "[f32[t]]",
        "t == 2": "[f32[t], f32[t]]",
        "t == 3": "[f32[t], f32[t], f32[t]]",
    }
    found = px.infer_sizes(f, abstract(3), dims={"x": "t"}, limit=5)
    assert not found.is_complete and len(found.classes) == 5
    assert "after 5 traces other sizes remain, such as t = 6" in str(found)
    assert found.find({"t": 6}) is None


def test_what_jax_cannot_trace_for_all_sizes_is_traced_size_by_size():
    def f(x):
        return jnp.arange(x.shape[0] * 1.0)

    found = px.infer_sizes(f, abstract(3, 2), dims={"x": "t, 2"}, where="t <= 3")
    assert [c.results for c in found.classes] == ["f32[1]", "f32[2]", "f32[3]"]
    why = "Traced size by size: TypeError: the size t has no value while it is traced"
    assert found.is_complete and why in found.note
    assert "return jnp.arange(x.shape[0] * 1.0)" in found.note


def test_a_squeeze_has_a_class_for_axes_of_one():
    found = px.infer_sizes(jnp.squeeze, abstract(3, 2), dims={"a": "t, 2"})
    assert [c.results for c in found.classes] == ["f32[2]", "f32[t, 2]"]


def test_an_error_of_symbols_is_not_taken_for_one_of_the_function():
    def f(x, y):
        return x[: y.shape[0] // (x.shape[0] - 9)] + y  # two may fail in this line

    sizes = {"a": range(8, 13), "b": range(1, 4)}
    found = px.infer_sizes(
        f, abstract(10), abstract(3), dims={"x": "a", "y": "b"},
        where=("a >= 8", "a <= 12", "b <= 3"),
    )  # fmt: skip
    for a, b in itertools.product(*sizes.values()):
        at = {"a": a, "b": b}
        assert told(class_of(found, **at), at) == behaviour(f, at)


def test_sizes_that_are_too_large_for_their_type_are_one_class():
    found = px.infer_sizes(
        lambda x: px.ragged.boolean_mask(x, x > 0).sum(),
        abstract(4, 3),
        dims={"x": "t, v"},
    )
    fits, too_large = found.classes
    assert found.is_complete and fits.outcome == "ok"
    assert fits.conditions == ("t * v <= 2147483647",)
    assert too_large.conditions == ("t * v > 2147483647",)
    assert too_large.error == "OverflowError: the size t * v is out of bounds for int32"


def test_expressions_and_numbers_among_the_arguments():
    def f(x, n):
        return x.reshape(2, -1)[:, :n]

    found = px.infer_sizes(f, abstract(6), 4, dims={"x": "2*b"})
    assert all(c.outcome == "ok" for c in found.classes)
    for b in range(1, 9):
        assert told(class_of(found, b=b), {"b": b}) == [(2, min(b, 4))]


def test_without_named_sizes_there_is_one_class():
    found = px.infer_sizes(lambda x: x[1:], abstract(3), dims={})
    assert found.is_complete and outcomes(found) == {"": "f32[2]"}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"dims": {"x": "t"}, "where": "u <= 4"}, ValueError, "dims names no 'u'"),
        ({"dims": {"x": "t"}, "limit": 0}, ValueError, "limit is 0"),
        ({}, TypeError, "there are no dims"),
        ({"dims": {"z": "t"}}, ValueError, "not a parameter"),
        (
            {"dims": {"x": "t"}, "where": ("t >= 9", "t % 8 == 0", "t <= 15")},
            ValueError,
            "no sizes satisfy",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        px.infer_sizes(lambda x: x, abstract(3), **arguments)


def test_an_argument_is_an_array_or_a_number():
    with pytest.raises(TypeError, match="x is 'abc' of type str"):
        px.infer_sizes(lambda x: x, "abc", dims={"x": "t"})
    with pytest.raises(ValueError, match="the shape 't', but it has 0 dimensions"):
        px.infer_sizes(lambda x: x, 3, dims={"x": "t"})


RESHAPED = {
    "sum": (lambda x, y: (x + y).reshape(-1, 4), "t"),
    "rows": (lambda x, y: jnp.stack([x[0] + y[0]] * 3).reshape(4, -1), "a"),
}


@pytest.mark.parametrize("f, name", RESHAPED.values(), ids=RESHAPED)
def test_the_text_of_an_error_is_that_of_the_example(f, name):
    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    dims = {"x": f"{name}, b", "y": "t, d"}
    found = px.infer_sizes(f, x, x, dims=dims, where=("b <= 3", "d <= 3", "t <= 4"))
    errors = [c for c in found.classes if "cannot reshape" in c.error]
    assert errors
    for c in errors:
        shapes = [
            [eval(n, {}, dict(c.example)) for n in dims[k].split(",")] for k in dims
        ]
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(f, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        assert c.error == f"TypeError: {str(caught.value).splitlines()[0]}"


def test_arguments_by_name_have_sizes_and_values_too():
    def f(x, *, y, k=2):
        return x + y if k == 4 else x

    found = px.infer_sizes(
        f, jnp.ones(3), y=jnp.ones(3), k=4, dims={"x": "a", "y": "b"}, where="a >= 2"
    )
    plain = px.infer_sizes(
        lambda x, y: x + y, jnp.ones(3), jnp.ones(3),
        dims={"x": "a", "y": "b"}, where="a >= 2",
    )  # fmt: skip
    assert [c.example for c in found.classes] == [c.example for c in plain.classes]
    assert [c.results for c in found.classes] == [c.results for c in plain.classes]
