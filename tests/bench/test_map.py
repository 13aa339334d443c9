"""The map: its design covers what it says, peers compute what mhfast does, and its outputs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import mhfast as mh
from mhfast import reference
from mhfast._bench import cell_timing, grid, map_report
from mhfast._bench.arithmetic import multiply_adds
from mhfast._bench.cell_timing import Contender, Effort, Measured, check, measure
from mhfast._bench.cells import draw_cell
from mhfast._bench.grid import AXES, MODELS, OPERATIONS, SHAPES, TINY, Cell, design, parse_cell
from mhfast._bench.map_report import Map
from mhfast._bench.peers import (
    PEERS,
    Formulation,
    UnavailableError,
    cell_formulations,
    map_own,
    operations,
)
from mhfast._bench.problem import DisagreementError

ONCE = Effort(seconds=0.0, least_rounds=1, block=0.0)
GRID = [cell for cell in itertools.starmap(Cell, itertools.product(*AXES)) if grid.possible(cell)]

# All ways of a peer on cells at tiny sizes, compared with mhfast; in a process of its own, as torch
# and jax have process-wide settings and threads.
AGREEMENT = """
import sys
from mhfast._bench.cell_timing import check
from mhfast._bench.cells import draw_cell
from mhfast._bench.grid import TINY, parse_cell
from mhfast._bench.peers import PEERS, UnavailableError, cell_formulations

for text in sys.argv[2:]:
    cell = parse_cell(text)
    problem = draw_cell(cell, TINY[cell.shape])
    (own,) = cell_formulations(PEERS["mhfast"], problem, 1)
    truth = own.answer(own.run())
    try:
        ways = cell_formulations(PEERS[sys.argv[1]], problem, 1)
    except UnavailableError:
        continue
    for way in ways:
        answer = way.answer(way.run())
        assert {array.dtype.name for array in answer.values()} == {cell.dtype}, (text, way.name)
        print(way.name, check(f"{text} {way.name}", answer, truth, cell.dtype))
"""

# The multiply-adds that are counted for a cell, and the fewest of torch's ways.
PRODUCTS = """
import sys
from torch.utils.flop_counter import FlopCounterMode
from mhfast._bench.arithmetic import multiply_adds
from mhfast._bench.cells import draw_cell
from mhfast._bench.grid import TINY, parse_cell
from mhfast._bench.peers import PEERS, cell_formulations

for text in sys.argv[1:]:
    cell = parse_cell(text)
    problem = draw_cell(cell, TINY[cell.shape])
    taken = []
    for way in cell_formulations(PEERS["torch"], problem, 1):
        with FlopCounterMode(display=False) as counter:
            way.run()
        taken.append(counter.get_total_flops() / 2 / (problem.steps if problem.trains else 1))
    print(text, float(multiply_adds(problem)), min(taken))
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def one_of_each_operation(dtype: str, *, skip: tuple[str, ...] = ()) -> list[Cell]:
    """A cell for each operation, with models and shapes in turn."""
    found = []
    for k, operation in enumerate(name for name in OPERATIONS if name not in skip):
        cells = [c for c in GRID if c.operation == operation and c.dtype == dtype]
        found.append(cells[(17 * k) % len(cells)])
    return found


def possible_pairs() -> set[tuple[str, str]]:
    return {pair for cell in GRID for pair in cell.pairs}


def test_every_possible_pair_of_levels_is_in_a_cell_of_the_design():
    cells = design()
    assert {pair for cell in cells for pair in cell.pairs} == possible_pairs()
    assert len(cells) == len(set(cells))
    assert len(cells) < 1.1 * len(OPERATIONS) * len(MODELS)


def test_the_grid_leaves_out_only_what_it_says():
    pairs = {
        pair for levels in itertools.combinations(AXES, 2) for pair in itertools.product(*levels)
    }
    left_out = pairs - possible_pairs()
    assert {pair for pair in left_out if pair[0] != "predict-sklearn"} == {
        ("gradient-W", "identity"), ("gradient-query", "prompt"), ("ntk", "tied"),
        ("ntk", "value-output"),
    }  # fmt: skip


@pytest.mark.parametrize("operations", [["hvp"], ["forward", "step"]])
def test_a_part_of_the_grid_is_covered_too(operations):
    cells = design(operations, ["layer", "tied"], ["tiny", "long"], ["float32"])
    assert {(cell.operation, cell.model) for cell in cells} == set(
        itertools.product(operations, ["layer", "tied"])
    )
    assert {(cell.model, cell.shape) for cell in cells} == set(
        itertools.product(["layer", "tied"], ["tiny", "long"])
    )


