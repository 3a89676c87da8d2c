"""With `JAX_ENABLE_X64=1`: every method of the register keeps the dtypes of its state. Run by `test_x64.py`.

By default a step of each method whose workers part is traced, with parameters of one dtype in turn. With `--run` two
steps of every line are taken, with parameters of both.
"""

import sys
import traceback

import jax
import jax.numpy as jnp
import optax
from method_register import LINES, LOCAL
from register_run import State, gradients, linear_loss, params

import jaxdist as jd

ONLY_FLOAT32 = {"scheduled codes"}  # its order names partitions of so many bytes


def step_of(line, tx):
    def step(state, batch):
        _, gradient = jd.local_value_and_grad(linear_loss, axis=line.axis)(state.params, batch)
        updates, opt = tx.update(gradient, state.opt, state.params, **line.extra)
        return State(optax.apply_updates(state.params, updates), opt), {}

    return step


def check(line, dtype, taken):
    tx = optax.with_extra_args_support(line.make())
    start = jax.tree.map(lambda x: jnp.asarray(x, dtype), params())

    def make_state():
        return State(jd.PerWorker(start) if line.drifts else start, tx.init(start))

    # A step that returns other dtypes than it was given is refused.
    run = jd.simulate(step_of(line, tx), line.workers, axis=line.axis)

    def placed():
        return jd.init_state(make_state, line.workers, axis=line.axis)

    if not taken:
        jax.eval_shape(run, jax.eval_shape(placed), gradients(0, 4))
        return
    state = placed()
    for step in range(2):
        state, _ = run(state, gradients(step, 4))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def main() -> int:
    assert jnp.zeros(()).dtype == jnp.float64
    taken, failed = "--run" in sys.argv, 0
    for number, (name, line) in enumerate((LINES if taken else LOCAL).items()):
        dtypes = (jnp.float32,) if name in ONLY_FLOAT32 else (jnp.float32, jnp.float64)
        for dtype in dtypes if taken else dtypes[number % 2 :][:1]:
            try:
                check(line, dtype, taken)
            except Exception as problem:
                failed += 1
                print(f"{name}, {jnp.dtype(dtype)}: {''.join(traceback.format_exception_only(problem))}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
