"""The network of `worker.Problem` in PyTorch."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from worker import Problem, initial_params


class Leaves(torch.nn.Module):
    """A layer's parameters; `f(leaves, x)` is its forward pass."""

    def __init__(self, params: dict[str, Any], f: Any):
        super().__init__()
        for name, value in params.items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(value)))
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


def apply_affine(leaves: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(leaves.bias, x, leaves.weight)


def apply_block(leaves: Any, x: torch.Tensor) -> torch.Tensor:
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * leaves.gain
    return x + torch.relu(torch.addmm(leaves.bias, normal, leaves.weight))


class Model(torch.nn.Module):
    def __init__(self, problem: Problem):
        super().__init__()
        params = initial_params(problem)
        self.first, self.last = (Leaves(params[name], apply_affine) for name in ("first", "last"))
        self.blocks = torch.nn.ModuleList(Leaves(block, apply_block) for block in params["blocks"])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.last(x), labels)
