"""The comparison as tables, for a terminal or in markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .measure import PAUSE
from .peers import PEERS
from .results import OWN, Comparison, Scaling, geometric_mean

Row = Sequence[str]
NOTHING = "-"
WHAT = ("n,T,d,H", "dtype")


@dataclass
class Report:
    """All that one run of the comparison measured, in the order of the tables."""

    environment: Mapping[str, object]
    gradients: list[Comparison] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    loops: list[Comparison] = field(default_factory=list)
    families: list[Comparison] = field(default_factory=list)

    @property
    def comparisons(self) -> list[Comparison]:
        """All comparisons with peers, in order."""
        return [*self.gradients, *self.loops, *self.families]

    def record(self) -> dict[str, object]:
        """Return everything as JSON types."""
        return {
            "environment": dict(self.environment),
            "gradients": [comparison.record() for comparison in self.gradients],
            "scaling": [scaling.record() for scaling in self.scaling],
            "loops": [comparison.record() for comparison in self.loops],
            "families": [comparison.record() for comparison in self.families],
            "geometric_means": [
                {"group": group, "dtype": dtype, "best_peer": best, "numpy": numpy}
                for group, dtype, best, numpy in _means(self.comparisons)
            ],
        }


@dataclass(frozen=True)
class Table:
    """A title, a row of heads, rows of cells and a note."""

    title: str
    heads: Row
    rows: Sequence[Row]
    note: str = ""

    def text(self) -> str:
        """Lay it out for a terminal: the first column to the left, all others to the right."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]

        def line(cells: Row) -> str:
            first, *others = (
                cell.rjust(w) if k else cell.ljust(w)
                for k, (cell, w) in enumerate(zip(cells, widths, strict=True))
            )
            return "  ".join((first, *others)).rstrip()

        rule = "  ".join("-" * width for width in widths)
        lines = [self.title, "", line(self.heads), rule, *map(line, self.rows)]
        return "\n".join([*lines, "", self.note] if self.note else lines)

    def markdown(self) -> str:
        """Lay it out as a markdown table under a heading."""
        rule = ["---", *["--:"] * (len(self.heads) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.heads, rule, *self.rows)]
        parts = [f"### {self.title}", "\n".join(lines), self.note]
        return "\n\n".join(part for part in parts if part)


def text(report: Report) -> str:
    """Return the whole report for a terminal."""
    facts = [f"{name:<16} {value}" for name, value in _facts(report.environment)]
    return "\n\n".join(["\n".join(facts), *(table.text() for table in _tables(report))]) + "\n"


def markdown(report: Report) -> str:
    """Return the whole report in markdown."""
    facts = [f"- {name}: {value}" for name, value in _facts(report.environment)]
    tables = [table.markdown() for table in _tables(report)]
    return "\n\n".join(["\n".join(facts), *tables]) + "\n"


