"""hivemind, as one peer of `failures.py`: its `Optimizer`, AdamW, and a line in the log for each epoch.

An epoch of hivemind is a step of all peers: it ends when they have accumulated the batch of three.
"""

import sys
import time
from pathlib import Path

import hivemind  # pyright: ignore[reportMissingImports]
import torch
from torch_model import Model
from worker import DECAY, RATE, Problem, describe, draw_batch, open_log

PEERS = 3


def find_first(folder: str, dht: hivemind.DHT | None = None) -> list[str]:
    """The addresses of the peer that the others know: it writes them, they read them."""
    path = Path(folder, "first")
    if dht is not None:
        partial = path.with_suffix(".part")
        partial.write_text("\n".join(map(str, dht.get_visible_maddrs())))
        partial.rename(path)
    while not path.exists():
        time.sleep(0.1)
    return path.read_text().splitlines()


def main(name: str, folder: str, problem: str, pace: str, timeout: str) -> None:
    torch.set_num_threads(1)
    sizes = Problem(*map(int, problem.split(",")))
    model = Model(sizes)
    dht = hivemind.DHT(start=True) if name == "a" else hivemind.DHT(initial_peers=find_first(folder), start=True)
    if name == "a":
        find_first(folder, dht)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="failures",
        batch_size_per_step=sizes.examples,
        target_batch_size=PEERS * sizes.examples,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY),
        matchmaking_time=3.0,  # what its documentation advises for small local runs
        averaging_timeout=float(timeout),
        delay_state_averaging=False,
    )
    log, number = open_log(folder, name), 0
    while True:
        x, labels = draw_batch(sizes, ord(name), number)
        before = optimizer.local_epoch
        optimizer.zero_grad()
        loss = model(torch.from_numpy(x), torch.from_numpy(labels).long())
        loss.backward()
        optimizer.step()
        number += 1
        if optimizer.local_epoch > before:
            known = describe(leaf.detach().numpy() for leaf in model.parameters())
            log(step=optimizer.local_epoch, lost=False, **known, loss=loss.item())
        time.sleep(float(pace))


if __name__ == "__main__":
    main(*sys.argv[1:])