def test_torch_compile_has_every_level_of_every_axis():
    cells = design()
    some = grid.sample(cells)
    assert some < set(cells)
    assert {level for cell in some for level in cell.levels} == set(itertools.chain(*AXES))


def test_names_of_cells_are_read_and_refused_with_what_came():
    assert parse_cell("hvp/tied/wide/float32") == Cell("hvp", "tied", "wide", "float32")
    with pytest.raises(ValueError, match="got 'hvp/tied'"):
        parse_cell("hvp/tied")
    with pytest.raises(ValueError, match=r"expected model .* got 'tide'"):
        parse_cell("hvp/tide/wide/float32")
    with pytest.raises(ValueError, match="there is no gradient-W of identity"):
        parse_cell("gradient-W/identity/wide/float32")


def test_a_problem_is_the_same_on_every_call_and_has_the_shapes_it_says():
    cell = parse_cell("gradient-everything/lengths/query/float32")
    one, two = draw_cell(cell), draw_cell(cell)
    sizes = SHAPES["query"]
    assert np.array_equal(one.X, two.X)
    assert one.X.shape == (sizes.n, sizes.T, sizes.d)
    assert one.theta["U"].shape == (sizes.H, 1, sizes.d)
    assert one.wrt == ("W", "U", "X")
    assert one.last
    assert draw_cell(parse_cell("step-cosine/tied/runs/float64")).record == "cosine"


def reference_answer(cell: Cell) -> dict[str, np.ndarray]:
    """What the specification gives for a cell, in float64."""
    problem = draw_cell(cell, TINY[cell.shape])
    model = map_own.model_of(problem)
    side = {"query": problem.query, "lengths": problem.lengths}
    loss = map_own.loss_of(problem)
    X, y = problem.X, problem.y
    match cell.operation:
        case "forward" | "predict-torch" | "predict-jax" | "predict-sklearn":
            return {"outputs": reference.outputs(model, X, **side)}
        case "attention":
            return {"weights": reference.attention(model, X, **side)}
        case "backward":
            return reference.backward(model, X, problem.cotangent, wrt=problem.wrt, **side)
        case "hvp":
            return reference.hvp(model, X, y, tangent=problem.tangent, loss=loss, **side)
    value, gradients = reference.value_and_grad(model, X, y, loss=loss, wrt=problem.wrt, **side)
    return {"loss": np.asarray(value), **gradients}


@pytest.mark.parametrize(
    "cell",
    [
        c
        for c in one_of_each_operation("float64")
        if not c.operation.startswith(("step", "ntk", "predict"))
    ],
    ids=str,
)
def test_a_cell_of_each_operation_agrees_with_the_reference(cell):
    truth = reference_answer(cell)
    problem = draw_cell(cell, TINY[cell.shape])
    for key in ("mhfast", "numpy"):
        for way in cell_formulations(PEERS[key], problem, 1):
            # 1e-11: sums of a few hundred terms of order one.
            assert check(way.name, way.answer(way.run()), truth, cell.dtype) < 1e-11


@pytest.mark.parametrize(
    "cell", [c for c in one_of_each_operation("float64") if c.operation.startswith("step")], ids=str
)
def test_the_losses_of_a_training_cell_are_those_of_the_reference(cell):
    problem = draw_cell(cell, TINY[cell.shape])
    (way,) = cell_formulations(PEERS["mhfast"], problem, 1)
    found = way.answer(way.run())
    _, history = reference.train(
        map_own.model_of(problem), problem.X, problem.y, steps=problem.steps,
        optimizer=mh.GradientDescent(problem.rate), loss=map_own.loss_of(problem),
        lengths=problem.lengths,
    )  # fmt: skip
    runs = int(problem.sizes.runs > 0)
    losses = np.moveaxis(history["loss"], runs, 0)[:-1]
    check("losses", {"loss": losses}, {"loss": found["loss"]}, cell.dtype)
    assert np.abs(losses[-1] - losses[0]).max() > 1e-3  # it trains


