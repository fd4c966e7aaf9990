"""python -m pliax.info: a report that cannot fail."""

import os
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


def broken(**_):
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
    monkeypatch.setattr(info, "report", broken)
    info.main()
    assert "could not finish: OSError" in capsys.readouterr().out


@pytest.mark.parametrize("platforms", ["cpu", "cuda", "no-such-platform"])
def test_exit_status_is_zero(platforms):
    environment = os.environ | {"JAX_PLATFORMS": platforms, "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "pliax.info"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel backends" in done.stdout
    assert ("unavailable" in done.stdout) == (platforms != "cpu")
