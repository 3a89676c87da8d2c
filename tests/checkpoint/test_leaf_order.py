"""A flat vector has the entries of many leaves in their order, which its shape does not show.

A checkpoint of it belongs to leaves of those names and shapes alone; in others each residual would be that of another.
"""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from method_register import AGREED, LOCAL
from register import CASES

import jaxdist as jd
from jaxdist import checkpoint
from jaxdist.state.marks import flatten_marks, order_of

FEEDBACK = jd.error_feedback(jd.compressed(jd.top_k(0.1)))
TWO_SHOT = jd.two_shot(jd.compressors.int8(), server_feedback=True)
METHODS = {
    "two_shot": TWO_SHOT,
    "bucketed": jd.reducers.bucketed(FEEDBACK),
    "partitioned": jd.reducers.partitioned(FEEDBACK, layer_fn=lambda path, leaf: 0),
    "hierarchical": jd.hierarchical(inner=jd.exact(), outer=FEEDBACK),
    "hierarchical_two_shot": jd.hierarchical(inner=jd.exact(), outer=TWO_SHOT),
    "hierarchical_inner": jd.hierarchical(
        inner=jd.error_feedback(jd.two_shot(jd.compressors.int8())), outer=jd.exact()
    ),
    "bucketed_hierarchical": jd.reducers.bucketed(jd.hierarchical(inner=jd.exact(), outer=FEEDBACK)),
}
PODS = ("pod", "data")
each_method = pytest.mark.parametrize("name", METHODS)

FirstA = collections.namedtuple("FirstA", "a b")
FirstB = collections.namedtuple("FirstB", "b a")
SAVED = {"a": jnp.ones(6), "b": jnp.ones((2, 3))}


def placed(name, params):
    """The parameters and the state of a method, over four workers."""
    axis = PODS if "hierarchical" in name else "data"
    state = {"params": params, "opt": jd.all_reduce(METHODS[name], axis=axis).init(params)}
    return jd.place(state, dict.fromkeys(PODS, 2) if axis == PODS else 4, axis=axis)


@pytest.mark.sampled(3)
@each_method
def test_fields_in_another_order(tmp_path, name):
    """Their names are the same, so that all leaves of the parameters fit; the residuals would be those of others."""
    checkpoint.save(tmp_path, placed(name, FirstA(**SAVED)), 0)
    other = placed(name, FirstB(**SAVED))
    with pytest.raises(ValueError, match=r"another, a \[6\], b \[2, 3\], and .* b \[2, 3\], a \[6\]: .*changed="):
        checkpoint.restore(tmp_path, other)
    found = checkpoint.resume(tmp_path, other, changed=["opt"])
    assert found.new
    assert found.new == tuple(leaf for leaf in found.new if leaf.startswith("opt."))


@pytest.mark.sampled(4)
@each_method
@pytest.mark.parametrize(
    "other",
    [{"a": jnp.ones(6), "c": jnp.ones((2, 3))}, {"a": jnp.ones((2, 3)), "b": jnp.ones(6)}],
    ids=["renamed", "shapes_swapped"],
)
def test_the_state_of_an_optimizer_alone(tmp_path, name, other):
    """No parameters beside it in the checkpoint have the names."""
    state = placed(name, SAVED)["opt"]
    checkpoint.save(tmp_path, state, 0)
    checkpoint.restore(tmp_path, state)
    with pytest.raises(ValueError, match=r"has entries of several leaves one after another"):
        checkpoint.restore(tmp_path, placed(name, other)["opt"])


def test_new_parameters_beside_old_residuals(tmp_path):
    checkpoint.save(tmp_path, placed("two_shot", SAVED), 0)
    renamed = placed("two_shot", {"z": SAVED["a"], "b": SAVED["b"]})
    with pytest.raises(ValueError, match=r"`opt\.\S*residuals\.0` .*a \[6\], b \[2, 3\], .*b \[2, 3\], z \[6\]"):
        checkpoint.resume(tmp_path, renamed, changed=["params"])


def test_a_bucket_with_its_layers_in_another_order(tmp_path):
    first, second = (
        jd.place(jd.all_reduce(jd.reducers.bucketed(FEEDBACK, layers=layers)).init(SAVED), 4)
        for layers in (("a", "b"), ("b", "a"))
    )
    checkpoint.save(tmp_path, first, 0)
    with pytest.raises(ValueError, match="several leaves one after another"):
        checkpoint.restore(tmp_path, second)


def test_cut_leaves_have_their_entries_named():
    """Partitions of 8 entries: the first leaf is cut, and its rest shares a partition with the next."""
    reducer = jd.reducers.partitioned(FEEDBACK, partition_bytes=32, layer_fn=lambda path, leaf: 0)
    state = reducer.init({"a": jnp.ones((2, 5)), "b": jnp.ones(3)})
    orders = [part.residual.order for part in state]
    assert orders == [(("a[0:8]", (8,)),), (("a[8:10]", (2,)), ("b", (3,)))]


def test_the_message_is_short(tmp_path):
    """Of a hundred leaves it names those from the first difference on."""
    layers = {f"w{number:02}": jnp.ones(8) for number in range(100)}
    checkpoint.save(tmp_path, placed("two_shot", layers)["opt"], 0)
    other = {**layers, "w50": jnp.ones((2, 4))}
    with pytest.raises(ValueError, match=r"another, \.\.\., w50 \[8\], w51 \[8\], .*, \.\.\., and") as caught:
        checkpoint.restore(tmp_path, placed("two_shot", other)["opt"])
    assert len(str(caught.value)) < 800


