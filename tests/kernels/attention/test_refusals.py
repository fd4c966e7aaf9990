"""Every wrong argument is refused with what was found and what to do."""

import functools

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np
import pytest
from helpers import normal

import pliax as px
from pliax.core.jaxprs import close


T, H = 16, 4
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def causal(b, h, q, k):
    return q >= k


def arrays():
    return tuple(normal(n, (2, T, H, 8)) for n in range(3))


def attend(**arguments):
    return px.flex_attention(*arrays(), **arguments)


def make(mask_mod=causal, B=None, H=None, q_len=T, kv_len=T, **options):
    return px.create_block_mask(mask_mod, B, H, q_len, kv_len, **options)


def keyword_only(s, b, h, i, j, *, slope):
    return s * slope


def branching(s, b, h, i, j):
    return s if i > j else -s


MASK = "px.create_block_mask"
PARAMETERS = r"score_mod\(score, b, h, q_idx, kv_idx\)"

ATTENTION = {
    "bool mask": (TypeError, rf"NumPy array bool\[4, 4\]\.\n.*{MASK}",
                  {"block_mask": np.ones((4, 4), bool)}),
    "function as mask": (TypeError, rf"must be a BlockMask or None.*\n.*{MASK}",
                         {"block_mask": causal}),
    "aux True": (TypeError, r"return_aux.*found bool True\.\n.*px.AuxRequest\(lse=True",
                 {"return_aux": True}),
    "aux class": (TypeError, "an AuxRequest or None, found the class AuxRequest",
                  {"return_aux": px.AuxRequest}),
    "options list": (TypeError, "must be a dict.*\nPass", {"kernel_options": [64]}),
    "options keys": (TypeError, "must be a dict.*\nPass", {"kernel_options": {1: 64}}),
    "option bool": (TypeError, r"\['block_q'\] must be an integer, found bool True",
                    {"kernel_options": {"block_q": True}}),
    "option misspelt": (TypeError, r"found bool False\..*\n.*Options .* determin",
                        {"kernel_options": {"determinstic": False}}),
    "option float": (TypeError, "found float 64.0",
                     {"kernel_options": {"block_q": 64.0}}),
    "option flag": (TypeError, "'deterministic'.* must be True or False, found int 1",
                    {"kernel_options": {"deterministic": 1}}),
    "option zero": (ValueError, "at least 1, found {'block_q': 0}.\nPass",
                    {"kernel_options": {"block_q": 0}}),
    "scale array": (TypeError, r"the array f32\[\]\.\nFor a learned temperature",
                    {"scale": jnp.float32(0.5)}),
    "scale numpy array": (TypeError, "learned temperature", {"scale": np.ones(())}),
    "scale complex": (TypeError, "real number, found complex", {"scale": 1j}),
    "scale text": (TypeError, "real number, found str", {"scale": "0.5"}),
    "scale bool": (TypeError, "real number, found bool", {"scale": True}),
    "scale nan": (ValueError, "finite in float32, found nan", {"scale": float("nan")}),
    "scale inf": (ValueError, "finite in float32", {"scale": -np.float32(np.inf)}),
    "scale 1e300": (ValueError, "finite in float32", {"scale": 1e300}),
    "mod number": (TypeError, f"score_mod must be a function {PARAMETERS}, found int 3",
                   {"score_mod": 3}),
    "mod arity": (TypeError, f"expected 5 positional parameters, {PARAMETERS}, got 4",
                  {"score_mod": causal}),
    "mod defaults": (TypeError, "expected 5 .*got 3",
                     {"score_mod": lambda s, b, h, i=0: s}),
    "mod keywords": (TypeError, r"keyword-only parameters \['slope'\]\.\n.*partial",
                     {"score_mod": keyword_only}),
    "mod traced": (TypeError, r"traced for \(f32\[\], i32\[\].*got one for \(i32\[\],",
                   {"score_mod": close(causal, *[INDEX] * 4)}),
    "score shape": (TypeError, r"must return one float32\[\].*it returned f32\[3\]",
                    {"score_mod": lambda s, b, h, i, j: s * jnp.ones(3)}),
    "score dtype": (TypeError, r"it returned i32\[\]\.\nMods are written for one score",
                    {"score_mod": lambda s, b, h, i, j: i - j}),
    "score narrow": (TypeError, r"must return one float32\[\].*it returned bf16\[\]",
                     {"score_mod": lambda s, b, h, i, j: s.astype(jnp.bfloat16)}),
    "score nothing": (TypeError, r"score_mod must return one array; it returned None.\nRet",
                      {"score_mod": lambda s, b, h, i, j: None}),
    "gqa text": (TypeError, "enable_gqa must be True or False, found str 'yes'",
                 {"enable_gqa": "yes"}),
    "integer key": (TypeError, "must be .*'float16'.*key i32.*\nCast them",
                    {"key": jnp.ones((2, T, H, 8), jnp.int32)}),
    "8 bits beside float32": (TypeError, "float16 or bfloat16 query only.*\nCast the q",
                              {"key": jnp.ones((2, T, H, 8), jnp.float8_e5m2)}),
    "two kinds of 8 bits": (TypeError, "one dtype.*\nCast them to one",
                            {"query": jnp.ones((2, T, H, 8), jnp.bfloat16),
                             "key": jnp.ones((2, T, H, 8), jnp.float8_e5m2),
                             "value": jnp.ones((2, T, H, 8), jnp.float8_e4m3fn)}),
    "query of 8 bits": (TypeError, "query only", dict.fromkeys(
                        ("query", "key", "value"), jnp.ones((2, T, H, 8), jnp.float8_e5m2))),
    "no keys": (ValueError, r"key has a dimension of length 0 .*\nEvery length must be",
                {"key": jnp.ones((2, 0, H, 8)), "value": jnp.ones((2, 0, H, 8))}),
    "longer mask": (ValueError, r"\(1, 1, 19, 13\).*have \(2, 4, 16, 16\)\.\nPass "
                    r"block_mask\.adjust\(16, 16\)",
                    {"block_mask": px.create_block_mask(causal, None, None, 19, 13)}),
    "list of lists": (TypeError, "query must be an array, found list", {"query": [1.0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_flex_attention_refuses(name):
    kind, text, changes = ATTENTION[name]
    query, key, value = arrays()
    with pytest.raises(kind, match=text):
        px.flex_attention(**{"query": query, "key": key, "value": value, **changes})


MASKS = {
    "mod number": (TypeError, r"mask_mod must be a function mask_mod\(b, h, q_idx, kv_i",
                   {"mask_mod": np.ones((T, T), bool)}),
    "mod arity": (TypeError, r"mask_mod: expected 4 positional parameters, mask_mod\(b, "
                  r"h, q_idx, kv_idx\), got 5",
                  {"mask_mod": lambda s, b, h, q, k: q >= k}),
    "mask shape": (TypeError, r"one bool\[\] .*it returned bool\[2\]",
                   {"mask_mod": lambda b, h, q, k: jnp.stack([q >= k, q < k])}),
    "mask dtype": (TypeError, r"one bool\[\] .*it returned i32\[\]",
                   {"mask_mod": lambda b, h, q, k: q - k}),
    "mod traced": (TypeError, r"mask_mod: expected a function traced for \(i32",
                   {"mask_mod": close(lambda q, k: q >= k, INDEX, INDEX)}),
    "block bool": (TypeError, "block_size must be an integer, found bool True.\nPass one",
                   {"block_size": True}),
    "block float": (TypeError, "found float 64.0", {"block_size": (64, 64.0)}),
    "block text": (TypeError, "found str", {"block_size": "64"}),
    "block None": (TypeError, "found NoneType", {"block_size": None}),
    "block three": (ValueError, r"a pair of them, found \(8, 8, 8\)\.\nPass one block",
                    {"block_size": (8, 8, 8)}),
    "block zero": (ValueError, r"at least 1, found \[8, 0\]\.\nPass one block_size",
                   {"block_size": [8, 0]}),
    "length float": (TypeError, "q_len must be an integer, found float 16.0",
                     {"q_len": 16.0}),
    "length zero": (ValueError, "at least 1, found {'kv_len': 0}", {"kv_len": 0}),
    "batch bool": (TypeError, "B must be an integer, found bool", {"B": True}),
    "flag": (TypeError, "separate_full_blocks must be True or False, found int 1",
             {"separate_full_blocks": 1}),
    "q_len zero": (ValueError, r"\{'q_len': 0\}.\nPass the lengths of the query",
                    {"q_len": 0}),
    "heads zero": (ValueError, "found {'H': 0}.\nPass B=None or H=None", {"H": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_create_block_mask_refuses(name):
    kind, text, changes = MASKS[name]
    with pytest.raises(kind, match=text):
        make(**changes)


def test_traced_numbers_are_refused():
    with pytest.raises(
        TypeError, match=r"q_len .*traced value i32\[\]\.\nSizes are st"
    ):
        jax.jit(lambda n: make(q_len=n))(T)
    with pytest.raises(TypeError, match=r"scale must be .*\nFor a learned temperature"):
        jax.jit(lambda scale: attend(scale=scale))(0.5)


def test_a_mask_and_kernel_options_exclude_each_other():
    with pytest.raises(ValueError, match=r"whose block_size \(8, 8\) is used.\nLeave"):
        attend(block_mask=make(block_size=8), kernel_options={"block_q": 8})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"block_q": 96},
            r"\['block_q'\] must be a multiple of 64 .*found 96.\nPass 64",
        ),
        ({"bwd_block_kv": 8}, r"\['bwd_block_kv'\] must be .*found 8.\nPass 64, or"),
        (
            {"block_kv": 256},
            r"must divide the keys .*\(64, 128\), found 256.\n.* of 128",
        ),
        ({"bwd_block_q": 128}, r"must divide the queries .*found 128.\n.* of 64"),
        ({"stages": 0}, r"at least 1, found {'stages': 0}"),
        ({"block_m": 64}, r"\['block_m'\] are unknown to .*bwd_block_kv"),
    ],
)
def test_sizes_that_the_fused_kernels_cannot_have_are_refused(options, text):
    q = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    mask = px.create_block_mask(causal, None, None, 128, 128, block_size=(64, 128))
    with pytest.raises(ValueError, match=text):
        px.flex_attention(
            q, q, q, block_mask=mask, implementation="mosaic_gpu",
            kernel_options=options | {"interpret": 1},
        )  # fmt: skip


def test_a_stack_of_masks_is_refused():
    masks = jax.tree.map(lambda x: jnp.stack([x, x]), make())
    with pytest.raises(ValueError, match=r"i32\[2,1,1,1\]: a stack of masks.\nMap"):
        attend(block_mask=masks)


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (
            lambda b, h, q, k: q >= k + b,
            "block_mask's mask_mod reads b, but the mask was made with B=None for a "
            "batch of 2.\nPass B=2 to create_block_mask.",
        ),
        (
            lambda b, h, q, k: q >= k * (h + 1),
            "reads h, but the mask was made with H=None for 4 heads.\nPass H=4 to",
        ),
    ],
)
def test_a_shared_mask_that_reads_what_it_is_shared_over_is_refused(mask_mod, text):
    with pytest.raises(ValueError, match=text):
        attend(block_mask=make(mask_mod))
    assert attend(block_mask=make(mask_mod, 2, 4)).shape == (2, T, H, 8)


def test_a_shared_mask_that_reads_positions_only_is_taken():
    assert attend(block_mask=make()).shape == (2, T, H, 8)


@pytest.mark.parametrize(
    ("score_mod", "kind", "text"),
    [
        (branching, jax.errors.TracerBoolConversionError, "use &, | and jnp.where"),
        (
            lambda s, b, h, i, j: s + (i - j),
            jax.dtypes.TypePromotionError,
            "q_idx.astype(score.dtype)",
        ),
        (
            lambda s, b, h, i, j: s * np.ones(T, np.float32)[j],
            jax.errors.TracerArrayConversionError,
            "capture jnp.asarray(array)",
        ),
        (
            lambda s, b, h, i, j: sum(s for _ in range(i)),
            jax.errors.TracerIntegerConversionError,
            "static sizes",
        ),
        (
            lambda s, b, h, i, j: s * float(h),
            jax.errors.ConcretizationTypeError,
            "x.astype(dtype) instead of float(x)",
        ),
    ],
)
def test_errors_inside_a_mod_say_how_mods_are_written(score_mod, kind, text):
    with pytest.raises(kind) as raised:
        attend(score_mod=score_mod)
    assert text in raised.value.__notes__[-1]


def written(ref):
    """Mods with side effects, or hidden inputs."""

    def writes(s, b, h, i, j):
        ref[0] = s
        return s

    def within(s, b, h, i, j):
        local = jax.new_ref(s)
        local[...] = local[...] * 2
        return local[...]

    def counts(s, b, h, i, j):
        jax.ref.addupdate(ref, i, s)
        return s

    def jitted(s, b, h, i, j):
        return jax.jit(lambda x: x + ref[0])(s)

    def looped(s, b, h, i, j):
        return jax.lax.fori_loop(0, 3, lambda n, x: x + ref[n], s)

    return [writes, lambda s, b, h, i, j: s + ref[j], within, counts, jitted, looped]


@pytest.mark.parametrize("number", range(6))
def test_a_mod_that_reads_or_writes_a_ref_is_refused(number):
    score_mod = written(jax.new_ref(jnp.zeros(T)))[number]
    text = r"score_mod must not read or write a Ref, found Ref.*\n.*capture the array"
    with pytest.raises(TypeError, match=text):
        attend(score_mod=score_mod)


def test_a_mask_that_reads_a_ref_is_refused():
    ref = jax.new_ref(jnp.zeros(T, bool))
    with pytest.raises(TypeError, match="mask_mod must not read or write a Ref"):
        make(lambda b, h, i, j: ref[j])
    array = ref[...]
    assert make(lambda b, h, i, j: array[j]).sparsity() == 100.0


def test_every_callable_of_the_right_arity_is_taken():
    expected = attend(score_mod=lambda s, b, h, i, j: s * 2)
    score = jax.ShapeDtypeStruct((), jnp.float32)
    mods = [
        lambda s, b, h, i, j=0: s * 2,
        lambda s, *rest: s * 2,
        lambda s, b, h, i, j, factor=2: s * factor,
        functools.partial(keyword_only, slope=2),
        close(lambda s, b, h, i, j: s * 2, score, *[INDEX] * 4),
    ]
    for mod in mods:
        np.testing.assert_array_equal(attend(score_mod=mod), expected)


@pytest.mark.parametrize("scale", [1, 0.5, np.float32(0.5), np.int64(2), -1.0])
def test_every_real_number_is_a_scale(scale):
    expected = attend(scale=float(scale))
    np.testing.assert_array_equal(attend(scale=scale), expected)


@pytest.mark.parametrize("size", [8, np.int64(8), [8, 8], (np.int32(8), 8)])
def test_block_sizes_and_lengths_are_whatever_has_an_index(size):
    mask = px.create_block_mask(
        causal, np.int32(2), None, np.int64(T), T, block_size=size
    )
    assert mask.block_size == (8, 8)
    assert mask.shape == (2, 1, T, T)
    assert all(type(n) is int for n in (*mask.block_size, *mask.shape))
    assert jax.tree.structure(mask) == jax.tree.structure(make(B=2, block_size=8))


def test_split_keys_have_no_blocks_of_the_users():
    q = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    options = {"interpret": 1, "splits": 2, "block_kv": 64}
    with pytest.raises(NotImplementedError, match=r"chooses \['block_kv'\] itself"):
        px.flex_attention(q, q, q, implementation="mosaic_gpu", kernel_options=options)
