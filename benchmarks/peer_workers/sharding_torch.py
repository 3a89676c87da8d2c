"""PyTorch over gloo, as one process (one thread) of `sharding.py`.

Modes: `ddp` (replicated, buckets of 25 MiB as they come), `zero_1` (DDP and `ZeroRedundancyOptimizer`), `fsdp_2`
(`fully_shard` of each block, parameters whole from the forward to the backward pass) and `fsdp_3` (`fully_shard` as it
comes, which gathers them again).
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_model import Model
from worker import DECAY, EPSILON, RATE, Problem, bytes_at_start, draw_batch, serve, take_output


def build(mode: str, problem: Problem) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model: torch.nn.Module = Model(problem)
    options = {"lr": RATE, "weight_decay": DECAY, "eps": EPSILON, "fused": True}  # the fastest of its AdamWs
    if mode.startswith("fsdp"):
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=mode == "fsdp_3")
        fully_shard(model, mesh=mesh, reshard_after_forward=mode == "fsdp_3")
        return model, torch.optim.AdamW(model.parameters(), **options)
    model = DistributedDataParallel(model)
    if mode == "zero_1":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return model, torch.optim.AdamW(model.parameters(), **options)


def main() -> None:
    output = take_output()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mode, problem = sys.argv[1], Problem(*map(int, sys.argv[2].split(",")))
    before = bytes_at_start()
    model, optimizer = build(mode, problem)
    rank = dist.get_rank()

    def step(number: int) -> float:
        x, labels = draw_batch(problem, rank, number)
        optimizer.zero_grad()
        loss = model(torch.from_numpy(x), torch.from_numpy(labels).long())
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(output, {"before": before, "version": torch.__version__}, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
