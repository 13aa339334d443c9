"""`mhfast bench`: it runs and writes what it says, and its peers compute what mhfast computes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from mhfast._bench import implementation, measure, shapes
from mhfast._bench.implementation import Local, Prepared, Work
from mhfast._bench.measure import QUICK, Bench
from mhfast._bench.peers import PEERS, Formulation, Peer
from mhfast._bench.problem import Answer, DisagreementError, check_agreement, draw
from mhfast._bench.results import Comparison, Timing, geometric_mean
from mhfast._bench.shapes import ODD_SIZES, Loop, Shape, parse_loop, parse_shape

SMALL = Shape(6, 4, 3, 2)
COMPILING = ("compile", "jax")
MHFAST = "import sys; from mhfast.cli import main; sys.exit(main())"

# Every formulation of a peer, on short and on long sequences, as calls and in a loop. In a process
# of its own: torch and jax have process-wide settings and threads.
AGREEMENT = """
import sys
from mhfast._bench.peers import PEERS, formulations
from mhfast._bench.problem import check_agreement, draw
from mhfast._bench.shapes import Loop, Shape

peer = PEERS[sys.argv[1]]
for shape in (Shape(6, 4, 3, 2), Shape(90, 20, 5, 7), Shape(2, 258, 3, 5)):
    for loop in (None, Loop(shape, steps=3)):
        for dtype in ("float64", "float32"):
            if loop is not None and not peer.trains:
                continue
            problem = draw(shape, dtype)
            (own,) = formulations(PEERS["mhfast"], problem, loop, 1)
            truth = own.answer(own.run())
            for formulation in formulations(peer, problem, loop, 1):
                answer = formulation.answer(formulation.run())
                assert answer.W.dtype == answer.U.dtype == dtype
                check_agreement(formulation.name, answer, truth, dtype)
                print(formulation.name)
"""


def python(*arguments: str) -> str:
    """Standard output of a Python process that must succeed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("isolate", [False, True])
def test_quick_run_writes_json_and_markdown(tmp_path, isolate):
    results, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    output = python(
        "-c", MHFAST, "bench", "--quick", "--shapes", str(SMALL), "--loops", str(SMALL),
        "--families", "none", "--peers", "numpy", "--threads", "1",
        "--json", str(results), "--markdown", str(tables),
        *(["--isolate"] if isolate else []),
    )  # fmt: skip
    found = json.loads(results.read_text())

    assert {row["dtype"] for row in found["gradients"]} == {"float32", "float64"}
    for row in (*found["gradients"], *found["loops"]):
        assert row["shape"] == dataclasses.asdict(SMALL)
        assert set(row["timings"]) == {"mhfast", "numpy"}
        assert row["best_peer"] == "numpy"
        for timing in row["timings"].values():
            assert 0.0 < timing["quartiles"][0] <= timing["median"] <= timing["quartiles"][1]
            assert timing["calls"] >= 2
            assert timing["first"] > 0.0
        assert row["peak_fraction"] > 0.0
    assert {mean["group"] for mean in found["geometric_means"]} == {"given", "loops"}
    assert found["environment"]["threads"] == 1
    assert found["environment"]["versions"]["numpy"] == np.__version__
    for text in (output, tables.read_text()):
        assert "One loss and gradient, milliseconds" in text
        assert "Training loops, microseconds a step" in text


@pytest.mark.parametrize(
    "key",
    [
        "numpy",
        *(pytest.param(k, marks=pytest.mark.peers) for k in ("torch", "sdpa")),
        *(pytest.param(k, marks=pytest.mark.slow) for k in COMPILING),
    ],
)
def test_every_formulation_agrees_with_mhfast(key):
    if find_spec(PEERS[key].package) is None:
        pytest.skip(f"could not import '{PEERS[key].package}'")
    names = python("-c", AGREEMENT, key).splitlines()
    assert names


@pytest.mark.parametrize("arguments", [["--shapes", "6,4,3"], ["--isa", "x87"], ["--threads", "0"]])
def test_wrong_arguments_are_named(arguments):
    command = [sys.executable, "-c", MHFAST, "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert arguments[1] in done.stderr


def test_missing_package_is_reported_and_the_rest_is_timed(monkeypatch):
    monkeypatch.setitem(PEERS, "torch", Peer("torch eager", "torch_eager", "no_such_package"))
    bench = Bench(Local, ["torch", "numpy"], threads=1, budget=QUICK)
    comparison = bench.gradient("given", SMALL, "float64")
    assert comparison.missing == {"torch eager": "not installed"}
    assert set(comparison.timings) == {"mhfast", "numpy"}


def test_odd_shape_is_timed_beside_its_even_neighbour():
    bench = Bench(Local, [], threads=1, budget=QUICK)
    assert bench.gradient("odd", Shape(2, 7, 3, 5), "float64").against_even > 0.0
    assert bench.gradient("given", Shape(2, 7, 3, 5), "float64").against_even is None


def test_threads_give_the_same_bits_and_are_all_timed():
    bench = Bench(Local, [], threads=3, budget=QUICK)
    scaling = bench.scaling(Shape(70, 4, 3, 2), "float32")
    assert scaling.identical
    assert sorted(scaling.medians) == [1, 2, 3]


@pytest.mark.parametrize("spoilt", [math.nan, 1.001])
def test_peer_that_disagrees_is_an_error(spoilt):
    problem = draw(SMALL, "float32")
    truth = Answer(0.5, problem.W, problem.U)
    W = problem.W.copy()
    W[0, 1, 2] *= spoilt
    check_agreement("a peer", truth, truth, "float32")
    with pytest.raises(DisagreementError, match="a peer and mhfast differ"):
        check_agreement("a peer", Answer(0.5, W, problem.U), truth, "float32")


def test_problem_is_the_same_on_every_call():
    one, two = draw(SMALL, "float64"), draw(SMALL, "float64")
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in "XyWU")
    assert one.X.shape == (6, 4, 3)
    assert one.W.shape == (2, 3, 3)
    assert one.U.shape == (2, 4, 3)


