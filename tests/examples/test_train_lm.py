"""The main job: it resumes bit for bit, does not depend on devices, says what is wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from flax import nnx
from lm.batches import schedule
from lm.corpus import load_corpus
from lm.model import Sizes, document_causal, initialise

import pliax as px


ROOT = pathlib.Path(__file__).parent.parent.parent
SMALL = "--layers 1 --width 32 --heads 2 --kv-heads 1 --warmup 2 --sample-bytes 8"
SMALL += " --held-out-bytes 2000 --evaluate-every 3"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with 40 files of words, some of them longer than a row."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon\n", "zeta\n\n"]
    for number in range(40):
        text = " ".join(rng.choice(words, size=rng.integers(5, 400)))
        (folder / f"{number}.txt").write_text(text)
    return folder


def arguments(texts, out, *more):
    return [
        *SMALL.split(),
        "--data",
        str(texts),
        "--glob",
        "*.txt",
        "--out",
        str(out),
        *more,
    ]


def start(command, *before, **settings):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **settings}
    script = str(ROOT / "examples" / "train_lm.py")
    line = [*before, sys.executable, script, *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip().splitlines()[-1]


def rows(out):
    return [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def leaves(out, step):
    folder = out / "checkpoints" / str(step)
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder.parent) as manager:
        tree = manager.restore(step, args=ocp.args.StandardRestore())
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(texts, tmp_path):
    options = ("--steps", "12", "--checkpoint-every", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    line = finish(start(arguments(texts, whole, *options), **cache))
    process = start(arguments(texts, killed, *options), **cache)
    while not (killed / "checkpoints" / "4").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(rows(killed)) < 12
    resumed = finish(start(arguments(texts, killed, *options, "--resume"), **cache))
    assert rows(killed) == rows(whole)
    for x, y in zip(leaves(whole, 12), leaves(killed, 12), strict=True):
        np.testing.assert_array_equal(x, y)
    assert resumed.split()[:5] == line.split()[:5]
    names = [word.split("=")[0] for word in line.split()]
    assert names == [
        "final:", "val_loss", "unigram", "bigram", "trigram", "steps", "compilations", "tokens/s",
    ]  # fmt: skip
    assert (whole / "loss.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_no_half_checkpoint(texts, tmp_path):
    """A limit on the size of files (8 KiB) stands for the full disk."""
    command = arguments(texts, tmp_path, "--steps", "3", "--width", "64")
    limited = ("bash", "-c", 'ulimit -f 8 && exec "$@"', "bash")
    process = start(command, *limited, JAX_ENABLE_COMPILATION_CACHE="0")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert len(err.strip().splitlines()) == 1
    assert "could not be written" in err and "--out" in err
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == ["configuration.json"]


@pytest.fixture(scope="module")
def runs(texts, tmp_path_factory):
    """The same run on one device and on eight, before its first step."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = tmp_path_factory.mktemp("out")
        options = train_lm.parse(arguments(texts, out, "--dropout", "0.3"), None)
        corpus = load_corpus(options.data, options.glob)
        built = []
        for count in (1, 8):
            mesh = px.distributed.data_parallel_mesh(devices=jax.devices()[:count])
            gen, weights, order = (px.Generator(seed) for seed in (0, 1, 2))
            run, state = train_lm.build(options, mesh, corpus, weights, gen)
            batch = next(
                schedule(order, corpus.train, options.rows, train_lm.BUCKETS[-1])
            )
            arrays = train_lm.assemble(corpus.train, batch, options.rows)
            built.append((run, state, train_lm.place(run, arrays)))
        return built


