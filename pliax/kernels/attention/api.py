"""flex_attention: the public function, which checks, picks a backend and runs it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from pliax.core.manual_axes import varying_axes
from pliax.core.typing import Leaf
from pliax.kernels._backends import Backend, check_options, choose

from . import bucketed, configs, decoding, derivatives, reference, xla
from .arguments import (
    as_arrays,
    check_arrays,
    check_block_mask,
    check_instance,
    check_kernel_options,
    check_scale,
    close_score_mod,
)
from .block_arguments import check_flag
from .block_mask import BlockMask
from .merging import FEW
from .refinement import refined
from .separation import Inseparable
from .tiles import softmax_dtype


@dataclass(frozen=True)
class AuxRequest:
    """Which extra results flex_attention returns.

    Attributes:
        lse: The log-sum-exp of each query's scores, in natural logarithm.
        max_scores: The largest score of each query; carries no gradient.
    """

    lse: bool = False
    max_scores: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AuxOutput:
    """The extra results: None where not requested.

    Attributes:
        lse: Log-sum-exp, (B, T, H), in the softmax's dtype; -inf for a query that sees
            nothing.
        max_scores: Largest score, (B, T, H), likewise.
    """

    lse: Leaf = None
    max_scores: Leaf = None


@dataclass(frozen=True)
class _Arguments:
    """What a backend may refuse."""

    arrays: tuple[Any, Any, Any]
    score_mod: Any
    block_mask: Any
    options: dict[str, int]
    has_aux: bool = False


def _anything(arguments: Any) -> None:
    """Plain JAX takes every argument that passed the checks."""
    return


def _refused_by_mosaic_gpu(arguments: _Arguments) -> str | None:
    from .mosaic_gpu_limits import refusal  # loads Pallas, which takes a second

    mods = arguments.score_mod, arguments.block_mask
    ignored = sorted({"block_q", "block_kv", "stages"} & set(arguments.options))
    if ignored and "splits" in arguments.options:
        return (
            f"where keys are split it chooses {ignored} itself; leave out one of them"
        )
    interpret = "interpret" in arguments.options
    return refusal(arguments.arrays, *mods, interpret=interpret)


def _refused_by_triton(arguments: _Arguments) -> str | None:
    from .triton_limits import refusal

    return refusal(arguments.arrays, arguments.score_mod, arguments.block_mask)


def _refused_unless_named(arguments: _Arguments) -> str | None:
    """Where the fused kernels are not the default, though they run."""
    reason = _refused_by_mosaic_gpu(arguments)
    if reason is not None:
        return reason
    if jax.device_count() > 1 or varying_axes(arguments.arrays):
        return "XLA cannot partition a kernel among several devices"
    if arguments.options:
        return f"kernel_options {sorted(arguments.options)} are for one that is named"
    return _refused_few(arguments)


def _refused_few(arguments: _Arguments) -> str | None:
    """Few queries take the kernels where each key is read once for all its heads."""
    from .mosaic_gpu_limits import refused_packing

    queries = arguments.arrays[0].shape[1]
    if not isinstance(queries, int) or queries >= FEW:
        return None
    mods = arguments.score_mod, arguments.block_mask
    reason = refused_packing(arguments.arrays, *mods)
    if reason is None:
        return None
    return f"fewer than {FEW} queries would read a key once for each head: {reason}"


def _prepared_for_mosaic_gpu(arguments: _Arguments) -> _Arguments:
    """`_refined`, and whether statistics are asked for.

    What only `_mosaic_gpu` wants to know goes with the options: it is static as they
    are.
    """
    if arguments.has_aux:
        options = {**arguments.options, "has_aux": 1}
        arguments = replace(arguments, options=options)
    return _refined(arguments)


def _refined(arguments: _Arguments) -> _Arguments:
    """A mask that is known to be sparse has lists of smaller blocks, too."""
    mask, (sequences, _, heads, _) = arguments.block_mask, arguments.arrays[0].shape
    if mask is None:
        return arguments
    return replace(arguments, block_mask=refined(mask, sequences, heads))


def _attend_mosaic_gpu(query: Array, key: Array, value: Array, **rest: Any) -> Any:
    """The fused kernels."""
    score_mod, block_mask = rest.pop("score_mod"), rest.pop("block_mask")
    kernel = bucketed.in_buckets(_mosaic_gpu(**rest), lambda query, key: (128, 128))
    return derivatives.attend(kernel, (query, key, value), score_mod, block_mask)


def _attend_triton(query: Array, key: Array, value: Array, **rest: Any) -> Any:
    """The kernels in Triton."""
    score_mod, block_mask = rest.pop("score_mod"), rest.pop("block_mask")
    kernel = bucketed.in_buckets(_triton(**rest), lambda query, key: (128, 128))
    return derivatives.attend(kernel, (query, key, value), score_mod, block_mask)


def _attend_by_platform(query: Array, key: Array, value: Array, **rest: Any) -> Any:
    """The fused kernels on a GPU, `xla` where a program is compiled for a CPU."""
    score_mod, block_mask = rest.pop("score_mod"), rest.pop("block_mask")
    cuda = _mosaic_gpu(**rest)
    kernel = derivatives.by_platform(cuda=cuda, default=_xla(scale=rest["scale"]))
    kernel = bucketed.in_buckets(kernel, lambda query, key: (128, 128))
    return derivatives.attend(kernel, (query, key, value), score_mod, block_mask)


def _mosaic_gpu(**rest: Any) -> derivatives.Kernel:
    """The fused kernels; some gradients of what `score_mod` captured are `xla`'s."""
    from . import mosaic_gpu_captured, mosaic_gpu_decoding, mosaic_gpu_vjp
    from .mosaic_gpu_limits import has_backward

    scale, splits = rest["scale"], rest.get("splits")
    ordered = rest.get("deterministic")
    asked = {x: rest[x] for x in configs.OPTIONS if x in rest}
    options = {"scale": scale, "interpret": "interpret" in rest, "asked": asked}

    def backward(arrays: Any, *args: Any) -> Any:
        if not has_backward(args[1]):
            if ordered and derivatives.floating_captures(args[0]):
                size = args[1].block_size
                raise _unordered(f"with block_size={size} they are those of xla")
            return _backward_by_xla(arrays, *args, scale=scale)
        gradients = mosaic_gpu_vjp.backward(arrays, *args, **options)
        return gradients, captured_gradients(arrays, *args)

    def captured_gradients(arrays: Any, score_mod: Any, *args: Any) -> Any:
        if not derivatives.floating_captures(score_mod):
            return ()
        given = arrays, score_mod, *args
        static = {
            "scale": scale,
            "interpret": options["interpret"],
            "deterministic": ordered,
        }
        try:
            return mosaic_gpu_captured.gradients_of_captured(*given, **static)
        except Inseparable as reason:
            if ordered:
                raise _unordered(reason) from None
            return _captured_gradients(*given, scale=scale)

    forward = partial(mosaic_gpu_decoding.forward, splits=splits, **options)
    inference = partial(mosaic_gpu_decoding.inference, splits=splits, **options)
    return derivatives.Kernel(
        forward,
        backward,
        definition=partial(_define, scale=scale),
        multiplies_hidden=True,
        inference=inference if "has_aux" in rest else None,
    )


