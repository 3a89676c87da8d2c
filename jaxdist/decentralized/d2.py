"""D²: the bias of data that differ between workers is gone, for the bytes of D-PSGD."""

import jax
import jax.numpy as jnp

from .._core.trees import choose, minus, plus
from ..topology.base import Topology
from ..topology.spectrum import lazy, smallest_eigenvalue
from .method import Method, Turn, Turned
from .mixing import change, check_static, check_symmetric

# The least eigenvalue has to be above this. An even ring stands exactly here, and its noise piles up.
LEAST = -1 / 3 + 1e-6


def d2(*, exact_diffusion: bool | None = None) -> Method:
    """Each worker steps from where it would be without its neighbors, so that what they disagree on cancels.

    With the steps `u` of the inner optimizer, the correction `c`, 0 at first, and `W̃` that is `W` or `(I + W) / 2`:

        y = x + u - c,   x <- W̃ y,   c <- c + (y - W̃ y)

    which is the paper's `x_{t+1} = W̃ (2 x_t - x_{t-1} + u_t - u_{t-1})`, `x_1 = W̃ (x_0 + u_0)` for a constant rate.
    The paper's form sums up the rounding errors of the models; those of `c` are far smaller.

    Its fixed point is the optimum of the mean loss, however much the workers' data differ, at a constant rate.

    *On the wire*: one model for each neighbor, as `d_psgd`.

    *State*: per worker one model, `c`, in float32.

    Args:
      exact_diffusion: mix with `(I + W) / 2`, which is Exact Diffusion. `None`: where `λ_min <= -1/3`, since D²
        diverges below that, and piles up noise at `-1/3`, where every ring of an even number stands. `False` refuses
        such graphs.

    Returns:
      The method, for static topologies with symmetric weights. Where rates change pass `learning_rate=` to the update:
      `c` is in proportion to it, and would kick the model away where it drops.

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
      Tang, Lian, Yan, Zhang, Liu, "D²: Decentralized Training over Decentralized Data", arXiv 1803.07068, 2018. Yuan,
      Ying, Zhao, Sayed, "Exact Diffusion for Distributed Optimization and Learning", arXiv 1702.05122, 2019.
    """

    def prepare(topology: Topology) -> Topology:
        check_static(topology, "d2")
        check_symmetric(topology, "d2")
        least = smallest_eigenvalue(topology)
        if exact_diffusion is False and least <= LEAST:
            raise ValueError(
                f"d2 diverges on {topology.name}, whose least eigenvalue is {least:.3f} and not above -1/3: leave out "
                "exact_diffusion=False"
            )
        slower = least <= LEAST if exact_diffusion is None else exact_diffusion
        return lazy(topology) if slower else topology

    def init(params, topology):
        del topology
        return {"correction": jax.tree.map(jnp.zeros_like, params), "rate": jnp.zeros((), jnp.float32)}

    def step(turn: Turn) -> Turned:
        steps, inner = turn.adapt(turn.gradients)
        kept, old = turn.state["correction"], turn.state["rate"]
        rate = old if turn.learning_rate is None else turn.learning_rate.astype(old.dtype)
        ratio = jnp.where(old > 0, rate / jnp.where(old > 0, old, 1), 1)
        correction = jax.tree.map(lambda c: ratio.astype(c.dtype) * c, kept)
        ahead = plus(turn.params, minus(steps, correction))
        mixing = change(turn, ahead, like=turn.params)
        new = minus(correction, mixing)
        if turn.learning_rate is not None:  # a rate of zero teaches nothing
            new, rate = choose(rate > 0, (new, rate), (kept, old))
        return Turned(plus(ahead, mixing), inner, {"correction": new, "rate": rate})

    return Method(prepare, init, step)
