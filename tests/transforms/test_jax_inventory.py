"""The padding transform on JAX's own tests of symbolic sizes, where a checkout is given."""

import os
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from transforms.padding import outcomes
from transforms.padding.outcomes import MISTAKES, PADDED, examine
from transforms.programs import jax_inventory

from pliax.transforms.padding.rules import RULES


CHECKOUT = jax_inventory.checkout()
EVERY = 1 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 40
HARNESSES = [
    harness
    for harness in (jax_inventory.harnesses(CHECKOUT)[::EVERY] if CHECKOUT else ())
    if not jax_inventory.exclusion(harness)
]


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason=f"{jax_inventory.VARIABLE} names no clone")
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda h: h.fullname)
def test_padded_harnesses_equal_plain_ones_whatever_the_padding(harness):
    outcome = examine(jax_inventory.subject_of(harness), serve=True)
    assert outcome.kind not in MISTAKES, outcome
    assert outcome.kind == PADDED or outcome.served, outcome


FILE = """
    import numpy as np

    class Harness:
        override_jax_config_flags = {}

        def __init__(self, name, dyn_fun, arrays, shapes, where=(), expect_error=None):
            self.fullname, self.dyn_fun, self.arrays = name, dyn_fun, arrays
            self.polymorphic_shapes, self.symbolic_constraints = shapes, where
            self.expect_error = expect_error

        def dyn_args_maker(self, rng):
            return [rng.normal(size=n) if isinstance(n, tuple) else n for n in self.arrays]

    def fails(x):
        raise ValueError("no")

    _POLY_SHAPE_TEST_HARNESSES = [
        Harness("sum", lambda x: x.sum(0), [(3, 4)], ["b, ..."]),
        [Harness("take", lambda x, i: x[i], [(4, 6), np.array([1, 2])],
                 ["a, 2*c + 2", "k"], ["k <= a"])],
        (Harness("fails", fails, [(3,)], ["b"], (), (ValueError, "no")),
         Harness("static", lambda x: x, [(3,)], [None])),
    ]
"""


@pytest.fixture
def checkout(tmp_path):
    path = tmp_path / "tests" / "shape_poly_test.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(FILE))
    return tmp_path


def test_a_checkout_is_read_as_it_is(checkout):
    found = jax_inventory.harnesses(checkout)
    reasons = [jax_inventory.exclusion(harness) for harness in found]
    assert reasons == [jax_inventory.ERROR, jax_inventory.NO_SIZE, "", ""]
    for harness in found[2:]:
        subject = jax_inventory.subject_of(harness)
        assert len(subject.choices) > 2
        assert examine(subject).kind == PADDED
    assert subject.choices[0] == {"a": 4, "c": 2, "k": 2}
    for sizes in subject.choices:
        x, i = subject.draw(sizes, 0)
        assert x.shape == (sizes["a"], 2 * sizes["c"] + 2) and i.shape == (sizes["k"],)
        assert sizes["k"] <= sizes["a"] and np.all(x * 8 == np.round(x * 8))


def subject(f):
    """A function of one array of a symbolic size."""

    def draw(sizes, seed):
        return (np.arange(sizes["t"], dtype=np.float32),)

    return outcomes.Subject("it", f, ("t",), draw, ({"t": 3}, {"t": 5}), draw)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (lambda bucket, eqn, x: bucket.filled(x, 0.0), outcomes.WRONG),
        (lambda bucket, eqn, x: bucket.exact(x.data), outcomes.DEPENDENT),
        (lambda bucket, eqn, x: x.nothing, outcomes.CRASH),
    ],
)
def test_mistakes_in_a_rule_are_found(monkeypatch, broken, kind):
    monkeypatch.setitem(RULES, "neg", broken)

    def total(x):
        return jnp.sum(-x)

    assert examine(subject(total)).kind == kind


def test_what_is_not_padded_has_a_line_and_is_served():
    def frequencies(x):
        return jnp.fft.fft(x)

    def fixed(x):
        return x + jnp.arange(3.0) if len(x) == 3 else x

    refused, static = (examine(subject(f), serve=True) for f in (frequencies, fixed))
    assert refused.kind == outcomes.REFUSED and ".frequencies:" in refused.place
    assert static.kind == outcomes.STATIC and ".fixed:" in static.place
    assert refused.served and static.served
