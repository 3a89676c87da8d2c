"""PowerSGD against the paper, its linearity, its drift, its recovery and its bytes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from low_rank import compiled_for, gradients
from reference import power_sgd as reference
from register_run import ran
from workers import trajectory

import jaxdist as jd

M = np.array([[3.0, 0.0], [0.0, 1.0], [4.0, 0.0]])


def reducer(rank, **options):
    return jd.power_sgd(rank, min_compression_rate=0, **options)


@pytest.mark.parametrize("own", ["local", "paper"])
def test_follows_the_paper(float64, own):
    rows = gradients(20, 4)
    q = np.asarray(reducer(2).init(jnp.zeros((12, 9))).q)
    means, _, states = trajectory(jd.error_feedback(reducer(2, own=own)), rows)
    expected, residuals = reference.power_sgd(rows, q, own=own)
    np.testing.assert_allclose(means, expected, atol=1e-11)
    np.testing.assert_allclose(states.residual.value, residuals, atol=1e-11)


@pytest.mark.parametrize("platform", ["tpu", "default"])
def test_stacks_of_unequal_heights_keep_their_matrices_apart(float64, monkeypatch, platform):
    """Sixteen leaves with rows of zeros below the smaller ones, each as the paper has it alone."""
    choose = lambda *operands, **forms: forms.get(platform, forms["default"])(*operands)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    rows = {f"{i:02}": gradients(2, 2, n=11 + i % 2, seed=i) for i in range(16)}
    feedback = jd.error_feedback(reducer(2))
    start = feedback.init(jax.tree.map(lambda x: jnp.zeros(x.shape[2:]), rows))
    means, _, states = trajectory(feedback, rows, state=start)
    for name, leaf in rows.items():
        expected, residuals = reference.power_sgd(leaf, np.asarray(start.reducer.q[name]))
        np.testing.assert_allclose(means[name], expected, atol=1e-11)
        np.testing.assert_allclose(states.residual.value[name], residuals, atol=1e-11)


@pytest.mark.slow
def test_many_workers_are_one_worker_on_the_averaged_gradients(float64):
    rows = {"w": gradients(50, 4), "b": gradients(50, 4)[..., 0]}
    feedback = jd.error_feedback(reducer(2))
    many, _, _ = trajectory(feedback, rows)
    one, _, _ = trajectory(feedback, jax.tree.map(lambda x: x.mean(1, keepdims=True), rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), many, one)


def test_three_warm_steps_on_a_known_matrix(float64):
    one = reducer(1)
    state = one.init(jnp.asarray(M))._replace(q=jnp.ones((2, 1)))
    means, _, states = trajectory(one, np.broadcast_to(M, (3, 1, 3, 2)), state=state)
    p = np.array([3, 1, 4]) / 26**0.5
    np.testing.assert_allclose(means[0], np.outer(p, [4.902903, 0.196116]), atol=1e-5)
    np.testing.assert_allclose(np.abs(states.q[1, 0, :, 0]), [4.99984, 0.008], atol=1e-5)
    squares = ((M - means) ** 2).sum((1, 2))
    np.testing.assert_allclose(squares, [1.9230769, 1.0015359, 1.0000025], atol=1e-7)


def test_what_is_left_is_orthogonal_and_shrinks_on_a_fixed_matrix(float64):
    matrix = gradients(1, 1)[0, 0]
    means, _, _ = trajectory(reducer(3), np.broadcast_to(matrix, (6, 1, 12, 9)))
    left = matrix - means
    np.testing.assert_allclose(np.swapaxes(means, 1, 2) @ left, 0, atol=1e-12)
    errors = (left**2).sum((1, 2))
    assert (np.diff(errors) <= 1e-12).all()
    assert errors[-1] >= (np.linalg.svd(matrix)[1][3:] ** 2).sum() - 1e-12


def test_nothing_is_lost_up_to_the_rank():
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((12, 3)) @ rng.standard_normal((3, 9))).astype(np.float32)
    means, _, _ = trajectory(reducer(3), matrix[None, None])
    np.testing.assert_allclose(means[0], matrix, atol=1e-5)


def test_the_basis_of_q_does_not_matter(float64):
    rows, two = gradients(1, 4), reducer(2)
    state = two.init(jnp.zeros((12, 9)))
    turned = state._replace(q=state.q @ jnp.array([[2.0, -1.0], [0.5, 3.0]]))
    np.testing.assert_allclose(trajectory(two, rows)[0], trajectory(two, rows, state=turned)[0], atol=1e-12)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("exponent", [63, 67, 100, 118, -63, -67, -100])
def test_the_scale_of_gradients_does_not_matter(one_sided, exponent):
    """From 1e-30 to 3e35: the same bits, times a power of two, in a warm start too."""
    rows = gradients(4, 4).astype(np.float32)
    feedback = jd.error_feedback(reducer(2, one_sided=one_sided))
    scaled, _, states = trajectory(feedback, np.ldexp(rows, exponent))
    np.testing.assert_array_equal(scaled, np.ldexp(trajectory(feedback, rows)[0], exponent))
    residual = np.ldexp(np.asarray(states.residual.value, np.float64), -exponent)
    assert 0 < np.abs(residual).max() < 100


@pytest.mark.sampled(3)
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("value", [1e19, 1e20, 3e38])
def test_a_huge_finite_gradient_is_forgotten(one_sided, value):
    """A whole array of it in all workers, and one entry in one of them; then gradients of the usual size."""
    rows = gradients(7, 4).astype(np.float32)
    rows[0], rows[2, 1, 3, 2] = value, -value
    alone = reducer(2, one_sided=one_sided)
    means, _, states = trajectory(alone, rows)
    assert all(np.isfinite(x).all() for x in (means, *jax.tree.leaves(states)))
    left, target = means[-1] - rows[-1].mean(0), rows[-1].mean(0)
    assert (left**2).sum() < 0.8 * (target**2).sum()


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: x, jd.error_feedback], ids=["alone", "with feedback"])
def test_recovers_from_a_zero_gradient(wrap):
    rows = gradients(4, 2).astype(np.float32)
    rows[:2] = 0
    means, _, _ = trajectory(wrap(reducer(2)), rows)
    assert (means[:2] == 0).all()
    target = rows[2].mean(0)
    assert np.isfinite(means).all()
    assert ((means[2] - target) ** 2).sum() < 0.9 * (target**2).sum()


def test_feedback_telescopes(float64):
    rows = gradients(30, 4)
    means, _, states = trajectory(jd.error_feedback(reducer(2)), rows)
    delivered = means.sum(0) + np.asarray(states.residual.value)[-1].mean(0)
    np.testing.assert_allclose(delivered, rows.mean(1).sum(0), atol=1e-11)


def spread(rows, **options):
    """How far apart the workers' residuals are, `[steps]`."""
    residuals = np.asarray(trajectory(jd.error_feedback(reducer(2, **options)), rows)[2].residual.value)
    return np.linalg.norm((residuals - residuals.mean(1, keepdims=True)).reshape(len(rows), -1), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("one_sided", [False, True])
def test_local_residuals_are_bounded_by_noise_alone(float64, one_sided):
    """Where the mean keeps its column space, what unlike workers have outside of it is never sent."""
    rng = np.random.default_rng(0)
    mean = rng.standard_normal((12, 2)) @ rng.standard_normal((2, 9))
    unlike = rng.standard_normal((4, 12, 9))
    still = np.broadcast_to(mean + unlike - unlike.mean(0), (200, 4, 12, 9))
    without = spread(still, one_sided=one_sided)
    noisy = spread(still + rng.standard_normal(still.shape), one_sided=one_sided)
    assert 1.8 < without[199] / without[99] < 2.2
    assert noisy[100:].max() < 1.5 * noisy[25:100].max() < 0.2 * without[199]


def test_local_residuals_stay_near_each_other_and_those_of_the_paper_do_not(float64):
    rows = gradients(400, 4, unlike=3.0)
    local, paper = spread(rows, own="local"), spread(rows, own="paper")
    assert local[200:].max() < 1.5 * local[50:200].max()
    assert 1.8 < paper[399] / paper[199] < 2.2
    assert paper[399] > 10 * local.max()


def test_uncompressed_leaves_have_no_residual():
    rows = {"w": gradients(3, 2).astype(np.float32), "b": gradients(3, 2)[..., 0].astype(np.float32)}
    means, _, states = trajectory(jd.error_feedback(reducer(1)), rows)
    np.testing.assert_allclose(means["b"], rows["b"].mean(1), atol=1e-6)
    assert (np.asarray(states.residual.value["b"]) == 0).all()
    assert states.reducer.q["b"].shape == (3, 2)


def test_plain_means_before_the_start():
    rows = gradients(4, 2).astype(np.float32)
    means, owns, states = trajectory(jd.error_feedback(reducer(1, start_step=2)), rows)
    np.testing.assert_allclose(means[:2], rows[:2].mean(1), atol=1e-6)
    np.testing.assert_array_equal(owns[:2], rows[:2])
    assert (np.asarray(states.residual.value)[:2] == 0).all()
    assert np.linalg.matrix_rank(means[2]) == np.linalg.matrix_rank(means[3]) == 1
    assert np.asarray(states.reducer.then.count)[:, 0].tolist() == [0, 0, 1, 2]


def test_a_cold_start_draws_anew_and_a_warm_one_converges():
    matrix = gradients(1, 1)[0, 0].astype(np.float32)
    rows = np.broadcast_to(matrix, (8, 1, 12, 9))
    left = {
        warm: ((matrix - trajectory(reducer(2, warm_start=warm), rows)[0]) ** 2).sum((1, 2)) for warm in (True, False)
    }
    assert len(set(left[False].round(5).tolist())) == 8
    best = (np.linalg.svd(matrix)[1][2:] ** 2).sum()
    assert left[True][-1] < 1.1 * best < left[False].mean()


@pytest.mark.slow
def test_the_order_of_workers_does_not_matter():
    rows = gradients(5, 4).astype(np.float32)
    feedback = jd.error_feedback(reducer(2))
    np.testing.assert_allclose(trajectory(feedback, rows)[0], trajectory(feedback, rows[:, ::-1])[0], atol=1e-4)


@pytest.mark.slow
def test_every_device_holds_the_same_bits():
    for state in ran("feedback of power_sgd").mesh[1:]:
        for leaf in jax.tree.leaves((state.params, state.opt[0].reducer.reducer)):
            first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert len(others) == 7
            for other in others:
                np.testing.assert_array_equal(first, other)


def resnet18():
    """The shapes of the CIFAR ResNet-18, kernels as [height, width, in, out]."""
    shapes, norms, width = {"stem": (3, 3, 3, 64)}, [64], 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes[f"{stage}.{block}.0"], shapes[f"{stage}.{block}.1"] = (3, 3, width, out), (3, 3, out, out)
            norms += [out, out]
            if width != out:
                shapes[f"{stage}.{block}.shortcut"] = (1, 1, width, out)
                norms.append(out)
            width = out
    shapes |= {"head": (512, 10), "bias": (10,)}
    return shapes | {f"{kind}.{i}": (size,) for i, size in enumerate(norms) for kind in ("scale", "shift")}


def test_the_shapes_are_those_of_the_paper():
    sizes = {name: int(np.prod(shape)) for name, shape in resnet18().items()}
    matrices = [name for name, shape in resnet18().items() if len(shape) > 1]
    assert (sum(sizes.values()), len(matrices)) == (11_173_962, 21)
    assert sum(size for name, size in sizes.items() if name not in matrices) == 9_610


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "floats"), [(1, 45_935), (2, 82_260), (4, 154_910), (7, 263_885)])
def test_floats_on_the_wire_of_resnet18(mesh, rank, floats):
    found = jd.analysis.collectives(compiled_for(mesh, reducer(rank), resnet18()))
    assert [(op.kind, op.dtype, op.messages) for op in found.ops] == [("all-reduce", "float32", 1)] * 2
    assert sum(op.bytes for op in found.ops) == 4 * floats
    assert found.wire_bytes == 2 * 7 / 8 * 4 * floats


@pytest.mark.slow
def test_equal_shapes_share_one_factorisation(mesh):
    def loops(layers):
        text = compiled_for(mesh, reducer(2), {f"{i}": (12, 9) for i in range(layers)}).as_text()
        return len(re.findall(r" (?:while|custom-call)\(", text))

    assert 0 < loops(6) == loops(2)


def test_bad_arguments_are_named():
    for options, message in (
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"rank": 1, "min_compression_rate": -1}, "min_compression_rate must be at least 0, got -1"),
        ({"rank": 1, "start_step": -1}, "start_step must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            jd.power_sgd(**options)
