"""Laws of matrices in stacks and in the hands of owners: the same, wherever done."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import equations
from hypothesis import given, settings, strategies as st

import pliax as px
from pliax.core.manual_axes import may_be_partitioned
from pliax.kernels.look_ahead import api as look_ahead_api
from pliax.kernels.matrix_products import backends
from pliax.optim import execution as execution_module, one_pass, stacks
from pliax.optim.exchanges import exchange
from pliax.optim.execution import padded_sides
from pliax.optim.matrix_axes import matrices
from pliax.optim.newton_schulz import NewtonSchulz, choose_iteration
from pliax.optim.parcels import Owners


MatrixAxes = px.optim.MatrixAxes
P = jax.sharding.PartitionSpec
RATE = 0.02
COLLECTIVES = r" (all-to-all|all-gather|all-reduce|collective-permute)(?:-start)?\("


def mesh_of(kind="Auto", **sizes):
    axis_types = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axis_types)


def array(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def gpt(layers=3, width=16):
    """Matrices of three shapes, of which one is another's transpose."""
    shapes = {"q": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
    return {
        f"{name}{i}": array(i, *shape)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def placed(tree, mesh, spec):
    return jax.device_put(tree, jax.NamedSharding(mesh, spec))


def run(tx, params, steps=1):
    """The parameters after some steps on gradients that differ from them."""

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda W: 2 * W + 1, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def collectives(tx, params):
    """How many there are of each kind in one compiled step."""

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step).lower(params, tx.init(params)).compile()
    return Counter(re.findall(COLLECTIVES, str(compiled.as_text())))


def waits(jaxpr, names):
    """Equations of these names by number, and of which of them each makes use."""
    used, found = {}, []
    for n, eqn in enumerate(jaxpr.eqns):
        before = set().union(*(used.get(id(x), ()) for x in eqn.invars))
        is_named = eqn.primitive.name in names
        found += [(n, before)] if is_named else []
        used |= {id(x): before | ({n} if is_named else set()) for x in eqn.outvars}
    return found


def passed_in_vain(jaxpr, n):
    """Whether nobody takes something that passes the barrier before an equation."""
    taken = {id(x) for eqn in jaxpr.eqns for x in eqn.invars}
    taken |= {id(x) for x in jaxpr.outvars}
    names = [eqn.primitive.name for eqn in jaxpr.eqns[:n]]
    barrier = jaxpr.eqns[n - 1 - names[::-1].index("optimization_barrier")]
    return any(id(x) not in taken for x in barrier.outvars)


def assert_same(actual, expected, error=4 * 2.0**-7):
    """Equal but for a last place of the bfloat16 result of Newton-Schulz."""
    for name, W in expected.items():
        atol = RATE * error
        np.testing.assert_allclose(actual[name], W, rtol=0, atol=atol, err_msg=name)


def owner(mesh, axis=None, **options):
    return px.optim.muon(RATE, execution="owner", mesh=mesh, axis=axis, **options)


shapes = st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 8]), st.integers(1, 9))


@given(st.lists(shapes, min_size=1, max_size=5), st.sampled_from(["standard", "gram"]))
def test_stacked_is_per_matrix(shapes, method):
    params = {str(i): array(i, *shape) for i, shape in enumerate(shapes)}
    axes = MatrixAxes(2, 1, 0)
    options = {"axes": axes, "ns_method": method, "ns_dtype": "float32"}
    single, stacked = (
        run(px.optim.muon(RATE, execution=name, **options), params)
        for name in ("per_matrix", "stacked")
    )
    assert_same(stacked, single, error=1e-3)


@pytest.fixture
def hopper(monkeypatch):
    """One such GPU as far as Muon sees, whose kernels are formulas on a CPU."""
    monkeypatch.setattr(jax, "device_count", lambda *_: 1)
    monkeypatch.setattr(look_ahead_api, "refused_device", lambda: None)
    monkeypatch.setattr(execution_module, "refused_device", lambda: None)
    monkeypatch.setattr(backends, "refused_device", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(2, 512, 620), (1, 620, 512), (1, 512, 1000)])
