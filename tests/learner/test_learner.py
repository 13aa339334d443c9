"""`learn_layer` as a whole: what it learns, how it says so, and what must not matter to it."""

import copy
import pickle

import numpy as np
import pytest
from learner_instances import data, distance, same_result

import mhfast as mh
from mhfast.learner import Learning, Phase, align, hull_cosine
from mhfast.learner import examples as examples_module

PHASES = ["crude sum", "sculpting", "refined sum", "second sculpting", "net", "values"]
SMALL = (6000, 2, 8, 2)  # an easy instance, of half a second

# Parameters from exact labels: rounding times a condition of about a hundred.
PARAMETERS = 1e-12


def error(result, source):
    return align(result.layer, source.truth["layer"]).error


@pytest.fixture(scope="module")
def easy():
    source = data(*SMALL)
    return source, mh.learn_layer(source, heads=2)


def test_phases_find_the_hull_and_refinement_the_layer(easy):
    source, result = easy
    truth = source.truth["layer"]
    assert result.learnt
    assert [phase.name for phase in result.phases] == [*PHASES, "refinement"]
    _, _, body = result["second sculpting"].parts
    assert hull_cosine(body.directions, truth.W) > 0.99
    assert align(result.unrefined, truth).error < 0.05
    assert error(result, source) < PARAMETERS
    assert (result.heads, result.sureness, result.missing) == (2, None, None)
    fresh = source.sample(500, seed=1)
    assert distance(result.layer(fresh.X), fresh.y) < 1e-12
    assert result.held_out < 1e-12
    assert all(certificate.holds for certificate in result.certificates)


