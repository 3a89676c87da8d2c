"""What compressors and reducers say of themselves, and what is said of a mistaken one."""

import json
import os
import subprocess
import sys
import warnings

import jax.numpy as jnp
import optax
import pytest
from paths import REPOSITORY, SUPPORT
from register import CASES, CODES

import jaxdist as jd


@pytest.fixture(scope="module")
def errors():
    script = SUPPORT / "scripts" / "compressor_as_reducer.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    out = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    return json.loads(out.stdout)


@pytest.mark.slow
def test_a_compressor_is_not_a_reducer(errors):
    assert len(errors["reducers"]) > 20
    for name, (kind, message) in errors["reducers"].items():
        assert kind == "TypeError", (name, kind, message)
        assert message.startswith("qsgd(4) is a compressor: wrap it in compressed(...)"), (name, message)


@pytest.mark.slow
def test_a_reducer_is_not_a_compressor(errors):
    for name, (kind, message) in errors["compressors"].items():
        assert kind == "TypeError", (name, kind, message)
        assert message.startswith("expected a compressor, such as qsgd(4) or top_k(0.01), got exact()"), (name, message)


@pytest.mark.slow
def test_rules_refuse_what_is_no_optimizer(errors):
    for name, (kind, message) in errors["optimizers"].items():
        assert kind == "TypeError", (name, kind, message)
        assert message.startswith("expected an optimizer, such as optax.adam(1e-3), got 0.1"), (name, message)


@pytest.mark.slow
def test_numbers_that_are_no_counts(errors):
    for name, (kind, message) in errors["halves"].items():
        assert (kind, message) == ("ValueError", f"{name} must be a whole number, got 1.5")


BIASED = {
    "top_k": lambda: jd.compressed(jd.top_k(0.1)),
    "signs": lambda: jd.reducers.two_shot(jd.compressors.scaled_sign()),
    "power_sgd": lambda: jd.power_sgd(rank=4),
    "in buckets": lambda: jd.reducers.bucketed(jd.compressed(jd.top_k(0.1))),
}
BIASED_LEVELS = {
    "between pods": lambda: jd.reducers.hierarchical(inner=jd.exact(), outer=jd.compressed(jd.top_k(0.1))),
    "in pods": lambda: jd.hierarchical(
        inner=jd.two_shot(jd.compressors.scaled_sign()), outer=jd.compressed(jd.compressors.qsgd(4))
    ),
    "both": lambda: jd.hierarchical(
        inner=jd.two_shot(jd.compressors.scaled_sign()), outer=jd.compressed(jd.compressors.int8())
    ),
}
NOT_BIASED = {
    "exact": jd.exact,
    "unbiased": lambda: jd.compressed(jd.qsgd(4)),
    "rounding": lambda: jd.compressed(jd.compressors.cast(jnp.bfloat16)),
    "eight bits": lambda: jd.compressed(jd.compressors.int8()),
    "feedback": lambda: jd.error_feedback(jd.compressed(jd.top_k(0.1))),
    "feedback in buckets": lambda: jd.reducers.bucketed(jd.error_feedback(jd.power_sgd(rank=4)), flat=False),
    "ef21": lambda: jd.reducers.ef21(jd.compressed(jd.top_k(0.1))),
    "loco": lambda: jd.reducers.loco(jd.compressed(jd.top_k(0.1))),
    "dgc": lambda: jd.reducers.dgc(0.1),
}


@pytest.mark.parametrize("make", BIASED.values(), ids=BIASED)
def test_a_biased_reducer_without_feedback_warns(make):
    with pytest.warns(UserWarning, match=r"is biased.*use all_reduce\(error_feedback\("):
        jd.all_reduce(make())


@pytest.mark.parametrize("make", BIASED_LEVELS.values(), ids=BIASED_LEVELS)
def test_the_advice_for_two_levels_can_be_followed(make):
    with pytest.warns(UserWarning, match=r"is biased.*put it inside, hierarchical\(") as caught:
        jd.all_reduce(make())
    advice = str(caught[0].message).partition("put it inside, ")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jd.all_reduce(eval(advice, {**vars(jd.compressors), **vars(jd.reducers)}))


def test_a_reducer_without_feedback_is_not_told_to_use_it():
    with pytest.warns(UserWarning, match=r"is biased.*or two_shot with its server residual"):
        jd.all_reduce(jd.two_shot(jd.top_k(0.1), server_feedback=False))


@pytest.mark.parametrize("make", NOT_BIASED.values(), ids=NOT_BIASED)
def test_other_reducers_do_not_warn(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jd.all_reduce(make())


def test_the_warning_names_the_reducer():
    with pytest.warns(UserWarning, match=r"^compressed\(top_k\(0.1\)\) is biased"):
        jd.all_reduce(jd.compressed(jd.top_k(0.1)))


def test_a_description_is_the_call():
    assert repr(jd.error_feedback(jd.power_sgd(rank=4))) == "error_feedback(power_sgd(rank=4))"
    assert repr(jd.compressed(jd.compressors.cast(jnp.bfloat16), seed=1)) == "compressed(cast(bfloat16), seed=1)"
    assert repr(jd.compressors.scaled(jd.qsgd(2))) == "scaled(qsgd(2))"
    chosen = jd.reducers.per_leaf(label, {"w": jd.exact(), "b": None})
    assert repr(chosen) == "per_leaf(label, {'w': exact(), 'b': None})"
    levels = jd.compressors.with_levels(jnp.array([0.0, 0.5, 1.0]), bits=3)
    assert repr(levels) == "with_levels(float32[3], bits=3)"


def test_methods_of_gossip_are_described_too():
    choco = jd.decentralized.choco(jd.top_k(0.1), step_size=0.3)
    assert repr(choco) == "choco(top_k(0.1), step_size=0.3)"
    assert repr(jd.decentralized.quasi_global_momentum(momentum=0.8)) == "quasi_global_momentum(momentum=0.8)"
    pods = jd.gossip(optax.sgd(0.1), jd.topology.ring(4), method=choco, axis="pod", carriers="chip")
    gossip = "gossip(Topology('ring', workers=4, degree=2, rounds=1), method=choco(top_k(0.1), step_size=0.3)"
    assert f"{gossip}, axis='pod', carriers='chip')" in repr(pods)
    assert "method=d_psgd(), axis='data')" in repr(jd.gossip(optax.sgd(0.1), jd.topology.ring(4)))


def label(path, leaf):
    return "w" if leaf.ndim > 1 else "b"


@pytest.mark.parametrize("make", [*(case.make for case in CODES.values()), *(case.make for case in CASES.values())])
def test_all_have_a_description_without_addresses(make):
    made = make()
    assert made.description
    assert " at 0x" not in repr(made)
