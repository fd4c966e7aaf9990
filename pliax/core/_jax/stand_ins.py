"""Objects that stand for integers, booleans and floats where JAX asks for those."""

import operator
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src import core as _core, dtypes as _dtypes
from jax._src.core import dim_value_aval, is_symbolic_dim
from jax._src.lax import (
    convolution as _convolution,
    lax as _lax,
    parallel as _parallel,
    slicing as _slicing,
    utils as _lax_utils,
)
from jax._src.lax.control_flow import loops as _loops
from jax._src.nn import functions as _nn_functions
from jax._src.numpy import (
    hijax as _hijax,
    indexing as _indexing,
    lax_numpy as _lax_numpy,
    polynomial as _polynomial,
    setops as _setops,
    window_functions as _window_functions,
)
from jax._src.random import core as _random


def accept_as_integer(kind: type) -> None:
    """Lets instances of a class stand where JAX takes a Python integer.

    They are symbolic dimensions to JAX if they have `dimension_as_value`. In x[…] JAX
    takes those in slices only: where it sorts indices, they become scalars first.
    """
    _core.pytype_aval_mappings[kind] = lambda _: dim_value_aval()
    _dtypes.register_weak_scalar_type(kind)
    _dtypes.python_scalar_types.add(kind)
    integers = _dtypes.python_scalar_types_to_dtypes
    integers[kind] = integers[int]
    _dtypes.register_canonicalize_value_handler(kind, None)
    sort = _indexing.eliminate_deprecated_list_indexing

    def sort_with_scalars(index: Any) -> Any:
        found = sort(index)
        if not any(isinstance(x, kind) for x in found):
            return found
        return tuple(x.__jax_array__() if isinstance(x, kind) else x for x in found)

    _indexing.eliminate_deprecated_list_indexing = sort_with_scalars
    _accept_in_convolutions(kind)


def accept_as_numpy_integer(kind: type) -> None:
    """Lets instances of a class of sizes stand where JAX takes an integer of NumPy's.

    They have `dtype`, which stays beside other types. In shapes they are what `item`
    gives, as those are integers of Python's there.
    """

    def aval(x: Any) -> Any:
        return _core.ShapedArray((), _dtypes.canonicalize_dtype(x.dtype))

    _core.pytype_aval_mappings[kind] = aval
    _dtypes.register_canonicalize_value_handler(kind, None)
    canonicalize = _core._canonicalize_dimension

    def dimension(x: Any) -> Any:
        return x.item() if type(x) is kind else canonicalize(x)

    _core._canonicalize_dimension = dimension


def accept_as_boolean(kind: type) -> None:
    """Lets instances of a class stand where JAX takes a boolean scalar.

    They become one by `dimension_as_value`, as symbolic dimensions become integers.
    """
    aval = _core.ShapedArray((), _dtypes.dtype(bool))
    _core.pytype_aval_mappings[kind] = lambda _: aval
    _dtypes.register_canonicalize_value_handler(kind, None)


def accept_as_float(kind: type) -> None:
    """Lets instances of a class stand where JAX takes a Python float.

    They become a scalar by `dimension_as_value` and are no dimensions all the same.
    """

    def aval(x: Any) -> Any:
        dtype = _dtypes.canonicalize_dtype(float)
        return _core.ShapedArray((), dtype, weak_type=x.is_weak)

    _core.pytype_aval_mappings[kind] = aval
    _dtypes.register_canonicalize_value_handler(kind, None)
    is_symbolic = _core.is_symbolic_dim
    _core.is_symbolic_dim = lambda v: not isinstance(v, kind) and is_symbolic(v)


def look_into_arrays(look: Callable[[Any], None]) -> None:
    """Has a function look at NumPy's arrays of objects before JAX refuses them."""
    aval = _core.pytype_aval_mappings[np.ndarray]

    def looking(x: Any) -> Any:
        if x.dtype == object:
            look(x)
        return aval(x)

    _core.pytype_aval_mappings[np.ndarray] = looking


def count_in_int32(kind: type) -> None:
    """Has indices along axes of symbolic size be of int32, as along those of any size.

    JAX takes the widest integers for symbolic dimensions, which say something else of
    indices beyond int32: those it casts along a short axis.
    """
    of_dim, of_shape = _lax_utils.int_dtype_for_dim, _lax_utils.int_dtype_for_shape

    def dtype_for_dim(d: Any, *, signed: bool) -> Any:
        return of_dim(1 if isinstance(d, kind) else d, signed=signed)

    def dtype_for_shape(shape: Any, *, signed: bool) -> Any:
        return of_shape([1 if isinstance(d, kind) else d for d in shape], signed=signed)

    _lax_utils.int_dtype_for_dim = dtype_for_dim
    _lax_utils.int_dtype_for_shape = dtype_for_shape


