"""Sweeps: a function at every point of a grid, on any executor, as one tidy table."""
