"""The GPU benchmark of attention: what it counts, what it writes, what it concludes."""

import itertools
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from benchmarks import (
    bench_attention_exactness as exactness,
    bench_attention_gpu as bench,
)


@pytest.mark.parametrize("program", bench.PROGRAMS)
def test_the_scores_counted_are_those_the_mask_shows(program, monkeypatch):
    monkeypatch.setattr(bench, "WINDOW", 9)
    case = bench.Case(program, S=48, D=64, B=2, H=3)
    mask_mod = case.mods(jnp)[1] or px.kernels.masks.noop_mask
    assert case.scores == 6 * int(px.create_mask(mask_mod, None, None, 48, 48).sum())


def test_a_verdict_is_the_rivals_time_over_ours():
    row = {"program": "causal", "S": 4096, "D": 128, "direction": "forward"}
    times = {"pliax": 2.0, "cuDNN": 1.8, "torch flex": 2.4}
    rows = [{**row, "rival": name, "median_ms": ms} for name, ms in times.items()]
    found = {x["name"].rsplit(" forward ")[1]: x for x in bench.verdicts(rows)}
    assert (
        found["cuDNN"]["ratio"] == pytest.approx(0.9) and not found["cuDNN"]["passed"]
    )
    assert found["torch flex"]["bar"] == 1.15 and found["torch flex"]["passed"]


@pytest.mark.parametrize(("autotuned", "ratio"), [(2.2, 1.1), (2.6, 1.2)])
def test_of_the_options_of_torch_the_faster_ones_count(autotuned, ratio):
    row = {"program": "alibi", "S": 4096, "D": 128, "direction": "backward"}
    times = {"pliax": 2.0, "torch flex": 2.4, "torch flex autotuned": autotuned}
    rows = [{**row, "rival": name, "median_ms": ms} for name, ms in times.items()]
    (found,) = bench.verdicts(rows)
    assert found["ratio"] == pytest.approx(ratio) and not found["passed"]


