# %% [markdown]
# # A gallery of masks and score modifications
#
#     uv run examples/03_attention_gallery.py --out out/gallery
#     uv run examples/03_attention_gallery.py --only causal document alibi
#
# Each mask of `px.kernels.masks` and each mod of `px.kernels.mods` is run by
# `px.flex_attention`, compared with the plain formula, and drawn.

# %%
"""Draw and run each mask of px.kernels.masks and each mod of px.kernels.mods."""

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib


matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import CenteredNorm, ListedColormap
from matplotlib.patches import Patch
from PIL import Image

import pliax as px
from pliax.kernels import masks, mods


# %% [markdown]
# ## 1. A mask is a function of four indices
#
# `mask_mod(b, h, q_idx, kv_idx)` is True where the query sees the key. What you write
# and what the library has combine freely. Lengths and ids are arrays, and therefore
# data: new contents compile nothing.


# %%
@dataclass(frozen=True)
class Mask:
    """A mask to draw: its function, and how many queries and keys."""

    mask_mod: Any
    q_len: int = 32
    kv_len: int = 32

    @property
    def block_size(self) -> int:
        """An eighth of the keys, so that all pictures have as many blocks."""
        return self.kv_len // 8

    @property
    def block_mask(self) -> px.BlockMask:
        """The mask, classified into blocks."""
        lengths = (self.q_len, self.kv_len)
        return px.create_block_mask(
            self.mask_mod, None, None, *lengths, block_size=self.block_size
        )


