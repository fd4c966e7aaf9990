"""Train a small GPT on real text of varying length, with every part of pliax.

    pip install uv && uv run examples/train_lm.py

Documents are the `.py` files of the running Python's standard library, or your own with
`--data DIR --glob '*.txt'`. A batch is packed documents, of another length each step;
attention is document-causal by a mask program. Results go to `out/`: `loss.png`,
`metrics.jsonl`, checkpoints that `--resume` continues from, bit for bit.

What a step is made of, as a copy for your own loop:

    gen       px.Generator      explicit randomness: initialisation, order, dropout
    mask      px.create_block_mask(mask_mod, ...), px.flex_attention(..., block_mask=)
    optimizer optax.partition over px.optim.labels: px.optim.muon and optax.adamw
    step      px.compile        one trace, padded exactly into buckets, and .explain()
    devices   px.distributed    all local ones, data-parallel
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from lm.baselines import baselines
from lm.batches import assemble, cut_with_context, pack, schedule
from lm.checkpoints import Checkpoints
from lm.corpus import Corpus, Document, load_corpus
from lm.errors import UserError
from lm.model import Sizes, document_causal, initialise
from lm.options import Options, parse
from lm.report import Metrics, StepBar, plot_losses

import pliax as px


P = jax.sharding.PartitionSpec
BUCKETS = (384, 448, 512)  # bytes: a batch runs in the first that holds its rows
_QUICK_SHARE = 8  # a validation during training takes one held-out row in so many


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What training carries from step to step, and what a checkpoint holds."""

    params: Any
    opt_state: Any
    gen: px.Generator


@dataclass(frozen=True)
class Run:
    """Everything fixed during a run."""

    options: Options
    mesh: jax.sharding.Mesh
    corpus: Corpus
    held_out: tuple[Document, ...]
    graph: nnx.GraphDef
    train_step: Any
    evaluate: Any
    logits: Any
    checkpoints: Checkpoints

    @property
    def compilations(self) -> int:
        """Executables built so far."""
        compiled = (self.train_step, self.evaluate, self.logits)
        return sum(function.stats.compilations for function in compiled)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, evaluate, plot, print the final line; 2 after an error of the user's."""
    try:
        run(parse(arguments, __doc__))
    except UserError as error:
        return complain(error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        return complain(f"{error} (a smaller --width, --layers or --rows may fit)")
    except KeyboardInterrupt:
        complain("stopped; --resume continues from the newest checkpoint")
        return 130
    except OSError as error:
        return complain(f"{error}; mend that or give another --out")
    return 0


def complain(error: Any) -> int:
    """One line about what went wrong, and the exit code for it."""
    print(f"train_lm: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def run(options: Options) -> None:
    """One run from its options to the final line."""
    mesh = choose_mesh(options)
    corpus = load_corpus(options.data, options.glob)
    options.out.mkdir(parents=True, exist_ok=True)
    gen = px.Generator(options.seed)
    gen, (weights, order, state_gen, sampling) = gen.split(4)
    this, state = build(options, mesh, corpus, weights, state_gen)
    start = 0
    if options.resume:
        start, state = this.checkpoints.restore(state)
    else:
        this.checkpoints.clear()
    metrics = Metrics(options.out / "metrics.jsonl", start)
    describe(this, state, start)
    began = time.perf_counter()
    state, tokens = train(this, state, start, order, metrics)
    rate = tokens / (time.perf_counter() - began)
    finish(this, state, sampling, metrics, rate)


def build(
    options: Options,
    mesh: jax.sharding.Mesh,
    corpus: Corpus,
    weights: px.Generator,
    state_gen: px.Generator,
) -> tuple[Run, State]:
    """The compiled functions of a run, and its first state on all devices."""
    sizes = Sizes(
        options.layers,
        options.width,
        options.heads,
        options.kv_heads,
        options.dropout,
        options.dtype,
    )
    graph, params = initialise(weights, sizes)
    optimizer = make_optimizer(options)
    state = State(params, optimizer.init(params), state_gen)

    def train_step(state: State, batch: dict[str, Array]) -> tuple[State, Array]:
        state, loss = update(graph, optimizer, state, batch)
        return px.distributed.distribute((state, loss), mesh, P())

    def evaluate(params: Any, batch: dict[str, Array]) -> Array:
        return loss_sum(graph, params, batch, None)

    def logits(params: Any, inputs: Array) -> Array:
        mask = document_causal(jnp.zeros_like(inputs))
        return nnx.merge(graph, params)(inputs, mask)

    length = {1: px.Dim("t", max=BUCKETS[-1], buckets=BUCKETS)}
    window = {1: px.Dim("t", max=BUCKETS[0], buckets=BUCKETS[:1])}
    return Run(
        options=options,
        mesh=mesh,
        corpus=corpus,
        held_out=corpus.evaluation(options.held_out_bytes),
        graph=graph,
        train_step=px.compile(train_step, dims={"batch": length}, donate_argnums=0),
        evaluate=px.compile(evaluate, dims={"batch": length}),
        logits=px.compile(logits, dims={"inputs": window}),
        checkpoints=Checkpoints(options.out, configuration(options, mesh, corpus)),
    ), px.distributed.distribute(state, mesh, P())


def make_optimizer(options: Options) -> optax.GradientTransformation:
    """Muon for hidden matrices, AdamW for the rest, one schedule for both."""
    warmup = min(options.warmup, options.steps)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, warmup, max(options.steps, warmup + 1)
    )
    muon = px.optim.muon(rate, adjust_lr_fn="match_rms_adamw")
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.0)
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.partition({"muon": muon, "adamw": adamw}, px.optim.labels),
    )


