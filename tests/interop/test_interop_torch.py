"""`mhfast.interop.torch`: functions and modules against torch's own autograd of the formula."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
from instances import DIM, HEADS, OUTPUTS, ROWS, RUNS, SAMPLES, TOKENS, TOLERANCE, case, relative

import mhfast as mh

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.peers

from mhfast.interop import torch as mht  # noqa: E402  (after the test for torch)
from mhfast.interop.torch import operators  # noqa: E402

KINDS = [mh.Classifier, mh.Layer]
FUNCTIONS = {mh.Classifier: mht.classifier, mh.Layer: mht.layer}
MODULES = {mh.Classifier: mht.MultiHeadClassifier, mh.Layer: mht.MultiHeadLayer}
READOUT = {mh.Classifier: "U", mh.Layer: "V"}
SEEN = [
    {"query": query, "causal": causal, "lengths": lengths}
    for query in (None, 0, -1, -2, "given")
    for causal in (False, True)
    for lengths in (False, True)
] + [{"prompt": True, "lengths": lengths} for lengths in (False, True)]


@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torch():
    """The textbook's products are too small for more, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors_of(the):
    """The tensors by the names of the arguments of a function; each needs a gradient."""
    arrays = {**the.model.parameters, "X": the.X}
    if "query" in the.options:
        arrays["query"] = the.options["query"]
    return {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}


def applied(the, tensors, **changes):
    options = {"scale": the.model.scale, "causal": the.model.causal}
    if "query" not in tensors:
        options["query"] = the.model.query
    if "lengths" in the.options:
        options["lengths"] = the.options["lengths"]
    return FUNCTIONS[type(the.model)](**tensors, **(options | changes))


def textbook(the, tensors):
    """The formula, sample by sample; a row that sees no token mixes none."""
    W, X = tensors["W"], tensors["X"]
    lengths = the.options.get("lengths", [TOKENS] * SAMPLES)
    outputs = []
    for i, length in enumerate(lengths):
        x = X[i, :length]
        rows = torch.arange(length)
        if "prompt" in tensors:
            Z = tensors["prompt"]
        elif "query" in tensors:
            Z, rows = tensors["query"][i], torch.arange(ROWS)
        elif the.model.query is None:
            Z = x
        else:
            token = the.model.query
            token += length if token < 0 else 0
            rows = torch.tensor([token])
            Z = x[token][None] if 0 <= token < length else x.new_zeros(1, DIM)
        q = ROWS if "query" in tensors else the.model._query_rows(TOKENS)
        mixed = X.new_zeros(HEADS, q, DIM)
        if length and not (the.model.causal and rows[0] < 0):
            logits = the.model.scale * torch.einsum("qd,hde,te->hqt", Z, W, x)
            if the.model.causal:
                logits = logits.masked_fill(torch.arange(length) > rows[:, None], -torch.inf)
            some = logits.softmax(-1) @ x
            mixed = torch.cat([some, mixed[:, some.shape[1] :]], dim=1)
        if "U" in tensors:
            outputs.append((tensors["U"] * mixed).sum() / HEADS**0.5)
        else:
            outputs.append(torch.einsum("hqd,hdp->qp", mixed, tensors["V"]))
    return torch.stack(outputs)


def gradients(outputs, tensors):
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(outputs, list(tensors.values()), cotangent.to(outputs.dtype))
    return dict(zip(tensors, (g.numpy() for g in found), strict=True))


