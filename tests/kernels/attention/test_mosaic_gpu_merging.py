"""Laws of the kernel that merges parts of the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pliax.kernels.attention.merging import merge as merge_by_xla
from pliax.kernels.attention.mosaic_gpu_merging import Parts, at_once, merge


def parts_of(seed, counts, channels, is_empty):
    """Random sums of rows; where `is_empty` says so a part has seen nothing."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((*counts, channels))
    maximum, total = 30 * rng.standard_normal(counts), rng.random(counts) + 0.5
    nothing = np.broadcast_to(is_empty(rng, counts), counts)
    out[nothing], maximum[nothing], total[nothing] = 0, -np.inf, 0
    return Parts(*(jnp.asarray(x, jnp.float32) for x in (out, maximum, total)))


def by_xla(parts, queries, group):
    """The same by XLA, and heads apart: (B, K, T G, ...) to (B, T, H, ...)."""

    def apart(x):
        B, K, _, *rest = x.shape
        x = x[:, :, : queries * group].reshape(B, K, queries, group, *rest)
        return x.swapaxes(1, 2).reshape(B, queries, K * group, *rest)

    return [apart(x) for x in merge_by_xla(parts)]


def sometimes(rng, counts):
    return rng.random(counts) < 0.4


def obey(parts, queries, group):
    found = merge(parts, queries, group, jnp.float32, interpret=True)
    for x, wanted in zip(found, by_xla(parts, queries, group), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    number=st.sampled_from([1, 2, 5, 32, 33, 64, 65, 128]),
    sequences=st.integers(1, 2),
    heads=st.integers(1, 2),
    queries=st.integers(1, 3),
    group=st.integers(1, 4),
    beyond=st.integers(0, 2),
    channels=st.sampled_from([64, 128, 192]),
)
def test_the_kernel_merges_as_xla_does_and_puts_heads_apart(
    seed, number, sequences, heads, queries, group, beyond, channels
):
    counts = number, sequences, heads, queries * group + beyond
    obey(parts_of(seed, counts, channels, sometimes), queries, group)


def test_loads_fit_into_registers():
    sizes = [at_once(channels) for channels in (64, 128, 192, 256, 320)]
    assert sizes == [32, 64, 10, 32, 6]


@pytest.mark.parametrize(("channels", "whole", "rest"), [(192, 2, 2), (192, 0, 7)])
def test_all_parts_count_however_many_are_loaded_at_once(channels, whole, rest):
    number = whole * at_once(channels) + rest
    obey(parts_of(4, (number, 2, 2, 3), channels, sometimes), 1, 3)


@pytest.mark.parametrize("number", [3, at_once(64) + 2])
def test_parts_that_saw_nothing_count_for_nothing(number):
    first = np.arange(number)[:, None, None, None]
    parts = parts_of(1, (number, 1, 2, 4), 64, lambda rng, n: first != 1)
    obey(parts, 2, 2)
    out, lse, maximum, _ = merge(parts, 2, 2, jnp.float32, interpret=True)
    alone = (parts.out[1] / parts.total[1][..., None]).reshape(1, 2, 2, 2, 64)
    np.testing.assert_allclose(
        out, alone.swapaxes(1, 2).reshape(out.shape), rtol=1e-6, atol=1e-6
    )
    assert jnp.isfinite(lse).all() and jnp.isfinite(maximum).all()


def test_a_row_that_saw_nothing_is_zero_and_its_lse_minus_infinity():
    parts = parts_of(2, (2, 1, 1, 2), 128, lambda rng, n: True)
    out, lse, maximum, log_sum = merge(parts, 2, 1, jnp.bfloat16, interpret=True)
    assert out.dtype == jnp.bfloat16 and not out.any() and not log_sum.any()
    assert (lse == -jnp.inf).all() and (maximum == -jnp.inf).all()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_stays_in_its_row(value):
    parts = parts_of(3, (3, 1, 1, 2), 64, lambda rng, n: False)
    spoiled = parts._replace(out=parts.out.at[1, 0, 0, 0, 5].set(value))
    out, *_ = merge(spoiled, 2, 1, jnp.float32, interpret=True)
    known, *_ = merge(parts, 2, 1, jnp.float32, interpret=True)
    assert not jnp.isfinite(out[0, 0, 0, 5])
    hidden = out.at[0, 0, 0, 5].set(known[0, 0, 0, 5])
    np.testing.assert_array_equal(hidden, known)


def test_copies_under_vmap_are_merged_alone():
    many = [parts_of(n, (2, 1, 1, 3), 64, sometimes) for n in range(2)]
    stacked = Parts(*(jnp.stack(x) for x in zip(*many, strict=True)))

    def run(parts):
        return merge(parts, 3, 1, jnp.float32, interpret=True)

    for n, found in enumerate(zip(*jax.vmap(run)(stacked), strict=True)):
        for x, wanted in zip(found, run(many[n]), strict=True):
            np.testing.assert_array_equal(x, wanted)
