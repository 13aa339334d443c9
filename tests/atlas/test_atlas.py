"""The atlas: what is found in quick form, and how it is told."""

from __future__ import annotations

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("cvxpy")

from matplotlib.figure import Figure

from mhfast import cli, theory
from mhfast._atlas import (
    catalogue,
    command,
    induction_heads,
    next_token_attention,
    next_token_bias,
    report,
)
from mhfast._atlas.experiment import Claim, Experiment, Outcome

PAGES = Path(__file__).parents[2] / "docs" / "atlas"


def outcome(value: float) -> Outcome:
    claims = [Claim("a cosine", value, 0.99), Claim("an error", 1e-3, 1e-2, at_least=False)]
    return Outcome(("steps", "loss"), [("ten", 0.25), ("a hundred", 1 / 3)], claims, Figure())


@pytest.fixture
def experiment(monkeypatch):
    """An experiment of the name rank_growth that only returns what it is told to."""
    made = Experiment(
        "A title", "Authors, Paper, 2024", "It says so.", "Our choice.", lambda _: outcome(1.0)
    )
    monkeypatch.setattr(command, "load", lambda _: made)
    return made


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "holds"),
    [
        (0.99, 0.99, True, True),
        (0.98, 0.99, True, False),
        (0.99, 0.99, False, True),
        (1.0, 0.99, False, False),
        (math.nan, 0.99, True, False),
        (math.nan, 0.99, False, False),
    ],
)
def test_a_claim(value, limit, at_least, holds):
    claim = Claim("what", value, limit, at_least)
    assert claim.holds is holds
    assert str(claim).startswith("holds: what" if holds else "DOES NOT HOLD: what")


