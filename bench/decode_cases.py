"""What the decode benchmark runs: shapes, operands in pages, and a reference in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

SPARE_PAGES = 64
# descale_q, descale_k, descale_v, descale_s, scale_s
SCALES = {"descale_q": 0.5, "descale_k": 2.0, "descale_v": 0.5, "scale_s": 256.0}
SCALES["descale_s"] = 1 / SCALES["scale_s"]
# of an 8-bit O, whose values would be subnormal
SCALE_O = 64.0


@dataclass(frozen=True)
class Shape:
    """Sequences of `keys` (least, most) tokens in pages."""

    b: int
    h_q: int
    h_kv: int
    keys: tuple[int, int] = (2048, 4096)
    d: int = 128

    def __str__(self) -> str:
        return f"{self.h_q}/{self.h_kv} B={self.b}"


SHAPES = {
    "96/8": Shape(32, 96, 8),
    "64/4": Shape(32, 64, 4),
    "8/2": Shape(32, 8, 2),
    "32/8": Shape(32, 32, 8),
    "128x32/8": Shape(128, 32, 8),
    "1x32/8": Shape(1, 32, 8, (32768, 32768)),
}
LONG_QUERY = 64
LONG_QUERY_SHAPE = "32/8"


@dataclass(frozen=True)
class Kind:
    """Element types, and the relative error of O that is still right.

    Random data: rounding P to bf16 costs about 2e-3, O to e4m3 about 2.6e-2.
    """

    io: torch.dtype
    o: torch.dtype
    tolerance: float

    @property
    def fp8(self) -> bool:
        return self.io.itemsize == 1

    @property
    def scale_o(self) -> float:
        return SCALE_O if self.o.itemsize == 1 else 1.0


KINDS = {
    "bf16": Kind(torch.bfloat16, torch.bfloat16, 1e-2),
    "e4m3-bf16": Kind(torch.float8_e4m3fn, torch.bfloat16, 3e-2),
    "e4m3-e4m3": Kind(torch.float8_e4m3fn, torch.float8_e4m3fn, 5e-2),
}


@dataclass(frozen=True)
class Case:
    """One problem; more than one query row means a bottom-right causal mask.

    shape, kind: keys of `SHAPES` and `KINDS`. nhd: token-major pages, else head-major ones.
    """

    shape: str
    kind: str
    sq: int
    page: int
    nhd: bool = False

    @property
    def dims(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def types(self) -> Kind:
        return KINDS[self.kind]

    @property
    def causal(self) -> bool:
        return self.sq > 1

    @property
    def columns(self) -> int:
        """Of the page table."""
        return -(-self.dims.keys[1] // self.page)

    def __str__(self) -> str:
        pool = "NHD" if self.nhd else "HND"
        return f"{self.kind} {self.dims} S_q={self.sq} page={self.page} {pool}"


def cases(
    shapes: list[str], kinds: list[str], sq: list[int], pages: list[int], nhd: bool
) -> Iterator[Case]:
    """Every combination; the long query at its one shape alone."""
    for kind in kinds:
        for rows in sq:
            for shape in shapes:
                if rows == LONG_QUERY and shape != LONG_QUERY_SHAPE:
                    continue
                for page in pages:
                    yield Case(shape, kind, rows, page, nhd)


@dataclass
class Operands:
    """What is bound. k, v: [pages, H, page, D] views. table: [B, 1, columns, 1], its dead entries
    0. lengths, rows: [B, 1, 1, 1]. scales: [1, 1, 1, 1] each, of FP8 alone."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    scales: dict[str, torch.Tensor]
    host_lengths: list[int]

    @property
    def live_bytes(self) -> int:
        """Of K and V up to each length."""
        token = sum(x.shape[1] * x.shape[3] * x.element_size() for x in (self.k, self.v))
        return sum(self.host_lengths) * token


def _normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Unit normal, drawn in 16 bits."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(dtype)


def operands(case: Case, seed: int = 0) -> Operands:
    """Same lengths for every kind, query and page size of a shape; pages in random order."""
    dims, types = case.dims, case.types
    generator = torch.Generator().manual_seed(seed)
    low, high = dims.keys
    lengths = torch.randint(low, high + 1, (dims.b,), generator=generator)
    counts = (-(-lengths // case.page)).tolist()
    total = sum(counts) + SPARE_PAGES
    ids = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.zeros(dims.b, 1, case.columns, 1, dtype=torch.int32)
    start = 0
    for b, count in enumerate(counts):
        table[b, 0, :count, 0] = ids[start : start + count]
        start += count

    def pool() -> torch.Tensor:
        if case.nhd:
            return _normal(total, case.page, dims.h_kv, dims.d, dtype=types.io).transpose(1, 2)
        return _normal(total, dims.h_kv, case.page, dims.d, dtype=types.io)

    q = _normal(dims.b, case.sq, dims.h_q, dims.d, dtype=types.io).transpose(1, 2)
    scales = {**SCALES, "scale_o": types.scale_o} if types.fp8 else {}
    column = (dims.b, 1, 1, 1)
    return Operands(
        q=q,
        k=pool(),
        v=pool(),
        o=torch.empty_like(q, dtype=types.o),
        table=table.cuda(),
        lengths=lengths.to(torch.int32).view(column).cuda(),
        rows=torch.full(column, case.sq, dtype=torch.int32, device="cuda"),
        scales={n: torch.full((1, 1, 1, 1), x, device="cuda") for n, x in scales.items()},
        host_lengths=lengths.tolist(),
    )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats have no index kernels; their bytes do."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _gather(pool: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """(H, count, D) in fp32: the first `count` tokens of these pages."""
    pages = _bytes(pool)[ids].view(pool.dtype).float()
    return pages.transpose(0, 1).reshape(pool.shape[1], -1, pool.shape[3])[:, :count]


def reference(case: Case, x: Operands, causal: bool) -> torch.Tensor:
    """O before scale_o, in fp32 out of the operands as they are."""
    dims, s = case.dims, SCALES if case.types.fp8 else {}
    qk_scale = s.get("descale_q", 1.0) * s.get("descale_k", 1.0) / math.sqrt(dims.d)
    pv_scale = s.get("descale_v", 1.0) * s.get("scale_s", 1.0) * s.get("descale_s", 1.0)
    out = torch.empty(x.o.shape, device="cuda")
    for b, n in enumerate(x.host_lengths):
        ids = x.table[b, 0, : -(-n // case.page), 0].long()
        k, v = _gather(x.k, ids, n), _gather(x.v, ids, n)
        q = x.q[b].float().reshape(dims.h_kv, -1, dims.d)
        scores = (q @ k.transpose(1, 2)) * qk_scale
        if causal:
            last = torch.arange(case.sq, device="cuda")[:, None] + (n - case.sq)
            hidden = torch.arange(n, device="cuda") > last
            scores.view(dims.h_q, case.sq, n).masked_fill_(hidden, -math.inf)
        out[b] = (scores.softmax(-1) @ v * pv_scale).view(dims.h_q, case.sq, dims.d)
    return out
