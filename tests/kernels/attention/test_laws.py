"""The law suite: every mod and mask against a float64 golden, in each implementation.

Each case is judged by the error rule of `helpers.assert_error_rule`: outputs, log-sum-
exps, maxima and the gradients of q, k, v and of what the score_mod captured may be off
by what the plain formula, written without our code, is off by in the same dtype.
"""

import inspect
import os
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    LIBRARY_MASKS,
    LIBRARY_MODS,
    MASKS,
    MODS,
    B,
    H,
    K,
    Mask,
    Mod,
    gaussian,
)
from attention_plain import attention as plain_attention, pulled_back
from helpers import OPTIMISED, assert_error_rule, in_float64

import pliax as px


D, V = 8, 6
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
LENGTHS = ((37, 45), (1, 17), (20, 17), (127, 124), (255, 255))
LONG = (1023, 1020)
BLOCK = (16, 32)
IMPLEMENTATIONS = ("reference", "xla")
EVERYTHING = px.AuxRequest(lse=True, max_scores=True)


@dataclass(frozen=True)
class Law:
    """One mod under one mask, in one dtype at one pair of lengths."""

    mod: Mod
    mask: Mask
    dtype: Any
    lengths: tuple[int, int]
    shared: bool  # whether key and value are of one sequence, for all of the batch

    def __str__(self) -> str:
        T, S = self.lengths
        return f"{self.mod}-{self.mask}-{jnp.dtype(self.dtype)}-{T}x{S}"

    def operands(self):
        """Query, key, value; floating and other captured arrays; and the mask's."""
        (T, S), batch = self.lengths, 1 if self.shared else B
        shapes = (B, T, H, D), (batch, S, K, D), (batch, S, K, V)
        arrays = tuple(gaussian(n, x, self.dtype) for n, x in enumerate(shapes))
        dtype = self.mod.dtype or self.dtype
        floats = (
            gaussian(n + 3, x, dtype) for n, x in enumerate(self.mod.floats(T, S))
        )
        others = self.mod.others(T, S), self.mask.arrays(T, S)
        return arrays, tuple(floats), *others

    def cotangents(self):
        T, _ = self.lengths
        shapes = (B, T, H, V), (B, T, H)
        return tuple(gaussian(n + 20, x, self.dtype) for n, x in enumerate(shapes))

    def plain(self, arrays, floats, others, seen, cotangents):
        make = self.mod.plain or self.mod.make
        show = self.mask.plain or self.mask.make

        def attend(arrays, floats):
            score = make(*floats, *others)
            visible = show and show(*seen)
            return plain_attention(*arrays, score=score, visible=visible)

        return pulled_back(attend, arrays, floats, cotangents)

    def ours(self, arrays, floats, others, mask, cotangents, *, implementation):
        def attend(arrays, floats):
            out, aux = px.flex_attention(
                *arrays,
                score_mod=self.mod.make(*floats, *others),
                block_mask=mask,
                enable_gqa=True,
                return_aux=EVERYTHING,
                implementation=implementation,
            )
            return out, aux.lse, aux.max_scores

        return pulled_back(attend, arrays, floats, cotangents)

    def block_mask(self, seen):
        if self.mask.make is None:
            return None
        batch = B if self.mask.batch else None
        heads = H if self.mask.heads else None
        mask_mod = self.mask.make(*seen)
        return px.create_block_mask(
            mask_mod, batch, heads, *self.lengths, block_size=BLOCK
        )


def law(number, pairing, combination, length=None):
    """Mod `number` under the mask `pairing` places on, past the last one densely."""
    mod = MODS[number]
    place = number + pairing
    mask = MASKS[place] if place < len(MASKS) else MASKS[0]
    if pairing:
        mask = MASKS[place % len(MASKS)]
    dtype = DTYPES[combination % 3]
    lengths = mask.lengths or length or LENGTHS[combination % 5]
    return Law(mod, mask, dtype, lengths, shared=number % 4 == 3)


def hold(case, options=None):
    arrays, floats, others, seen = case.operands()
    cotangents = case.cotangents()
    plain = jax.jit(case.plain, compiler_options=options)
    golden = in_float64(plain, arrays, floats, others, seen, cotangents)
    rival = plain(arrays, floats, others, seen, cotangents)
    mask = case.block_mask(seen)
    for name in IMPLEMENTATIONS:
        run = jax.jit(
            case.ours, static_argnames="implementation", compiler_options=options
        )
        found = run(arrays, floats, others, mask, cotangents, implementation=name)
        assert_dtypes(found, (arrays, floats))
        assert_error_rule(found, rival, golden)
        for one, exact in zip(found[0][1:], golden[0][1:], strict=True):
            # The rule takes any infinity for any other.
            np.testing.assert_array_equal(np.isneginf(one), np.isneginf(exact))


def assert_dtypes(found, primals):
    ((out, lse, top), gradients), (arrays, _) = found, primals
    assert out.dtype == arrays[0].dtype
    assert lse.dtype == top.dtype == jnp.float32
    assert [x.dtype for x in jax.tree.leaves(gradients)] == [
        x.dtype for x in jax.tree.leaves(primals)
    ]


