"""The story of changing shapes: fewer executables, the same losses, a picture."""

import importlib

import jax
import numpy as np

import pliax as px


story = importlib.import_module("01_changing_shapes")


def test_the_story_runs_and_draws(tmp_path, capsys, standard_promotion):
    assert story.main(["--steps", "12", "--out", str(tmp_path)]) == 0
    assert "1 traces" in capsys.readouterr().out
    assert (tmp_path / "buckets.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_in_a_bucket_is_the_unpadded_step(standard_promotion):
    step = px.compile(story.train_step, dims={"x": "_, t, _"}, padding="require")
    for x, label in story.batches(3, 3):
        found = step(story.initial(0), x, label)
        wanted = jax.jit(story.train_step)(story.initial(0), x, label)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
