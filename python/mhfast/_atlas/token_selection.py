"""A trained prompt turns towards the separation of the tokens that it selects."""

from __future__ import annotations

import numpy as np

import mhfast as mh

from ..figures import BLUE, ORANGE
from .experiment import Claim, Experiment, Outcome
from .figure import band, label, panels

DIM = 10


def run(quick: bool) -> Outcome:
    """Train prompts of many instances at once, and follow the regularization path of some."""
    instances, steps, radii = (8, 2000, 4) if quick else (100, 8000, 8)
    data = mh.data.sphere_tokens(6, 8, DIM, external_query=False, seed=range(instances))
    readout = data.truth["readout"][:, None, None]
    start = mh.Classifier(np.eye(DIM)[None], readout, prompt=np.zeros((1, DIM)))
    trained = mh.train(
        start,
        data,
        steps=steps,
        optimizer=mh.NormalizedGradientDescent(0.1),
        wrt="prompt",
        record={"prompt": steps // 100, "attention_max": steps // 100},
    )
    chosen = trained.model.attention(data)[:, :, 0, 0].argmax(axis=-1)
    svm = mh.theory.token_svm(data, chosen, wrt="prompt", W=np.eye(DIM))
    cosine = mh.theory.alignment(trained, svm)[..., 0]
    weight = trained.history["attention_max"].reshape(instances, cosine.shape[1], -1).mean(axis=-1)

    sizes = np.geomspace(1.0, 300.0, radii)
    path = mh.theory.regularization_path(data, sizes, start=start, wrt="prompt")
    ends = path.models[-1].attention(data)[:, :, 0, 0].argmax(axis=-1)
    of_path = mh.theory.token_svm(data, ends, wrt="prompt", W=np.eye(DIM))
    along = np.stack([mh.theory.alignment(model, of_path)[:, 0] for model in path.models], axis=1)

    figure, (left, right) = panels(
        f"A trained prompt turns towards the max-margin separation of its tokens "
        f"({instances} instances)"
    )
    at = trained.steps["prompt"]
    band(left, at[1:], cosine[:, 1:], BLUE, "cosine to the separation")
    band(left, at[1:], weight[:, 1:], ORANGE, "largest softmax weight")
    label(left, "normalized step", "", "gradient descent", xscale="log", ylim=(0, 1.03))
    band(right, sizes, along, BLUE, "cosine to the separation")
    label(right, "bound R of the norm", "", "regularization path", xscale="log", ylim=(0, 1.03))
    return Outcome(
        ("direction", "mean cosine", "smallest cosine"),
        [
            ("gradient descent", cosine[:, -1].mean(), cosine[:, -1].min()),
            (f"regularization path, R = {sizes[-1]:g}", along[:, -1].mean(), along[:, -1].min()),
        ],
        [
            Claim("mean cosine of the trained prompt", cosine[:, -1].mean(), 0.99),
            Claim("smallest cosine of the trained prompt", cosine[:, -1].min(), 0.97),
            Claim("mean cosine at the end of the path", along[:, -1].mean(), 0.99),
            Claim("smallest share of points on the path that are stationary to 1e-6",
                  float(path.converged.mean()), 0.95),
        ],
        figure,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Training selects tokens by a maximal margin",
    paper="Tarzanagh, Li, Zhang, Oymak, Max-Margin Token Selection in Attention Mechanism, 2023",
    says="Gradient descent on a prompt with a fixed readout converges in direction to the least-"
    "norm prompt that separates the selected token of each sample from the others; so do the "
    "minimizers over growing balls. Recalled from the abstract and the statement of the theorems.",
    setting="n = 6 samples of T = 8 tokens on the unit sphere of 10 dimensions, W the identity, "
    "a fixed readout; a prompt trained from zero by normalized steps of .1. Sizes, normalized "
    "steps in place of constant ones, and radii are our choice. The program is solved by "
    "`mhfast.theory.token_svm` for the tokens that training selected, which need not be those of "
    "largest score.",
    run=run,
)
