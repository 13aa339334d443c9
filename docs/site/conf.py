"""Settings of Sphinx for the documentation site, which `build.py` beside this file builds."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from markup import as_rst

project = "mhfast"
author = copyright = "The mhfast developers"  # noqa: A001  (the name that Sphinx reads)
version = release = installed("mhfast")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
myst_heading_anchors = 3
autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "none"  # the docstrings give kinds, shapes and units
numpydoc_show_class_members = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

exclude_patterns = ["scripts"]  # which sphinx-gallery makes pages of
sphinx_gallery_conf = {
    "examples_dirs": "scripts",
    "gallery_dirs": "gallery",
    "plot_gallery": False,
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_signature": False,
    "thumbnail_size": (560, 280),
    "within_subsection_order": "FileNameSortKey",
}

templates_path = [str(Path(__file__).parent / "templates")]
html_theme = "pydata_sphinx_theme"
html_title = f"mhfast {version}"
html_static_path = [str(Path(__file__).parent / "site.css")]
html_css_files = ["site.css"]
suppress_warnings = ["config.cache"]  # of `autosummary_context`
html_show_sourcelink = False
html_sidebars = {"index": []}
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}


def own_members(module: str, name: str) -> list[tuple[str, str]]:
    """Return kind and name of the public members of a class that mhfast defines and documents."""
    found: dict[str, str] = {}
    for base in reversed(getattr(importlib.import_module(module), name).__mro__):
        if base.__module__.startswith("mhfast"):
            for member, value in vars(base).items():
                if not member.startswith("_") and getattr(value, "__doc__", None):
                    function = callable(value) or isinstance(value, (classmethod, staticmethod))
                    if function or isinstance(value, (property, functools.cached_property)):
                        found[member] = "method" if function else "property"
    return [(kind, member) for member, kind in found.items()]


autosummary_context = {"own_members": own_members}


def marked(_app: Any, _what: str, _name: str, _obj: Any, _opt: Any, lines: list[str]) -> None:
    """Turn a docstring's conventions into reStructuredText.

    A formula is an indented block after a line that ends with a colon; `names` are code; bars and
    stars are what they are in mathematics and in Python.
    """
    formula = None  # the indentation that a line must exceed to be part of the formula
    for row, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line or (formula is not None and indent > formula):
            continue
        following = next((each for each in lines[row + 1 :] if each), "")
        deeper = len(following) - len(following.lstrip()) > indent
        blank = row + 1 < len(lines) and not lines[row + 1]
        formula = indent if line.endswith(":") and blank and deeper else None
        lines[row] = as_rst(line) + (":" if formula is not None else "")


def setup(app: Any) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", marked, priority=400)
