"""The segments of a run: which steps were taken with which settings, on which data.

A run that is resumed with the same settings and data extends its last segment, so that a run made
by two calls equals the one made by a single call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._arguments import losses
from .._arguments.losses import Loss
from ..dataset.dataset import Dataset
from ..dataset.words import Tokens
from ..optimizers import OPTIMIZERS, SOLVERS, Optimizer, Solver, fields_of, of_runs
from .batches import Batches

Parts: TypeAlias = list[tuple[str, npt.NDArray[Any] | None]]

_BY_ROW = ("X", "query")
BLOCK = 4096
"""Samples of which a fingerprint holds a copy."""
FEW = 512
"""Numbers that are added up before another way has been called; measured."""

_OPTIMIZERS: dict[str, Any] = {kind.name: kind for kind in OPTIMIZERS}
_OPTIMIZERS |= {kind.name: kind for kind in SOLVERS}


@dataclass(frozen=True)
class Segment:
    """Steps of a run with the same settings on the same data, up to the next segment.

    Attributes
    ----------
    first : int
        The step k at which it begins: its first step takes θ_k to θ_{k+1}.
    optimizer : GradientDescent, Adam, ..., or the settings of a solver
    loss : str, or a loss with a parameter
    wrt : tuple of str
        The names of the parameters that were trained.
    data : str, or tuple of R of them
        Fingerprints of the training data, see `fingerprint`: of each run where the data have a run
        axis.
    batches : Batches or None
        Which samples steps were taken on; None for all.
    constraints : tuple of str
        Those of the parameters that were trained: names, and digests of arrays.
    """

    first: int
    optimizer: Optimizer | Solver
    loss: Loss
    wrt: tuple[str, ...]
    data: str | tuple[str, ...]
    batches: Batches | None = None
    constraints: tuple[str, ...] = ()


def extended(segments: tuple[Segment, ...], now: Segment) -> tuple[Segment, ...]:
    """Return the segments of a run that continues with the settings and data of `now`."""
    before = tuple(segment for segment in segments if segment.first < now.first)
    if before and replace(before[-1], first=now.first) == now:
        return before
    return (*before, now)


def of_training(segments: Iterable[Segment], which: Any, last: int) -> tuple[Segment, ...]:
    """Return the segments of one run (an integer) or some, which ended at step `last`."""
    return tuple(
        replace(
            segment,
            optimizer=of_runs(segment.optimizer, which),
            data=_of(segment.data, which),
            batches=None if segment.batches is None else segment.batches.of_runs(which),
        )
        for segment in segments
        if segment.first <= last
    )


def _of(data: str | tuple[str, ...], which: Any) -> str | tuple[str, ...]:
    if isinstance(data, str):
        return data
    if isinstance(which, int):
        return data[which]
    return tuple(data[r] for r in np.arange(len(data))[which])


def fingerprint(data: Dataset) -> str | tuple[str, ...]:
    """Return a fingerprint that distinguishes data sets, for each run if there is a run axis.

    16 hexadecimal digits of all numbers that training depends on. Of tokens and queries the sum of
    the bits of each row enters, which one pass over them gives.
    """
    axes = data._run_axes
    names = ("query", "y", "lengths", "weight")
    X = data.X if data.words is None else _sums_of_words(data.words, data.lengths)
    parts = [("X", X), *((name, getattr(data, name)) for name in names)]
    if data.runs is not None:
        return _of_runs(parts, axes, data.runs)
    digest = hashlib.blake2b(digest_size=8)
    for name, array in parts:
        for piece in (b"none",) if array is None else _pieces(name, array):
            digest.update(piece)
    return digest.hexdigest()


def _of_runs(parts: Parts, axes: Mapping[str, bool], runs: int) -> tuple[str, ...]:
    """Return the fingerprint of each run; arrays without a run axis are gone through once."""
    digests = [hashlib.blake2b(digest_size=8)]
    for name, array in parts:
        if array is None or not axes.get(name):
            for piece in (b"none",) if array is None else _pieces(name, array):
                for digest in digests:
                    digest.update(piece)
            continue
        if len(digests) < runs:  # up to here all runs have the same
            digests = [digests[0].copy() for _ in range(runs)]
        head = _head(name, array[0])
        for digest in digests:
            digest.update(head)
        for first in range(0, array.shape[1], BLOCK):
            some = _bits(array[:, first : first + BLOCK], name)
            for digest, of_run in zip(digests, some, strict=True):
                digest.update(of_run.tobytes())
    found = tuple(digest.hexdigest() for digest in digests)
    return found if len(found) == runs else found * runs


def _sums_of_words(words: Tokens, lengths: npt.NDArray[np.int64] | None) -> npt.NDArray[np.uint64]:
    """Return what `_bits` returns for the array of tokens, (n, T), perhaps with a run axis."""
    of_words = _bits(words.embedding, "X")
    if of_words.ndim == 1:
        sums: npt.NDArray[np.uint64] = of_words[words.ids]
    else:
        sums = of_words[np.arange(len(of_words)).reshape(-1, 1, 1), words.ids]
    if lengths is None:
        return sums
    return np.where(np.arange(sums.shape[-1]) < lengths[..., None], sums, np.uint64(0))


def _bits(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    if array.dtype == np.uint64:
        return array  # sums already
    if name not in _BY_ROW:
        return array.astype(np.float64)
    bits: npt.NDArray[Any] = array.view(np.uint32 if array.dtype == np.float32 else np.uint64)
    # Rows go one by one in np.add.reduce, whose call takes less time than that of einsum.
    sums: npt.NDArray[Any] = (
        np.add.reduce(bits, -1, np.uint64)
        if bits.size < FEW
        else np.einsum("...k->...", bits, dtype=np.uint64, casting="safe")
    )
    return sums


def _pieces(name: str, array: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield the bytes that stand for an array."""
    yield _head(name, array)
    for first in range(0, len(array), BLOCK):  # X may be larger than memory
        yield _bits(array[first : first + BLOCK], name).tobytes()


def _head(name: str, array: npt.NDArray[Any]) -> bytes:
    by_row = name in _BY_ROW and array.dtype != np.uint64
    return str(array.shape[:-1] if by_row else array.shape).encode()


def stored(segments: Iterable[Segment]) -> list[list[Any]]:
    """Return segments as JSON can hold them."""
    return [
        [
            segment.first,
            segment.optimizer.name,
            fields_of(segment.optimizer),
            losses.stored(segment.loss),
            segment.wrt,
            segment.data,
            stored_batches(segment.batches),
            segment.constraints,
        ]
        for segment in segments
    ]


def restored(rows: Iterable[list[Any]]) -> tuple[Segment, ...]:
    """Return the segments that `stored` made rows of."""
    return tuple(
        Segment(
            first,
            _OPTIMIZERS[name](**_tuples(settings)),
            losses.restored(loss),
            tuple(wrt),
            _tuple(data),
            restored_batches(later[0] if later else None),
            tuple(later[1]) if len(later) > 1 else (),
        )
        for first, name, settings, loss, wrt, data, *later in rows
    )


def stored_batches(batches: Batches | None) -> dict[str, Any] | None:
    """Return batches as JSON can hold them."""
    return None if batches is None else asdict(batches)


def restored_batches(stored: Mapping[str, Any] | None) -> Batches | None:
    """Return the batches that `stored_batches` made a dict of."""
    return None if stored is None else Batches(**_tuples(stored))


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in settings.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