@pytest.mark.parametrize(
    ("program", "narrow", "wide"),
    [("soft cap", 1.6, 2.0), ("documents", 1.5, 1.5), ("table", 1.5, 1.5)],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_larger_bars_are_for_both_directions(program, narrow, wide, direction):
    row = {"program": program, "S": 4096, "direction": direction}
    for D, bar in ((64, narrow), (128, wide)):
        rows = [
            {**row, "D": D, "rival": x, "median_ms": 1.0}
            for x in ("pliax", *bench.TORCH)
        ]
        (found,) = bench.verdicts(rows)
        assert found["bar"] == bar and not found["passed"]


def test_who_asks_for_more_takes_turns_with_who_does_not():
    ran, names = [], ["pliax", "cuDNN", bench.ASKED]
    clocks = [lambda x=x: ran.append(x) or float(len(ran)) for x in names]
    entrants: Any = [SimpleNamespace(name=x) for x in names]
    times, without = bench.samples_of(entrants, clocks, 3)
    assert [len(x) for x in times] == [3, 3, 12] and len(without) == 12
    assert set(ran[:6]) == {"pliax", "cuDNN"} and "cuDNN" not in ran[6:]
    for pair in zip(ran[6::2], ran[7::2], strict=True):
        assert set(pair) == {"pliax", bench.ASKED}
    assert bench.samples_of(entrants[:2], clocks[:2], 3)[1] == []
    row = {"program": "alibi", "S": 4096, "D": 128, "direction": "forward"}
    rows = [{**row, "rival": "pliax", "median_ms": 1.0}]
    rows.append({**row, "rival": bench.ASKED, "median_ms": 2.0, "without_ms": [1.9]})
    (found,) = bench.verdicts(rows)
    assert found["ratio"] == pytest.approx(0.95) and not found["passed"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_of_several_calls_each_is_of_what_the_one_before_returned(direction):
    def attend(q, k, v):
        return q * k + v

    *qkv, d = (jnp.arange(4.0) + n for n in range(4))
    made = bench.pass_in_jax("x", direction, attend, [*qkv, d])
    places = made.several(3, 2)
    found, elsewhere = (call() for call in places)
    pointers = [
        {x.unsafe_buffer_pointer() for x in jax.tree.leaves(call.args)}
        for call in places
    ]
    assert not set.intersection(*pointers)
    of = {"forward": lambda x: attend(x, *qkv[1:])}
    of["backward"] = lambda x: jax.vjp(attend, *qkv)[1](x)
    x, expected = {"forward": qkv[0], "backward": d}[direction], []
    for _ in range(3):
        expected.append(of[direction](x))
        x = jax.tree.leaves(expected[-1])[0]
    chex.assert_trees_all_close(found, expected)
    chex.assert_trees_all_equal(found, elsewhere)
    chex.assert_trees_all_close(made.call(), expected[0])


def test_every_entrant_has_its_samples_and_follows_each_other_one():
    ran = []
    clocks = [lambda n=n: ran.append(n) or n + len(ran) / 1000 for n in range(3)]
    times = bench.in_turns(clocks, 12)
    assert [[int(x) for x in mine] for mine in times] == [[n] * 12 for n in range(3)]
    assert {(a, b) for a, b in itertools.pairwise(ran) if a != b} == set(
        itertools.permutations(range(3), 2)
    )


def test_the_time_of_a_short_call_is_its_share_of_several_in_each_place(monkeypatch):
    now, one = [0.0], 0.0001  # seconds of a call on the device; 0.001 on the host
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def calls(count, places):
        def call(place):
            now[0] += 0.001 * (count == 1) + one * count * (1 + place)

        return [partial(call, n) for n in range(places)]

    (call,) = calls(1, 1)
    made = bench.Entrant("x", "forward", call, calls, lambda _: None, list, 0.0)
    assert bench.queue_ms(made)() == pytest.approx(1.1)
    monkeypatch.setattr(bench, "SHORT_MS", 2.0)
    monkeypatch.setattr(bench, "TOGETHER_MS", 11.0)
    clock = bench.queue_ms(made)
    assert [clock() for _ in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.1])


@pytest.mark.usefixtures("standard_promotion")
def test_a_quick_run_has_an_error_beside_each_time(tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    sizes = [
        "--rows",
        "causal",
        "--lengths",
        "128",
        "--channels",
        "64",
        "--samples",
        "1",
    ]
    monkeypatch.setattr(
        sys, "argv", ["bench", "--quick", *sizes, "--output", str(output)]
    )
    bench.main()
    record = json.loads(output.read_text())
    names = [(x["direction"], x["rival"]) for x in record["rows"]]
    forward = [("forward", "pliax"), ("forward", bench.ASKED)]
    assert names == [*forward, ("backward", "pliax")]
    (verdict,) = record["bars"]
    assert verdict["name"].endswith("forward pliax, lse and max_scores")
    assert verdict["bar"] == pytest.approx(0.97, abs=1e-3)
    for row in record["rows"]:
        assert row["samples_ms"] and row["tflops"] > 0
        assert np.all(np.asarray(row["over_plain"]) < 1.1)


@pytest.mark.slow
def test_a_case_that_fails_in_its_process_leaves_the_others(tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    words = "--quick --rows causal --lengths 128 --channels 64 300 --samples 1"
    argv = ["bench", *words.split(), "--processes", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.RaisesGroup(pytest.RaisesExc(NotImplementedError, match="channels")):
        bench.main()
    rows = json.loads(output.read_text())["rows"]
    assert {x["D"] for x in rows} == {64} and len(rows) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "results"),
    [("table, unseen", exactness.NAMES), ("documents, unseen", exactness.NAMES[:-1])],
)
@pytest.mark.usefixtures("standard_promotion")
def test_the_exactness_of_results_is_measured(program, results, tmp_path, monkeypatch):
    output = tmp_path / "record.json"
    names = [case.program for case in exactness.CASES]
    wanted = str(names.index(program))
    given = ["--quick", "--cases", wanted, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    exactness.main()
    (row,) = json.loads(output.read_text())["rows"]
    assert tuple(row["over_plain"]) == results and row["passed"]
    assert max(row["over_plain"].values()) > 0.1
