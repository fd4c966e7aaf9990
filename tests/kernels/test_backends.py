"""The rule that picks a backend: the best that supports, never another than named."""

from dataclasses import replace

import pytest

from pliax.kernels._backends import Backend, check_options, choose


def backend(name, priority, limit):
    def supports(size):
        return None if size <= limit else f"sizes above {limit} are too large"

    return Backend(name, lambda: name, supports, priority, options=("tile",))


BACKENDS = (backend("plain", 0, 100), backend("fast", 2, 10), backend("middle", 1, 50))


@pytest.mark.parametrize(("size", "name"), [(5, "fast"), (20, "middle"), (70, "plain")])
def test_the_supported_backend_of_highest_priority_runs(size, name):
    assert choose("f", BACKENDS, size, None).name == name


def test_an_explicit_name_never_falls_back():
    assert choose("f", BACKENDS, 5, "plain").name == "plain"
    text = "f: fast: sizes above 10 are too large.\nLeave implementation=None to take"
    with pytest.raises(NotImplementedError, match=text):
        choose("f", BACKENDS, 20, "fast")


def test_when_all_refuse_every_reason_is_given():
    with pytest.raises(NotImplementedError, match=r"fast: .*; middle: .*; plain: "):
        choose("f", BACKENDS, 1000, None)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ValueError, match="'slow' is unknown; there is 'fast', 'middle', 'plain'"
    ):
        choose("f", BACKENDS, 5, "slow")


def test_unknown_options_are_refused_with_the_known_ones():
    check_options("f", BACKENDS[0], {"tile": 3})
    with pytest.raises(ValueError, match=r"\['tiel'\] are unknown .*which reads: tile"):
        check_options("f", BACKENDS[0], {"tiel": 3})


def test_the_interpreter_is_asked_for_by_1_alone():
    interpreted = replace(BACKENDS[0], options=("interpret",))
    check_options("f", interpreted, {"interpret": 1})
    with pytest.raises(ValueError, match=r"\['interpret'\] must be 1, found 2"):
        check_options("f", interpreted, {"interpret": 2})
