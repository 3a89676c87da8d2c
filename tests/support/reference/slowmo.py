"""SGP-SlowMo, OSGP and local steps in two levels, in float64: `x [n, d]` of all workers at once."""

import numpy as np


def heavy_ball(decay):
    """The direction of momentum SGD, from the buffer (`None` at first) and the gradient."""

    def direction(buffer, g):
        buffer = g if buffer is None else decay * buffer + g
        return buffer, buffer

    return direction


def adam(b1=0.9, b2=0.999, eps=1e-8):
    def direction(buffers, g):
        m, v, t = (0, 0, 0) if buffers is None else buffers
        m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, t + 1
        return (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), (m, v, t)

    return direction


def sgp_slowmo(g, start, matrices, rates, *, direction, period=None, beta=0.0, reset=False, overlap=False):
    """SGP, or OSGP with `overlap`, whose models are averaged exactly every `period` steps; equal models at first."""
    n, out = len(start), []
    x, weight, anchor, u, buffers = start.copy(), np.ones((n, 1)), start[0], 0.0, None
    flying = np.zeros_like(x), np.zeros_like(weight)
    for t, (p, rate) in enumerate(zip(matrices, rates, strict=True)):
        d, buffers = direction(buffers, g(t, x / weight))
        x = x - rate * d
        if overlap:
            own, others = np.diag(np.diag(p)), p - np.diag(np.diag(p))
            arrived, flying = flying, (others @ x, others @ weight)
            x, weight = own @ x + arrived[0], own @ weight + arrived[1]
        else:
            x, weight = p @ x, p @ weight
        if period and (t + 1) % period == 0:
            # The numerators and what is under way: all that the steps have changed.
            u = beta * u + (anchor - (x + flying[0]).mean(0)) / rate
            anchor = anchor - rate * u
            x, weight = np.tile(anchor, (n, 1)), np.ones((n, 1))
            # What was under way has arrived by the average.
            flying = np.zeros_like(x), np.zeros_like(weight)
            buffers = None if reset else buffers
        out.append(x / weight)
    return np.array(out)


def kept_through_rounds(method, g, x, matrix, rate, *, steps, period, buffers):
    """A method whose models are averaged every `period` steps, and whose other state goes on, or as `buffers` says."""
    zero = np.zeros_like(x)
    c, y, old, m, v, count, out = zero, zero, zero, zero, zero, 0, []
    for t in range(steps):
        d = g(t, x)
        if method == "d2":
            half = x - rate * d - c
            x = matrix @ half
            c = c + half - x
        elif method == "gradient_tracking":
            y, old = matrix @ (y + d - old), d
            x = matrix @ (x - rate * y)
        elif method == "quasi_global_momentum":
            new = matrix @ (x - rate * (0.9 * m + d))
            m, x = 0.9 * m + 0.1 * (x - new) / rate, new
        else:
            count += 1
            first, second = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d**2
            direction = first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.99**count)) + 1e-8)
            change = x - matrix @ (x - rate * direction)
            x = x - change
            change = change / (np.linalg.norm(change, axis=1, keepdims=True) + 1e-8)
            m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
        if (t + 1) % period == 0:
            x = np.tile(x.mean(0), (len(x), 1))
            if buffers == "reset":
                c, m, v, count = zero, zero, zero, 0
            elif buffers == "average":
                c, m, v = (np.tile(each.mean(0), (len(x), 1)) for each in (c, m, v))
        out.append(x)
    return np.array(out)


def two_levels(targets, *, rate, periods, outer_rates, outer_momenta):
    """`targets [steps, pods, chips, n]`: gradient steps on `|x - target|²/2`, heavy-ball steps inside pods and between.

    A chip keeps what it has done since its pod's last round when pods meet. Models `[steps, pods, chips, n]`, and the
    anchors of all pods `[steps, n]`.
    """
    steps, pods, chips, n = targets.shape
    x, inside, outside = np.zeros((pods, chips, n)), np.zeros((pods, n)), np.zeros(n)
    u, v, out, anchors = np.zeros((pods, n)), np.zeros(n), [], []
    for t in range(steps):
        x = x - rate * (x - targets[t])
        if (t + 1) % periods[0] == 0:
            u = outer_momenta[0] * u + inside - x.mean(1)
            inside = inside - outer_rates[0] * u
            x = np.repeat(inside[:, None], chips, 1)
        if (t + 1) % periods[1] == 0:
            v = outer_momenta[1] * v + outside - inside.mean(0)
            outside = outside - outer_rates[1] * v
            x = x + (outside - inside)[:, None]
            inside = np.tile(outside, (pods, 1))
        out.append(x)
        anchors.append(outside)
    return np.array(out), np.array(anchors)
