"""The state of `zero_redundancy`."""

from typing import NamedTuple

from .._core.types import Array, Int, PyTree, State


class ZeroState(NamedTuple):
    """The state that this worker keeps for its shard of the model.

    `inner`: the optimizer's state; arrays shaped like a parameter are `Sharded`, all others replicated. `master`: the
    parameters in higher precision, `Sharded`, or `()`. `empty` counts the steps without any example (replicated).
    `reducer`: the gradient reducer's state, one for each bucket. `coded`: the state of the compressed gather, or `()`.
    """

    inner: State
    master: PyTree
    empty: Int[Array, ""]
    reducer: State
    coded: State

    @property
    def communicates(self) -> bool:
        """Whether it averages gradients of replicated parameters, as it does unless made with `reducer=None`."""
        return self.reducer != ()
