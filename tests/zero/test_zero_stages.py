"""The stages of ZeRO on a GPT: memory and bytes as the compiler plans them, against the formulas."""

import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from paths import REPOSITORY

import jaxdist as jd
from jaxdist._cli.models.gpt import GPTConfig
from jaxdist.analysis import pods

sys.path.append(str(REPOSITORY / "benchmarks" / "zero"))
from stages import stage_step

SMALL = GPTConfig(layers=3, width=64, heads=2, context=32)
# 100 million parameters.
LARGE = GPTConfig(layers=12, width=768, heads=12, context=512, vocabulary=10_240)
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'")


def plan(mesh, config, stage, **keywords):
    weighed = stage_step(config, stage, **keywords)
    tokens = jax.ShapeDtypeStruct((mesh.size, config.context + 1), jnp.uint8)
    return pods.plan(jd.distribute(weighed.step, mesh), weighed.make_state, tokens, mesh), weighed


def arguments(stage, weighed, workers, master=False):
    """Bytes that a step is given: parameters and Adam's state. Gradients live inside the step."""
    params, state = (2, 12) if master else (4, 8)
    return weighed.parameters * (params / (workers if stage == 3 else 1) + state / (workers if stage else 1))


def sent(stage, weighed):
    """Entries over (W-1)/W. Going back, embeddings are not needed whole, and the head still is."""
    return 2 * weighed.parameters + (weighed.parameters - weighed.ends if stage == 3 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_planned(mesh, stage):
    """By buffer accounting on CPU: the arguments of one device, and what it sends."""
    found, weighed = plan(mesh, SMALL, stage)
    assert found.memory.arguments == pytest.approx(arguments(stage, weighed, 8), rel=0.05)
    assert found.memory.aliased > 0.95 * arguments(stage, weighed, 8)
    assert found.collectives.wire_bytes == pytest.approx(7 / 8 * 4 * sent(stage, weighed), rel=0.05)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("master", [False, True])
def test_on_tpu(master):
    """A GPT of 100 million parameters on 8 chips of v5e, by the TPU's own compiler."""
    mesh = pods.tpu("v5e:2x4")
    temporary = {}
    for stage in (0, 1, 2, 3):
        found, weighed = plan(mesh, LARGE, stage, master=master, unrolled=stage in (1, 2))
        assert weighed.parameters > 100e6
        assert found.memory.arguments == pytest.approx(arguments(stage, weighed, 8, master), rel=0.05)
        expected = 7 / 8 * (2 if master else 4) * sent(stage, weighed)
        if stage == 3 and not master:  # going back the compiler gathers bfloat16: what its products take anyway
            expected -= 7 / 8 * 2 * (weighed.parameters - weighed.ends)
        assert found.collectives.wire_bytes == pytest.approx(expected, rel=0.05)
        temporary[stage] = found.memory.temporary
    assert temporary[2] < temporary[1]
