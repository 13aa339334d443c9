"""The experiments by name, in the order of the list that the command prints."""

from __future__ import annotations

from importlib import import_module

from .experiment import Experiment

NAMES = (
    "multi_head_classifier",
    "layer_learning",
    "token_selection",
    "transformers_as_svms",
    "normalized_steps",
    "mirror_descent",
    "next_token_attention",
    "next_token_bias",
    "benign_overfitting",
    "softmax_regression_in_context",
    "linear_attention_in_context",
    "head_specialization",
    "induction_heads",
    "prompt_attention",
    "rank_growth",
)


def load(name: str) -> Experiment:
    """Import an experiment.

    Raises
    ------
    ValueError
        No experiment has this name.
    """
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    experiment: Experiment = import_module(f"{__package__}.{name}").EXPERIMENT
    return experiment
