"""Laws of the kernels in Triton, on NumPy: what the definition says, and no more read."""

import sys
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_stand_in as stand_in
from attention_cases import gaussian

import pliax as px
from pliax.kernels import attention
from pliax.kernels.attention import triton_limits


AUX = px.AuxRequest(lse=True, max_scores=True)
SMALL = {"block_q": 16, "block_kv": 16, "bwd_block_q": 16, "bwd_block_kv": 16}


LOADED = ("triton", "triton_kernels", "triton_programs")


@cache
def modules_on_numpy():
    """What imports Triton, loaded once: annotations are checked by the first classes."""
    names = [f"{attention.__name__}.{name}" for name in LOADED]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        for name in ("pliax.kernels._jax_triton", *names):
            patch.setitem(sys.modules, name, None)  # so that it is put back
            del sys.modules[name]
        loaded = dict(zip(LOADED, map(import_module, names), strict=True))
    for name in LOADED:
        delattr(attention, name)  # an import set it
    return loaded


@pytest.fixture(autouse=True, scope="module")
def on_numpy():
    """As if the packages were installed, and the device one that they are for."""
    with pytest.MonkeyPatch.context() as patch:
        loaded = modules_on_numpy()
        for name, module in loaded.items():
            patch.setitem(sys.modules, module.__name__, module)
            patch.setattr(attention, name, module, raising=False)
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(triton_limits, "_refused_device", lambda: None)
        patch.setattr(loaded["triton"], "is_nvidia", lambda: False)
        yield
    jax.clear_caches()


def arrays(T=40, S=40, *, heads=(2, 1), channels=(16, 16), batch=2, dtype: Any = None):
    shapes = (T, heads[0], channels[0]), (S, heads[1], channels[0])
    shapes = *shapes, (S, heads[1], channels[1])
    dtype = dtype or jnp.float32
    return tuple(gaussian(n, (batch, *x), dtype) for n, x in enumerate(shapes))


def attend(implementation, given, **options):
    if implementation != "triton":
        options.pop("kernel_options", None)
    options = {"enable_gqa": True, "return_aux": AUX, **options}
    out, aux = px.flex_attention(*given, implementation=implementation, **options)
    return out, aux.lse, aux.max_scores


def results(implementation, given, **options):
    """Output, statistics and gradients."""
    f = lambda *given: attend(implementation, given, **options)  # noqa: E731
    found, pull = jax.vjp(f, *given)
    cotangents = [gaussian(n + 7, x.shape, x.dtype) for n, x in enumerate(found)]
    return SimpleNamespace(values=found, gradients=pull(tuple(cotangents)))


def agree(given, tolerance=2e-5, **options):
    found, wanted = (results(x, given, **options) for x in ("triton", "reference"))
    for x, y in zip(*map(jax.tree.leaves, (vars(found), vars(wanted))), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, tolerance, tolerance)


def masked(mask_mod, given, size, batch=None, heads=None):
    T, S = (x.shape[1] for x in given[:2])
    return px.create_block_mask(mask_mod, batch, heads, T, S, block_size=size)


@pytest.mark.parametrize("lengths", [(32, 64), (40, 56), (1, 17)])
@pytest.mark.parametrize("channels", [(16, 16), (20, 12)])
def test_all_scores(lengths, channels):
    agree(arrays(*lengths, heads=(4, 2), channels=channels))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_numbers_of_16_bits(dtype):
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    agree(arrays(40, 56, heads=(4, 2), dtype=dtype), tolerance)


# Of 48 keys in blocks of 32 the last holds a tile of 16 that is wholly beyond.
@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 48])
@pytest.mark.parametrize("size", [16, 32, 48])
def test_what_lies_beyond_the_end_is_neither_seen_nor_asked_for(length, size):
    given, bias = arrays(length, length), gaussian(5, (length,))
    mask = masked(lambda b, h, q, k: k % 3 != 0, given, size)
    biased = lambda s, b, h, q, k: s + bias[q] * bias[k]  # noqa: E731
    for options in ({}, SMALL):
        agree(given, score_mod=biased, block_mask=mask, kernel_options=options)


def test_a_score_that_zeros_have_none_of():
    """Queries beyond the end are zeros, by whose scores a mod may divide."""
    broken = lambda s, b, h, q, k: jnp.where(s == 0, jnp.nan, s)  # noqa: E731
    for given in (arrays(), arrays(48, 40)):
        mask = masked(lambda b, h, q, k: k < 30, given, 32)
        agree(given, score_mod=broken)
        agree(given, score_mod=broken, block_mask=mask, kernel_options=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("length", [384, 430])
@pytest.mark.parametrize("is_blind", [False, True])
def test_sparse_masks_are_cut_into_blocks_of_64(length, is_blind, monkeypatch):
    """Their lists by row and by column, partial and full, are not equally wide."""
    cuts, usual = [], modules_on_numpy()["triton"].sizes_of
    monkeypatch.setattr(
        modules_on_numpy()["triton"], "sizes_of",
        lambda kernel, channels, dtype, blocks, asked: (
            cuts.append((kernel, blocks))
            or usual(kernel, channels, dtype, blocks, asked)
        ),
    )  # fmt: skip
    given = arrays(length, length, batch=1)
    visible = lambda b, h, q, k: (q // 128 == k // 128) & (q + 64 * h >= k)  # noqa: E731
    seen = lambda *at: visible(*at) & (at[2] != 200) & (at[3] != 9)  # noqa: E731
    mask = masked(seen if is_blind else visible, given, 128, 1, 2)
    agree(given, block_mask=mask)
    kernels = "forward", "backward_q", "backward_kv"
    assert set(cuts) == {(kernel, (64, 64)) for kernel in kernels}
    cuts.clear()
    attend("triton", given, block_mask=mask, kernel_options={"block_q": 32})
    assert set(cuts) == {("forward", (128, 128))}  # of blocks that the user asks for


def blind(b, h, q, k):
    return (q >= k + 9 * h + b) & (k % 3 != 0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [16, (48, 32)])
def test_what_nobody_sees_and_who_sees_nothing_may_be_anything(size, shared):
    query, key, value = arrays(40, 56, heads=(4, 2))
    if shared:
        key, value = key[:1], value[:1]
    query = query.at[:, :9].set(jnp.where(jnp.arange(9) < 1, jnp.nan, 1)[:, None, None])
    key, value = key.at[:, ::3].set(jnp.nan), value.at[:, ::3].set(jnp.inf)
    given = query, key, value
    agree(given, block_mask=masked(blind, given, size, 2, 4))


def test_the_largest_score_may_be_infinite():
    infinite = lambda s, b, h, q, k: jnp.where((q > 5) & (k == 3), jnp.inf, s)  # noqa: E731
    pairs = (attend(x, arrays(), score_mod=infinite) for x in ("triton", "reference"))
    for found, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(found, wanted, 2e-5, 2e-5)
