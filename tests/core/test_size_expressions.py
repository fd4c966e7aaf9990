"""Laws of what a size is worth."""

from hypothesis import given, strategies as st

from pliax.core.guards import Assumptions
from pliax.core.size_expressions import evaluate, modulo
from pliax.core.symbols import Symbol


def sizes(*names):
    symbols = [Symbol(name, 5, name) for name in names]
    return Assumptions(symbols).known.parse(", ".join(names))


DIVISORS = st.sampled_from([2, 3, 4, 8])
LEAVES = st.sampled_from(["t", "u", "-t", "3"])
TEXTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner)
        | st.builds("({} {} {})".format, inner, st.sampled_from(["%", "//"]), DIVISORS)
    ),
    max_leaves=5,
)


@given(TEXTS, DIVISORS, st.integers(1, 50), st.integers(1, 50))
def test_the_rest_of_a_size_is_that_of_its_form_without_rests(text, divisor, t, u):
    names = dict(zip("tu", sizes("t", "u"), strict=True))
    size, values = eval(text, {}, names), {"t": t, "u": u}
    found = evaluate(modulo(size, divisor), values)
    assert found % divisor == evaluate(size, values) % divisor
    assert evaluate(size, values) == eval(text, {}, values)


def test_what_is_rounded_up_leaves_no_rest():
    (t,) = sizes("t")
    assert modulo(t + -t % 8, 4) == 0
    assert modulo(t + -t % 6, 4) != 0
