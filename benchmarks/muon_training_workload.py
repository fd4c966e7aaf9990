"""What `bench_muon_training.py` trains: the example's GPT, its batches, and two steps.

    state, batches, index, peak, total  ->  state, loss

Model, corpus, packing and mask are those of `examples/train_lm.py`, without dropout.
The two optimizers differ in the hidden matrices alone: Muon, or AdamW with the same
decay; embedding, head and norms take AdamW without decay in both. The peak of the
learning rate and the number of steps are data: a program serves every run.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pliax as px
from benchmarks import harness
from benchmarks.muon_training_verdicts import OPTIMIZERS


sys.path.insert(0, str(harness.ROOT / "examples"))  # the model is that of the example
from lm.batches import Row, assemble, cut, pack
from lm.corpus import Corpus, Document, load_corpus as load_corpus
from lm.errors import UserError as UserError
from lm.model import Sizes, document_causal, initialise


MUON_SHARE = 0.75  # of AdamW's steps


@dataclass(frozen=True)
class Protocol:
    """What all runs share.

    Attributes:
        sizes: Of the model.
        rows: Of a batch.
        length: Bytes of a row.
        steps: Of an AdamW run.
        points: Of an AdamW run's curve, a multiple of 4; Muon's lie at the same steps.
        held_out_bytes: Least size of the held-out documents.
        warmup: Share of a run's steps in which the rate rises to its peak; then it
            falls to zero along a cosine.
        clip: Largest global norm of the gradients.
        decay: Of hidden matrices, decoupled, for both.
        b2: Of AdamW; that of `examples/train_lm.py`.
        precision: `jax_default_matmul_precision`; "default" is TF32 on a GPU.
    """

    sizes: Sizes
    rows: int = 64
    length: int = 512
    steps: int = 280
    points: int = 20
    held_out_bytes: int = 300_000
    warmup: float = 0.1
    clip: float = 1.0
    decay: float = 0.1
    b2: float = 0.95
    precision: str = "default"

    @property
    def chunk(self) -> int:
        """Steps between two points of a curve."""
        return self.steps // self.points

    def total(self, name: str) -> int:
        """Steps of a run."""
        return self.steps if name == "adamw" else int(MUON_SHARE * self.steps)


FULL = Protocol(
    Sizes(layers=10, width=512, heads=8, kv_heads=4, dropout=0.0, dtype="bfloat16")
)
QUICK = Protocol(Sizes(1, 32, 2, 1, 0.0), 4, 64, 8, 4, held_out_bytes=2000)


def check(protocol: Protocol, corpus: Corpus) -> None:
    """Refuse steps that no chunk divides, and more than one epoch of the data."""
    if protocol.steps < 1 or protocol.steps % protocol.points:
        raise UserError(
            f"--steps {protocol.steps} must be a multiple of {protocol.points}, the"
            " points of AdamW's curve: three quarters of them are Muon's"
        )
    wanted = protocol.steps * protocol.rows * protocol.length
    found = sum(len(document.data) for document in corpus.train)
    if wanted > found:
        most = found // (protocol.rows * protocol.length)
        raise UserError(
            f"{protocol.steps} steps of {protocol.rows} rows of {protocol.length} bytes"
            f" are {wanted} bytes, more than one epoch of {found} bytes; give --steps"
            f" {most - most % protocol.points} or fewer, or more --data"
        )


# --- data -----------------------------------------------------------------------------


def training_batches(
    gen: px.Generator, documents: Sequence[Document], protocol: Protocol
) -> dict[str, np.ndarray]:
    """Pieces in random order, each at most once, as arrays of [step, row, byte]."""
    pieces = cut(documents, protocol.length)
    order = np.asarray(gen.permutation(len(pieces))[1])
    packed = pack([pieces[i] for i in order], protocol.length)
    return stacked(documents, packed[: protocol.steps * protocol.rows], protocol)


def held_out_batches(corpus: Corpus, protocol: Protocol) -> dict[str, np.ndarray]:
    """Held-out documents in pieces like those of training, every byte a target once."""
    documents = corpus.evaluation(protocol.held_out_bytes)
    packed = pack(cut(documents, protocol.length), protocol.length)
    return stacked(documents, packed, protocol)


def stacked(
    documents: Sequence[Document], packed: Sequence[Row], protocol: Protocol
) -> dict[str, np.ndarray]:
    """Rows as arrays of [batch, row, byte]; in rows that are missing nothing counts."""
    count = -(-len(packed) // protocol.rows)
    arrays = assemble(documents, packed, count * protocol.rows)

    def batched(name: str, x: np.ndarray) -> np.ndarray:
        after = ((0, 0), (0, protocol.length - x.shape[1]))
        padded = np.pad(x, after, constant_values=-(name == "document"))
        return padded.reshape(count, protocol.rows, protocol.length)

    return {name: batched(name, x) for name, x in arrays.items()}


# --- what is compiled -----------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What training carries from step to step."""

    params: Any
    opt_state: Any


