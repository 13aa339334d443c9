"""Build the documentation site: `python docs/site/build.py`, with the packages of the extra `docs`.

Sphinx reads a folder that this script fills: the pages of `docs/`, the README as the front page, a
page for each public name, from its docstring, and the scripts of `examples/`, of which
sphinx-gallery makes pages. It does not run them, since some take minutes, and shows the figures of
`docs/`. Warnings are errors, so a link that leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from markup import as_rst
from matplotlib.image import imsave

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

MODULES = {
    "mhfast": "Models, gradients, training",
    "mhfast.data": "Data sets",
    "mhfast.theory": "Theory",
    "mhfast.learner": "Learning a layer",
    "mhfast.interop.torch": "PyTorch",
    "mhfast.interop.jax": "JAX",
    "mhfast.interop.sklearn": "scikit-learn",
    "mhfast.interop.loggers": "Experiment trackers",
    "mhfast.interop.reduce": "Many machines",
    "mhfast.figures": "Figures",
    "mhfast.reference": "Specification in NumPy",
}

SECTIONS = {
    "Start": ["install", "tutorial", "from_pytorch"],
    "Guide": [
        "family", "stacks", "rows", "losses", "training", "constraints", "sweeps",
        "many_machines", "long_sequences", "dictionaries", "reproducibility", "saturation",
        "interop",
    ],
    "Theory": ["theory", "learner", "atlas/index"],
    "Examples": ["gallery/index"],
    "Reference": ["api/index", "glossary", "numerics", "performance"],
    "Development": ["contributing", "design", "development", "changelog"],
}  # fmt: skip
"""What the bar at the top of the site leads to, and the pages below each."""


def relinked(text: str) -> str:
    """Return a page of the repository with its links as they are on the site."""
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text)
    text = re.sub(r"\]\((?:docs/)?atlas/README\.md", "](atlas/index.md", text)
    text = re.sub(r"\]\((?:\.\./)?README\.md", "](index.md", text)
    text = re.sub(r"\]\((?:\.\./)?(CONTRIBUTING|CHANGELOG)\.md", _lowered, text)
    text = re.sub(r"\]\((?:\.\./)?examples/(\w+)\.py\)", r"](gallery/\1.rst)", text)
    # Other files of the repository are not on the site: the words of the link stay.
    return re.sub(r"\[([^]]+)\]\((?!http)[\w./]+(?<!\.md)(?<!\.png)\)", r"\1", text)


def _lowered(match: re.Match[str]) -> str:
    return f"]({match[1].lower()}.md"


def toctree(pages: list[str], *options: str) -> str:
    """Return a table of contents, in MyST's form."""
    return "\n".join(["```{toctree}", *options, "", *pages, "```", ""])


def write(path: Path, *parts: str) -> None:
    """Write a page, in a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), "utf-8")


def copy_pages(source: Path) -> None:
    """Write the pages of the repository, and one for each section that has several."""
    for page in sorted(DOCS.glob("*.md")):
        write(source / page.name, relinked(page.read_text("utf-8")))
    for name in ("CONTRIBUTING", "CHANGELOG"):
        text = (ROOT / f"{name}.md").read_text("utf-8")
        write(source / f"{name.lower()}.md", relinked(text))
    for figure in DOCS.glob("*.png"):
        shutil.copy(figure, source)
    for page in sorted((DOCS / "atlas").glob("*.md")):
        name = "index" if page.stem == "README" else page.stem
        write(source / "atlas" / f"{name}.md", page.read_text("utf-8"))
    for figure in (DOCS / "atlas").glob("*.png"):
        shutil.copy(figure, source / "atlas")
    names = sorted(page.stem for page in (DOCS / "atlas").glob("*.md") if page.stem != "README")
    with (source / "atlas" / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n" + toctree(names, ":hidden:"))
    tops = []
    for title, pages in SECTIONS.items():
        top = pages[0]
        if len(pages) > 1:
            top = f"section_{title.lower()}"
            write(source / f"{top}.md", f"# {title}\n", toctree(pages, ":maxdepth: 2"))
        tops.append(f"{title} <{top}>")
    front = relinked((ROOT / "README.md").read_text("utf-8"))
    write(source / "index.md", front, toctree(tops, ":hidden:"))


def write_reference(source: Path) -> None:
    """Write a page for each module with a table of its public names."""
    for name, title in MODULES.items():
        module = importlib.import_module(name)
        names = [
            each
            for each in module.__all__
            if not each.startswith("_") and not inspect.ismodule(getattr(module, each))
        ]
        rows = [f"   {each}" for each in names]
        table = [".. autosummary::", "   :toctree: names", "   :nosignatures:", "", *rows, ""]
        head = [title, "=" * len(title), "", f"``{name}``", ""]
        write(source / "api" / f"{name}.rst", *head, f".. currentmodule:: {name}", "", *table)
    write(
        source / "api" / "index.md",
        "# API\n",
        "Every public name, with shapes, formulas, sources and errors.\n",
        toctree(list(MODULES), ":maxdepth: 2"),
    )


def figures() -> dict[str, str]:
    """Return the figure in `docs/` of each example that draws one, by the commands in the pages."""
    text = "\n".join(page.read_text("utf-8") for page in [ROOT / "README.md", *DOCS.glob("*.md")])
    commands = re.findall(r"`python examples/(\w+)\.py ?[^`]*--output docs/([\w.]+)`", text)
    return dict(reversed(commands))  # of several figures, the first


def write_scripts(source: Path) -> None:
    """Write the examples as sphinx-gallery takes them: what each shows, its command, its figure."""
    drawn = figures()
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text("utf-8")
        text = ast.get_docstring(ast.parse(code))
        assert text is not None, path
        first, _, rest = text.partition("\n")
        title = first.partition(";")[0].rstrip(".").replace("`", "")
        option, picture, thumbnail = "", [], "scripts/no_figure.png"
        if path.stem in drawn:
            figure = drawn[path.stem]
            option, thumbnail = f" --output {figure}", figure
            picture = [f".. image:: ../{figure}", f"   :alt: {title}", ""]
        shown = [as_rst(rest).strip(), ""]
        command = [".. code-block:: sh", "", f"   python examples/{path.name}{option}", ""]
        head = "\n".join([title, "=" * len(title), "", *shown, *command, *picture])
        body = code[code.index('"""', 3) + 3 :]
        setting = f"# sphinx_gallery_thumbnail_path = '{thumbnail}'\n"
        write(source / "scripts" / path.name, f'r"""{head}"""{body}', setting)
    imsave(source / "scripts" / "no_figure.png", np.ones((1, 2, 3)))  # white
    write(
        source / "scripts" / "GALLERY_HEADER.rst",
        "Examples\n========\n",
        "Scripts of a page each. They need the packages of the extra ``demo``.\n",
    )


def main() -> int:
    """Build the site and return the status of Sphinx."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", metavar="DIR")
    parser.add_argument("--linkcheck", action="store_true", help="follow the links to other sites")
    arguments = parser.parse_args()
    source = arguments.output / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    copy_pages(source)
    write_reference(source)
    write_scripts(source)
    builder = "linkcheck" if arguments.linkcheck else "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder]
    command += ["-c", str(Path(__file__).parent), str(source), str(arguments.output / builder)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
