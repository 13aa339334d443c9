"""`Run`: what training returns, with its history; it can be saved, plotted and resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .._arguments import losses
from .._arguments.losses import Loss
from .._arguments.names import Threshold
from .._arguments.values import Array, same_fields
from ..models import AnyModel, Model
from ..optimizers import Optimizer, Solver
from . import curve, display, files
from .averages import Averages
from .batches import Batches
from .partition import Parts
from .quantities import Metric, MissingFunction, close_to
from .run_axis import selected
from .segments import Segment
from .subspace import Subspace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from typing_extensions import TypeVar

    # What is said to be a Run without its model is that of any model.
    ModelT_co = TypeVar("ModelT_co", bound=AnyModel, default=Model, covariant=True)
else:
    from typing import TypeVar

    ModelT_co = TypeVar("ModelT_co", bound=AnyModel, covariant=True)

ModelT = TypeVar("ModelT", bound=AnyModel)

Stop: TypeAlias = Mapping[Threshold, float] | Callable[[int, Any], object]
Rows: TypeAlias = npt.NDArray[Any]
Stopped: TypeAlias = int | npt.NDArray[np.int64] | None


class History(dict[str, Rows]):
    """A dict of records whose KeyError lists the records that exist."""

    def __missing__(self, name: str) -> NoReturn:
        """Raise the KeyError."""
        raise KeyError(
            f"{name!r} is not a record of this run, which has {', '.join(self) or 'none'}"
            f"{close_to(name, self)}"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Run(Generic[ModelT_co]):
    """The result of `mhfast.train`, and everything that is needed to resume it.

    `mhfast.minimize` and `mhfast.gradient_flow` return one, too.

    R runs that are trained side by side are one Run, with a run axis of length R on everything that
    depends on the run; ``run[r]`` is the Run that training r alone would have returned,
    ``run[a:b]`` selects several.

    Attributes
    ----------
    model : Classifier, Layer or Stack
        The parameters θ_k at the step reached. With R runs, those of a run that stopped earlier are
        from the step where it stopped.
    history : dict of arrays (rows, ...) or (R, rows, ...)
        One entry per record, under its name; functions under their name, the cosine to a named
        direction under ``cosine_<name>``. Row j holds the value at step ``steps[name][j]``. A run
        that stopped repeats its last values.
    steps : dict of int arrays (rows,)
        The step k of every row: the multiples of the period of the record, and the step reached.
        Values at k belong to θ_k, before step k + 1.
    step : int
        The step k reached, counted from step 0 of the run over all calls that resumed it.
    reason : str, or list of R of them
        Why it ended: "steps" when all requested steps are done; "loss", "grad_norm", "accuracy" or
        "margin" when that threshold is met; "stop" or "callback" when that function returned true;
        "nonfinite" when the loss or a gradient at θ_k is not finite (no step is taken from there);
        "interrupted" or "exception" in a run attached to an exception; "checkpoint" in a file
        written during training. `mhfast.minimize` and `mhfast.gradient_flow` have a few more.
    stopped : int or None, or int64 array (R,)
        The step at which the run ended before all requested steps were done; None, or -1 in the
        array, if they are done.
    optimizer, loss, wrt, record, stop
        The settings, which are kept when the run is resumed unless they are given again. With
        `mhfast.minimize` or `mhfast.gradient_flow`, ``optimizer`` is the settings of the solver.
    start : Classifier, Layer or Stack
        The initial parameters θ_0, from which "distance" is measured.
    state : dict of tuples of arrays
        The state of `Momentum` (velocity) and `Adam` (moments), for each parameter in ``wrt``.
    since : int, or tuple of R of them
        The step at which ``state`` was zero if the run has taken every step since: 0 unless the
        optimizer was changed later; more for runs that were frozen while others continued.
    subspace : Subspace or None
        If training took place inside the span of the tokens, the run in that span, from which it is
        resumed bit for bit; see `train`.
    coefficients : tuple of float64 arrays (n,) or (R, n)
        If U was trained in coefficients of the samples, these, with those of the velocity of
        `Momentum`, from which it is resumed bit for bit; see `train`.
    segments : tuple of Segment
        Which steps were taken with which settings on which data, in order; empty if that is not
        known.
    averages : Averages or None
        The means of the trained parameters over steps, from which they are continued; the model
        that they make is `average`.
    batches : Batches or None
        The setting ``batch`` with ``order`` and ``seed``; None if steps are taken on all samples.
    constraints : dict by parameter of tuples
        The setting, as names and arrays that hold at once.

    Notes
    -----
    Functions in ``record`` and ``stop`` survive copying. Saving and pickling replace them by a
    placeholder, since code cannot be stored safely: give them again in order to resume.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> run = mh.train(start, data, steps=10, optimizer=mh.GradientDescent([0.1, 0.2, 0.4]))
    >>> run.runs, run.step, run.history["loss"].shape
    (3, 10, (3, 11))
    >>> run.history["loss"][:, -1].round(3)  # the larger the step size, the smaller the loss
    array([0.663, 0.635, 0.585])
    >>> run[2].model.W.shape
    (3, 9, 9)
    """

    model: ModelT_co
    history: dict[str, npt.NDArray[Any]]
    steps: dict[str, npt.NDArray[np.int64]]
    step: int
    reason: str | list[str]
    stopped: Stopped
    optimizer: Optimizer | Solver
    loss: Loss
    wrt: tuple[str, ...]
    record: dict[str | Metric, int]
    stop: Stop
    start: ModelT_co
    state: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    since: int | tuple[int, ...] = 0
    subspace: Subspace | None = None
    segments: tuple[Segment, ...] = ()
    batches: Batches | None = None
    constraints: dict[str, Parts] = field(default_factory=dict)
    averages: Averages | None = None
    coefficients: tuple[Array, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(history=History(self.history), steps=History(self.steps))

    def _replace(self, **fields: Any) -> Run[ModelT_co]:
        """Return the run with other fields: `dataclasses.replace` takes five times as long."""
        made: Run[ModelT_co] = object.__new__(type(self))
        vars(made).update(vars(self), **fields)
        if "history" in fields or "steps" in fields:
            made.__post_init__()
        return made

    @property
    def runs(self) -> int | None:
        """The number R of runs side by side; None without a run axis."""
        return self.model.runs

    @property
    def average(self) -> ModelT_co:
        """The model of the means of θ_a, ..., θ_k, for the step a given as ``average=``.

        Parameters that are not trained are those of `model`.

        Raises
        ------
        ValueError
            If iterates are not averaged, or step a has not been reached.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> start = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> run = mh.train(
        ...     start, data, steps=10, optimizer=mh.GradientDescent(0.1), batch=4, average=5,
        ...     record={"U": 1},
        ... )
        >>> abs(run.average.U - run.history["U"][5:].mean(axis=0)).max() < 1e-15
        np.True_
        """
        if self.averages is None:
            raise ValueError("average: expected a run trained with average=, got one without")
        averaged: Any = self.averages.model(self)
        return cast(ModelT_co, averaged)

    def __getitem__(self, index: int | slice | npt.ArrayLike) -> Run[ModelT_co]:
        """Select one run by an integer, or several by a slice, a mask or integers.

        Raises
        ------
        TypeError
            If there is no run axis.
        IndexError
            If there is no such run.
        """
        run: Any = self  # a stack has no runs to select from
        selected_run: Run[ModelT_co] = selected(run, index)
        return selected_run

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as an .npz archive without pickled objects.

        The file appears under ``path`` at once and complete, or not at all.

        Parameters
        ----------
        path : str or path
            The name of the file. An existing file is replaced.

        Raises
        ------
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> run = mh.train(model, data, steps=10, optimizer=mh.GradientDescent(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(folder + "/run.npz")
        ...     print(mh.Run.load(folder + "/run.npz") == run)
        True
        """
        files.write(path, _stored(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run[Any]:
        """Read a run that `save` wrote; nothing in the file is executed.

        Parameters
        ----------
        path : str or path
            The name of the file.

        Returns
        -------
        Run
            Equal to the run that was saved; functions are placeholders.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If the file is not a saved run.

        Examples
        --------
        >>> import tempfile
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> run = mh.train(model, data, steps=10, optimizer=mh.GradientDescent(0.1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(folder + "/run.npz")
        ...     mh.Run.load(folder + "/run.npz").step
        10
        """
        return cls(**files.read(path))

    def to_dataframe(self) -> DataFrame:
        """Return the history as a pandas DataFrame, one row per step and one column per record.

        A record with one value per head, or with any other single axis, gets a column for each:
        ``attention_max[0]``. Records with more axes do not fit a table and are left out. Steps at
        which something was not recorded hold NaN. With R runs the index is (run, step).

        Returns
        -------
        pandas.DataFrame
            The index is the step k, or (run, step) with R runs.

        Raises
        ------
        ImportError
            If pandas is not installed.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> run = mh.train(model, data, steps=10, optimizer=mh.GradientDescent(0.1))
        >>> run.to_dataframe()["loss"].round(3).tolist()[::5]
        [0.693, 0.678, 0.663]
        """
        return display.table(self)

    def plot(self, ax: Axes | Sequence[Axes] | npt.NDArray[np.object_] | None = None) -> Figure:
        """Plot the scalar records against the steps, one panel for each kind of record.

        What `mhfast.gradient_flow` records is drawn against the times.

        Records of the training data and of test sets share a panel, and so do all cosines. The loss
        and the norm of the gradient have a logarithmic axis, unless a value is negative. With R
        runs a line is the mean over the runs, in a band from the 10 % to the 90 % quantile; runs
        that ended as "nonfinite" while others did not are counted in the legend and left out.

        Parameters
        ----------
        ax : matplotlib Axes, or as many as there are panels, optional
            Where to draw, for example Axes of a pyplot figure. By default a new figure that pyplot
            does not know: a notebook shows it once, and nothing has to be closed.

        Returns
        -------
        matplotlib.figure.Figure
            To be saved by ``.savefig(path)``.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `ax` is not an Axes.
        ValueError
            If there is no scalar record, or not one of `ax` for each panel.

        Examples
        --------
        >>> import mhfast as mh
        >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
        >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
        >>> run = mh.train(model, data, steps=10, optimizer=mh.GradientDescent(0.1))
        >>> figure = run.plot()
        >>> figure.axes[0].get_ylabel()
        'loss'
        """
        return display.figure(self, ax)

    def __getstate__(self) -> dict[str, Any]:
        return _stored(self)

    def __copy__(self) -> Run[ModelT_co]:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Run[ModelT_co]:
        return Run(**{name: deepcopy(value, memo) for name, value in vars(self).items()})

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    # Without this Python would iterate by index, but a Run is not a sequence of its runs.
    __iter__ = None

    def __repr__(self) -> str:
        runs = "" if self.runs is None else f"runs={self.runs}, "
        return (
            f"Run({runs}step={self.step}, reason={_counted(self.reason)}, "
            f"optimizer={self.optimizer}, history=<{', '.join(self.history)}>)"
        )

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it: its repr, and a curve of the first scalar."""
        return curve.html(self)


def fresh(model: ModelT, optimizer: Optimizer) -> Run[ModelT]:
    """Return a run at step 0 with the default settings."""
    if not isinstance(model, AnyModel):
        raise TypeError(
            f"model: expected a Classifier, Layer, Stack or Run, got {type(model).__name__}"
        )
    return cast("Run[ModelT]", _NEW)._replace(
        model=model,
        start=model,
        optimizer=optimizer,
        wrt=tuple(model.parameters),
        history={},
        steps={},
        record={"loss": 1},
        stop={},
        state={},
        constraints={},
    )


_NONE: Any = None
_NEW = Run(
    model=_NONE,
    history={},
    steps={},
    step=0,
    reason="steps",
    stopped=None,
    optimizer=_NONE,
    loss="logistic",
    wrt=(),
    record={},
    stop={},
    start=_NONE,
)
"""What all fresh runs have alike: a replacement takes less time than the constructor."""


class Interrupted(KeyboardInterrupt):
    """Training was interrupted by Ctrl-C.

    Parameters
    ----------
    run : Run
        The run up to the step reached, an attribute too; ``mhfast.train(run, ...)`` resumes it.

    Examples
    --------
    >>> import mhfast as mh
    >>> data = mh.data.tokenized_mixture(20, 5, 9, seed=0)
    >>> model = mh.Classifier.zeros(heads=3, tokens=5, dim=9)
    >>> def press_ctrl_c(step, model):
    ...     if step == 3:
    ...         raise KeyboardInterrupt
    >>> try:
    ...     given = {"optimizer": mh.GradientDescent(0.1), "callback": press_ctrl_c}
    ...     run = mh.train(model, data, steps=1000, **given)
    ... except mh.Interrupted as interrupted:
    ...     run = interrupted.run
    >>> run.step  # nothing is lost, and training can be continued
    3
    >>> mh.train(run, data, steps=5).step
    8
    """

    def __init__(self, run: Run[Any]) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        return f"training was interrupted at step {self.run.step}; .run holds the run so far"


def _stored(run: Run[Any]) -> dict[str, Any]:
    """Return the fields of the run with placeholders for its functions."""
    values = {item.name: getattr(run, item.name) for item in fields(run)}
    values["record"] = {
        MissingFunction(what.__name__) if callable(what) else what: every
        for what, every in run.record.items()
    }
    if callable(run.stop):
        values["stop"] = MissingFunction(getattr(run.stop, "__name__", "stop"))
    values["loss"] = losses.kept(run.loss)
    values["segments"] = tuple(
        replace(segment, loss=losses.kept(segment.loss)) for segment in run.segments
    )
    return values


def _counted(reason: str | list[str]) -> str:
    """Return a reason, or the reasons of R runs with the number of times each occurs."""
    if isinstance(reason, str):
        return repr(reason)
    return repr({each: reason.count(each) for each in dict.fromkeys(reason)})
