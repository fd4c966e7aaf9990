"""Who computes a workload of bench_attention_cpu.py: pliax, jax.nn and torch.

The first two are functions for the harness to compile. Torch answers from a worker in
its own Python; its entry has the attributes that the harness reads of its own.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pliax as px
from benchmarks import harness, torch_worker
from benchmarks.attention_workloads import (
    PROGRAMS,
    Workload,
    document_ids,
    pick,
    slopes,
)


def pliax(workload: Workload) -> harness.Rival:
    program, block_mask, score_mod = PROGRAMS[workload.program], None, None
    if program.score is not None:
        score_mod = program.score(jnp, workload.H)
    if program.mask is not None:
        mask_mod = program.mask(jnp, workload.S)
        block_mask = px.create_block_mask(mask_mod, None, None, workload.S, workload.S)

    def attend(q: Any, k: Any, v: Any, block_mask: Any = block_mask) -> Any:
        return px.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, implementation="xla"
        )

    masks = () if block_mask is None else (block_mask,)
    return _rival("pliax", attend, workload, masks)


def jax_nn(workload: Workload) -> harness.Rival:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")

    return _rival("jax.nn", attend, workload)


def _rival(
    name: str, attend: Any, workload: Workload, masks: tuple[Any, ...] = ()
) -> harness.Rival:
    def with_gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, vjp = jax.vjp(attend, q, k, v)
        return (out, *vjp(d_out))

    function = with_gradients if workload.backward else attend
    arguments = (*map(jnp.asarray, workload.arrays), *masks)
    return harness.Rival(name, function, arguments, lambda r: pick(r, workload))


@dataclass(frozen=True)
class TorchEntry:
    """A program compiled by the worker, under the harness's names for an entry."""

    worker: torch_worker.Torch
    rival: harness.Rival
    compile_s: float

    def compiled(self) -> np.ndarray:
        """The output it saved, in our layout."""
        return np.load(self.worker.folder / "out.npy").swapaxes(1, 2)

    def sample(self) -> float:
        """Milliseconds of one call."""
        return self.worker.ask(do="sample")["ms"]


def torch_entry(worker: torch_worker.Torch, workload: Workload) -> TorchEntry:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in workload.arrays)
    worker.save(q=q, k=k, v=v, ids=document_ids(workload.S), slopes=slopes(workload.H))
    answer = worker.ask(do="prepare", program=workload.program)
    rival = harness.Rival("torch", pick, (), lambda r: pick(r, workload))
    return TorchEntry(worker, rival, answer["compile_s"])
