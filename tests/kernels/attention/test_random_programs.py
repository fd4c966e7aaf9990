"""Random programs as mods and masks: any expression means what the formula says.

Trees are drawn over the score, the four indices, arithmetic of them and captured
tables; one tree is evaluated for scalars as a mod and over whole arrays as the formula.
Functions of the score are smooth and bounded, so that no rounding is a jump.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import gaussian, numbers
from attention_plain import attention as plain_attention, pulled_back
from helpers import errors, in_float64
from hypothesis import given, settings, strategies as st

import pliax as px


SIZE = 7  # of every axis of a captured table
FLOATS = {"line": (SIZE,), "square": (SIZE, SIZE)}
IMPLEMENTATIONS = ("reference", "xla")
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)


# --- programs -------------------------------------------------------------------------


INDICES = ("b", "h", "q", "k")
INTEGER = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": jnp.maximum,
    "divide": lambda x, y: x // (1 + abs(y) % 5),
    "modulo": lambda x, y: x % (1 + abs(y) % 5),
    "where": lambda x, y: jnp.where(x > y, x, -y),
    "looked_up": lambda x, y: x,  # replaced below: reads a captured table
}
FLOATING = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - 0.5 * y,
    "multiply": lambda x, y: jnp.tanh(x) * jnp.sin(y),
    "softplus": lambda x, y: jax.nn.softplus(x) - y,
    "logistic": lambda x, y: jax.nn.sigmoid(x) * 2.0 + 0.25 * y,
    "exp": lambda x, y: jnp.exp(-jnp.square(x)) + y,
    "divide": lambda x, y: x / (2.0 + jnp.cos(y)),
}
BOOLEAN = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: ~x | y,
}
COMPARE = {
    "less": lambda x, y: x < y,
    "at_least": lambda x, y: x >= y,
    "equal": lambda x, y: x % 3 == y % 3,
    "near": lambda x, y: abs(x - y) < 6,
}

integers = st.recursive(
    st.sampled_from([(name,) for name in INDICES]) | st.tuples(st.integers(-5, 9)),
    lambda inner: st.tuples(st.sampled_from(sorted(INTEGER)), inner, inner),
    max_leaves=4,
)
floats = st.recursive(
    st.just(("score",))
    | st.tuples(st.just("line"), integers)
    | st.tuples(st.just("square"), integers, integers)
    | st.tuples(st.just("cast"), integers),
    lambda inner: st.tuples(st.sampled_from(sorted(FLOATING)), inner, inner)
    | st.tuples(st.just("where"), st.tuples(st.just("less"), integers, integers), inner, inner),
    max_leaves=5,
)  # fmt: skip
booleans = st.recursive(
    st.tuples(st.sampled_from(sorted(COMPARE)), integers, integers),
    lambda inner: st.tuples(st.sampled_from(sorted(BOOLEAN)), inner, inner),
    max_leaves=4,
)


@dataclass(frozen=True)
class Reader:
    """Evaluates trees, for scalars and for whole arrays alike."""

    tables: Any
    index: dict[str, Any]
    score: Any = None

    def integer(self, tree):
        name, *rest = tree
        if name in INDICES:
            return self.index[name]
        if not rest:
            return jnp.int32(name)
        x, y = map(self.integer, rest)
        if name == "looked_up":
            return self.tables["numbers"][x % SIZE] + y
        return INTEGER[name](x, y)

    def boolean(self, tree):
        name, x, y = tree
        if name in COMPARE:
            return COMPARE[name](self.integer(x), self.integer(y))
        return BOOLEAN[name](self.boolean(x), self.boolean(y))

    def floating(self, tree):
        name, *rest = tree
        if name == "score":
            return self.score
        if name == "cast":
            return (self.integer(*rest) % 9).astype(self.score.dtype) / 4.0
        if name in FLOATS:
            place = tuple(self.integer(x) % SIZE for x in rest)
            return self.tables[name][place].astype(self.score.dtype)
        if name == "where":
            condition, x, y = rest
            x, y = self.floating(x), self.floating(y)
            return jnp.where(self.boolean(condition), x, y)
        return FLOATING[name](*map(self.floating, rest))


def score_of(tree, tables):
    """The score stays in, so that every program has gradients."""

    def score_mod(s, b, h, q, k):
        reader = Reader(tables, dict(zip(INDICES, (b, h, q, k), strict=True)), s)
        return jnp.tanh(s) + reader.floating(tree)

    return score_mod


def visible_of(tree, tables):
    def mask_mod(b, h, q, k):
        return Reader(tables, dict(zip(INDICES, (b, h, q, k), strict=True))).boolean(
            tree
        )

    return mask_mod


# --- calls ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    dimensions: tuple[int, int]
    blocks: tuple[int, int]
    shared: bool

    def operands(self):
        (H, K), (T, S), (D, V) = self.heads, self.lengths, self.dimensions
        batch = 1 if self.shared else self.batch
        shapes = (self.batch, T, H, D), (batch, S, K, D), (batch, S, K, V)
        cotangents = (self.batch, T, H, V), (self.batch, T, H)
        return (
            tuple(gaussian(n, x) for n, x in enumerate(shapes)),
            {name: gaussian(9, x) for name, x in FLOATS.items()},
            tuple(gaussian(n + 20, x) for n, x in enumerate(cotangents)),
        )


shapes = st.builds(
    Shape,
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 2)]),
    lengths=st.tuples(*[st.sampled_from([1, 2, 15, 16, 17, 31, 40])] * 2),
    dimensions=st.sampled_from([(1, 1), (4, 3), (5, 8)]),
    blocks=st.sampled_from([(8, 8), (8, 16), (16, 7), (5, 32), (128, 128)]),
    shared=st.booleans(),
)


def hold(shape, score, mask):
    """Values and gradients of both implementations are those of the formula."""
    arrays, tables, cotangents = shape.operands()
    drawn = {"numbers": numbers(3, (SIZE,), 20)}
    batch, (heads, _) = shape.batch, shape.heads

    @jax.jit
    def plain(arrays, tables, cotangents):
        def attend(arrays, tables):
            captured = {**tables, **drawn}
            visible = mask and visible_of(mask, captured)
            score_mod = score and score_of(score, captured)
            return plain_attention(*arrays, score=score_mod, visible=visible)

        return pulled_back(attend, arrays, tables, cotangents)

    def ours(arrays, tables, cotangents, implementation):
        def attend(arrays, tables):
            captured = {**tables, **drawn}
            block_mask = mask and px.create_block_mask(
                visible_of(mask, captured), batch, heads, *shape.lengths,
                block_size=shape.blocks,
            )  # fmt: skip
            out, aux = px.flex_attention(
                *arrays, score_mod=score and score_of(score, captured),
                block_mask=block_mask, enable_gqa=True, return_aux=EVERYTHING,
                implementation=implementation,
            )  # fmt: skip
            return out, aux.lse, aux.max_scores

        return pulled_back(attend, arrays, tables, cotangents)

    golden = in_float64(plain, arrays, tables, cotangents)
    rival = plain(arrays, tables, cotangents)
    run = jax.jit(ours, static_argnames="implementation")
    for name in IMPLEMENTATIONS:
        found = run(arrays, tables, cotangents, implementation=name)
        assert_close(found, rival, golden)


def assert_close(found, rival, golden):
    """The error rule of float32, and some roundings of the largest number are free.

    Drawn shapes may be so small that the formula is exact by luck.
    """
    for trees in zip(*map(jax.tree.leaves, (found, rival, golden)), strict=True):
        one, other, exact = trees
        ours, theirs = errors(one, exact), errors(other, exact)
        scale = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
        assert ours.mean() <= 10 * theirs.mean() + 2e-6 * scale
        assert ours.max() <= 10 * theirs.max() + 1e-5 * scale
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(exact))


@settings(max_examples=3)
@given(shapes, floats)
def test_any_score_mod_is_the_formula(shape, score):
    hold(shape, score, None)


@settings(max_examples=4)
@given(shapes, st.none() | floats, booleans)
def test_any_mask_mod_is_the_formula(shape, score, mask):
    hold(shape, score, mask)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 3)
@given(shapes, floats, booleans)
def test_any_mod_under_any_mask_is_the_formula(shape, score, mask):
    hold(shape, score, mask)
