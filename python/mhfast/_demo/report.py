"""The text of the demo: a small table for the terminal, and what it shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .experiments import CONVENTIONS, STARTS, DigitsResult, HeadsResult, SaturationResult


def table(digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult) -> str:
    """Return what the three experiments found, at their last steps."""
    lines = [*_digits(digits), "", *_heads(heads), "", *_saturation(saturation), ""]
    return "\n".join([*lines, *_shown(digits, heads, saturation)])


def record(
    digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult
) -> dict[str, object]:
    """Return the same numbers by name, as JSON can hold them."""
    return {
        "digits": {
            "test_accuracy": (1.0 - digits.test_error[:, -1]).tolist(),
            "train_loss": digits.train_loss[:, -1].tolist(),
        },
        "heads": [
            {
                "start": start,
                "step_size": convention,
                "heads": H,
                "train_loss": float(losses[:, -1].mean()),
                "test_error": float(heads.test_error[start, convention, H][:, -1].mean()),
            }
            for (start, convention, H), losses in heads.train_loss.items()
        ],
        "saturation": {
            "textbook": float(np.median(saturation.textbook[:, -1])),
            "mhfast": float(np.median(saturation.mhfast[:, -1])),
        },
    }


def loss_ratio(result: HeadsResult, convention: str) -> float:
    """Return the last training loss with most heads over that with fewest, from a zero start."""
    of = {H: result.train_loss["zero", convention, H][:, -1].mean() for H in result.settings.heads}
    return float(of[max(of)] / of[min(of)])


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
    yield "  H is the number of heads, whose readouts are added and divided by sqrt(H). From a"
    yield "  zero start all parameters are 0 and all heads move alike. A random step start is one"
    yield "  gradient step from there, with a random sign for each head. Steps have the size lr for"
    yield "  every H, or grow with sqrt(H), as in the theory."


def _saturation(result: SaturationResult) -> Iterator[str]:
    settings = result.settings
    yield (
        f"Saturation: change of W when the tokens are reversed, {settings.steps} normalized steps, "
        f"median of {settings.instances} instances"
    )
    for name, changes in (("textbook gradients", result.textbook), ("mhfast", result.mhfast)):
        yield f"  {name:<19} {np.median(changes[:, -1]):.1e}"


def _shown(digits: DigitsResult, heads: HeadsResult, saturation: SaturationResult) -> Iterator[str]:
    """Say in words what the numbers above show."""
    yield "What this shows"
    accuracy = 100.0 * (1.0 - digits.test_error[:, -1].mean())
    yield f"  Attention over the rows of an image tells 3 from 8 in {accuracy:.1f} % of new images."
    few, many = min(heads.settings.heads), max(heads.settings.heads)
    ratios = {convention: loss_ratio(heads, convention) for convention in CONVENTIONS}
    yield (
        f"  From a zero start the loss with {many} heads is {ratios['constant']:.2g} times that "
        f"with {few} if all take steps"
    )
    yield (
        f"  of one size, and {ratios['sqrt(H)']:.2g} times if the size grows with sqrt(H): what "
        "more heads do is in"
    )
    yield "  part what longer steps do."
    textbook, ours = (
        float(np.median(changes[:, -1])) for changes in (saturation.textbook, saturation.mhfast)
    )
    yield "  The order of the tokens does not matter in exact arithmetic. It changes W by"
    yield f"  {textbook:.0e} with textbook gradients, and by {ours:.0e} with those of mhfast."
