"""Laws of functions that are called with ever new sizes: what they hold on to."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.transforms import _known_calls


LIMIT = 16


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    """After how many sizes they are forgotten."""
    monkeypatch.setattr(_known_calls, "_LIMIT", LIMIT)


def scheduled(x, step):
    return x * step


def test_a_counter_of_steps_takes_no_memory():
    f, x = px.compile(scheduled), jnp.ones(3)
    held = []
    for step in range(10 * LIMIT):
        f(x, step)
        if step % (2 * LIMIT) == LIMIT:
            gc.collect()
            held.append(len(gc.get_objects()))
    assert max(held[1:]) - held[1] < LIMIT


@pytest.mark.parametrize("options", [{}, {"dims": {"x": "t"}}, {"dynamic": True}])
def test_calls_are_the_function_s_and_are_counted_whatever_was_forgotten(options):
    f, count = px.compile(scheduled, **options), 0
    for step in range(5 * LIMIT):
        for n in (3, 4 + step % 3):
            np.testing.assert_array_equal(
                f(jnp.arange(n), step), step * np.arange(n), strict=False
            )
            count += 1
    assert f.stats.calls == count
    assert 0 < f.stats.waste < 0.5


def test_what_serves_most_calls_is_found_after_others_were_forgotten():
    f, x = px.compile(lambda x: x.sum(), dims={"x": "t"}), jnp.ones(3)
    for n in range(3 * LIMIT):
        f(jnp.ones(4 + n))
        for _ in range(50):
            assert f(x) == 3
    assert f.stats.calls == 3 * LIMIT * 51


def test_threads_lose_no_call_where_sizes_are_forgotten():
    f, x = px.compile(scheduled), jnp.ones(3)
    steps = range(8 * LIMIT)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: f(x, step), steps))
    np.testing.assert_array_equal(found, np.outer(steps, np.ones(3)))
    assert f.stats.calls == len(steps)


def test_no_call_is_lost_where_devices_take_turns():
    f, x = px.compile(scheduled), jnp.ones(3)
    arrays = [x, jax.device_put(x, jax.devices()[3])]
    turns = np.random.default_rng(0)
    for _ in range(20 * LIMIT):
        f(arrays[turns.integers(2)], int(turns.integers(3 * LIMIT)))
    assert f.stats.calls == 20 * LIMIT


def test_decisions_know_the_sizes_of_the_latest_calls(tmp_path):
    f, path = px.compile(scheduled), tmp_path / "decisions.json"
    for step in range(5 * LIMIT):
        f(jnp.ones(3 + step % 2), step)
    f.save_decisions(path)
    (function,) = json.loads(path.read_text())["functions"].values()
    (sizes,) = function["calls"].values()
    seen = sizes["x.shape[0]"]["seen"]
    assert set(seen) == {"3", "4"}
    assert 4 * LIMIT < sum(seen.values()) <= 5 * LIMIT  # but for forgotten traces
    assert len(sizes["step"]["seen"]) <= 2 * LIMIT
