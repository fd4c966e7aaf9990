"""Names for what annotations say often."""

from typing import Any


type Leaf = Any
"""An array in a pytree, or whatever a transformation of the tree puts in its place:
a shape, a sharding, a cotangent of type float0, None. Shapes stand in the docstring."""