def _unordered(reason: Any) -> NotImplementedError:
    return NotImplementedError(
        "flex_attention: kernel_options['deterministic'] is True, but gradients of "
        f"what score_mod captured are summed in no order: {reason}.\nLeave it out, or "
        'ask XLA: jax.jit(..., compiler_options={"xla_gpu_deterministic_ops": True}).'
    )


def _triton(scale: float, **asked: int) -> derivatives.Kernel:
    """The kernels in Triton; gradients of what `score_mod` captured are `xla`'s."""
    from . import triton  # of an extra

    def backward(arrays: Any, *args: Any) -> Any:
        gradients = triton.backward(arrays, *args, scale=scale, asked=asked)
        return gradients, _captured_gradients(arrays, *args, scale=scale)

    forward = partial(triton.forward, scale=scale, asked=asked)
    return derivatives.Kernel(forward, backward, partial(_define, scale=scale))


def _captured_gradients(
    arrays: Any, score_mod: Any, *rest: Any, scale: float
) -> tuple[Array, ...]:
    if not derivatives.floating_captures(score_mod):
        return ()
    return _backward_by_xla(arrays, score_mod, *rest, scale=scale)[1]


def _backward_by_xla(
    arrays: Any, score_mod: Any, block_mask: Any, *rest: Any, scale: float
) -> Any:
    query, key, _ = arrays
    blocks = xla.layout(query, key, block_mask, scale=scale, splits=1)
    return xla.backward(blocks, arrays, score_mod, block_mask, *rest)


def _define(arrays: Any, score_mod: Any, block_mask: Any, *, scale: float) -> Any:
    mods = {"score_mod": score_mod, "block_mask": block_mask}
    return reference.attend(*arrays, **mods, scale=scale)


