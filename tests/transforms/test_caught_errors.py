"""Laws of functions that catch JAX's errors, or compare its types: right at all sizes.

JAX calls symbolic sizes different that may be equal. What it raises then, or answers,
must not decide what a program does.
"""

import contextlib
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.core.caught_errors import noticing


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def tries(x, y):
    try:
        return x + y
    except TypeError:
        return x * 2


def suppresses(x, y):
    found = x * 2
    with contextlib.suppress(TypeError):
        found = jnp.add(x, y)
    return found


@contextlib.contextmanager
def forgiving(failures):
    try:
        yield
    except TypeError as error:
        failures.append(error)


def forgives(x, y):
    failures = []
    with forgiving(failures):
        y = jax.jit(jnp.add)(x, y)
    return x * 2 if failures else y


def raises_another(x, y):
    def added():
        try:
            return x + y
        except TypeError as error:
            raise KeyError("other") from error

    try:
        return added()
    except KeyError:
        return x * 2


def lets_go_first(x, y):
    try:
        try:
            with jax.named_scope("sum"):
                return x + y
        finally:
            x = x + 1
    except TypeError:
        return x * 2


def splits(x, y):
    try:
        return x.reshape(2, -1).sum(axis=0), y
    except Exception:
        return x, y


def compares_types(x, y):
    return x + 1 if jax.typeof(x) == jax.typeof(y) else x * 2


def looks_types_up(x, y):
    kinds = jax.tree.map(jax.typeof, [y, {"y": y[1:]}])
    return x + 1 if jax.typeof(x) != kinds[1]["y"] else x * 2


PROGRAMS = [tries, suppresses, forgives, raises_another, lets_go_first, splits]
PROGRAMS += [compares_types, looks_types_up]
SIZES = [(4, 4), (4, 3), (1, 4), (4, 1), (1, 1), (5, 5), (2, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dynamic": True}, {}], ids=["dynamic", "auto"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_errors_that_are_caught_decide_as_they_do_in_jit(f, options):
    compiled = px.compile(f, **options)
    for t, s in SIZES:
        x, y = ones(t), 3 * ones(s)
        found, wanted = compiled(x, y), jax.jit(f)(x, y)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_caught_error_is_a_reason_with_its_line():
    f = px.compile(tries, dims={"x": "t", "y": "s"})
    for t, s in [(3, 4), (4, 4), (1, 4)]:
        np.testing.assert_array_equal(f(ones(t), ones(s)), tries(ones(t), ones(s)))
    text = f.explain()
    assert "the function goes on after JAX's TypeError: add got incomp" in text
    assert "in tries: return x + y" in text
    padded = px.pad(tries, dims={"x": "t", "y": "s"})
    with pytest.raises(px.PaddingRefused, match="goes on after JAX's TypeError"):
        padded(ones(8), ones(8), sizes={"t": 3, "s": 4})


def test_types_of_arrays_are_compared_under_a_guard():
    f = px.compile(compares_types, dims={"x": "t", "y": "s"})
    f(ones(3), ones(4))
    f(ones(5), jnp.ones(5, jnp.int32))  # nobody asks sizes of other types
    assert [guard.condition for guard in f.guards] == ["t != s"]
    with pytest.raises(ValueError, match="the program needs t == s"):
        f(ones(4), ones(4))


def reraises(x):
    try:
        with jax.named_scope("doubled"):
            return x * 2
    except TypeError:
        raise
    finally:
        x.sum()


def asks_for_an_attribute(x):
    try:
        return x.no_such_thing
    except AttributeError:
        return x * 2


def asks_for_a_value(x):
    try:
        return x if x[0] > 0 else -x
    except jax.errors.TracerBoolConversionError:
        return x * 2


def asks_for_a_tree(x):
    try:
        return jax.tree.map(jnp.add, [x], [x, x])
    except ValueError:
        return x * 2


@pytest.mark.parametrize(
    "f", [reraises, asks_for_an_attribute, asks_for_a_value, asks_for_a_tree]
)
def test_errors_about_other_things_leave_one_trace(f):
    compiled = px.compile(f, dims={"x": "t"}, padding="require")
    for t in (3, 4, 5):
        np.testing.assert_array_equal(compiled(ones(t)), 2 * ones(t))
    assert compiled.stats.traces == 1


# Notes --------------------------------------------------------------------------------


def fails():
    return jnp.ones(3) + jnp.ones(4)


def catch():
    with contextlib.suppress(TypeError):
        fails()


def test_threads_note_their_own_errors():
    with noticing() as notes:
        other = threading.Thread(target=catch)
        other.start()
        other.join()
        assert notes.caught == []
        catch()
    (found,) = notes.caught
    assert found.text.startswith("TypeError: add got incompatible shapes")
    assert found.place.function == "fails"


def test_nothing_listens_after_the_last_trace():
    names = {i: sys.monitoring.get_tool(i) for i in range(6)}
    with noticing() as outer:
        with noticing() as inner:
            catch()
        catch()
    assert (len(inner.caught), len(outer.caught)) == (1, 2)
    assert {i: sys.monitoring.get_tool(i) for i in range(6)} == names


def test_a_debugger_and_a_profiler_may_be_there():
    taken = [i for i in (4, 3, 5, 2) if sys.monitoring.get_tool(i) is None]
    for i in taken:
        sys.monitoring.use_tool_id(i, "another")
    try:
        with noticing() as notes:
            catch()
        assert len(notes.caught) == 1
    finally:
        for i in taken:
            sys.monitoring.free_tool_id(i)