@pytest.mark.parametrize("model", ["layer", "value-output", "lengths", "causal"])
def test_numpy_agrees_in_tiles_of_queries_and_chunks_of_samples(model, monkeypatch):
    """Sizes of the other tests have neither."""
    monkeypatch.setattr(operations, "CHUNK", 2**18)
    cell = Cell("gradient-everything", model, "long", "float64")
    problem = draw_cell(cell, dataclasses.replace(SHAPES["long"], n=3, T=150, d=7, r=2))
    (own,) = cell_formulations(PEERS["mhfast"], problem, 1)
    truth, ways = own.answer(own.run()), cell_formulations(PEERS["numpy"], problem, 1)
    assert any("tiles" in way.name and "chunks" in way.name for way in ways)
    for way in ways:
        # 1e-11: sums of a few hundred terms of order one.
        assert check(way.name, way.answer(way.run()), truth, cell.dtype) < 1e-11


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_agrees_on_a_cell_of_each_operation(dtype):
    skip = ("predict-torch", "predict-jax")
    names = map(str, one_of_each_operation(dtype, skip=skip))
    assert python("-c", AGREEMENT, "numpy", *names).splitlines()


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("torch", marks=pytest.mark.peers),
        pytest.param("sdpa", marks=pytest.mark.peers),
        pytest.param("jax", marks=(pytest.mark.peers, pytest.mark.slow)),
    ],
)
def test_peers_agree_on_a_cell_of_each_operation(key):
    if find_spec(PEERS[key].package) is None:
        pytest.skip(f"could not import '{PEERS[key].package}'")
    skip = () if find_spec("torch") and find_spec("jax") else ("predict-torch", "predict-jax")
    for dtype in ("float32", "float64"):
        names = map(str, one_of_each_operation(dtype, skip=skip))
        assert python("-c", AGREEMENT, key, *names).splitlines()


@pytest.mark.slow
@pytest.mark.peers
def test_compiled_code_agrees():
    pytest.importorskip("torch")
    names = ("gradient/layer/tiny/float64", "step-margin/lengths/tiny/float32")
    assert python("-c", AGREEMENT, "compile", *names).splitlines()


@pytest.mark.slow
def test_numpy_agrees_on_the_whole_grid():
    cells = [str(c) for c in GRID if not c.operation.startswith("predict") and c.dtype == "float64"]
    assert python("-c", AGREEMENT, "numpy", *cells).splitlines()


@pytest.mark.peers
def test_no_way_takes_fewer_multiply_adds_than_are_counted():
    """As torch counts those of its matrix products; some way takes as many where rows see all."""
    pytest.importorskip("torch")
    cells = [
        str(c)
        for c in design()
        if c.operation != "ntk" and not c.operation.startswith(("predict", "step-"))
    ]
    found = [line.split() for line in python("-c", PRODUCTS, *cells).splitlines()]
    assert len(found) == len(cells)
    for text, count, least in found:
        assert 0.0 < float(count) <= float(least), text
    equal = {text for text, count, least in found if count == least}
    assert {c for c in cells if c.startswith(("gradient/classifier", "forward/layer"))} <= equal


def test_multiply_adds_are_those_of_the_formulas():
    n, T, d, H, p = 6, 4, 5, 3, 2
    pairs, seen = n * T * T, n * T * (T + 1) // 2

    def count(text):
        return multiply_adds(draw_cell(parse_cell(text), TINY["tiny"]))

    by_W, by_V = n * T * d * d, n * T * d * p
    assert count("attention/classifier/tiny/float32") == H * (by_W + pairs * d)
    assert count("forward/layer/tiny/float32") == H * (by_W + pairs * d + by_V + pairs * p)
    assert count("forward/causal/tiny/float32") == H * (by_W + seen * d + by_V + seen * p)
    gradient = H * (2 * by_W + 4 * pairs * d)
    assert count("gradient/classifier/tiny/float32") == gradient
    assert count("step-margin/classifier/tiny/float32") == gradient
    assert count("gradient-everything/classifier/tiny/float32") == gradient + H * (
        by_W + 2 * pairs * d
    )
    assert count("step/identity/tiny/float32") == n * n  # outputs of outputs of samples
    assert count("ntk/classifier/tiny/float32") is None


def test_a_cell_is_measured_with_its_peers():
    one = measure(parse_cell("gradient/layer/tiny/float64"), ["numpy"], 1, ONCE, TINY["tiny"])
    assert set(one.best) == set(one.ordinary) == {"numpy"}
    assert 0.0 < one.at_peak < one.own.seconds
    assert one.lowest(ordinary=False) <= one.lowest(ordinary=True)
    assert one.lowest(ordinary=True) == pytest.approx(
        one.ordinary["numpy"].seconds / one.own.seconds
    )
    assert Measured.of_record(json.loads(json.dumps(one.record()))) == one


