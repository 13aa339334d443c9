"""Settings that a parameter has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

from .._arguments.lists import PARAMETERS

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ByParameter(Mapping[str, T_co], Generic[T_co]):
    """Values by the name of a parameter, in the order of `PARAMETERS`; read-only and hashable.

    It is equal to every mapping of the same entries, a dict among them.

    Parameters
    ----------
    values : mapping of str
        Values of some of the parameters W, Q, K, U, V, A, B, prompt and embedding.
    """

    def __init__(self, values: Mapping[str, T_co]) -> None:
        self._values = {name: values[name] for name in PARAMETERS if name in values}

    def __getitem__(self, name: str) -> T_co:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        """Return that of the dict of the same entries."""
        return repr(self._values)


Each: TypeAlias = T | ByParameter[T]


def each(name: str, value: Any, check: Callable[[str, Any], T]) -> T | ByParameter[T]:
    """Return the checked value of a setting, or of a mapping the checked values by parameter.

    Raises
    ------
    ValueError
        The mapping has no entry, or one that is not named like a parameter.
    """
    if not isinstance(value, Mapping):
        return check(name, value)
    unknown = [key for key in value if key not in PARAMETERS]
    if unknown or not value:
        raise ValueError(
            f"{name}: expected values by the names of parameters, of {', '.join(PARAMETERS)}, "
            f"got {f'the name {unknown[0]!r}' if unknown else 'none'}"
        )
    return ByParameter({key: check(f"{name}[{key!r}]", item) for key, item in value.items()})


def of_parameter(value: Any, name: str, default: Any) -> Any:
    """Return a setting of one parameter: the value itself, or its entry, by default ``default``."""
    # The class itself: to ask an abstract one takes ten times as long.
    return value.get(name, default) if type(value) is ByParameter else value


def of_parameters(value: Any, default: Any) -> list[Any]:
    """Return `of_parameter` for each of `PARAMETERS`."""
    if type(value) is not ByParameter:
        return [value] * len(PARAMETERS)
    return [value.get(name, default) for name in PARAMETERS]