def _facts(environment: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        if value != "":
            yield name.replace("_", " "), str(value)


def _tables(report: Report) -> Iterable[Table]:
    if report.gradients:
        yield _gradients(report.gradients)
    if report.loops:
        yield _loops(report.loops)
    if report.families:
        yield _families(report.families)
    if report.comparisons:
        yield _mean_table(report.comparisons)
    if report.scaling:
        yield _scaling(report.scaling)
    if report.gradients:
        yield _first_calls(report.gradients)
    if report.comparisons:
        yield _chosen(report.comparisons)


def _gradients(comparisons: Sequence[Comparison]) -> Table:
    names = _names(comparisons)
    odd = any(comparison.even for comparison in comparisons)

    def cells(c: Comparison) -> Row:
        return (
            *_what(c),
            *(_time(c, name, 1e3) for name in names),
            c.best_peer or NOTHING,
            _number(c.ratio(c.best_peer), "{:.1f}"),
            _number(c.ratio("numpy"), "{:.1f}"),
            _number(c.rate(OWN), "{:.1f}", 1e-9),
            _number(c.peak_fraction, "{:.0f}", 100.0),
            *([_number(c.against_even, "{:.2f}")] if odd else []),
        )

    heads = [*WHAT, *names, "best peer", "x best", "x numpy", "GFLOP/s", "% peak"]
    peaks = {c.work.dtype: c.peak for c in comparisons if c.peak}
    note = (
        "x best, x numpy: the time of the fastest peer and of NumPy over that of mhfast. GFLOP/s: "
        "mhfast, by n H (4 T d² + 8 T² d) operations. % peak: of fused multiply-adds measured in "
        "the same rounds ("
        + ", ".join(f"{dtype} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in peaks.items())
        + ")."
    )
    note += (
        f" Implementations take turns in blocks of calls, with pauses of {1e3 * PAUSE:.0f} ms "
        "between them; times are medians over all blocks."
    )
    if odd:
        heads.append("x even")
        note += " x even: time per operation over that with T and d at multiples of four."
    return Table(
        "One loss and gradient, milliseconds",
        heads,
        [cells(c) for c in comparisons],
        note + _absences(comparisons),
    )


def _loops(comparisons: Sequence[Comparison]) -> Table:
    note = (
        "Gradient descent on W and U, the loss recorded at every step. jax runs all steps in one "
        "compiled lax.scan, NumPy and torch in a Python loop that updates in place."
    )
    return _training_table("Training loops, microseconds a step", note, comparisons)


def _families(comparisons: Sequence[Comparison]) -> Table:
    note = (
        "R x n,T,d,H: R runs side by side, each with data and start of its own; one run without R. "
        "Classifiers have the logistic, layers the squared loss; queries are all tokens or the "
        "last. Gradient descent, plain or normalized, on W and U or V, the loss recorded at every "
        "step. jax runs all steps in one compiled lax.scan, NumPy and torch in a Python loop."
    )
    return _training_table("Trainings of the model family, microseconds a step", note, comparisons)


def _training_table(title: str, note: str, comparisons: Sequence[Comparison]) -> Table:
    names = _names(comparisons)

    def cells(c: Comparison) -> Row:
        assert c.work.loop is not None
        steps = c.work.loop.steps
        return (
            *_what(c),
            str(steps),
            *(_time(c, name, 1e6 / steps) for name in names),
            c.best_peer or NOTHING,
            _number(c.ratio(c.best_peer), "{:.1f}"),
            _number(c.ratio("numpy"), "{:.1f}"),
        )

    heads = [*WHAT, "steps", *names, "best peer", "x best", "x numpy"]
    return Table(
        title,
        heads,
        [cells(c) for c in comparisons],
        note + _absences(comparisons),
    )


def _mean_table(comparisons: Sequence[Comparison]) -> Table:
    rows = [
        (group, dtype, _number(best, "{:.2f}"), _number(numpy, "{:.2f}"))
        for group, dtype, best, numpy in _means(comparisons)
    ]
    return Table("Geometric means of the ratios", ("group", "dtype", "x best", "x numpy"), rows)


def _means(
    comparisons: Sequence[Comparison],
) -> Iterable[tuple[str, str, float | None, float | None]]:
    keys = dict.fromkeys((c.group, c.work.dtype) for c in comparisons)
    for group, dtype in keys:
        some = [c for c in comparisons if (c.group, c.work.dtype) == (group, dtype)]
        best = geometric_mean(c.ratio(c.best_peer) for c in some)
        yield group, dtype, best, geometric_mean(c.ratio("numpy") for c in some)


def _scaling(scalings: Sequence[Scaling]) -> Table:
    counts = list(scalings[0].medians)
    rows = [
        (
            str(s.work.shape),
            s.work.dtype,
            *(_three_digits(1e3 * s.medians[count]) for count in counts),
            f"{s.speedup:.2f}",
            "yes" if s.identical else "NO",
        )
        for s in scalings
    ]
    heads = (*WHAT, *(f"threads {k}" for k in counts), "speed-up", "same bits")
    return Table("mhfast by number of threads, milliseconds", heads, rows)


def _first_calls(comparisons: Sequence[Comparison]) -> Table:
    names = _names(comparisons)

    def first(c: Comparison, name: str) -> str:
        return _three_digits(1e3 * c.timings[name].first) if name in c.timings else NOTHING

    rows = [(*_what(c), *(first(c, name) for name in names)) for c in comparisons]
    note = (
        "Not in the medians. With compilation, which torch and jax partly keep on disk from earlier"
        " runs."
    )
    return Table("First call, milliseconds", (*WHAT, *names), rows, note)


def _chosen(comparisons: Sequence[Comparison]) -> Table:
    names = [name for name in _names(comparisons) if name != OWN]

    def chosen(c: Comparison, name: str) -> str:
        return c.timings[name].formulation if name in c.timings else NOTHING

    rows = [
        (*_what(c), "loop" if c.work.loop else "call", *(chosen(c, name) for name in names))
        for c in comparisons
    ]
    note = "The fastest of several ways of writing each peer, found by trial before the timing."
    return Table("Formulations timed", (*WHAT, "work", *names), rows, note)


def _what(comparison: Comparison) -> Row:
    return str(comparison.work), comparison.work.dtype


def _names(comparisons: Sequence[Comparison]) -> list[str]:
    found = {name for c in comparisons for name in (*c.timings, *c.missing)}
    return [peer.name for peer in PEERS.values() if peer.name in found]


def _absences(comparisons: Sequence[Comparison]) -> str:
    """Say which implementation is missing where, and why."""
    where: dict[tuple[str, str], list[str]] = {}
    for c in comparisons:
        for name, reason in c.missing.items():
            where.setdefault((name, reason), []).append(f"{c.work} {c.work.dtype}")
    said = [
        f"{name}: {reason}" + ("" if len(at) == len(comparisons) else f" ({'; '.join(at)})")
        for (name, reason), at in where.items()
    ]
    return " Missing: " + ". ".join(said) + "." if said else ""


def _time(comparison: Comparison, name: str, unit: float) -> str:
    timing = comparison.timings.get(name)
    return NOTHING if timing is None else _three_digits(unit * timing.median)


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return NOTHING if value is None else form.format(unit * value)
