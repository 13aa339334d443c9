"""Sweeps: rows in the order of the grid, whatever computes them, and nothing computed twice."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep_functions as functions

import mhfast as mh
from mhfast.sweeps.grid import seed_of

pytestmark = pytest.mark.filterwarnings("ignore:sweep. .* calls failed:RuntimeWarning")

GRID = {"a": [1, 2, 3], "b": np.array([0.5, 4.0])}


def same(a: mh.Sweep, b: mh.Sweep) -> None:
    assert a.points == b.points
    assert list(a.columns) == list(b.columns)
    for name, column in a.columns.items():
        np.testing.assert_array_equal(column, b.columns[name])


def test_rows_come_in_the_order_of_the_grid():
    result = mh.sweep(functions.area, GRID)
    assert result.points[:3] == ({"a": 1, "b": 0.5}, {"a": 1, "b": 4.0}, {"a": 2, "b": 0.5})
    assert list(result.columns) == ["point", "run", "step", "area", "sum"]
    np.testing.assert_array_equal(result.columns["point"], np.arange(6))
    np.testing.assert_array_equal(result.columns["area"], [0.5, 4.0, 1.0, 8.0, 1.5, 12.0])
    assert len(result) == 6
    assert not result.failures


def test_a_sequence_of_points_need_not_be_a_product():
    points = [{"a": 3, "b": 1}, {"b": 7, "a": 2}]
    result = mh.sweep(functions.area, points)
    np.testing.assert_array_equal(result.columns["area"], [3, 14])


def test_records_of_a_run_are_columns_and_steps_rows():
    result = mh.sweep(functions.training, {"heads": [1, 2], "lr": [0.1, 0.5]})
    one = functions.training(2, 0.1)
    rows = result.columns["point"] == 2
    np.testing.assert_array_equal(result.columns["step"][rows], np.arange(5))
    np.testing.assert_array_equal(result.columns["loss"][rows], one.history["loss"])
    norms = result.columns["grad_norm"][rows]
    np.testing.assert_array_equal(norms[::2], one.history["grad_norm"])
    assert np.isnan(norms[1::2]).all()
    of_head = result.columns["attention_max[1]"]
    np.testing.assert_array_equal(of_head[rows][::2], one.history["attention_max"][:, 1])
    assert np.isnan(of_head[result.columns["point"] == 0]).all()  # one head there


def test_batched_names_arrive_together_and_give_the_rows_of_single_calls():
    grid = {"heads": [1, 2], "lr": [0.1, 0.5, 2.0]}
    calls: list[Any] = []

    def remembered(heads: int, lr: Any) -> mh.Run:
        calls.append((heads, lr))
        return functions.training(heads, lr)

    together, alone = mh.sweep(remembered, grid, batch="lr"), mh.sweep(functions.training, grid)
    assert [heads for heads, _ in calls] == [1, 2]
    np.testing.assert_array_equal(calls[0][1], [0.1, 0.5, 2.0])
    np.testing.assert_array_equal(together.columns["point"], alone.columns["point"])
    np.testing.assert_array_equal(together.columns["run"], together.columns["point"] % 3)
    # A run beside others is the run alone up to rounding of another plan.
    for name in ("loss", "grad_norm", "attention_max[0]"):
        np.testing.assert_allclose(together.columns[name], alone.columns[name], rtol=1e-12)


def test_several_batched_names_make_all_combinations():
    def shapes(a: Any, b: Any, c: int) -> dict[str, Any]:
        assert a.shape == b.shape == (6,)
        return {"value": 100 * c + 10 * a + b, "vector": np.stack([a, b], axis=-1)}

    result = mh.sweep(shapes, {"a": [1, 2], "c": [5], "b": [7, 8, 9]}, batch=("a", "b"))
    np.testing.assert_array_equal(result.columns["value"], [517, 518, 519, 527, 528, 529])
    np.testing.assert_array_equal(result.columns["vector[1]"], [7, 8, 9, 7, 8, 9])


def test_seeds_depend_on_the_values_of_a_point_alone():
    few = mh.sweep(functions.seeded, {"a": [1, 2]}, seed=3)
    more = mh.sweep(functions.seeded, {"a": [0, 2, 1]}, seed=3)
    together = mh.sweep(functions.seeded, {"a": np.array([2, 1])}, batch="a", seed=3)
    draws = few.columns["draw"]
    np.testing.assert_array_equal(draws, more.columns["draw"][[2, 1]])
    np.testing.assert_array_equal(draws, together.columns["draw"][[1, 0]])
    assert draws[0] != draws[1]
    assert draws[0] != mh.sweep(functions.seeded, {"a": [1]}, seed=4).columns["draw"][0]


def test_drawn_seeds_are_a_column_of_whole_numbers():
    for batch in ((), "a"):
        result = mh.sweep(functions.seeded, {"a": [7, 2]}, batch=batch, seed=3)
        seeds = result.columns["seed"]
        assert seeds.dtype == np.int64
        np.testing.assert_array_equal(seeds, [seed_of(point, 3) for point in result.points])
        draws = [np.random.default_rng(seed).standard_normal() for seed in seeds]
        np.testing.assert_array_equal(result.columns["draw"], draws)
    assert "seed" not in mh.sweep(functions.area, GRID).columns
    (failure,) = mh.sweep(lambda a, seed: {"seed": a + seed}, {"a": [1]}, seed=3).failures
    assert "expected results with other names than 'seed'" in failure.error
    own = mh.sweep(lambda seed: {"seed": seed}, {"seed": [5]})
    np.testing.assert_array_equal(own.columns["seed"], [5])


@pytest.mark.parametrize("batch", [(), "a"])
def test_another_root_of_the_seeds_finds_nothing_in_the_directory(tmp_path, batch):
    for root, files in ((3, 1), (4, 2), (3, 2)):
        keywords: dict[str, Any] = {"batch": batch, "seed": root}
        kept = mh.sweep(functions.seeded, {"a": [1, 2]}, directory=tmp_path / "s", **keywords)
        same(kept, mh.sweep(functions.seeded, {"a": [1, 2]}, **keywords))
        assert len(list(tmp_path.glob("s/*.npz"))) == files * (1 if batch else 2)


def test_a_failure_is_told_and_the_others_go_on():
    with pytest.warns(RuntimeWarning, match=r"1 of 3 calls failed, .* ZeroDivisionError: a is two"):
        result = mh.sweep(functions.picky, {"a": [1, 2, 3]})
    np.testing.assert_array_equal(result.columns["square"], [1, 9])
    np.testing.assert_array_equal(result.columns["point"], [0, 2])
    (failure,) = result.failures
    assert failure.points == ({"a": 2},)
    assert failure.error == "ZeroDivisionError: a is two"
    assert "in picky" in failure.traceback
    everything = mh.sweep(functions.picky, {"a": [2]})
    assert len(everything.columns["point"]) == 0


def processes(kind: str) -> Any:
    return ProcessPoolExecutor(2, mp_context=get_context(kind))


def loky() -> Any:
    return pytest.importorskip("loky", reason="pip install loky").ProcessPoolExecutor(2)


EXECUTORS = {"threads": lambda: ThreadPoolExecutor(2), "spawn": partial(processes, "spawn")}
if "fork" in __import__("multiprocessing").get_all_start_methods():
    EXECUTORS["forkserver"] = partial(processes, "forkserver")
EXECUTORS["loky"] = loky


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.peers if name == "loky" else ()) for name in EXECUTORS],
)
def test_the_table_does_not_depend_on_the_executor(name, monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    grid = {"heads": [1, 2], "lr": [0.1, 0.5]}
    with EXECUTORS[name]() as executor:
        result = mh.sweep(functions.training, grid, executor=executor)
        failing = mh.sweep(functions.picky, {"a": [1, 2]}, executor=executor)
    assert not result.failures
    same(result, mh.sweep(functions.training, grid))
    assert failing.failures[0].error == "ZeroDivisionError: a is two"


@pytest.mark.slow
def test_dask_is_an_executor():
    distributed = pytest.importorskip("distributed", reason="pip install dask distributed")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        executor = client.get_executor()
        same(mh.sweep(functions.area, GRID, executor=executor), mh.sweep(functions.area, GRID))


PROGRAM = Path(__file__).with_name("sweep_executors.py")


def run_program(command: list[Any], directory: Path) -> None:
    path = os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    token = directory / "token"  # ray would write one in the home directory
    token.write_text(secrets.token_hex(32))
    environment["RAY_AUTH_TOKEN_PATH"] = str(token)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "same"


@pytest.mark.slow
def test_mpi_is_an_executor(tmp_path):
    pytest.importorskip("mpi4py", reason="apt-get install libopenmpi-dev; pip install mpi4py")
    if shutil.which("mpiexec") is None:
        pytest.skip("apt-get install openmpi-bin")
    command = ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    run_program([*command, "-m", "mpi4py.futures", PROGRAM, "mpi"], tmp_path)


@pytest.mark.slow
def test_ray_is_an_executor(tmp_path):
    if find_spec("ray") is None:
        pytest.skip("pip install ray")
    run_program([sys.executable, PROGRAM, "ray"], tmp_path)


def test_a_worker_that_dies_is_a_failure(monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        result = mh.sweep(functions.fatal, {"a": [1]}, executor=executor)
    assert result.failures[0].error.startswith("BrokenProcessPool")


def test_what_is_in_the_directory_is_not_computed_again(tmp_path):
    calls: list[int] = []

    def square(a: int) -> dict[str, int]:
        calls.append(a)
        return functions.picky(a)

    store = tmp_path / "sweep"
    mh.sweep(square, {"a": [1, 2]}, directory=store)
    assert calls == [1, 2]
    result = mh.sweep(square, {"a": np.arange(4)}, directory=store)
    assert calls == [1, 2, 0, 2, 3]  # what failed is tried again
    np.testing.assert_array_equal(result.columns["square"], [0, 1, 9])
    same(result, mh.sweep(square, {"a": range(4)}))


def test_batched_calls_are_kept_too(tmp_path):
    grid = {"heads": [2], "lr": [0.1, 0.5]}
    first = mh.sweep(functions.training, grid, batch="lr", directory=tmp_path / "sweep")
    kept = sorted(tmp_path.glob("sweep/*.npz"))
    again = mh.sweep(functions.training, grid, batch="lr", directory=tmp_path / "sweep")
    assert sorted(tmp_path.glob("sweep/*.npz")) == kept
    same(first, again)


def test_the_directory_of_something_else_is_refused(tmp_path):
    mh.sweep(functions.picky, {"a": [1]}, directory=tmp_path / "sweep")
    with pytest.raises(ValueError, match=r"directory: expected the sweep of .*area, got .*picky"):
        mh.sweep(functions.area, GRID, directory=tmp_path / "sweep")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"directory: expected an empty directory .*notes\.txt"):
        mh.sweep(functions.area, GRID, directory=tmp_path / "other")
    (kept,) = tmp_path.glob("sweep/*.npz")
    kept.write_bytes(kept.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"directory: .*{kept.name} is damaged"):
        mh.sweep(functions.picky, {"a": [1]}, directory=tmp_path / "sweep")


@pytest.mark.skipif(find_spec("fcntl") is None, reason="needs fcntl, which this platform lacks")
def test_one_process_works_in_a_directory_at_a_time(tmp_path):
    def nested(a: int) -> dict[str, int]:
        with pytest.raises(RuntimeError, match="directory: expected one that no other process"):
            mh.sweep(functions.picky, {"a": [1]}, directory=tmp_path)
        return {"a": a}

    assert not mh.sweep(nested, {"a": [1]}, directory=tmp_path).failures


def killed_and_resumed(tmp_path: Path, kills: int, points: int) -> None:
    """Kill a sweep at random moments until it ends; count what was begun."""
    store, marks = tmp_path / "sweep", tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, functions.__file__, str(store), str(marks), str(points)]
    rng = np.random.default_rng(0)
    done = 0
    for k in range(kills):
        finished = {path.name for path in store.glob("*.npz")}
        begun = len(list(marks.iterdir()))
        process = subprocess.Popen(command)
        if k % 5 == 4:  # while it starts
            time.sleep(rng.uniform(0, 0.5))
        else:  # some time after it began to work
            while process.poll() is None and len(list(marks.iterdir())) == begun:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = {path.name for path in store.glob("*.npz")}
        assert finished <= left  # nothing lost
        done += len(left - finished)
    subprocess.run(command, check=True, timeout=120)
    begun_twice = sum(len(path.read_bytes()) - 1 for path in marks.iterdir())
    assert begun_twice <= kills  # only the call that was cut off, once a kill
    assert len(list(marks.iterdir())) == points
    result = mh.sweep(
        functions.counted, {"a": range(points), "directory": [str(marks)]}, directory=store
    )
    np.testing.assert_array_equal(result.columns["square"], np.arange(points) ** 2)
    assert begun_twice == sum(len(path.read_bytes()) - 1 for path in marks.iterdir())
    assert done > 0


def test_nothing_is_lost_when_the_process_is_killed(tmp_path):
    killed_and_resumed(tmp_path, kills=2, points=30)


@pytest.mark.slow
def test_nothing_is_lost_in_a_hundred_kills(tmp_path):
    killed_and_resumed(tmp_path, kills=100, points=1500)


def test_an_interrupted_sweep_hands_out_what_is_finished(tmp_path):
    def stopped(a: int) -> dict[str, int]:
        if a == 3:
            raise KeyboardInterrupt
        return functions.picky(a)

    with pytest.raises(mh.SweepInterrupted) as caught:
        mh.sweep(stopped, {"a": [1, 3, 4]}, directory=tmp_path / "sweep")
    np.testing.assert_array_equal(caught.value.sweep.columns["square"], [1])
    assert len(list(tmp_path.glob("sweep/*.npz"))) == 1


def test_the_table_as_a_dataframe():
    pytest.importorskip("pandas", reason="pip install pandas")
    frame = mh.sweep(functions.training, {"heads": [1, 2], "lr": [0.1, 0.5]}).to_dataframe()
    assert list(frame.columns[:6]) == ["point", "heads", "lr", "run", "step", "loss"]
    assert len(frame) == 4 * 5
    one = frame[(frame.heads == 2) & (frame.lr == 0.5)]
    np.testing.assert_array_equal(one.loss, functions.training(2, 0.5).history["loss"])


@pytest.mark.peers
def test_the_table_as_an_xarray_dataset():
    pytest.importorskip("xarray", reason="pip install xarray")
    result = mh.sweep(functions.training, {"heads": [1, 2], "lr": [0.1, 0.5]}).to_xarray()
    assert dict(result.sizes) == {"heads": 2, "lr": 2, "step": 5}
    one = result.sel(heads=2, lr=0.5)
    np.testing.assert_array_equal(one.loss, functions.training(2, 0.5).history["loss"])


def test_progress_goes_to_stderr(capsys):
    mh.sweep(functions.area, GRID, progress=True)
    assert "sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((functions.area, {"a": 3}), TypeError, "grid: expected a sequence of values for 'a'"),
        ((functions.area, {"a": "xy"}), TypeError, "grid: expected a sequence of values for 'a'"),
        ((functions.area, {"a": []}), ValueError, "grid: expected at least one value for 'a'"),
        ((functions.area, []), ValueError, "grid: expected at least one point"),
        ((functions.area, 5), TypeError, "grid: expected a dict of sequences or .* got int"),
        ((functions.area, [3]), TypeError, "grid: expected a sequence of dicts, got int"),
        ((functions.area, {3: [1]}), TypeError, "grid: expected names of arguments, got 3"),
        ((functions.area, [{"a": 1}, {"b": 1}]), ValueError, "grid: expected the same names"),
        ((functions.area, {"a": [1, 1]}), ValueError, "grid: expected different points"),
        ((3, GRID), TypeError, "function: expected a function, got int"),
    ],
)
def test_wrong_grids(arguments, error, message):
    with pytest.raises(error, match=message):
        mh.sweep(*arguments)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"batch": "c"}, ValueError, "batch: expected names from a, b, got 'c'"),
        ({"executor": 3}, TypeError, "executor: expected a concurrent.futures.Executor, got int"),
        ({"seed": -1}, ValueError, "seed: expected an integer of at least 0, got -1"),
        ({"seed": 1.5}, TypeError, "seed: expected an integer, got float"),
    ],
)
def test_wrong_arguments(keywords, error, message):
    with pytest.raises(error, match=message):
        mh.sweep(functions.area, GRID, **keywords)


def test_a_grid_with_its_own_seed_takes_no_root():
    with pytest.raises(ValueError, match="seed: expected None for a grid with its own seed"):
        mh.sweep(functions.seeded, {"a": [1], "seed": [2]}, seed=0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3.0, "TypeError: function: expected a Run or a dict of numbers as a result, got float"),
        ({"x": "y"}, "TypeError: function: expected real numbers as 'x', got 'y'"),
        ({"x": np.zeros((2, 3))}, "ValueError: function: expected 'x' to be a number or a vector"),
        ({"step": 1}, "ValueError: function: expected results with other names than 'step'"),
        ({}, "ValueError: function: expected a result with at least one number"),
    ],
)
def test_results_that_make_no_row(result, message):
    (failure,) = mh.sweep(lambda **_: result, {"a": [1]}).failures
    assert failure.error.startswith(message)


def test_a_batched_result_needs_its_runs():
    (failure,) = mh.sweep(lambda **_: {"x": 1.0}, {"a": [1, 2]}, batch="a").failures
    assert "expected 'x' of shape (R, ...) = (2, ...), got ()" in failure.error


def test_values_without_an_identity_are_refused_with_a_directory(tmp_path):
    assert mh.sweep(lambda **_: {"x": 1}, {"a": [object()]}).columns["x"] == 1
    with pytest.raises(TypeError, match=r"grid: with directory= expected numbers, .* got object"):
        mh.sweep(lambda **_: {"x": 1}, {"a": [object()]}, directory=tmp_path / "sweep")
