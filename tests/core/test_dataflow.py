"""Laws of what equations are computed of."""

import jax
import jax.numpy as jnp
from hypothesis import given, strategies as st

from pliax.core._jax import bind_equation
from pliax.core.dataflow import is_literal, leading_to


STEPS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=12)


def program(steps):
    """A jaxpr where each value is made of two that came before it; all are results."""

    def run(x, y):
        values = [x, y]
        for i, j in steps:
            values.append(values[i % len(values)] - 2 * values[j % len(values)])
        return values

    return jax.make_jaxpr(run)(1, 2).jaxpr


def result(jaxpr, equations, wanted):
    env = dict(zip(jaxpr.invars, map(jnp.int32, (3, 5)), strict=True))
    for eqn in equations:
        values = [v.val if is_literal(v) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, bind_equation(eqn, values), strict=True))
    return env[wanted]


@given(steps=STEPS, which=st.integers(0, 99))
def test_a_result_needs_all_of_the_equations_that_lead_to_it_and_no_other(steps, which):
    jaxpr = program(steps)
    wanted = jaxpr.outvars[which % len(jaxpr.outvars)]
    found = leading_to(jaxpr.eqns, [wanted])
    whole = result(jaxpr, jaxpr.eqns, wanted)
    assert result(jaxpr, found, wanted) == whole
    for n, eqn in enumerate(found):
        later = found[n + 1 :]
        is_used = any(v in eqn.outvars for e in later for v in e.invars)
        assert is_used or wanted in eqn.outvars


def test_a_number_needs_no_equation():
    jaxpr = jax.make_jaxpr(lambda x: (x + 1, 3))(1).jaxpr
    assert is_literal(jaxpr.outvars[1])
    assert leading_to(jaxpr.eqns, jaxpr.outvars[1:]) == []
