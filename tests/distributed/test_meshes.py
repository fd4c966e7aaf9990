"""data_parallel_mesh: every device, under one name, on an Auto axis."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from pliax.distributed import data_parallel_mesh, distribute


def test_holds_every_device():
    mesh = data_parallel_mesh()
    assert isinstance(mesh, jax.sharding.Mesh)
    assert dict(mesh.shape) == {"data": 8}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert mesh.axis_types == (AxisType.Auto,)


def test_chosen_devices_keep_their_order():
    devices = jax.devices()[5:2:-1]
    mesh = data_parallel_mesh(devices=devices, axis_name="batch")
    assert mesh.axis_names == ("batch",)
    assert list(mesh.devices.flat) == devices
    assert mesh == data_parallel_mesh(devices=tuple(devices), axis_name="batch")


def test_wrong_devices():
    with pytest.raises(ValueError, match="devices is empty"):
        data_parallel_mesh(devices=[])
    with pytest.raises(ValueError, match=r"names .* twice"):
        data_parallel_mesh(devices=[jax.devices()[0]] * 2)


def test_a_data_parallel_step_equals_the_plain_one():
    def loss(w, x):
        return jnp.mean(jnp.square(x @ w))

    w = jax.random.normal(jax.random.key(0), (4, 3))
    x = jax.random.normal(jax.random.key(1), (16, 4))
    mesh = data_parallel_mesh()
    step = jax.jit(jax.value_and_grad(loss))
    split = step(distribute(w, mesh, jax.P()), distribute(x, mesh, jax.P("data")))
    whole = step(w, x)
    assert jnp.allclose(split[0], whole[0], rtol=1e-6)
    assert jnp.allclose(split[1], whole[1], rtol=1e-5)
    assert split[1].sharding.is_fully_replicated
