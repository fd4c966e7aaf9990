"""python -m pliax.info: a report that cannot fail."""

import os
import re
import subprocess
import sys

import jax
import pytest

import pliax
from pliax import info


def test_versions_and_devices():
    text = info.report({})
    for word in (pliax.__version__, jax.__version__, "optax", "numpy", "python"):
        assert word in text
    assert "8 x cpu" in text


def broken(*_, **__):
    raise OSError("libcuda.so not found\nand a second line")


def wordless():
    raise AssertionError


def test_backends_work_or_say_why():
    probes = {
        "xla": lambda: None,
        "mosaic_gpu": lambda: "needs a GPU of compute capability 9.0",
        "triton": broken,
        "other": wordless,
    }
    lines = [" ".join(line.split()) for line in info.report(probes).splitlines()]
    assert "xla works" in lines
    assert "mosaic_gpu does not work: needs a GPU of compute capability 9.0" in lines
    assert "triton does not work: OSError: libcuda.so not found" in lines
    assert "other does not work: AssertionError" in lines


def test_broken_devices_and_environment(monkeypatch):
    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(jax, "print_environment_info", broken)
    text = info.report({})
    assert text.count("unavailable: OSError: libcuda.so not found") == 2


def test_main_survives_anything(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", broken)
    info.main()
    assert "could not finish: OSError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('half'); raise KeyError('x')", r"exit status 1\): KeyError: 'x'"),
        ("print('half', flush=True); import os; os.abort()", r"-6\): no message"),
    ],
)
def test_a_child_that_dies_leaves_what_it_printed(monkeypatch, capsys, code, reason):
    monkeypatch.setattr(info, "_CHILD", code)
    info.main()
    out = capsys.readouterr().out
    assert out.startswith("half\n")
    assert re.search(f"could not finish .*{reason}$", out.strip())


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["cpu", "cuda", "no-such-platform"])
def test_exit_status_is_zero(platforms):
    environment = os.environ | {"JAX_PLATFORMS": platforms, "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "pliax.info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel backends" in done.stdout
    assert ("unavailable" in done.stdout) == (platforms != "cpu")


def test_a_flag_that_ends_the_process_is_a_reason():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_nonsense=1"}
    command = [sys.executable, "-m", "pliax.info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"pliax     {pliax.__version__}" in done.stdout  # said before the devices
    last = done.stdout.splitlines()[-1]
    assert last.startswith("pliax.info could not finish (exit status ")
    assert "--xla_nonsense=1" in last


WRITE = "import sys; from pliax import info; info._write('é' * 10**6, sys.stdout)"


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["/dev/full", "a pipe without reader", "ascii"])
def test_output_that_cannot_be_written_is_no_failure(stdout):
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONIOENCODING": "ascii"}
    if stdout == "/dev/full":
        target = os.open(stdout, os.O_WRONLY)
    elif stdout == "ascii":
        target = os.open(os.devnull, os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    try:
        command = [sys.executable, "-c", WRITE]
        done = subprocess.run(
            command, env=environment, stdout=target, stderr=subprocess.PIPE
        )
    finally:
        os.close(target)
    assert done.returncode == 0, done.stderr
