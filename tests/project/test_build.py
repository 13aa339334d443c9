"""The compiled module: what it exports, which OpenMP runtime it uses, how it is built."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mhfast import _core

LIBRARY = Path(_core.__file__)
ROOT = Path(__file__).parents[2]
needs_nm = pytest.mark.skipif(
    shutil.which("nm") is None, reason="needs nm: apt-get install binutils"
)


@needs_nm
def test_the_module_exports_only_its_entry():
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
    )
    symbols = [line.split()[-1] for line in listing.stdout.splitlines()]
    assert [s for s in symbols if "PyInit" not in s] == []


@pytest.mark.slow  # compiles all kernels once more
@needs_nm
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs c++: apt-get install g++")
@pytest.mark.skipif("avx2" not in _core.compiled_isas(), reason="flags are for x86-64")
@pytest.mark.parametrize(
    ("isa", "size", "registers", "flags"),
    [
        ("avx512", 64, 32, ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]),
        ("avx2", 32, 16, ["-mavx2", "-mfma"]),
        ("baseline", 16, 16, []),
    ],
)
def test_an_instruction_set_exports_only_its_table(tmp_path, isa, size, registers, flags):
    """Anything else with external linkage could be merged with another set's copy by the linker."""
    source = ROOT / "csrc/kernels/instance.cpp"
    if not source.exists():
        pytest.skip("needs the source tree")
    out = tmp_path / "kernels.o"
    definitions = [
        f"-DMHFAST_ISA={isa}",
        f"-DMHFAST_VECTOR_BYTES={size}",
        f"-DMHFAST_VECTOR_REGISTERS={registers}",
    ]
    subprocess.run(
        [
            "c++",
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-Wno-psabi",
            *definitions,
            *flags,
            "-c",
            source,
            "-o",
            out,
        ],
        check=True,
    )
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", "--extern-only", out],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split(maxsplit=2)[2] for line in listing.stdout.splitlines()]
    assert names == [f"mhfast::{isa}::kTables"]


@pytest.mark.skipif(shutil.which("ldd") is None, reason="needs ldd, a command of Linux")
def test_the_openmp_runtime_is_the_shared_system_one():
    """A private copy beside the one of another library would make both slow."""
    listing = subprocess.run(["ldd", LIBRARY], capture_output=True, text=True, check=True).stdout
    runtimes = re.findall(r"(\S*(?:gomp|omp)\S*) =>", listing)
    assert runtimes in (["libgomp.so.1"], ["libomp.so"], ["libomp.so.5"])


def test_no_relaxed_arithmetic_in_the_build():
    build = ROOT / "CMakeLists.txt"
    if not build.exists():
        pytest.skip("needs the source tree")
    for flag in ("fast-math", "Ofast", "march=native", "funsafe"):
        assert flag not in build.read_text()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_little_thread_local_storage():
    """A module loaded late gets it from a reserve that all libraries of a process share."""
    listing = subprocess.run(
        ["readelf", "-lW", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    sizes = [
        int(line.split()[5], 16) for line in listing.splitlines() if line.split()[:1] == ["TLS"]
    ]
    assert len(sizes) <= 1
    assert sum(sizes) < 64
