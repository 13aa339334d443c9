"""Tests collected once, and for each mutant a forked process that runs those of its lines.

The fork gives the functions that are changed their new code, wherever they are referred to.  That
is the same as importing the changed file if nothing else of it differs and if none of these
functions has been called at import or collection; of others `Forks` says that it cannot tell.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

LIMIT = 10  # seconds of the processor for a test, beside SLOWER times what it takes: endless loops
SLOWER = 5.0
IMPORT = 60  # seconds that import and collection may take
MEMORY = 8 << 30  # bytes of address space that a mutant may take


def bare(code: CodeType, functions: bool = True) -> tuple[Any, ...]:
    """What code does, wherever it stands in its file; of functions inside the names if asked."""
    return (
        code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars,
        code.co_cellvars, code.co_flags, code.co_argcount, code.co_posonlyargcount,
        code.co_kwonlyargcount,
        tuple(
            (bare(part, functions) if functions or not is_function(part) else part.co_name)
            if isinstance(part, CodeType) else repr(part)
            for part in code.co_consts
        ),
    )  # fmt: skip


def is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 1)  # CO_OPTIMIZED: neither a module's nor a class's


def changed(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The outermost functions that differ between two modules that are equal without functions."""
    pairs = zip(before.co_consts, after.co_consts, strict=True)
    for one, other in pairs:
        if isinstance(one, CodeType):
            if not is_function(one):
                yield from changed(one, other)
            elif bare(one) != bare(other):
                yield one, other


@dataclass
class Calls:
    """The code of a folder that has been called; while it is entered, notes more."""

    folder: Path

    def __post_init__(self) -> None:
        self.seen: dict[int, CodeType] = {}

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(self.folder)):
            self.seen[id(code)] = code

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


class Limits:
    """A plugin of pytest that ends the process where a test takes much longer than it should.

    It knows the seconds of tests, or of their files.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def begin(self, limit: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, limit)  # its signal ends the process
        signal.setitimer(signal.ITIMER_REAL, 10 * limit)  # it may wait for ever

    def pytest_runtest_setup(self, item: Any) -> None:
        test = item.nodeid.split("[")[0]
        seconds = self.seconds.get(test) or self.seconds.get(test.split("::")[0], 0.0)
        self.begin(LIMIT + SLOWER * seconds)


class Forks:
    """A plugin of pytest whose loop is `ask`, with the tests collected."""

    def __init__(self, folder: Path, loop: Callable[[Forks], None]) -> None:
        self.calls, self.loop = Calls(folder), loop
        self.failed = False
        self.sound: set[str] = set()  # tests that have passed in a fork without a change

    def pytest_runtestloop(self, session: Any) -> bool:
        self.calls.__exit__()
        self.items: dict[str, list[Any]] = {}
        for item in session.items:
            self.items.setdefault(item.nodeid.split("[")[0], []).append(item)
        gc.collect()
        self.loop(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    def replacements(
        self, file: Path, before: str, after: str
    ) -> list[tuple[FunctionType, CodeType]] | None:
        """The functions to be given another code; None if that is not all there is to do."""
        old, new = (compile(text, str(file), "exec", dont_inherit=True) for text in (before, after))
        if bare(old, False) != bare(new, False):
            return None
        live: dict[CodeType, list[FunctionType]] = {}
        for item in gc.get_objects():
            if type(item) is FunctionType and item.__code__.co_filename == str(file):
                live.setdefault(item.__code__, []).append(item)
        found = []
        for one, other in changed(old, new):
            functions = live.get(one, [])
            if not functions or one.co_freevars != other.co_freevars:
                return None
            if any(id(function.__code__) in self.calls.seen for function in functions):
                return None
            found += [(function, other) for function in functions]
        return found

    def noticed(
        self, replacements: Sequence[tuple[FunctionType, CodeType]], tests: list[str]
    ) -> str:
        """The test that fails, or else an empty string.

        A test that fails in a fork without a change as well is left out.
        """
        items = self._ordered(tests)
        while True:
            failing = self._fork(replacements, items)
            if failing is None:
                return ""
            name: str = items[failing].nodeid
            if name in self.sound or self._fork([], [items[failing]]) is None:
                self.sound.add(name)
                return name
            print(f"fails without a change: {name}", file=sys.__stderr__, flush=True)
            del items[failing]

    def _ordered(self, tests: list[str]) -> list[Any]:
        """What shares no fixture in the order of the tests, then the others, file by file."""
        alone: list[Any] = []
        shared: dict[str, list[Any]] = {}
        for item in (item for test in tests for item in self.items.get(test, [])):
            fixtures = item._fixtureinfo.name2fixturedefs.values()
            is_shared = any(f[-1].scope in ("class", "module") for f in fixtures)
            (shared.setdefault(item.nodeid.split("::")[0], []) if is_shared else alone).append(item)
        return alone + [item for items in shared.values() for item in items]

    def _fork(self, replacements: Any, items: list[Any]) -> int | None:
        """Which of these tests fails first in a process of its own."""
        place = mmap.mmap(-1, 4)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                for function, code in replacements:
                    function.__code__ = code
                status = self._run(items, place)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return int.from_bytes(place[:], "little") if status else None

    def _run(self, items: list[Any], place: mmap.mmap) -> int:
        for k, item in enumerate(items):
            place[:] = k.to_bytes(4, "little")
            following = items[k + 1] if k + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return 1
        return 0
