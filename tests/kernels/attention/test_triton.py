"""What the kernels in Triton refuse, how they are cut, and that nobody takes them by default."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import pliax as px
from pliax.kernels._backends import choose
from pliax.kernels.attention import api, triton_configs, triton_limits


BF16 = jnp.bfloat16


class Gpu:
    platform, compute_capability = "gpu", "8.0"


@pytest.fixture
def gpu(monkeypatch):
    """As if the default device were an Ampere GPU, and the extra installed."""
    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu()])
    monkeypatch.setattr(triton_limits, "find_spec", lambda name: name)
    monkeypatch.setattr(Gpu, "compute_capability", "8.0")
    return monkeypatch


def chosen(shape=(1, 64, 2, 64), dtype: Any = BF16, score_mod=None, mask=None):
    x = jax.ShapeDtypeStruct(shape, dtype)
    close = api.close_score_mod(score_mod, jnp.float32, frozenset())
    arguments = api._Arguments((x, x, x), close, mask, {})
    return choose("flex_attention", api.BACKENDS, arguments, "triton").name


def refused(match, **options):
    with pytest.raises(NotImplementedError, match=match):
        chosen(**options)


def test_a_cpu_runs_none_of_it():
    x = jnp.zeros((1, 64, 2, 64), BF16)
    with pytest.raises(NotImplementedError, match=r"capability 8\.0 .* found cpu"):
        px.flex_attention(x, x, x, implementation="triton")


def test_the_device_and_the_extra_are_asked_for(gpu):
    assert chosen() == "triton"
    gpu.setattr(Gpu, "compute_capability", "7.5")
    refused(r"8\.0 and newer and on AMD's, found 7\.5")
    gpu.setattr(Gpu, "compute_capability", "gfx942")
    assert chosen() == "triton"
    gpu.setattr(triton_limits, "find_spec", lambda name: None)
    refused(r'it needs jax-triton, which pip install "pliax\[triton\]" brings')


@pytest.mark.usefixtures("gpu")
def test_it_takes_floats_of_16_and_32_bits():
    assert {chosen(dtype=x) for x in (BF16, jnp.float16, jnp.float32)} == {"triton"}
    refused("float32, found float64, float64, float64", dtype=jnp.float64)


@pytest.mark.usefixtures("gpu")
def test_it_takes_so_many_channels_and_masks_of_whole_tiles():
    assert chosen(shape=(1, 64, 2, 256)) == "triton"
    refused("up to 256 channels, found 257", shape=(1, 64, 2, 257))
    causal = px.kernels.masks.causal
    for size, is_taken in ((16, True), (48, True), (40, False)):
        mask = px.create_block_mask(causal, None, None, 64, 64, block_size=size)
        if is_taken:
            assert chosen(mask=mask) == "triton"
        else:
            refused(r"multiples of 16 x 16, found block_size=\(40, 40\)", mask=mask)


@pytest.mark.usefixtures("gpu")
def test_it_says_which_primitive_no_kernel_computes():
    refused(
        "of score_mod, no kernel computes erf for each score",
        score_mod=lambda s, b, h, q, k: jax.lax.erf(s),
    )


def test_it_is_nobodys_default(gpu):
    gpu.setattr(api, "_refused_by_mosaic_gpu", lambda arguments: "not here")
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), BF16)
    arguments = api._Arguments((x, x, x), None, None, {})
    assert choose("flex_attention", api.BACKENDS, arguments, None).name == "xla"
    assert "pliax.kernels.attention.triton" not in sys.modules


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_q": 48}, "a power of two, at least 16, .* found 48.\nPass 32"),
        ({"bwd_block_kv": 8}, "a power of two, at least 16, .* found 8.\nPass 16"),
        ({"warps": 3}, "a power of two, at least 1 .* found 3.\nPass 2"),
        ({"bwd_warps": 64}, "at most 32, .* found 64.\nPass 32"),
        ({"splits": 3}, r"\['splits'\] are unknown to implementation='triton'"),
        ({"block_kv": 64}, r"must divide the keys .* block_size=\(32, 32\), found 64"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_options_that_make_no_tiles_are_refused(options, match):
    x = jnp.zeros((1, 64, 2, 64), BF16)
    mask = px.create_block_mask(
        px.kernels.masks.causal, None, None, 64, 64, block_size=32
    )
    with pytest.raises(ValueError, match=match):
        px.flex_attention(
            x, x, x, block_mask=mask, implementation="triton", kernel_options=options
        )


KERNELS = st.sampled_from(["forward", "backward_q", "backward_kv"])


@given(
    kernel=KERNELS,
    channels=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    dtype=st.sampled_from([BF16, jnp.float16, jnp.float32]),
    blocks=st.none() | st.tuples(*[st.integers(1, 20).map(lambda n: 16 * n)] * 2),
    stages=st.none() | st.integers(1, 9),
)
def test_tiles_cut_blocks_and_fit(kernel, channels, dtype, blocks, stages):
    asked = {} if stages is None else {"stages": stages, "bwd_stages": stages}
    found = triton_configs.sizes_of(kernel, channels, dtype, blocks, asked)
    assert all(n >= 16 and n & (n - 1) == 0 for n in found[:2])
    if blocks is not None:
        assert not blocks[0] % found.rows and not blocks[1] % found.columns
    width = sum(map(triton_configs.padded, channels)) * jnp.dtype(dtype).itemsize
    operands = (found.rows + found.stages * found.columns) * width
    assert operands <= triton_configs.memory() * 1024


def test_blocks_of_64_rows_have_sizes_of_their_own():
    """Eight warps are for 128 rows."""
    for kernel, channels, _ in triton_configs.SMALL:
        cut, *rest = (
            triton_configs.sizes_of(kernel, (channels, channels), BF16, blocks, {})
            for blocks in ((64, 128), (192, 64), (128, 64), None)
        )
        small, whole = rest[0], rest[1:]
        assert (cut.rows, cut.warps) == (small.rows, small.warps) == (64, 4)
        assert cut != whole[0] == whole[1]
    wide = triton_configs.sizes_of("backward_q", (128, 128), BF16, (128, 128), {})
    assert (wide.rows, wide.warps) == (128, 8)


def test_the_backward_pass_has_options_of_its_own():
    asked = {"block_q": 32, "bwd_block_q": 128, "bwd_block_kv": 32, "bwd_warps": 8}
    sizes = [
        triton_configs.sizes_of(x, (64, 64), BF16, None, asked)
        for x in ("forward", "backward_q", "backward_kv")
    ]
    assert [x.rows for x in sizes] == [32, 128, 32]
    assert [x.columns for x in sizes] == [64, 32, 128]
    assert [x.warps for x in sizes] == [4, 8, 8]
