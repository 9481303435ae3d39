"""Requested outputs: reading what is bound, writing what is expected, judging the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .declaration import FP8
from .oracle import Output, baseline, oracle
from .problem import read_problem


def read_outputs(graph, buffers: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the bound buffers of the requested outputs hold now: float64 (B,H,S,D) per port, NaN
    where a ragged output has no row."""
    problem = read_problem(graph, buffers)
    reader = problem.reader
    out = {}
    for port in reader.requested():
        tensor = reader.output(port)
        if tensor.ragged_offset is None:
            out[port] = reader.whole(tensor).to(torch.float64)
            continue
        values = torch.full(tensor.get_dim(), math.nan, dtype=torch.float64, device=problem.device)
        for b, n in enumerate(problem.len_q):
            values[b, :, :n] = reader.rows(tensor, b, n).to(torch.float64)
        out[port] = values
    return out


def write_outputs(graph, buffers: Mapping[int, torch.Tensor], results: Mapping) -> None:
    """Store `results` (port -> `Output`) in the bound buffers, only where they are defined."""
    problem = read_problem(graph, buffers)
    reader = problem.reader
    for port in reader.requested():
        tensor, values = reader.output(port), results[port].stored()
        if tensor.ragged_offset is None:
            reader.whole(tensor).copy_(values)
            continue
        for b, n in enumerate(problem.len_q):
            reader.rows(tensor, b, n).copy_(values[b, :, :n])


@dataclass(frozen=True)
class Report:
    """How far one port is from the expected values, in the port's units.

    Over defined, finite, computed positions: worst: the absolute error nearest to its limit, or
    furthest past it; limit: what it may be; at: its (b, h, s, d); baseline: the baseline's largest
    error. faults: every reason the port is wrong, empty when it is right.
    """

    port: str
    worst: float
    baseline: float
    limit: float
    at: tuple[int, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        line = f"{self.port}: worst {self.worst:.3e} at {self.at}, baseline {self.baseline:.3e}"
        return "; ".join([f"{line}, limit {self.limit:.3e}", *self.faults])


def compare(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, Output],
    base: Mapping[str, Output],
    *,
    factor: float = 2.0,
    io_dtype: torch.dtype = torch.bfloat16,
) -> list[Report]:
    """Assert that every port of `actual` (as `read_outputs` gives them) is right, report how right.

    A port is right when, over its defined positions, no value is NaN, -inf stands exactly where it
    is expected, prescribed values (`Output.exact`) are exact, and the error of the computed ones is
    at most `factor` times the baseline's plus `floor`: at the worst position, and in root mean
    square over the port, where the floor shrinks with the number of rows. `io_dtype` is q's type,
    the precision P may have.
    """
    reports = [
        _judge(port, values, expected, base[port], factor, io_dtype)
        for port, values in actual.items()
    ]
    wrong = [str(r) for r in reports if r.faults]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return reports


def check(graph, buffers: Mapping[int, torch.Tensor], *, factor: float = 2.0) -> list[Report]:
    """`compare` what the bound outputs hold now with the oracle."""
    io_dtype = read_problem(graph, buffers).io_dtype
    expected, base = oracle(graph, buffers), baseline(graph, buffers)
    actual = read_outputs(graph, buffers)
    return compare(actual, expected, base, factor=factor, io_dtype=io_dtype)


def floor(port: str, outputs: Mapping[str, Output], io_dtype: torch.dtype) -> torch.Tensor:
    """Error allowed at each position whatever the baseline's luck, in the shape of the port.

    O and Amax_O: a unit roundoff of the stored type, and two deviations of what unit roundoffs of P
    give (few keys: the baseline may hit representable probabilities where a different running
    maximum does not). The fp32 ports: 2^-18 of max(1, scale), for exp2/log2 units and the order of
    sums; 2^-11 with FP8 operands, whose products Hopper sums in about 13 bits.
    """
    expected = outputs[port]
    if port in ("O", "Amax_O"):
        stored, p = torch.finfo(expected.dtype), torch.finfo(io_dtype)
        rounding = (expected.values.abs() + stored.smallest_normal) * stored.eps / 2
        return (rounding + expected.noise * p.eps).to(torch.float64)
    share = 2.0**-11 if io_dtype in FP8 else 2.0**-18
    return torch.full_like(expected.values, max(1.0, _scale(port, outputs)) * share)


def _scale(port: str, outputs: Mapping[str, Output]) -> float:
    """Largest finite value; of a score_sum_exp times the scores', for it is a sum of exponentials
    of their rounded differences."""
    largest = _largest_finite(outputs[port].values)
    if port == "score_sum_exp":
        largest *= max(1.0, _largest_finite(outputs["score_max"].values))
    return largest


def _largest_finite(values: torch.Tensor) -> float:
    return float(torch.where(values.isfinite(), values.abs(), 0).max()) if values.numel() else 0.0


def _one_sided(port: str, scale: float) -> float:
    """Error of the fp32 ports that no average over rows removes: scale * log2(e) and ln(2), with
    which a kernel that works in powers of two converts there and back, are rounded once each, and
    so is their product with the row's maximum."""
    return 0.0 if port in ("O", "Amax_O") else 3 * 2.0**-24 * scale


def _judge(port, actual, outputs: Mapping[str, Output], base: Output, factor, io_dtype) -> Report:
    expected = outputs[port]
    want = expected.values.to(torch.float64)
    if expected.dtype in FP8:
        limit = torch.finfo(expected.dtype).max
        want = want.clamp(-limit, limit)
    if actual.shape != want.shape:
        return Report(port, math.inf, 0, 0, (), (f"shape {tuple(actual.shape)}",))
    got, faults = actual.to(torch.float64), []
    defined = expected.defined

    def fault(what: str, where: torch.Tensor) -> None:
        where = where & defined
        if bool(where.any()):
            first = tuple(where.nonzero()[0].tolist())
            faults.append(f"{int(where.sum())} {what}, first at {first}: {float(got[first])}")

    fault("NaN", got.isnan())
    fault("wrong infinities", (got.isinf() | want.isinf()) & (got != want) & ~got.isnan())
    fault("prescribed values missed", expected.exact & (got != want) & ~got.isnan())
    judged = defined & ~expected.exact & want.isfinite() & got.isfinite()
    error = torch.where(judged, (got - want).abs(), 0)
    base_error = torch.where(judged, (base.values - want).abs(), 0).nan_to_num(posinf=0)
    worst_base = float(base_error.max()) if error.numel() else 0.0
    slack = floor(port, outputs, io_dtype)
    limit = factor * worst_base + slack
    at = _largest(error / limit)
    worst, allowed = (float(error[at]), float(limit[at])) if at else (0.0, 0.0)
    if worst > allowed:
        faults.append(f"error {worst:.3e} over the limit")
    count = max(1, int(judged.sum()))
    rows = max(1, int(judged[..., 0].sum()))
    rms, base_rms, floor_rms = (
        float(torch.where(judged, x, 0).square().sum() / count) ** 0.5
        for x in (error, base_error, slack)
    )
    spare = max(floor_rms / rows**0.5, _one_sided(port, _scale(port, outputs)))
    if rms > factor * base_rms + spare:
        faults.append(f"rms error {rms:.3e}, the baseline's is {base_rms:.3e}")
    return Report(port, worst, worst_base, allowed, at, tuple(faults))


def _largest(values: torch.Tensor) -> tuple[int, ...]:
    """Where the largest value is; () of nothing."""
    if not values.numel():
        return ()
    index = torch.tensor(int(values.argmax()))
    return tuple(int(i) for i in torch.unravel_index(index, values.shape))
