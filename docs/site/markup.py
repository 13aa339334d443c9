"""The marks of docstrings in reStructuredText."""

from __future__ import annotations

import re


def as_rst(text: str) -> str:
    """Return text in which `names` are code, and bars and stars what they are in mathematics."""
    parts = re.split(r"(``.*?``|`[^`]+`)", text)
    for j, part in enumerate(parts):
        if part.startswith("`"):
            parts[j] = part if part.startswith("``") else rf"``{part[1:-1]}``\ "
        else:
            parts[j] = re.sub(r"([|*])", r"\\\1", part)
    return "".join(parts)
