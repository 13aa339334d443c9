"""The test cases of the ONNX operator Attention, answered by `Layer` and `Layer.attention`."""

from __future__ import annotations

import functools
import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import attention_operator
import numpy as np
import pytest
from attention_operator import Operation

onnx = pytest.importorskip("onnx")

SOFTCAP = "tanh of the logits, which in a Layer are bilinear in query and key"
BFLOAT16 = "the case rounds on the way to eight bits, by more than its own tolerance"
LISTED = {
    "test_attention_3d_diff_heads_sizes_softcap": SOFTCAP,
    "test_attention_3d_gqa_softcap": SOFTCAP,
    "test_attention_3d_softcap": SOFTCAP,
    "test_attention_3d_with_past_and_present_qk_matmul_softcap": SOFTCAP,
    "test_attention_4d_diff_heads_sizes_softcap": SOFTCAP,
    "test_attention_4d_gqa_softcap": SOFTCAP,
    "test_attention_4d_softcap": SOFTCAP,
    "test_attention_4d_softcap_neginf_mask": SOFTCAP,
    "test_attention_4d_softcap_neginf_mask_poison": SOFTCAP,
    "test_attention_4d_with_qk_matmul_softcap": SOFTCAP,
    "test_attention_local_window_gqa_rank4_mask": SOFTCAP,
    "test_attention_3d_causal_bf16": BFLOAT16,
    "test_attention_4d_attn_mask_causal_bf16": BFLOAT16,
    "test_attention_4d_causal_bf16": BFLOAT16,
    "test_attention_4d_causal_padded_kv_bf16": BFLOAT16,
    "test_attention_4d_padded_kv_bf16": BFLOAT16,
}
"""The cases that a Layer does not answer within their tolerances, and why."""

# Twice the spacing of bfloat16 numbers just above a power of two, relative: logits, weights and
# the result are rounded once each.
ROUNDINGS = 2.0**-6

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


@dataclass(frozen=True)
class Case:
    """Attributes, inputs, and expected outputs by name of one case, with its tolerances."""

    attributes: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    rtol: float
    atol: float


@functools.cache
def cases() -> dict[str, Case]:
    """Return the operator's own cases, without those that spell it out in other operators."""
    package = "onnx.backend.test.case.node"
    node = importlib.import_module(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx takes the softmax of rows of -inf
        importlib.import_module(f"{package}.attention")
    # The public collect_testcases gives these after ten seconds for the cases of all operators.
    return {
        case.name: _read(case) for case in node._NodeTestCases
        if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")
    }  # fmt: skip


def _read(case: Any) -> Case:
    (node,) = case.model.graph.node
    ((given, expected),) = case.data_sets
    names = [name for name, text in zip(INPUTS, node.input, strict=False) if text]
    return Case(
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
        dict(zip(names, given, strict=True)),
        dict(zip(filter(None, node.output), expected, strict=True)),
        case.rtol,
        case.atol,
    )


def heads(array: Any, count: int | None) -> Any:
    """Return (n,J,rows,c) of that or, for `count` heads, of (n,rows,J c)."""
    if array.ndim == 4:
        return array.astype(np.float32)
    n, rows, columns = array.shape
    split = array.reshape(n, rows, count, columns // count)
    return split.transpose(0, 2, 1, 3).astype(np.float32)


def operation(case: Case) -> Operation:
    """Return what the case asks for: masks that are no `causal` or `lengths` as a matrix."""
    given, asked = case.inputs, case.attributes
    Q = heads(given["Q"], asked.get("q_num_heads"))
    K, V = (heads(given[name], asked.get("kv_num_heads")) for name in "KV")
    (n, J, q, a), past = Q.shape, 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        K, V = (
            np.concatenate((given[name].astype(np.float32), new), axis=2)
            for name, new in (("past_key", K), ("past_value", V))
        )
    T = K.shape[2]
    lengths = given.get("nonpad_kv_seqlen")
    # The key that row t stands beside is t + offset.
    offset = np.full(n, past) if lengths is None else lengths - q
    ahead = np.arange(T) - np.arange(q)[:, None] - offset[:, None, None, None]
    mask = np.zeros((n, J, q, T), np.float32)
    if "attn_mask" in given:
        mask[..., given["attn_mask"].shape[-1] :] = -np.inf
        mask[..., : given["attn_mask"].shape[-1]] += additive(given["attn_mask"])
    for side, steps in (("left", -ahead), ("right", ahead)):
        size = asked.get(f"{side}_window_size", -1)
        mask[np.broadcast_to((steps > size) & (size >= 0), mask.shape)] = -np.inf
    causal = bool(asked.get("is_causal", 0))
    if causal and offset.any():
        mask[np.broadcast_to(ahead > 0, mask.shape)] = -np.inf
        causal = False
    return Operation(Q, K, V, asked.get("scale", a**-0.5), mask, causal, lengths)


def additive(mask: Any) -> Any:
    """Return a mask of booleans, true where a key is visible, or of numbers as what is added."""
    if mask.dtype == bool:
        return np.where(mask, np.float32(0), np.float32(-np.inf))
    return mask.astype(np.float32)


def answer(case: Case) -> dict[str, Any]:
    """Return every output that the case expects."""
    asked = operation(case)
    Y = attention_operator.outputs(asked)
    if case.inputs["Q"].ndim == 3:
        n, J, q, b = Y.shape
        Y = Y.transpose(0, 2, 1, 3).reshape(n, q, J * b)
    found = {"Y": Y, "present_key": asked.K, "present_value": asked.V}
    if "qk_matmul_output" in case.expected:
        found["qk_matmul_output"] = between(asked, case.attributes.get("qk_matmul_output_mode", 0))
    return {name: found[name] for name in case.expected}


def between(asked: Operation, mode: int) -> Any:
    """Return what the operator has before (0, 1) and after (2) its masks, or after softmax (3)."""
    if mode == 3:
        return attention_operator.weights(asked)
    if mode < 2:
        asked = Operation(asked.Q, asked.K, asked.V, asked.scale)
    return attention_operator.logits(asked)


def matches(case: Case, got: Any, expected: Any, rtol: float) -> bool:
    """Compare after rounding to the type of the case, infinities included."""
    rounded = got.astype(expected.dtype)
    return np.allclose(rounded.astype(float), expected.astype(float), rtol, case.atol)


def test_the_operator_has_the_cases_that_are_listed():
    assert len(cases()) == 93
    assert set(cases()) >= set(LISTED)
    assert len(cases()) - len(LISTED) >= 70


@pytest.mark.parametrize("name", [name for name in cases() if name not in LISTED])
def test_a_case(name):
    case = cases()[name]
    for output, got in answer(case).items():
        expected = case.expected[output]
        assert got.shape == expected.shape, output
        assert matches(case, got, expected, case.rtol), output


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_case_is_listed_rightly(name):
    case = cases()[name]
    got, expected = answer(case)["Y"], case.expected["Y"]
    assert not matches(case, got, expected, case.rtol)
    if LISTED[name] == SOFTCAP:
        assert case.attributes["softcap"] > 0
    else:
        assert matches(case, got, expected, ROUNDINGS)
