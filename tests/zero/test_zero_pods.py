"""ZeRO on the chips of each pod, and another method between pods: a law over the pairs of `pods_register`.

Whatever simulation runs, a mesh runs, to rounding; and both take the steps that the optimizer takes on the mean
gradient of each pod, sharded in any way or not at all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pods_register import BETWEEN, BOTH, CLIPPED, INSIDE, NESTEROV, PODS, RING, fresh, make_step, run, whole, zero
from pods_register import batch as pod_batch
from pods_register import loss as pod_loss
from pods_register import params as pod_params
from problems import TrainState, assert_close, batch, loss, params

import jaxdist as jd
from jaxdist import analysis, decentralized
from jaxdist import compressors as jc
from jaxdist.zero import shards

# Each line of one table with these of the other.
STAPLES = {"inside": ("1", "3", "1, masters"), "between": ("diloco", "streaming", "noloco", "d_psgd")}
PAIRS = [
    *((between, inside) for between in BETWEEN for inside in STAPLES["inside"]),
    *((between, inside) for between in STAPLES["between"] for inside in INSIDE if inside not in STAPLES["inside"]),
    *((f"{verb} buffers", inside) for verb in ("averaging", "resetting") for inside in ("1 on the host", "1, factors")),
    ("resetting buffers", "3, coded state"),
    ("palsgd", "1 on the host"),
]
QUICK = [("diloco", "3, masters"), ("noloco", "3")]


@functools.cache
def reference(between):
    """The parameters of each pod whose optimizer is not sharded."""
    plain = optax.chain(jd.all_reduce(jd.exact(), axis="chip"), CLIPPED)
    return whole(run(BETWEEN[between].make(plain), PODS).params)


@pytest.mark.parametrize(
    ("between", "inside"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in QUICK)],
)
def test_a_mesh_does_what_simulation_and_the_optimizer_do(between, inside, pods, monkeypatch):
    """In stage 2 each leaf has a bucket of its own."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", 8)
    outer, inner = BETWEEN[between], INSIDE[inside]
    tx = outer.make(inner.make())
    state, simulated = run(tx, pods, cut=inner.cut), run(tx, PODS, cut=inner.cut)
    # Another draw for a coded state, or a coded update, is another code.
    coded = inner.off is not None and inner.off > 1e-3
    assert_close(state.params, simulated.params, max(outer.apart, 1e-3 * coded))
    if not coded and outer.apart < 1e-5:
        assert_close(state.opt, simulated.opt, 1e-5)
    assert jd.runtime.disagreement(state, pods, axis=BOTH) == ()
    moved = np.abs(whole(simulated.params)["w"] - pod_params()["w"][None]).max()
    assert moved > 5e-3
    if inner.off is not None and not (inner.cut and outer.whole):
        assert_close(whole(simulated.params), reference(between), inner.off if coded else max(outer.apart, inner.off))


def weighted(tx, counts):
    """A step of a pod with so many examples; without any its gradient is NaN."""
    gathered = jd.zero.gathered(pod_loss, axis="chip")

    def step(state, data):
        count = jnp.asarray(counts)[jax.lax.axis_index("pod")]
        _, gradient = jd.local_value_and_grad(gathered, axis=BOTH)(state.params, data)
        gradient = jax.tree.map(lambda g: jnp.where(count > 0, g, jnp.nan), gradient)
        updates, opt = tx.update(gradient, state.opt, state.params, examples=count)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    return step


@pytest.mark.slow
@pytest.mark.parametrize("place", ["simulate", "mesh"])
def test_examples_weigh_pods_that_share_a_model_of_shards(place, pods):
    """Stage 3 inside of DiLoCo: chips have shards of a model, and their pods other numbers of examples."""
    counts, found = [1.0, 3.0], []
    for cut, inner in ((True, zero()()), (False, optax.chain(jd.all_reduce(jd.exact(), axis="chip"), CLIPPED))):
        tx = BETWEEN["diloco"].make(inner)
        state = fresh(tx, PODS if place == "simulate" else pods, cut=cut)
        for number, present in enumerate((counts, [0.0, 2.0])):
            make = weighted(tx, present)
            engine = jd.simulate(make, PODS, axis=BOTH) if place == "simulate" else jd.distribute(make, pods, axis=BOTH)
            state, _ = engine(state, pod_batch(number))
        found.append(whole(state.params))
    assert_close(*found, 1e-5)


