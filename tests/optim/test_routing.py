import re
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from hypothesis import given, strategies as st

import pliax as px


MATRIX = jax.ShapeDtypeStruct((4, 6), jnp.float32)
ROLES = {
    "muon": """
        blocks/0/attention/query/kernel blocks/0/attention/value
        transformer/h/3/attn/c_attn/kernel Dense_0/kernel kernel w W1 layers/1/w1
        layers/1/w_in wq w_q Wqkv/weight in_proj_weight
        blocks/0/mlp/gate_up_proj/kernel attention/output/kernel blocks/0/out/kernel
        multihead_attention/q/kernel MultiHeadDotProductAttention_0/query/kernel
        multi_head_attention/o fc1/w mlp/c_fc/w linear/~/w
        model/layers/0/self_attn/o_proj/weight custom/kernel wi_0/kernel ffn/up
    """,
    "adamw": """
        Embed_0/embedding wte transformer/wpe/embedding tok_embeddings/weight
        embed/table model/embed_tokens/weight pos_embedding lm_head/kernel
        LMHead_0/kernel lmHead/w unembed classifier/kernel logits/kernel
        mlp_head/kernel output/kernel output params/output/kernel out/kernel
        output_layer/kernel value_head/head/kernel LayerNorm_0/scale blocks/ln_1/scale
        blocks/attention_norm/weight RMSNorm_0/weight q_norm/scale blocks/bias
        blocks/attention/query/bias b1 batch_stats/mean/scale
    """,
    "refused": """
        foo blocks/0/foo attention/heads/kernel attention_heads/kernel
        embedding_projection/kernel embed/proj/kernel lm_head/dense/kernel lora_b
        weight_ih q_proj/lora_a norm/linear/kernel mlp_norm_proj/kernel rope/freqs
        blocks/attention/head_0/query/kernel
    """,
}


def nested(path, leaf=MATRIX):
    for name in reversed(path.split("/")):
        leaf = {name: leaf}
    return leaf


def label(path, shape=MATRIX.shape, **kwargs):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.tree.leaves(px.optim.labels(nested(path, leaf), **kwargs))[0]


@pytest.mark.parametrize("expected", ["muon", "adamw"])
def test_roles_of_matrices(expected):
    found = {path: label(path) for path in ROLES[expected].split()}
    assert found == dict.fromkeys(found, expected)


@pytest.mark.parametrize("path", ROLES["refused"].split())
def test_what_has_no_clear_role_is_refused(path):
    with pytest.raises(ValueError, match=f"  {re.escape(path)} \\(4, 6\\): "):
        label(path)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("path", [*ROLES["muon"].split(), *ROLES["refused"].split()])
def test_scalars_and_vectors_belong_to_adamw(path, shape):
    assert label(path, shape) == "adamw"


@pytest.mark.parametrize("path", ["conv/kernel", "attention/query/kernel", "cls_token"])
def test_hidden_arrays_of_higher_rank_are_refused(path):
    with pytest.raises(ValueError, match=r'rules=\(\(r".*", "adamw"\),\)'):
        label(path, (3, 4, 5))


@pytest.mark.parametrize("path", ["pos_embedding", "blocks/bias", "lm_head/kernel"])
def test_other_arrays_of_higher_rank_belong_to_adamw(path):
    assert label(path, (3, 4, 5)) == "adamw"


def test_a_refusal_lists_every_path_and_a_rule_that_works():
    params = {"foo": MATRIX, "b.ar": {"baz": MATRIX}, "wq": MATRIX}
    with pytest.raises(ValueError) as caught:
        px.optim.labels(params)
    message = str(caught.value)
    assert "labels cannot place 2 parameter(s)" in message
    assert "foo (4, 6)" in message
    assert "b.ar/baz (4, 6)" in message
    assert 'rules=((r"b\\.ar/baz", "muon"),)' in message
    placed = px.optim.labels(params, rules=((r"b\.ar/baz", "muon"), ("foo", "adamw")))
    assert placed == {"foo": "adamw", "b.ar": {"baz": "muon"}, "wq": "muon"}


