"""jax-triton, which runs kernels of Triton's, without what importing it changes.

It empties TRITON_CACHE_DIR, after which torch cannot compile in the same process
("Could not create or locate cache dir", jax-triton 0.3.1 with torch 2.11).
"""

import os
from typing import Any


_DIRECTORY = "TRITON_CACHE_DIR"
_given = os.environ.get(_DIRECTORY)

import jax_triton  # noqa: E402  # pyright: ignore[reportMissingImports]


if _given is None:
    os.environ.pop(_DIRECTORY, None)
else:
    os.environ[_DIRECTORY] = _given

triton_call: Any = jax_triton.triton_call
