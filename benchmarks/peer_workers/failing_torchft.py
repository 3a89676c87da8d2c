"""torchft, as one replica of `failures.py`: its DDP over gloo, AdamW, and a line in the log for each step."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torchft  # pyright: ignore[reportMissingImports]
from torch_model import Model
from worker import DECAY, RATE, Problem, describe, draw_batch, open_log


def main(name: str, folder: str, problem: str, pace: str, timeout: str) -> None:
    torch.set_num_threads(1)
    sizes, limit = Problem(*map(int, problem.split(","))), timedelta(seconds=float(timeout))
    model = Model(sizes)
    inner = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    # Its processes of one replica meet at a store; this replica has one.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        replica_id=name,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=limit,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        hostname="localhost",
    )
    module, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, inner)
    log, number = open_log(folder, name), 0
    while True:
        x, labels = draw_batch(sizes, ord(name), number)
        before = manager.current_step()
        optimizer.zero_grad()
        loss = module(torch.from_numpy(x), torch.from_numpy(labels).long())
        loss.backward()
        optimizer.step()
        number, step = number + 1, manager.current_step()
        known = describe(leaf.detach().numpy() for leaf in model.parameters())
        log(step=step, lost=step == before, workers=manager.num_participants(), **known, loss=loss.item())
        time.sleep(float(pace))


if __name__ == "__main__":
    main(*sys.argv[1:])
