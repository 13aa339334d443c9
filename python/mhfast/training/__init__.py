"""Training: `train`, what it records, and the `Run` that it returns."""
