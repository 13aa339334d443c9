"""Changes of the Python package, one each: what mutmut makes, without those that say nothing.

Left out are strings, types, drawing, what is raised or asserted, and kinds that nobody can observe:

- `strict` of zip, where lengths are equal anyhow: another way to raise;
- `num_threads`: results are the same to the last bit on any number of threads;
- `optimize` of einsum, another order of the same sums;
- `check_finite` of SciPy's solvers, another way to raise;
- a copy where `copy=False` asks for none unless it is needed;
- None for False;
- None for float64 where NumPy documents that None is float64: `astype`, `zeros`, `ones`, `empty`,
  `eye`.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "mhfast"

# Of so many mutants in all, how many each area gets, in hundredths.
AREAS = {"theory": 34, "learner": 33, "optimizers": 13, "training": 20}

# Drawing and progress on a terminal are neither formulas nor verdicts.
LEFT_OUT = ("figure.py", "figures.py", "display.py", "progress.py", "__init__.py")

UNOBSERVED = re.compile(
    r",?\s*\b((strict|num_threads|optimize|check_finite) ?= ?[\w.]+|copy=(False|True|None))"
)
FLOAT64 = re.compile(r"\b(astype|zeros|ones|empty|eye)\((.*)(np\.float64|None)\)$", re.DOTALL)


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change of a file."""

    file: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.file}#{self.number}"

    @property
    def area(self) -> str:
        return self.file.split("/")[0]

    @property
    def key(self) -> str:
        """In which line what is changed to what, of equal ones the how many.

        Code elsewhere does not count.
        """
        return mutations(self.file)[2][self.number]

    def before(self) -> str:
        return (PACKAGE / self.file).read_text()

    @functools.cached_property
    def source(self) -> str:
        """The file with the change."""
        from mutmut.mutation.file_mutation import deep_replace

        module, changes, _ = mutations(self.file)
        change = changes[self.number]
        return deep_replace(module, change.original_node, change.mutated_node).code  # type: ignore[union-attr]

    def difference(self) -> list[str]:
        return list(
            difflib.unified_diff(
                self.before().splitlines(), self.source.splitlines(), n=0, lineterm=""
            )
        )[2:]

    def statements(self) -> list[ast.stmt]:
        """The innermost statements that are changed."""
        changed = set()
        for line in self.difference():
            if found := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
                first, count = int(found[1]), int(found[2] or 1)
                changed |= set(range(first, first + max(count, 1)))
        tree = ast.parse(self.before())
        inner = []
        for number in changed:
            around = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or 0)
            ]
            if around:
                inner.append(min(around, key=lambda node: (node.end_lineno or 0) - node.lineno))
        return inner

    def lines(self) -> set[int]:
        """The lines of these statements, of compound ones those before the body."""
        lines = set()
        for statement in self.statements():
            body = getattr(statement, "body", None)
            last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
            lines |= set(range(statement.lineno, max(last, statement.lineno) + 1))
        return lines

    def is_of_types(self) -> bool:
        """Whether the change is in the definition of a type alias or of a type variable."""
        return any(
            re.search(r"\bTypeAlias\b|= TypeVar\(", ast.unparse(statement))
            for statement in self.statements()
            if isinstance(statement, ast.Assign | ast.AnnAssign)
        )


@functools.cache
def mutations(file: str):  # type: ignore[no-untyped-def]
    """The module, its changes but for those that are left out, and the key of each."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations

    source = (PACKAGE / file).read_text()
    module, found, _, _ = create_mutations(file, source)
    places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    lines = source.splitlines()
    silent: set[int] = set()

    class Raised(libcst.CSTVisitor):
        def on_visit(self, node: libcst.CSTNode) -> bool:
            if isinstance(node, (libcst.Raise, libcst.Assert, libcst.FormattedString)):
                silent.update(id(part) for part in parts(node))
                return False
            is_strict = isinstance(node, libcst.Arg) and plain(code(node)) == ""
            is_drawing = isinstance(node, libcst.FunctionDef) and node.name.value == "plot"
            if is_strict or is_drawing:
                silent.update(id(part) for part in parts(node))
            return True

    module.visit(Raised())
    kinds = (libcst.SimpleString, libcst.ConcatenatedString)
    changes, keys, seen = [], [], Counter[str]()
    for change in found:
        if id(change.original_node) in silent or isinstance(change.original_node, kinds):
            continue
        before, after = map(code, (change.original_node, change.mutated_node))
        of_nothing = " ".join(before.split()).replace("= False", "= None")
        if plain(before) == plain(after) or of_nothing == " ".join(after.split()):
            continue
        line = lines[places[change.original_node].start.line - 1].strip()
        key = f"{file}\n{line}\n- {before}\n+ {after}"
        seen[key] += 1
        changes.append(change)
        keys.append(f"{key}\n{seen[key]}")
    return module, changes, keys


def code(node: Any) -> str:
    """The text of a node, without the space around it."""
    import libcst

    return libcst.Module([]).code_for_node(node).strip()


def plain(text: str) -> str:
    """Code but for what cannot be observed."""
    text = FLOAT64.sub(r"\1(\2)", UNOBSERVED.sub("", text))
    return re.sub(r",?\s*\)", ")", text)


def parts(node: Any) -> Iterator[Any]:
    """A node of the syntax tree and all below it."""
    yield node
    for child in node.children:
        yield from parts(child)


def sample(areas: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Mutants drawn without replacement, of each area its share.

    Those whose keys have the least digests, so that a change of the package exchanges only the
    mutants of the code that has changed.
    """

    def digest(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    areas = list(areas)
    shares = sum(AREAS[area] for area in areas)
    drawn: list[Mutant] = []
    for area in areas:
        files = [
            str(path.relative_to(PACKAGE))
            for path in (PACKAGE / area).rglob("*.py")
            if path.name not in LEFT_OUT
        ]
        every = [Mutant(file, k) for file in files for k in range(len(mutations(file)[1]))]
        some: list[Mutant] = []
        for mutant in sorted(every, key=digest):
            if len(some) == round(count * AREAS[area] / shares):
                break
            if not mutant.is_of_types():  # which the interpreter ignores
                some.append(mutant)
        drawn += some
    return sorted(drawn, key=digest)