def first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Attention sinks: the first three tokens."""
    return kv_idx < 3


def all_masks() -> dict[str, Mask]:
    """The masks by the names of the functions that make them."""
    document = masks.document(lengths=jnp.asarray([10, 6, 12]), total_length=32)
    branches = jnp.asarray([9, 6, 7])
    sinks = masks.and_masks(masks.causal, first_keys)
    return {
        "noop_mask": Mask(masks.noop_mask),
        "causal": Mask(masks.causal),
        "sliding_window": Mask(masks.sliding_window(8)),
        "dilated": Mask(masks.dilated(4, 3)),
        "prefix_lm": Mask(masks.prefix_lm(10)),
        "global_and_window": Mask(masks.global_and_window(3, 8)),
        "padding": Mask(masks.padding(jnp.asarray([22]))),
        "document": Mask(document),
        "shared_prefix": Mask(
            masks.shared_prefix(8, lengths=branches, total_length=32)
        ),
        "block_diffusion": Mask(masks.block_diffusion(16, 4)),
        "neighborhood_2d": Mask(masks.neighborhood_2d((8, 8), (3, 3)), 64, 64),
        "neighborhood_3d": Mask(masks.neighborhood_3d((4, 4, 4), (3, 3, 3)), 64, 64),
        "and_masks": Mask(masks.and_masks(masks.causal, document)),
        "or_masks": Mask(masks.or_masks(masks.sliding_window(6), sinks)),
        "not_mask": Mask(masks.not_mask(masks.sliding_window((5, 5)))),
        "with_offset": Mask(masks.with_offset(masks.causal, 20), q_len=8),
    }


# %% [markdown]
# ## 2. A mod is a function of a score and four indices
#
# `score_mod(score, b, h, q_idx, kv_idx)` returns the new score. Tables, slopes and caps
# may be learned: floating arrays that it captures get gradients.


# %%
@dataclass(frozen=True)
class Mod:
    """A mod to draw: its function, a head, and how many queries and keys."""

    score_mod: Any
    head: int = 0
    q_len: int = 32
    kv_len: int = 32


def all_mods() -> dict[str, Mod]:
    """The mods by the names of the functions that make them."""
    table = jnp.linspace(-2.0, 2.0, 17)  # as if learned: of distances -8 to 8
    buckets = jnp.tile(jnp.linspace(0.0, -3.0, 8), 2)[:, None]  # keys before, after
    rates = jnp.asarray([0.1])
    capped = mods.compose(mods.distance_decay(rates), mods.soft_cap(2.0))
    return {
        "no_mod": Mod(None),
        "alibi": Mod(mods.alibi(8), head=2),
        "distance_decay": Mod(mods.distance_decay(rates)),
        "relative_bias": Mod(mods.relative_bias(table)),
        "t5_bias": Mod(mods.t5_bias(buckets, max_distance=32)),
        "soft_cap": Mod(mods.soft_cap(2.0)),
        "dropout": Mod(mods.dropout(px.Generator(0), 0.2)),
        "compose": Mod(capped),
        "mods_with_offset": Mod(mods.with_offset(mods.alibi(8), 20), head=2, q_len=8),
    }


SINK_LOGITS = (4.0,)


# %% [markdown]
# ## 3. Running them
#
# A mask runs on random arrays and is compared with the formula in float64. With the
# identity as values, the output of attention *is* its weights: so mods are drawn. Their
# queries and keys turn with the position: the score is 4 cos(2 pi (i - j) / 16).


# %%
def largest_error(mask: Mask) -> float:
    """Of attention under a mask, against the plain formula in float64."""
    lengths = (mask.q_len, mask.kv_len, mask.kv_len)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, (1, n, 1, 16))
        for key, n in zip(keys, lengths, strict=True)
    ]
    out = px.flex_attention(*arrays, block_mask=mask.block_mask)
    visible = np.asarray(px.create_mask(mask.mask_mod, None, None, *lengths[:2]))[0, 0]
    q, k, v = (np.asarray(x, np.float64)[0, :, 0] for x in arrays)
    exponentials = np.exp(q @ k.T / 4.0) * visible
    total = exponentials.sum(axis=1, keepdims=True)
    golden = exponentials @ v / np.where(total == 0.0, 1.0, total)
    return float(np.abs(np.asarray(out, np.float64)[0, :, 0] - golden).max())


def turning(length: int, heads: int) -> jax.Array:
    """Queries or keys (1, length, heads, 2) that turn once in 16 positions."""
    angle = jnp.arange(length, dtype=jnp.float32) * (2.0 * jnp.pi / 16.0)
    pairs = 2.0 * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return jnp.broadcast_to(pairs[None, :, None], (1, length, heads, 2))


def weights(mod: Mod, heads: int = 8, **options: Any) -> Any:
    """What attention returns of the identity: weights (1, q_len, heads, kv_len)."""
    identity = jnp.eye(mod.kv_len)[None, :, None]
    value = jnp.broadcast_to(identity, (1, mod.kv_len, heads, mod.kv_len))
    arrays = (turning(mod.q_len, heads), turning(mod.kv_len, heads), value)
    return px.flex_attention(*arrays, score_mod=mod.score_mod, scale=1.0, **options)


def scores(mod: Mod) -> tuple[np.ndarray, np.ndarray]:
    """The scores of a head before and after its mod; -inf where it drops one."""
    q, k = (turning(n, 1)[0, :, 0] for n in (mod.q_len, mod.kv_len))
    before = jnp.matmul(q, k.T, precision="highest")
    if mod.score_mod is None:
        return np.asarray(before), np.asarray(before)
    by_key = jax.vmap(mod.score_mod, (0, None, None, None, 0))
    by_query = jax.vmap(by_key, (0, None, None, 0, None))
    b, h = jnp.int32(0), jnp.int32(mod.head)
    i, j = (jnp.arange(n, dtype=jnp.int32) for n in before.shape)
    return np.asarray(before), np.asarray(by_query(before, b, h, i, j))


def sink_weights() -> tuple[np.ndarray, np.ndarray]:
    """Causal weights without a sink, and with a logit that takes its share."""
    block_mask = Mask(masks.causal).block_mask
    request = px.AuxRequest(lse=True)
    out, aux = weights(Mod(None), 1, block_mask=block_mask, return_aux=request)
    with_sinks = mods.sinks(out, aux.lse, jnp.asarray(SINK_LOGITS))
    return np.asarray(out)[0, :, 0], np.asarray(with_sinks)[0, :, 0]


# %% [markdown]
# ## 4. Drawing
#
# Blue scores are visible, those on orange are computed in vain, and white blocks cost
# nothing. The colours are those of `BlockMask.plot`, which readers with
# colour-blindness tell apart.

# %%
SKIPPED, HIDDEN, VISIBLE = range(3)
COLOURS = "#FFFFFF", "#F3C678", "#0072B2"
LABELS = (
    "hidden, in an empty block: skipped",
    "hidden, in a partial block: masked",
    "visible",
)
_DROPPED = "0.35"
_DPI = 120


def cells(mask: Mask) -> np.ndarray:
    """Each score of a mask as SKIPPED, HIDDEN or VISIBLE."""
    lengths = (mask.q_len, mask.kv_len)
    visible = np.asarray(px.create_mask(mask.mask_mod, None, None, *lengths))[0, 0]
    size = mask.block_size
    blocks = np.asarray(mask.block_mask.to_dense())[0, 0].astype(bool)
    computed = np.kron(blocks, np.ones((size, size), bool))
    assert not np.any(visible & ~computed)  # an empty block hides no visible score
    return np.where(visible, VISIBLE, np.where(computed, HIDDEN, SKIPPED))


def draw_mask(ax: Any, title: str, mask: Mask) -> None:
    """The scores of a mask, with lines between its blocks."""
    q_len, kv_len = mask.q_len, mask.kv_len
    ax.imshow(
        cells(mask),
        cmap=ListedColormap(COLOURS),
        vmin=SKIPPED,
        vmax=VISIBLE,
        interpolation="nearest",
        extent=(0, kv_len, q_len, 0),
    )
    ax.set_xticks(np.arange(0, kv_len + 1, mask.block_size), minor=True)
    ax.set_yticks(np.arange(0, q_len + 1, mask.block_size), minor=True)
    ax.grid(which="minor", color="0.45", linewidth=0.4)
    frame(ax, title, q_len, kv_len)


def frame(ax: Any, title: str, q_len: int, kv_len: int) -> None:
    """Title, axes and the first and last position."""
    ax.set_title(title, fontsize=9)
    ax.set_xlabel("key", fontsize=8, labelpad=-6)
    ax.set_ylabel("query", fontsize=8, labelpad=-6)
    for axis, n in ((ax.xaxis, kv_len), (ax.yaxis, q_len)):
        axis.set_ticks([0.5, n - 0.5], ["0", str(n - 1)])
    ax.tick_params(which="both", length=0, labelsize=7)


def heat(ax: Any, title: str, values: np.ndarray, bound: float | None) -> None:
    """A heat map with its colour bar: up to a bound, or with signs; -inf is grey."""
    finite = np.ma.masked_invalid(values)
    low, high = min(float(finite.min()), 0.0), max(float(finite.max()), 0.0)
    colours = matplotlib.colormaps["PuOr" if bound is None else "Blues"]
    colours = colours.with_extremes(bad=_DROPPED)
    signed = CenteredNorm(halfrange=max(-low, high, 1e-6))
    norm = signed if bound is None else plt.Normalize(0.0, bound)
    extent = (0, values.shape[1], values.shape[0], 0)
    image = ax.imshow(finite, cmap=colours, norm=norm, extent=extent)
    frame(ax, title, *values.shape)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.04)
    bar.ax.set_ylim(low, high if bound is None else bound)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_linewidth(0.4)


def pair_of(mod: Mod | None) -> tuple[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Titles and heat maps of a mod; None stands for sinks."""
    if mod is None:
        return ("weights without sinks", "weights with a sink"), sink_weights()
    before, after = scores(mod)
    shown = np.asarray(weights(mod))[0, :, mod.head]
    if mod.score_mod is None:
        return ("score", "weights"), (before, shown)
    return ("added to the score", "weights"), (after - before, shown)