def _attend_xla(query: Array, key: Array, value: Array, **rest: Any) -> Any:
    """`xla` with the derivatives of a kernel; `rest` as for `reference.attend`."""
    score_mod, block_mask = rest.pop("score_mod"), rest.pop("block_mask")

    def blocks(query: Array, key: Array) -> tuple[int, int]:
        return xla.layout(query, key, None, **rest).blocks

    kernel = bucketed.in_buckets(_xla(**rest), blocks)
    return derivatives.attend(kernel, (query, key, value), score_mod, block_mask)


def _xla(**rest: Any) -> derivatives.Kernel:
    layout = partial(xla.layout, **rest)

    def forward(arrays: Any, score_mod: Any, block_mask: Any) -> Any:
        blocks = layout(*arrays[:2], block_mask)
        run = xla.forward if blocks.splits == 1 else decoding.forward
        return run(blocks, arrays, score_mod, block_mask)

    def backward(arrays: Any, score_mod: Any, block_mask: Any, *rest: Any) -> Any:
        blocks = layout(*arrays[:2], block_mask)
        return xla.backward(blocks, arrays, score_mod, block_mask, *rest)

    return derivatives.Kernel(forward, backward, partial(_define, scale=rest["scale"]))


BACKENDS = (
    Backend("reference", reference.attend, _anything, priority=0),
    Backend(
        "xla",
        _attend_xla,
        _anything,
        priority=1,
        options=("block_q", "block_kv", "splits"),
    ),
    # By name alone: nobody has measured it but on Hopper GPUs, where "mosaic_gpu" is
    # faster.
    Backend(
        "triton",
        _attend_triton,
        _refused_by_triton,
        priority=0,
        options=(*configs.OPTIONS, "warps", "bwd_warps"),
        prepare=_refined,
    ),
    Backend(
        "mosaic_gpu",
        _attend_mosaic_gpu,
        _refused_by_mosaic_gpu,
        priority=2,
        options=("interpret", "splits", *configs.FLAGS, *configs.OPTIONS),
        by_default=Backend(
            "mosaic_gpu",
            _attend_by_platform,
            _refused_unless_named,
            priority=2,
            prepare=_prepared_for_mosaic_gpu,
        ),
        prepare=_prepared_for_mosaic_gpu,
    ),
)
_MAKE_MASK = "Make one with px.create_block_mask(mask_mod, B, H, q_len, kv_len)."
_MAKE_REQUEST = "Make one with px.AuxRequest(lse=True), or max_scores=True."


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_aux: Any = None,
    implementation: str | None = None,
    kernel_options: Any = None,
) -> Any:
    r"""Scaled dot-product attention whose scores and mask you program.

    .. math::
        s_{ij} = \mathrm{score\_mod}(\mathrm{scale}\, q_i \cdot k_j,\, b, h, i, j),
        \qquad o_i = \sum_j \mathrm{softmax}_j(s_{ij})\, v_j

    over the keys `j` that the mask leaves to query `i`. The softmax runs in float32
    (float64 for float64 arrays). A query that sees no key gives output 0.

    Args:
        query: Queries, (B, T, H, D).
        key: Keys, (B, S, K, D), or (1, S, K, D) to share them among the batch.
        value: Values, (B, S, K, V), likewise; V may differ from D.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score` for scalars: the already
            scaled score, the query's batch and head index, and both positions. It may
            capture arrays; floating ones get gradients.
        block_mask: From `create_block_mask`, for this q_len and kv_len.
        scale: Factor of the products, a finite number; 1/sqrt(D) if None. A learned
            temperature belongs into `score_mod`.
        enable_gqa: Allow H to be a multiple of K; query head h uses key head h K // H.
        return_aux: Which extra results to return. Without it, the output alone.
        implementation: "reference" (the definition, quadratic memory), "xla" (blocks,
            linear memory), "mosaic_gpu" (fused kernels for Hopper GPUs, bfloat16 and
            float16) or "triton" (kernels in Triton for GPUs from Ampere on, also
            float32, of the extra "triton"; by name alone). None takes the fused kernels
            where there is one Hopper GPU and they take the arguments, with fewer than
            128 queries only if the query heads of a key head can share a tile; else
            "xla". A name never falls back.
        kernel_options: `splits`, parts the keys are cut into, which fewer than 128
            queries have several of on a GPU by default. For "xla" also: `block_q`,
            `block_kv`, queries and keys of a block when there is no block_mask. For
            "mosaic_gpu" also: `block_q` and `block_kv`, multiples of 64 that divide the
            mask's blocks, and `stages`, blocks of keys in shared memory at once, where
            keys are not split; `bwd_block_q`, `bwd_block_kv` and `bwd_stages` for the
            backward pass. By default a table found by measurement says; what registers
            or shared memory cannot hold becomes the next smaller. "triton" reads the
            same names, blocks being powers of two from 16 on, and `warps` and
            `bwd_warps`, which share a tile. For "mosaic_gpu" also `deterministic`:
            gradients of captured arrays are summed in one order where its kernels make
            them, if not in a loop or a branch of the mod; True refuses all others, and
            False lets XLA scatter what several scores share with atomic additions, in
            another order in each run. And `interpret`, 1 to run the kernels in JAX's
            interpreter, on any device, slowly. Its kernels wait for each other in XLA's
            threads, of which a CPU has one a core, and for 32 places for computations
            in flight: set the environment's PJRT_NPROC to 16 and JAX's option
            jax_cpu_enable_async_dispatch to False before its first computation, or they
            may wait forever.

    Returns:
        The output, (B, T, H, V), in the query's dtype; with `return_aux` the pair
        (output, AuxOutput).

    Raises:
        ValueError: If shapes, heads, mask or options do not fit.
        TypeError: If an argument is of the wrong kind, dtype or signature.
        NotImplementedError: If the named implementation refuses the arguments.

    Examples:
        >>> import jax, pliax as px
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
        >>> causal = px.create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8)
        >>> px.flex_attention(q, k, v, block_mask=causal).shape
        (1, 8, 2, 4)

    References:
        Dong et al., "FlexAttention: A programming model for generating optimized
        attention kernels", 2024.
    """
    query, key, value = as_arrays(query, key, value)
    check_flag("flex_attention", "enable_gqa", enable_gqa)
    check_arrays(query, key, value, enable_gqa=enable_gqa)
    check_instance("block_mask", block_mask, BlockMask, _MAKE_MASK)
    check_instance("return_aux", return_aux, AuxRequest, _MAKE_REQUEST)
    if block_mask is not None:
        check_block_mask(query, key, block_mask)
    dtype = softmax_dtype(query.dtype)
    scale = check_scale(scale, query.shape[-1], dtype)
    options = check_kernel_options(kernel_options, block_mask, implementation)
    arrays = query, key, value
    score_mod = close_score_mod(score_mod, dtype, varying_axes(*arrays))
    has_aux = return_aux is not None and (return_aux.lse or return_aux.max_scores)
    arguments = _Arguments(arrays, score_mod, block_mask, options, has_aux)
    backend = choose("flex_attention", BACKENDS, arguments, implementation)
    check_options("flex_attention", backend, options)
    prepared = backend.prepare(arguments)
    out, lse, maximum = _run_on_auto_axes(
        arrays,
        score_mod,
        prepared.block_mask,
        name=backend.name,
        is_named=implementation is not None,
        scale=scale,
        options=tuple(sorted(prepared.options.items())),
    )
    if return_aux is None:
        return out
    return out, AuxOutput(
        lse if return_aux.lse else None, maximum if return_aux.max_scores else None
    )


