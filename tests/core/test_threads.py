"""Every kind of training gives the same bits on any number of threads, again and again."""

import itertools

import pytest
from trainings import MODELS, OPTIMIZERS, PARAMETERS, PROJECTIONS, draw

import mhfast as mh

REPEATS = 20  # with each optimizer twice, on two and on four threads
# Samples that make a step worth four threads: n q rows, each of 5.8e3 flops or more, come to four
# times the kFlopsPerThread of csrc/runtime/tuning.hpp.
SAMPLES = {"dense": 56, "low rank": 56, "tied": 56, "token": 300, "prompt and identity": 500}


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_on_any_number_of_threads(kind, parameter):
    model, data = draw(kind, parameter, float, SAMPLES.get(parameter, 110), 7, 9, 6)
    assert mh.explain(model, data)["chunks"] >= 4
    rules = itertools.cycle(OPTIMIZERS.values())
    # All samples, batches of as many as are worth several threads, batches that one thread takes.
    batches = itertools.cycle((None, 3 * len(data.X) // 4, 5))
    records = {"loss": 3, "grad_norm": 2}
    for _, rule, projection, batch in zip(
        range(REPEATS), rules, itertools.cycle(PROJECTIONS), batches
    ):
        options = {
            "steps": 8, "optimizer": rule(**projection), "batch": batch,
            "record": ("loss", "grad_norm") if batch is None else records,
        }  # fmt: skip
        one = mh.train(model, data, num_threads=1, **options)
        for threads in (2, 4):
            assert mh.train(model, data, num_threads=threads, **options) == one


@pytest.mark.parametrize("batch", [5, 180])
@pytest.mark.parametrize(
    "rule",
    [
        mh.SteepestDescent(0.01, norm="spectral"),
        mh.GradientDescent(
            0.1, project="ball", project_by="head", project_norm="nuclear", radius=1.0
        ),
    ],
    ids=lambda rule: rule.name,
)
def test_every_member_of_a_team_has_room_of_its_own(rule, batch):
    """Also where one thread takes the steps on batches and a team the passes over all samples."""
    model, data = draw(mh.Classifier, "dense", float, 240, 7, 9, 6)
    options = {"steps": 8, "optimizer": rule, "batch": batch, "record": {"loss": 1}}
    one = mh.train(model, data, num_threads=1, **options)
    for threads in (2, 4):
        assert mh.train(model, data, num_threads=threads, **options) == one
