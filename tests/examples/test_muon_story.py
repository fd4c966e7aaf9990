"""The story of Muon: both models train, and faster than with AdamW alone."""

import importlib

import jax
import numpy as np

import pliax as px


story = importlib.import_module("04_muon")


def test_the_story_runs_and_draws(tmp_path, capsys, standard_promotion):
    assert story.main(["--steps", "10", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("nats per byte") == 4
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_muon_is_ahead_of_adamw_with_its_learning_rate(standard_promotion):
    curves = {name: np.mean(losses[-20:]) for name, losses in story.runs(60).items()}
    for model in ("dict", "nnx"):
        assert curves[f"{model}, Muon and AdamW"] < curves[f"{model}, AdamW"]


def test_stacked_layers_move_as_the_layers_would(standard_promotion):
    params = story.initial(0)
    optimizer = story.dict_optimizer()
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    alone = story.muon()
    for i in range(story.LAYERS):
        W = params["layers"]["up"][i]
        expected, _ = jax.jit(alone.update)(W, alone.init(W), W)
        bound = np.abs(expected).max() * 2.0**-6
        moved = updates["layers"]["up"][i]
        np.testing.assert_allclose(moved, expected, rtol=0, atol=bound)


def test_names_say_all_of_the_nnx_model():
    weights = story.nnx.state(story.Decoder(story.nnx.Rngs(0)))
    found = jax.tree.leaves(px.optim.labels(weights))
    assert (found.count("muon"), found.count("adamw")) == (4 * story.LAYERS, 2)
