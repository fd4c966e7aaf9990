"""Facts about JAX's primitives, for whoever walks a program."""

from typing import Any


_UNARY = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz
conj convert_element_type copy copy_p cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic neg not
one_minus_square population_count real reduce_precision round rsqrt sign sin sinh sqrt
square stop_gradient tan tanh"""
_NARY = """add add_any and atan2 clamp complex div eq eq_to ge gt igamma
igamma_grad_a igammac le le_to lt lt_to max min mul mulhi ne nextafter or polygamma
polynomial pow
random_gamma_grad regularized_incomplete_beta rem select_n shift_left
shift_right_arithmetic shift_right_logical sub xor zeta"""

ELEMENTWISE = frozenset((*_UNARY.split(), *_NARY.split()))

_CALLS = {"custom_jvp_call": "call_jaxpr", "jit": "jaxpr"}


def is_elementwise(jaxpr: Any) -> bool:
    """Whether a program computes each element of its results of those at its place."""
    computed = [v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)]
    variables = (*jaxpr.invars, *jaxpr.outvars, *computed)
    shapes = {tuple(map(str, v.aval.shape)) for v in variables} - {()}
    return len(shapes) <= 1 and all(map(_is_elementwise, jaxpr.eqns))


def _is_elementwise(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name not in _CALLS:
        return name in ELEMENTWISE
    inner = eqn.params[_CALLS[name]]
    return is_elementwise(getattr(inner, "jaxpr", inner))