def concrete_by_size(kind: type) -> None:
    """Lets a size be the length of a scan or window, a permutation's range, a set's."""
    infer = _loops._infer_scan_length

    def length(flat: Any, avals: Any, given: Any) -> Any:
        if not isinstance(given, kind):
            return infer(flat, avals, given)
        found = infer(flat, avals, None) if flat else given
        if found != given:
            raise ValueError(f"scan got `length` {given} and arrays of length {found}.")
        return given

    def concrete(force: Any, value: Any, context: str = "") -> Any:
        if isinstance(value, kind):
            return value
        return _core.concrete_or_error(force, value, context)

    _loops._infer_scan_length = length
    for module in (_random, _setops, _window_functions):
        module.__dict__["core"] = _Changed(_core, concrete_or_error=concrete)


def axis_size_by_size(kind: type) -> None:
    """Has `lax.axis_size`, `pmean` and their like say how long a mapped axis is.

    JAX makes an integer of it.
    """

    def const(example: Any, value: Any) -> Any:
        return value if isinstance(value, kind) else _lax._const(example, value)

    _parallel.__dict__["lax"] = _Changed(_lax, _const=const)


def iterate_by_size(kind: type, length: Callable[[Any], int]) -> None:
    """Has `for row in x` ask a size for its value, as len does."""
    iterate: Any = _core.ShapedArray._iter

    def iterated(tracer: Any) -> Any:
        if tracer.ndim == 0 or not isinstance(tracer.shape[0], kind):
            return iterate(tracer)
        count = range(length(tracer.shape[0]))
        return (_slicing.index_in_dim(tracer, i, keepdims=False) for i in count)

    _core.ShapedArray._iter = staticmethod(iterated)


def compare_types_by_size(kind: type, is_asked_by_jax: Callable[[], bool]) -> None:
    """Has `==` of two types of arrays compare their sizes, where a user asks.

    JAX keeps one object of each type and compares identities, which it does itself as
    before.
    """
    array = _core.ShapedArray

    def equal(self: Any, other: Any) -> Any:
        if self is other or type(other) is not array:
            return NotImplemented  # which leaves it to the identities
        if kind not in map(type, (*self.shape, *other.shape)):
            return NotImplemented
        if is_asked_by_jax() or len(self.shape) != len(other.shape):
            return NotImplemented
        is_alike = self.update(shape=other.shape) is other
        return is_alike and self.shape == other.shape

    array.__eq__, array.__hash__ = equal, object.__hash__


def extreme_of_dimensions(kind: str, a: Any, b: Any) -> Any:
    """The "max" or "min" of two symbolic dimensions, left as it stands.

    JAX takes every named size for at least 1 and simplifies accordingly: max(u, 1) is
    u. That is wrong for sizes that may be 0.
    """
    expression = a if is_symbolic_dim(a) else b
    make = type(expression)._from_operation
    return make(kind, a, b, scope=expression.scope)


def _accept_in_convolutions(kind: type) -> None:
    """Lets padding of convolutions be symbolic, and JAX's NumPy take what len() is.

    JAX's shape rules are written for it, and its gradients make such padding; only its
    entry insists on `operator.index`, jnp.convolve and the functions of sets on the
    integer that len() gives, and the windows of jax.nn's attention on a range.
    """

    def index(x: Any) -> Any:
        return x if isinstance(x, kind) else operator.index(x)

    def length(x: Any) -> Any:
        first = getattr(x, "shape", (None,))[:1]
        return first[0] if first and isinstance(first[0], kind) else len(x)

    _convolution.operator = types.SimpleNamespace(**{**vars(operator), "index": index})

    def counted(*ends: Any) -> Any:
        return jnp.arange(*ends) if kind in map(type, ends) else range(*ends)

    for module in (_hijax, _lax_numpy, _polynomial, _setops):
        module.__dict__["len"] = length
    _nn_functions.__dict__["range"] = counted


class _Changed:
    """A module as one other module sees it, with some names changed."""

    def __init__(self, module: Any, **changes: Any):
        self._module = module
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