def update(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    state: State,
    batch: dict[str, Array],
) -> tuple[State, Float[Array, ""]]:
    """One step: the mean loss in nats a byte, and the state after it."""
    gen, (noise,) = state.gen.split(1)  # this step's dropout; gen moves on

    def loss(params: Any) -> Array:
        return loss_sum(graph, params, batch, noise) / jnp.sum(batch["scored"])

    value, gradients = jax.value_and_grad(loss)(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state, gen), value


def loss_sum(
    graph: nnx.GraphDef,
    params: Any,
    batch: dict[str, Array],
    gen: px.Generator | None,
) -> Float[Array, ""]:
    """Cross-entropy of the scored bytes of a batch, summed, in nats."""
    mask = document_causal(batch["document"])
    logits = nnx.merge(graph, params)(batch["inputs"], mask, gen)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["scored"])


def train(
    this: Run, state: State, start: int, order: px.Generator, metrics: Metrics
) -> tuple[State, int]:
    """Steps `start` to the last one; returns the state and the bytes trained on."""
    options = this.options
    documents = this.corpus.train
    batches = schedule(order, documents, options.rows, BUCKETS[-1])
    batches = itertools.islice(batches, start, options.steps)
    total = 0
    with StepBar(start, options.steps) as bar:
        for step, rows in enumerate(batches, start + 1):
            began = time.perf_counter()
            batch = assemble(documents, rows, options.rows)
            state, loss = this.train_step(state, place(this, batch))
            loss, tokens = float(loss), int(batch["scored"].sum())
            if not np.isfinite(loss):
                raise UserError(
                    f"the loss of step {step} is {loss}; lower --learning-rate"
                )
            total += tokens
            bar.advance(loss, tokens, time.perf_counter() - began, this.compilations)
            row = {"step": step, "loss": loss, "tokens": tokens}
            if step % options.evaluate_every == 0 and step < options.steps:
                row["val_loss"] = validate(this, state, share=_QUICK_SHARE)
            metrics.add(**row)
            if step % options.checkpoint_every == 0 or step == options.steps:
                this.checkpoints.save(step, state)
    return state, total


