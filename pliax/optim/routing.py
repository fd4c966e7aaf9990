"""Which optimizer serves which parameter: the hidden matrices Muon, the rest AdamW.

The role of a parameter is read from its path, never from its rank alone: an
embedding is a matrix too. Names are split into words (``lm_head``, ``LmHead`` and
``lm-head_0`` are the words *lm head*), each word is looked up in the tables below,
and a path whose words disagree or say nothing is refused rather than guessed.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, keystr


LABELS = ("muon", "adamw")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that give a name its role, wherever the name stands in the path. Digits are
# dropped before the look-up: wq, w1, norm2, blocks_0.
_ROLES = {
    "embedding": _words(
        "embed embeds embedder embedding embeddings emb embs wte wpe posemb posembed "
        "vocab vocabulary codebook pos position positions positional"
    ),
    "head": _words(
        "head heads unembed unembedding logit logits classifier classification "
        "readout prediction predictions score"
    ),
    "norm": _words(
        "norm norms ln layernorm rmsnorm batchnorm groupnorm bn gn scale gamma beta "
        "batchstats stats"
    ),
    "hidden": _words(
        "proj projection query key value qkv kv gate up down fc linear dense mlp ffn "
        "feedforward attn attention multihead "
        "wq wk wv wo wi wqkv wkv wgate wup wdown"
    ),
}
# Names with a role only as a whole: single letters, and heads of two hidden words.
_WHOLE_NAMES = {
    **dict.fromkeys(_words("q k v o"), "hidden"),
    **dict.fromkeys(_words("mlp_head mlphead value_head"), "head"),
}
_BIASES = _words("b bq bk bv bo bqkv bias")  # of the leaf's own name
_WEIGHTS = _words("kernel weight w weights")  # say nothing: the module's name decides
_TABLES = _words("table lookup")  # of an embedding, whose module's name decides
_HEADS_ON_TOP = _words("output outputs out shared")  # inside a layer they are hidden
_WRAPPERS = _words("params model module net network transformer state")


class _Leaf(NamedTuple):
    path: str
    shape: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The named components; an index names nothing."""
        return [n for n in self.path.split("/") if n and not n.isdigit()]


def labels(params: Any, *, rules: Iterable[Any] = ()) -> Any:
    """Label every parameter "muon" or "adamw" by its path.

    In this order:

    1. the first rule whose pattern is found in the path decides;
    2. leaves of rank 0 and 1, and biases, are "adamw";
    3. the last component with a role decides: embeddings, heads and norms are
       "adamw"; projections and layers (q_proj, up, dense, attention, ...) are "muon"
       if the leaf is a matrix;
    4. a matrix called kernel, weight or w in a module without a role is "muon";
    5. everything else is refused, and so are components that contradict each other
       (``attention/heads``, ``embedding_projection``) and hidden kernels of rank 3
       or more.

    Args:
        params: Any pytree: nested dicts, linen's or nnx's parameters, or the shapes
            of `jax.eval_shape`. Paths are joined with "/", without the ``value`` of
            nnx variables and linen's boxes.
        rules: Pairs of a regular expression, tried with `re.search`, and a label.

    Returns:
        A tree of the structure of ``params``, for `optax.partition`; the function
        itself may also be given as ``param_labels``.

    Raises:
        ValueError: If a rule is malformed, or listing every path without a role.

    Examples:
        >>> import jax.numpy as jnp
        >>> params = {"wte": jnp.ones((9, 4)), "q_proj": {"kernel": jnp.ones((4, 4))}}
        >>> labels(params)
        {'q_proj': {'kernel': 'muon'}, 'wte': 'adamw'}
        >>> labels(params, rules=[("wte", "muon")])["wte"]
        'muon'

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
        2024: embeddings, heads and vectors belong to AdamW.
    """
    compiled = [_compile_rule(rule) for rule in rules]
    entries, treedef = jax.tree_util.tree_flatten_with_path(params)
    leaves = _leaves(entries)
    decisions = [_decide(leaf, compiled) for leaf in leaves]
    refused = [
        (leaf, decision)
        for leaf, decision in zip(leaves, decisions, strict=True)
        if decision not in LABELS
    ]
    if refused:
        raise ValueError(_refusal(refused))
    return jax.tree.unflatten(treedef, decisions)


def _compile_rule(rule: Any) -> tuple[re.Pattern[str], str]:
    """A rule with its pattern compiled, or a ValueError that shows the rule."""
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise ValueError(f"labels: a rule is a pair (pattern, label) but is: {rule!r}")
    pattern, label = rule
    if label not in LABELS:
        raise ValueError(
            f"labels: rule {rule!r} has the label {label!r}; it must be one of {LABELS}"
        )
    try:
        return re.compile(pattern), label
    except (re.error, TypeError) as error:
        raise ValueError(
            f"labels: rule {rule!r} has an invalid regular expression: {error}"
        ) from error


