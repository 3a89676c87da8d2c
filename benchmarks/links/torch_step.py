"""PyTorch DistributedDataParallel over gloo, as one process of `compare.py`.

Modes: `none` (no communication), `plain` (DDP as it comes), `bucket` (DDP with buckets of 5 MiB, which overlap more
than its default of 25 MiB), `f16` (the stock half-precision hook) and `power_sgd` (the stock hook, rank 4, with error
feedback and warm start as it comes, compressing from the third step on).

The PowerSGD hook runs with one bucket: its callbacks wait for further all-reduces inside gloo's worker threads, so with
two buckets or more it hangs. This is the hook repaired, not as it comes.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problems import HEADS, LAYERS, MOMENTUM, PROBLEMS, RATES
from server import Way, serve
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

WHOLE_MODEL_MIB = 1000
BUCKETS = {"bucket": 5, "power_sgd": WHOLE_MODEL_MIB}


class Model(torch.nn.Module):
    def __init__(self, params, loss):
        super().__init__()
        self.weights = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in params.items()}
        )
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.weights, x, y)


def normalize(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def language_model_loss(w, tokens, targets):
    (batch, length), width = tokens.shape, w["embedding"].shape[1]
    x = F.embedding(tokens, w["embedding"]) + w["position"][:length]
    for layer in range(LAYERS):
        qkv = normalize(x, w[f"attention_gain_{layer}"]) @ w[f"qkv_{layer}"]
        q, k, v = qkv.view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ w[f"out_{layer}"]
        hidden = normalize(x, w[f"feed_gain_{layer}"]) @ w[f"up_{layer}"]
        x = x + F.gelu(hidden, approximate="tanh") @ w[f"down_{layer}"]
    return F.cross_entropy((normalize(x, w["gain"]) @ w["head"]).flatten(0, 1), targets.flatten())


def classifier_loss(w, x, labels):
    layers = len([name for name in w if name.startswith("weight")])
    for layer in range(layers):
        x = torch.addmm(w[f"bias_{layer}"], x, w[f"weight_{layer}"])
        x = torch.relu(x) if layer < layers - 1 else x
    return F.cross_entropy(x, labels)


def build(name, mode, problem):
    model = Model(problem.params, {"lm": language_model_loss, "mlp": classifier_loss}[name])
    module = model
    if mode != "none":
        module = DistributedDataParallel(model, **({"bucket_cap_mb": BUCKETS[mode]} if mode in BUCKETS else {}))
    if mode == "f16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if mode == "power_sgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=2)
        module.register_comm_hook(state, powerSGD_hook)
    # `fused` is the fastest of its optimizers.
    if name == "lm":
        optimizer = torch.optim.Adam(module.parameters(), lr=RATES[name], fused=True)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=RATES[name], momentum=MOMENTUM, fused=True)
    inputs = [torch.from_numpy(x.copy()) for x, _ in problem.batches]
    targets = [torch.from_numpy(y.copy()).long() for _, y in problem.batches]

    def step(number):
        optimizer.zero_grad()
        loss = module(inputs[number % len(inputs)], targets[number % len(inputs)])
        loss.backward()
        optimizer.step()
        return loss.item()

    return Way(step)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name = os.environ["PROBLEM"]
    problem = PROBLEMS[name](dist.get_rank())
    serve(lambda mode: build(name, mode, problem), {"torch": torch.__version__, "threads": torch.get_num_threads()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
