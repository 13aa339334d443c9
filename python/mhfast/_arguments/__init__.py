"""The one place where arguments are checked: arrays, numbers, samples and the run axis."""
