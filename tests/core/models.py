"""Small models with a ``wo_a``, weights as checkpoints make them, and short ways to reclaim and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import memreclaim as mr
from memreclaim import discover, swap
from memreclaim.backing import Backing
from memreclaim.config import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS, RANK, DEPTH = 2, 64, 96


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as integers, so that -0.0 differs from +0.0 and NaN equals itself."""
    dense = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1)
    return dense.view(torch.uint8) if dense.numel() else dense


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(bits(one), bits(other))


def exact_weight(
    groups: int = GROUPS, rank: int = RANK, depth: int = DEPTH, *, seed: int = 0, low: int = 115, high: int = 126
) -> torch.Tensor:
    """bf16 ``[G*R, D]`` of random e4m3 codes and exponent bytes ``low..high``.

    As an engine loads it from a checkpoint.
    """
    codes, scales = checkpoint_bytes(groups, rank, depth, seed=seed, low=low, high=high)
    factors = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
    return (codes.float() * factors).to(torch.bfloat16)


def checkpoint_bytes(
    groups: int = GROUPS, rank: int = RANK, depth: int = DEPTH, *, seed: int = 0, low: int = 115, high: int = 126
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float8_e4m3fn ``[G*R, D]`` without NaN, and scales float8_e8m0fnu ``[G*R/32, D/32]``."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups * rank, depth), generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3A
    scales = torch.randint(low, high + 1, (groups * rank // 32, depth // 32), generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def activations(rows: int, groups: int = GROUPS, depth: int = DEPTH, *, seed: int = 1) -> torch.Tensor:
    """bf16 ``[T, G, D]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, groups, depth), generator=generator).to(torch.bfloat16)


class Weighted(nn.Module):
    """A child that holds a weight and nothing else."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Hold ``weight`` as a parameter without gradient, as engines do."""
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)


class Attention(nn.Module):
    """The last part of an attention layer: its own einsum on ``wo_a``'s weight, as engines write it."""

    def __init__(self, weight: torch.Tensor, groups: int = GROUPS) -> None:
        """Take ``weight [G*R, D]``."""
        super().__init__()
        self.n_local_groups = groups
        self.wo_a = Weighted(weight)

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        """``[T, G, D]`` -> ``[T, G, R]``."""
        return torch.einsum("tgd,grd->tgr", o, self.wo_a.weight.view(self.n_local_groups, -1, o.shape[-1]))


class Stack(nn.Module):
    """Layers of :class:`Attention`."""

    def __init__(self, *layers: nn.Module) -> None:
        """Hold the layers."""
        super().__init__()
        self.layers = nn.ModuleList(layers)


def stack(count: int = 3, **shape: int) -> Stack:
    """Layers with different exact weights."""
    return Stack(*(Attention(exact_weight(**shape, seed=i), shape.get("groups", GROUPS)) for i in range(count)))


def reclaimed(weight: torch.Tensor, groups: int = GROUPS) -> Attention:
    """A layer over a copy of ``weight`` that is swapped for a tag, without the measurements of a whole reclaim."""
    layer = Attention(weight.clone(), groups)
    drop(layer)
    return layer


def drop(layer: nn.Module) -> Backing:
    """Swap the one ``wo_a`` of ``layer`` for a tag."""
    return _swap(layer, swap.drop)


def shadow(layer: nn.Module) -> Backing:
    """Serve the one ``wo_a`` of ``layer`` from its twin, with the bf16 weight kept."""
    return _swap(layer, swap.shadow)


def _swap(layer: nn.Module, how: Callable[[discover.Candidate, Backing], None]) -> Backing:
    (candidate,) = discover.discover(layer)
    twin = mr.build_twin(candidate.sites[0].get(), groups=candidate.groups)
    backing = Backing(candidate.name, twin, swap.ModelHome(candidate.sites, lambda: None))
    how(candidate, backing)
    return backing


def reclaimer(mode: str = "on", **settings: object) -> mr.Reclaimer:
    """A reclaimer with settings by name."""
    return mr.Reclaimer(settings=mr.Settings(mode=Mode(mode), **settings))  # type: ignore[arg-type]