def test_operations_are_counted_by_the_common_formula():
    # n H (4 T d² + 8 T² d) = 6 · 2 · (4 · 4 · 9 + 8 · 16 · 3)
    assert SMALL.flops == 12 * (144 + 384)


def test_shapes_are_read_and_refused_with_what_came():
    assert parse_shape("6,4,3,2") == SMALL
    assert parse_loop("6,4,3,2") == Loop(SMALL, steps=200)
    with pytest.raises(ValueError, match="got '6,4,x,2'"):
        parse_shape("6,4,x,2")
    with pytest.raises(ValueError, match="got 6,0,3,2"):
        parse_shape("6,0,3,2")


def test_odd_shapes_cover_the_sizes():
    odd = shapes.SHAPES["odd"]
    assert len(set(odd)) == 20
    for letter, sizes in ODD_SIZES.items():
        assert {getattr(shape, letter) for shape in odd} == set(sizes)
    assert Shape(33, 13, 17, 3).even() == Shape(33, 12, 16, 3)


class Clock:
    """A clock that stands still but for what is computed."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(implementation, "time", fake)

    def formulation(self, name, *seconds):
        """One whose calls take so long; the last number for all further ones."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return name

        return Formulation(name, run, lambda result: result)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_fastest_formulation_of_a_peer_is_timed(monkeypatch, order):
    """Fastest by its later calls: compilation, in the first, is not held against it."""
    clock = Clock(monkeypatch)
    found = [
        clock.formulation("slow", 0.01, 0.02),
        clock.formulation("fast", 1.0, 0.004, 0.001, 0.003),
        clock.formulation("middle", 0.01),
    ]
    monkeypatch.setattr(implementation, "formulations", lambda *_: [found[k] for k in order])
    local = Local("numpy")
    work = Work(SMALL, "float64", 1)
    ready = local.prepare(work)
    assert (ready.formulation, ready.answer) == ("fast", "fast")
    assert (ready.first, ready.later) == pytest.approx((1.0, 0.001))
    assert local.block(0.01) == pytest.approx([0.003] * 4)  # the first was not timed


def test_a_formulation_is_judged_by_its_second_call(monkeypatch):
    clock = Clock(monkeypatch)
    found = [clock.formulation("good", 0.5), clock.formulation("compiled", 60.0, 0.01)]
    monkeypatch.setattr(implementation, "formulations", lambda *_: found)
    assert Local("numpy").prepare(Work(SMALL, "float64", 1)).formulation == "compiled"


def test_a_formulation_whose_second_call_is_hopeless_is_not_repeated(monkeypatch):
    clock = Clock(monkeypatch)
    found = [clock.formulation("good", 0.01), clock.formulation("slow", 9.0, 1.0, 0.001)]
    monkeypatch.setattr(implementation, "formulations", lambda *_: found)
    assert Local("numpy").prepare(Work(SMALL, "float64", 1)).formulation == "good"
    assert clock.now == pytest.approx(10.0 + 6 * 0.01)


def test_timings_are_medians_and_quartiles():
    timing = Timing.of("a way", 9.0, [4.0, 1.0, 100.0, 3.0, 2.0, 5.0, 6.0], 1e-9)
    assert timing == Timing("a way", 9.0, 4.0, (2.0, 6.0), 7, 1e-9)
    assert Timing.of("", 9.0, [3.0], 0.0).quartiles == (3.0, 3.0)


class Scripted:
    """A contender whose calls take the times that are written here."""

    def __init__(self, key):
        self.times = {"mhfast": [2.0, 3.0, 10.0], "numpy": [40.0, 7.0, 8.0]}[key]

    def prepare(self, _work):
        return Prepared("only", 20.0, min(self.times), Answer(0.5, np.ones(1), np.ones(1)))

    def block(self, _seconds):
        return self.times

    def close(self):
        pass


def test_what_is_reported_are_medians_of_all_rounds(monkeypatch):
    monkeypatch.setattr(measure, "PAUSE", 0.0)
    budget = dataclasses.replace(QUICK, rounds=3, least_rounds=3)
    bench = Bench(Scripted, ["numpy"], threads=2, budget=budget)
    comparison = bench.gradient("given", SMALL, "float64")
    medians = {name: timing.median for name, timing in comparison.timings.items()}
    assert medians == {"mhfast": 3.0, "numpy": 8.0}
    assert comparison.own.calls == 9
    assert comparison.own.first == 20.0
    assert comparison.ratio("numpy") == pytest.approx(8 / 3)
    scaling = Bench(Scripted, [], threads=2, budget=budget).scaling(SMALL, "float64")
    assert scaling.medians == {1: 3.0, 2: 3.0}


def test_ratios_follow_from_the_medians():
    def timing(median):
        return Timing("", 1.0, median, (median, median), 1, 0.0)

    work = Bench(Local, [], threads=2, budget=QUICK).work(SMALL, "float32")
    timings = {"mhfast": timing(2e-6), "numpy": timing(12e-6), "jax jit": timing(6e-6)}
    comparison = Comparison("given", work, timings, peak=4.0 * SMALL.flops / 2e-6)
    assert comparison.best_peer == "jax jit"
    assert comparison.ratio("jax jit") == pytest.approx(3.0)
    assert comparison.ratio("numpy") == pytest.approx(6.0)
    assert comparison.peak_fraction == pytest.approx(0.25)
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
