"""The environment of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata

from .. import _core

PACKAGES = ("mhfast", "numpy", "torch", "jax", "jaxlib", "threadpoolctl")

# Variables with these prefixes change what the libraries do.
PREFIXES = (
    "MHFAST_", "OMP_", "GOMP_", "OPENBLAS_", "MKL_", "XLA_", "JAX_", "TORCH",
)  # fmt: skip

# Load of other processes, in busy cores, above which a comparison is unfair.
BUSY = 0.5


def environment(threads: int, *, isolated: bool) -> dict[str, object]:
    """Describe machine, instruction set, versions, threads, date and possible disturbances."""
    config = _core.config()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "system": platform.platform(),
        "cores": len(available_cores()),
        "threads": threads,
        "isa": _core.active_isa(),
        "isas_available": _core.available_isas(),
        "compiler": config.get("compiler"),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "blas": _blas(),
        "processes": "one for each implementation" if isolated else "one for all",
        "load": round(os.getloadavg()[0], 2),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
        },
    }


def warnings(found: dict[str, object]) -> list[str]:
    """Describe what in the environment makes a comparison unreliable."""
    said = []
    variables = found["variables"]
    assert isinstance(variables, dict)
    if "OPENBLAS_CORETYPE" in variables:
        said.append(
            f"OPENBLAS_CORETYPE={variables['OPENBLAS_CORETYPE']} is set: NumPy may run kernels for "
            "another processor than this one, and so slower"
        )
    load = found["load"]
    assert isinstance(load, float)
    if load > BUSY:
        said.append(f"other work keeps about {load:.1f} cores busy: times will vary")
    return said


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _blas() -> str:
    """Return the name, version and kernels of NumPy's BLAS."""
    try:
        import threadpoolctl
    except ImportError:
        return "unknown (threadpoolctl is not installed)"
    found = {
        f"{pool['internal_api']} {pool['version']}, kernels {pool.get('architecture', 'unknown')}, "
        f"{pool['num_threads']} threads"
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    }
    return "; ".join(sorted(found)) or "none that threadpoolctl knows"


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
