"""D²: removes the bias that different data cause in D-PSGD, for the same bytes."""

from functools import partial

import jax
import jax.numpy as jnp

from .._core.trees import minus, plus, tree_where
from .._core.types import PyTree
from ..topology.base import Topology
from ..topology.spectrum import lazy, smallest_eigenvalue
from .method import Method, StepContext, StepResult
from .mixing import check_static, check_symmetric, mixing_delta

# The smallest eigenvalue must be above -1/3. An even ring has exactly -1/3, and there noise accumulates.
SMALLEST_EIGENVALUE = -1 / 3 + 1e-6


def d2(*, exact_diffusion: bool | None = None) -> Method:
    """Each worker subtracts the disagreement that it has had with its neighbors so far, so that bias cancels.

    With the steps `u` of the inner optimizer, the correction `c`, 0 at first, and `W̃` that is `W` or `(I + W) / 2`:

        y = x + u - c,   x <- W̃ y,   c <- c + (y - W̃ y)

    which is the paper's `x_{t+1} = W̃ (2 x_t - x_{t-1} + u_t - u_{t-1})`, `x_1 = W̃ (x_0 + u_0)` for a constant rate.
    The paper's form sums up the rounding errors of the models; those of `c` are far smaller.

    Its fixed point at a constant rate is the optimum of the mean loss, however much the workers' data differ.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per-worker, one model, `c`, in float32.

    Args:
      exact_diffusion: mix with `(I + W) / 2`, which is Exact Diffusion. `None`: where `λ_min <= -1/3`, since D²
        diverges below that and accumulates noise at `-1/3`, the value of every ring with an even number of workers.
        `False` refuses such graphs.

    Returns:
      The method, for static topologies with symmetric weights. If the rate changes, pass `learning_rate=` to the
      update: `c` is proportional to it, and with an outdated scale would throw the model off where the rate drops.

    Raises:
      ValueError: by `gossip`, if the topology is directed or changes, or has `λ_min <= -1/3` and `exact_diffusion` is
        false.

    Example:
      >>> import jax.numpy as jnp, optax, jaxdist as jd
      >>> def last(method):
      ...     tx = jd.gossip(optax.sgd(0.1), jd.topology.ring(8), method=method)
      ...     def step(state, data):  # the loss of worker i is i (x - i)² / 2; the optimum of their sum is 5
      ...         updates, opt_state = tx.update(data[0] * (state["x"] - data[0]), state["opt"], state["x"])
      ...         return {"x": state["x"] + updates, "opt": opt_state}, {}
      ...     state = jd.place({"x": jd.PerWorker(jnp.zeros(())), "opt": tx.init(jnp.zeros(()))}, 8)
      ...     run = jd.simulate(step, workers=8)
      ...     for _ in range(500):
      ...         state, _ = run(state, jnp.arange(8.0))
      ...     return round(float(jd.consensus(state["x"])), 2)
      >>> last(jd.decentralized.d2()), last(jd.decentralized.d_psgd()) == 5
      (5.0, False)

    References:
      Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", arXiv:1803.07068, 2018. Yuan,
      Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122, 2019.
    """
    return Method(partial(_prepare, exact_diffusion), _init, _step)


def _prepare(exact_diffusion: bool | None, topology: Topology) -> Topology:
    check_static(topology, "d2")
    check_symmetric(topology, "d2")
    smallest = smallest_eigenvalue(topology)
    if exact_diffusion is False and smallest <= SMALLEST_EIGENVALUE:
        raise ValueError(
            f"d2 diverges on {topology.name}: its smallest eigenvalue is {smallest:.3f}, and must be above -1/3; leave "
            "out exact_diffusion=False"
        )
    use_lazy = smallest <= SMALLEST_EIGENVALUE if exact_diffusion is None else exact_diffusion
    return lazy(topology) if use_lazy else topology


def _init(params: PyTree, topology: Topology) -> dict[str, PyTree]:
    del topology
    return {"correction": jax.tree.map(jnp.zeros_like, params), "rate": jnp.zeros((), jnp.float32)}


def _step(context: StepContext) -> StepResult:
    steps, inner = context.adapt(context.gradients)
    old_correction, old_rate = context.state["correction"], context.state["rate"]
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
    return StepResult(plus(before_mixing, delta), inner, {"correction": new_correction, "rate": rate})
