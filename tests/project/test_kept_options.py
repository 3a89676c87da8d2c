"""Options that the pages and the other tests leave at their defaults do what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist as jd
from jaxdist.analysis import cost
from jaxdist.asynchronous import replay, rules
from jaxdist.local_sgd import due_fragments
from jaxdist.schedule import Profile, timeline


def test_seeds_draw_other_numbers():
    params, inner = {"w": jnp.ones((8, 6))}, optax.sgd(0.1)
    for make in (
        lambda seed: jd.optimizers.dion(0.1, rank=2, seed=seed, axis=None).init(params),
        lambda seed: jd.local_sgd.noloco(inner, sync_period=2, seed=seed).init(params),
        lambda seed: jd.reducers.intsgd(seed=seed).init(params),
    ):
        first, again, other = (_numbers(make(seed)) for seed in (0, 0, 1))
        assert all(np.array_equal(a, b) for a, b in zip(first, again))
        assert not all(np.array_equal(a, b) for a, b in zip(first, other))


def _numbers(state):
    def plain(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [plain(x) for x in jax.tree.leaves(state)]


def test_the_base_decides_the_levels_of_nuqsgd():
    x = jax.random.normal(jax.random.key(0), (512,))

    def decoded(base):
        code = jd.compressors.nuqsgd(4, base=base)
        return code.decompress(code.compress(x, jax.random.key(1)), jax.ShapeDtypeStruct(x.shape, x.dtype))

    assert not np.allclose(decoded(0.5), decoded(0.7))


def test_due_fragments_counts_from_the_warm_up_offset_and_delay():
    late = {"sync_period": 4, "offset": 2, "warmup_steps": 3}
    assert [step for step in range(14) if due_fragments(step, **late)] == [4, 8, 12]
    assert [step for step in range(14) if due_fragments(step, **late, delay=1)] == [5, 9, 13]


def test_offloading_every_other_layer_hides_better():
    settings = {"width": 1024, "bandwidth": 1e9, "flops": 70e12}
    once, twice = (cost.offload_efficiency("activations", every=every, **settings) for every in (1, 2))
    assert twice > once


def test_latency_lengthens_a_timeline():
    profile = Profile([1, 2], [1, 2], [1, 1])
    assert timeline(profile, bandwidth=1, latency=0.5).makespan > timeline(profile, bandwidth=1).makespan


def test_groups_choose_their_partners_as_they_are_told():
    def steps(choice):
        rule = rules.hierarchical_ad_psgd(jd.topology.ring, optax.sgd(0.1), group_size=2, choice=choice)
        return repr(replay.run(rule, workers=8, seconds=6).trace)

    assert steps("uniform") != steps("in_turn")
