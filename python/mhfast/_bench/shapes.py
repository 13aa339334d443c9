"""What is measured: the sizes of the problems, in groups.

n samples, T tokens (self-attention: as many queries), d dimensions, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem; they must be positive."""

    n: int
    T: int
    d: int
    H: int

    def __post_init__(self) -> None:
        if min(self.n, self.T, self.d, self.H) < 1:
            raise ValueError(f"shape: expected n, T, d, H >= 1, got {self}")

    def __str__(self) -> str:
        return f"{self.n},{self.T},{self.d},{self.H}"

    @property
    def flops(self) -> int:
        """Operations of one loss and gradient, n H (4 q d² + 8 q T d) with q = T.

        The same count for every implementation, whatever it really computes; exponentials are not
        counted.
        """
        q = self.T
        return self.n * self.H * (4 * q * self.d**2 + 8 * q * self.T * self.d)

    @property
    def scores(self) -> int:
        """Number of attention weights, n H T²."""
        return self.n * self.H * self.T**2

    def even(self) -> Shape:
        """Return the neighbour whose T and d are the nearest multiples of four."""
        return Shape(self.n, _nearest_four(self.T), _nearest_four(self.d), self.H)


@dataclass(frozen=True)
class Loop:
    """Gradient descent on a problem: `steps` steps of size `lr`, the loss recorded at each."""

    shape: Shape
    steps: int
    lr: float = 0.1


def parse_shape(text: str) -> Shape:
    """Read "n,T,d,H".

    Raises
    ------
    ValueError
        The text is not four positive integers.
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 4:
        raise ValueError(f"shape: expected four integers n,T,d,H, got {text!r}")
    return Shape(*sizes)


def parse_loop(text: str) -> Loop:
    """Read "n,T,d,H", and choose the number of steps by the work in one."""
    shape = parse_shape(text)
    return Loop(shape, steps=max(5, min(200, 10**9 // shape.flops)))


def _nearest_four(size: int) -> int:
    return max(4, 4 * round(size / 4))


ODD_SIZES = {"n": (1, 6, 33, 1000), "T": (7, 13, 33, 100), "d": (3, 5, 17, 100), "H": (1, 3, 256)}

SHAPES: dict[str, tuple[Shape, ...]] = {
    "main": (
        Shape(64, 8, 16, 8),
        Shape(100, 10, 10, 16),
        Shape(100, 10, 50, 64),
        Shape(200, 16, 32, 32),
        Shape(512, 32, 64, 16),
    ),
    "long": (
        Shape(16, 256, 64, 8),
        Shape(4, 1024, 64, 8),
        Shape(1, 4096, 64, 8),
    ),
    # Every T of ODD_SIZES with every d, then four more; n and H are spread over them so that no
    # problem takes the slowest peer over a second.
    "odd": (
        Shape(1000, 7, 3, 256),
        Shape(33, 7, 5, 3),
        Shape(1000, 7, 17, 3),
        Shape(6, 7, 100, 256),
        Shape(6, 13, 3, 1),
        Shape(1000, 13, 5, 1),
        Shape(33, 13, 17, 256),
        Shape(1000, 13, 100, 3),
        Shape(1000, 33, 3, 3),
        Shape(6, 33, 5, 256),
        Shape(1, 33, 17, 256),
        Shape(33, 33, 100, 3),
        Shape(6, 100, 3, 256),
        Shape(1, 100, 5, 3),
        Shape(33, 100, 17, 3),
        Shape(33, 100, 100, 1),
        Shape(1, 7, 3, 1),
        Shape(6, 13, 17, 3),
        Shape(1000, 33, 100, 1),
        Shape(1000, 100, 17, 1),
    ),
}

# From this many tokens on the peers leave out formulations that serve short sequences. They are
# slow there, and XLA does not finish keys-first attention with autodiff at T = 4096.
LONG = 64

# Few heads: the threads have to share one head's samples.
SCALING = Shape(4096, 16, 32, 1)

# Enough steps that entering and leaving the loop is negligible, at most some seconds for the peers.
LOOPS: tuple[Loop, ...] = (
    Loop(Shape(20, 8, 16, 1), steps=2000),
    Loop(Shape(100, 10, 10, 4), steps=300),
    Loop(Shape(100, 10, 20, 16), steps=100),
    Loop(Shape(20, 8, 2000, 1), steps=10),
    Loop(Shape(5000, 32, 5, 4), steps=10),
)
