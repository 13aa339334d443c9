"""`mhfast.interop.torch` under the transformations, tracers and compilers of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from instances import DIM, HEADS, ROWS, RUNS, SAMPLES, TOKENS, case, relative

import mhfast as mh

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.peers,
    # Torch scripts functions of its own when its compiler is imported.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402  (after the test for torch)

from mhfast.interop import torch as mht  # noqa: E402
from mhfast.interop.torch import operators  # noqa: E402

KINDS = [mh.Classifier, mh.Layer]
SEEN = [
    {},
    {"causal": True, "lengths": True},
    {"query": "given", "lengths": True, "causal": True},
    {"prompt": True},
    {"query": -1, "lengths": True},
    {"attention": "softmax1", "lengths": True},
    {"attention": "sigmoid", "normalize": True, "causal": True},
]


@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def operands(the):
    """The tensors by which an operator differentiates, and its other arguments."""
    model, options = the.model, the.options
    readout = model.U if isinstance(model, mh.Classifier) else model.V
    arrays = (model.W, readout, model.prompt, the.X, options.get("query"))
    tensors = [None if array is None else torch.tensor(array) for array in arrays]
    lengths = options.get("lengths")
    lengths = None if lengths is None else torch.tensor(lengths)
    settings = isinstance(model, mh.Layer), model.query, model.scale, model.causal
    settings += (str(model.attention), model.normalize, None)
    return tensors, (lengths, *settings)


def function_of(the):
    """The outputs as a function of those tensors that there are, and these."""
    tensors, rest = operands(the)
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]

    def function(*given):
        all_of = [None] * len(tensors)
        for i, tensor in zip(present, given, strict=True):
            all_of[i] = tensor
        return operators.outputs_op(*all_of, *rest)

    return function, tuple(tensors[i].requires_grad_() for i in present)


@pytest.mark.parametrize("options", SEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives_in_both_modes(kind, options):
    function, tensors = function_of(case(kind, scale=0.7, **options))
    # Differences in random directions, by the defaults of torch for float64.
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize(
    ("kind", "options"), [(mh.Classifier, SEEN[2]), (mh.Classifier, SEEN[3]), (mh.Layer, SEEN[1])]
)
def test_the_operators_keep_the_rules_of_torch(kind, options):
    tensors, rest = operands(case(kind, **options))
    cotangent = torch.randn_like(operators.outputs_op(*tensors, *rest))
    wanted = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
    along = [None if tensor is None else torch.randn_like(tensor) for tensor in tensors]
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in tensors]
    for op, arguments in (
        (operators.outputs_op, (*leaves, *rest)),
        (operators.backward_op, (cotangent.clone().requires_grad_(), *leaves, *rest, wanted)),
        (operators.tangents_op, (*along, cotangent, *leaves, *rest, 32)),
    ):
        torch.library.opcheck(op, arguments)
    still = [None if tensor is None else tensor.detach() for tensor in tensors]
    torch.library.opcheck(operators.tangents_op, (*along, cotangent, *still, *rest, wanted | 32))
    torch.library.opcheck(operators.weights_op, (*still, *rest))


def test_hessian_products_are_those_of_the_core():
    the = case(mh.Layer, loss="squared", lengths=True)
    model, lengths = the.model, the.options["lengths"]
    rng = np.random.default_rng(3)
    along = mh.Gradients(W=rng.normal(size=model.W.shape), V=rng.normal(size=model.V.shape))
    expected = mh.hvp(model, the.X, the.y, tangent=along, loss="squared", lengths=lengths)
    X, y = torch.tensor(the.X), torch.tensor(the.y)
    seen = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]

    def loss(W, V):
        outputs = mht.layer(X, W, V, lengths=lengths)
        return ((outputs - torch.where(seen[..., None], y, 0)).square() * seen[..., None]).sum()

    at = torch.tensor(model.W), torch.tensor(model.V)
    moves = torch.tensor(along.W), torch.tensor(along.V)
    for found in (
        torch.autograd.functional.vhp(loss, at, moves)[1],
        torch.func.jvp(torch.func.grad(loss, (0, 1)), at, moves)[1],
        torch.func.grad(lambda *p: torch.func.jvp(loss, p, moves)[1], (0, 1))(*at),
    ):
        # A sum over samples where the core has the mean.
        assert relative(found[0].numpy() / SAMPLES, expected.W) < 1e-12
        assert relative(found[1].numpy() / SAMPLES, expected.V) < 1e-12


def test_second_derivatives_keep_their_accuracy_in_saturation():
    # Two tokens whose logits differ by 60: the weight of the second is e^-60.
    X = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    W = 60 * torch.eye(2, dtype=torch.float64)[None]
    U = torch.tensor([[[0.5, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    hessian = torch.func.hessian(lambda W: mht.classifier(X, W, U).sum())(W)
    # phi = 1.5 sigmoid(-(W00 - W01)) + const for row 0, whose second derivative is 1.5 e^-60.
    assert float(hessian[0, 0, 0, 0, 0, 0]) == pytest.approx(1.5 * np.exp(-60), rel=1e-13)


def arguments():
    the = case()
    return tuple(torch.tensor(a) for a in (the.X, the.model.W, the.model.U))


def outputs(X, W, U):
    return mht.classifier(X, W, U)


def value(X, W, U):
    return outputs(X, W, U).sin().sum()


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("function", [outputs, torch.func.grad(value, (0, 1, 2))])
def test_a_traced_graph_is_right_for_other_inputs(function, mode):
    X, W, U = arguments()
    graph = make_fx(function, tracing_mode=mode)(X, W, U)
    other = (3 * X, -W, U + 1)
    expected = function(*other)
    found = graph(*other)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert "mhfast.attention" in graph.code


def test_jit_and_pre_dispatch_traces_are_right_for_other_inputs():
    X, W, U = arguments()
    expected = mht.classifier(2 * X, W, U)
    traced = torch.jit.trace(outputs, (X, W, U))
    assert torch.equal(traced(2 * X, W, U), expected)
    graph = make_fx(outputs, pre_dispatch=True)(X, W, U)
    assert torch.equal(graph(2 * X, W, U), expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(kind, backend):
    the = case(kind, lengths=True)
    readout = the.model.U if kind is mh.Classifier else the.model.V
    call = mht.classifier if kind is mh.Classifier else mht.layer
    X, W, R, lengths = map(torch.tensor, (the.X, the.model.W, readout, the.options["lengths"]))
    W.requires_grad_()

    def value(X, W, R, lengths):
        return call(X, W, R, lengths=lengths).sin().sum()

    compiled = torch.compile(value, fullgraph=True, backend=backend)
    for sign in (1, -1):
        found = torch.autograd.grad(compiled(sign * X, W, R, lengths), W)[0]
        expected = torch.autograd.grad(value(sign * X, W, R, lengths), W)[0]
        # Inductor has a cosine of its own.
        assert relative(found.numpy(), expected.numpy()) <= {"inductor": 1e-14}.get(backend, 0)


def test_a_module_is_exported_with_any_number_of_samples():
    module = mht.MultiHeadClassifier(HEADS, TOKENS, DIM, query=-1, dtype=torch.float64)
    X = torch.tensor(case().X)
    samples = torch.export.Dim("n", min=2)
    exported = torch.export.export(module, (X,), dynamic_shapes=((samples, None, None),))
    assert torch.equal(exported.module()(2 * X[:5]), module(2 * X[:5]))


@pytest.mark.parametrize("options", SEEN[1:4])
@pytest.mark.parametrize("kind", KINDS)
def test_vmap_is_a_loop(kind, options):
    the = case(kind, **options)
    function, tensors = function_of(the)
    for mapped in range(len(tensors)):
        many = torch.stack([tensors[mapped].detach() * s for s in (1.0, -0.5, 2.0, 0.3)])

        def value(one, mapped=mapped):
            given = [t.detach() for t in tensors]
            given[mapped] = one
            return function(*given).sin().sum()

        for transformed in (value, torch.func.grad(value)):
            found = torch.vmap(transformed)(many)
            for k in range(4):
                expected = transformed(many[k])
                assert relative(found[k].numpy(), expected.numpy()) < 1e-12  # another plan


def test_vmap_of_operands_that_have_runs_already():
    the = case(runs=("W",))
    W, U, X = map(torch.tensor, (the.model.W, the.model.U, the.X))
    Xs = torch.stack([X, -X, X / 2, 2 * X])

    def of(X, U):
        return mht.classifier(X, W, U).sin().sum()

    by_U = torch.vmap(torch.func.grad(of, 1), in_dims=(0, None))(Xs, U)
    both = torch.vmap(mht.classifier, in_dims=(0, None, None))(Xs, W, U)
    assert both.shape == (4, RUNS, SAMPLES)
    for k in range(4):
        assert relative(both[k].numpy(), mht.classifier(Xs[k], W, U).numpy()) < 1e-12
        assert relative(by_U[k].numpy(), torch.func.grad(of, 1)(Xs[k], U).numpy()) < 1e-12
    shared = torch.func.grad(lambda U: torch.vmap(of, (0, None))(Xs, U).sum())(U)
    assert relative(shared.numpy(), by_U.sum(0).numpy()) < 1e-12


def test_jacobians_and_hessians():
    X, W, U = arguments()
    of_W = lambda W: mht.classifier(X, W, U)  # noqa: E731
    rows = torch.stack(
        [torch.autograd.functional.vjp(of_W, W, e)[1] for e in torch.eye(6).double()]
    )
    assert relative(torch.func.jacrev(of_W)(W).numpy(), rows.numpy()) < 1e-12
    assert relative(torch.func.jacfwd(of_W)(W).numpy(), rows.numpy()) < 1e-12
    of_U = lambda U: value(X, W, U)  # noqa: E731
    expected = torch.autograd.functional.hessian(of_U, U)
    for hessian in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        assert relative(hessian(of_U)(U).numpy(), expected.numpy()) < 1e-12


def test_a_third_derivative_and_forward_mode_twice_are_refused():
    X, W, U = arguments()
    of_W = lambda W: value(X, W, U)  # noqa: E731
    hessian = torch.func.hessian(of_W)
    with pytest.raises(RuntimeError, match="expected derivatives up to the second, got a third"):
        torch.func.grad(lambda W: hessian(W).sum())(W)
    slope = lambda W: torch.func.jvp(of_W, (W,), (W,))[1]  # noqa: E731
    with pytest.raises(RuntimeError, match=r"torch\.func\.hessian is forward over reverse mode"):
        torch.func.jvp(slope, (W,), (W,))


def modules(count=RUNS):
    torch.manual_seed(5)
    sizes = HEADS, TOKENS, DIM
    return [mht.MultiHeadClassifier(*sizes, dtype=torch.float64) for _ in range(count)]


def test_stacked_modules_are_one_call(monkeypatch):
    calls = []
    monkeypatch.setattr(
        operators, "backward", lambda *a, **k: calls.append(1) or mh.backward(*a, **k)
    )
    ensemble = modules()
    parameters, buffers = torch.func.stack_module_state(ensemble)
    X = torch.tensor(case().X)

    def loss(parameters, buffers):
        return torch.func.functional_call(ensemble[0], (parameters, buffers), (X,)).sin().sum()

    found = torch.vmap(torch.func.grad(loss))(parameters, buffers)
    assert len(calls) == 1
    for r, module in enumerate(ensemble):
        module(X).sin().sum().backward()
        assert relative(found["W"][r].detach().numpy(), module.W.grad.numpy()) < 1e-12


def test_autocast_computes_in_float32():
    torch.manual_seed(0)
    module = mht.MultiHeadLayer(HEADS, DIM, 4, prompt_rows=ROWS)
    before = torch.nn.Linear(DIM, DIM)
    X = torch.tensor(case().X, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = before(X)
        outputs = module(tokens)
    assert tokens.dtype == torch.bfloat16
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, module(tokens.float()))
    outputs.sum().backward()
    assert before.weight.grad.dtype == torch.float32
    with pytest.raises(TypeError, match="X: expected dtype float32 or float64, got bfloat16"):
        module(tokens)


@pytest.mark.parametrize("options", [{}, {"query": -1}, {"prompt_rows": ROWS}])
def test_attention_of_a_module(options):
    module = mht.MultiHeadClassifier(HEADS, TOKENS, DIM, dtype=torch.float64, **options)
    the = case(lengths=True)
    X, lengths = torch.tensor(the.X), the.options["lengths"]
    weights = module.attention(X, lengths=lengths)
    assert not weights.requires_grad
    assert np.array_equal(weights.numpy(), module.model().attention(the.X, lengths=lengths))


PROGRAM = Path(__file__).with_name("torch_processes.py")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_data_loader_beside_a_module(method):
    done = subprocess.run(
        [sys.executable, PROGRAM, "loader", method], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["64", "True"]


@pytest.mark.slow
def test_ddp_with_unequal_shards_is_training_on_all_samples():
    done = subprocess.run(
        [sys.executable, PROGRAM, "ddp"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Two partial sums in another order than one.
    assert float(done.stdout) < 1e-13
