"""Which tokens of packed sequences each rank holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Sharding:
    """Sequences cut into parts, the parts dealt to ranks.

    lengths: tokens of each whole sequence. ranks: how many share them. balanced: every rank holds
    an early and a late part of each sequence (parts r and 2 * ranks - 1 - r of 2 * ranks), so that
    causal work is even; otherwise rank r holds part r of `ranks`. A rank's tokens are packed
    sequence by sequence, each sequence's in ascending order. Lengths need not divide.
    """

    lengths: tuple[int, ...]
    ranks: int
    balanced: bool = True

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "lengths", tuple(map(operator.index, self.lengths)))
            object.__setattr__(self, "ranks", operator.index(self.ranks))
        except TypeError as error:
            raise TypeError(f"lengths, ranks: must be integers: {error}") from None
        if not self.lengths or min(self.lengths) < 0:
            raise ValueError(f"lengths: must be 0 or more each, got {list(self.lengths)}")
        if self.ranks < 1:
            raise ValueError(f"ranks: must be 1 or more, got {self.ranks}")

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The parts of every sequence that a rank holds, ascending."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank: must be from 0 to {self.ranks - 1}, got {rank}")
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def part_lengths(self, part: int) -> tuple[int, ...]:
        """Tokens of one part of each sequence."""
        return tuple(len(self._range(length, part)) for length in self.lengths)

    def lengths_of(self, rank: int) -> tuple[int, ...]:
        """Tokens of each sequence that a rank holds."""
        parts = [self.part_lengths(part) for part in self.parts_of(rank)]
        return tuple(sum(lengths) for lengths in zip(*parts, strict=True))

    def tokens_of(self, rank: int) -> int:
        return sum(self.lengths_of(rank))

    def positions(self, rank: int) -> torch.Tensor:
        """(tokens_of(rank),) int64: where each of a rank's tokens is among all packed tokens."""
        ranges = [
            torch.arange(start + tokens.start, start + tokens.stop)
            for start, length in zip(offsets(self.lengths), self.lengths, strict=False)
            for tokens in (self._range(length, part) for part in self.parts_of(rank))
        ]
        return torch.cat(ranges)

    def shard(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's share of a tensor whose first axis is all packed tokens."""
        if len(tokens) != sum(self.lengths):
            raise ValueError(f"tokens: has {len(tokens)} rows, want {sum(self.lengths)}")
        return tokens[self.positions(rank).to(tokens.device)]

    def _range(self, length: int, part: int) -> range:
        parts = 2 * self.ranks if self.balanced else self.ranks
        return range(part * length // parts, (part + 1) * length // parts)


def offsets(lengths: Iterable[int]) -> list[int]:
    """Prefix sums with a leading 0."""
    return [0, *accumulate(lengths)]


@functools.lru_cache(maxsize=256)
def cu_seqlens(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Prefix sums of lengths as an int32 tensor; the same object for the same arguments."""
    return torch.tensor(offsets(lengths), dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def gather_index(sharding: Sharding, device: torch.device) -> torch.Tensor:
    """Where each token, rank by rank in their packed order, is among all packed tokens."""
    return torch.cat([sharding.positions(r) for r in range(sharding.ranks)]).to(device)


@functools.lru_cache(maxsize=256)
def scatter_index(sharding: Sharding, device: torch.device) -> torch.Tensor:
    """Inverse of `gather_index`."""
    return torch.argsort(gather_index(sharding, device))


@functools.lru_cache(maxsize=256)
def half_index(sharding: Sharding, rank: int, half: int, device: torch.device) -> torch.Tensor:
    """Of a balanced rank's packed tokens those of its early (0) or late (1) parts."""
    early, late = (sharding.part_lengths(part) for part in sharding.parts_of(rank))
    starts = offsets(sharding.lengths_of(rank))
    if half:
        ranges = [(s + a, s + a + b) for s, a, b in zip(starts, early, late, strict=False)]
    else:
        ranges = [(s, s + a) for s, a in zip(starts, early, strict=False)]
    return torch.cat([torch.arange(*bounds) for bounds in ranges]).to(device)