def _run_on_auto_axes(arrays: Any, *mods: Any, **static: Any) -> Any:
    """Under Explicit mesh axes the compiler partitions the loops, as the query lies."""
    sharding = jax.typeof(arrays[0]).sharding
    run = partial(_run, **static)
    if not sharding.mesh.explicit_axes:
        return run(arrays, *mods)
    batch, length, heads, _ = (*sharding.spec, *(4 - len(sharding.spec)) * (None,))
    per_query = NamedSharding(sharding.mesh, PartitionSpec(batch, length, heads))
    placed = (per_query, per_query, per_query)
    return jax.sharding.auto_axes(run, out_sharding=placed)(arrays, *mods)


@jax.jit(static_argnames=("name", "is_named", "scale", "options"))
def _run(
    arrays: tuple[Array, Array, Array],
    score_mod: Any,
    block_mask: BlockMask | None,
    *,
    name: str,
    is_named: bool,
    scale: float,
    options: tuple[tuple[str, int], ...],
) -> tuple[Array, Array, Array]:
    """One trace for all mods of one structure: they are arguments, not closures."""
    query, key, value = arrays
    (backend,) = (b for b in BACKENDS if b.name == name)
    chosen = backend if is_named else backend.by_default or backend
    return chosen.run(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        **dict(options),
    )
