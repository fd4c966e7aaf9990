"""What is kept of the profiler's words."""

import csv
import io
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import profile_attention as profile


STALLS = {"wait": "1.5", "long_scoreboard": "3.0", "gmma": "0", "selected": "0.5"}


def table(**cells: str) -> list[str]:
    """As ncu prints it: names, units, and one kernel."""
    stalls = {f"{profile.STALL}{k}{profile.PER_ISSUE}": x for k, x in STALLS.items()}
    row = {"ID": "0", "Kernel Name": "entry"} | stalls | cells
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerows([row, ["unit"] * len(row), row.values()])
    return ["what the program prints", *text.getvalue().splitlines()]


def test_a_kernel_has_its_counts_in_the_units_of_their_names():
    cells = dict.fromkeys(profile.METRICS, "1,024")
    (found,) = profile.parsed(table(**cells))
    assert found["kernel"] == "entry"
    assert found["us"] == pytest.approx(1.024)  # of nanoseconds
    assert found["shared_kib"] == pytest.approx(1)  # of bytes
    assert found["memory_tb_per_s"] == pytest.approx(1024e-12)
    assert found["registers"] == 1024


def test_what_the_profiler_has_no_data_of_is_none():
    (found,) = profile.parsed(table(launch__registers_per_thread="no data"))
    assert found["registers"] is None and found["us"] is None


def test_stall_reasons_are_shares_and_the_largest_comes_first():
    (found,) = profile.parsed(table())
    assert [*found["stalls_percent"].items()] == [
        ("long_scoreboard", pytest.approx(60)),
        ("wait", pytest.approx(30)),
        ("selected", pytest.approx(10)),
    ]


def test_every_case_is_one_that_a_benchmark_times(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["profile", "--list"])
    profile.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(profile.CASES) == len(set(profile.CASES))
    for number, (direction, program, S, _) in enumerate(profile.CASES):
        case = profile.case_of(number)
        known = profile.decoding if direction == "decoding" else profile.attention
        assert program in known.PROGRAMS and case.program == program and case.S == S


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().split()[2]
    except OSError:
        return False
    return state not in "ZX"


def test_a_program_that_does_not_end_is_ended_with_those_it_started(tmp_path):
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 60 & echo $! > {child}; wait"]
    with pytest.raises(RuntimeError, match=r"sh did not end within 0\.5 s"):
        profile.told_within(0.5, command, os.environ)
    number = int(child.read_text())
    deadline = time.monotonic() + 10
    while is_running(number):  # a signal takes a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_fails_is_quoted():
    command = ["sh", "-c", "echo what is wrong >&2; exit 3"]
    with pytest.raises(RuntimeError, match="sh ended with 3: what is wrong"):
        profile.told_within(10, command, os.environ)


def test_what_a_program_prints_is_returned():
    assert profile.told_within(10, ["echo", "a, b"], os.environ) == "a, b\n"