@pytest.mark.peers
def test_what_a_peer_cannot_do_is_said():
    pytest.importorskip("torch")
    problem = draw_cell(parse_cell("hvp/layer/tiny/float64"), TINY["tiny"])
    with pytest.raises(UnavailableError, match="no second derivatives"):
        cell_formulations(PEERS["sdpa"], problem, 1)


@pytest.mark.parametrize("spoilt", [np.nan, 1.0 + 2e-9])
def test_an_answer_that_differs_is_an_error(spoilt):
    truth = {"W": np.arange(6.0).reshape(2, 3)}
    wrong = {"W": truth["W"] * spoilt}
    assert check("a peer", truth, truth, "float64") == 0.0
    with pytest.raises(DisagreementError, match=r"a peer and mhfast differ by .* in W"):
        check("a peer", wrong, truth, "float64")
    with pytest.raises(DisagreementError, match="a peer has no W"):
        check("a peer", {}, truth, "float64")


def test_a_disagreeing_peer_is_not_timed(monkeypatch):
    real = cell_timing.cell_formulations

    def spoilt(peer, problem, threads):
        ways = real(peer, problem, threads)
        if peer.name == "numpy":
            ways = [Formulation("wrong", lambda: {}, lambda _: {"outputs": np.zeros(6)})]
        return ways

    monkeypatch.setattr(cell_timing, "cell_formulations", spoilt)
    with pytest.raises(DisagreementError, match="numpy, wrong"):
        measure(parse_cell("forward/classifier/tiny/float64"), ["numpy"], 1, ONCE, TINY["tiny"])


class Clock:
    """A clock that stands still but for what is called."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(cell_timing.time, "perf_counter", lambda: self.now)

    def way(self, name, *seconds, ordinary=False):
        """One whose calls take so long; the last number for all further ones."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Formulation(name, run, lambda _: {"outputs": np.ones(3)}, ordinary)


def test_second_calls_choose_and_lower_deciles_count(monkeypatch):
    """Compilation, in the first call, is not held against a formulation."""
    clock = Clock(monkeypatch)
    found = {
        "mhfast": [clock.way("own", 9.0, 2.0, 4.0, 5.0, 3.0)],
        "numpy": [
            clock.way("plain", 1.0, 20.0, ordinary=True),
            clock.way("compiled", 50.0, 6.0),
            clock.way("middle", 1.0, 8.0),
        ],
    }
    monkeypatch.setattr(cell_timing, "cell_formulations", lambda peer, *_: found[peer.name])
    effort = Effort(seconds=0.0, least_rounds=3, block=0.0)
    one = measure(parse_cell("forward/classifier/tiny/float64"), ["numpy"], 1, effort, TINY["tiny"])
    assert one.best["numpy"] == Contender("compiled", 50.0, 6.0, 3)
    assert one.ordinary["numpy"] == Contender("plain", 1.0, 20.0, 3)
    assert one.own == Contender("own", 9.0, 3.0, 3)
    assert one.lowest(ordinary=False) == pytest.approx(2.0)
    assert one.lowest(ordinary=True) == pytest.approx(20.0 / 3.0)


def test_a_step_of_training_is_a_share_of_a_loop(monkeypatch):
    """mhfast, which looks for a cheaper form first, takes 100 steps at least; others as many as a
    cell has."""
    clock = Clock(monkeypatch)
    asked = []

    def formulations(peer, problem, _):
        asked.append((peer.name, problem.steps))
        return [clock.way(peer.name, 1.0, 10.0)]

    monkeypatch.setattr(cell_timing, "cell_formulations", formulations)
    effort = Effort(seconds=0.0, least_rounds=3, block=0.0)
    cell = parse_cell("step-margin/layer/tiny/float64")
    one = measure(cell, ["numpy"], 1, effort, TINY["tiny"])
    assert asked == [("mhfast", 20), ("mhfast", 100), ("numpy", 20)]
    assert one.own == Contender("mhfast", 1.0, pytest.approx(0.1), 3, 100)
    assert one.best["numpy"] == Contender("numpy", 1.0, pytest.approx(0.5), 3, 20)
    assert one.lowest(ordinary=False) == pytest.approx(5.0)


