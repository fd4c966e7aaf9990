"""The only door to JAX's private interior: it exports features, not versions.

Everything else in pliax is written against JAX's public interface. What stands
here works on jax 0.11.2 and the newest release; when a release moves an internal,
this file is the one that changes.
"""

import functools
import importlib.util
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    config as _config,
    core as _core,
    dispatch as _dispatch,
    dtypes as _dtypes,
    mesh as _mesh,
    pjit as _pjit,
    source_info_util as _source_info_util,
    tree_util as _tree_util,
)
from jax._src.array import ArrayImpl as _ArrayImpl
from jax._src.core import (
    Primitive as Primitive,
    Var as Var,
    dim_value_aval as dim_value_aval,
    is_symbolic_dim as is_symbolic_dim,
)
from jax._src.export.shape_poly import dim_as_value_p as dim_as_value_p

# jax.extend.random by its parts: `import jax.extend` loads Pallas's Mosaic GPU.
from jax._src.extend.random import define_prng_impl as define_prng_impl
from jax._src.interpreters import partial_eval as _partial_eval, pxla as _pxla
from jax._src.lax import (
    convolution as _convolution,
    lax as _lax,
    parallel as _parallel,
    slicing as _slicing,
    utils as _lax_utils,
)
from jax._src.lax.control_flow import loops as _loops
from jax._src.lib import _jax as _lib
from jax._src.nn import functions as _nn_functions
from jax._src.numpy import (
    hijax as _hijax,
    indexing as _indexing,
    lax_numpy as _lax_numpy,
    polynomial as _polynomial,
    setops as _setops,
    ufuncs as _ufuncs,
    window_functions as _window_functions,
)
from jax._src.random import core as _random
from jax._src.random.prng import iota_2x32_shape as iota_2x32_shape
from jax._src.random.threefry2x32 import threefry2x32_p as threefry2x32_p
from jax._src.state.discharge import discharge_state as discharge_state
from jax.interpreters import ad as ad, batching as batching, mlir as mlir


# Pallas has settings that caches of jax.jit are keyed by. Loaded by a first kernel, in
# the midst of a trace, it would have the second call of that program compiled again.
# It takes 0.05 s, so only where a plugin may bring a GPU whose kernels are the default.
if importlib.util.find_spec("jax_plugins") is not None:
    importlib.import_module("jax._src.pallas.core")


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


def search_by_size(kind: type, searched: Callable[..., Any]) -> None:
    """Has jnp.searchsorted bisect an axis of symbolic size by another function.

    JAX's primitive for it checks that the size fits its dtype, so it is passed by.
    """
    scan = _hijax._searchsorted_scan_impl

    def bisect(values: Any, query: Any, side: str, dtype: Any, unrolled: bool) -> Any:
        if isinstance(values.shape[0], kind):
            return searched(values, query, side, dtype)
        return scan(values, query, side=side, dtype=dtype, unrolled=unrolled)

    def passing_by(primitive: Callable[..., Any]) -> Callable[..., Any]:
        def search(values: Any, query: Any, /, **options: Any) -> Any:
            if kind not in map(type, values.shape):
                return primitive(values, query, **options)
            given = {"side": "left", "dimension": 0, "batch_dims": 0, "method": "scan"}
            given |= {"dtype": "int32", **options}
            return _hijax._searchsorted_impl(values, query, **given)

        return search

    _hijax._searchsorted_scan_impl = bisect
    for name in ("searchsorted", "searchsorted_via_expand"):  # jax 0.12 and 0.11
        if hasattr(_hijax, name):
            setattr(_hijax, name, passing_by(getattr(_hijax, name)))


def index_by_size(kind: type, constant: Callable[[Any, Any], Any]) -> None:
    """Has indices that are negative or wrap meet a size as they meet an integer.

    JAX's way for symbolic dimensions casts them, also to a type that is too short.

    Args:
        kind: the class of sizes.
        constant: `(indices, size)` to the size in their type.
    """
    const, is_constant = _lax._const, _core.is_constant_dim

    def of_size(example: Any, value: Any) -> Any:
        return (constant if isinstance(value, kind) else const)(example, value)

    def is_constant_or_size(n: Any) -> bool:
        return isinstance(n, kind) or is_constant(n)

    _indexing.lax = _Changed(_lax, _const=of_size)
    _indexing.core = _Changed(_core, is_constant_dim=is_constant_or_size)


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


