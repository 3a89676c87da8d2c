"""The methods of the register whose hyperparameters can be injected."""

import optax

import jaxdist as jd
from jaxdist.optimizers import demo

WORKERS, STEPS, CASES = 4, 4, 10


RING = jd.topology.ring(WORKERS)


def reduced(reducer, optimizer=None):
    return optax.chain(jd.all_reduce(reducer), optax.adamw(0.1, weight_decay=0.1) if optimizer is None else optimizer)


def top_k():
    return jd.error_feedback(jd.compressed(jd.top_k(0.25)))


def low_rank(**options):
    return jd.power_sgd(2, min_compression_rate=0, **options)


def momentum():
    return optax.sgd(0.1, momentum=0.9)


def signs():
    return jd.error_feedback(jd.compressed(jd.compressors.scaled_sign()))


def diloco():
    return jd.local_sgd.diloco(optax.adam(0.1), sync_period=2, reducer=signs())


def accordion():
    return jd.reducers.accordion(jd.power_sgd(2), jd.power_sgd(1), epoch_steps=1, interval_steps=1)


def one_bit_adam(learning_rate):
    return jd.optimizers.one_bit_adam(learning_rate, freeze_step=2)


# Those whose parameters differ between workers have the mark.
AGREED = {
    "exact": lambda: reduced(jd.exact()),
    "feedback of top_k": lambda: reduced(top_k()),
    "feedback of power_sgd": lambda: reduced(jd.error_feedback(low_rank()), momentum()),
    "feedback of power_sgd in the paper's form": lambda: reduced(jd.error_feedback(low_rank(own="paper")), momentum()),
    "power_sgd": lambda: reduced(low_rank(own="paper"), momentum()),
    "feedback of signs": lambda: reduced(signs()),
    "feedback of two-shot signs": lambda: reduced(
        jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign())), momentum()
    ),
    "feedback of drive": lambda: reduced(jd.error_feedback(jd.compressed(jd.compressors.drive())), momentum()),
    "feedback of compute_visible": lambda: reduced(
        jd.error_feedback(jd.reducers.compute_visible(jd.compressed(jd.top_k(0.25)))), optax.sgd(0.1)
    ),
    "ef21": lambda: reduced(jd.reducers.ef21(jd.compressed(jd.top_k(0.25)))),
    "qsgd": lambda: reduced(jd.compressed(jd.qsgd(4))),
    "alq": lambda: reduced(jd.reducers.alq(3, bucket=32, every=1)),
    "dgc": lambda: reduced(jd.reducers.dgc(0.25, clip_norm=3.0), optax.sgd(0.1)),
    "loco": lambda: reduced(jd.reducers.loco(jd.two_shot(jd.qsgd(4)), block=32)),
    "two_shot with a server residual": lambda: reduced(
        jd.error_feedback(jd.two_shot(jd.compressors.scaled_sign(), second=jd.top_k(0.25)))
    ),
    "accordion": lambda: reduced(jd.error_feedback(accordion())),
    "intsgd": lambda: reduced(jd.reducers.intsgd()),
    "zero_redundancy": lambda: jd.zero_redundancy(optax.adam(0.1)),
    "one_bit_adam": lambda: one_bit_adam(0.1),
    "demo": lambda: demo(0.1, chunk=4, k=3),
}


LOCAL = {
    "zero_one_adam": lambda: jd.optimizers.zero_one_adam(0.1, freeze_step=2, refreshes=1, doubling_steps=1),
    "slowmo": lambda: jd.local_sgd.slowmo(momentum(), sync_period=2, learning_rate=0.1),
    "diloco with feedback": diloco,
    "d_psgd": lambda: jd.gossip(momentum(), RING),
    "gradient_tracking": lambda: jd.gossip(momentum(), RING, method=jd.decentralized.gradient_tracking()),
}


METHODS = {**AGREED, **LOCAL}


ALONE = {
    "slowmo": lambda inner: jd.local_sgd.slowmo(inner, sync_period=2, learning_rate=0.1),
    "diloco with feedback": lambda inner: jd.local_sgd.diloco(inner, sync_period=2, reducer=signs()),
    "d_psgd": lambda inner: jd.gossip(inner, RING),
    "choco": lambda inner: jd.gossip(inner, RING, method=jd.decentralized.choco(jd.top_k(0.25), step_size=0.3)),
    "d2": lambda inner: jd.gossip(inner, RING, method=jd.decentralized.d2()),
    "qg": lambda inner: jd.gossip(inner, RING, method=jd.decentralized.quasi_global_momentum(learning_rate=0.1)),
    "relay": lambda inner: jd.gossip(inner, jd.topology.path(WORKERS), method=jd.decentralized.relay_sgd()),
    "sgp": lambda inner: jd.gossip(inner, RING, method=jd.decentralized.sgp()),
}
