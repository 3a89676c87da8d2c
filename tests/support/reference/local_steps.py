"""Local SGD, SlowMo and (streaming) DiLoCo on quadratics, in float64."""

import numpy as np


def local_steps(
    targets,
    start,
    *,
    rate,
    period,
    outer_rate=1.0,
    outer_momentum=0.0,
    nesterov=False,
    slow=False,
    fragments=1,
    delay=0,
    alpha=0.0,
    merge=None,
    weights=None,
    eager=False,
):
    """Workers on `|x - target|²/2` with plain gradient steps; entry `i` belongs to fragment `i mod fragments`.

    `targets [steps, W, n]`, `rate` a number or one for each step -> parameters `[steps, W, n]`, anchors `[steps, n]`.
    `merge(drifts, weights)` gives the drift of a fragment, which is a leaf; by default the mean.
    """
    steps, workers, n = targets.shape
    rates = np.broadcast_to(rate, steps)
    anchor, local = start.astype(float), np.tile(start.astype(float), (workers, 1))
    momentum, sent_from, jump = np.zeros(n), local.copy(), np.zeros_like(local)
    out = []

    def outer(momentum, drift, fast):
        momentum = outer_momentum * momentum + drift / fast
        return momentum, outer_rate * fast * (drift + outer_momentum * momentum if nesterov else momentum)

    for step in range(steps):
        # The step that sends takes its gradient before one's own share is applied.
        local, jump = local - rates[step] * (local - targets[step]) + jump, np.zeros_like(local)
        for i in range(fragments):
            mine = np.arange(n) % fragments == i
            first = i * period // fragments or period
            done = step + 1 - first
            if done >= 0 and done % period == 0:
                drifts = (anchor - local)[:, mine]
                drift = drifts.mean(0) if merge is None else merge(drifts, weights)
                fast = rates[step] if slow else 1.0
                if eager:
                    sent_from[:, mine] = anchor[mine] - outer(momentum[mine], drifts / workers, fast)[1]
                    jump[:, mine] = (sent_from - local)[:, mine]
                momentum[mine], move = outer(momentum[mine], drift, fast)
                anchor = anchor.copy()
                anchor[mine] -= move
            if eager and done >= delay and (done - delay) % period == 0:
                local[:, mine] += (1 - alpha) * (anchor - sent_from)[:, mine]
            elif done >= delay and (done - delay) % period == 0:
                local[:, mine] = alpha * local[:, mine] + (1 - alpha) * anchor[mine]
        out.append((local.copy(), anchor.copy()))
    return np.stack([x for x, _ in out]), np.stack([a for _, a in out])


def rda(drifts, weights=None):
    """Radial-directional averaging: the mean length of `drifts [W, n]` along their mean direction."""
    share = np.ones(len(drifts)) if weights is None else np.asarray(weights, float)
    lengths = np.linalg.norm(drifts, axis=1)
    unit = drifts / np.where(lengths > 0, lengths, 1)[:, None]
    direction, length = share @ unit / share.sum(), share @ lengths / share.sum()
    norm = np.linalg.norm(direction)
    return length * direction / norm if norm > 1e-6 else length * direction


def fed_avg(targets, start, drawn, examples, *, rate, period, kept=None):
    """FedAvg on `|x - target|²/2` with the workers `drawn [rounds, W]` (1 or 0) and their numbers of examples `[W]`.

    With `kept`, workers send the `kept` largest entries of their weighted drift and keep the rest until they are drawn
    again. Returns the global parameters `[rounds, n]` and the residuals `[W, n]`.
    """
    steps, workers, n = targets.shape
    anchor, residuals, out = start.astype(float), np.zeros((workers, n)), []
    for first, taking_part in zip(range(0, steps, period), drawn, strict=True):
        weights = taking_part * examples / np.mean(taking_part * examples)
        sent = np.zeros((workers, n))
        for worker in np.flatnonzero(taking_part):
            x = anchor
            for step in range(first, first + period):
                x = x - rate * (x - targets[step, worker])
            sent[worker] = weights[worker] * (anchor - x)
            if kept is not None:
                whole = sent[worker] + residuals[worker]
                sent[worker] = np.where(np.argsort(np.argsort(-np.abs(whole))) < kept, whole, 0)
                residuals[worker] = whole - sent[worker]
        anchor = anchor - sent.mean(0)
        out.append(anchor)
    return np.stack(out), residuals
