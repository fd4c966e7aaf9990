"""The only door to JAX's private interior: it exports features, not versions.

Everything else in pliax is written against JAX's public interface. What stands
here works on jax 0.11.2 and the newest release; when a release moves an internal,
this file is the one that changes.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from jax._src import config as _config, mesh as _mesh
from jax._src.core import (
    Primitive as Primitive,
    is_symbolic_dim as is_symbolic_dim,
    trace_state_clean as trace_state_clean,
)

# jax.extend.random by its parts: `import jax.extend` loads Pallas's Mosaic GPU.
from jax._src.extend.random import define_prng_impl as define_prng_impl
from jax._src.random.prng import iota_2x32_shape as iota_2x32_shape
from jax._src.random.threefry2x32 import threefry2x32_p as threefry2x32_p
from jax._src.state.discharge import discharge_state as discharge_state
from jax.interpreters import ad as ad, batching as batching, mlir as mlir


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
    return result if eqn.primitive.multiple_results else [result]


def is_pvary(eqn: Any) -> bool:
    """Whether an equation only types its operands as varying over mesh axes."""
    return eqn.primitive.name == "pvary"