def test_sides_filled_with_zeros_to_whole_pieces_are_cut_off(shape, method):
    params = {"a": array(0, *shape), "b": array(1, *shape)}
    options = {"axes": MatrixAxes(2, 1, 0), "ns_method": method}
    stacked = px.optim.muon(RATE, execution="stacked", **options)
    made = equations(stacked.update, params, stacked.init(params), params)
    widths = {max(x.outvars[0].aval.shape, default=0) for x in made}
    assert widths & {640, 1024}
    single = run(px.optim.muon(RATE, execution="per_matrix", **options), params)
    assert_same(run(stacked, params), single, error=1e-2)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_all_symmetric_products_of_square_matrices_are_one_kernel(monkeypatch, method):
    iteration = choose_iteration(method=method)
    G = jax.ShapeDtypeStruct((24, 512, 512), jnp.bfloat16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # steps are unrolled
    traced = jax.jit(lambda G: iteration(G)).trace(G)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2  # and X with the polynomial


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sides", [(256, 1000), (512, 520), (512, 640)])
def test_sides_stay_where_no_fused_product_gains(sides):
    assert padded_sides(sides, choose_iteration()) == sides
    assert padded_sides((512, 1000), choose_iteration(dtype="float32")) == (512, 1000)


@pytest.mark.usefixtures("hopper")
def test_sides_stay_where_fused_products_cannot_count():
    assert padded_sides((512, 1000), choose_iteration()) == (512, 1024)
    with jax.enable_x64(True):
        assert padded_sides((512, 1000), choose_iteration()) == (512, 1000)


def test_sides_stay_on_other_devices():
    assert padded_sides((512, 1000), choose_iteration()) == (512, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_momentum_in_one_pass_does_what_two_do(monkeypatch, nesterov, method, request):
    """The formula of the pass, which a CPU runs in place of the kernel."""
    params = {
        **{f"w{i}": array(i, 64, 96) for i in range(5)},
        "scanned": array(7, 3, 64, 96),
        "experts": array(8, 64, 96, 2),  # no stack as it lies
        "tall": array(9, 128, 32),
        "down": array(11, 96, 64),  # turned, as five lie the other way
        "odd": array(10, 7, 9),
        "none": jnp.zeros((0, 64, 96)),
    }
    batch = {"scanned": MatrixAxes(2, 1, 0), "experts": MatrixAxes(1, 0, 2)}
    batch["none"] = batch["scanned"]
    axes = {**dict.fromkeys(params), **batch}
    options = {"nesterov": nesterov, "ns_method": method, "axes": axes}
    tx = px.optim.scale_by_muon(execution="stacked", **options)

    def passes():
        made = equations(lambda *x: tx.update(*x), params, tx.init(params))
        return sum(x.primitive.name == "custom_vmap_call" for x in made)

    def steps():
        @jax.jit
        def step(grads, state):
            return tx.update(grads, state)

        state: Any = tx.init(params)
        for seed in range(3):
            grads = {k: array(20 + seed, *x.shape) for k, x in params.items()}
            updates, state = step(grads, state)
        return updates, state.momentum

    assert passes() == 0
    wanted = steps()
    request.getfixturevalue("hopper")
    monkeypatch.setattr(stacks, "_ENOUGH", 4 * 64 * 64)
    assert passes() == 2 * (2 + 2)  # two portions and what is tall, each by a kernel
    divided = []
    usual = NewtonSchulz.normalised
    monkeypatch.setattr(
        NewtonSchulz,
        "normalised",
        lambda how, X, norms: divided.append(X.shape[-2:]) or usual(how, X, norms),
    )
    found = steps()
    assert ((128, 32) in divided) == (method != "standard")  # else by a first step
    assert_same(found[0], wanted[0], error=4 * 2.0**-7 / RATE)  # rates are no part
    for name, M in found[1].items():
        np.testing.assert_allclose(M, wanted[1][name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P()])
def test_momentum_of_owned_leaves_in_one_pass_does_what_two_do(
    monkeypatch, kind, devices, spec, request
):
    mesh = mesh_of(kind, fsdp=devices)
    shapes = {"q": (128, 128), "odd": (16, 24)}  # no whole block of 2,048
    for i, name in enumerate(("up", "up", "down", "up", "down", "up")):
        shapes[f"{name}{i}"] = (64, 256) if name == "up" else (256, 64)
    scanned = MatrixAxes(rows=2, columns=1, batch=0)
    shapes |= {"scan0": (8, 64, 256), "scan1": (8, 64, 256)}
    shapes |= {"each0": (devices, 128, 128), "each1": (devices, 128, 128)}
    axes = {name: scanned if len(x) == 3 else None for name, x in shapes.items()}
    tx = px.optim.scale_by_muon(mesh=mesh, axes=axes)
    params = {name: array(0, *shape) for name, shape in shapes.items()}
    made = []
    usual = look_ahead_api.stacked
    monkeypatch.setattr(
        one_pass.look_ahead,
        "stacked",
        lambda *x: made.append(len(x[2])) or usual(*x),
    )

    def steps(tx, place):
        step = jax.jit(tx.update)
        with jax.set_mesh(mesh):
            state: Any = tx.init(place(params))
            for seed in range(20, 50, 10):
                grads = {
                    k: array(seed + i, *x.shape)
                    for i, (k, x) in enumerate(params.items())
                }
                updates, state = step(place(grads), state)
        return updates, state.momentum

    def there(tree):
        return placed(tree, mesh, spec)

    wanted = steps(px.optim.scale_by_muon(axes=axes), lambda tree: tree)
    plain = collectives(tx, there(params))
    assert not made
    request.getfixturevalue("hopper")
    assert collectives(tx, there(params)) == plain
    made.clear()
    found = steps(tx, there)
    # What is scanned lies otherwise, but where all are whole.
    assert sorted(made) == sorted([2, 3, 6] if spec == P() else [1, 2, 2, 2, 4])
    assert_same(found[0], wanted[0], error=4 * 2.0**-7 / RATE)
    for name, M in found[1].items():
        np.testing.assert_allclose(M, wanted[1][name], rtol=1e-6, atol=1e-7)
        place = jax.NamedSharding(mesh, spec)
        assert M.sharding.is_equivalent_to(place, M.ndim)


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("spec", "state_spec"),
    [("x", None), ("x", "y"), ("y", "x"), (None, "x"), ("y", "y")],
)
def test_momenta_move_where_they_lie(spec, state_spec):
    """And stay there: one look-ahead, no gradient or momentum, travels to its owner."""
    mesh, params = mesh_of(x=4, y=2), {"up": array(0, 64, 256)}
    tx = px.optim.scale_by_muon(mesh=mesh, axis="x")
    grads = placed(params, mesh, P(spec))
    state = placed(tx.init(params), mesh, P(state_spec))
    wanted = jax.jit(px.optim.scale_by_muon().update)(params, tx.init(params))
    places = jax.tree.map(lambda x: x.sharding, (grads, state))
    step = jax.jit(tx.update, out_shardings=places).lower(grads, state).compile()
    got = step(grads, state)
    assert_same(got[0], wanted[0], error=4 * 2.0**-7 / RATE)
    np.testing.assert_allclose(got[1].momentum["up"], wanted[1].momentum["up"], 1e-6)
    if spec == state_spec:
        found = re.findall(COLLECTIVES, str(step.as_text()))
        assert found == ["all-gather"] * 2  # and one back


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["stacked", "per_matrix", "owner"])
@pytest.mark.parametrize(
    ("spec", "state_spec"),
    [("none", "x"), ("x", "none"), ("x", "host"), (None, "x"), ("x", None)],
)
def test_explicit_gradients_meet_momenta_that_lie_elsewhere(
    execution, spec, state_spec
):
    mesh, params = mesh_of("Explicit", x=8), gpt()
    is_owned = execution == "owner"
    tx = px.optim.scale_by_muon(execution=execution, mesh=mesh if is_owned else None)
    wanted = jax.jit(tx.update)(params, tx.init(params))

    def there(tree, spec):
        if spec == "host":
            return jax.tree.map(np.asarray, tree)
        return tree if spec == "none" else placed(tree, mesh, P(spec))

    got = jax.jit(tx.update)(there(params, spec), there(tx.init(params), state_spec))
    assert_same(got[0], wanted[0], error=4 * 2.0**-7 / RATE)
    for (name, M), U in zip(got[1].momentum.items(), got[0].values(), strict=True):
        np.testing.assert_allclose(M, wanted[1].momentum[name], rtol=1e-6)
        for x in (M, U):
            assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("x")), 2)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 1), (4, 4), (7, 1), (8, 8), (5, 0), (9, 3)])
