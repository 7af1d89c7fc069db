"""Small parts of the decoder: linear maps, RMSNorm, rotary positions, the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from memreclaim.engines.reference.config import ModelConfig


class Linear(nn.Module):
    """``y = x @ weight.T`` in bf16; a checkpoint fills the weight."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        """Allocate ``weight [outputs, inputs]``, uninitialised."""
        super().__init__()
        empty = torch.empty((outputs, inputs), dtype=torch.bfloat16, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, inputs]`` -> ``[rows, outputs]``."""
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in fp32."""

    def __init__(self, width: int, eps: float, device: torch.device) -> None:
        """Allocate ``weight [width]``, uninitialised."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.bfloat16, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[..., width]``, kept."""
        return (unit_rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class Mlp(nn.Module):
    """Gated MLP, ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Allocate the three maps."""
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.intermediate_size, device)
        self.w2 = Linear(config.intermediate_size, config.hidden_size, device)
        self.w3 = Linear(config.hidden_size, config.intermediate_size, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, hidden]``, kept."""
        y: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return y


class Rotary:
    """Rotary positions on the last ``width`` elements of a head, adjacent elements paired.

    The latent is key and value at once, so what attention returns carries the keys' rotation: ``inverse`` takes off the
    query's.
    """

    def __init__(self, width: int, theta: float, positions: torch.Tensor) -> None:
        """Angles of int64 ``positions [rows]``."""
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angles = positions.float().unsqueeze(1) * theta**-exponents
        self._width = width
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotate bf16 ``[rows, ..., head_dim]``; a new tensor."""
        spread = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
        cos, sin = self._cos.view(spread), self._sin.view(spread)
        sin = -sin if inverse else sin
        plain, turned = x[..., : -self._width], x[..., -self._width :]
        wide = turned.float()
        even, odd = wide[..., 0::2], wide[..., 1::2]
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        return torch.cat((plain, rotated.to(x.dtype)), dim=-1)


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last axis to a root mean square of 1."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
