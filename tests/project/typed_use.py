"""What a type checker has to know of mhfast, and to refuse; `.ci/type_blocks.py` checks it.

An ignored error that is none is an error itself.
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

import mhfast as mh

if TYPE_CHECKING:
    from typing_extensions import assert_type

    data = mh.data.tokenized_mixture(20, 5, 8, seed=0)
    model = mh.Classifier.zeros(2, 5, 8)
    layer = mh.Layer.zeros(2, 8, 3)
    step = mh.GradientDescent(0.1)

    run = mh.train(model, data, steps=3, optimizer=step)
    assert_type(run, mh.Run[mh.Classifier])
    assert_type(run.model, mh.Classifier)
    assert_type(run.start.U, npt.NDArray[np.floating[Any]])
    assert_type(mh.train(run, data, steps=3)[0].model, mh.Classifier)
    assert_type(mh.train(layer, data, steps=3, optimizer=step).model, mh.Layer)

    value, gradients = mh.value_and_grad(model, data)
    assert_type(value, float | npt.NDArray[np.float64])
    assert_type(model - 0.1 * gradients, mh.Classifier)
    assert_type(sum([gradients, gradients]), mh.Gradients | Literal[0])
    assert_type(mh.norm(gradients), float | npt.NDArray[np.float64])

    mh.train(model, data, steps=3, loss="logistc")  # type: ignore[arg-type]
    mh.value_and_grad(model, data, loss="mse")  # type: ignore[arg-type]
    mh.train(model, data, steps=3, record="los")  # type: ignore[arg-type]
    mh.train(model, data, steps=3, record=("loss", "test_los"))  # type: ignore[arg-type]
    mh.train(model, data, steps=3, stop={"los": 0.1})  # type: ignore[dict-item]
