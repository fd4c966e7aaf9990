"""The inventory of padding programs is broad, named truly, and runs in plain JAX."""

import importlib
import inspect
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transforms.programs import (
    MODULES,
    Argument,
    Program,
    choose_sizes,
    evaluate,
    functions_named,
    inventory,
    letters,
    make_arguments,
)


PROGRAMS = inventory()
SMALL = (range(1, 20),)
DIFFERENT = (
    (7, 8, 12, 3, 2),
    (11, 5, 8, 4, 16),
    (5, 13, 9, 8, 4),
    (8, 3, 6),
    (3, 2, 4),
)

# Those that are no function of arrays with symbolic sizes, or that cannot be tested.
_ABOUT_TYPES = "speaks of dtypes or Python objects, not of arrays"
_INPUT_OUTPUT = "reads or writes a file, a buffer or text"
_ABOUT_SHAPES = "a helper that computes shapes or dimension numbers"
_ON_A_MESH = "needs a mesh or shard_map"
_STRICT = "fails under strict dtype promotion (jax 0.12)"
EXCLUDED = {
    "jnp": {
        "trim_zeros": "the size of the result depends on the data",
        "einsum_path": "returns a plan, not an array",
        "iterable": _ABOUT_TYPES,
        **dict.fromkeys(
            ("can_cast", "isdtype", "isscalar", "issubdtype"), _ABOUT_TYPES
        ),
        **dict.fromkeys(("promote_types", "result_type"), _ABOUT_TYPES),
        **dict.fromkeys(("array_repr", "array_str"), _INPUT_OUTPUT),
        **dict.fromkeys(("frombuffer", "fromfile", "fromiter"), _INPUT_OUTPUT),
        **dict.fromkeys(("fromstring", "from_dlpack", "load"), _INPUT_OUTPUT),
        **dict.fromkeys(("save", "savez"), _INPUT_OUTPUT),
        **dict.fromkeys(("get_printoptions", "set_printoptions"), _INPUT_OUTPUT),
        "printoptions": _INPUT_OUTPUT,
    },
    "lax": {
        **dict.fromkeys(("after_all", "create_token"), "tokens, not arrays"),
        **dict.fromkeys(("dtype", "DotDimensionNumbers"), _ABOUT_TYPES),
        **dict.fromkeys(("conv_dimension_numbers", "padtype_to_pads"), _ABOUT_SHAPES),
        "conv_general_permutations": _ABOUT_SHAPES,
        **dict.fromkeys(("conv_general_shape_tuple", "shape_as_value"), _ABOUT_SHAPES),
        **dict.fromkeys(
            ("conv_shape_tuple", "conv_transpose_shape_tuple"), _ABOUT_SHAPES
        ),
        "reduce_window_shape_tuple": _ABOUT_SHAPES,
        **dict.fromkeys(("pbroadcast", "pcast", "psend", "precv"), _ON_A_MESH),
        **dict.fromkeys(("psum_scatter_start", "ragged_all_to_all"), _ON_A_MESH),
        "with_sharding_constraint": _ON_A_MESH,
        "rng_uniform": "its numbers depend on the backend's hidden state",
    },
    "nn": {"get_scaled_dot_general_config": _ABOUT_TYPES},
    "random": dict.fromkeys(("Key", "key_dtype"), _ABOUT_TYPES),
    "special": {
        "hyp1f1": _STRICT,
        "sph_harm_y": _STRICT,
    },
    "scipy.linalg": {"hadamard": "only powers of two are sizes"},
}
HAS_NAN = ("NaNs in the data",)


def listing(module):
    """The public functions of a module: no classes, no primitives."""
    return {
        name
        for name, value in inspect.getmembers(importlib.import_module(module))
        if callable(value)
        and not inspect.isclass(value)
        and not name.startswith("_")
        and not name.endswith("_p")
    }


THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def sample(programs, every):
    """One program in ``every``; all of them where the laws are run thoroughly."""
    return programs if THOROUGH else programs[every // 2 :: every]


def floats(tree):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree) if not is_key(x)]
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_names_are_unique():
    counts = Counter(program.name for program in PROGRAMS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_inventory_is_broad():
    assert len(PROGRAMS) >= 250


def test_every_program_has_a_symbolic_size():
    assert [p.name for p in PROGRAMS if not letters(p)] == []


@pytest.mark.parametrize("prefix", list(MODULES))
def test_each_public_function_is_in_a_program_or_excluded(prefix):
    named = {n for p in PROGRAMS for m, n in functions_named(p.name) if m == prefix}
    excluded = EXCLUDED.get(prefix, {})
    assert listing(MODULES[prefix]) - named - set(excluded) == set()
    assert named & set(excluded) == set()


@pytest.mark.slow
@pytest.mark.parametrize("program", sample(PROGRAMS, every=25), ids=repr)
@pytest.mark.parametrize("candidates", [SMALL, DIFFERENT], ids=["small", "different"])
def test_it_runs_in_plain_jax(program, candidates):
    sizes = choose_sizes(program, *candidates)
    result = jax.jit(program.function)(*make_arguments(program, sizes, seed=0))
    finite = not any(np.isnan(x).any() for x in floats(result))
    assert finite or any(text in program.name for text in HAS_NAN)


def test_arguments_have_the_declared_shapes_and_values():
    for program in PROGRAMS:
        sizes = choose_sizes(program, *DIFFERENT)
        for a, x in zip(
            program.arguments, make_arguments(program, sizes, 1), strict=True
        ):
            assert a.values == "key" or a.dtype == x.dtype.name
            assert len(x.shape) == len([part for part in a.shape.split(",") if part])
            if a.values.startswith("index:"):
                assert 0 <= x.min() <= x.max() < evaluate(a.values[6:], sizes)


def test_dyadic_floats_are_small_multiples_of_an_eighth():
    for program in PROGRAMS:
        sizes = choose_sizes(program, *DIFFERENT)
        for x in floats(make_arguments(program, sizes, 2, dyadic=True)):
            scaled = 8.0 * x.astype(np.complex128)
            assert (scaled == np.round(scaled)).all()
            assert np.abs(scaled).max() < 2**12


def test_one_seed_draws_the_same_arrays():
    program = Program("pair", jnp.add, (Argument("b, t"), Argument("2*b, 3")))
    draws = [make_arguments(program, {"b": 3, "t": 5}, seed) for seed in (4, 4, 5)]
    assert draws[0][0].tobytes() == draws[1][0].tobytes() != draws[2][0].tobytes()
    assert draws[0][1].shape == (6, 3)


def test_sizes_satisfy_the_assumptions():
    program = Program("few", jnp.sum, (Argument("b, t"),), ("t % 4 == 0", "t >= b"))
    assert choose_sizes(program, (6,), range(1, 20)) == {"b": 6, "t": 8}
    with pytest.raises(ValueError, match="few: no candidate sizes satisfy"):
        choose_sizes(program, (6,), range(1, 4))