def shuffle_by_size(kind: type, shuffled: Callable[..., Any]) -> None:
    """Has jax.random.permutation and choice shuffle by another function."""
    shuffle = _random._shuffle

    def choose(key: Any, x: Any, axis: int) -> Any:
        by = shuffled if isinstance(x.size, kind) else shuffle
        return by(key, x, axis)

    _random._shuffle = choose


def scan_by_size(kind: type, scanned: Callable[..., Any]) -> None:
    """Has associative scans along an axis of symbolic size made by another function."""
    scan = _loops.associative_scan

    @functools.wraps(scan)
    def associative_scan(
        fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
    ) -> Any:
        shapes = [x.shape for x in jax.tree.leaves(elems)]
        rank = len(shapes[0]) if shapes else 0
        if -rank <= axis < rank:
            sizes = [s[axis % rank] for s in shapes if len(s) > axis % rank]
            is_one = len(sizes) == len(shapes) and all(n is sizes[0] for n in sizes)
            if is_one and isinstance(sizes[0], kind):
                return scanned(fn, elems, reverse, axis)
        return scan(fn, elems, reverse, axis)

    for module in (_loops, jax.lax):
        module.__dict__["associative_scan"] = associative_scan


def loop_by_size(kind: type, looped: Callable[..., Any]) -> None:
    """Has lax.fori_loop up to a size be a scan, as it is up to an integer.

    Args:
        kind: the class of sizes.
        looped: `(lower, upper, body, init, unroll)` to the result, in a tuple; None
            leaves it to JAX.
    """
    loop = _loops.fori_loop

    @functools.wraps(loop)
    def fori_loop(
        lower: Any, upper: Any, body_fun: Any, init_val: Any, *, unroll: Any = None
    ) -> Any:
        found, ends = None, (lower, upper)
        are_numbers = all(isinstance(x, int | np.integer | kind) for x in ends)
        is_counted = are_numbers and any(isinstance(x, kind) for x in ends)
        is_right = callable(body_fun) and is_counted and _may_be_ends(*ends)
        if is_right and unroll is not True:
            found = looped(lower, upper, body_fun, init_val, int(unroll or 1))
        if found is None:
            return loop(lower, upper, body_fun, init_val, unroll=unroll)
        return found[0]

    for module in (_loops, jax.lax):
        module.__dict__["fori_loop"] = fori_loop


def _may_be_ends(lower: Any, upper: Any) -> bool:
    """Whether JAX takes numbers of these types for the ends of a loop."""
    a, b = _dtypes.dtype(lower), _dtypes.dtype(upper)
    gives_way = _dtypes.is_weakly_typed(lower) != _dtypes.is_weakly_typed(upper)
    return a == b or (gives_way and a.kind == b.kind == "i")


