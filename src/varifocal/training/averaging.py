"""The mean of the weights over the last part of a run; seeds differ less in it than in their last step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

FILE = "average.safetensors"
"""In a checkpoint: the mean so far."""
COUNT = "steps"


class WeightAverage:
    """mean_n = mean_{n-1} + (weights_n - mean_{n-1}) / n over the steps that are added."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        self._mean: dict[str, Tensor] = {}
        self.steps = 0

    @torch.no_grad()
    def add(self) -> None:
        """Take in the present weights."""
        self.steps += 1
        for name, weight in self._weights.items():
            if name in self._mean:
                self._mean[name].lerp_(weight, 1 / self.steps)
            else:
                self._mean[name] = weight.detach().clone()

    @torch.no_grad()
    def install(self) -> None:
        """Give the model the mean in place of its present weights."""
        for name, mean in self._mean.items():
            self._weights[name].copy_(mean)

    def save(self, folder: Path) -> None:
        """Write the mean into a checkpoint, if there is one yet."""
        from safetensors.torch import save_file

        if self.steps:
            save_file(self._mean, folder / FILE, metadata={COUNT: str(self.steps)})

    def load(self, checkpoint: Path) -> None:
        """Go on from the mean of a checkpoint, if it has one."""
        from safetensors import safe_open

        if not (checkpoint / FILE).is_file():
            return
        with safe_open(checkpoint / FILE, framework="pt") as file:
            self.steps = int(file.metadata()[COUNT])
            self._mean = {name: file.get_tensor(name).to(weight.device) for name, weight in self._weights.items()}