@pytest.mark.parametrize(
    ("instance", "settings"),
    [
        ((10_000, 3, 7, 2), {"out_dim": 5, "inputs": "gaussian"}),
        ((10_000, 2, 6, 2), {"out_dim": 9, "inputs": "gaussian"}),
        ((20_000, 2, 8, 3), {"out_dim": 7, "inputs": "gaussian"}),
        ((1500, 8, 6, 1), {"out_dim": 7}),
        ((3000, 5, 1, 1), {"out_dim": 3, "inputs": "gaussian"}),  # tokens are numbers
        ((3000, 3, 4, 1), {"out_dim": 1}),
    ],
)
def test_layers_of_many_sizes(instance, settings):
    source = data(*instance, **settings)
    result = mh.learn_layer(source, heads=instance[-1])
    assert result.learnt, result.verdict
    assert error(result, source) < PARAMETERS
    assert result.layer.out_dim == settings["out_dim"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "instance", [(100_000, 3, 8, 2), (100_000, 3, 12, 2), (100_000, 2, 12, 3), (100_000, 4, 8, 2)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_phases_alone_reach_the_hull(instance, seed):
    source = mh.data.boolean_layer(*instance, seed=seed)
    result = mh.learn_layer(source, heads=instance[-1])
    _, _, body = result["second sculpting"].parts
    assert hull_cosine(body.directions, source.truth["layer"].W) > 0.95
    assert result.learnt
    assert error(result, source) < 1e-10


@pytest.mark.slow
def test_few_tokens_take_part_where_heads_are_many():
    """T = 8: certified rows are averages of few tokens, but one head explains rows by all."""
    tokens = {}
    for heads in (1, None):
        source = data(1500, 8, 6, 1, out_dim=7)
        result = mh.learn_layer(source, heads=heads, refinement=False)
        tokens[heads] = [
            result[name].numbers["tokens a row"] for name in ("crude sum", "second sculpting")
        ]
    assert tokens == {1: [2, 8], None: [2, 2]}


def test_without_refinement_a_near_layer_is_not_called_learnt(easy):
    source, whole = easy
    result = mh.learn_layer(source, heads=2, refinement=False)
    assert [phase.name for phase in result.phases] == PHASES
    assert np.array_equal(result.layer.W, whole.unrefined.W)
    assert np.array_equal(result.layer.V, whole.unrefined.V)
    assert 1e-8 < result.held_out < 0.1
    assert not result.learnt
    assert "held-out residual" in result.verdict


# Heads.


def test_the_number_of_heads_is_found(easy):
    source, known = easy
    result = mh.learn_layer(source)
    assert result.learnt
    assert result.heads == 2
    assert result.sureness > 2.0
    assert error(result, source) < PARAMETERS
    told = f" tried, step {result.sureness:.3g} of the spectrum"
    assert told in str(result)
    assert "tried" not in str(known).replace("tried 136", "")


def test_heads_too_many_are_merged(easy):
    source, _ = easy
    result = mh.learn_layer(source, heads=3)
    assert result.learnt
    assert result.heads == result.layer.heads == 2
    assert error(result, source) < PARAMETERS
    assert result.verdict.startswith("learnt, 2 heads")


def test_with_heads_too_few_nothing_is_learnt(easy):
    source, _ = easy
    result = mh.learn_layer(source, heads=1)
    assert not result.learnt
    assert result.layer.heads == 1
    assert result.held_out > 0.1
    assert "held-out residual" in result.verdict


# Arrays.


@pytest.mark.parametrize(
    "layout",
    [
        lambda a: np.asfortranarray(a),
        lambda a: np.ascontiguousarray(a[::-1])[::-1],
        lambda a: np.repeat(a, 2, axis=2)[..., ::2],
        lambda a: a.astype(a.dtype.newbyteorder()),
    ],
    ids=["fortran", "reversed", "strided", "byte-swapped"],
)
def test_any_layout_is_the_same_to_the_last_bit(easy, layout):
    source, want = easy
    X, Y = layout(source.X), layout(source.y)
    assert np.array_equal(X, source.X)
    assert same_result(mh.learn_layer(X, Y, 2), want)


def test_byte_order_is_no_dtype(easy):
    source, want = easy
    X = source.X.astype(source.X.dtype.newbyteorder())
    assert same_result(mh.learn_layer(X, source.y, 2), want)


def test_memory_maps_are_the_same_to_the_last_bit(easy, tmp_path):
    source, want = easy
    maps = []
    for name, array in (("X", source.X), ("Y", source.y)):
        np.save(tmp_path / f"{name}.npy", array)
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    assert same_result(mh.learn_layer(*maps, 2), want)


def test_single_precision_is_learnt_to_its_rounding(easy):
    source, exact = easy
    X, Y = source.X.astype(np.float32), source.y.astype(np.float32)
    result = mh.learn_layer(X, Y, 2)
    assert result.learnt
    assert result.layer.W.dtype == np.float64
    # Labels are off by 3e-8 of their size; the condition is that of PARAMETERS.
    assert error(result, source) < 1e-5
    assert result.held_out < 1e-6
    for ours, wide in zip(result.phases[:4], exact.phases[:4], strict=True):
        assert ours.numbers.keys() == wide.numbers.keys()


def test_portions_do_not_matter(easy, monkeypatch):
    source, want = easy
    monkeypatch.setattr(examples_module, "PORTION", 2000)
    result = mh.learn_layer(source, heads=2)
    assert result.learnt
    # Sums in another order; what the phases iterate passes that on.
    assert distance(result.unrefined.W, want.unrefined.W) < 1e-6
    assert distance(result.layer.W, want.layer.W) < PARAMETERS


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_repetition_change_no_bit(easy, threads):
    source, want = easy
    assert same_result(mh.learn_layer(source, heads=2, num_threads=threads), want)


def test_inputs_are_not_written(easy):
    source, want = easy
    X, Y = source.X.copy(), source.y.copy()
    assert same_result(mh.learn_layer(X, Y, 2), want)
    assert np.array_equal(X, source.X)
    assert np.array_equal(Y, source.y)


def test_labels_in_other_units(easy):
    """The method is linear in the outputs, and a power of two does not round."""
    source, want = easy
    result = mh.learn_layer(source.X, source.y * 2.0**40, 2)
    assert result.learnt
    assert distance(result.layer.W, want.layer.W) < PARAMETERS
    assert distance(result.layer.V * 2.0**-40, want.layer.V) < PARAMETERS


def test_outputs_that_follow_from_others(easy):
    source, _ = easy
    truth = source.truth["layer"]
    mixing = np.random.default_rng(0).standard_normal((8, 11))
    result = mh.learn_layer(source.X, source.y @ mixing, 2)
    assert result.learnt
    assert align(result.layer, mh.Layer(truth.W, truth.V @ mixing)).error < PARAMETERS
    assert result.unrefined.out_dim == 11


# Noise.


@pytest.fixture(scope="module")
def noisy():
    """Errors and results by the size of the noise."""
    source = data(*SMALL)
    rng = np.random.default_rng(1)
    found = {}
    for size in (1e-2, 1e-4):
        Y = source.y + size * rng.standard_normal(source.y.shape)
        found[size] = Y, mh.learn_layer(source.X, Y, 2, noise=size)
    return source, found


def test_noise_of_the_size_told_is_learnt_through(noisy):
    source, found = noisy
    for size, (Y, result) in found.items():
        assert result.learnt, result.verdict
        # The noise itself is what is left of labels that were held out.
        assert result.held_out == pytest.approx(size / np.sqrt(np.mean(Y**2)), rel=0.05)
        # 64 outputs for every parameter average it.
        assert error(result, source) < 2.0 * size
    errors = [error(result, source) for _, result in found.values()]
    assert errors[1] < errors[0] / 30


@pytest.mark.parametrize(
    "told", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(5e-3, marks=pytest.mark.slow)]
)
def test_more_noise_than_told_is_refused(noisy, told):
    source, found = noisy
    Y, _ = found[1e-2]
    result = mh.learn_layer(source.X, Y, 2, noise=told)
    assert not result.learnt
    assert "held-out residual" in result.verdict


# The result.


def test_the_result_tells_about_itself(easy):
    _, result = easy
    assert isinstance(result, Learning)
    lines = str(result).splitlines()
    assert lines[0] == result.verdict
    assert result.verdict.startswith("learnt, 2 heads: identified ")
    assert f"held-out residual {result.held_out:.2g}" in result.verdict
    assert repr(result) == f"<Learning: {result.verdict}>"
    for name in (*PHASES, "refinement"):
        assert sum(line.startswith(f"{name} ") for line in lines[1:8]) == 1
    assert all(line.endswith(": holds") for line in lines[8:])
    assert len(lines) == 8 + len(result.certificates)


def test_phases_tell_their_numbers(easy):
    _, result = easy
    crude, sculpted = result["crude sum"].numbers, result["sculpting"].numbers
    again, net = result["second sculpting"].numbers, result["net"].numbers
    assert again["certificate"] < crude["certificate"]
    assert again["gap"] > sculpted["gap"] > 1.0
    assert again["facts"] == 16 * 8 * 8 < again["of"]
    assert again["rows"] <= again["facts"]
    assert again["tolerance"] < sculpted["tolerance"]
    assert net["tried"] == 136
    assert result["values"].numbers["residual"] == pytest.approx(net["residual"], rel=0.2)
    assert result["refinement"].numbers["steps"] >= 1
    for phase in result.phases:
        assert phase.seconds >= 0.0
        assert all(np.isfinite(list(phase.numbers.values())))
    assert result["net"].numbers["residual"] == result["net"].parts[0].candidates[0].values.residual
    assert str(Phase("net", 1.5, ())).split() == ["net", "1.50", "s", "nothing", "found"]


def test_a_phase_that_there_is_not(easy):
    with pytest.raises(KeyError, match="third sculpting"):
        easy[1]["third sculpting"]


def test_results_pickle_and_copy(easy):
    _, result = easy
    for same in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert same_result(same, result)
        assert str(same) == str(result)


def test_progress_is_shown_on_stderr(capsys):
    source = data(1000, 3, 4, 1)
    mh.learn_layer(source, heads=1)
    assert capsys.readouterr() == ("", "")
    mh.learn_layer(source, heads=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "learning" in err
    assert "7/7" in err or "phase 7 of 7" in err  # tqdm, or without it


def test_phases_are_drawn(easy):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = easy[1].plot()
    assert isinstance(figure, Figure)
    assert len(figure.axes) >= 4
    figure.canvas.draw()
    missing = mh.learn_layer(np.ones((300, 3, 4)), np.ones((300, 3, 2)), 1)
    assert isinstance(missing.plot(), Figure)
