"""Data sets: `Dataset`, groups of tokens and samples, and random streams."""