def _leaves(entries: list[tuple[Any, Any]]) -> list[_Leaf]:
    """Paths as text. An attribute ``value`` without siblings is a box, not a name."""
    siblings = Counter(path[:-1] for path, _ in entries)

    def named(path: tuple[Any, ...]) -> tuple[Any, ...]:
        boxed = path and path[-1] == GetAttrKey("value") and siblings[path[:-1]] == 1
        return path[:-1] if boxed else path

    return [
        _Leaf(keystr(named(path), simple=True, separator="/"), jnp.shape(leaf))
        for path, leaf in entries
    ]


def _decide(leaf: _Leaf, rules: list[tuple[re.Pattern[str], str]]) -> str:
    """The label, or else the reason why there is none."""
    for pattern, label in rules:
        if pattern.search(leaf.path):
            return label
    if len(leaf.shape) < 2:
        return "adamw"
    if not leaf.names:
        return "it has no name"
    return _decide_by_name(leaf)


def _decide_by_name(leaf: _Leaf) -> str:
    own, roles = leaf.names[-1], _roles(leaf.names)
    if _without_digits(own) in _BIASES or "bias" in _split(own):
        return "adamw"
    if not (_is_weight(own) or own in dict(roles)):
        return f"the name {own!r} is not known"
    if not roles:
        return _label("hidden", leaf)
    (name, role), *outer = roles
    if role == "?":
        return f"the words of {name!r} contradict each other"
    against = next((pair for pair in outer if _contradicts(role, pair[1])), None)
    if against:
        return f"{name!r} ({role}) stands inside {against[0]!r} ({against[1]})"
    return _label(role, leaf)


def _is_weight(name: str) -> bool:
    """Kernel, weight, w, w1, w_in, but not weight_ih."""
    return _without_digits(name) in _WEIGHTS | _TABLES or _split(name)[:1] == ["w"]


def _label(role: str, leaf: _Leaf) -> str:
    if role != "hidden":
        return "adamw"
    if len(leaf.shape) > 2:
        return "Muon takes matrices only"
    return "muon"


def _roles(names: list[str]) -> list[tuple[str, str]]:
    """Each name that has a role, with it, from the leaf outwards."""
    top = next((i for i, n in enumerate(names) if n.lower() not in _WRAPPERS), 0)
    roles = [
        (name, _role(name) or ("head" if i == top and _is_head_on_top(name) else None))
        for i, name in enumerate(names)
    ]
    return [(name, role) for name, role in reversed(roles) if role]


def _is_head_on_top(name: str) -> bool:
    """Output, out, output_layer, decoder_output."""
    words = [word for word in _split(name) if word != "layer"]
    return bool(words) and words[-1] in _HEADS_ON_TOP


def _contradicts(inner: str, outer: str) -> bool:
    """A layer inside a head or embedding may be either; so may heads in a layer."""
    if inner == "hidden":
        return outer != "hidden"
    return inner == "head" and outer in ("hidden", "?")


def _role(name: str) -> str | None:
    """The role of one component; "?" if its words disagree."""
    if _without_digits(name) in _WHOLE_NAMES:
        return _WHOLE_NAMES[_without_digits(name)]
    found = [
        role for word in _split(name) for role, words in _ROLES.items() if word in words
    ]
    if found and found[-1] == "norm":  # attention_norm is a norm, whatever it follows
        return "norm"
    kinds = {"hidden" if role == "hidden" else "adamw" for role in found}
    return "?" if len(kinds) > 1 else next(iter(found), None)


def _without_digits(name: str) -> str:
    return name.lower().rstrip("_0123456789")


def _split(name: str) -> list[str]:
    """LayerNorm_0, layer_norm and layerNorm0 are all the words layer, norm."""
    joined = re.sub(r"[Mm]ulti_?[Hh]ead", "multihead_", name)  # not a head
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", joined)
    return [word.lower() for word in words]


def _refusal(refused: list[tuple[_Leaf, str]]) -> str:
    lines = [f"  {leaf.path} {leaf.shape}: {reason}" for leaf, reason in refused]
    leaf = refused[0][0]
    label = "muon" if len(leaf.shape) == 2 else "adamw"
    return "\n".join(
        [
            f"labels cannot place {len(refused)} parameter(s) by name:",
            *lines,
            "Say where they belong with rules, tried before the built-in roles, for "
            f'example rules=((r"{re.escape(leaf.path)}", "{label}"),).',
        ]
    )
