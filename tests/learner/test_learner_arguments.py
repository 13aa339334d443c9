"""Arrays of a wrong shape and objects of other sizes are refused in one sentence."""

import inspect
import re

import numpy as np
import pytest

import mhfast as mh
from mhfast import learner

N, T, D, H, P = 900, 3, 4, 2, 5


@pytest.fixture(scope="module")
def parts():
    """What the phases make of examples with d = 4, and the same with d = 6, by "other " names."""
    made = {}
    for name, d in (("", D), ("other ", 6)):
        data = mh.data.boolean_layer(N, T, d, H, out_dim=P, seed=0)
        truth = data.truth["layer"]
        examples = learner.as_examples(data.X, data.y)
        known = learner.SumEstimate(truth.V.sum(axis=0), 0.0, 0.05, 2)
        facts = learner.certify(examples, known, count=200)
        body = learner.sculpt(facts, H)
        for key, value in {
            "X": data.X, "Y": data.y, "truth": truth, "examples": examples, "sum": known,
            "facts": facts, "body": body,
        }.items():  # fmt: skip
            made[name + key] = value
    return made


CALLS = {
    ("agreement", "W"): (
        lambda p, a: learner.agreement(p["facts"], a),
        f"W: expected shape (H, d, d) = (H, {D}, {D})",
    ),
    ("as_examples", "X"): (
        lambda p, a: learner.as_examples(a, p["Y"]),
        "X: expected shape (n, T, d)",
    ),
    ("as_examples", "Y"): (
        lambda p, a: learner.as_examples(p["X"], a),
        f"Y: expected shape (n, T, p) = ({N}, {T}, p)",
    ),
    ("hull_cosine", "directions"): (
        lambda p, a: learner.hull_cosine(a, p["truth"].W),
        f"directions: expected shape (k, d, d) = (k, {D}, {D})",
    ),
    ("hull_cosine", "truth"): (
        lambda p, a: learner.hull_cosine(p["body"].directions, a),
        "truth: expected shape (H, d, d)",
    ),
    ("learn_layer", "X"): (
        lambda p, a: learner.learn_layer(a, p["Y"]),
        "X: expected shape (n, T, d)",
    ),
    ("learn_layer", "Y"): (
        lambda p, a: learner.learn_layer(p["X"], a),
        f"Y: expected shape (n, T, p) = ({N}, {T}, p)",
    ),
    ("one_hot_sum", "point"): (
        lambda p, a: learner.one_hot_sum(p["examples"], a),
        f"point: expected shape (d, d) = ({D}, {D})",
    ),
    ("propose_heads", "eigenvalues"): (
        lambda _, a: learner.propose_heads(a),
        "eigenvalues: expected shape (k,)",
    ),
    ("refine", "X"): (
        lambda p, a: learner.refine(p["truth"], a, p["Y"]),
        f"X: expected shape (n, T, d) = (n, T, {D})",
    ),
    ("refine", "Y"): (
        lambda p, a: learner.refine(p["truth"], p["X"], a),
        f"Y: expected shape (n, T, p) = ({N}, {T}, {P})",
    ),
    ("solve_values", "W"): (
        lambda p, a: learner.solve_values(p["examples"], a),
        f"W: expected shape (H, d, d) = (H, {D}, {D})",
    ),
    ("visible_part", "X"): (
        lambda p, a: learner.visible_part(p["truth"], a),
        "X: expected shape (n, T, d)",
    ),
}


def test_every_array_of_a_public_function_is_here():
    found = set()
    for name in learner.__all__:
        function = getattr(learner, name)
        if inspect.isfunction(function):
            for argument, parameter in inspect.signature(function).parameters.items():
                if "ArrayLike" in str(parameter.annotation) or parameter.annotation == "Float64":
                    found.add((name, argument))
    assert found == set(CALLS)


@pytest.mark.parametrize(("function", "argument"), CALLS)
@pytest.mark.parametrize("shape", [(), (2, 3), (2, 3, 5, 7)])
def test_a_wrong_shape(parts, function, argument, shape):
    call, message = CALLS[function, argument]
    with pytest.raises(ValueError, match="^" + re.escape(f"{message}, got {shape}")):
        call(parts, np.ones(shape))


@pytest.mark.parametrize(("function", "argument"), CALLS)
def test_numbers_that_are_not_real(parts, function, argument):
    call, _ = CALLS[function, argument]
    for wrong in (np.ones((2, D, D), complex), "x", np.full((2, D, D), None)):
        with pytest.raises(TypeError, match=f"^{argument}: "):
            call(parts, wrong)


