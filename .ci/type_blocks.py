"""Check what `mypy --strict` makes of the Python blocks in README and docs, and of mhfast in use.

The blocks of a page are one program, as in the tests that run them. Blocks that import a package
which is not here, such as torch, are checked with that package unknown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
USE = ROOT / "tests" / "project" / "typed_use.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def program(page: Path) -> str:
    """Return the blocks of a page on the lines that they have there, so that errors point to it."""
    inside, lines = False, []
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return the status of mypy over all pages with Python in them."""
    with tempfile.TemporaryDirectory() as directory:
        files = []
        for page in PAGES:
            text = program(page)
            if text.strip():
                files.append(Path(directory, re.sub(r"\W", "_", page.name) + ".py"))
                files[-1].write_text(text, "utf-8")
        assert files
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        return subprocess.run([*command, "--strict", *files, USE], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