def validate(this: Run, state: State, *, share: int = 1) -> float:
    """Nats a byte over the held-out documents, or one row in `share` of them."""
    options, longest = this.options, BUCKETS[-1]
    rows = pack(cut_with_context(this.held_out, longest), longest)[::share]
    loss, tokens = 0.0, 0
    for some in itertools.batched(rows, options.rows):
        batch = assemble(this.held_out, some, options.rows)
        loss += float(this.evaluate(state.params, place(this, batch)))
        tokens += int(batch["scored"].sum())
    return loss / tokens


def place(this: Run, batch: dict[str, np.ndarray]) -> dict[str, Array]:
    """Rows over the devices."""
    return px.distributed.distribute(batch, this.mesh, P("data"))


def finish(
    this: Run, state: State, sampling: px.Generator, metrics: Metrics, rate: float
) -> None:
    """Validation, plot, sample, final line."""
    options = this.options
    value = validate(this, state)
    metrics.add(step=options.steps, val_loss=value)
    lines = baselines(this.corpus.train, this.held_out)
    plot_losses(metrics, lines, options.out / "loss.png")
    text = sample(this, state, sampling)
    print(f"\nsample:\n{text}\n\n{this.train_step.explain()}\n")
    print(
        f"final: val_loss={value:.4f} "
        + " ".join(f"{name}={loss:.4f}" for name, loss in lines.items())
        + f" steps={options.steps} compilations={this.compilations}"
        f" tokens/s={rate:.0f}"
    )


def sample(this: Run, state: State, gen: px.Generator) -> str:
    """Bytes drawn one by one, each from a whole pass over the bytes before it."""
    text = np.zeros(1, np.int32)
    for _ in range(this.options.sample_bytes):
        recent = text[None, -BUCKETS[0] :]
        scores = this.logits(state.params, recent)[0, -1]
        gen, key = gen.key()
        byte = jax.random.categorical(key, scores / this.options.temperature)
        text = np.append(text, np.int32(byte))
    return bytes(text[1:].astype(np.uint8)).decode(errors="replace")


def choose_mesh(options: Options) -> jax.sharding.Mesh:
    """All local devices, or the first `--devices`; a CPU simulates as many."""
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.local_devices()
    if len(devices) < options.devices:
        raise UserError(
            f"--devices {options.devices}: this machine has {len(devices)}"
            f" {devices[0].platform} devices; give a smaller number"
        )
    devices = devices[: options.devices or None]
    if options.rows % len(devices):
        raise UserError(
            f"--rows {options.rows} cannot be divided among {len(devices)} devices;"
            f" give a multiple of {len(devices)}"
        )
    return px.distributed.data_parallel_mesh(devices=devices)


def configuration(
    options: Options, mesh: jax.sharding.Mesh, corpus: Corpus
) -> dict[str, Any]:
    """What a resumed run must share with the run it continues, bit for bit."""
    return {
        **options.decisive,
        "devices": f"{mesh.size} {mesh.devices.flat[0].device_kind}",
        "jax": jax.__version__,
        "buckets": list(BUCKETS),
        "documents": corpus.digest,
    }


def describe(this: Run, state: State, start: int) -> None:
    """What is about to be trained, on what and where."""
    corpus = this.corpus
    size = sum(len(d.data) for d in corpus.train)
    held = sum(len(d.data) for d in this.held_out)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    print(
        f"{len(corpus.train)} documents, {size / 1e6:.1f} MB; {len(this.held_out)}"
        f" held-out documents of {held / 1e3:.0f} kB; {corpus.unreadable} files"
        f" unreadable, {corpus.empty} empty\n{parameters / 1e6:.2f}M parameters on"
        f" {this.mesh.size} {this.mesh.devices.flat[0].platform} device(s),"
        f" {this.options.steps - start} of {this.options.steps} steps to go"
    )


if __name__ == "__main__":
    sys.exit(main())
