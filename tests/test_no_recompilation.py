"""A law over every public transform: the second call of a kind compiles nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations, normal

import pliax as px


def attention(seed):
    q, k, v = normal(seed, (3, 1, 40, 2, 8))
    scales, ids = normal(seed, (2,)), jnp.arange(40) // (seed + 3)
    mask = px.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 40, 40)
    return px.flex_attention(
        q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: s * scales[h]
    )


def draws(seed):
    gen = px.Generator(seed)
    for name, arguments in {
        "normal": ((8,),), "uniform": ((8,),), "bernoulli": (0.3, (8,)),
        "randint": ((8,), 0, 5), "permutation": (8,), "bits": ((8,),),
        "key": (), "split": (2,), "fold_in": (7,),
    }.items():  # fmt: skip
        gen, _ = getattr(gen, name)(*arguments)
    return gen.offset


compiled = px.compile(lambda tree: jax.tree.map(jnp.sin, tree), dims={"tree": "b, ..."})
optimizer = px.optim.muon(0.1)


@jax.jit
def muon_step(params, state, gradient):
    updates, state = optimizer.update(gradient, state, params)
    return jax.tree.map(jnp.add, params, updates), state


def muon(seed):
    params = {"kernel": normal(seed, (8, 4))}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = muon_step(params, state, params)
    return params


PUBLIC = {
    "compile": lambda seed: compiled({"x": normal(seed, (3, 2)), "n": np.ones(3)}),
    "flex_attention": attention,
    "Generator": draws,
    "muon": muon,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_second_call_compiles_nothing(name, standard_promotion):
    with compilations() as first:
        jax.block_until_ready(PUBLIC[name](1))
    with compilations() as second:
        jax.block_until_ready(PUBLIC[name](2))
    assert first
    assert not second
