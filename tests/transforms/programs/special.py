"""jax.scipy.special, jax.scipy.stats, jax.numpy.fft, jax.image and smaller corners."""

import jax
import jax.image
import jax.numpy as jnp
import jax.scipy.cluster.vq
import jax.scipy.fft
import jax.scipy.integrate
import jax.scipy.interpolate
import jax.scipy.ndimage
import jax.scipy.sparse.linalg
from jax.scipy import special as sp, stats

from ._program import Program, named, program, table


_SPECIAL = {
    (
        "t",
    ): "dawsn erf erfc erfcx expit fresnel gammasgn i0 i0e i1 i1e log_ndtr ndtr sici",
    ("t; positive",): "digamma entr exp1 expi factorial gamma gammaln loggamma spence",
    ("b, t; probability",): "erfinv erfcinv logit ndtri",
    ("t; positive", "t; positive"): "beta betaln gammainc gammaincc kl_div rel_entr "
    "xlogy xlog1py poch boxcox boxcox1p owens_t",
    ("t; complex64",): "wofz",
}
# fmt: off
_SPECIAL_ROWS = [
    ("betainc[t]", sp.betainc, "t; positive", "t; positive", "t; probability"),
    ("bernoulli[fixed n, scaled by t]", lambda x: x * sp.bernoulli(4)[2], "t"),
    ("bessel_jn[v=3]", lambda x: sp.bessel_jn(x + 4.0, v=3), "t; positive"),
    ("comb[t]", sp.comb, "t; positive", "t; probability"),
    ("expn[n=2]", lambda x: sp.expn(2, x), "t; positive"),
    ("hyp2f1[t]", sp.hyp2f1, "t; positive", "t; positive", "t; positive", "t; probability"),
    ("multigammaln[d=2]", lambda x: sp.multigammaln(x + 3.0, 2), "t; positive"),
    ("polygamma[n=1]", lambda x: sp.polygamma(1, x), "t; positive"),
    ("zeta[t]", lambda x: sp.zeta(x + 1.5, 1.0), "t; positive"),
    ("logsumexp[axis=0]", lambda x: sp.logsumexp(x, axis=0), "t, 3"),
    ("softmax[axis=1]", lambda x: sp.softmax(x, axis=1), "b, t"),
    ("log_softmax[axis=0]", lambda x: sp.log_softmax(x, axis=0), "t, 3"),
]
# A distribution's functions, the arguments after x, and how x is drawn.
_STATS = [
    ("bernoulli", "pmf logpmf cdf", "t; float32; index:2", (0.3,)),
    ("beta", "pdf logpdf cdf sf", "t; probability", (2.0, 3.0)),
    ("betabinom", "pmf logpmf", "t; float32; index:5", (5.0, 2.0, 3.0)),
    ("binom", "pmf logpmf", "t; float32; index:5", (5.0, 0.3)),
    ("cauchy", "pdf logpdf cdf logcdf sf", "t", ()),
    ("chi2", "pdf logpdf cdf sf", "t; positive", (3.0,)),
    ("expon", "pdf logpdf cdf sf", "t; positive", ()),
    ("gamma", "pdf logpdf cdf sf", "t; positive", (2.0,)),
    ("gennorm", "pdf logpdf cdf", "t", (1.5,)),
    ("geom", "pmf logpmf", "t; float32; index:5", (0.3,)),
    ("gumbel_l", "pdf logpdf cdf ppf", "t; probability", ()),
    ("gumbel_r", "pdf logpdf cdf ppf", "t; probability", ()),
    ("laplace", "pdf logpdf cdf", "t", ()),
    ("logistic", "pdf logpdf cdf sf ppf", "t; probability", ()),
    ("nbinom", "pmf logpmf", "t; float32; index:5", (4.0, 0.3)),
    ("norm", "pdf logpdf cdf logcdf sf ppf isf", "b, t; probability", (0.1, 2.0)),
    ("pareto", "pdf logpdf cdf", "t; positive", (2.0, 0.0, 0.4)),
    ("poisson", "pmf logpmf cdf", "t; float32; index:5", (1.5,)),
    ("t", "pdf logpdf", "t", (3.0,)),
    ("truncnorm", "pdf logpdf cdf", "t; probability", (-2.0, 2.0)),
    ("uniform", "pdf logpdf cdf", "t", (-1.0, 2.0)),
    ("vonmises", "pdf logpdf", "t", (1.5,)),
    ("wrapcauchy", "pdf logpdf", "t", (0.5,)),
]
_STATS_ROWS = [
    ("dirichlet[t parts]", lambda x, a: stats.dirichlet.logpdf(x / x.sum(), a), "t; positive", "t; positive"),
    ("multinomial[t outcomes]", lambda n, p: stats.multinomial.logpmf(n, n.sum(), p / p.sum()), "t; index:4", "t; positive"),
    ("multivariate_normal[b points]", jax.vmap(stats.multivariate_normal.logpdf, (0, None, None)), "b, 3", "3", "3, 3; spd"),
    ("multivariate_normal[t dimensions]", stats.multivariate_normal.logpdf, "t", "t", "t, t; spd"),
    ("gaussian_kde[t points]", lambda x, y: stats.gaussian_kde(x)(y), "t", "s", "t >= 3"),
    ("sem[axis=0]", stats.sem, "t, 3", "t >= 2"),
    ("norm[log-likelihood]", lambda x, m: stats.norm.logpdf(x, m, 2.0).sum(), "t", ""),
]
_C = "b, t; complex64"
_FFT = [
    ("fft[t]", jnp.fft.fft, "t; complex64"),
    ("fft[batch only]", jnp.fft.fft, "b, 8; complex64"),
    ("fft[n=8]", lambda x: jnp.fft.fft(x, n=8), _C),
    ("fft2[b, t]", jnp.fft.fft2, _C),
    ("fftn[b, t]", jnp.fft.fftn, _C),
    ("fftfreq[t]", lambda x: jnp.fft.fftfreq(x.shape[0]), "t"),
    ("fftshift[t]", jnp.fft.fftshift, "b, t"),
    ("hfft[t]", jnp.fft.hfft, "t; complex64", "t >= 2"),
    ("ifft[t]", jnp.fft.ifft, _C),
    ("ifft & jnp.fft.fft[round trip]", lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real, "b, t"),
    ("ifft2[b, t]", jnp.fft.ifft2, _C),
    ("ifftn[b, t]", jnp.fft.ifftn, _C),
    ("ifftshift[t]", lambda x: jnp.fft.ifftshift(x, axes=0), "t, 3"),
    ("ihfft[t]", jnp.fft.ihfft, "t"),
    ("irfft[t]", jnp.fft.irfft, "t; complex64", "t >= 2"),
    ("irfft2[b, t]", jnp.fft.irfft2, _C, "t >= 2"),
    ("irfftn[b, t]", jnp.fft.irfftn, _C, "t >= 2"),
    ("rfft[t]", jnp.fft.rfft, "b, t"),
    ("rfft[axis=0, batch]", lambda x: jnp.fft.rfft(x, axis=0), "8, t"),
    ("rfft2[b, t]", jnp.fft.rfft2, "b, t"),
    ("rfftn[b, t]", jnp.fft.rfftn, "b, t"),
    ("rfftfreq[t]", lambda x: jnp.fft.rfftfreq(x.shape[0]), "t"),
]
_IMAGE = [
    ("resize[to 4 x 4]", lambda x: jax.image.resize(x, (4, 4), "linear"), "s, t"),
    ("resize[to twice the size]", lambda x: jax.image.resize(x, (2 * x.shape[0],), "linear"), "t"),
    ("resize[nearest, twice]", lambda x: jax.image.resize(x, (x.shape[0], 2 * x.shape[1]), "nearest"), "b, t"),
    ("resize[cubic, half]", lambda x: jax.image.resize(x, (x.shape[0],), "cubic"), "2*t"),
    ("resize[batch of 4 x 4]", lambda x: jax.image.resize(x, (x.shape[0], 8, 8), "bilinear"), "b, 4, 4"),
    ("resize[to another's size]", lambda x, y: jax.image.resize(x, y.shape, "linear"), "t", "s"),
    ("scale_and_translate[t]", lambda x: jax.image.scale_and_translate(x, (5,), (0,), jnp.array([1.5]), jnp.array([0.2]), "linear"), "t"),
]
_CORNERS = [
    ("scipy.fft.dct[t]", jax.scipy.fft.dct, "b, t"),
    ("scipy.fft.idct[t]", jax.scipy.fft.idct, "t"),
    ("scipy.fft.dctn[s, t]", jax.scipy.fft.dctn, "s, t"),
    ("scipy.integrate.trapezoid[t]", jax.scipy.integrate.trapezoid, "t", "t; sorted"),
    ("scipy.ndimage.map_coordinates[t]", lambda x, i: jax.scipy.ndimage.map_coordinates(x, [i * x.shape[0]], 1), "t", "s; probability"),
    ("scipy.ndimage.map_coordinates[s, t]", lambda x, i, j: jax.scipy.ndimage.map_coordinates(x, [i, j], 1, mode="nearest"), "s, t", "b; positive", "b; positive"),
    ("scipy.cluster.vq.vq[t]", lambda x, c: jax.scipy.cluster.vq.vq(x, c)[0], "t, 3", "s, 3"),
    ("scipy.interpolate[grid of t]", lambda x, v, i: jax.scipy.interpolate.RegularGridInterpolator((x,), v, bounds_error=False, fill_value=0.0)(i), "t; sorted", "t", "s, 1"),
    ("scipy.sparse.linalg.cg[t]", lambda a, y: jax.scipy.sparse.linalg.cg(a, y)[0], "t, t; spd", "t"),
    ("scipy.sparse.linalg.gmres[t]", lambda a, y: jax.scipy.sparse.linalg.gmres(a, y, restart=4, solve_method="batched")[0], "t, t; spd", "t", "t >= 4"),
    ("scipy.sparse.linalg.bicgstab[t]", lambda a, y: jax.scipy.sparse.linalg.bicgstab(a, y)[0], "t, t; spd", "t"),
]
_LAX = [
    ("fft[t]", lambda x: jax.lax.fft(x, jax.lax.FftType.FFT, x.shape[-1:]), _C),
    ("fft[rfft of 8]", lambda x: jax.lax.fft(x, "rfft", (8,)), "b, 8"),
]
# fmt: on


def _density(name: str, method: str, parameters: tuple[float, ...]):
    return lambda x: getattr(getattr(stats, name), method)(x, *parameters)


def _distributions() -> list[Program]:
    return [
        program(
            f"scipy.stats.{name}[{method}]",
            _density(name, method, rest),
            spec,
        )
        for name, methods, spec, rest in _STATS
        for method in methods.split()
        if hasattr(getattr(stats, name), method)
    ]


_GROUPS = [named("special", sp, names, *key) for key, names in _SPECIAL.items()]

PROGRAMS: tuple[Program, ...] = (
    *[p for group in _GROUPS for p in group],
    *table("special.", _SPECIAL_ROWS),
    *_distributions(),
    *table("scipy.stats.", _STATS_ROWS),
    *table("jnp.fft.", _FFT, exact=("fftshift", "ifftshift")),
    *table("image.", _IMAGE),
    *table("", _CORNERS),
    *table("lax.", _LAX),
)
