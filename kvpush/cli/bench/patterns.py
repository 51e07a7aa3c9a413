"""Bytes that tell a transfer, a layer and a position from every other, made and compared on the device that they are
on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

CANARY = 0xEE  # what nobody may write


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a whole cache."""

    num_compared: int
    num_wrong: int  # in the blocks of the transfer
    num_touched: int  # outside them

    @property
    def is_right(self) -> bool:
        return not self.num_wrong and not self.num_touched


def clear(cache: Mapping[str, torch.Tensor]) -> None:
    """Canaries everywhere."""
    for layer in cache.values():
        layer.fill_(CANARY)
    _synchronize(cache)


def paint(cache: Mapping[str, torch.Tensor], seed: int, block_ids: Sequence[int]) -> None:
    """Position ``i`` of the transfer into block ``block_ids[i]`` of every layer. Does not wait for the device."""
    for number, layer in enumerate(cache.values()):
        layer[_index(layer, block_ids)] = _pattern(layer, seed, number, len(block_ids))


def compare(cache: Mapping[str, torch.Tensor], seed: int, block_ids: Sequence[int]) -> Comparison:
    """Every byte of the cache, with what :func:`clear` and :func:`paint` of the same arguments leave."""
    num_compared = num_wrong = num_touched = 0
    for number, layer in enumerate(cache.values()):
        index = _index(layer, block_ids)
        num_wrong += int((layer[index] != _pattern(layer, seed, number, len(block_ids))).sum())
        others = torch.ones(len(layer), dtype=torch.bool, device=layer.device)
        others[index] = False
        num_touched += int((layer[others] != CANARY).sum())
        num_compared += layer.numel()
    return Comparison(num_compared, num_wrong, num_touched)


def _index(layer: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(block_ids), dtype=torch.int64, device=layer.device)


def _pattern(layer: torch.Tensor, seed: int, number: int, count: int) -> torch.Tensor:
    """Never a canary."""
    block = layer[0]
    inside = torch.arange(block.numel(), device=layer.device) * 31
    positions = torch.arange(count, device=layer.device) * 13
    values = (inside[None, :] + positions[:, None] + seed * 17 + number * 7) % 233
    return values.to(torch.uint8).view(count, *block.shape)


def _synchronize(cache: Mapping[str, torch.Tensor]) -> None:
    if any(layer.is_cuda for layer in cache.values()):
        torch.cuda.synchronize()
