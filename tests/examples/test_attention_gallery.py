"""The gallery: what the docs show is what the library has, and what the example draws."""

import importlib
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pliax as px
from pliax.kernels import masks, mods


ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "attention_gallery.md"
PICTURES = ROOT / "docs" / "assets" / "attention"
HELPERS = {"alibi_slopes"}  # numbers for a mod, not a mod
LARGEST_PICTURE = 32 * 1024  # bytes
PNG = b"\x89PNG"  # how such a file begins

gallery = importlib.import_module("03_attention_gallery")


def made_by(module):
    """The functions of a module that are, or make, a mask or mod."""
    return {
        name
        for name, x in vars(module).items()
        if isinstance(x, types.FunctionType)
        and x.__module__ == module.__name__
        and not name.startswith("_")
    } - HELPERS


def sections():
    """Heading of each section of the docs page, and its code."""
    found = re.findall(
        r"### `([\w.]+)`\n.*?```python\n(.*?)```", PAGE.read_text(), re.S
    )
    return {name.replace(".", "_"): code for name, code in found}


def test_every_mask_and_mod_of_the_library_is_drawn_in_the_docs():
    drawn = set(sections())
    assert drawn == made_by(masks) | made_by(mods) | {"mods_with_offset"}
    shown = {*gallery.all_masks(), *gallery.all_mods(), "sinks"}
    assert shown - {"no_mod"} == drawn
    linked = set(re.findall(r"assets/attention/(\w+)\.png", PAGE.read_text()))
    assert linked == shown | {"masks"}
    assert {p.stem for p in PICTURES.iterdir()} == linked | {"kinds_of_blocks"}
    assert max(p.stat().st_size for p in PICTURES.iterdir()) < LARGEST_PICTURE


def test_the_line_of_code_in_the_docs_makes_the_picture_above_it():
    names = {"jnp": jnp, "px": px, "masks": masks, "mods": mods}
    wanted = {**gallery.all_masks(), **gallery.all_mods()}
    for name, code in sections().items():
        if name == "sinks":
            continue
        exec(compile(code, name, "exec"), names)
        if isinstance(wanted[name], gallery.Mask):
            sizes = (None, None, wanted[name].q_len, wanted[name].kv_len)
            found = px.create_mask(names["mask_mod"], *sizes)
            golden = px.create_mask(wanted[name].mask_mod, *sizes)
        else:
            mod = wanted[name]
            of_docs = gallery.Mod(names["score_mod"], mod.head, mod.q_len, mod.kv_len)
            found, golden = gallery.scores(of_docs), gallery.scores(mod)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(golden), name)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three exhibits."""
    out = tmp_path_factory.mktemp("gallery")
    gallery.main(["--out", str(out), "--only", "causal", "with_offset", "alibi"])
    return out


def test_the_example_draws_and_runs_what_it_is_asked_for(run):
    assert {path.stem for path in run.iterdir()} == {"causal", "with_offset", "alibi"}
    assert all(path.read_bytes().startswith(PNG) for path in run.iterdir())


def test_sheets_are_drawn_from_any_masks(tmp_path):
    shown = gallery.all_masks()
    gallery.picture_sheet(tmp_path, {"causal": shown["causal"]})
    gallery.picture_kinds(tmp_path, shown["causal"])
    assert {path.stem for path in tmp_path.iterdir()} == {"masks", "kinds_of_blocks"}
    assert all(path.read_bytes().startswith(PNG) for path in tmp_path.iterdir())


def test_a_picture_is_the_same_in_every_run(run, tmp_path):
    gallery.picture_mods(tmp_path, {"alibi": gallery.all_mods()["alibi"]})
    assert (tmp_path / "alibi.png").read_bytes() == (run / "alibi.png").read_bytes()


def test_what_is_run_is_the_plain_formula():
    """Sums of 32 weights of float32: a few roundings of values of about 4."""
    error = gallery.largest_error(gallery.all_masks()["causal"])
    assert 0.0 < error < 32 * np.finfo(np.float32).eps


def test_weights_are_those_of_the_scores_that_are_drawn():
    mod = gallery.all_mods()["alibi"]
    _, after = gallery.scores(mod)
    golden = jax.nn.softmax(after.astype(np.float64), axis=-1)
    drawn = np.asarray(gallery.weights(mod))[0, :, mod.head]
    np.testing.assert_allclose(drawn, golden, atol=32 * np.finfo(np.float32).eps)