def legend(figure: Any) -> None:
    """The three colours of masks, below all panels."""
    patches = [
        Patch(facecolor=colour, edgecolor="0.45", linewidth=0.4, label=label)
        for colour, label in zip(COLOURS, LABELS, strict=True)
    ]
    figure.legend(
        handles=patches[::-1],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )


def canvas(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure of panels, each of so many inches."""
    return plt.subplots(
        rows,
        columns,
        figsize=(columns * width, rows * height),
        layout="constrained",
        squeeze=False,
    )


def save(figure: Any, path: Path) -> None:
    """As a PNG of few colours on white, which reads on any page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=_DPI, facecolor="white")
    plt.close(figure)
    few = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


# %% [markdown]
# ## 5. The pictures
#
# One for each, a sheet of all masks, and one that shows what the kernel is told of a
# mask: which blocks to skip, and in which ones to ask.


# %%
def picture_masks(out: Path, shown: dict[str, Mask]) -> None:
    """A picture of each mask, and a line about it."""
    print(f"{'mask':18} {'visible':>8} {'skipped':>8}  largest error")
    for name, mask in shown.items():
        figure, axes = canvas(1, 1, 2.5, 2.5 if mask.q_len == mask.kv_len else 1.3)
        draw_mask(axes[0, 0], name, mask)
        save(figure, out / f"{name}.png")
        visible = 100.0 * np.mean(cells(mask) == VISIBLE)
        skipped = mask.block_mask.sparsity()
        error = largest_error(mask)
        print(f"{name:18} {visible:6.1f} % {skipped:6.1f} %  {error:.1e}")


