"""D²: local steps corrected by the last ones, for data that differ between workers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._core.descriptions import with_description
from .._core.trees import minus, plus, tree_where
from .._core.types import Array, Float, PyTree, Updates
from ..topology.base import Topology
from ..topology.spectrum import lazy, smallest_eigenvalue
from ..transforms.common import zeros_like
from .method import Method, StepContext, StepResult, check_undirected, mixing_delta

# The smallest eigenvalue must be above -1/3. An even ring has exactly -1/3, and there noise accumulates.
SMALLEST_EIGENVALUE = -1 / 3 + 1e-6


@with_description
def d2(*, exact_diffusion: bool | None = None) -> Method:
    """Each worker subtracts the disagreement that it has had with its neighbors so far, so that bias cancels.

    With the steps `u` of the inner optimizer, the correction `c`, 0 at first, and `W̃` that is `W` or `(I + W) / 2`:

        y = x + u - c,   x <- W̃ y,   c <- c + (y - W̃ y)

    which is the paper's `x_{t+1} = W̃ (2 x_t - x_{t-1} + u_t - u_{t-1})`, `x_1 = W̃ (x_0 + u_0)` for a constant rate.
    The paper's form sums up the rounding errors of the models; those of `c` are far smaller.

    Its fixed point at a constant rate is the optimum of the mean loss, however much the workers' data differ. If the
    rate changes, pass `learning_rate=` to the update: `c` is proportional to it, and with an outdated scale would throw
    the model off where the rate drops.

    *Topologies*: static, with symmetric weights.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, one model, `c`, in float32.

    Args:
      exact_diffusion: mix with `(I + W) / 2`, which is Exact Diffusion. `None`: where `λ_min <= -1/3`, since D²
        diverges below that and accumulates noise at `-1/3`, the value of every ring with an even number of workers.
        `False` refuses such graphs.

    Examples:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> def last(method):
      ...     tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=method)
      ...     def step(state, data):  # the loss of worker i is i (x - i)² / 2; the optimum of their sum is 5
      ...         updates, opt_state = tx.update(data[0] * (state["x"] - data[0]), state["opt"], state["x"])
      ...         return {"x": state["x"] + updates, "opt": opt_state}, {}
      ...     state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 8)
      ...     run = jd.simulate(step, workers=8)
      ...     for _ in range(60):
      ...         state, _ = run(state, jnp.arange(8.0))
      ...     return round(float(jd.consensus(state["x"])), 2)
      >>> last(jd.decentralized.d2()), last(jd.decentralized.d_psgd()) == 5
      (5.0, False)

    References:
      Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", arXiv:1803.07068, 2018. Yuan,
      Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122, 2019.
    """

    def prepare(topology: Topology) -> Topology:
        smallest = smallest_eigenvalue(check_undirected(topology, "d2"))
        if exact_diffusion is False and smallest <= SMALLEST_EIGENVALUE:
            raise ValueError(
                f"d2 diverges on {topology.name}: its smallest eigenvalue is {smallest:.3f}, and must be above -1/3; "
                "leave out exact_diffusion=False"
            )
        use_lazy = smallest <= SMALLEST_EIGENVALUE if exact_diffusion is None else exact_diffusion
        return lazy(topology) if use_lazy else topology

    return Method(prepare, _init_d2, _d2_step)


class CorrectionState(NamedTuple):
    """The state of `d2` of one worker: its correction `c`, and the learning rate that this is proportional to.

    The corrections of all workers sum to zero and belong to the steps of the inner optimizer, not to the models. So a
    round of local steps treats them as that optimizer's momentum.
    """

    correction: Updates
    rate: Float[Array, ""]

    model_fields = ()
    buffer_fields = ("correction", "rate")


def _init_d2(params: PyTree, topology: Topology) -> CorrectionState:
    return CorrectionState(zeros_like(params), jnp.zeros((), jnp.float32))


def _d2_step(context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    old_correction, old_rate = context.state
    # The correction is a sum of differences of steps, so it scales with the rate: not in the paper, whose rate is
    # constant.
    rate = old_rate if context.learning_rate is None else context.learning_rate.astype(old_rate.dtype)
    ratio = jnp.where(old_rate > 0, rate / jnp.where(old_rate > 0, old_rate, 1), 1)
    correction = jax.tree.map(lambda c: ratio.astype(c.dtype) * c, old_correction)
    # y = x + u - c,  x <- W̃ y,  c <- c + (y - W̃ y)
    before_mixing = plus(context.params, minus(steps, correction))
    delta = mixing_delta(context, before_mixing, like=context.params)
    new_correction = minus(correction, delta)
    if context.learning_rate is not None:
        # A step at rate zero says nothing about the disagreement of gradients.
        new_correction, rate = tree_where(rate > 0, (new_correction, rate), (old_correction, old_rate))
    return StepResult(plus(before_mixing, delta), inner, CorrectionState(new_correction, rate))
