"""Classifier and layer as functions of JAX arrays.

XLA calls the core as a foreign function: the outputs are those of the model, the gradients those of
`mhfast.backward`. All of `jit`, `grad`, `jvp`, `vmap`, `hessian`, `lax.scan`, `checkpoint`,
`shard_map`, sharded arrays and `jax.export` work, derivatives up to the second. What `vmap` maps
over becomes the run axis of one call, in which unmapped arrays are shared.
"""

try:
    import jax as jax
except ImportError as error:
    raise ImportError("mhfast.interop.jax needs jax: pip install jax") from error

OLDEST = (0, 6, 2)
if jax.__version_info__ < OLDEST:
    raise ImportError(
        f"mhfast.interop.jax needs jax {'.'.join(map(str, OLDEST))} or later, got {jax.__version__}"
    )

from .functions import classifier, layer  # noqa: E402  (needs such a jax)

__all__ = ["classifier", "layer"]
