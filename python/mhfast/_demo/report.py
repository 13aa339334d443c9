"""The demo in words: a small table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .experiments import CONVENTIONS, STARTS, DigitsResult, HeadsResult, SaturationResult


def table(digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult) -> str:
    """Return what the three experiments found, at their last steps."""
    lines = [*_digits(digits), "", *_heads(heads), "", *_saturation(saturation)]
    return "\n".join(lines)


def _digits(result: DigitsResult) -> Iterator[str]:
    settings = result.settings
    accuracy = 100.0 * (1.0 - result.test_error[:, -1])
    yield (
        f"Digits 3 against 8: {settings.heads} heads, {settings.splits} random splits, "
        f"{settings.steps} steps of gradient descent"
    )
    yield (
        f"  test accuracy {accuracy.mean():.1f} % on average, "
        f"{accuracy.min():.1f} to {accuracy.max():.1f} % over the splits; "
        f"training loss {result.train_loss[:, -1].mean():.4f}"
    )


def _heads(result: HeadsResult) -> Iterator[str]:
    settings = result.settings
    yield (
        f"Role of H on the tokenized mixture: n = {settings.n_train}, {settings.n_test} test, "
        f"mean of {settings.trials} trials, {settings.steps} steps"
    )
    columns = [(start, convention) for start in STARTS for convention in CONVENTIONS]
    yield f"  {'start':>4}  " + "".join(f"{start:>19}" for start, _ in columns)
    steps = {"constant": f"lr {settings.lr:g}", "sqrt(H)": f"lr {settings.lr:g} sqrt(H)"}
    yield f"  {'H':>4}  " + "".join(f"{steps[convention]:>19}" for _, convention in columns)
    for H in settings.heads:
        cells = []
        for start, convention in columns:
            loss = result.train_loss[start, convention, H][:, -1].mean()
            error = 100.0 * result.test_error[start, convention, H][:, -1].mean()
            cells.append(f"{loss:>11.4f} {error:>5.1f} %")
        yield f"  {H:>4}  " + "".join(cells)
    yield "  (training loss, test error)"


def _saturation(result: SaturationResult) -> Iterator[str]:
    settings = result.settings
    yield (
        f"Saturation: change of W when the tokens are reversed, {settings.steps} normalized steps, "
        f"median of {settings.instances} instances"
    )
    for name, changes in (("textbook gradients", result.textbook), ("mhfast", result.mhfast)):
        yield f"  {name:<19} {np.median(changes[:, -1]):.1e}"
