"""Trainings of the model family in `mhfast bench`: everyone computes what the reference does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from mhfast._bench import families
from mhfast._bench.families import FAMILIES, Training
from mhfast._bench.implementation import Local
from mhfast._bench.measure import QUICK, Bench
from mhfast._bench.peers import PEERS
from mhfast._bench.shapes import Shape

SMALL = Shape(6, 4, 3, 2)
COMMAND = "import sys; from mhfast._bench import main; sys.exit(main())"

# Every formulation of an implementation, on every kind of training; in a process of its own, as
# torch and jax have process-wide settings and threads. Their float32 is compared with what float64
# gives on the same numbers.
AGREEMENT = """
import sys
import numpy as np
from mhfast import GradientDescent, Layer, Classifier, NormalizedGradientDescent, reference
from mhfast._bench import families
from mhfast._bench.families import Training
from mhfast._bench.peers import PEERS, family_formulations
from mhfast._bench.problem import Answer, check_agreement
from mhfast._bench.shapes import Shape

shape = Shape(6, 4, 3, 2)
for training in (
    Training(shape, 3, runs=5, last=True, normalized=True),
    Training(shape, 3, runs=8),
    Training(shape, 3),
    Training(shape, 3, "layer", outputs=5, last=True),
    Training(shape, 3, "layer", outputs=5, normalized=True),
    Training(shape, 3, "layer", outputs=5, runs=4),
):
    for dtype in training.dtypes:
        problem = families.draw(training, dtype)
        classifier = training.model == "classifier"
        kind, loss = (Classifier, "logistic") if classifier else (Layer, "squared")
        model = kind(problem.W, problem.readout, -1 if training.last else None)
        rule = NormalizedGradientDescent if training.normalized else GradientDescent
        trained, history = reference.train(
            model, problem.X, problem.y, steps=3, optimizer=rule(training.lr), loss=loss
        )
        truth = Answer(
            history["loss"][..., -2], trained.W, trained.U if classifier else trained.V
        )
        for formulation in family_formulations(PEERS[sys.argv[1]], problem, training, 1):
            answer = formulation.answer(formulation.run())
            assert answer.W.dtype == answer.U.dtype == dtype
            check_agreement(formulation.name, answer, truth, dtype)
            print(formulation.name)
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "key",
    [
        "mhfast",
        "numpy",
        pytest.param("torch", marks=pytest.mark.peers),
        pytest.param("compile", marks=(pytest.mark.peers, pytest.mark.slow)),
        pytest.param("jax", marks=pytest.mark.slow),
    ],
)
def test_every_formulation_agrees_with_the_reference(key):
    if find_spec(PEERS[key].package) is None:
        pytest.skip(f"could not import '{PEERS[key].package}'")
    assert python("-c", AGREEMENT, key)


def test_a_quick_run_writes_its_table(tmp_path):
    results = tmp_path / "bench.json"
    output = python(
        "-c", COMMAND, "--quick", "--shapes", "none", "--loops", "none", "--families", "all-rows",
        "--peers", "numpy", "--threads", "1", "--json", str(results),
    )  # fmt: skip
    (row,) = json.loads(results.read_text())["families"]
    assert row["dtype"] == "float64"
    assert row["work"] == "100 x 6,8,10,1"
    assert row["steps"] == QUICK.steps
    assert set(row["timings"]) == {"mhfast", "numpy"}
    assert 0.0 < row["timings"]["numpy"]["difference"] < 1e-12  # TOLERANCE of the bench
    assert "Trainings of the model family, microseconds a step" in output
    assert "100 x 6,8,10,1" in output


def test_peers_without_the_family_take_no_part():
    bench = Bench(Local, ["sdpa", "numpy"], threads=1, budget=QUICK)
    comparison = bench.family(Training(SMALL, 4, runs=5), "float64")
    assert set(comparison.timings) == {"mhfast", "numpy"}
    assert comparison.missing == {}
    assert comparison.work.loop == Training(SMALL, 4, runs=5)


def test_the_list_is_the_one_that_speed_is_promised_for():
    sizes = {name: (str(t.shape), t.runs, t.rows, t.steps) for name, t in FAMILIES.items()}
    assert sizes["hundred"] == ("6,8,10,1", 100, 1, 2000)
    assert sizes["five-hundred"] == ("6,8,10,1", 500, 1, 2000)
    assert sizes["last-token"][:3] == ("5000,32,5,4", 1, 1)
    assert [t.model for t in families.chosen(["main"])] == ["classifier"] * 4 + ["layer"] * 2
    assert families.chosen(["none"]) == []
    with pytest.raises(ValueError, match=r"families: expected main, none or hundred, .* got few"):
        families.chosen(["few"])


def test_operations_are_counted_by_the_common_formula():
    # R n H q (4 d² + 8 T d), and for a layer R n H q 6 p d more
    assert Training(SMALL, 1, runs=5).flops == 5 * 6 * 2 * 4 * (36 + 96)
    assert Training(SMALL, 1).flops == SMALL.flops
    assert Training(SMALL, 1, "layer", outputs=7, last=True).flops == 6 * 2 * (36 + 96 + 126)


def test_the_problem_has_its_shapes_and_is_the_same_on_every_call():
    training = Training(SMALL, 1, "layer", outputs=7, last=True, runs=5)
    one, two = families.draw(training, "float32"), families.draw(training, "float32")
    for field in dataclasses.fields(one):
        assert np.array_equal(getattr(one, field.name), getattr(two, field.name))
    assert (one.X.shape, one.Z.shape, one.y.shape) == ((5, 6, 4, 3), (5, 6, 1, 3), (5, 6, 1, 7))
    assert (one.W.shape, one.readout.shape) == ((5, 2, 3, 3), (5, 2, 3, 7))
    assert np.array_equal(one.Z[:, :, 0], one.X[:, :, -1])
