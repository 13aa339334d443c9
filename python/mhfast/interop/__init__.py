"""mhfast in other libraries: `torch`, `jax` and `sklearn`, which must be imported explicitly."""
