"""What the decode rows must show on one H200, and whether a run shows it.

The peers' figures were measured on an H200 with the same shapes, page 16, cold L2; microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .decode_cases import LONG_QUERY, SHAPES, Case

_BF16, _FP8 = "bf16", "fp8"
# the fastest of the cuDNN 9.19 / 9.27 backend and FlashInfer 0.7.4's three kernels (S_q = 1 in
# FP8: of XQA), in the order of SHAPES
_FASTEST_US = {
    (_BF16, 1): (116, 70, 44, 115, 386, 37),
    (_FP8, 1): (72, 57, 34, 68, 212, 29),
    (_BF16, 8): (225, 135, 49, 135, 457, 45),
    (_FP8, 8): (206, 113, 41, 118, 406, 33),
}
# share of the time that reading the live K and V once takes
_READ_SHARE = {
    _BF16: {"96/8": 0.9, "32/8": 0.9, "128x32/8": 0.9, "64/4": 0.8, "8/2": 0.65, "1x32/8": 0.65},
    _FP8: {"96/8": 0.85, "32/8": 0.85, "128x32/8": 0.85},
}
# time over the S_q = 1 time of the same shape
_OVER_ONE_ROW = {
    (_BF16, 8): (("96/8", "32/8"), 1.35),
    (_FP8, 8): (("96/8", "32/8"), 1.6),
    (_BF16, LONG_QUERY): (("32/8",), 2.5),
    (_FP8, LONG_QUERY): (("32/8",), 2.5),
}
_PAGES = 1.05
_HOST_US, _HOST_SHARE = 12.0, 0.5


@dataclass(frozen=True)
class Figures:
    """What a run measured of one case, seconds; None where it was not."""

    ours: float
    read: float
    host: float | None = None
    backend_host: float | None = None


@dataclass(frozen=True)
class Criterion:
    """A figure that must stay at or below its limit, or at or above it (`least`)."""

    case: Case
    what: str
    got: float
    limit: float
    least: bool = False

    @property
    def met(self) -> bool:
        return self.got >= self.limit if self.least else self.got <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6} {self.case}: {self.what} {self.got:.3g} {sign} {self.limit:.3g}"


def judge(run: Mapping[Case, Figures]) -> Iterator[Criterion]:
    """Every criterion that the run has the figures for."""
    for case, figures in run.items():
        yield from _alone(case, figures)
        yield from _beside(case, figures, run)


def _alone(case: Case, figures: Figures) -> Iterator[Criterion]:
    family = _FP8 if case.types.fp8 else _BF16
    fastest = _FASTEST_US.get((family, case.sq))
    if fastest is not None and case.page == 16:
        limit = fastest[list(SHAPES).index(case.shape)]
        yield Criterion(case, "us against the fastest peer", figures.ours * 1e6, limit)
    share = _READ_SHARE[family].get(case.shape)
    if share is not None and case.sq == 1:
        got = figures.read / figures.ours
        yield Criterion(case, "share of a cold read", got, share, least=True)
    if figures.host is not None:
        yield Criterion(case, "us of host time", figures.host * 1e6, _HOST_US)
        if figures.backend_host is not None:
            got = figures.host / figures.backend_host
            yield Criterion(case, "of the backend's host time", got, _HOST_SHARE)


def _beside(case: Case, figures: Figures, run: Mapping[Case, Figures]) -> Iterator[Criterion]:
    family = _FP8 if case.types.fp8 else _BF16
    shapes, limit = _OVER_ONE_ROW.get((family, case.sq), ((), 0.0))
    one = run.get(Case(case.shape, case.kind, 1, case.page, case.nhd))
    if case.shape in shapes and one is not None:
        yield Criterion(case, "times the S_q=1 time", figures.ours / one.ours, limit)
    wide = run.get(Case(case.shape, case.kind, case.sq, 64, case.nhd))
    if case.page == 16 and wide is not None:
        yield Criterion(case, "times the page=64 time", figures.ours / wide.ours, _PAGES)
