"""Random arrays of symbolic sizes: the bits must be those of the plain shape."""

import jax
import jax.numpy as jnp
from jax import lax, random

from ._program import Program, program, table


_KEY = "; key"

# Samplers f(key, shape) whose elements do not speak to each other. The first are exact;
# the others end in a chain of float operations, which XLA fuses differently for
# different shapes: random.normal differs in the last bit between (13, 3) and (64, 3).
_EXACT_SAMPLERS = "bits uniform rademacher"
_ROUNDED_SAMPLERS = "normal exponential gumbel laplace logistic cauchy"
_SHAPES = ("t", "b, t", "t, 3")


def _samplers(names: str, *, exact: bool = False) -> list[Program]:
    """Each sampler at three symbolic shapes (the last axis need not be symbolic)."""
    return [
        program(
            f"random.{name}[shape {text}]",
            lambda k, x, name=name: getattr(random, name)(k, x.shape),
            _KEY,
            text,
            exact=exact,
        )
        for name in names.split()
        for text in _SHAPES
    ]


# fmt: off
_WITH_PARAMETERS = [
    ("uniform[minval, maxval]", lambda k, x: random.uniform(k, x.shape, minval=-2.0, maxval=x.max()), "t"),
    ("normal[bfloat16]", lambda k, x: random.normal(k, x.shape, jnp.bfloat16), "b, t"),
    ("normal[complex64]", lambda k, x: random.normal(k, x.shape, jnp.complex64), "t"),
    ("normal[transposed shape]", lambda k, x: random.normal(k, x.shape[::-1]), "b, t"),
    ("normal[t + 1]", lambda k, x: random.normal(k, (x.shape[0] + 1,)), "t"),
    ("normal[b, t, 2, 4]", lambda k, x: random.normal(k, (*x.shape, 2, 4)), "b, t"),
    ("truncated_normal[t]", lambda k, x: random.truncated_normal(k, -1.0, 1.5, x.shape), "t"),
    ("beta[t]", lambda k, x, y: random.beta(k, x, y), "t; positive", "t; positive"),
    ("binomial[t]", lambda k, p: random.binomial(k, 9.0, p), "t; probability"),
    ("chisquare[t]", lambda k, x: random.chisquare(k, x * 4), "t; positive"),
    ("double_sided_maxwell[t]", lambda k, x: random.double_sided_maxwell(k, 0.5, 2.0, x.shape), "t"),
    ("f[t]", lambda k, x: random.f(k, x * 4, 5.0 * x), "t; positive"),
    ("gamma[t]", random.gamma, "b, t; positive"),
    ("generalized_normal[t]", lambda k, x: random.generalized_normal(k, 1.5, x.shape), "t"),
    ("geometric[t]", random.geometric, "t; probability"),
    ("loggamma[t]", random.loggamma, "t; positive"),
    ("lognormal[t]", lambda k, x: random.lognormal(k, x), "t; positive"),
    ("maxwell[t]", lambda k, x: random.maxwell(k, x.shape), "t"),
    ("pareto[t]", random.pareto, "t; positive"),
    ("poisson[t]", random.poisson, "t; positive"),
    ("rayleigh[t]", random.rayleigh, "t; positive"),
    ("t[t]", lambda k, x: random.t(k, x * 3), "t; positive"),
    ("triangular[t]", lambda k, x: random.triangular(k, -x, x / 2, x), "t; positive"),
    ("wald[t]", random.wald, "t; positive"),
    ("weibull_min[t]", lambda k, x: random.weibull_min(k, x, 2.0, x.shape), "t; positive"),
    ("ball[t points]", lambda k, x: random.ball(k, 3, shape=x.shape), "t"),
    ("ball[t dimensions]", lambda k, x: random.ball(k, x.shape[0]), "t"),
    ("dirichlet[t parts]", random.dirichlet, "t; positive"),
    ("dirichlet[b rows]", random.dirichlet, "b, 3; positive"),
    ("categorical[over t]", random.categorical, "b, t"),
    ("categorical[axis=0]", lambda k, x: random.categorical(k, x, axis=0), "t, 3"),
    ("categorical[4 classes]", random.categorical, "b, 4"),
    ("categorical[s draws]", lambda k, x, y: random.categorical(k, x, shape=y.shape), "5", "s"),
    ("categorical[without replacement]", lambda k, x: random.categorical(k, x, shape=(2,), replace=False), "t", "t >= 2"),
    ("multinomial[t outcomes]", lambda k, p: random.multinomial(k, 9.0, p / p.sum()), "t; positive"),
    ("multivariate_normal[t draws]", lambda k, m, c, x: random.multivariate_normal(k, m, c, x.shape), "3", "3, 3; spd", "t"),
    ("multivariate_normal[t dimensions]", random.multivariate_normal, "t", "t, t; spd"),
    ("orthogonal[t, t]", lambda k, x: random.orthogonal(k, x.shape[0]), "t"),
    ("orthogonal[b of 3, 3]", lambda k, x: random.orthogonal(k, 3, x.shape), "b"),
]
_EXACT = [
    ("bits[uint8]", lambda k, x: random.bits(k, x.shape, jnp.uint8), "b, t"),
    ("bits[uint16, odd]", lambda k, x: random.bits(k, x.shape, jnp.uint16), "t"),
    ("randint[t]", lambda k, x: random.randint(k, x.shape, 0, 17), "t"),
    ("randint[up to t]", lambda k, x: random.randint(k, (5,), 0, x.shape[0]), "t"),
    ("bernoulli[p]", random.bernoulli, "b, t; probability"),
    ("bernoulli[0.3]", lambda k, x: random.bernoulli(k, 0.3, x.shape), "t"),
    ("split & random.bits[vmap]", lambda k, x: jax.vmap(lambda i: random.bits(i, (3,)))(random.split(k, x.shape[0])), "t"),
    ("permutation[of an array]", lambda k, x: random.permutation(k, x), "t, 3"),
    ("permutation[of t]", lambda k, x: random.permutation(k, x.shape[0]), "t"),
    ("permutation[axis=1]", lambda k, x: random.permutation(k, x, axis=1), "b, t"),
    ("permutation[independent]", lambda k, x: random.permutation(k, x, axis=1, independent=True), "b, t"),
    ("choice[with replacement]", lambda k, x: random.choice(k, x, (5,)), "t"),
    ("choice[without replacement]", lambda k, x: random.choice(k, x, (2,), replace=False), "t", "t >= 2"),
    ("choice[all of them]", lambda k, x: random.choice(k, x, x.shape, replace=False), "t"),
    ("split[t keys]", lambda k, x: random.key_data(random.split(k, x.shape[0])), "t"),
    ("split[b, t keys]", lambda k, x: random.key_data(random.split(k, x.shape)), "b, t"),
    ("fold_in[vmap]", lambda k, i: jax.vmap(lambda j: random.uniform(random.fold_in(k, j)))(i), "t; integer"),
    ("fold_in[symbolic size]", lambda k, x: random.bits(random.fold_in(k, x.shape[0]), (4,)), "t"),
    ("clone & random.key_data[t]", lambda k, x: random.key_data(random.clone(random.split(k, x.shape[0]))), "t"),
    ("key[vmap of seeds]", lambda k, s: random.key_data(jax.vmap(random.key)(s)), "t; integer"),
    ("PRNGKey[vmap of seeds]", lambda k, s: jax.vmap(random.PRNGKey)(s), "t; integer"),
    ("wrap_key_data[t]", lambda k, d: random.bits(random.wrap_key_data(d)[0], (3,)), "t, 2; uint32; index:99"),
    ("key_impl[t]", lambda k, x: random.uniform(random.key(0, impl=random.key_impl(k)), x.shape), "t"),
]
_USES = [
    ("random.split & random.normal[vmap]", lambda k, x: jax.vmap(lambda i: random.normal(i, (3,)))(random.split(k, x.shape[0])), "t"),
    ("dropout", lambda k, x: jnp.where(random.bernoulli(k, 0.8, x.shape), x / 0.8, 0.0), "b, t, 3"),
    ("random.choice[p]", lambda k, x, p: random.choice(k, x, (5,), p=p / p.sum()), "t", "t; positive"),
    ("random.choice[p, without replacement]", lambda k, x, p: random.choice(k, x, (2,), replace=False, p=p / p.sum()), "t", "t; positive", "t >= 2"),
    ("noise and its mean", lambda k, x: (x + random.normal(k, x.shape)).mean(), "b, t"),
    ("Monte Carlo", lambda k, x: (random.uniform(k, (x.shape[0], 2)) ** 2).sum(1).mean(), "t"),
    ("gumbel maximum", lambda k, x: jnp.argmax(x + random.gumbel(k, x.shape), axis=-1), "b, t"),
    ("random walk", lambda k, x: jnp.cumsum(random.normal(k, x.shape), axis=0), "t, 2"),
    ("bootstrap", lambda k, x: x[random.randint(k, (5, x.shape[0]), 0, x.shape[0])].mean(1), "t"),
    ("scan of keys", lambda k, x: lax.scan(lambda c, v: (random.split(c)[0], v + random.normal(c)), k, x)[1], "t"),
    ("Metropolis", lambda k, x: _metropolis(k, x), "t"),
    ("mixup", lambda k, x: 0.7 * x + 0.3 * x[random.permutation(k, x.shape[0])], "b, 3"),
    ("sampled tokens", lambda k, x: random.categorical(k, jnp.where(x < lax.top_k(x, 2)[0][:, -1:], -jnp.inf, x)), "b, t", "t >= 2"),
]
_LAX = [
    ("rng_bit_generator[t]", lambda k, x: lax.rng_bit_generator(k, x.shape)[1], "4; uint32; index:99", "t"),
    ("rng_bit_generator[b, t]", lambda k, x: lax.rng_bit_generator(k, x.shape)[1], "4; uint32; index:99", "b, t"),
]
# fmt: on


def _metropolis(key: jax.Array, x: jax.Array) -> jax.Array:
    """One Metropolis step for each of t chains on a Gaussian."""
    proposal_key, accept_key = random.split(key)
    proposal = x + 0.5 * random.normal(proposal_key, x.shape)
    ratio = jnp.exp(0.5 * (x**2 - proposal**2))
    return jnp.where(random.uniform(accept_key, x.shape) < ratio, proposal, x)


def _keyed(prefix: str, rows, **options) -> list[Program]:
    """The rows' programs with the key in front."""
    return table(prefix, [(n, f, _KEY, *rest) for n, f, *rest in rows], **options)


PROGRAMS = (
    *_samplers(_EXACT_SAMPLERS, exact=True),
    *_samplers(_ROUNDED_SAMPLERS),
    *_keyed("random.", _WITH_PARAMETERS),
    *_keyed("random.", _EXACT, exact=True),
    *_keyed("random: ", _USES),
    *table("lax.", _LAX, exact=True),
)
