import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness


@pytest.fixture(scope="module")
def quick_record(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmark") / "quick.json"
    script = harness.ROOT / "benchmarks" / "bench_muon.py"
    command = [sys.executable, str(script), "--quick", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, cwd=harness.ROOT)
    return json.loads(output.read_text())


def test_a_quick_run_says_where_its_numbers_come_from(quick_record):
    assert quick_record["is_complete"]
    named = {"python", "pliax", *harness.PACKAGES}
    assert named <= set(quick_record["versions"]) <= {*named, *harness.RIVALS}
    assert quick_record["device"]["platform"] == "cpu"
    assert isinstance(quick_record["dirty"], bool)
    for key in ("commit", "command", "date"):
        assert quick_record[key]


def test_the_tree_names_the_files_and_not_the_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    file = tmp_path / "file.py"
    file.write_text("1\n")
    first = harness.environment_record()
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=tmp_path, check=True)
    second = harness.environment_record()
    file.write_text("2\n")
    third = harness.environment_record()
    log = ["git", "log", "--format=%T"]
    known = subprocess.run(log, cwd=tmp_path, capture_output=True, text=True).stdout
    assert first["tree"] == second["tree"] == known.strip() != third["tree"]
    assert not second["dirty"] and third["dirty"]


def test_what_a_run_writes_is_no_change_of_what_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "a.json").write_text("1\n")
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=tmp_path, check=True)
    first = harness.environment_record()
    for name in "ab":
        (results / f"{name}.json").write_text("2\n")
    second = harness.environment_record()
    assert second["tree"] == first["tree"] and not second["dirty"]
    (tmp_path / "benchmarks" / "bench.py").write_text("3\n")
    third = harness.environment_record()
    assert third["tree"] != first["tree"] and third["dirty"]


@pytest.mark.parametrize("other", [None, "tree", "device"])
def test_parts_of_one_tree_and_device_are_merged(other, tmp_path):
    output = tmp_path / "record.json"

    def run(number, rows):
        record: dict[str, Any] = {"tree": "t", "device": "d", "date": "now"}
        record["command"] = f"c{number}"
        record["settings"] = {"XLA_FLAGS": f"--s{number}"}
        if number == 2 and other:
            record[other] = "another"
        whole = harness.merged(output, record, rows, lambda row: row["name"])
        output.write_text(json.dumps(whole))
        return whole

    run(1, [{"name": "a", "ms": 1}])
    run(1, [{"name": "a", "ms": 1}, {"name": "b", "ms": 2}])
    found = run(2, [{"name": "b", "ms": 3}])
    first = [] if other else [{"name": "a", "ms": 1}]
    assert found["rows"] == [*first, {"name": "b", "ms": 3}]
    runs = [(part["command"], *part["settings"].values()) for part in found["parts"]]
    last = ("c2", "--s2")
    assert runs == ([last] if other else [("c1", "--s1"), last])
    assert found["command"] == "c2"


def test_runs_of_parts_leave_one_complete_file(tmp_path):
    output = tmp_path / "record.json"

    def part(*names):
        zero = harness.Rival("zero", jnp.zeros_like, (jnp.ones(2),))
        cases = [harness.Case(name, lambda: np.zeros(2), (zero,)) for name in names]
        return harness.run(cases, samples=1, output=output, key=lambda row: row["case"])

    part("a", "b")
    assert part("b", "c") == json.loads(output.read_text())
    found = json.loads(output.read_text())
    assert [row["case"] for row in found["rows"]] == ["a", "b", "c"]
    assert found["is_complete"]


def test_every_row_has_an_error_and_all_its_samples(quick_record):
    assert {row["rival"] for row in quick_record["rows"]} >= {"pliax", "optax"}
    for row in quick_record["rows"]:
        assert len(row["samples_ms"]) == 3
        assert row["median_ms"] == np.median(row["samples_ms"])
        assert 0 < row["mean_error"] <= row["max_error"] < 0.1
        for key in ("peak_memory_mib", "compile_s", "hlo_instructions", "hlo_bytes"):
            assert row[key] > 0


@pytest.mark.parametrize("times", [8, 16, 24])
def test_what_is_repeated_runs_so_often_and_gives_one_result(times, tmp_path):
    ran = []

    def function(x):
        jax.debug.callback(lambda: ran.append(1))
        return x + 1.0

    rival = harness.Rival("many", function, (jnp.ones(3),), times=times)
    case = harness.Case("c", lambda: np.full(3, 2.0), (rival,))
    output = tmp_path / "record.json"
    (row,) = harness.run([case], samples=2, output=output)["rows"]
    jax.effects_barrier()
    assert row["max_error"] == 0 and len(ran) == 3 * times