def warmup_cosine(peak: Any, total: Any, warmup: float) -> Callable[[Any], Any]:
    """The schedule of `examples/train_lm.py`, whose numbers may be traced."""
    rising = warmup * total

    def rate(count: Any) -> Any:
        angle = math.pi * (count - rising) / (total - rising)
        falling = (1 + jnp.cos(angle)) / 2
        return peak * jnp.where(
            count < rising, jnp.minimum((count + 1) / rising, 1), falling
        )

    return rate


def optimizer(
    name: str, rate: Callable[[Any], Any], protocol: Protocol
) -> optax.GradientTransformation:
    """Muon or AdamW for hidden matrices, AdamW for the rest, one rate for all."""
    adamw = partial(optax.adamw, rate, b2=protocol.b2)
    hidden = (
        px.optim.muon(rate, protocol.decay, adjust_lr_fn="match_rms_adamw")
        if name == "muon"
        else adamw(weight_decay=protocol.decay)
    )
    return optax.chain(
        optax.clip_by_global_norm(protocol.clip),
        optax.partition(
            {"muon": hidden, "adamw": adamw(weight_decay=0.0)}, px.optim.labels
        ),
    )


def loss_sum(graph: nnx.GraphDef, params: Any, batch: dict[str, Any]) -> jax.Array:
    """Cross-entropy of the scored bytes of a batch, summed, in nats."""
    mask = document_causal(batch["document"])
    logits = nnx.merge(graph, params)(batch["inputs"], mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(losses * batch["scored"])


def held_out_loss(graph: nnx.GraphDef, params: Any, batches: Any) -> jax.Array:
    """Nats a byte, over all batches."""
    sums = jax.lax.map(partial(loss_sum, graph, params), batches)
    return jnp.sum(sums) / jnp.sum(batches["scored"])


@dataclass(frozen=True)
class Programs:
    """One executable for each purpose; `costs` says what a step's took to build.

    Attributes:
        draw: A Generator to parameters.
        start: Of each optimizer: parameters to a State.
        step: Of each optimizer; the State is donated.
        evaluate: Parameters and batches to their loss.
        parameters: How many the model has.
        costs: Of each step: seconds of tracing and compiling, peak memory in MiB.
    """

    draw: Callable[..., Any]
    start: dict[str, Callable[..., State]]
    step: dict[str, Callable[..., tuple[State, jax.Array]]]
    evaluate: Callable[..., jax.Array]
    parameters: int
    costs: dict[str, dict[str, float]]


def build(protocol: Protocol) -> Programs:
    """Everything that runs on the device; the two steps are compiled here."""
    draw = jax.jit(lambda gen: initialise(gen, protocol.sizes))
    graph, params = jax.eval_shape(draw, px.Generator(0))

    def start(name: str, params: Any) -> State:
        tx = optimizer(name, warmup_cosine(1.0, 1, protocol.warmup), protocol)
        return State(params, tx.init(params))

    def step(
        name: str, state: State, batches: Any, index: Any, peak: Any, total: Any
    ) -> tuple[State, jax.Array]:
        batch = jax.tree.map(lambda x: x[index], batches)
        tx = optimizer(name, warmup_cosine(peak, total, protocol.warmup), protocol)

        def loss(params: Any) -> jax.Array:
            return loss_sum(graph, params, batch) / jnp.sum(batch["scored"])

        value, gradients = jax.value_and_grad(loss)(state.params)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    starts = {name: jax.jit(partial(start, name)) for name in OPTIMIZERS}
    compiled, costs = {}, {}
    for name in OPTIMIZERS:
        state = jax.eval_shape(starts[name], params)
        compiled[name], costs[name] = _compiled(partial(step, name), state, protocol)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    evaluate = jax.jit(partial(held_out_loss, graph))
    return Programs(lambda gen: draw(gen)[1], starts, compiled, evaluate, count, costs)


def _compiled(
    step: Callable[..., Any], state: State, protocol: Protocol
) -> tuple[Any, dict[str, float]]:
    shape = (protocol.steps, protocol.rows, protocol.length)
    names = ("inputs", "targets", "document", "scored")
    batches = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}
    scalars = [jax.ShapeDtypeStruct((), x) for x in (jnp.int32, jnp.float32, jnp.int32)]
    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, batches, *scalars)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak = held + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return compiled, {
        "trace_s": traced - began,
        "compile_s": done - traced,
        "peak_memory_mib": peak / harness.MIB,
    }
