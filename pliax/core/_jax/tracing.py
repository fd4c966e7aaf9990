"""What is being traced, and the equations that were."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax._src import (
    config as _config,
    core as _core,
    mesh as _mesh,
    source_info_util as _source_info_util,
)
from jax._src.core import Primitive
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax.interpreters import ad, batching


def is_tracing() -> bool:
    """Whether this thread is inside a transformation."""
    return not _core.trace_state_clean()


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


def equation_frames(eqn: Any) -> list[Any]:
    """The frames an equation was traced from, innermost first, without JAX's."""
    return list(_source_info_util.user_frames(eqn.source_info.traceback))


def is_pvary(eqn: Any) -> bool:
    """Whether an equation only types its operands as varying over mesh axes."""
    return eqn.primitive.name == "pvary"


def dce_jaxpr(jaxpr: Any) -> Any:
    """The same jaxpr without equations whose results nobody reads; same arguments."""
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]


def whole_tracebacks() -> Any:
    """A context in which errors keep the frames of JAX that they came through."""
    return _config.traceback_filtering("off")


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


def sort_orders() -> dict[str, Callable[..., Any]]:
    """The orders in which JAX sorts, NaN last: less, and less or equal."""
    return {"lt": _lax._sort_lt_comparator, "le": _lax._sort_le_comparator}