def test_the_first_rule_wins_and_precedes_the_roles():
    assert label("lm_head/kernel", rules=[("head", "muon"), ("h", "adamw")]) == "muon"
    assert label("wq", rules=[(re.compile("^w"), "adamw")]) == "adamw"
    assert label("blocks/ln/scale", (3,), rules=[("ln", "muon")]) == "muon"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("w", "sgd"), "has the label 'sgd'; it must be one of"),
        (("(", "muon"), "has an invalid regular expression"),
        ((3, "muon"), "has an invalid regular expression"),
        (("w", "muon", 1), "a rule is a pair"),
        ("wm", "a rule is a pair"),
    ],
)
def test_malformed_rules_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        px.optim.labels({"w": MATRIX}, rules=[rule])


@jax.tree_util.register_dataclass
@dataclass
class Attention:
    query: object
    key: object
    value: object


Pair = namedtuple("Pair", ["wte", "up"])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([{"wq": MATRIX}, MATRIX.shape], None),
        ({"wq": [MATRIX, MATRIX]}, {"wq": ["muon", "muon"]}),
        (Pair(MATRIX, MATRIX), Pair("adamw", "muon")),
        (Attention(MATRIX, MATRIX, MATRIX), Attention("muon", "muon", "muon")),
        ({"attn": {"value": MATRIX}}, {"attn": {"value": "muon"}}),
        (freeze({"head": {"w": MATRIX}}), freeze({"head": {"w": "adamw"}})),
        ({"wq": None, "wk": MATRIX}, {"wq": None, "wk": "muon"}),
        (({"b": MATRIX}, {"w": MATRIX}), ({"b": "adamw"}, {"w": "muon"})),
        ({}, {}),
    ],
)
def test_containers(params, expected):
    if expected is None:
        params, expected = params[0], {"wq": "muon"}
    found = px.optim.labels(params)
    assert found == expected
    assert jax.tree.structure(found) == jax.tree.structure(params)


def test_nameless_matrices_are_refused():
    for params in (MATRIX, [MATRIX], ({"0": MATRIX},)):
        with pytest.raises(ValueError, match="it has no name"):
            px.optim.labels(params)


class Block(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8)(tokens)
        x = x + nn.Dense(8)(nn.LayerNorm()(x))
        return nn.Dense(11, name="lm_head")(x)


def test_linen_parameters():
    tokens = jnp.zeros((2, 3), jnp.int32)
    variables = jax.eval_shape(Block().init, jax.random.key(0), tokens)
    found = px.optim.labels(variables)["params"]
    assert found == {
        "Embed_0": {"embedding": "adamw"},
        "LayerNorm_0": {"scale": "adamw", "bias": "adamw"},
        "Dense_0": {"kernel": "muon", "bias": "adamw"},
        "lm_head": {"kernel": "adamw", "bias": "adamw"},
    }
    assert isinstance(px.optim.labels(freeze(variables)), FrozenDict)


def test_linen_boxes_are_not_names():
    boxed = {"up": nn.Partitioned(jnp.ones((2, 2)), names=("x", None))}
    assert jax.tree.leaves(px.optim.labels(boxed)) == ["muon"]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.value = nnx.Linear(8, 8, rngs=rngs)
        self.lm_head = nnx.Linear(8, 11, rngs=rngs)


@pytest.mark.usefixtures("standard_promotion")
def test_nnx_state_routes_a_partition():
    params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    found = px.optim.labels(params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    flat = jax.tree_util.tree_leaves_with_path(found)
    muon = [jax.tree_util.keystr(path) for path, label in flat if label == "muon"]
    assert muon == [
        "['blocks'][0]['kernel'].value",
        "['blocks'][1]['kernel'].value",
        "['value']['kernel'].value",
    ]
    parts: Any = {"muon": px.optim.muon(0.02), "adamw": optax.adamw(1e-3)}
    tx = optax.partition(parts, px.optim.labels)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@given(st.lists(st.sampled_from("".join(ROLES.values()).split()), max_size=4))
def test_every_leaf_is_labelled_or_listed(paths):
    params = {str(i): nested(path) for i, path in enumerate(paths)}
    refused = set()
    for i, path in enumerate(paths):
        try:
            label(f"{i}/{path}")
        except ValueError:
            refused.add(f"{i}/{path}")
    if not refused:
        assert set(jax.tree.leaves(px.optim.labels(params))) <= {"muon", "adamw"}
        return
    with pytest.raises(ValueError) as caught:
        px.optim.labels(params)
    listed = re.findall(r"^  (\S+) \(4, 6\)", str(caught.value), re.MULTILINE)
    assert set(listed) == refused
