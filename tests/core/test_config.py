"""PLIAX_LOGS turns logs on, each record is printed once, and unknown names are told."""

import logging
import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pliax.core import config


NAMES = ("guards", "recompiles", "dynamic")
LOGS = dict(
    zip(
        NAMES,
        (config.guards_log, config.recompiles_log, config.dynamic_log),
        strict=True,
    )
)


@pytest.fixture
def untouched():
    """The loggers as they are without PLIAX_LOGS, and again afterwards."""
    parent = logging.getLogger("pliax")
    before = parent.propagate, {log: log.level for log in LOGS.values()}
    reset(parent)
    yield parent
    parent.propagate = before[0]
    for log, level in before[1].items():
        log.setLevel(level)


def reset(parent):
    parent.propagate = True
    for log in LOGS.values():
        log.setLevel(logging.NOTSET)


def enabled():
    return {name for name, log in LOGS.items() if log.isEnabledFor(logging.DEBUG)}


@given(
    names=st.sets(st.sampled_from(NAMES)), spaces=st.sampled_from([",", " , ", ",,"])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_named_logs_are_on_and_no_others(untouched, names, spaces):
    reset(untouched)
    config.read_logs(spaces.join(names))
    assert enabled() == names
    assert untouched.propagate == (not names)


def test_all_names_all_and_nothing_names_none(untouched):
    for text in (None, "", " "):
        config.read_logs(text)
        assert enabled() == set()
    config.read_logs("all")
    assert enabled() == set(NAMES)


def test_an_unknown_name_is_told_with_those_there_are(untouched):
    with pytest.warns(UserWarning, match="'gards', which is no log") as caught:
        config.read_logs("gards,dynamic")
    assert "Name some of guards, recompiles, dynamic" in str(caught[0].message)
    assert "or all" in str(caught[0].message) and enabled() == {"dynamic"}


def test_a_record_is_printed_once_however_often_logs_are_read(untouched, capsys):
    for _ in range(3):
        config.read_logs("guards")
    config.guards_log.debug("%s", "t <= 5")
    assert capsys.readouterr().err == "pliax.guards: t <= 5\n"


def test_a_level_set_in_code_prints_unless_the_program_has_handlers(
    untouched, capsys, monkeypatch, caplog
):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.getLogger("pliax.dynamic").setLevel(logging.DEBUG)
    config.dynamic_log.debug("t changed")
    config.guards_log.debug("not asked for")
    assert capsys.readouterr().err == "pliax.dynamic: t changed\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    config.dynamic_log.debug("t changed")
    assert capsys.readouterr().err == "" and "t changed" in caplog.messages


PROGRAM = """
import jax.numpy as jnp, pliax as px

@px.compile
def double(x):
    return x * 2 if x.shape[0] > 1 else x

for size in (3, 4, 5):
    double(jnp.ones(size))
"""


@pytest.mark.slow
def test_the_variable_is_read_at_import(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    env = os.environ | {"PLIAX_LOGS": "guards,dynamics", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert "UserWarning: PLIAX_LOGS=guards,dynamics: found 'dynamics'" in done.stderr
    lines = [x for x in done.stderr.splitlines() if x.startswith("pliax.")]
    asked = f"{script}:6 in double: return x * 2 if x.shape[0] > 1 else x"
    assert lines == [f"pliax.guards: px.compile(double): s0 > 1  # {asked}"]
    assert done.stdout == ""


def test_nothing_warns_where_the_variable_is_right(untouched):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.read_logs("guards,recompiles,dynamic,all")
