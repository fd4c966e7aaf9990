"""Kernels of Triton's leave what torch reads in the same process as it was."""

import importlib
import os
import sys

import pytest


@pytest.mark.parametrize("directory", [None, "/tmp/of-the-user"])
def test_the_directory_of_triton_s_cache_is_the_user_s(
    directory, tmp_path, monkeypatch
):
    package = tmp_path / "jax_triton"
    package.mkdir()
    (package / "__init__.py").write_text(
        'import os\nos.environ["TRITON_CACHE_DIR"] = ""\ntriton_call = print\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("jax_triton", "pliax.kernels._jax_triton"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back
        del sys.modules[name]
    monkeypatch.setenv("TRITON_CACHE_DIR", directory or "")
    if directory is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    module = importlib.import_module("pliax.kernels._jax_triton")
    assert module.triton_call is print
    assert os.environ.get("TRITON_CACHE_DIR") == directory
