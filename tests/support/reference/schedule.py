"""One link between two passes in unit steps, and the best order by trying them all."""

from functools import cache


def unit_steps(ready, sizes, forward, *, barrier):
    """Integers, bandwidth 1: each second the lowest layer that is ready sends one byte."""
    left, done, now = list(sizes), list(ready), 0
    while any(left):
        waiting = [i for i in range(len(left)) if left[i] and ready[i] <= now]
        now += 1
        if waiting:
            left[waiting[0]] -= 1
            done[waiting[0]] = now
    now = max(ready + done) if barrier else max(ready)
    for gradient, seconds in zip(done, forward):
        now = max(now, gradient) + seconds
    return now


def best_order(ready, sizes, forward):
    """The shortest step over all orders of messages of one byte, idling included."""
    tails = [sum(forward[i:]) for i in range(len(forward))]

    @cache
    def latest(now, left):
        if not any(left):
            return 0
        found = [latest(now + 1, left)] if now < max(ready) else []
        for i, n in enumerate(left):
            if n and ready[i] <= now:
                rest = (*left[:i], n - 1, *left[i + 1 :])
                found.append(max(now + 1 + tails[i] if n == 1 else 0, latest(now + 1, rest)))
        return min(found)

    return max(latest(0, tuple(sizes)), max(ready) + tails[0], *(r + t for r, t in zip(ready, tails)))
