"""Figures: those of the documentation have one width, and names stand at the ends of lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DRAWN = sorted((ROOT / "docs").rglob("*.png"))


def width(path: Path) -> int:
    """What the header of a PNG file says, which begins with the first of its chunks."""
    header = path.read_bytes()[:20]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big")


def test_there_are_figures_and_each_is_shown():
    assert len(DRAWN) > 20
    pages = [page.read_text("utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]]
    for figure in DRAWN:
        assert any(f"{figure.name})" in page for page in pages), figure.name


@pytest.mark.parametrize("figure", DRAWN, ids=lambda path: path.stem)
def test_a_figure_of_the_documentation_is_1600_pixels_wide(figure):
    assert width(figure) == 1600


def test_a_title_is_broken_into_lines_of_about_one_length(tmp_path):
    figures = figures_module()
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    message = f"{words} {words}"
    figure = figures.titled(message, 2.5)
    figure.savefig(tmp_path / "figure.png")
    assert width(tmp_path / "figure.png") == 1600
    lines = figure.texts[0].get_text().split("\n")
    assert " ".join(lines) == message
    assert len(lines) == 2
    assert max(map(len, lines)) - min(map(len, lines)) < 10
    for whole in (words, f"{words}\nx", 200 * "m"):  # short, broken already, not to be broken
        assert figures.titled(whole, 2.5).texts[0].get_text() == whole


def test_names_of_lines_stand_apart_and_in_order():
    from matplotlib.figure import Figure

    figures = figures_module()
    ax = Figure().subplots()
    ax.set(xlim=(0, 3), ylim=(1e-4, 1), yscale="log")
    lines = [(1e-2, "b"), (1e-3, "a"), (1.1e-2, "c"), (np.nan, "none"), (1.2e-2, "d")]
    figures.name_lines(ax, [(y, name, "black") for y, name in lines], apart=0.1)
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert list(heights) == ["a", "b", "c", "d"]
    # The three that meet near 1e-2, half of the height, are moved apart around it (to 1e-3,
    # as a hundred passes do); 1e-3 stays.
    assert np.diff(list(heights.values())).min() > 0.1 - 1e-3
    assert heights["a"] == pytest.approx(0.25)
    assert heights["c"] == pytest.approx(np.log10(1e4 * 1.1e-2) / 4, abs=0.01)


def test_lines_are_named_where_they_leave_the_axes():
    from matplotlib.figure import Figure

    figures = figures_module()
    ax = Figure().subplots()
    ax.plot([1, 2, 4], [1, 3, 8], color="red", label="beyond")  # of which (4, 8) is not shown
    ax.plot([1, 2, 3], [2, 5, np.nan], color="green", label="ends early")
    ax.plot([1, 2, 3], [7, 7, 7], color="blue")
    ax.axhline(9, color="gray", label="level")
    ax.plot([1, 3], [np.nan, np.nan], label="nowhere")
    ax.set(xlim=(3, 0), ylim=(0, 10))  # the axis of x goes from right to left
    figures.name_lines(ax)
    found = {text.get_text(): (text.get_position()[1], text.get_color()) for text in ax.texts}
    assert list(found) == ["beyond", "ends early", "level"]
    assert found["beyond"] == (pytest.approx(0.3), "red")
    assert found["ends early"] == (pytest.approx(0.5), "green")
    assert found["level"] == (pytest.approx(0.9), "gray")


def test_names_stay_beside_the_axes():
    from matplotlib.figure import Figure

    figures = figures_module()
    ax = Figure().subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    figures.name_lines(ax, [(y, str(y), "black") for y in (0.0, 0.01, 0.02, 1.0)], apart=0.1)
    heights = [text.get_position()[1] for text in ax.texts]
    assert heights[0] >= figures.INSIDE[0]
    assert heights[-1] <= figures.INSIDE[1]
    assert np.diff(heights).min() > 0.1 - 1e-3


def figures_module():
    pytest.importorskip("matplotlib")
    from mhfast import figures

    return figures