@pytest.mark.parametrize("is_hopper", [False, True])
def test_owners_share_the_whole_matrices_of_a_shape_evenly(
    monkeypatch, counts, is_hopper, request
):
    lengths, usual = [], execution_module.one_by_one
    monkeypatch.setattr(
        execution_module,
        "one_by_one",
        lambda stacks, how: (
            lengths.append(list(map(len, stacks))) or usual(stacks, how)
        ),
    )
    if is_hopper:
        request.getfixturevalue("hopper")
    wide, high = counts
    params = {f"up{i}": array(i, 64, 256) for i in range(wide)}
    params |= {f"down{i}": array(50 + i, 256, 64) for i in range(high)}
    mesh = mesh_of(fsdp=8)
    got = run(owner(mesh), placed(params, mesh, P()))
    mine = [[-(-n // 8)] for n in counts if n]
    assert sorted(lengths[-len(mine) :]) == sorted(mine)
    assert_same(got, run(px.optim.muon(RATE), params))


@pytest.mark.usefixtures("hopper")
def test_a_transposed_momentum_is_no_momentum():
    tx = px.optim.scale_by_muon(execution="stacked")
    G = array(0, 64, 96)
    with pytest.raises(TypeError, match=r"96, ?64"):
        tx.update(G, tx.init(G.T))


def test_a_method_of_the_user_meets_the_sides_of_the_leaves():
    met = []

    def method(X, iteration):
        met.append(X.shape)
        return X

    tx = px.optim.muon(RATE, execution="stacked", ns_method=method)
    params = {"a": array(0, 24, 1000), "b": array(1, 1000, 24)}
    tx.update(params, tx.init(params), params)
    assert {shape[-2:] for shape in met} == {(24, 1000)}


def test_one_product_serves_all_matrices_of_a_shape():
    def products(execution):
        tx, params = px.optim.muon(RATE, execution=execution), gpt(layers=3)
        made = equations(tx.update, params, tx.init(params), params)
        return sum(x.params.get("name") in ("_gram", "_added") for x in made)

    assert products("per_matrix") == 9 * 3
    assert products("stacked") == 3 * 3


def test_portions_one_after_another_do_what_one_stack_does(monkeypatch):
    params = gpt(layers=4)
    whole = run(px.optim.muon(RATE, execution="stacked"), params)
    monkeypatch.setattr(stacks, "_ENOUGH", 2 * 16**2)  # two matrices
    tx = px.optim.muon(RATE, execution="stacked")
    names = [
        x.primitive.name for x in equations(tx.update, params, tx.init(params), params)
    ]
    assert names.count("optimization_barrier") > 2
    parts = run(tx, params)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")])
def test_owners_do_what_one_device_does(kind, spec):
    mesh, params = mesh_of(kind, fsdp=8), gpt()
    expected = run(px.optim.muon(RATE), params, steps=3)
    with jax.set_mesh(mesh):
        got = run(owner(mesh), placed(params, mesh, spec), steps=3)
    assert_same(got, expected)
    for W in got.values():
        assert W.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)


specs = st.sampled_from([P(), P("x"), P(None, "x"), P("y"), P(("x", "y")), P("y", "x")])


@pytest.mark.slow
@given(
    st.lists(st.tuples(shapes, specs, st.permutations(range(3))), max_size=4),
    st.sampled_from(["x", "y", ("x", "y"), ("y", "x")]),
    st.sampled_from(["standard", "gram"]),
)
@settings(max_examples=settings().max_examples // 2)
def test_owners_serve_every_sharding(cases, axis, method):
    mesh, params, axes = mesh_of(x=4, y=2), {}, {}
    for i, ((count, rows, columns), spec, order) in enumerate(cases):
        shape = [0, 0, 0]
        for size, place in zip((8 * count, 8 * rows, 8 * columns), order, strict=True):
            shape[place] = size
        batch, second, third = (int(place) for place in order)
        axes[str(i)] = MatrixAxes(third, second, batch)
        params[str(i)] = placed(array(i, *shape), mesh, spec)
    options = {"axes": axes, "ns_method": method, "ns_dtype": "float32"}
    expected = run(px.optim.muon(RATE, execution="stacked", **options), params)
    assert_same(run(owner(mesh, axis, **options), params), expected, error=1e-3)


def test_sharded_matrices_travel_there_and_back_once_for_each_shape():
    mesh = mesh_of(fsdp=8)
    for spec in (P("fsdp"), P(None, "fsdp")):
        found = collectives(owner(mesh), placed(gpt(), mesh, spec))
        assert found == {"all-to-all": 2 * 3}


def test_both_shardings_of_a_shape_travel_together():
    mesh, params = mesh_of(fsdp=8), gpt()
    params = {
        name: placed(W, mesh, P("fsdp") if name < "q" else P(None, "fsdp"))
        for name, W in params.items()
    }
    assert collectives(owner(mesh), params) == {"all-to-all": 2 * 3}
    params |= {name: placed(params[name], mesh, P()) for name in ("up0", "up1")}
    found = collectives(owner(mesh), params)
    assert found == {"all-to-all": 2 * 3, "all-gather": 1}  # of whole ones


def test_those_on_their_way_back_wait_for_each_other_beside_some_that_stay():
    mesh, shapes = mesh_of(x=8), {"a": (32, 48), "scan": (8, 48, 64), "b": (16, 24)}
    axes = [MatrixAxes(0, 1), MatrixAxes(1, 2, 0), MatrixAxes(0, 1)]

    def part(*leaves):
        recipes = [matrices(a, x.shape) for a, x in zip(axes, leaves, strict=True)]
        kinds = ["rows", "batch", "rows"]
        run = lambda stacks: [-stacks[0]]  # noqa: E731
        return exchange(recipes, leaves, kinds, Owners(("x",), 8), run)[0]

    leaves = [array(i, *shape) for i, shape in enumerate(shapes.values())]
    run = jax.shard_map(part, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    (mapped,) = jax.make_jaxpr(run)(*leaves).eqns
    _, (first, _), _, (_, before) = waits(mapped.params["jaxpr"], ("all_to_all",))
    assert first in before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "columns", "whole"])
def test_one_shape_travels_while_another_is_multiplied(kind):
    """The largest in the middle; on the way there nobody waits for anybody."""
    sides = {"small": (16, 24), "large": (96, 64), "middle": (48, 32)}
    spec = {"rows": P("x"), "columns": P(None, "x"), "whole": P()}[kind]
    multiplied = []

    def negated(stacks):
        multiplied.append(stacks[0].shape[1:])
        return [-stacks[0]]

    def part(*leaves):
        recipes = [matrices(MatrixAxes(0, 1), x.shape) for x in leaves]
        kinds, owners = [kind] * len(leaves), Owners(("x",), 8)
        return exchange(recipes, leaves, kinds, owners, negated)[0]

    leaves = [array(i, *shape) for i, shape in enumerate(sides.values())]
    options = {"mesh": mesh_of(x=8), "in_specs": spec, "out_specs": spec}
    run = jax.shard_map(part, check_vma=False, **options)
    for x, y in zip(run(*leaves), leaves, strict=True):
        np.testing.assert_array_equal(x, -y)
    assert multiplied == [sides[name] for name in ("middle", "large", "small")]
    (mapped,) = jax.make_jaxpr(run)(*leaves).eqns
    program = mapped.params["jaxpr"]
    found = waits(program, ("all_to_all", "neg", "all_gather"))
    stages = len(found) // len(sides)
    *there, products, back = (found[n::stages] for n in range(stages))
    assert not any(before for way in there for _, before in way)
    for one_by_one in (products, back):
        assert len(one_by_one) == len(sides)
        for (number, _), (_, before) in itertools.pairwise(one_by_one):
            assert number in before
    for number, _ in back[1:]:  # or XLA leaves out what came before
        assert not passed_in_vain(program, number)


def test_whole_matrices_are_gathered_once_for_each_shape():
    mesh = mesh_of(data=8)
    found = collectives(owner(mesh), placed(gpt(), mesh, P()))
    assert found == {"all-gather": 3}


@pytest.mark.parametrize("spec", [P("fsdp"), P()])
def test_no_compiler_divides_what_an_owner_computes(monkeypatch, spec):
    mesh, seen = mesh_of(fsdp=8), []

    def is_divided(sides, how):
        seen.append(may_be_partitioned())
        return sides

    monkeypatch.setattr(execution_module, "padded_sides", is_divided)
    params = placed(gpt(), mesh, spec)
    tx = px.optim.muon(RATE, mesh=mesh, execution="owner")
    monkeypatch.setattr(execution_module.jax, "default_backend", lambda: "gpu")
    jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert seen[-3:] == [False] * 3  # three shapes, of each device's program
    assert may_be_partitioned()


def test_layers_on_different_devices_do_not_travel():
    mesh = mesh_of(fsdp=8)
    params = placed({"scan": array(0, 16, 8, 24)}, mesh, P("fsdp"))
    tx = owner(mesh, axes=MatrixAxes(2, 1, 0))
    assert not collectives(tx, params)
    single = px.optim.muon(RATE, axes=MatrixAxes(2, 1, 0))
    assert_same(run(tx, params), run(single, {"scan": array(0, 16, 8, 24)}))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_matrices_without_elements_have_owners(shape, spec):
    mesh, params = mesh_of(fsdp=8), {"none": jnp.zeros(shape), "some": array(0, 16, 24)}
    got = run(owner(mesh), placed(params, mesh, spec))
    assert got["none"].shape == shape
    assert_same(got, run(px.optim.muon(RATE), params))


def test_more_owners_than_matrices():
    mesh, params = mesh_of(fsdp=8), {"only": array(0, 16, 24)}
    got = run(owner(mesh), placed(params, mesh, P("fsdp")))
    assert_same(got, run(px.optim.muon(RATE), params))


def test_parts_of_a_sharded_projection():
    mesh, axes = mesh_of(fsdp=8), MatrixAxes(1, 0, split=(16, 8, 8))
    params = {"qkv": array(0, 16, 32)}
    expected = run(px.optim.muon(RATE, axes=axes), params)
    for spec in (P("fsdp"), P(None, "fsdp"), P()):
        got = run(owner(mesh, axes=axes), placed(params, mesh, spec))
        assert_same(got, expected)


def test_one_device_and_eager_calls_need_no_mesh_around_them():
    mesh, params = mesh_of(fsdp=8), gpt(layers=1)
    tx, expected = owner(mesh), run(px.optim.muon(RATE), params)
    assert_same(run(tx, params), expected)
    grads = jax.tree.map(lambda W: 2 * W + 1, params)
    eager, _ = tx.update(grads, tx.init(params), params)
    assert_same(optax.apply_updates(params, eager), expected)


@pytest.mark.parametrize("execution", ["stacked", "owner"])
def test_nan_stays_with_its_matrix(execution):
    mesh = mesh_of(fsdp=8)
    is_owned = execution == "owner"
    tx = px.optim.muon(RATE, execution=execution, mesh=mesh if is_owned else None)
    params = gpt(layers=2)
    params = {**params, "q1": params["q1"].at[3, 2].set(jnp.nan)}
    got = run(tx, placed(params, mesh, P("fsdp")))
    for name, W in got.items():
        assert jnp.isnan(W).all() if name == "q1" else jnp.isfinite(W).all(), name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_parameters_with_owners(dtype):
    mesh = mesh_of(fsdp=8)
    params = {name: W.astype(dtype) for name, W in gpt(layers=1).items()}
    tx, single = owner(mesh), px.optim.muon(RATE)
    got, expected = (
        jax.jit(t.update)(p, t.init(p), p)[0]
        for t, p in ((tx, placed(params, mesh, P("fsdp"))), (single, params))
    )
    for name, U in expected.items():
        assert got[name].dtype == dtype
        error = jnp.abs(got[name].astype(jnp.float32) - U.astype(jnp.float32)).max()
        assert error <= RATE * 2.0**-5


@pytest.mark.usefixtures("standard_promotion")
def test_traced_hyperparameters_reach_the_owners():
    mesh, params = mesh_of(fsdp=8), gpt(layers=1)
    inject = optax.inject_hyperparams(px.optim.muon, static_args=("mesh",))
    tx = inject(RATE, mesh=mesh, ns_steps=3, eps=1e-3)
    got = run(tx, placed(params, mesh, P("fsdp")))
    assert_same(got, run(px.optim.muon(RATE, ns_steps=3, eps=1e-3), params))


def test_a_mesh_means_owners():
    mesh = mesh_of(fsdp=8)
    found = collectives(px.optim.muon(RATE, mesh=mesh), placed(gpt(), mesh, P("fsdp")))
    assert found == {"all-to-all": 2 * 3}


def test_a_sharded_checkpoint_continues_on_one_device(tmp_path):
    mesh, params = mesh_of(fsdp=8), gpt(layers=1)
    tx, single = owner(mesh), px.optim.muon(RATE)
    sharded = placed(params, mesh, P("fsdp"))
    _, state = jax.jit(tx.update)(sharded, tx.init(sharded), sharded)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(single.init, params)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), like
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    first, _ = jax.jit(single.update)(params, restored, params)
    second, _ = jax.jit(tx.update)(sharded, state, sharded)
    assert_same(first, second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"execution": "fast"},
            "'auto', 'per_matrix', 'stacked', 'owner' but is: 'fas",
        ),
        (
            {"execution": "owner"},
            "needs to know whose devices own matrices: pass mesh=",
        ),
        ({"mesh": "xy"}, r"mesh has the axes \('x', 'y'\): say with axis="),
        ({"mesh": "xy", "axis": "z"}, r"axis names 'z', .* the axes \('x', 'y'\)"),
        ({"mesh": "xy", "axis": ("x", "z")}, "axis names 'z'"),
        (
            {"mesh": "xy", "execution": "stacked"},
            "mesh and axis are for execution='own",
        ),
        ({"axis": "x"}, "mesh and axis are for execution='owner'"),
        ({"mesh": "xy", "axis": ()}, "axis should name one or more of .* but is: ()"),
        ({"mesh": "xy", "axis": ("x", "x")}, "each once, but is: .'x', 'x'."),
        ({"mesh": "xy", "axis": 0}, "axis names 0"),
    ],
)
def test_owners_that_cannot_be_are_refused(options, message):
    if "mesh" in options:
        options = {**options, "mesh": mesh_of(x=4, y=2)}
    with pytest.raises(ValueError, match=message):
        px.optim.muon(**options)


