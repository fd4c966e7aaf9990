"""Annotations are checks in tests: values, results, fields, and names in shapes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import annotations
import jax.numpy as jnp
import jaxtyping
import pytest
from beartype import beartype
from jaxtyping import Array, Float, Int, PyTree

import pliax as px
from pliax.core.symbols import Symbol
from pliax.kernels.matrix_products.api import add_matmul


def checked(made: Any) -> Any:
    return annotations.checked(made, typechecker=beartype)


def refuses(match: str) -> Any:
    return pytest.raises(jaxtyping.TypeCheckError, match=match)


type Rows = Float[Array, "n k"]


def test_arguments_and_results_are_checked():
    def half(n: int, text: str = "") -> int:
        return n / 2 if text else n // 2  # pyright: ignore

    assert checked(half)(8) == 4
    with refuses("n"):
        checked(half)(8.0)
    with refuses("text"):
        checked(half)(8, text=1)
    with refuses("return"):
        checked(half)(8, text="wrong")


def test_fields_are_checked():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        first: int
        second: Float[Array, "n"]

    made = checked(Pair)
    assert made(1, jnp.ones(2)).first == 1
    with refuses("first"):
        made("1", jnp.ones(2))
    with refuses("second"):
        made(1, jnp.ones((2, 2)))


@pytest.mark.parametrize("alias", [Float[Array, "n k"], Rows], ids=["plain", "alias"])
def test_a_name_in_shapes_is_one_size_in_one_call(alias):
    def first(x: alias, y: Float[Array, "k"]) -> Float[Array, "n"]:  # pyright: ignore
        return x @ y if y.shape[0] > 2 else y

    assert checked(first)(jnp.ones((3, 4)), jnp.ones(4)).shape == (3,)
    assert checked(first)(jnp.ones((5, 6)), jnp.ones(6)).shape == (5,)
    with refuses("y"):
        checked(first)(jnp.ones((3, 4)), jnp.ones(5))
    with refuses("return"):
        checked(first)(jnp.ones((3, 2)), jnp.ones(2))


@pytest.mark.parametrize(
    "hint",
    [
        Float[Array, "n"],
        Optional[Int[Array, ""]],  # noqa: UP045
        tuple[Float[Array, "n"], ...],
        dict[str, list[Float[Array, "n"]]],
        Callable[[Float[Array, "n"]], int],
        PyTree[int],
        Rows,
        list[Rows],
        "Later",
    ],
    ids=str,
)
def test_shapes_wherever_they_stand_have_a_scope(hint):
    assert annotations.needs_a_scope(hint)


@pytest.mark.parametrize("hint", [int, Any, list[int], Callable[..., Any], None])
def test_no_other_annotation_has_one(hint):
    assert not annotations.needs_a_scope(hint)


def test_the_package_is_checked():
    with refuses("dims"):
        px.compile(abs, dims=3)  # pyright: ignore
    with refuses("low"):
        Symbol("t", 3, "x.shape[0]", low="1")  # pyright: ignore
    with refuses("B"):
        add_matmul(jnp.ones((2, 3)), jnp.ones((4, 2)))