def test_leaves_that_0_1_adam_lists(tmp_path):
    """How far each parameter in half precision has moved."""
    tx, half = jd.optimizers.zero_one_adam(0.1, freeze_step=2), jnp.ones(6, jnp.bfloat16)
    first, second = (jd.place(tx.init(kind(a=half, b=half)).moved, 4) for kind in (FirstA, FirstB))
    checkpoint.save(tmp_path, first, 0)
    with pytest.raises(ValueError, match=r"leaf `0` .*a \[6\], b \[6\], .*b \[6\], a \[6\]"):
        checkpoint.restore(tmp_path, second)


def test_checkpoints_of_earlier_versions(tmp_path):
    """Nothing says in which order their vectors are, so they are restored as before."""
    state = placed("two_shot", SAVED)["opt"]
    without = jax.tree.map(lambda x: x, state)
    for mark in without.reducer.residuals:
        mark.order = None
    checkpoint.save(tmp_path, without, 0)
    assert '"order"' not in (tmp_path / "0" / "manifest.json").read_text()
    checkpoint.restore(tmp_path, state)


AROUND = {
    "bucketed": jd.reducers.bucketed,
    "alone": lambda reducer: reducer,
    "partitioned": lambda reducer: jd.reducers.partitioned(reducer, layer_fn=lambda path, leaf: 0),
    "hierarchical": lambda reducer: jd.hierarchical(inner=jd.exact(), outer=reducer),
}


def described(reducer, **shapes):
    """Shape and order of each leaf of a state that has no parameter's name."""
    state = jax.eval_shape(reducer.init, {name: jnp.zeros(shape) for name, shape in shapes.items()})
    leaves = {jax.tree_util.keystr(x.path): (x.value.shape, order_of(x.marks)) for x in flatten_marks(state)}
    return {name: leaf for name, leaf in leaves.items() if not any(f"'{key}'" in name for key in shapes)}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("around", AROUND)
def test_every_reducer_records_the_order(around):
    """Of what has the length of several leaves together, and the same if these swap their shapes."""
    checked = set()
    for name, case in CASES.items():
        try:
            reducer = AROUND[around](case.make())
            saved = described(reducer, p=(48,), q=(6, 8))
        except ValueError:
            continue  # a combination that is refused
        swapped, longer = described(reducer, p=(6, 8), q=(48,)), described(reducer, p=(80,), q=(6, 8))
        flat = [leaf for leaf in saved if leaf in longer and longer[leaf][0] != saved[leaf][0]]
        recorded = [leaf for leaf in flat if None not in (saved[leaf][1], swapped[leaf][1])]
        assert all(saved[leaf] != swapped[leaf] for leaf in recorded), name
        # Beside one that is refused, what EF21 has replicated needs no record.
        assert bool(recorded) == bool(flat), (name, flat)
        checked |= {name} if flat else set()
    assert checked


# --- one number for each leaf ---

NUMBERED = {
    "accumulate": lambda: jd.accumulate(optax.chain(jd.all_reduce(jd.exact()), optax.sgd(0.1)), 3),
    "late": lambda: jd.all_reduce(jd.exact(), delay=1),
    "local_steps": lambda: jd.local_sgd.local_sgd(optax.sgd(0.1), sync_period=3),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_examples_in_another_order(tmp_path, name):
    """Each would weigh the gradients of another leaf."""
    state, other = (jd.place({"opt": NUMBERED[name]().init(kind(**SAVED))}, 4) for kind in (FirstA, FirstB))
    checkpoint.save(tmp_path, state, 0)
    checkpoint.restore(tmp_path, state)
    with pytest.raises(ValueError, match=r"`opt.examples` .*another, a \[6\], b \[2, 3\], and .* b \[2, 3\], a \[6\]"):
        checkpoint.restore(tmp_path, other)
    assert checkpoint.resume(tmp_path, other, changed=["opt.examples"]).new == ("opt.examples",)
    state["opt"].examples.order = None
    checkpoint.save(tmp_path, state, 1)
    checkpoint.restore(tmp_path, other)


def test_numbers_of_parameters_that_are_sharded(tmp_path):
    """Their leaves are named without the mark, and with the shape that any number of workers shares."""
    params = {"a": jd.Sharded(jnp.ones(6)), "b": jnp.ones((2, 3))}
    state = jd.accumulate(jd.zero_redundancy(optax.sgd(0.1)), 2).init(params)
    assert state.examples.order == (("a", (6,)), ("b", (2, 3)))
    checkpoint.save(tmp_path, jd.place({"params": params, "opt": state}, 4), 0)
    checkpoint.restore(tmp_path, jd.place({"params": params, "opt": state}, 2))


def test_every_method_records_the_order():
    """Of what has another shape with more leaves, and no parameter's name."""

    def described_leaves(line, names):
        params = {name: jnp.zeros((8, 8)) for name in names}
        state = flatten_marks(jax.eval_shape(line.make().init, params))
        leaves = {jax.tree_util.keystr(x.path): (x.value.shape, order_of(x.marks)) for x in state}
        return {name: leaf for name, leaf in leaves.items() if not any(f"'{key}'" in name for key in names)}

    checked = set()
    for name, line in (AGREED | LOCAL).items():
        few, more = described_leaves(line, "pq"), described_leaves(line, "pqr")
        found = {leaf: order for leaf, (shape, order) in few.items() if leaf in more and more[leaf][0] != shape}
        assert None not in found.values(), (name, found)
        checked |= {name} if found else set()
    assert {"accumulate", "all_reduce late", "diloco", "streaming_diloco"} <= checked
