"""The answer of an sdpa or sdpa_fp8 graph in fp64: the contract's formulas, one head at a time.

`oracle` is the ideal result of the bound inputs (for FP8 of the quantized inputs, P unquantized).
`baseline` is the same attention in the precision an implementation has, to know its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .declaration import FP8
from .problem import Head, Problem, read_problem

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Output:
    """The expected contents of one output port.

    values: (B,Hq,Sq,Dv) for O, (B,Hq,Sq,1) for Stats, score_max and score_sum_exp, (1,1,1,1) for
    Amax_S and Amax_O; before rounding to the port's dtype; O includes scale_o and is not saturated.
    defined: same shape, False where a ragged output has no memory to write.
    exact: same shape, True where the contract prescribes the value (rows that are padding or see no
    key: O = 0, Stats = -inf, score_max = -inf, score_sum_exp = 0).
    dtype: what the port stores.
    noise: same shape, for O and Amax_O: sqrt(sum_j (p_j v_j)^2) in the port's units, the standard
    deviation that independent relative errors of P with deviation 1 would give.
    """

    values: torch.Tensor
    defined: torch.Tensor
    exact: torch.Tensor
    dtype: torch.dtype
    noise: torch.Tensor | None = None

    def stored(self) -> torch.Tensor:
        """The values in the port's dtype."""
        return quantize(self.values, self.dtype)


@dataclass(frozen=True)
class Rows:
    """One head's results: o (n,Dv) before scale_o; peak, total (n,1): the softmax's maximum and
    sum; p_max: the largest normalized probability; noise (n,Dv) as `Output.noise`."""

    o: torch.Tensor
    noise: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    keyed: torch.Tensor
    p_max: float


