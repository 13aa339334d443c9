"""mhfast inside other libraries: `torch`, `jax` and `sklearn`, each imported only on request."""