def picture_mods(out: Path, shown: dict[str, Mod | None]) -> None:
    """Two heat maps of each mod."""
    print(f"{'mod':18} sum of the last query's weights")
    for name, mod in shown.items():
        titles, pair = pair_of(mod)
        square = pair[0].shape[0] == pair[0].shape[1]
        figure, axes = canvas(1, 2, 2.9, 2.5 if square else 1.3)
        most = 0.4 if mod is None else float(pair[1].max())
        bounds = (most if mod is None else None, most)
        for panel in zip(axes[0], titles, pair, bounds, strict=True):
            heat(*panel)
        save(figure, out / f"{name}.png")
        print(f"{name:18} {pair[1][-1].sum():.4f}")


def picture_sheet(out: Path, shown: dict[str, Mask]) -> None:
    """All square masks on one sheet."""
    square = [(name, mask) for name, mask in shown.items() if mask.q_len == mask.kv_len]
    rows = -(-len(square) // 5)
    figure, axes = canvas(rows, 5, 1.75, 1.85)
    for ax in axes.flat[len(square) :]:
        ax.set_visible(False)
    for ax, (name, mask) in zip(axes.flat, square, strict=False):
        draw_mask(ax, name, mask)
    legend(figure)
    save(figure, out / "masks.png")


def picture_kinds(out: Path, mask: Mask) -> None:
    """The scores of a mask, and its blocks as `BlockMask.plot` draws them."""
    figure, axes = canvas(1, 2, 3.6, 2.9)
    draw_mask(axes[0, 0], "scores", mask)
    mask.block_mask.plot(ax=axes[0, 1])
    axes[0, 1].set_title("blocks", fontsize=9)
    axes[0, 1].tick_params(labelsize=7)
    for label in (axes[0, 1].xaxis.label, axes[0, 1].yaxis.label):
        label.set_fontsize(8)
    save(figure, out / "kinds_of_blocks.png")


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gallery"))
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw and run all of them, or those that `--only` names."""
    every_mask, every_mod = all_masks(), {**all_mods(), "sinks": None}
    names = [*every_mask, *every_mod]
    options = parse(arguments, names)
    wanted = options.only or names
    options.out.mkdir(parents=True, exist_ok=True)
    shown = {name: mask for name, mask in every_mask.items() if name in wanted}
    picture_masks(options.out, shown)
    picture_mods(options.out, {n: mod for n, mod in every_mod.items() if n in wanted})
    if not options.only:
        picture_sheet(options.out, shown)
        picture_kinds(options.out, every_mask["and_masks"])
    print(f"pictures in {options.out}")


# %%
if __name__ == "__main__":
    main()