@pytest.mark.parametrize("keyword", ["examples", "active"])
def test_chips_that_share_a_model_have_one_weight(keyword, pods):
    tx = BETWEEN["diloco"].make(optax.chain(jd.all_reduce(jd.exact(), axis="chip"), optax.sgd(0.1)))

    def step(state, data):
        _, gradient = jd.local_value_and_grad(pod_loss, axis=BOTH)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, **{keyword: jax.lax.axis_index("chip")})
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    with pytest.raises(ValueError, match=f"{keyword}= differs over the axis 'chip', whose workers share a model"):
        jd.distribute(step, pods, axis=BOTH).lower(fresh(tx, pods), pod_batch(0))


def half():
    """Parameters in bfloat16, none so small that a small step would move it."""
    return jax.tree.map(lambda x: jnp.where(x > 0, 0.1, -0.1).astype(jnp.bfloat16), pod_params())


def test_pods_with_masters_agree_after_a_round():
    """Each pod has masters of its own, which brought back what the round had replaced."""
    state = run(BETWEEN["diloco"].make(INSIDE["1, masters"].make()), PODS, steps=4, start=half)
    for leaf in jax.tree.leaves(state.params.value):
        np.testing.assert_array_equal(leaf[0], leaf[1])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_masters_keep_what_bfloat16_loses(cut):
    """Steps too small for the parameters add up in the masters, round after round."""
    tx = BETWEEN["diloco"].make(zero(optax.sgd(1e-4), master_dtype=jnp.float32)())
    kept = []
    for steps in (1, 20):
        state = run(tx, PODS, steps=steps, start=half, cut=cut)
        np.testing.assert_array_equal(whole(state.params)["w"][0], half()["w"])
        masters = whole(jd.PerWorker(state.opt.inner.value.master))["w"]
        kept.append(float(jnp.abs(masters[0] - half()["w"].astype(jnp.float32)).mean()))
    assert kept[1] > 5 * kept[0] > 0


@pytest.mark.slow
def test_resetting_buffers_beside_masters_keeps_the_schedule():
    tx = BETWEEN["resetting buffers"].make(zero(optax.adamw(optax.constant_schedule(1e-2)), master_dtype=jnp.float32)())
    adam, _, schedule = run(tx, PODS, steps=4).opt.inner.value.inner
    assert adam.count.tolist() == [0, 0]
    assert schedule.count.tolist() == [4, 4]


def crosses(op):
    """Whether a collective connects chips of different pods."""
    groups = op.replica_groups or op.pairs
    return any(len({position // PODS["chip"] for position in group}) > 1 for group in groups)


@pytest.mark.parametrize(
    ("between", "times"),
    [("diloco", 1.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("noloco", 1.0), ("d_psgd", 1.0)))],
)
def test_each_chip_sends_its_shard_between_pods(between, times, pods):
    """Of two pods each sends the drift once, here a quarter of the large leaf; between rounds nothing leaves a pod."""
    tx = BETWEEN[between].make(INSIDE["3"].make())
    program = jd.distribute(make_step(tx), pods, axis=BOTH).lower(fresh(tx, pods, cut=True), pod_batch(0)).compile()
    slow = [op for op in analysis.collectives(program).ops if crosses(op)]
    assert sum(op.wire_bytes for op in slow) == times * 4 * (64 * 65 // 4 + 5)
    if between != "d_psgd":
        assert not any(crosses(op) for op in analysis.collectives(program, branch="min").ops)


def cut_params():
    return jd.zero.shard(pod_params(), smallest=100, axis="chip")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda inner: jd.local_steps(inner, optax.adafactor(0.1), sync_period=2, axis="pod"), "outer optimizer compu"),
        (
            lambda inner: jd.local_steps(inner, NESTEROV, sync_period=2, axis="pod", reducer=jd.reducers.intsgd()),
            "besides arrays that are shaped as the parameters",
        ),
        (lambda inner: jd.gossip(inner, RING, axis="pod", carriers="chip"), "leave carriers= out"),
        (
            lambda inner: jd.gossip(inner, RING, axis="pod", method=decentralized.quasi_global_adam()),
            "takes a norm of the whole model",
        ),
        (
            lambda inner: jd.gossip(inner, RING, axis="pod", method=decentralized.dcd_psgd(jc.int8(), replicas=True)),
            "dcd_psgd without replicas=",
        ),
    ],
)
def test_what_needs_whole_leaves_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(INSIDE["3"].make()).init(cut_params())


