"""An implementation in a separate process, isolated from the threads and libraries of others.

The processes live as long as the comparison and take turns: all but one wait for a message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from .implementation import Local, Prepared, Work, configure
from .peers import UnavailableError


class Isolated:
    """The interface to a `mhfast._bench.implementation.Local` in another process."""

    def __init__(self, peer: str, threads: int, isa: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.ours, theirs = context.Pipe()
        # A daemon: it ends with this process in any case.
        self.process = context.Process(
            target=_serve, args=(theirs, peer, threads, isa), daemon=True
        )
        self.process.start()
        theirs.close()

    def prepare(self, work: Work) -> Prepared:
        """Choose a formulation there; the answer comes back through the pipe."""
        prepared: Prepared = self._ask(work)
        return prepared

    def block(self, seconds: float) -> list[float]:
        """Time calls there."""
        times: list[float] = self._ask(seconds)
        return times

    def close(self) -> None:
        """End the process, if it has not ended by itself."""
        with contextlib.suppress(OSError):
            self.ours.send(None)
        self.process.join()

    def _ask(self, request: Work | float) -> Any:
        self.ours.send(request)
        try:
            reply = self.ours.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"a process ended with code {self.process.exitcode}") from None
        if isinstance(reply, Exception):
            raise reply
        return reply


def _serve(pipe: Connection, peer: str, threads: int, isa: str | None) -> None:
    configure(threads, isa)
    implementation = Local(peer)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            return
        try:
            if isinstance(request, Work):
                pipe.send(implementation.prepare(request))
            else:
                pipe.send(implementation.block(request))
        except UnavailableError as reason:
            pipe.send(UnavailableError(str(reason)))
