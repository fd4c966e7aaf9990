import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    bench_attention_cpu as bench,
    core_distance,
    harness,
    plot,
    torch_flex_cpu,
    torch_worker,
)
from benchmarks.attention_workloads import Workload, oracle


@pytest.fixture(scope="module")
def quick_record(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "quick.json"
    script = harness.ROOT / "benchmarks" / "bench_attention_cpu.py"
    options = ["--quick", "--without-torch", "--output", str(output)]
    command = [sys.executable, str(script), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=harness.ROOT)
    return json.loads(output.read_text())


def test_both_entrants_of_a_duel_have_samples_and_a_small_error(quick_record):
    assert len(quick_record["rows"]) == 2 * len(quick_record["duels"])
    assert quick_record["versions"]["torch"] is None
    for row in quick_record["rows"]:
        assert 3 <= len(row["samples_ms"]) <= 3 * bench.PATIENCE
        assert row["min_ms"] <= row["median_ms"] == np.median(row["samples_ms"])
        assert 0 < row["mean_error"] <= row["max_error"] < 1e-5


def test_a_verdict_compares_the_medians_with_the_bar(quick_record):
    pairs = zip(quick_record["rows"][::2], quick_record["rows"][1::2], strict=True)
    for duel, (ours, theirs) in zip(quick_record["duels"], pairs, strict=True):
        assert (ours["case"], theirs["case"]) == (duel["case"], duel["case"])
        turns = np.divide(theirs["samples_ms"], ours["samples_ms"])
        assert duel["ratio"] == np.median(turns)
        assert duel["passed"] == (duel["ratio"] >= duel["bar"])


NEAR, FAR = core_distance.NEAR_NS - 1, core_distance.NEAR_NS + 1


def test_turns_on_far_cores_are_kept_apart_from_the_verdict():
    near = [bench.Turn(1.0, 2.0, NEAR)] * 3
    far = [bench.Turn(1.0, 0.5, FAR)] * 5
    duel = bench.Duel("torch", "causal", 64, 1.0)
    rows = [{"min_ms": 1.0}, {"min_ms": 2.0}]
    verdict = bench.verdict(duel, rows, [*near, *far])
    assert (verdict["ratio"], verdict["far_ratio"]) == (2.0, 0.5)
    assert (verdict["near"], verdict["passed"], len(verdict["far_turns"])) == (
        True,
        True,
        5,
    )
    verdict = bench.verdict(duel, rows, [*near[:2], *far])
    assert (verdict["ratio"], verdict["near"], verdict["passed"]) == (0.5, False, False)


def test_turns_go_on_until_enough_of_them_count_or_patience_ends():
    class Entry:
        def sample(self):
            return 1.0

    entries = [Entry(), Entry()]
    distances = iter([NEAR, NEAR, *[FAR, NEAR] * 2, *[NEAR] * 100])
    turns = bench._turns(entries, 2, lambda: next(distances))
    assert [turn.counts for turn in turns] == [False, False, True, True]
    turns = bench._turns(entries, 1, lambda: FAR)
    assert len(turns) == bench.PATIENCE
    assert all(turn.counts for turn in bench._turns(entries, 2, None))


def test_a_core_distance_is_that_of_a_cache_line_between_two_cores():
    assert core_distance._numbers("0-3,8\n") == {0, 1, 2, 3, 8}
    distance = core_distance.probe()
    if distance is not None:  # cores that say they share a cache
        assert 1 < distance() < 1e6


@pytest.mark.parametrize(("large", "passed"), [(4.0, True), (4.1, False)])
def test_memory_passes_where_it_grows_no_faster_than_the_length(large, passed):
    rows = [
        {
            "against": "jax.nn",
            "case": f"{case}, S={S}",
            "rival": rival,
            "S": S,
            "temporary_memory_mib": mib,
        }
        for case in ("dense", "dense with backward")
        for S, sizes in ((256, (1.0, 1.0)), (1024, (large, 16.0)))
        for rival, mib in zip(("pliax", "jax.nn"), sizes, strict=True)
    ]
    verdicts = bench.memory(rows)
    assert [line["passed"] for line in verdicts] == [passed, passed]
    assert [line["jax.nn"] for line in verdicts] == [16.0, 16.0]


def test_the_oracle_of_the_gradients_is_the_gradient_of_the_formula():
    workload = Workload("dense", 64, 2, backward=True)

    def formula(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8.0
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    with jax.enable_x64(True):
        q, k, v, d_out = (jnp.asarray(x, jnp.float64) for x in workload.arrays)
        out, vjp = jax.vjp(formula, q, k, v)
        wanted = (out, *vjp(d_out))
    for found, exact in zip(oracle(workload), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-12)


def test_a_worker_without_torch_is_an_error_that_names_its_question(tmp_path):
    worker = torch_worker.start(Path(sys.executable), torch_flex_cpu.__file__, tmp_path)
    with pytest.raises(RuntimeError, match=r"asked for \{'do': 'versions'\}, found"):
        worker.ask(do="versions")
    worker.close()


def test_the_record_keeps_no_path_to_the_rivals_python(monkeypatch):
    place = f"{os.sep}somewhere{os.sep}python"
    for words in (["--torch-python", place], [f"--torch-python={place}"]):
        monkeypatch.setattr(sys, "argv", ["bench_attention_cpu.py", *words, "--quick"])
        assert place not in torch_worker.command()
        assert torch_worker.command().endswith("--quick")


def test_a_record_is_enough_to_draw_its_figure(quick_record, tmp_path):
    result, picture = tmp_path / "quick.json", tmp_path / "quick.png"
    result.write_text(json.dumps(quick_record))
    plot.draw("attention", result, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