@pytest.mark.parametrize("axis", [None, "pod"])
def test_shards_over_the_axis_of_the_pods_are_refused(axis):
    given = jd.zero.shard(pod_params(), smallest=100, axis=axis)
    for between in ("diloco", "noloco", "d_psgd"):
        with pytest.raises(ValueError, match=r"\['w'\] is Sharded (over|without) .*zero.shard\(params, axis='chip'\)"):
            BETWEEN[between].make(INSIDE["3"].make()).init(given)


@pytest.mark.parametrize("between", ["diloco", "noloco", "d_psgd"])
def test_masters_of_coded_updates_are_refused(between):
    tx = BETWEEN[between].make(zero(compressor=jc.int8(), master_dtype=jnp.float32)())
    with pytest.raises(ValueError, match=r"would undo what local_steps, noloco or gossip do.*leave out compressor="):
        run(tx, PODS, steps=1)


@pytest.mark.slow
def test_a_tracker_of_gradients_that_chips_do_not_share_is_refused():
    tx = jd.gossip(INSIDE["1"].make(), RING, axis="pod", method=decentralized.gradient_tracking())
    with pytest.raises(ValueError, match="gradients of one pod differ"):
        run(tx, PODS, steps=1)


@pytest.mark.parametrize(
    "nest",
    [
        lambda one: jd.local_steps(one, NESTEROV, sync_period=2),
        lambda one: jd.local_sgd.noloco(one, sync_period=2),
        lambda one: jd.gossip(one, jd.topology.ring(8)),
        lambda one: jd.local_steps(
            optax.chain(jd.transforms.per_worker(optax.trace(0.9)), one), NESTEROV, sync_period=2
        ),
    ],
)
def test_one_axis_twice_is_refused(nest):
    with pytest.raises(ValueError, match=r"leaf over axis data is inside a PerWorker one.*axis='chip'\) inside local_"):
        nest(jd.zero_redundancy(optax.adam(1e-2))).init(params())


def test_parameters_that_differ_are_refused(mesh):
    tx = jd.zero_redundancy(optax.adam(1e-2))

    def step(state, data):
        _, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(jd.PerWorker(params()), tx.init(params())), mesh)
    with pytest.raises(
        ValueError, match=r"parameter \['b'\] differs between workers of axis 'data'.*one model for all"
    ):
        jd.distribute(step, mesh)(state, batch())


def test_what_it_is_told_must_be_agreed(mesh):
    tx = jd.zero_redundancy(optax.polyak_sgd())

    def step(state, data):
        value, gradient = jd.local_value_and_grad(loss)(state.params, data)
        updates, opt = tx.update(gradient, state.opt, state.params, value=value)
        return TrainState(optax.apply_updates(state.params, updates), opt), {}

    state = jd.place(TrainState(params(), tx.init(params())), mesh)
    with pytest.raises(ValueError, match=r"value= differs between workers of axis 'data'.*pmean\(value, 'data'\)"):
        jd.distribute(step, mesh)(state, batch())
