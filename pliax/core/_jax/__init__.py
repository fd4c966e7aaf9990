"""The only door to JAX's private interior: it exports features, not versions.

Everything else in pliax is written against JAX's public interface. What stands
here works on jax 0.11.2 and the newest release; when a release moves an internal,
a file of this folder is the one that changes.
"""

import importlib.util

from jax._src.core import (
    Primitive as Primitive,
    Var as Var,
    dim_value_aval as dim_value_aval,
    is_symbolic_dim as is_symbolic_dim,
)
from jax._src.export.shape_poly import dim_as_value_p as dim_as_value_p

# jax.extend.random by its parts: `import jax.extend` loads Pallas's Mosaic GPU.
from jax._src.extend.random import define_prng_impl as define_prng_impl
from jax._src.random.prng import iota_2x32_shape as iota_2x32_shape
from jax._src.random.threefry2x32 import threefry2x32_p as threefry2x32_p
from jax._src.state.discharge import discharge_state as discharge_state
from jax.interpreters import ad as ad, batching as batching, mlir as mlir

from .array_functions import (
    arange_by_size as arange_by_size,
    equiv_by_size as equiv_by_size,
    index_by_size as index_by_size,
    indices_by_size as indices_by_size,
    power_by_size as power_by_size,
    roll_by_size as roll_by_size,
    shuffle_by_size as shuffle_by_size,
    split_by_size as split_by_size,
    squeeze_by_size as squeeze_by_size,
    unique_by_size as unique_by_size,
    wrap_by_size as wrap_by_size,
)
from .dispatch import (
    Array as Array,
    aval_of as aval_of,
    compile_event as compile_event,
    with_first as with_first,
)
from .frames import (
    asks_whether_windows_fit as asks_whether_windows_fit,
    may_call_equal_sizes_different as may_call_equal_sizes_different,
    may_call_nothing_something as may_call_nothing_something,
)
from .loops import (
    loop_by_size as loop_by_size,
    scan_by_size as scan_by_size,
    search_by_size as search_by_size,
)
from .mosaic_gpu import (
    add_diagonals as add_diagonals,
    any_exceeds as any_exceeds,
    await_warps as await_warps,
    load_elements as load_elements,
    settle as settle,
    store_registers as store_registers,
    take_number as take_number,
    vote_not_finite as vote_not_finite,
)
from .stand_ins import (
    accept_as_boolean as accept_as_boolean,
    accept_as_float as accept_as_float,
    accept_as_integer as accept_as_integer,
    accept_as_numpy_integer as accept_as_numpy_integer,
    axis_size_by_size as axis_size_by_size,
    compare_types_by_size as compare_types_by_size,
    concrete_by_size as concrete_by_size,
    count_in_int32 as count_in_int32,
    extreme_of_dimensions as extreme_of_dimensions,
    iterate_by_size as iterate_by_size,
    look_into_arrays as look_into_arrays,
)
from .tracing import (
    as_weak as as_weak,
    bind_equation as bind_equation,
    call_context as call_context,
    current_trace as current_trace,
    dce_jaxpr as dce_jaxpr,
    equation_context as equation_context,
    equation_frames as equation_frames,
    is_pvary as is_pvary,
    is_tracing as is_tracing,
    primitive_that_stays as primitive_that_stays,
    sort_orders as sort_orders,
    weakly_typed_as as weakly_typed_as,
    whole_tracebacks as whole_tracebacks,
)


# Pallas has settings that caches of jax.jit are keyed by. Loaded by a first kernel, in
# the midst of a trace, it would have the second call of that program compiled again.
# It takes 0.05 s, so only where a plugin may bring a GPU whose kernels are the default.
if importlib.util.find_spec("jax_plugins") is not None:
    importlib.import_module("jax._src.pallas.core")