def test_parameters_on_another_mesh_are_refused():
    tx = owner(mesh_of(fsdp=8))
    params = placed(gpt(layers=1), mesh_of(data=8), P("data"))
    with pytest.raises(
        Exception, match="axis 'fsdp', but the parameters lie on a mesh"
    ):
        run(tx, params)


@pytest.mark.usefixtures("standard_promotion")
def test_a_mesh_taken_for_a_schedule_says_what_to_do():
    tx = optax.inject_hyperparams(px.optim.muon)(RATE, mesh=mesh_of(fsdp=8))
    with pytest.raises(ValueError, match=r"static_args=\('mesh',\)"):
        tx.init(gpt(layers=1))


def test_leaves_on_several_explicit_meshes_and_on_none():
    params, one, two = gpt(layers=1), mesh_of("Explicit", x=8), mesh_of("Explicit", y=4)
    spread = {
        "q0": placed(params["q0"], one, P("x")),
        "up0": placed(params["up0"], two, P("y")),
        "down0": params["down0"],
    }
    for execution in ("per_matrix", "stacked"):
        tx = px.optim.muon(RATE, execution=execution)
        grads = jax.tree.map(lambda W: 2 * W + 1, spread)
        updates, _ = tx.update(grads, tx.init(spread), spread)
        plain = jax.tree.map(lambda W: 2 * W + 1, params)
        expected, _ = tx.update(plain, tx.init(params), params)
        assert_same(updates, expected)