def test_what_is_donated_is_the_result_of_the_call_before(tmp_path):
    seen = []

    def function(step, x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return (x + step,)

    start = jnp.float32(0)
    arguments = (jnp.float32(2), start)
    rival = harness.Rival("loop", function, arguments, lambda x: x[0], donated=1)
    case = harness.Case("c", lambda: np.float64(2), (rival,))
    output = tmp_path / "record.json"
    (row,) = harness.run([case], samples=2, calls=3, output=output)["rows"]
    jax.effects_barrier()
    assert row["max_error"] == 0 and start == 0
    assert sorted(seen) == [2.0 * i for i in range(1 + 1 + 2 * 3)]


def test_kernels_are_summed_by_name():
    timings = [("add_1", 1.0), ("mul_2", 4.0), ("add_12", 2.0)]
    summary = harness.kernel_summary(timings, times=2)
    assert summary == {
        "kernels_ms": 3.5,
        "kernels": {"mul": [0.5, 2.0], "add": [1.0, 1.5]},
    }
    assert list(summary["kernels"]) == ["mul", "add"]


def test_another_library_takes_its_turns(tmp_path):
    began, waited, looked_at = [], [], []

    def start():
        began.append(1)
        return 1.5

    def outcome(result):
        looked_at.append(result)
        return np.full(3, result)

    foreign = harness.Foreign("other", start, lambda: waited.append(1), outcome)
    case = harness.Case("c", lambda: np.ones(3), (), foreign=lambda: [foreign])
    output = tmp_path / "record.json"
    (row,) = harness.run([case], samples=2, output=output, calls=3)["rows"]
    assert (row["rival"], row["max_error"], len(row["samples_ms"])) == ("other", 0.5, 2)
    assert (len(began), len(waited)) == (2 + 2 * 3, 3)
    assert looked_at == [1.5]  # of the first call alone: no copy is timed


def test_the_error_is_the_distance_from_the_oracle(tmp_path):
    rivals = (
        harness.Rival("exact", lambda x: x + 1.0, (jnp.ones(3),)),
        harness.Rival("off", lambda x: (x, x + 1.5), (jnp.ones(3),), lambda r: r[1]),
    )
    case = harness.Case("sum", lambda: np.full(3, 2.0), rivals)
    record = harness.run([case], samples=2, output=tmp_path / "new" / "sum.json")
    assert [row["max_error"] for row in record["rows"]] == [0.0, 0.5]
    assert [row["mean_error"] for row in record["rows"]] == [0.0, 0.5]
    assert json.loads((tmp_path / "new" / "sum.json").read_text()) == record


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("bench_muon.py", "--gpu"), ("bench_matrix_products.py",)]
)
def test_what_is_measured_on_a_gpu_is_right_on_any_device(arguments, tmp_path):
    script, *options = arguments
    output = tmp_path / "quick.json"
    command = [sys.executable, str(harness.ROOT / "benchmarks" / script), *options]
    command += ["--quick", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, cwd=harness.ROOT)
    rows = json.loads(output.read_text())["rows"]
    assert len({row["case"] for row in rows}) == len(rows) - (2 if options else 3)
    assert all(row["max_error"] < 0.05 for row in rows)


def test_a_step_on_many_devices_is_that_of_one_and_travels_twice_a_shape(tmp_path):
    output = tmp_path / "quick.json"
    script = str(harness.ROOT / "benchmarks" / "bench_muon_devices.py")
    command = [sys.executable, script, "--quick", "--output", str(output)]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    devices |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(harness.ROOT)}
    environment = {**os.environ, **devices}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = {row["rival"]: row for row in json.loads(output.read_text())["rows"]}
    errors = [row["max_error"] for row in rows.values()]
    np.testing.assert_allclose(errors, errors[0], rtol=0.1)
    shapes = 3  # (16, 16), (16, 64) and (64, 16)
    assert rows["sharded"]["collectives"] == {"all-to-all": 2 * shapes}
    assert rows["replicated"]["collectives"] == {"all-gather": shapes}
    for name in ("sharded", "replicated"):
        found = rows[name]["median_ms"] * rows[name]["efficiency"] * 4
        np.testing.assert_allclose(found, rows["one device"]["median_ms"])


@pytest.mark.parametrize("is_same", [True, False])
def test_rows_of_a_repeated_case_say_whether_calls_agree(is_same, tmp_path):
    calls = iter(range(100))

    def start():
        return np.asarray(0 if is_same else next(calls))

    case = harness.Case(
        "one",
        lambda: np.zeros(()),
        (harness.Rival("ours", jnp.sin, (jnp.ones(3),), jnp.sum),),
        foreign=lambda: [harness.Foreign("other", start, lambda: None)],
        is_repeated=True,
    )
    record = harness.run([case], samples=1, output=tmp_path / "record.json")
    assert [x["same_bits"] for x in record["rows"]] == [True, is_same]