@pytest.mark.parametrize("options", SEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_formula(kind, options):
    the = case(kind, scale=0.5, **options)
    tensors = tensors_of(the)
    outputs, expected = applied(the, tensors), textbook(the, tensors)
    assert outputs.dtype == torch.float64
    assert relative(outputs.detach().numpy(), expected.detach().numpy()) < 1e-12
    got, wanted = gradients(outputs, tensors), gradients(expected, tensors)
    for name in tensors:
        # The first query row of a causal model sees one token, and no gradient reaches its W.
        size = max(np.abs(wanted[name]).max(), 1)
        assert np.abs(got[name] - wanted[name]).max() <= 1e-12 * size


@pytest.mark.parametrize("options", [{}, {"query": -1}, {"query": "given"}, {"prompt": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, options):
    the = case(kind, **options)
    tensors = tensors_of(the)
    names = list(tensors)

    def function(*given):
        return applied(the, dict(zip(names, given, strict=True)))

    # Differences in random directions, by the defaults of torch for float64.
    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_float32(kind):
    the, exact = (case(kind, query="given", dtype=dtype) for dtype in (np.float32, np.float64))
    tensors = tensors_of(the)
    outputs = applied(the, tensors)
    assert outputs.dtype == torch.float32
    got, wanted = gradients(outputs, tensors), gradients(textbook(exact, t := tensors_of(exact)), t)
    for name in tensors:
        assert got[name].dtype == np.float32
        # The inputs are rounded as well, so a few times the tolerance for equal ones.
        assert relative(got[name], wanted[name]) < 5 * TOLERANCE[np.dtype(np.float32)]


@pytest.mark.parametrize("asked", [("W",), ("X",), ("V", "query"), ("W", "V", "X", "query"), ()])
def test_one_call_computes_the_gradients_that_are_asked_for(asked, monkeypatch):
    calls = []

    def counted(*args, wrt, **options):
        calls.append(wrt)
        return mh.backward(*args, wrt=wrt, **options)

    monkeypatch.setattr(operators, "backward", counted)
    the = case(mh.Layer, query="given")
    tensors = tensors_of(the)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in asked)
    outputs = applied(the, tensors)
    assert outputs.requires_grad is bool(asked)
    if asked:
        outputs.sum().backward()
    assert calls == ([list(asked)] if asked else [])
    assert {name for name, tensor in tensors.items() if tensor.grad is not None} == set(asked)


def test_no_graph_is_kept_where_none_is_wanted():
    the = case()
    with torch.no_grad():
        outputs = applied(the, tensors_of(the))
    assert not outputs.requires_grad
    assert np.array_equal(outputs.numpy(), the.model(the.X))


def test_the_upstream_gradient_may_have_any_strides():
    the = case(mh.Layer)
    tensors = tensors_of(the)
    outputs = applied(the, tensors)
    values = torch.randn(OUTPUTS, TOKENS, SAMPLES, dtype=torch.float64)
    for cotangent in (values.permute(2, 1, 0), torch.ones(()).double().expand(outputs.shape)):
        assert not cotangent.is_contiguous()
        found = torch.autograd.grad(outputs, tensors["W"], cotangent, retain_graph=True)[0]
        expected = mh.backward(the.model, the.X, cotangent.numpy(), wrt="W").W
        assert np.array_equal(found.numpy(), expected)


def test_tensors_may_have_any_strides_and_are_left_alone():
    the = case()
    tensors = {name: tensor.detach() for name, tensor in tensors_of(the).items()}
    expected = applied(the, tensors)
    turned = {name: t.mT.contiguous().mT.requires_grad_() for name, t in tensors.items()}
    outputs = applied(the, turned)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    for name, tensor in turned.items():
        assert torch.equal(tensor, tensors[name])
    outputs.detach().zero_()  # writable, and no memory of an argument
    assert torch.equal(applied(the, turned), expected)


@pytest.mark.parametrize("name", ["W", "U", "X", "query"])
def test_a_tensor_changed_before_its_gradient_is_an_error(name):
    the = case(query="given")
    tensors = tensors_of(the)
    outputs = applied(the, tensors)
    with torch.no_grad():
        tensors[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_lengths_may_be_changed_before_the_gradient():
    the = case(lengths=True)
    tensors = tensors_of(the)
    expected = gradients(applied(the, tensors), tensors)
    lengths = torch.tensor(the.options["lengths"])
    outputs = applied(the, tensors, lengths=lengths)
    lengths.fill_(TOKENS)
    found = gradients(outputs, tensors)
    for name in tensors:
        assert np.array_equal(found[name], expected[name])


def test_functional_gradients():
    the = case(mh.Layer)
    tensors = {name: tensor.detach() for name, tensor in tensors_of(the).items()}
    found = torch.func.grad(lambda given: applied(the, given).sin().sum())(tensors)
    expected = mh.backward(the.model, the.X, np.cos(the.model(the.X)), wrt=tuple(tensors))
    for name in tensors:
        # A cosine of torch and one of NumPy.
        assert relative(found[name].numpy(), getattr(expected, name)) < 1e-13


@pytest.mark.parametrize("runs", [("W",), ("X",), ("U", "V", "query"), ("W", "U", "V", "X")])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_stand_side_by_side_and_share_what_has_no_run_axis(kind, runs):
    the = case(kind, query="given", runs=runs)
    tensors = tensors_of(the)
    outputs = applied(the, tensors)
    assert outputs.shape[0] == RUNS
    expected = torch.stack(
        [
            applied(the, {name: t[r] if name in runs else t for name, t in tensors.items()})
            for r in range(RUNS)
        ]
    )
    assert relative(outputs.detach().numpy(), expected.detach().numpy()) < 1e-12
    got, wanted = gradients(outputs, tensors), gradients(expected, tensors)
    for name in tensors:
        assert got[name].shape == tensors[name].shape
        assert relative(got[name], wanted[name]) < 1e-12


def test_wrong_arguments_are_named():
    the = case()
    good = {name: tensor.detach() for name, tensor in tensors_of(the).items()}
    X, W = good["X"], good["W"]
    for changes, kind, message in (
        ({"X": the.X}, TypeError, "X: expected a torch tensor, got ndarray"),
        ({"U": None}, TypeError, "U: expected a torch tensor, got NoneType"),
        ({"W": W.to("meta")}, TypeError, "W: expected a tensor on the CPU, got one on meta"),
        ({"W": W.to_sparse()}, TypeError, "W: expected a dense tensor, got layout sparse_coo"),
        ({"X": X.bfloat16()}, TypeError, "X: expected dtype float32 or float64, got bfloat16"),
        (
            {"X": X.float()}, TypeError,
            "X: expected dtype float64, that of the model, got float32; "
            "X.astype(np.float64) converts it",
        ),
        (
            {"W": W.float()}, TypeError,
            "U: expected dtype float32, that of W, got float64; U.astype(np.float32) converts it",
        ),
        ({"prompt": the.X}, TypeError, "prompt: expected a torch tensor, got ndarray"),
        (
            {"query": the.X}, TypeError,
            "query: expected None, an integer or a tensor (n, q, d), got ndarray",
        ),
        (
            {"query": 0.5}, TypeError,
            "query: expected an integer or an array (n, q, d), got float",
        ),
        ({"X": X[:, :2]}, ValueError, "X: expected shape (n, T, d) = (n, 3, 8), got (6, 2, 8)"),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            mht.classifier(**{**good, **changes})
        assert str(caught.value) == message


def test_the_message_when_torch_is_missing():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import mhfast.interop.torch\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "mhfast.interop.torch needs torch: pip install torch"


def module_of(kind, seed=3, **options):
    torch.manual_seed(seed)
    sizes = (HEADS, TOKENS, DIM) if kind is mh.Classifier else (HEADS, DIM, OUTPUTS)
    return MODULES[kind](*sizes, **({"dtype": torch.float64} | options))


@pytest.mark.parametrize("options", [{}, {"query": -1}, {"prompt_rows": ROWS}, {"causal": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_computes_what_its_model_does(kind, options):
    module = module_of(kind, **options)
    the = case(kind, lengths=True)
    outputs = module(torch.tensor(the.X), lengths=the.options["lengths"])
    model = module.model()
    assert np.array_equal(outputs.detach().numpy(), model(the.X, lengths=the.options["lengths"]))
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == (
        {name: array.shape for name, array in model.parameters.items()}
    )
    assert type(module).from_model(model).model() == model


def test_an_external_query_comes_with_the_call():
    the = case(mh.Classifier, query="given")
    module = mht.MultiHeadClassifier.from_model(the.model)
    outputs = module(torch.tensor(the.X), torch.tensor(the.options["query"]))
    assert np.array_equal(outputs.detach().numpy(), the.model(the.X, **the.seen()))


def test_the_start_of_a_module():
    module = module_of(mh.Classifier)
    torch.manual_seed(3)
    drawn = torch.randn(HEADS, DIM, DIM, dtype=torch.float64) / DIM
    assert torch.allclose(module.W, drawn, rtol=1e-15)  # the product is rounded once
    wide = mht.MultiHeadLayer(11, 37, 41, std=0.25)
    assert wide.W.dtype == torch.get_default_dtype()
    # 15059 entries: the standard deviation is known to 0.6 %, and this is five times as much.
    assert float(wide.W.detach().std()) == pytest.approx(0.25, rel=0.03)
    assert not mht.MultiHeadLayer(7, 5, 3, std=0).V.any()


def test_a_model_keeps_its_parameters_when_the_module_goes_on():
    module = module_of(mh.Classifier)
    model = module.model()
    before = model.W.copy()
    with torch.no_grad():
        module.W.add_(1)
    assert np.array_equal(model.W, before)
    assert mht.MultiHeadClassifier.from_model(model).W.add(0).requires_grad


def test_sgd_is_the_gradient_descent_of_mhfast():
    module = module_of(mh.Classifier, std=0.1)
    the = case()
    X, y = torch.tensor(the.X), torch.tensor(the.y)
    run = mh.train(module.model(), the.X, the.y, optimizer=mh.GradientDescent(lr=0.5), steps=20)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-y * module(X)).mean().backward()
        optimizer.step()
    # Twenty steps that are each rounded in another order.
    assert relative(module.model().W, run.model.W) < 1e-12
    assert relative(module.model().U, run.model.U) < 1e-12
    assert relative(run.model.U, run.start.U) > 0.1


def test_one_module_trains_several_runs():
    the = case(runs=("W", "U"))
    module = mht.MultiHeadClassifier.from_model(the.model)
    assert module.model() == the.model
    module(torch.tensor(the.X)).square().sum().backward()
    for r in range(RUNS):
        alone = mht.MultiHeadClassifier.from_model(the.model[r])
        alone(torch.tensor(the.X)).square().sum().backward()
        # The same numbers by another plan.
        assert relative(module.W.grad[r].numpy(), alone.W.grad.numpy()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_modules_can_be_saved_copied_and_converted(kind):
    module = module_of(kind, prompt_rows=ROWS, scale=0.5)
    expected = module.model()
    other = module_of(kind, seed=4, prompt_rows=ROWS, scale=0.5)
    assert other.model() != expected
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored))
    copies = (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
    for one in copies:
        assert one.model() == expected
        assert one.W is not module.W
    single = copies[1].to(torch.float32)
    assert single.model().dtype == np.float32
    assert np.array_equal(single.model().W, expected.W.astype(np.float32))
    X = torch.tensor(case(kind).X)
    assert single(X.float()).dtype == torch.float32
    with pytest.raises(TypeError, match="X: expected dtype float32, that of the model"):
        single(X)


def test_the_text_of_a_module():
    module = module_of(mh.Classifier, query=-1, causal=True)
    assert repr(module) == (
        "MultiHeadClassifier(W=(7, 8, 8), U=(7, 1, 8), query=-1, scale=1.0, causal=True, "
        "dtype=float64)"
    )


def test_wrong_arguments_of_modules_are_named():
    of = mht.MultiHeadClassifier.from_model
    Z = np.ones((SAMPLES, ROWS, DIM))
    external = (
        "query: expected None or an integer, got an external query, which is passed to each call "
        "of a module"
    )
    for call, kind, message in (
        (
            lambda: of(case(mh.Layer).model), TypeError,
            "model: expected a Classifier, got Layer",
        ),
        (
            lambda: of(case(factors="tied").model), TypeError,
            "model: expected an array W, got a LowRank",
        ),
        (lambda: of(case(query="own").model), ValueError, external),
        (lambda: module_of(mh.Classifier, query=Z), ValueError, external),
        (
            lambda: module_of(mh.Layer, dtype=torch.float16), TypeError,
            "dtype: expected torch.float32 or torch.float64, got torch.float16",
        ),
        (
            lambda: module_of(mh.Layer, std=-1.0), ValueError,
            "std: expected a number of at least 0, got -1.0",
        ),
        (
            lambda: mht.MultiHeadLayer(0, 5, 3), ValueError,
            "heads: expected an integer of at least 1, got 0",
        ),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == message
