"""Every optimizer of optax, found by what it returns, and how it is made and called in tests."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

LABELS = {"w": "a", "b": "b"}
KEY = jax.random.key(0)

# What factories ask for, by the names of their arguments.
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "clipping": 0.1,
    "eta": 1e-2,
    "gamma": 0.5,
    "inner": optax.adam(0.1),
    "max_consecutive_errors": 2,
    "max_delta": 0.1,
    "threshold": 0.1,
    "max_norm": 0.1,
    "should_transform_fn": lambda step: step % 2 == 0,
    "decay": 0.9,
    "mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "transforms": {"a": optax.adam(0.1), "b": optax.sgd(0.1)},
    "param_labels": lambda params: {name: LABELS[name] for name in params},
    "step_size": 0.1,
    "max_backtracking_steps": 5,
    "max_linesearch_steps": 5,
    "step_size_fn": lambda count: 0.1 / (1 + count),
    "optimizer": optax.sgd(0.1),
    "freeze_mask": {"w": False, "b": True},
    "measure_name": "norm",
    "measure": optax.tree.norm,
    "tx": optax.sgd(0.1),
    "base_optimizer": optax.sgd(0.1),
    "adv_optimizer": optax.chain(contrib.normalize(), optax.sgd(0.05)),
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "fast_optimizer": optax.sgd(0.1),
    "sync_period": 2,
    "slow_step_size": 0.5,
}
MAKE: dict[str, Any] = {
    "chain": lambda: optax.chain(optax.clip(0.1), optax.adam(1e-2)),
    "named_chain": lambda: optax.named_chain(("first", optax.clip(0.1)), ("second", optax.adam(1e-2))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(1e-2),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(jnp.sin, updates)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: jnp.sin(u)),
    "add_noise": lambda: optax.add_noise(1e-2, 0.5, key=KEY),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=KEY),
    # Not `dpsgd`, whose argument for the key is deprecated.
    "dpsgd": lambda: optax.chain(contrib.differentially_private_aggregate(1.0, 0.1, key=KEY), optax.sgd(1e-2)),
    "differentially_private_aggregate": lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=KEY),
}
MAKE["scale_by_muon"] = lambda: contrib.scale_by_muon(weight_dimension_numbers={"w": contrib.MuonDimensionNumbers()})
NOT_OPTIMIZERS = {"measure_with_ema"}  # its updates are measurements, for optax.monitor
# Those that want more than a gradient; tests of their own.
APART = {"dpsgd", "differentially_private_aggregate", "lookahead"}
EXTRAS = {
    "lbfgs": ("value", "grad", "value_fn"),
    "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
    "momo": ("value",),
    "momo_adam": ("value",),
    "polyak_sgd": ("value",),
    "scale_by_polyak": ("value",),
    "reduce_on_plateau": ("value",),
    "sophia": ("obj_fn",),
}
# What local steps cannot have outside, where there is no loss, or inside.
NO_LOSS = {*EXTRAS} - {"momo", "momo_adam"}
# Inside local steps each worker draws its own noise (tests/state/test_worker_keys.py), so none takes the plain steps.
NOISY = {"add_noise", "noisy_sgd"}


def _register() -> dict[str, Any]:
    found = {}
    for module in (optax, contrib):
        for name, f in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(f) or name in NOT_OPTIMIZERS:
                continue
            if "GradientTransformation" in str(inspect.signature(f).return_annotation):
                found[name] = f
    return found


REGISTER = _register()


def make(name, **given):
    """Makes one of them; `given` replaces values of `ARGUMENTS`."""
    if name in MAKE:
        return MAKE[name]()
    f = REGISTER[name]
    needed = [
        p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD
    ]
    return f(**{argument: {**ARGUMENTS, **given}[argument] for argument in needed})
