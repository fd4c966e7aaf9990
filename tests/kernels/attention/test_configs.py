"""Laws of the choice of block sizes: no kernel is asked for more than a GPU has."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from attention_cases import gaussian
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels.attention import mosaic_gpu, mosaic_gpu_vjp
from pliax.kernels.attention.configs import OPTIONS, TABLE, Config, Kernel


SIZES = st.sampled_from([64, 128, 192, 256, 384, 512])
ASKED = st.dictionaries(st.sampled_from(OPTIONS), SIZES | st.integers(1, 1000))
LARGE = dict.fromkeys(OPTIONS, 512)


@pytest.mark.parametrize(("name", "channels", "kind"), TABLE)
def test_what_the_table_says_fits(name, channels, kind):
    blocks = {"dense": None, "coarse": (128, 128)}.get(kind, (64, 128))
    told = kind == "told"
    kernel = Kernel(name, (channels, channels), blocks, are_told=told)
    assert kernel.row() == TABLE[name, channels, kind]
    assert kernel.fits(kernel.row())
    assert kernel.config({}) == kernel.of(kernel.row())


@given(
    name=st.sampled_from(["forward", "backward", "dq", "dkv"]),
    channels=st.tuples(*[st.sampled_from([64, 128, 192, 256])] * 2),
    blocks=st.none() | st.tuples(SIZES, SIZES),
    asked=ASKED,
)
def test_whatever_is_asked_divides_the_blocks_and_is_not_exceeded(
    name, channels, blocks, asked
):
    if name == "backward":
        channels = min(channels[0], 128), min(channels[1], 128)
    asked = {k: n if "stages" in k else -(-n // 64) * 64 for k, n in asked.items()}
    config = Kernel(name, channels, blocks).config(asked)
    assert config.span % 64 == config.columns % 64 == 0
    if blocks is not None:
        assert blocks[0] % config.span == blocks[1] % config.columns == 0
    prefix = "" if name == "forward" else "bwd_"
    rows, columns = ("q", "kv") if name in ("forward", "dq") else ("kv", "q")
    found = {f"block_{rows}": config.span, f"block_{columns}": config.columns}
    for option, n in (found | {"stages": config.stages}).items():
        assert n <= asked.get(prefix + option, n)


def test_small_blocks_are_chosen_where_the_masks_are():
    backward = Config(columns=64, groups=1, movers=0)
    small = replace(backward, puts_off=True)
    narrow, asked = (64, 64), {"block_q": 64, "block_kv": 64}
    gathered = replace(small, gathers_heads=True)
    assert Kernel("forward", narrow, (64, 64)).config({}) == gathered
    assert Kernel("forward", narrow, (128, 128)).config(asked) == gathered
    assert not Kernel("forward", narrow, (128, 128)).config({}).gathers_heads
    wide = (128, 128), (64, 64)
    assert Kernel("forward", *wide).config({}) == small
    told = Kernel("forward", *wide, are_told=True).config({})
    assert told == replace(small, stages=1)
    assert Kernel("dkv", *wide).config({}) == backward


@pytest.mark.parametrize(
    ("name", "channels", "blocks", "puts_off"),
    [
        ("forward", (64, 64), None, False),
        ("forward", (64, 64), (128, 128), False),
        ("forward", (64, 64), (64, 64), True),
        ("forward", (64, 128), None, True),
        ("forward", (128, 128), (128, 128), True),
        ("forward", (256, 256), None, True),
        ("dq", (128, 128), (64, 64), False),
    ],
)
def test_the_softmax_puts_off_where_registers_have_room(
    name, channels, blocks, puts_off
):
    assert Kernel(name, channels, blocks).config({}).puts_off == puts_off


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("asked", [{}, LARGE], ids=["table", "large"])
def test_what_does_not_fit_becomes_smaller_and_is_no_error(D, V, asked):
    """Mosaic counts shared memory when it lowers, for which it needs no GPU."""
    T = 512
    ids = jnp.arange(T) * 3 // T

    def mask_mod(b, h, q, k):  # keys that may hold NaN take memory, and arrays do
        return (q >= k) & (k != 3) & (ids[q] == ids[k])

    mask = px.create_block_mask(mask_mod, None, None, T, T, block_size=512)
    shapes = (1, T, 2, D), (1, T, 2, D), (1, T, 2, V)
    arrays = tuple(gaussian(n, x, jnp.bfloat16) for n, x in enumerate(shapes))
    statistics = tuple(gaussian(n, (1, T, 2)) for n in (4, 5))

    def both(arrays):
        options = {"scale": 0.1, "asked": asked}
        out, lse, *_ = mosaic_gpu.forward(arrays, None, mask, **options)
        results = out, statistics[0], statistics[1]
        cotangents = out, lse
        return mosaic_gpu_vjp.backward(
            arrays, None, mask, results, cotangents, **options
        )

    lowered = jax.jit(both).trace(arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2