SUITE = [law(n, 0, n) for n in range(len(MODS))]
OFTEN = [
    pytest.param(x, marks=[pytest.mark.slow] if n % 10 else [])
    for n, x in enumerate(SUITE)
]
# Other masks, dtypes and lengths for every mod.
FURTHER = [law(n, 13, n + 7) for n in range(len(MODS))]


@pytest.mark.parametrize("case", OFTEN, ids=str)
def test_a_mod_under_a_mask_is_as_exact_as_the_plain_formula(case):
    hold(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FURTHER[::4], ids=str)
def test_a_mod_under_another_mask_is_as_exact_as_the_plain_formula(case):
    hold(case, OPTIMISED)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 12, 30])
def test_long_sequences_are_as_exact_as_the_plain_formula(number):
    hold(law(number, 0, number, LONG), OPTIMISED)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough",
    reason="hours: HYPOTHESIS_PROFILE=thorough runs the whole cross product",
)
@pytest.mark.parametrize("mod", MODS, ids=str)
def test_a_mod_under_every_mask(mod):
    for mask, dtype, lengths in product(MASKS, DTYPES, LENGTHS):
        hold(Law(mod, mask, dtype, mask.lengths or lengths, shared=False))


# --- dtypes ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_keys_and_values_of_8_bits_are_scaled_by_a_score_mod(
    stored, dtype, implementation
):
    """Gradients of query and scale, and of what is stored in its own dtype."""
    T, S = 37, 45
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, V)
    dtypes = (dtype, stored, stored)
    arrays = tuple(
        gaussian(n, *x) for n, x in enumerate(zip(shapes, dtypes, strict=True))
    )
    floats = (1.5 + gaussian(4, (H,)) / 4,)
    cotangents = (gaussian(5, (B, T, H, V), dtype), gaussian(6, (B, T, H), dtype))
    mask = px.create_block_mask(
        px.kernels.masks.causal, None, None, T, S, block_size=16
    )

    def plain(arrays, floats, cotangents):
        def attend(arrays, floats):
            q, k, v = (x.astype(arrays[0].dtype) for x in arrays)
            score = lambda s, b, h, i, j: s * floats[0][h].astype(s.dtype)  # noqa: E731
            visible = lambda b, h, i, j: i >= j  # noqa: E731
            return plain_attention(q, k, v, score=score, visible=visible)

        return pulled_back(attend, arrays, floats, cotangents)

    def ours(arrays, floats, cotangents):
        def attend(arrays, floats):
            out, aux = px.flex_attention(
                *arrays,
                score_mod=lambda s, b, h, i, j: s * floats[0][h],
                block_mask=mask,
                enable_gqa=True,
                return_aux=EVERYTHING,
                implementation=implementation,
            )
            return out, aux.lse, aux.max_scores

        return pulled_back(attend, arrays, floats, cotangents)

    operands = arrays, floats, cotangents
    found = jax.jit(ours)(*operands)
    assert_dtypes(found, (arrays, floats))
    golden = in_float64(jax.jit(plain), *operands)
    assert_error_rule(found, jax.jit(plain)(*operands), golden)


@pytest.mark.parametrize("number", [1, 16, 22])
def test_float64_is_float64_throughout(number):
    """Captured arrays, log-sum-exps and all gradients too."""
    case = law(number, 0, 0)
    arrays, floats, others, seen = case.operands()
    cotangents = case.cotangents()
    golden = in_float64(jax.jit(case.plain), arrays, floats, others, seen, cotangents)
    for name in IMPLEMENTATIONS:

        def run(arrays, floats, others, seen, cotangents, name=name):
            mask = case.block_mask(seen)
            return case.ours(
                arrays, floats, others, mask, cotangents, implementation=name
            )

        found = in_float64(jax.jit(run), arrays, floats, others, seen, cotangents)
        for one, exact in zip(*map(jax.tree.leaves, (found, golden)), strict=True):
            assert one.dtype == np.float64
            np.testing.assert_allclose(one, exact, rtol=1e-11, atol=1e-12)


# --- the table ------------------------------------------------------------------------


def test_the_suite_is_complete():
    """60 mods and masks, all of the library, and every dtype, length and mask."""
    assert len({x.name for x in MODS}) + len({x.name for x in MASKS}) >= 60
    assert len(MODS) == len({x.name for x in MODS}) >= len(MASKS)
    assert {x.mod.name for x in SUITE} == {x.name for x in MODS}
    assert {x.mask.name for x in SUITE} == {x.name for x in MASKS}
    assert {(x.dtype, x.lengths) for x in SUITE} >= set(product(DTYPES, LENGTHS))
    assert {n for x in SUITE for n in x.lengths} >= {1, 17, 127, 255}
    assert len(LIBRARY_MODS) >= len(public(px.kernels.mods) - {"sinks", "alibi_slopes"})
    assert len(LIBRARY_MASKS) >= len(public(px.kernels.masks))


def public(module):
    """The functions a module defines for its users."""
    return {
        name
        for name, x in vars(module).items()
        if inspect.isfunction(x) and not name.startswith("_") and is_own(x, module)
    }


def is_own(function, module):
    return function.__module__ == module.__name__