def test_stages_on_different_devices_are_stacked_apart():
    params = {f"stage{i}": array(i, 8, 16) for i in range(3)}
    spread = {
        name: jax.device_put(W, jax.devices()[i])
        for i, (name, W) in enumerate(params.items())
    }
    tx = px.optim.muon(RATE, execution="stacked")
    updates: Any = tx.update(spread, tx.init(spread), spread)[0]
    expected, _ = tx.update(params, tx.init(params), params)
    assert_same(updates, expected)
    for name, U in updates.items():
        assert U.devices() == spread[name].devices()


def test_what_varies_over_a_mesh_is_stacked_apart():
    mesh = mesh_of(x=8)
    tx = px.optim.muon(RATE, 0.0, execution="stacked")

    def update(a, b) -> Any:
        params = {"a": a, "b": b, "c": 2 * a}
        return tx.update(params, tx.init(params), params)[0]

    a, b = array(0, 64, 16), array(1, 8, 16)
    specs = {"a": P("x"), "b": P(), "c": P("x")}
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(P("x"), P()), out_specs=specs)
    found, wanted = jax.jit(mapped)(a, b), update(a[:8], b)
    assert_same({name: x[:8] for name, x in found.items()}, wanted)


def test_making_an_optimizer_starts_no_backend():
    code = "import pliax as px, jax; px.optim.muon(0.1); px.optim.scale_by_muon()"
    # JAX refuses to change this once a backend is there.
    code += "; jax.config.update('jax_num_cpu_devices', 3)"
    code += "; assert jax.device_count() == 3"
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
