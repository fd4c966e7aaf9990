"""jax-triton, which runs kernels of Triton's, without what importing it changes.

It empties TRITON_CACHE_DIR, after which torch cannot compile in the same process
("Could not create or locate cache dir", jax-triton 0.3.1 with torch 2.11).
"""

import os


_DIRECTORY = "TRITON_CACHE_DIR"
_given = os.environ.get(_DIRECTORY)

from jax_triton import triton_call as triton_call  # noqa: E402  # pyright: ignore[reportMissingImports]


if _given is None:
    os.environ.pop(_DIRECTORY, None)
else:
    os.environ[_DIRECTORY] = _given
