"""The models in PyTorch: differentiable functions and modules that use the C++ core.

Tensors are on the CPU, of one dtype, float32 or float64, and are not copied. Autograd of `torch`
calls `mhfast.backward` once for everything that needs a gradient, so that gradients keep full
relative accuracy when attention saturates. Second derivatives, forward mode, `torch.func`,
`torch.compile` and `torch.export` work, since the computation is a set of registered operators.
"""

try:
    import torch as torch
except ImportError as error:
    raise ImportError("mhfast.interop.torch needs torch: pip install torch") from error

from .functions import classifier, layer
from .modules import MultiHeadClassifier, MultiHeadLayer

__all__ = ["MultiHeadClassifier", "MultiHeadLayer", "classifier", "layer"]
