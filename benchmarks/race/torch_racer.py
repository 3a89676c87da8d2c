"""PyTorch DistributedDataParallel over gloo, as one process (one thread) of the race.

Modes: `none` (no communication), `ddp` (buckets of 5 MiB), `f16` (the stock hook), `power_sgd` (the stock hook, rank 4,
error feedback, warm start; one bucket, since over gloo it hangs with two), `local` (post-local SGD: the stock hook and
`PeriodicModelAverager`, every 8 steps from the start). Where DeepSpeed is installed, `zero2` is its ZeRO stage 2 with
PyTorch's optimizer.
"""

from streams import STREAMS  # isort: skip  # puts the folder of the models on the path

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import answers
import numpy as np
import torch
import torch.distributed as dist
from problems import MOMENTUM
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_step import Model, classifier_loss, language_model_loss

H = 8
WHOLE_MODEL_MIB = 1000
LOSSES = {"lm": language_model_loss, "mlp": classifier_loss}


class TorchRacer:
    """One mode: a fresh model, optimizer and hook at every `start`."""

    def __init__(self, name: str, mode: str, stream: Any, alone: Any):
        self.name, self.mode, self.stream, self.alone = name, mode, stream, alone

    def start(self, rate: float, seed: int) -> None:
        self.seed = seed
        self.model = Model(self.stream.params, LOSSES[self.name])
        self.module = self.model
        if self.mode not in ("none", "zero2"):
            buckets = WHOLE_MODEL_MIB if self.mode == "power_sgd" else 5
            self.module = DistributedDataParallel(self.model, bucket_cap_mb=buckets)
        parameters = self.module.parameters()
        # `fused` is the fastest of its optimizers.
        if self.name == "lm":
            self.optimizer = torch.optim.Adam(parameters, lr=rate, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, fused=True)
        if self.mode == "f16":
            self.module.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.mode == "power_sgd":
            state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=2)
            self.module.register_comm_hook(state, powerSGD_hook)
        elif self.mode == "zero2":
            self.module, self.optimizer = shard(self.model, self.optimizer)
        elif self.mode == "local":
            # The averager counts from 0: from step 7 on, every 8 steps, is after 8, 16, ... steps.
            state = PostLocalSGDState(None, self.alone, start_localSGD_iter=0, post_local_gradient_allreduce=False)
            self.module.register_comm_hook(state, post_localSGD_hook)
            self.optimizer = PostLocalSGDOptimizer(self.optimizer, PeriodicModelAverager(period=H, warmup_steps=H - 1))

    def step(self, number: int) -> float:
        inputs, targets = self.stream.batch(self.seed, number)
        self.optimizer.zero_grad()
        loss = self.module(torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy()).long())
        if self.mode == "zero2":
            self.module.backward(loss)
            self.module.step()
        else:
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def evaluate(self) -> float:
        """The held-out loss of this process's parameters, which are those of all after a round."""
        with torch.no_grad():
            batches = ((torch.from_numpy(x.copy()), torch.from_numpy(y.copy()).long()) for x, y in self.stream.held_out)
            return float(np.mean([self.model(x, y).item() for x, y in batches]))

    def cost(self) -> dict[str, Any]:
        return {}

    def link(self) -> dict[str, float]:
        return {}


def shard(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """DeepSpeed's engine, which shards gradients and optimizer state, and its optimizer; buckets of 5 MiB."""
    # What its launcher would say: the first process of this host, without a GPU.
    os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    import deepspeed

    entries = 5 * 2**20 // 4
    config = {
        "train_micro_batch_size_per_gpu": 1,  # the mean over the batch is the model's own
        "gradient_clipping": 0.0,  # its default is 1
        "zero_optimization": {"stage": 2, "reduce_bucket_size": entries, "allgather_bucket_size": entries},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, sharded, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, sharded


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    problem = os.environ["PROBLEM"]
    name = "lm" if problem.startswith("lm") else "mlp"
    stream = STREAMS[problem](dist.get_rank(), dist.get_world_size())
    # A group for each worker by itself, within which the hook of post-local SGD "averages".
    alone, _ = dist.new_subgroups(group_size=1)
    answers.serve(lambda mode: TorchRacer(name, mode, stream, alone), {"torch": torch.__version__})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
