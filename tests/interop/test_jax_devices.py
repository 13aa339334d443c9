"""`mhfast.interop.jax` on several devices, exported, and on the host of another device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from instances import case

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.peers

from jax_formula import arrays_and_options  # noqa: E402  (needs jax)

from mhfast import _core  # noqa: E402
from mhfast.interop import jax as interop  # noqa: E402
from mhfast.interop.jax import calls, primitive  # noqa: E402

PROGRAM = Path(__file__).with_name("jax_devices.py")


def run(*words):
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_samples_on_four_devices(kind):
    run(PROGRAM, "samples", kind)


def test_samples_that_devices_cannot_share_equally():
    run(PROGRAM, "uneven", "auto")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("check", ["runs", "second", "scan", "shards", "exported"])
def test_on_four_devices(check, kind):
    if check == "exported":
        pytest.importorskip("flatbuffers")  # with which JAX writes what it exports
    run(PROGRAM, check, kind)


READ = """
import sys
from pathlib import Path
import jax, numpy as np
import mhfast.interop.jax
jax.config.update("jax_enable_x64", True)
directory = Path(sys.argv[1])
given = np.load(directory / "arrays.npz")
call = jax.export.deserialize(bytearray((directory / "call").read_bytes())).call
value, gradient = call(given["X"], given["W"])
assert np.array_equal(value, given["value"])
assert np.array_equal(gradient, given["gradient"])
"""


@pytest.mark.slow
def test_what_is_exported_runs_in_another_process(tmp_path):
    pytest.importorskip("flatbuffers")
    run(PROGRAM, "write", str(tmp_path))
    run("-c", READ, str(tmp_path))


def test_an_export_without_the_check_disabled_names_the_call():
    the = case()
    function = jax.jit(lambda X, W, U: interop.classifier(X, W, U))
    given = [a.astype(np.float32) for a in (the.X, the.model.W, the.model.U)]
    message = r"custom calls whose targets have no compatibility(.|\n)*mhfast_call"
    with pytest.raises(ValueError, match=message):
        jax.export.export(function)(*given)


def test_the_host_of_another_device_computes_the_same():
    the = case(lengths=True, dtype=np.float32)
    arrays, rest = arrays_and_options(the)
    arrays["lengths"] = rest.pop("lengths")
    call = calls.Call(
        False, tuple(arrays), None, 1.0, False, "softmax", None, None, (("W",),), ("X", "U")
    )
    operands = [*arrays.values(), arrays["W"], np.ones(len(the.X), np.float32)]
    by_callback = jax.jit(lambda *operands: primitive._by_callback(*operands, call=call))
    direct = primitive.apply(call, *operands)
    for found, expected in zip(by_callback(*operands), direct, strict=True):
        assert found.dtype == np.float32
        assert np.array_equal(found, expected)


def test_what_xla_hands_over_is_checked():
    # A call by a name of one's own, with another type and without the text.
    asked = []
    before = calls.serve
    try:
        handler = _core.xla_handler(lambda *given: asked.append(given))
        jax.ffi.register_ffi_target("mhfast_test", handler, platform="cpu")
        result = jax.ShapeDtypeStruct((2,), np.float32)
        call = jax.ffi.ffi_call("mhfast_test", result)
        jax.block_until_ready(call(np.arange(3, dtype=np.int8), call="text"))
        ((text, (operand,), (array,)),) = asked
        assert text == "text"
        assert operand.dtype == np.int8
        assert not operand.flags.writeable
        assert array.shape == (2,)
        assert array.flags.writeable
        errors = jax.errors.JaxRuntimeError
        with pytest.raises(errors, match=r'expected an attribute "call", got none'):
            jax.block_until_ready(call(np.zeros(3, np.float32)))
        with pytest.raises(errors, match=r"expected real or integer arrays, got type 15 of XLA"):
            jax.block_until_ready(call(np.zeros(3, np.complex64), call="text"))
    finally:
        _core.xla_handler(before)