def arange_by_size(
    kind: type, ranged: Callable[[Any, Any, Any, Any], Any], *others: type
) -> None:
    """Has jnp.arange with floats, or in a short float, up to a size count otherwise.

    The types of sizes that NumPy computed are those of its elements, as of integers.

    Args:
        kind: the class of sizes.
        ranged: `(start, stop, step, dtype)` to the array; None leaves it to JAX.
        others: classes of numbers that are computed of sizes.
    """
    arange = _lax_numpy._arange

    def of_sizes(
        start: Any,
        stop: Any = None,
        step: Any = None,
        dtype: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        given = start, stop, step
        found = None
        numbers = (x for x in given if isinstance(x, (kind, np.integer)))
        # JAX asks no dimension for its type.
        if dtype is None and any(hasattr(type(x), "dtype") for x in numbers):
            dtype = _dtypes.result_type(*(x for x in given if x is not None))
        if out_sharding is None and any(isinstance(x, (kind, *others)) for x in given):
            ends = (0, start) if stop is None else (start, stop)
            found = ranged(*ends, step, dtype)
        return arange(*given, dtype, out_sharding) if found is None else found

    _lax_numpy._arange = of_sizes


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


class _Changed:
    """A module as one other module sees it, with some names changed."""

    def __init__(self, module: Any, **changes: Any):
        self._module = module
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def sort_orders() -> dict[str, Callable[..., Any]]:
    """The orders in which JAX sorts, NaN last: less, and less or equal."""
    return {"lt": _lax._sort_lt_comparator, "le": _lax._sort_le_comparator}


def weakly_typed_as(x: Any, aval: Any) -> Any:
    """An array whose type gives way to others, as a Python number's, where aval's does.

    Random keys have no such types.
    """
    weak_type = getattr(aval, "weak_type", False)
    if getattr(_core.typeof(x), "weak_type", weak_type) == weak_type:
        return x
    return _lax._convert_element_type(x, aval.dtype, weak_type=weak_type)


def as_weak(x: Any, dtype: Any) -> Any:
    """An array in a dtype that gives way to others, as a Python number's does."""
    return _lax._convert_element_type(x, dtype, weak_type=True)


# Under this name `jax.monitoring` tells the seconds of each executable that XLA builds.
compile_event = _dispatch.BACKEND_COMPILE_EVENT


# `aval_of(x).shape` is `x.shape` where `type(x) is Array`, without the Python function
# behind that attribute.
Array, aval_of = _ArrayImpl, vars(_ArrayImpl)["aval"].fget


def is_tracing() -> bool:
    """Whether this thread is inside a transformation."""
    return not _core.trace_state_clean()


_WINDOWS = {
    rule.__code__
    for rule in (
        _slicing._gather_shape_rule,
        _slicing._dynamic_slice_shape_rule,
        _slicing._dynamic_update_slice_shape_rule,
        _slicing._scatter_shape_rule,
    )
}


def asks_whether_windows_fit(frame: types.FrameType) -> bool:
    """Whether a frame compares the size of an array with that of a window of it."""
    return frame.f_code in _WINDOWS


def equiv_by_size(kind: type) -> None:
    """Has jnp.array_equiv broadcast first, whose error it takes for False."""
    equiv = _lax_numpy.array_equiv

    @functools.wraps(equiv)
    def array_equiv(a1: Any, a2: Any) -> Any:
        if kind in map(type, (*jnp.shape(a1), *jnp.shape(a2))):
            a1, a2 = jnp.broadcast_arrays(a1, a2)
        return equiv(a1, a2)

    _lax_numpy.array_equiv = jnp.array_equiv = array_equiv


def indices_by_size(kind: type) -> None:
    """Has jnp.indices and jnp.diag_indices take sizes; JAX insists on integers."""
    indices, diag_indices = _lax_numpy.indices, _lax_numpy.diag_indices

    @functools.wraps(indices)
    def of_sizes(dimensions: Any, dtype: Any = None, sparse: bool = False) -> Any:
        if kind not in map(type, dimensions):
            return indices(dimensions, dtype, sparse)
        along = (jnp.arange(n, dtype=dtype or int) for n in dimensions)
        found = jnp.meshgrid(*along, indexing="ij", sparse=sparse)
        return tuple(found) if sparse else jnp.stack(found)

    @functools.wraps(diag_indices)
    def diagonal(n: Any, ndim: int = 2) -> Any:
        if not isinstance(n, kind):
            return diag_indices(n, ndim)
        return (jnp.arange(n, dtype=int),) * ndim

    _lax_numpy.indices = jnp.indices = of_sizes
    _lax_numpy.diag_indices = jnp.diag_indices = diagonal


def wrap_by_size(kind: type) -> None:
    """Has jnp.pad(mode="wrap") read around the end, where JAX counts whole copies."""
    pad = _lax_numpy._pad_wrap

    def padded(array: Any, widths: Any) -> Any:
        if kind not in map(type, array.shape):
            return pad(array, widths)
        for axis, ends in enumerate(widths):
            before, after = (n if isinstance(n, kind) else int(n) for n in ends)
            if not (type(before) is type(after) is int and before == after == 0):
                count = before + array.shape[axis] + after
                places = jnp.arange(count, dtype="int32") - before
                array = jnp.take(array, places, axis, mode="wrap")
        return array

    _lax_numpy._pad_wrap = padded


def power_by_size(kind: type, powered: Callable[[Any, Any], Any]) -> None:
    """Has powers of integer arrays read all bits of a size: JAX reads 6 of a tracer."""
    array: Any = _core.ShapedArray
    power, operate = _ufuncs.power, array._pow

    @functools.wraps(power)
    def by_size(x1: Any, x2: Any, /) -> Any:
        is_whole = isinstance(x2, kind) and not _is_inexact(x1)
        return powered(x1, x2) if is_whole else power(x1, x2)

    def operated(x1: Any, x2: Any) -> Any:
        return by_size(x1, x2) if isinstance(x2, kind) else operate(x1, x2)

    _ufuncs.power = jnp.power = by_size
    array._pow = staticmethod(operated)
    setattr(_ArrayImpl, "__pow__", operated)  # noqa: B010  (pyright knows its own)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.dtypes.result_type(x), jnp.inexact)


def split_by_size(kind: type, is_born: Callable[[Any], bool]) -> None:
    """Has jnp.split cut slices where only the device knows how long they are."""
    split = _lax_numpy._split

    def cut(op: str, ary: Any, where: Any, axis: int = 0) -> Any:
        n = jnp.shape(ary)[operator.index(axis)]
        is_list = isinstance(where, list | tuple)
        if not isinstance(n, kind) or not is_list or not is_born(n):
            return split(op, ary, where, axis)
        rows = jnp.moveaxis(ary, axis, 0)
        ends = zip([0, *where], [*where, None], strict=True)
        return [jnp.moveaxis(rows[a:b], 0, axis) for a, b in ends]

    _lax_numpy._split = cut


def squeeze_by_size(kind: type, is_one: Callable[[Any], bool]) -> None:
    """Has jnp.squeeze without axes ask each size whether it is 1."""
    squeeze = _lax_numpy._squeeze

    def squeezed(a: Any, axis: Any) -> Any:
        if axis is None and kind in map(type, a.shape):
            axis = tuple(i for i, n in enumerate(a.shape) if is_one(n))
        return squeeze(a, axis)

    _lax_numpy._squeeze = squeezed


def roll_by_size(kind: type, may_be_empty: Callable[[Any], bool]) -> None:
    """Has jnp.roll take a constant as it takes a scalar where there may be nothing.

    Its shorter way divides by the size.
    """
    roll = _lax_numpy._roll_static

    def rolled(a: Any, shift: Any, axis: Any) -> Any:
        sizes = [a.shape[i] for i in axis]
        if any(isinstance(n, kind) and may_be_empty(n) for n in sizes):
            return _lax_numpy._roll_dynamic(a, jnp.asarray(shift), axis)
        return roll(a, shift, axis)

    _lax_numpy._roll_static = rolled


def unique_by_size(
    kind: type,
    require_some: Callable[[Any, str], None],
    is_empty: Callable[[Any], bool],
) -> None:
    """Has jnp.unique state that there is something, where it would do without.

    Of arrays without elements it raises, or gives results of other shapes.
    """
    unique = _setops._unique
    signature = inspect.signature(unique)

    @functools.wraps(unique)
    def found(ar: Any, axis: int, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(ar, axis, *args, **kwargs)
        given.apply_defaults()
        why, n = _why_unique_wants_some(given.arguments), ar.shape[axis]
        if isinstance(n, kind) and is_empty(n):
            nothing = _slicing.slice_in_dim(ar, 0, 0, axis=axis)
            return unique(nothing, axis, *args, **kwargs)
        if why and isinstance(n, kind):
            require_some(n, f"jnp.unique: {why}")
        return unique(ar, axis, *args, **kwargs)

    _setops._unique = found


def _why_unique_wants_some(given: dict[str, Any]) -> str:
    if given["size"] and given["fill_value"] is None:
        return "an array without elements needs a fill_value"
    if given["return_index"] or given["return_counts"]:
        return "of an array without elements the results have other shapes"
    return ""


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


_LIBRARY = ("jax._src.numpy.", "jax._src.scipy.", "jax._src.nn.", "jax._src.image.")
_LIBRARY += ("jax._src.random", "jax.numpy", "jax.scipy", "jax.nn", "jax.experimental")
# They ask in order to take a shorter way, to broadcast, or to refuse an empty array.
_RIGHT_EITHER_WAY = {
    "_fftconvolve_unbatched",
    "_rsf2csf_2d",
    "_take",
    "det",
    "diagonal",
    "slogdet",
    "trapezoid",
    "vectorize",
}


def may_call_equal_sizes_different(frame: types.FrameType) -> bool:
    """Whether JAX's code in a frame is right also where equal sizes are not known so.

    The rules of its primitives are written for symbolic dimensions: they stop where
    sizes have to be equal. Its library over them is not: `jnp.array_equal` says False.
    """
    name = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_qualname.partition(".")[0]
    return not name.startswith(_LIBRARY) or function in _RIGHT_EITHER_WAY


# They shorten the way for arrays without elements: the long one gives the same.
_RIGHT_FOR_NOTHING = {"_unique", "_unique_sorted_mask", "_in1d"}


def may_call_nothing_something(frame: types.FrameType) -> bool:
    """Whether JAX's code in a frame is right for no elements if told there are some."""
    at: types.FrameType | None = frame
    if frame.f_code.co_name == "nonzero":  # jax 0.11 asks there, of unique's mask
        at = frame.f_back
    name = at.f_globals.get("__name__", "") if at else ""
    is_right = at is not None and at.f_code.co_name in _RIGHT_FOR_NOTHING
    if at is not None and at.f_code.co_name == "_in1d":  # it also searches, or sorts
        is_right = at.f_locals.get("method") in ("auto", "compare_all")
    return is_right and name.startswith(_LIBRARY)


def extreme_of_dimensions(kind: str, a: Any, b: Any) -> Any:
    """The "max" or "min" of two symbolic dimensions, left as it stands.

    JAX takes every named size for at least 1 and simplifies accordingly: max(u, 1) is
    u. That is wrong for sizes that may be 0.
    """
    expression = a if is_symbolic_dim(a) else b
    make = type(expression)._from_operation
    return make(kind, a, b, scope=expression.scope)


def primitive_that_stays(name: str, refuse_vmap: Callable[..., Any]) -> Any:
    """A primitive without results, which stays all the same, and without derivative.

    Args:
        name: what it is called.
        refuse_vmap: raises where its operands are batched; gets its parameters.
    """
    made = Primitive(name)
    made.multiple_results = True

    def keep(used: Any, *rest: Any) -> Any:  # 0.12 passes one argument more
        return [True] * len(rest[-1].invars), rest[-1]

    def without_derivative(primals: Any, tangents: Any, **params: Any) -> Any:
        return made.bind(*primals, **params), []

    def batched(values: Any, axes: Any, **params: Any) -> Any:
        refuse_vmap(**params)

    _partial_eval.dce_rules[made] = keep
    ad.primitive_jvps[made] = without_derivative
    batching.primitive_batchers[made] = batched
    return made


def current_trace() -> Any:
    """What records equations now: an object for each function that is being traced."""
    return _core.trace_ctx.trace


def call_context() -> Hashable:
    """Everything ambient that an executable depends on.

    What a trace depends on (x64, promotion, precision, abstract mesh), and the devices.
    """
    devices = _config.default_device.value, _mesh.get_concrete_mesh()
    return _config.trace_context(), devices


def equation_context(eqn: Any) -> Hashable:
    """The settings an equation was traced under and keeps wherever it is evaluated."""
    context = eqn.ctx
    metadata = context.xla_metadata
    return (
        context.compute_type,
        context.threefry_partitionable,
        tuple(sorted(metadata.items())) if metadata else None,
        context.cur_abstract_mesh,
    )


def bind_equation(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluate one equation, under the settings it was traced with but on this mesh.

    A function traced under Explicit axes may be evaluated where they are Auto.
    """
    mesh = _mesh.get_abstract_mesh()
    with eqn.ctx.manager, _mesh.use_abstract_mesh(mesh):
        params = eqn.primitive.get_bind_params(eqn.params)
        result = eqn.primitive.bind(*values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def with_first(
    jitted: Any,
    *first: Any,
    refusal: type[Exception],
    fits: Callable[[tuple, dict], bool] = lambda args, kwargs: True,
) -> Any:
    """A function of `jax.jit`, whose executables it calls, with first arguments given.

    To JAX's dispatcher they are constants of the executable, which takes 0.15 us less
    than one array more. They are placed once, as the executable has them, where
    `jitted` would copy them to its devices in each call.

    After an error in a trace `jax.jit` serves the same arguments without its dispatcher
    for good, 10 times as slowly. This function forgets that they failed.

    Args:
        jitted: the function.
        first: its first arguments.
        refusal: raised in a transformation, of which such a call is never a part, and
            for arguments that do not fit.
        fits: whether arguments that the dispatcher has not seen are for this function.
    """
    fun = functools.partial(jitted.__wrapped__, *first)

    def missed(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or not fits(args, kwargs):
            raise refusal
        try:
            results, fast, again = jitted._cache_miss(*first, *args, **kwargs)
        except BaseException:
            called._clear_cache()
            raise
        if fast is not None:
            constants = [*fast.const_args, *_placed(jax.tree.leaves(first), fast)]
            fast = fast._replace(const_args=constants)
        return results, fast, again

    called = _lib.pjit(
        jitted.__name__,
        fun,
        missed,
        [],
        [],
        (),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
        _pjit._get_cpp_global_cache(False),
    )
    called._fun = fun  # where jax_debug_nans looks for what made a NaN
    return called


def _placed(arrays: Sequence[Any], fast: Any) -> list[Any]:
    """What an executable is given first, on its devices; `fast` calls it."""
    start, places = len(fast.const_args), iter(fast.in_shardings)
    for is_kept in fast.kept_var_bitvec[:start]:
        if is_kept:
            next(places)
    is_kept = fast.kept_var_bitvec[start:]
    return [
        _on_devices(np.asarray(x), next(places)) if kept else x
        for x, kept in zip(arrays, is_kept, strict=False)
    ]


def _on_devices(x: np.ndarray, sharding: Any) -> Any:
    """An array for all devices, of which this process has some."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def dce_jaxpr(jaxpr: Any) -> Any:
    """The same jaxpr without equations whose results nobody reads; same arguments."""
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]


def equation_frames(eqn: Any) -> list[Any]:
    """The frames an equation was traced from, innermost first, without JAX's."""
    return list(_source_info_util.user_frames(eqn.source_info.traceback))


def is_pvary(eqn: Any) -> bool:
    """Whether an equation only types its operands as varying over mesh axes."""
    return eqn.primitive.name == "pvary"


def whole_tracebacks() -> Any:
    """A context in which errors keep the frames of JAX that they came through."""
    return _config.traceback_filtering("off")


def load_elements(ref: Any, index: Any, dtype: Any, layout: Any) -> Any:
    """In a Mosaic GPU kernel: elements of an array in global memory, one by one.

    Args:
        ref: The array, of one dimension.
        index: A tile of indices inside it, int32.
        dtype: The array's.
        layout: How the tile lies in registers.
    """
    import jax.experimental.mosaic.gpu as mosaic
    import jax.experimental.pallas.mosaic_gpu as plgpu
    import numpy as np
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref, vector

    signed = jnp.issubdtype(dtype, jnp.signedinteger) or None
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        signed = False

    inline: Any = plgpu.inline_mgpu

    @inline(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(index.shape, dtype, layout=layout),
    )
    def load(_: Any, ref: Any, index: Any) -> Any:
        element = ir.MemRefType(ref.type).element_type
        registers = np.empty_like(index.registers)
        for place, places in np.ndenumerate(index.registers):
            (count,) = ir.VectorType(places.type).shape
            found = llvm.mlir_undef(ir.VectorType.get((count,), element))
            for i in range(count):
                at = {"dynamic_position": [], "static_position": [i]}
                where = arith.index_cast(
                    ir.IndexType.get(), vector.extract(places, **at)
                )
                found = vector.insert(memref.load(ref, [where]), found, **at)
            registers[place] = found
        return mosaic.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=signed
        )

    return load(ref, index)


def store_rows(ref: Any, rows: Any) -> None:
    """In a Mosaic GPU kernel: writes registers to an array in global memory.

    Args:
        ref: The array, of one dimension, which may lie in strides.
        rows: As many numbers of its dtype.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    store = getattr(plgpu, "store", None)  # since 0.12, which refuses the other form
    if store is None:
        ref[...] = rows
    else:
        store(ref, rows, optimized=False)


def take_number(counter: Any, to: Any, start: int) -> None:
    """In a Mosaic GPU kernel: writes the next number that no thread block has taken.

    All of a warpgroup call it, and can read the number then.

    Args:
        counter: A semaphore in global memory: how many were taken, since the launch.
        to: An int32 in shared memory.
        start: The first number.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref
    from jax.experimental.mosaic.gpu import utils

    inline: Any = plgpu.inline_mgpu

    @inline(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_: Any, counter: Any, to: Any) -> None:
        integer = ir.IntegerType.get_signless(32)

        def constant(x: int) -> Any:
            return arith.constant(integer, ir.IntegerAttr.get(integer, x))

        is_first = utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
        with utils.when(is_first):
            add, order = llvm.AtomicBinOp.add, llvm.AtomicOrdering.monotonic
            taken = llvm.atomicrmw(add, utils.memref_ptr(counter), constant(1), order)
            memref.store(arith.addi(taken, constant(start)), to, [])
        utils.warpgroup_barrier()

    take(counter, to)


def vote_not_finite(flags: Any, group: Any, sums: Any, layout: Any) -> None:
    """In a Mosaic GPU kernel: whether any number of any warpgroup is not finite.

    Every warpgroup of the thread block takes part, and waits for the others; 1 or 0 is
    written to its own flag, which it can read at once.

    Args:
        flags: Integers in shared memory, one for each warpgroup.
        group: The number of this one.
        sums: Its float32 numbers; None if it has none. If only their sum is not finite
            they count as such.
        layout: How they lie in registers.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, memref, vector

    inline: Any = plgpu.inline_mgpu
    scalar = plgpu.Layout.WG_SPLAT
    types = plgpu.RefType(), scalar, *(() if sums is None else (layout,))

    def is_odd(registers: Any) -> Any:
        *rest, total = registers
        for register in rest:
            total = arith.addf(total, register)
        (count,) = ir.VectorType(total.type).shape
        at = [{"dynamic_position": [], "static_position": [i]} for i in range(count)]
        total, *rest = (vector.extract(total, **place) for place in at)
        for x in rest:
            total = arith.addf(total, x)
        nothing = arith.subf(total, total)
        return arith.cmpf(arith.CmpFPredicate.UNE, nothing, nothing)

    @inline(arg_types=types)
    def vote(_: Any, flags: Any, group: Any, *sums: Any) -> None:
        integer = ir.IntegerType.get_signless(32)

        def constant(x: int) -> Any:
            return arith.constant(integer, ir.IntegerAttr.get(integer, x))

        mine = constant(0)
        for x in sums:
            mine = arith.extui(integer, is_odd(x.registers.flat))
        (groups,) = ir.MemRefType(flags.type).shape
        ours = llvm.inline_asm(
            integer,
            [mine, constant(128 * groups)],
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            "bar.red.or.pred q, 15, $2, p; selp.s32 $0, 1, 0, q; }",
            "=r,r,r",
            has_side_effects=True,
        )
        (place,) = group.registers.flat
        memref.store(ours, flags, [arith.index_cast(ir.IndexType.get(), place)])

    vote(flags, group, *(() if sums is None else (sums,)))