def test_weights_batches_and_masks_do_not_depend_on_the_devices(runs):
    (_, one_state, one_batch), (_, state, batch) = runs
    assert len(batch["inputs"].sharding.device_set) == 8
    for x, y in zip(
        jax.tree.leaves((one_state, one_batch)),
        jax.tree.leaves((state, batch)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    masks = [
        jax.jit(train_lm.document_causal)(b["document"]) for b in (one_batch, batch)
    ]
    for x, y in zip(*map(jax.tree.leaves, masks), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_one_step_agrees_to_the_order_of_additions(runs, standard_promotion):
    losses, gradients = [], []
    for run, state, batch in runs:
        graph = run.graph
        _, (noise,) = state.gen.split(1)

        @jax.jit
        def gradient(params, batch, noise, graph=graph):
            def loss(params):
                return (
                    train_lm.loss_sum(graph, params, batch, noise)
                    / batch["scored"].sum()
                )

            return jax.value_and_grad(loss)(params)

        value, grads = gradient(state.params, batch, noise)
        losses.append(np.asarray(value))
        gradients.append([np.asarray(g) for g in jax.tree.leaves(grads)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for x, y in zip(*gradients, strict=True):
        assert np.abs(x - y).max() <= 2e-5 * np.abs(x).max()


def test_the_compiled_step_agrees_and_compiles_once_for_one_bucket(
    runs, standard_promotion
):
    losses = []
    for run, state, batch in runs:
        copy = jax.tree.map(jnp.copy, state)
        for _ in range(2):
            copy, loss = run.train_step(copy, batch)
        losses.append(float(loss))
        assert run.train_step.stats.compilations == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bfloat16_layers_have_float32_weights_and_logits_and_about_that_loss(
    standard_promotion,  # flax's RMSNorm promotes
):
    inputs = jnp.arange(128).reshape(2, 64) % 97
    document = jnp.zeros_like(inputs)

    def loss(dtype):
        sizes = Sizes(2, 32, 4, 2, 0.1, dtype)
        graph, params = initialise(px.Generator(0), sizes)
        assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
        mask, gen = document_causal(document), px.Generator(1)
        logits = nnx.merge(graph, params)(inputs, mask, gen)
        assert logits.dtype == jnp.float32
        return jax.nn.logsumexp(logits, axis=-1).mean()

    low, full = loss("bfloat16"), loss("float32")
    assert low != full
    np.testing.assert_allclose(low, full, rtol=0.01)


BAD = {
    "unknown option": (["--nope", "1"], "unrecognized arguments: --nope 1"),
    "not a number": (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    "steps": (["--steps", "0"], "--steps 0 must be in [1, 10000000]"),
    "dropout": (["--dropout", "1"], "--dropout 1.0 must be in [0.0, 0.99]"),
    "temperature": (["--temperature", "0"], "--temperature 0.0 must be in"),
    "nan": (["--learning-rate", "nan"], "--learning-rate nan must be in"),
    "infinity": (["--clip", "inf"], "--clip inf must be in"),
    "new line": (["--no\npe"], "unrecognized arguments: --no pe"),
    "absolute pattern": (["--glob", "/etc/*.txt"], "--glob '/etc/*.txt' is no pattern"),
    "width": (["--width", "33"], "must be a multiple of 2 x --heads"),
    "dtype": (["--dtype", "int8"], "--dtype int8 must be float32 or bfloat16"),
    "kv heads": (["--kv-heads", "3"], "must be a multiple of --kv-heads 3"),
    "rows": (["--rows", "7"], "--rows 7 cannot be divided among 8 devices"),
    "no folder": (["--data", "/nowhere"], "--data /nowhere is not a folder"),
    "no match": (["--glob", "*.nope"], "matches --glob '*.nope'"),
    "nothing to resume": (["--resume"], "--resume found no run"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(name, texts, tmp_path, capsys):
    more, text = BAD[name]
    assert train_lm.main(arguments(texts, tmp_path, *more)) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("train_lm: error: ")
    assert text in error
    assert "\n" not in error


def test_an_empty_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    assert train_lm.main(arguments(tmp_path, tmp_path / "out")) == 2
    assert "(0 unreadable, 1 empty)" in capsys.readouterr().err


def test_resuming_another_configuration_names_what_changed(texts, tmp_path, capsys):
    options = train_lm.parse(arguments(texts, tmp_path), None)
    corpus = load_corpus(options.data, options.glob)
    mesh = train_lm.choose_mesh(options)
    recorded = train_lm.configuration(options, mesh, corpus)
    train_lm.Checkpoints(tmp_path, recorded).clear()
    assert train_lm.main(arguments(texts, tmp_path, "--resume", "--width", "64")) == 2
    assert "width: 32 then, 64 now" in capsys.readouterr().err
    changed = texts.parent / "changed"
    changed.mkdir(exist_ok=True)
    (changed / "one.txt").write_text("other words " * 2000)
    assert train_lm.main(arguments(changed, tmp_path, "--resume")) == 2
    assert "the documents changed since" in capsys.readouterr().err


def test_what_this_program_did_not_make_is_neither_deleted_nor_read(
    texts, tmp_path, capsys
):
    precious = tmp_path / "checkpoints" / "precious.bin"
    precious.parent.mkdir()
    precious.touch()
    assert train_lm.main(arguments(texts, tmp_path)) == 2
    assert "was not made by this program" in capsys.readouterr().err
    assert precious.exists()
    (precious.parent / "configuration.json").write_text("{")
    assert train_lm.main(arguments(texts, tmp_path, "--resume")) == 2
    assert "configuration.json is damaged" in capsys.readouterr().err


def test_metrics_of_an_earlier_run_end_where_the_checkpoint_stands(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, "loss": 1.0} for n in (1, 2, 3)] + [
        {"step": 3, "val_loss": 1.0}
    ]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo'
    )
    assert [row["step"] for row in train_lm.Metrics(path, 2).rows] == [1, 2]
    path.write_text("no json\n")
    with pytest.raises(train_lm.UserError, match="is damaged; remove it"):
        train_lm.Metrics(path, 2)
    assert train_lm.Metrics(path, 0).rows == []
