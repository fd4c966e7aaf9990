"""Laws of a mod in two parts: together, on any tile, they are the mod."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, MODS, B, H, gaussian

from pliax.core.jaxprs import close
from pliax.kernels.attention.separation import (
    MASK_MOD,
    SCORE_MOD,
    Inseparable,
    compute_outside,
    separate,
)
from pliax.kernels.attention.tile_evaluation import Space, compute_inside


T, S = 37, 45
M, N = 8, 16
TILES = [(0, 0, "q"), (24, 16, "q"), (8, 24, "k")]
SIZES = {"b": B, "h": H, "q": T, "k": S}


def closed(mod, roles):
    score, index = (
        jax.ShapeDtypeStruct((), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return close(mod, *(score if r == "s" else index for r in roles))


def on_a_tile(separated, arrays, place, scores):
    """The part inside, with arrays of NumPy's shapes in place of a kernel's."""
    b, h, q0, k0, rows = place
    shapes = {"q": (M, 1), "k": (1, N)}
    if rows == "k":
        shapes = {"q": (1, M), "k": (N, 1)}
    tile = (M, N) if rows == "q" else (N, M)
    given = {
        "s": scores if rows == "q" else scores.T,
        "b": jnp.int32(b),
        "h": jnp.int32(h),
    }
    for role, first, n in (("q", q0, M), ("k", k0, N)):
        given[role] = jnp.arange(first, first + n, dtype=jnp.int32).reshape(
            shapes[role]
        )

    def of_tile(number):
        item, x = separated.hoisted[number], arrays[number]
        for axis in item.axes:
            if axis in "bh":
                x = x[{"b": b, "h": h}[axis]]
            elif axis == "q":
                x = x[q0 : q0 + M].reshape(shapes["q"])
            else:
                x = x[k0 : k0 + N].reshape(shapes["k"])
        return x.reshape(()) if x.size == 1 and not set(item.axes) & {"q", "k"} else x

    def look_up(number, indices):
        x = arrays[number]
        for axis in separated.hoisted[number].axes:
            x = x[{"b": b, "h": h}[axis]]
        return x[tuple(indices)]

    space = Space(
        rows, {k: n - 1 for k, n in SIZES.items()}, given.__getitem__, of_tile, look_up,
        lambda x, _, to: jnp.broadcast_to(x, tile) if to == "tile" else x,
    )  # fmt: skip
    (found,) = compute_inside(separated, space)
    return found if rows == "q" else found.T


def assert_parts_are_the_mod(mod, roles, close_to):
    function = closed(mod, roles)
    separated = separate(function, roles)
    arrays = compute_outside(separated, function.captured, SIZES)
    scores = gaussian(0, (M, N)) * 3
    for q0, k0, rows in TILES:
        for b, h in ((0, 0), (B - 1, H - 1)):
            found = on_a_tile(separated, arrays, (b, h, q0, k0, rows), scores)
            given = {
                "s": scores, "b": jnp.full((M, N), b), "h": jnp.full((M, N), h),
                "q": jnp.broadcast_to(jnp.arange(q0, q0 + M)[:, None], (M, N)),
                "k": jnp.broadcast_to(jnp.arange(k0, k0 + N), (M, N)),
            }  # fmt: skip
            wanted = jax.vmap(jax.vmap(function))(*(given[r] for r in roles))
            close_to(np.asarray(found), np.asarray(wanted))


def nearly(found, wanted):
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


# A kernel has arithmetic of float32, int32 and bool scalars: no loops, no branches, no
# vectors and no other integers for each score.
LOOPS = {"switch", "fori_loop", "scan", "loop"}
VECTORS = {"embedded", "logsumexp_rows", "reduced_rows"}
BYTES = {"casts", "uint8_table", "bits", "table_of_rank_4"}
REFUSED = LOOPS | VECTORS | BYTES


def hold(case, mod, roles, close_to):
    if case.name in REFUSED:
        with pytest.raises(Inseparable, match="for each score"):
            separate(closed(mod, roles), roles)
    else:
        assert_parts_are_the_mod(mod, roles, close_to)


@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in MODS if x.name != "none"], ids=str)
def test_the_parts_of_a_score_mod_are_the_mod(case):
    shapes = enumerate(case.floats(T, S))
    floats = (gaussian(n + 3, x, case.dtype or jnp.float32) for n, x in shapes)
    hold(case, case.make(*floats, *case.others(T, S)), SCORE_MOD, nearly)


@pytest.mark.parametrize(
    "case", [x for x in MASKS if x.make and not x.lengths], ids=str
)
def test_the_parts_of_a_mask_are_the_mask(case):
    mask = case.make(*case.arrays(T, S))
    hold(case, mask, MASK_MOD, np.testing.assert_array_equal)
