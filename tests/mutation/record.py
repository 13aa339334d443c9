"""What has been found of mutants, so that a run that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def digest(*paths: Path) -> str:
    """Of what files hold, whatever their names and times are."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(path.read_bytes())
    return whole.hexdigest()


class Record:
    """Verdicts by the text of a mutant, each written to the file at once; without a file none.

    A mutant that survived (true) is asked again the next time, when there may be a test more; what
    was noticed (false), or was no mutant (null), is not, nor one in whose place someone has written
    why it changes nothing (a string).
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file and file.exists() else []
        self.known: dict[str, bool | str | None] = dict(map(json.loads, lines))

    def is_settled(self, mutant: str) -> bool:
        return mutant in self.known and self.known[mutant] is not True

    def add(self, mutant: str, survived: bool | str | None) -> None:
        self.known[mutant] = survived
        if self.file:
            with self.file.open("a") as file:
                print(json.dumps([mutant, survived]), file=file)
