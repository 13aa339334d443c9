"""Extract the heads of a trained `torch.nn.MultiheadAttention` through its outputs alone.

A module of torch (with biases, as it comes) is trained to classify the digits of scikit-learn: the
eight rows of an image are tokens.  Then its outputs for chosen tokens are asked, and nothing else:
`mh.learn_layer_by_queries` returns W_h and V_h, which are compared with the weights inside, and the
layer with the module on images it was never asked about.  Without `--torch` a random layer of
mhfast takes the place of the module.

    python examples/learner_queries.py --torch
"""

import argparse
import sys

import numpy as np

import mhfast as mh

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--torch", action="store_true", help="a trained module of torch")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--dim", type=int, default=16, help="d, a multiple of the heads")
parser.add_argument("--steps", type=int, default=300, help="training steps")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

TOKENS = 8  # rows of an image


def images(dim, seed):
    """Tokens (n, 8, d) of all digits, and their classes: rows, embedded, and their position."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(seed)
    X = (digits.images / 16.0) @ rng.standard_normal((8, dim)) / np.sqrt(8)
    X = X + 0.3 * rng.standard_normal((TOKENS, dim))
    return X, digits.target


def trained_module(X, y, heads, steps, seed):
    """Train attention and a linear readout of its mean token; return the attention in float64."""
    try:
        import torch
    except ImportError:
        sys.exit("--torch: expected torch to be installed (pip install torch)")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    attention = torch.nn.MultiheadAttention(X.shape[2], heads, batch_first=True)
    readout = torch.nn.Linear(X.shape[2], 10)
    with torch.no_grad():  # biases start at zero otherwise
        attention.in_proj_bias.normal_(std=0.1)
        attention.out_proj.bias.normal_(std=0.1)
    tokens, classes = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
    parameters = [*attention.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(steps):
        part = torch.randint(len(X), (128,))
        logits = readout(attention(tokens[part], tokens[part], tokens[part])[0].mean(dim=1))
        loss = torch.nn.functional.cross_entropy(logits, classes[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained {steps} steps, loss {loss.item():.3f}")
    return attention.double().eval()


def ask_module(module):
    """Return the module as a function of tokens."""
    import torch

    def ask(X):
        with torch.no_grad():
            tokens = torch.from_numpy(np.ascontiguousarray(X))
            return module(tokens, tokens, tokens, need_weights=False)[0].numpy()

    return ask


def layer_inside(module):
    """Return the module's weights as a layer of tokens (x, 1), as far as outputs can tell them."""
    d, heads = module.embed_dim, module.num_heads
    k = d // heads
    parts = module.in_proj_weight.detach().numpy().reshape(3, heads, k, d)
    biases = module.in_proj_bias.detach().numpy().reshape(3, heads, k)
    out = module.out_proj.weight.detach().numpy().reshape(d, heads, k)
    W, V = np.zeros((heads, d + 1, d + 1)), np.zeros((heads, d + 1, d))
    W[:, :d, :d] = np.einsum("hki,hkj->hij", parts[0], parts[1]) / np.sqrt(k)
    W[:, d, :d] = np.einsum("hk,hkj->hj", biases[0], parts[1]) / np.sqrt(k)
    V[:, :d] = np.einsum("hki,ohk->hio", parts[2], out)
    offset = np.einsum("hk,ohk->o", biases[2], out) + module.out_proj.bias.detach().numpy()
    V[:, d] = offset / heads  # only the sum shows
    return mh.Layer(W, V)


def with_one(X):
    """Return tokens (x, 1)."""
    return np.concatenate([X, np.ones((*X.shape[:2], 1))], axis=2)


X, y = images(arguments.dim, arguments.seed)
if arguments.torch:
    module = trained_module(X, y, arguments.heads, arguments.steps, arguments.seed)
    ask, truth = ask_module(module), layer_inside(module)
else:
    truth = mh.Layer.gaussian(
        arguments.heads, arguments.dim + 1, arguments.dim, std=0.3, seed=arguments.seed
    )
    W, V = np.array(truth.W), np.array(truth.V)
    W[:, :, -1] = 0.0  # adds the same to all scores of a query
    V[:, -1] = V[:, -1].mean(axis=0)  # only the sum shows
    truth = mh.Layer(W, V)

    def ask(X):
        """Return the outputs of the random layer."""
        return truth(with_one(X))


result = mh.learn_layer_by_queries(
    ask, d=arguments.dim, T=TOKENS, heads=arguments.heads, bias=True, seed=arguments.seed
)
print(result)
if result.layer is None:
    sys.exit(1)
Y = ask(X)
difference = np.linalg.norm(result.layer(with_one(X)) - Y) / np.linalg.norm(Y)
print(f"outputs on {len(X)} images, relative difference {difference:.1e}")
print(f"W and V, relative difference {mh.learner.align(result.layer, truth).error:.1e}")