def invented(**ratios: float) -> Map:
    """A map with cells of given ratios against the best; ordinary code takes twice as long."""
    cells = []
    for name, ratio in ratios.items():
        operation, model = name.split("__")
        own, best, plain = (Contender("", 1.0, 1e-3 * k, 5) for k in (1.0, ratio, 2.0 * ratio))
        cell = Cell(operation, model, "tiny", "float32")
        cells.append(Measured(cell, "6,4,5,2", own, {"numpy": plain}, {"numpy": best}))
    return Map({"isa": "avx2", "threads": 1}, cells)


MAP = invented(forward__layer=4.0, hvp__layer=0.9, hvp__tied=1.2, forward__tied=2.0)


def test_a_map_is_read_as_it_was_written(tmp_path):
    MAP.write(tmp_path / "map.json")
    assert Map.read(tmp_path / "map.json") == MAP
    assert len((tmp_path / "map.json").read_text().splitlines()) < 4 * len(MAP.cells)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json: expected a map"):
        Map.read(tmp_path / "other.json")


def test_tables_tell_ratios_and_low_cells():
    table = map_report.markdown(MAP)
    assert "| forward | 4.00 / 8.00 | 2.00 / 4.00 |" in table
    assert "| all cells | 4 | 1.71 | 3.43 | 1 | 2 |" in table  # (4 · .9 · 1.2 · 2)^(1/4)
    low = table.split("### Cells below 1.5")[1]
    assert low.index("hvp/layer") < low.index("hvp/tied")
    assert "forward" not in low
    assert "slower than the best in 1 of 4 cells" in MAP.message


def test_tables_say_where_and_how_they_were_measured():
    there = {"cpu": "a processor", "isa": "avx2", "threads": 2, "clock": "wall"}
    there |= {"versions": {"numpy": "2.4.6", "torch": "2.13.0"}, "load": 3.0, "variables": {}}
    said = map_report.conditions(dataclasses.replace(MAP, environment=there))
    assert said.startswith(
        "4 cells on a processor, avx2, 2 threads, by wall time, against numpy (numpy 2.4.6)."
    )
    assert said.endswith("Caution: other work keeps about 3.0 cores busy: times will vary.")


def test_changed_ratios_are_listed_the_worst_first():
    now = invented(forward__layer=2.0, hvp__layer=0.95, hvp__tied=2.4, step__tied=9.0)
    found = [(str(cell), was, ratio) for cell, was, ratio in map_report.changes(now, MAP, 1.25)]
    assert found == [
        ("forward/layer/tiny/float32", pytest.approx(4.0), pytest.approx(2.0)),
        ("hvp/tied/tiny/float32", pytest.approx(1.2), pytest.approx(2.4)),
    ]
    other = dataclasses.replace(MAP, environment={"isa": "avx512", "threads": 1})
    assert map_report.differing(other.environment, MAP.environment) == [
        "isa: avx2 before, avx512 now"
    ]


def test_the_figure_is_drawn_from_a_map(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from mhfast._bench import map_figure

    map_figure.draw(MAP, tmp_path / "map.png")
    pixels = imread(tmp_path / "map.png")
    assert pixels.shape[1] == 1600
    red, green, blue = (pixels[..., k] for k in range(3))
    assert ((red > 0.8) & (green < 0.75) & (blue < 0.6)).any()  # of .9


def test_the_command_measures_compares_and_writes(tmp_path):
    """In processes of its own, NumPy only."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "performance.md"
    page.write_text(
        "before\n<!-- map: python -m benchmarks.map --write docs -->\nold\n"
        "<!-- end of the map -->\nafter\n"
    )
    MAP.write(tmp_path / "before.json")
    output = python(
        "-m", "benchmarks.map", "--cell", "forward/layer/tiny/float32", "--quick",
        "--peers", "numpy", "--jobs", "1", "--write", str(tmp_path),
        "--compare", str(tmp_path / "before.json"), "--factor", "1000",
    )  # fmt: skip
    assert "0 ratios against the best changed by more than 1000" in output
    found = Map.read(tmp_path / "map.json")
    assert [str(one.cell) for one in found.cells] == ["forward/layer/tiny/float32"]
    assert found.environment["versions"]["numpy"] == np.__version__
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "### Operations by models" in text
    assert (tmp_path / "map.png").exists()


def test_wrong_arguments_are_named():
    command = [sys.executable, "-m", "benchmarks.map", "--cell", "forward/layer/tiny"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "got 'forward/layer/tiny'" in done.stderr