def quantize(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to `dtype`; FP8 saturates, the other types overflow to infinity."""
    if dtype in FP8:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


def oracle(
    graph, buffers: Mapping[int, torch.Tensor], *, precision: torch.dtype = torch.float64
) -> dict[str, Output]:
    """Expected outputs of the graph's one node, by port: O, Stats, score_max, score_sum_exp, and
    for sdpa_fp8 Amax_S and Amax_O, whether or not the graph asks for them."""
    problem = read_problem(graph, buffers)
    return _run(problem, precision, _ideal)


def baseline(graph, buffers: Mapping[int, torch.Tensor]) -> dict[str, Output]:
    """The same outputs with the roundings no fused kernel can avoid: QK^T summed as tensor cores
    do, logits, softmax and sums in fp32, unnormalized P in the io dtype (FP8: shifted up to the top
    of its range), outputs in the port's dtype."""
    problem = read_problem(graph, buffers)
    results = _run(problem, torch.float32, _rounded)
    return {
        port: Output(r.stored().to(torch.float64), r.defined, r.exact, r.dtype)
        for port, r in results.items()
    }


def _ideal(problem: Problem, head: Head) -> Rows:
    """S -> terms -> masks -> softmax with the sink as one more column -> dropout -> PV."""
    e, peak, total, keyed = _exponentials(problem, head)
    p = torch.where(total > 0, e / total, 0)
    kept = p if head.drop is None else p * head.drop * head.drop_scale
    o = kept @ head.v * problem.pv_scale
    noise = (kept.square() @ head.v.square()).sqrt() * abs(problem.pv_scale)
    return Rows(o, noise, peak, total, keyed, float(p.max()) if p.numel() else 0.0)


def _rounded(problem: Problem, head: Head) -> Rows:
    """As `_ideal`, with P = exp(s - max) in (0, 1] rounded before the second product."""
    e, peak, total, keyed = _exponentials(problem, head, tensor_core_product)
    shift = {torch.float8_e4m3fn: 2.0**8, torch.float8_e5m2: 2.0**15}.get(problem.io_dtype, 1.0)
    kept = e if head.drop is None else e * head.drop
    kept = quantize(kept * shift, problem.io_dtype).to(e.dtype)
    o = kept @ head.v / (total * shift) * (problem.pv_scale * head.drop_scale)
    p_max = float((e / total).nan_to_num().max()) if e.numel() else 0.0
    o = torch.where(keyed, o, 0)
    return Rows(o, torch.zeros_like(o), peak, total, keyed, p_max)


def tensor_core_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in fp32 as a tensor core sums it: 16 products at once, the running sum cut toward zero
    to 24 bits. The error is one-sided, so no average over rows removes it."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for first in range(0, a.shape[1], 16):
        part = slice(first, first + 16)
        total = total + a[:, part].double() @ b[part].double()
        total = (total.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)
    return total.to(a.dtype)


def _exponentials(problem: Problem, head: Head, product=torch.matmul):
    """exp(s - max) (n,m), the max and the sum of each row (n,1), and which rows see a key (n,1).

    The sink is one more column of the softmax with no row in V; without one that column is -inf,
    which also gives a batch without keys a maximum."""
    s = product(head.q, head.k.T) * problem.qk_scale
    for term in head.terms:
        s = s + term
    s = torch.where(head.visible, s, -math.inf)
    keyed = (s > -math.inf).any(-1, keepdim=True)
    column = s.new_full((s.shape[0], 1), -math.inf if head.sink is None else head.sink)
    logits = torch.cat([s, column], -1)
    peak = logits.amax(-1, keepdim=True)
    e = torch.exp(logits - torch.where(peak == -math.inf, 0, peak))
    return e[:, :-1], peak, e.sum(-1, keepdim=True), keyed


def _run(
    problem: Problem, precision: torch.dtype, attend: Callable[[Problem, Head], Rows]
) -> dict[str, Output]:
    """Every live row of every head by `attend`; all other rows as the contract prescribes."""
    rows = (problem.batch, problem.hq, problem.sq)
    kwargs = {"dtype": precision, "device": problem.device}
    o = torch.zeros(*rows, problem.dv, **kwargs)
    noise = torch.zeros_like(o)
    peak = torch.full((*rows, 1), -math.inf, **kwargs)
    total = torch.zeros(*rows, 1, **kwargs)
    live = torch.zeros(*rows, 1, dtype=torch.bool, device=problem.device)
    keyed = torch.zeros_like(live)
    p_max = 0.0
    for b, n in enumerate(problem.len_q):
        keys = problem.keys(b, precision)
        for h in range(problem.hq):
            got = attend(problem, problem.head(b, h, keys, precision))
            o[b, h, :n], peak[b, h, :n], total[b, h, :n] = got.o, got.peak, got.total
            noise[b, h, :n] = got.noise
            keyed[b, h, :n], live[b, h, :n] = got.keyed, True
            p_max = max(p_max, got.p_max)
    stats = peak + torch.log(total)
    if problem.reader.node.params.get("stats_use_log2"):
        stats = stats * LOG2_E
    dead = stats == -math.inf
    results = {
        "O": _output(problem, "O", o * problem.o_scale, live, ~keyed, noise * abs(problem.o_scale)),
        "Stats": _output(problem, "Stats", stats, live, dead),
        "score_max": _output(problem, "score_max", peak, live, dead),
        "score_sum_exp": _output(problem, "score_sum_exp", total, live, dead),
    }
    if problem.fp8:
        results["Amax_S"] = _scalar(problem, p_max, precision)
        results["Amax_O"] = _scalar(
            problem, float(o.abs().max()), precision, noise.max().reshape(1, 1, 1, 1)
        )
    return results


def _output(problem: Problem, port: str, values, live, exact, noise=None) -> Output:
    tensor = problem.reader.output(port)
    defined = live if problem.ragged(port) else torch.ones_like(live)
    dtype = torch.float32 if tensor is None else problem.reader.dtype(tensor)
    return Output(values, defined.expand_as(values), exact.expand_as(values), dtype, noise)


def _scalar(problem: Problem, value: float, precision: torch.dtype, noise=None) -> Output:
    values = torch.full((1, 1, 1, 1), value, dtype=precision, device=problem.device)
    yes = torch.ones_like(values, dtype=torch.bool)
    return Output(values, yes, yes & (value == 0.0), torch.float32, noise)
