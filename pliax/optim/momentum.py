"""The exponential average of gradients that Muon orthogonalises, or its look-ahead."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Momentum:
    r"""The rule :math:`M \leftarrow \mu M + (1 - \mu) G`.

    Attributes:
        share: :math:`\mu`, which may be traced.
        nesterov: Whether the direction is that of the look-ahead
            :math:`\mu M + (1 - \mu) G`; else it is that of M.
    """

    share: ArrayLike
    nesterov: bool = dataclasses.field(metadata={"static": True})

    def __call__(
        self, G: Float[Array, "*N"], M: Float[Array, "*N"]
    ) -> tuple[Float[Array, "*N"], Float[Array, "*N"]]:
        """The next M, in its dtype, and the direction."""
        buffer = self._mixed(G, M).astype(M.dtype)
        return buffer, self._mixed(G, buffer) if self.nesterov else buffer

    def factors(self, dtype: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Of G, and of M."""
        fresh, kept = (jnp.asarray(x) for x in (1 - self.share, self.share))
        return jnp.reshape(fresh, ()).astype(dtype), jnp.reshape(kept, ()).astype(dtype)

    def _mixed(self, G: Array, M: Array) -> Array:
        """In the gradient's dtype, rounded once."""
        wide = widen(G, G)
        fresh, kept = self.factors(wide.dtype)
        return (fresh * wide + kept * M.astype(wide.dtype)).astype(G.dtype)


def widen(X: Array, G: Array) -> Array:
    """X in float32, or in float64 where G is."""
    return X.astype(jnp.float64 if G.dtype == jnp.float64 else jnp.float32)