@pytest.mark.usefixtures("experiment")
def test_files_and_what_is_printed(tmp_path, capsys):
    assert cli.main(["reproduce", "rank_growth", "--quick", "--output", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"rank_growth.{end}" for end in ("png", "csv", "md")
    }
    with (tmp_path / "rank_growth.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["steps", "loss"], ["ten", "0.25"], ["a hundred", repr(1 / 3)]]
    page = (tmp_path / "rank_growth.md").read_text("utf-8")
    assert page.startswith("# A title\n\nAuthors, Paper, 2024\n\n**The claim.** It says so.")
    assert "| a hundred | 0.33333 |" in page
    assert "`mhfast reproduce rank_growth --quick`" in page
    out = capsys.readouterr().out
    assert "a hundred  0.33333" in out
    assert "holds: an error: 0.001 (at most 0.01)" in out


def test_a_claim_that_does_not_hold_is_the_exit_status(experiment, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "load", lambda _: replace(experiment, run=lambda _: outcome(0.5)))
    assert cli.main(["reproduce", "rank_growth", "token_selection", "--output", str(tmp_path)]) == 1
    assert "DOES NOT HOLD: a cosine: 0.5 (at least 0.99)" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 6  # all are run all the same


def test_numbers_as_json(experiment, monkeypatch, tmp_path, capsys):
    """With the exit status of what is printed otherwise; None for what JSON has no number for."""
    monkeypatch.setattr(
        command, "load", lambda _: replace(experiment, run=lambda _: outcome(math.nan))
    )
    assert cli.main(["reproduce", "rank_growth", "--json", "--output", str(tmp_path)]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") >= 0.0
    assert found == {
        "name": "rank_growth",
        "title": "A title",
        "paper": "Authors, Paper, 2024",
        "columns": ["steps", "loss"],
        "rows": [["ten", 0.25], ["a hundred", 1 / 3]],
        "claims": [
            {"statement": "a cosine", "value": None, "limit": 0.99, "at_least": True,
             "holds": False},
            {"statement": "an error", "value": 1e-3, "limit": 1e-2, "at_least": False,
             "holds": True},
        ],
        "figure": str(tmp_path / "rank_growth.png"),
    }  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 3


def test_the_list_as_json(capsys):
    assert cli.main(["reproduce", "--json"]) == 0
    titles = {name: catalogue.load(name).title for name in catalogue.NAMES}
    assert json.loads(capsys.readouterr().out) == titles


def test_the_list_names_every_experiment(capsys):
    assert cli.main(["reproduce"]) == 0
    out = capsys.readouterr().out
    for name in catalogue.NAMES:
        assert f"{catalogue.load(name).title}\n" in out.partition(name)[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["induction"], "NAME: expected one of multi_head_classifier, .*, got induction"),
        (
            ["rank_growth", "--output", "nowhere"],
            "--output: expected an existing directory, got nowhere",
        ),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["reproduce", *arguments])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_unknown_name_is_not_loaded():
    with pytest.raises(ValueError, match=r"expected one of .*rank_growth, got 'os'"):
        catalogue.load("os")


@pytest.mark.parametrize("name", catalogue.NAMES)
def test_the_page_is_that_of_the_experiment(name):
    experiment = catalogue.load(name)
    page = (PAGES / f"{name}.md").read_text("utf-8")
    head = report.page(name, experiment, outcome(1.0), quick=False).partition("![")[0]
    assert page.startswith(head)
    assert page.rstrip().endswith(f"`mhfast reproduce {name}`")
    assert "DOES NOT HOLD" not in page
    assert (PAGES / f"{name}.png").stat().st_size > 10_000


def test_the_finite_part_of_next_tokens():
    """After 0 the token 1 came twice, 2 once: their logits differ by log 2, 3 gets no attention."""
    E = np.eye(4, next_token_attention.DIM)
    ids, following = np.array([[1, 2, 3, 0]] * 3), np.array([1, 1, 2])
    svm = theory.next_token_svm(ids, following, embedding=E)
    W, infimum = next_token_attention.finite_part(
        next_token_attention.Sentences(ids, following, E), svm
    )
    expected = np.zeros((8, 8))
    expected[0, 1:3] = np.array([1.0, -1.0]) * np.log(2.0) / 2
    np.testing.assert_allclose(W, expected, atol=1e-8)  # BFGS stops at slopes of 1e-9
    assert infimum == pytest.approx(np.log(3.0) - 2 * np.log(2.0) / 3, rel=1e-12)


def test_log_odds_of_next_words():
    """In the subspace all differences of logits are log-odds; nothing else is in it."""
    one = next_token_bias.contexts(0, 3)
    projection, W = next_token_bias.log_odds(one)
    np.testing.assert_allclose(projection @ W.ravel(), W.ravel(), atol=1e-12)
    assert np.trace(projection) == pytest.approx(2 * len(one.vectors))  # the dimension
    for logits, p in zip(one.vectors @ W, one.chances, strict=True):
        seen = p > 0
        expected = np.log(p[seen] / p[seen][0])
        np.testing.assert_allclose(logits[seen] - logits[seen][0], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "margin"),
    [("Frobenius", (6 / 5) ** 0.5), ("largest entry", 2.0), ("spectral", (6 / 5) ** 0.5)],
)
def test_separations_of_one_context(norm, margin):
    """Row 0 of W is all: 5/6 for the word seen and -1/6 for others, or 1/2 and -1/2."""
    H, P = np.eye(1, next_token_bias.DIM), np.eye(1, next_token_bias.WORDS)
    one = next_token_bias.Contexts(H, P)
    W = next_token_bias.separation(one, norm)
    # Clarabel stops at a gap of 1e-8
    assert next_token_bias.normalized_margin(W, one, norm) == pytest.approx(margin, rel=1e-6)


def test_sequences_repeat_what_follows_a_trigger():
    """Rows of weight 1 hold a token that was there before, and what followed it follows again."""
    words, tokens, n = 11, 23, 40
    data = induction_heads.sequences(n, 3, words=words, tokens=tokens)
    assert data.X.shape == (n, tokens, words + tokens)
    word = data.X[..., :words].argmax(axis=-1)
    assert (data.X[..., words:] == np.eye(tokens)).all()
    np.testing.assert_array_equal(data.y[:, :-1], word[:, 1:])
    weight = np.asarray(data.weight)
    assert 0.1 < weight.mean() < 0.5
    for i, t in np.argwhere(weight > 0):
        before = np.flatnonzero(word[i, :t] == word[i, t])
        assert before.size
        assert (word[i, before + 1] == data.y[i, t]).all()


def test_weights_of_heads_are_measured_where_they_matter():
    """Even weights: 1/(t+1) of the token before; of what followed, its share of the tokens seen."""
    words, tokens = 11, 23
    data = induction_heads.sequences(7, 0, words=words, tokens=tokens)
    start = induction_heads.two_layers(words, tokens, 0)
    even = start.replace(layers=[layer.replace(W=np.zeros_like(layer.W)) for layer in start.layers])
    expected = np.mean([1 / (t + 1) for t in range(1, tokens - 1)])
    assert induction_heads.previous_token(even, data) == pytest.approx(expected, rel=1e-12)
    word = data.X[..., :words].argmax(axis=-1)
    shares = [
        np.count_nonzero(word[i, :t] == word[i, t]) / (t + 1)
        for i, t in np.argwhere(np.asarray(data.weight) > 0)
    ]
    found = induction_heads.after_the_same(even, data, words)
    assert found == pytest.approx(np.mean(shares), rel=1e-12)
    assert induction_heads.without_first(even) == even


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.NAMES)
def test_an_experiment(name):
    found = catalogue.load(name).run(quick=True)
    wrong = [str(claim) for claim in found.claims if not claim.holds]
    assert not wrong
    assert found.figure.get_size_inches()[0] * found.figure.dpi == 1600
    assert all(len(row) == len(found.columns) for row in found.rows)