NOT_FINITE = {
    "agreement": lambda p: learner.agreement(p["facts"], np.full((H, D, D), np.nan)),
    "directions": lambda p: learner.hull_cosine(np.full((1, D, D), np.nan), p["truth"].W),
    "truth": lambda p: learner.hull_cosine(p["body"].directions, np.full((H, D, D), np.inf)),
    "point": lambda p: learner.one_hot_sum(p["examples"], np.full((D, D), np.nan)),
    "eigenvalues": lambda _: learner.propose_heads([1.0, np.nan, 2.0]),
    "W": lambda p: learner.solve_values(p["examples"], np.full((H, D, D), np.nan)),
    "X": lambda p: learner.visible_part(p["truth"], np.full((N, T, D), np.nan)),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_numbers_that_are_not_finite(parts, name):
    with pytest.raises(ValueError, match=r": expected finite numbers, got NaN or inf$"):
        NOT_FINITE[name](parts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: learner.search_net(p["examples"], p["other body"], p["facts"]),
            rf"body\.point: expected shape \(d, d\) = \({D}, {D}\), got \(6, 6\)",
        ),
        (
            lambda p: learner.search_net(p["examples"], p["body"], p["other facts"]),
            rf"facts\.X: expected shape \(n, T, d\) = \(n, T, {D}\), got ",
        ),
        (
            lambda p: learner.one_hot_sum(p["examples"], p["other body"].point),
            rf"point: expected shape \(d, d\) = \({D}, {D}\), got \(6, 6\)",
        ),
        (
            lambda p: p["body"].at([1.0, 2.0]),
            r"coordinates: expected shape \(\.\.\., H - 1\) = \(\.\.\., 1\), got \(2,\)",
        ),
        (
            lambda p: p["facts"].of(p["other truth"].W),
            rf"directions: expected shape \(\.\.\., d, d\) = \(\.\.\., {D}, {D}\), got ",
        ),
        (
            lambda p: p["examples"].whole_layer(mh.Layer.zeros(H, D, P + 1)),
            rf"layer: expected p = {P} outputs, got {P + 1}",
        ),
        (
            lambda p: learner.refine_sum(p["examples"], p["sum"], shares=()),
            r"shares: expected a sequence of at least one number, got \(\)",
        ),
        (
            lambda p: learner.solve_values(p["examples"], p["truth"].W[:0]),
            r"W: expected at least one head, got shape \(0, 4, 4\)",
        ),
        (
            lambda p: learner.solve_values(p["examples"], p["truth"].W, samples=0),
            r"samples: expected an integer of at least 1, got 0",
        ),
        (
            lambda p: learner.visible_part(p["truth"], p["X"][:0]),
            r"X: expected no axis of length 0, got shape \(0, 3, 4\)",
        ),
        (
            lambda p: learner.merge_heads(p["truth"], tolerance=-1.0),
            r"tolerance: expected a number of at least 0, got -1\.0",
        ),
        (
            lambda _: learner.propose_heads([]),
            r"eigenvalues: expected at least one number, got none",
        ),
        (
            lambda _: learner.propose_heads([1.0, 3.0, 2.0]),
            r"eigenvalues: expected positive numbers in ascending order, got others",
        ),
        (
            lambda _: learner.propose_heads([0.0, 3.0]),
            r"eigenvalues: expected positive numbers in ascending order, got others",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(parts, call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(parts)


def test_kinds(parts):
    noisy = learner.as_examples(parts["X"], parts["Y"], 0.1)
    with pytest.raises(TypeError, match=r"^visible: expected a Visible, got int"):
        learner.estimate(noisy, parts["truth"], visible=3)
    with pytest.raises(TypeError, match=r"^tolerance: expected a real number, got"):
        learner.align(parts["truth"], parts["truth"], tolerance="x")
    with pytest.raises(TypeError, match=r"^layer: expected a Layer, got ndarray"):
        parts["examples"].whole_layer(parts["truth"].W)
    with pytest.raises(TypeError, match=r"^fewest_tokens: expected an integer, got"):
        learner.as_examples(parts["X"], parts["Y"], fewest_tokens="two")


def test_lists_are_read(parts):
    W = parts["truth"].W
    few = learner.solve_values(parts["examples"], W.tolist())
    assert np.array_equal(few.V, learner.solve_values(parts["examples"], W).V)
    assert learner.propose_heads([1e-5, 2e-5, 0.4, 0.5, 0.6])[0] == 2
    # One eigenvalue, of d = 1, has no step: one head, and a guess.
    assert learner.propose_heads([0.5]) == (1, 1.0)
    # Of guesses four heads at most: the fifth step, by 1.3, is one.
    steps = [1.2, 1.2, 1.2, 1.25, 1.3, 1.0, 1.0]
    assert learner.propose_heads(np.cumprod([1.0, *steps]))[0] == 4
    assert parts["body"].at([[2.0]]).shape == (1, D, D)
