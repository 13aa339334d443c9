"""Threads, instruction sets and what mhfast says about itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import numpy as np
import pytest

import mhfast as mh
from mhfast import _core, config

ISAS = ("avx512", "avx2", "baseline", "neon")


def python(code, **environment):
    """Run `code` in a new process whose environment has none of our variables but these."""
    ours = ("MHFAST_", "OMP_", "GOMP_", "KMP_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def shown(key, before="", after="", **environment):
    """Return what a new process says of `key`, with code before and after the import."""
    code = f"{before}\nimport mhfast as mh\n{after}\nprint(mh.show_config(mode='dict')['{key}'])"
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def default_threads():
    """Leave the default of this process as it was."""
    before = _core.get_num_threads()
    yield before
    _core.set_num_threads(before)


def test_without_a_word_the_processors_allowed_to_the_process_count():
    assert 1 <= int(shown("threads")) <= len(os.sched_getaffinity(0))


def test_the_affinity_mask_counts():
    one = min(os.sched_getaffinity(0))
    assert shown("threads", before=f"import os; os.sched_setaffinity(0, [{one}])") == "1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"OMP_NUM_THREADS": "3"}, [3, 1, 3]), ({"MHFAST_NUM_THREADS": "3"}, [3, 3, 3])],
)
def test_limits_of_threadpoolctl_bound_the_default(environment, expected):
    pytest.importorskip("threadpoolctl")
    code = """
import mhfast as mh, threadpoolctl
threads = lambda: mh.show_config("dict")["threads"]
counts = [threads()]
with threadpoolctl.threadpool_limits(1):
    counts.append(threads())
    with mh.num_threads(2):
        assert threads() == 2
print([*counts, threads()])
"""
    result = python(code, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(expected)


def test_a_sub_interpreter_is_refused_at_once():
    """On Python 3.11 the import would wait for ever."""
    name = "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
    pytest.importorskip(name)
    inside = """
try:
    import mhfast
except ImportError as error:
    print(error)
"""
    result = python(f"import {name} as i; i.run_string(i.create(), {inside!r})")
    assert result.returncode == 0, result.stderr
    if sys.version_info < (3, 12):  # later ones may refuse NumPy first, in their own words
        assert "mhfast works in the main interpreter of a process only" in result.stdout
    else:
        assert result.stdout.strip()


def test_each_source_of_the_thread_count_overrides_the_next():
    both = {"OMP_NUM_THREADS": "3", "MHFAST_NUM_THREADS": "5"}
    process = "mh.set_num_threads(6)"
    block = f"{process}; block = mh.num_threads(7); block.__enter__()"
    assert shown("threads", OMP_NUM_THREADS="3") == "3"
    assert shown("threads", **both) == "5"
    assert shown("threads", after=process, **both) == "6"
    assert shown("threads", after=block, **both) == "7"


def test_the_argument_overrides_the_block():
    with mh.num_threads(7):
        assert config.threads(None) == 7
        assert config.threads(2) == 2
        assert config.threads(np.int64(3)) == 3
        assert mh.Classifier.zeros(3, 1, 2)(np.ones((4, 1, 2)), num_threads=10**12).shape == (4,)


def test_blocks_nest_and_end():
    assert config.threads(None) == 0
    with mh.num_threads(3):
        with mh.num_threads(4):
            assert config.threads(None) == 4
        assert config.threads(None) == 3
    with pytest.raises(RuntimeError, match="inside"), mh.num_threads(5):
        raise RuntimeError("inside")
    assert config.threads(None) == 0


def test_a_block_concerns_its_own_python_thread():
    with mh.num_threads(3), ThreadPoolExecutor(1) as pool:
        assert pool.submit(config.threads, None).result() == 0


def test_set_num_threads_concerns_every_python_thread(default_threads):
    other = default_threads + 1
    mh.set_num_threads(other)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_core.get_num_threads).result() == other


@pytest.mark.parametrize("value", ["0", "-1", "two", "2.5"])
def test_a_thread_count_in_the_environment_that_is_none_is_named(value):
    result = python("import mhfast", MHFAST_NUM_THREADS=value)
    assert result.returncode != 0
    assert "MHFAST_NUM_THREADS" in result.stderr
    assert value in result.stderr


@pytest.mark.parametrize("isa", _core.available_isas())
def test_an_instruction_set_can_be_forced(isa):
    assert shown("isa", MHFAST_ISA=isa) == isa


def test_the_best_instruction_set_is_the_default():
    assert shown("isa") == _core.available_isas()[0]


@pytest.mark.parametrize("isa", sorted({*ISAS, "sse9"} - {*_core.available_isas()}))
def test_an_instruction_set_that_cannot_run_is_refused(isa):
    result = python("import mhfast", MHFAST_ISA=isa)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    for text in ("MHFAST_ISA", isa, *_core.available_isas()):
        assert text in last
    with pytest.raises(ValueError, match=isa):
        _core.select_isa(isa)


def test_show_config_gives_a_dict_of_plain_values():
    told = mh.show_config(mode="dict")
    assert told["mhfast"] == version("mhfast") == mh.__version__
    assert told["numpy"] == np.__version__
    assert told["isa"] == _core.active_isa()
    assert json.loads(json.dumps(told)) == told


def test_show_config_prints_the_same(capsys):
    assert mh.show_config() is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(mh.show_config(mode="dict"))
    assert any(line.split() == ["numpy", np.__version__] for line in lines)


@pytest.mark.verdict
def test_explain_takes_data_or_a_shape():
    n, T, d, H = 100, 10, 20, 16
    model = mh.Classifier.zeros(H, T, d)
    plan = mh.explain(model, (n, T, d))
    assert plan
    assert all(isinstance(name, str) for name in plan)
    X = np.arange(n * T * d, dtype=float).reshape(n, T, d)
    assert mh.explain(model, X) == plan
    assert mh.explain(model, mh.Dataset(X, np.ones(n))) == plan
    assert mh.explain(mh.Classifier.zeros(H, T, d, query=0), (n, 2 * T, d))
    assert mh.explain(mh.Layer.zeros(H, d, 3), (n, 2 * T, d))


@pytest.mark.verdict
def test_explain_takes_runs_from_where_they_are():
    n, T, d, H, R = 10, 3, 5, 7, 4
    model = mh.Classifier.zeros(H, T, d)
    plan = mh.explain(model, (n, T, d), runs=R)
    assert plan
    assert mh.explain(model, (R, n, T, d)) == plan
    assert mh.explain(model, mh.Dataset(np.zeros((n, T, d)), np.ones((R, n)))) == plan
    assert mh.explain(mh.Classifier.zeros(H, T, d, runs=R), (n, T, d)) == plan
