"""Which tokens of packed sequences each rank holds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

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
    _tensors: dict[tuple[Any, ...], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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

    def held(self, rank: int, half: int | None = None) -> tuple[int, ...]:
        """Tokens of each sequence that a rank holds, in its early (0) or late (1) parts alone."""
        if half is None:
            return self.lengths_of(rank)
        return self.part_lengths(self.parts_of(rank)[half])

    # device tensors, made once and kept as long as this object, whatever stream reads them

    def cu_seqlens(self, lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Prefix sums of lengths, int32."""
        return self._kept(
            ("cu_seqlens", lengths, device),
            lambda: torch.tensor(offsets(lengths), dtype=torch.int32),
        )

    def gather_index(self, device: torch.device) -> torch.Tensor:
        """Where each token, rank by rank in their packed order, is among all packed tokens."""
        return self._kept(
            ("gather", device),
            lambda: torch.cat([self.positions(rank) for rank in range(self.ranks)]),
        )

    def scatter_index(self, device: torch.device) -> torch.Tensor:
        """Inverse of `gather_index`."""
        return self._kept(
            ("scatter", device), lambda: torch.argsort(self.gather_index(torch.device("cpu")))
        )

    def rows(
        self,
        rank: int,
        half: int | None,
        wanted: tuple[bool, ...] | None,
        device: torch.device,
    ) -> torch.Tensor | None:
        """Of a rank's packed tokens those of one half and of the wanted sequences; None = all."""
        wanted = wanted if wanted is not None else (True,) * len(self.lengths)
        if half is None and all(wanted):
            return None

        def made() -> torch.Tensor:
            early = self.held(rank, 0) if half is not None else (0,) * len(self.lengths)
            ranges = [torch.arange(0)]
            rest = zip(offsets(self.held(rank)), early, self.held(rank, half), wanted, strict=False)
            for start, before, length, is_wanted in rest:
                first = start + (before if half == 1 else 0)
                ranges.append(torch.arange(first, first + length * is_wanted))
            return torch.cat(ranges)

        return self._kept(("rows", rank, half, wanted, device), made)

    def _kept(self, key: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = self._tensors.get(key)
        if found is None:
            # usable in whatever mode a later caller is
            with torch.inference_mode(False):
                found = self._tensors.setdefault(key, make().to(key[-1]))
        return found

    def _range(self, length: int, part: int) -> range:
        parts = 2 * self.ranks if self.balanced else self.ranks
        return range(part * length // parts, (part + 1) * length // parts)


def offsets(lengths: Iterable[int]) -> list[int]:
    """Prefix sums with a leading 0."""
    return [0, *accumulate(lengths)]
