"""Settings that all peers on JAX share; they must be made before JAX computes anything."""

from __future__ import annotations

import functools

import jax

from ..environment import available_cores


@functools.cache
def configure() -> int:
    """Make the settings, and return the number of devices: one per core, to divide work by hand.

    Arrays that are not put on several devices are on the first, as if there were no others.
    """
    # Without it JAX narrows float64 to float32; float32 arrays stay what they are.
    jax.config.update("jax_enable_x64", True)
    devices = len(available_cores())
    jax.config.update("jax_num_cpu_devices", devices)
    return devices
