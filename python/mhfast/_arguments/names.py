"""The names that arguments can have, as types, so that a type checker finds a misspelt one."""

from __future__ import annotations

from typing import Literal, TypeAlias

LossName: TypeAlias = Literal[
    "logistic", "exponential", "linear", "squared", "squared_hinge", "hinge", "polynomial_tail",
    "negative_log", "correlation", "huber", "quantile", "cross_entropy", "soft_cross_entropy",
]  # fmt: skip

AttentionName: TypeAlias = Literal["softmax", "linear", "relu", "softmax1", "sigmoid", "hardmax"]
"""The row maps: how logits become attention weights."""

Threshold: TypeAlias = Literal["loss", "grad_norm", "accuracy", "margin"]

RecordName: TypeAlias = Literal[
    "loss", "accuracy", "margin", "grad_norm", "param_norm", "distance", "cosine",
    "W", "Q", "K", "U", "V", "A", "B", "prompt", "embedding",
    "attention", "attention_max", "attention_groups",
    "W_average", "Q_average", "K_average", "U_average", "V_average", "A_average", "B_average",
    "prompt_average", "embedding_average",
    "test_loss", "test_accuracy", "test_margin",
]  # fmt: skip
"""What can be recorded where a test set has no name of its own."""
