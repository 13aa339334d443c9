"""Checks on four devices, functions that `test_jax_devices.py` names on the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mhfast.interop.jax import classifier, layer

jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(0)
SHAPES = {"X": (12, 3, 5), "W": (2, 5, 5), "U": (2, 3, 5), "query": (12, 3, 5)}
X, W, U, QUERY = (rng.standard_normal(shape) for shape in SHAPES.values())
LENGTHS = np.arange(12) % 4
RUNS = rng.standard_normal((4, *W.shape))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
CUSTOM = [export.DisabledSafetyCheck.custom_call("mhfast_call")]


def loss(W, X, U, lengths, query=None):
    return jnp.log1p(classifier(X, W, U, lengths=lengths, query=query) ** 2).mean()


everything = jax.value_and_grad(loss, (0, 1, 2))


def mesh_of(kind, shape=(4,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def on(mesh, array, *axes):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def close(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        # Partial sums of devices in another order.
        assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-14 * max(1, np.abs(b).max())


def samples(kind):
    mesh = mesh_of(kind)
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")
    function = jax.jit(everything)
    value, gradients = function(*given)
    close((value, gradients), everything(W, X, U, LENGTHS))
    assert gradients[1].sharding.spec[0] == "data"
    # A device has its samples only, and one sum goes over the devices.
    text = function.lower(*given).compile().as_text()
    calls = [line for line in text.splitlines() if "mhfast_call" in line]
    assert calls
    assert all("f64[3,3,5]" in line for line in calls)
    assert "all-gather" not in text
    assert text.count("all-reduce(") == 1
    external = jax.jit(jax.grad(loss, (0, 4)))(*given, on(mesh, QUERY))  # placed otherwise than X
    close(external, jax.grad(loss, (0, 4))(W, X, U, LENGTHS, QUERY))
    # Heads on several devices are gathered, arrays of NumPy are everywhere.
    mixed = function(on(mesh_of(kind, (2, 2), ("data", "head")), W, "head"), X, U, LENGTHS)
    close(mixed, everything(W, X, U, LENGTHS))


def uneven(kind):  # with explicit axes JAX refuses such arrays itself
    # 10 of 12 samples: XLA would give devices 3, 3, 3 and 1 of them, padded to 3.
    mesh = mesh_of(kind)
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")

    def some(W, X, U, lengths):
        return everything(W, jnp.tanh(X)[:10], U, lengths[:10])

    expected = everything(W, jnp.tanh(X)[:10], U, LENGTHS[:10])
    close(jax.jit(some)(*given), expected)


def runs(kind):
    mesh = mesh_of(kind, (2, 2), ("run", "data"))
    given = on(mesh, RUNS, "run"), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")
    many = jax.vmap(everything, (0, None, None, None))
    function = jax.jit(many)
    close(function(*given), many(RUNS, X, U, LENGTHS))
    text = function.lower(*given).compile().as_text()
    calls = [line for line in text.splitlines() if "mhfast_call" in line]
    assert any("f64[2,2,5,5]" in line and "f64[1,6,3,5]" in line for line in calls)
    if kind == "explicit":  # where JAX refuses what follows itself
        return
    both = mesh_of(kind)  # one axis for runs and samples, which can divide one of them
    given = on(both, RUNS, "data"), on(both, X, "data"), on(both, U), on(both, LENGTHS, "data")
    close(function(*given), many(RUNS, X, U, LENGTHS))


def second(kind):
    mesh = mesh_of(kind)
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")

    def product(W, X, U, lengths):
        return jax.jvp(lambda W: jax.grad(loss, (0, 1))(W, X, U, lengths), (W,), (RUNS[0],))[1]

    close(jax.jit(product)(*given), product(W, X, U, LENGTHS))
    twice = lambda W: jax.jvp(lambda W: layer(X, W, W), (W,), (W,))[1]  # noqa: E731
    close(jax.jit(twice)(given[0]), twice(W))


def scan(kind):
    mesh = mesh_of(kind)
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")

    def descent(W, *rest):
        def step(W, _):
            value, gradient = jax.value_and_grad(loss)(W, *rest)
            return W - 0.1 * gradient, value

        return jax.lax.scan(step, W, length=3)

    close(jax.jit(descent)(*given), descent(W, X, U, LENGTHS))


def shards(kind):
    mesh = mesh_of(kind)
    spec = PartitionSpec
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")
    for checked in (True, False):

        @jax.jit
        def mean(*given, checked=checked):
            return jax.shard_map(
                lambda *local: jax.lax.pmean(loss(*local), "data"), mesh=mesh,
                in_specs=(spec(), spec("data"), spec(), spec("data")), out_specs=spec(),
                check_vma=checked,
            )(*given)  # fmt: skip

        found = jax.value_and_grad(mean, (0, 1, 2))(*given) if kind == "auto" else None
        if found is not None:  # with explicit axes JAX itself asks for a context here
            close(found, everything(W, X, U, LENGTHS))
        close(jax.jit(jax.hessian(mean))(*given), jax.hessian(loss)(W, X, U, LENGTHS))
    part = jax.shard_map(
        lambda *local: jax.lax.pmean(loss(*local), "data"),
        mesh=mesh_of(kind, (2, 2), ("run", "data")), axis_names={"data"},
        in_specs=(spec(), spec("data"), spec(), spec("data")), out_specs=spec(),
    )  # fmt: skip
    message = refused(lambda: jax.jit(part)(W, X, U, LENGTHS))
    assert message.startswith(
        "mhfast.interop.jax: expected jax.shard_map over all axes of the mesh, run, data, got it "
        "over data alone"
    ), message


def refused(function):
    try:
        function()
    except NotImplementedError as error:
        return str(error)
    raise AssertionError("expected an error")


def exported(kind):
    mesh = mesh_of(kind)
    spec = PartitionSpec
    given = on(mesh, W), on(mesh, X, "data"), on(mesh, U), on(mesh, LENGTHS, "data")
    message = refused(lambda: export.export(jax.jit(loss), disabled_checks=CUSTOM)(*given))
    assert message.startswith(
        "mhfast.interop.jax: expected jax.shard_map around what is exported for several devices, "
        "got arrays on 4 without it"
    ), message
    mean = jax.shard_map(
        lambda *local: jax.lax.pmean(loss(*local), "data"), mesh=mesh,
        in_specs=(spec(), spec("data"), spec(), spec("data")), out_specs=spec(),
    )  # fmt: skip
    made = export.export(jax.jit(mean), disabled_checks=CUSTOM)(*given)
    loaded = export.deserialize(made.serialize())
    close(loaded.call(*given), loss(W, X, U, LENGTHS))


def write(path):
    n, tokens = export.symbolic_shape("n, T")
    types = [jax.ShapeDtypeStruct(shape, np.float64) for shape in ((n, tokens, 5), W.shape)]
    V = rng.standard_normal((2, 5, 4))

    def value(X, W):
        return jnp.sin(layer(X, W, V)).sum()

    function = jax.jit(jax.value_and_grad(value, 1))
    made = export.export(function, disabled_checks=CUSTOM)(*types)
    directory = Path(path)
    (directory / "call").write_bytes(made.serialize())
    value, gradient = function(X[:7, :2], W)
    np.savez(directory / "arrays.npz", X=X[:7, :2], W=W, value=value, gradient=gradient)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
