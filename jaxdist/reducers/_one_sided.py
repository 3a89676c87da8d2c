"""One-sided PowerSGD: each step improves one factor, the next step the other, with one all-reduce each."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from .. import comm as comms
from .._typing import Array, Bool, PyTree
from ._low_rank import (
    View,
    draw,
    group_leaves,
    outer,
    places,
    put_back,
    put_back_factors,
    received,
    room,
    stack,
    stack_factors,
    to_send,
    wide,
)
from ._orthonormal import orthonormal
from .base import Reduced, Reducer, Wire, drive


class OneSidedState(NamedTuple):
    """Agreed. `left` has `[n, r]` and `right` `[m, r]` for each compressed leaf, a scalar zero for the others.

    `from_right` says which one was renewed last, and is what the next step projects on.
    """

    from_right: Bool[Array, ""]
    left: PyTree
    right: PyTree


def one_sided_power_sgd(view: View, own: Literal["local", "paper"], seed: int) -> Reducer:
    """The reducer that `power_sgd(one_sided=True)` stands for."""

    def init(like):
        left, right = (draw(like, view, side, jax.random.fold_in(jax.random.key(seed), side)) for side in (0, 1))
        return OneSidedState(jnp.ones((), bool), left, right)

    def step(from_right: bool) -> Callable:
        def rounds(updates, old, new, always, comm):
            """`old` is what to project on, `new` the factors to renew; `always` is true."""
            leaves, structure = jax.tree.flatten(updates)
            groups, rest = group_leaves(leaves, view)
            fixed, renewed = structure.flatten_up_to(old), structure.flatten_up_to(new)
            matrices = [stack(leaves, group) for group in groups]
            sought = 0 if from_right else 1
            # Known before the gradient is: it needs nothing from this step.
            bases = orthonormal([stack_factors(fixed, group) for group in groups])
            scales = [room(basis.shape[2], comm.size) for basis in bases]
            product = "knm,krm->knr" if from_right else "knm,krn->krm"
            local = [jnp.einsum(product, m, b * scale) for m, b, scale in zip(matrices, bases, scales)]
            sent = to_send(groups, local, sought)
            arrived = yield Wire(mean=[*sent, *(wide(leaves[i]) for i in rest)])
            mean = received(groups, arrived.mean, sought)

            def approximate(factors):
                pairs = [(f, b / scale) for f, b, scale in zip(factors, bases, scales)]
                return [outer(f, b) if from_right else outer(jnp.swapaxes(b, 1, 2), f) for f, b in pairs]

            means, owns = list(leaves), list(leaves)
            approximations = approximate(mean)
            at = places(groups, always)
            put_back(means, groups, approximations, at)
            put_back(owns, groups, approximations if own == "paper" else approximate(local), at)
            for i, whole in zip(rest, arrived.mean[len(sent) :], strict=True):
                means[i] = whole.astype(leaves[i].dtype)
            columns = mean if from_right else [jnp.swapaxes(q, 1, 2) for q in mean]
            put_back_factors(renewed, groups, columns, at, scales)
            reduced = Reduced(structure.unflatten(means), comm.varying(structure.unflatten(owns)))
            return reduced, structure.unflatten(renewed)

        def reduce(comm, updates, state):
            always = state.from_right == from_right
            sides = (state.right, state.left) if from_right else (state.left, state.right)
            reduced, renewed = drive(rounds(updates, *sides, always, comm), comm)
            left, right = (renewed, state.right) if from_right else (state.left, renewed)
            return reduced, OneSidedState(~state.from_right, left, right)

        return reduce

    def reduce(updates, state, comm, **agreed):
        del agreed
        with jax.named_scope("power_sgd"):
            return comms.cond(state.from_right, step(True), step(False), comm, updates, state)

    return Reducer(init, reduce)
