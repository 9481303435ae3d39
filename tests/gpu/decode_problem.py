"""A graph of few query rows over paged or dense K and V, its memory, and the row that serves it.

Memory that nobody may trust holds what a test puts there: table entries past the live pages,
pages that no table names, the tail of a sequence's last page, query rows past their length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cudnn
import torch

import cudnn_frost
from tests.gpu.serving import plan_names, plans_of, run_plan
from tests.reference.compare import compare, read_outputs
from tests.reference.hand import TYPES
from tests.reference.oracle import baseline, oracle

DEVICE = "cuda"
BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = {BF16: "frost_sdpa_fwd_decode_sm90", F16: "frost_sdpa_fwd_decode_sm90"}
ROWS |= dict.fromkeys((E4M3, E5M2), "frost_sdpa_fwd_decode_sm90_fp8")
GARBAGE = (-1, 2**31 - 1, -(2**31), 1 << 20, 0)
NAN, INF = float("nan"), float("inf")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SCALES = {
    "descale_q": 0.5,
    "descale_k": 2.0,
    "descale_v": 0.5,
    "descale_s": 1 / 256,
    "scale_s": 256.0,
    "scale_o": 1.0,
}

# (port, (N, R) positions of the rows, (N, H, R, D), generator) -> fp32 of that shape
Values = Callable[[str, torch.Tensor, tuple[int, ...], torch.Generator], torch.Tensor]


def normal(port: str, position: torch.Tensor, shape, generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=position.device)


def band(
    dtype: torch.dtype, left: int | None = None, right: int | None = None, bottom_right=False
) -> dict[str, Any]:
    """The mask's keywords, as the op of that element type spells them."""
    prefix = "" if dtype.itemsize == 1 else "diagonal_band_"
    words: dict[str, Any] = {f"{prefix}left_bound": left, f"{prefix}right_bound": right}
    words = {name: bound for name, bound in words.items() if bound is not None}
    if bottom_right:
        words["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    return words


CAUSAL_BR = {"use_causal_mask_bottom_right": True}


@dataclass(frozen=True)
class Form:
    """What is declared, and the first lengths.

    lengths, rows: keys and query rows of each sequence; rows None: sq of each.
    page: keys of a page, None: K and V are dense. capacity: keys that the tables, or dense K and V,
    hold for a sequence; None: the longest length. maximum: paged_attention_max_seq_len_kv.
    pool: 'nhd' or 'hnd' pages, or 'shared': K and V of a page side by side in one pool.
    page_stride, pages: elements from page to page of K and V in one storage, and their number.
    o_pad: elements between the tokens of O. sink: a logit per query head. scales: FP8's, where
    they are not the usual ones. words: further keywords of the op.
    """

    dtype: torch.dtype = BF16
    o_dtype: torch.dtype | None = None
    lengths: tuple[int, ...] = (33, 200, 1, 129)
    rows: tuple[int, ...] | None = None
    sq: int = 1
    heads: tuple[int, int] = (8, 2)
    d: tuple[int, int] = (128, 128)
    page: int | None = 16
    capacity: int | None = None
    maximum: int | None = None
    pool: str = "nhd"
    page_stride: int | None = None
    pages: int | None = None
    o_pad: int = 0
    padding: bool = True
    stats: bool = True
    sink: tuple[float, ...] | None = None
    scales: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    values: Values = normal

    @property
    def fp8(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def o_type(self) -> torch.dtype:
        return self.o_dtype or (BF16 if self.fp8 else self.dtype)

    @property
    def row(self) -> str:
        return ROWS[self.dtype]

    @property
    def keys(self) -> int:
        """What K and V hold of a sequence."""
        return self.capacity or max(self.lengths)

    @property
    def size(self) -> int:
        return self.page or self.keys

    @property
    def columns(self) -> int:
        """Of a table; dense K and V are one page a sequence."""
        return -(-self.keys // self.size)

    @property
    def limit(self) -> int:
        """Keys that a sequence can have."""
        most = self.columns * self.size
        return most if self.maximum is None else min(most, self.maximum)


def element_bits(value: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(value).to(dtype).view(_INTEGER[dtype.itemsize]).item())


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: float8 can be neither filled nor indexed."""
    return x.view(_INTEGER[x.element_size()])


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Decode:
    """A form's graph and buffers. `plans` are the row's, best first; `pack` and `uid` what is bound
    by uid and the uids by name; `live` the keys of each sequence."""

    def __init__(self, form: Form, handle: Any, plan: bool = True) -> None:
        self.form, self.handle = form, handle
        self.pack: dict[int, torch.Tensor] = {}
        self.uid: dict[str, int] = {}
        self.tensors: dict[str, Any] = {}
        self._allocate()
        self.set_lengths(form.lengths, form.rows)
        options = {} if handle is None else {"handle": handle}
        self.graph = cudnn_frost.Graph(
            io_data_type=TYPES[form.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            **options,
        )
        self._declare()
        if plan:
            self.plan()

    # -- memory -----------------------------------------------------------------------------------

    def _allocate(self) -> None:
        form = self.form
        b, (h_q, h_kv) = len(form.lengths), form.heads
        used = b * form.columns
        self.pages = form.pages or (used + 3 if form.page else b)
        self._pools(h_kv)
        self.q = torch.empty(b, form.sq, h_q, form.d[0], dtype=form.dtype, device=DEVICE)
        self.q = self.q.transpose(1, 2)
        token = h_q * form.d[1] + form.o_pad
        self.o_arena = torch.empty(b * form.sq * token, dtype=form.o_type, device=DEVICE)
        stride = (form.sq * token, form.d[1], token, 1)
        self.o = self.o_arena.as_strided((b, h_q, form.sq, form.d[1]), stride)
        self.stats = torch.empty(b, h_q, form.sq, 1, device=DEVICE)
        self.amax = {n: torch.empty(1, 1, 1, 1, device=DEVICE) for n in ("Amax_S", "Amax_O")}
        scales = {**_SCALES, **form.scales} if form.fp8 else {}
        self.scales = {n: torch.full((1, 1, 1, 1), x, device=DEVICE) for n, x in scales.items()}
        column = {"dtype": torch.int32, "device": DEVICE}
        self.seq_q, self.seq_kv = (torch.empty(b, 1, 1, 1, **column) for _ in range(2))
        self.tables = {p: torch.empty(b, 1, form.columns, 1, **column) for p in "kv"}
        # the last page is in use, wherever it is; K and V have pages of their own
        generator = torch.Generator().manual_seed(0)
        last = torch.tensor([self.pages - 1])
        self.order = {
            p: torch.cat([last, torch.randperm(self.pages - 1, generator=generator)]) for p in "kv"
        }
        if not form.page:
            self.order = {p: torch.arange(b) for p in "kv"}

    def _pools(self, heads: int) -> None:
        """K and V as [pages, H, size, D], and the arenas that they are views of."""
        form, size = self.form, self.form.size
        kind = {"dtype": form.dtype, "device": DEVICE}
        if form.page_stride:
            arena = torch.empty(self.pages * form.page_stride, **kind)
            self.arenas = [arena]
            self.k, self.v = (
                arena.as_strided(
                    (self.pages, heads, size, d), (form.page_stride, d, heads * d, 1), start
                )
                for d, start in zip(form.d, (0, form.page_stride // 2), strict=True)
            )
        elif form.pool == "shared":
            arena = torch.empty(self.pages, 2, size, heads, form.d[0], **kind)
            self.arenas = [arena]
            self.k, self.v = arena[:, 0].transpose(1, 2), arena[:, 1].transpose(1, 2)
        elif form.pool == "hnd":
            self.k, self.v = (torch.empty(self.pages, heads, size, d, **kind) for d in form.d)
            self.arenas = [self.k, self.v]
        else:
            self.arenas = [torch.empty(self.pages, size, heads, d, **kind) for d in form.d]
            self.k, self.v = (arena.transpose(1, 2) for arena in self.arenas)

    def set_lengths(
        self,
        lengths: tuple[int, ...],
        rows: tuple[int, ...] | None = None,
        *,
        dead: float = NAN,
        garbage: tuple[int, ...] = GARBAGE,
        seed: int = 0,
    ) -> None:
        """Other lengths, tables and data in the same memory; the same seed gives the same data.

        dead: what memory that nobody may trust holds. garbage: table entries past the live pages.
        """
        form = self.form
        generator = torch.Generator(DEVICE).manual_seed(seed)
        bits = element_bits(dead, form.dtype)
        for arena in self.arenas:
            as_integers(arena).fill_(bits)
        self.live = [max(0, min(n, form.limit)) for n in lengths]
        live = torch.tensor(self.live)
        counts = (live + form.size - 1) // form.size
        owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        column = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
        keys = column[:, None] * form.size + torch.arange(form.size)
        is_live = keys < live[owner][:, None]
        for port, pool in (("k", self.k), ("v", self.v)):
            ids = self.order[port][: len(owner)] if form.page else owner
            self._fill_table(port, owner, column, ids, garbage)
            shape = (len(owner), *pool.shape[1:])
            data = form.values(port, keys.to(DEVICE), shape, generator).to(form.dtype)
            hidden = ~is_live.to(DEVICE)[:, None, :, None]
            as_integers(pool)[ids.to(DEVICE)] = as_integers(data).masked_fill(hidden, bits)
        self._fill_q(rows, bits, generator)
        self.seq_kv.copy_(torch.tensor(lengths).view(-1, 1, 1, 1))

    def _fill_table(self, port: str, owner, column, ids, garbage: tuple[int, ...]) -> None:
        table = self.tables[port]
        b, _, columns, _ = table.shape
        entries = torch.tensor(garbage)[torch.arange(b * columns) % len(garbage)].view(b, columns)
        entries[owner, column] = ids
        table.copy_(entries.view(table.shape))

    def _fill_q(self, rows: tuple[int, ...] | None, bits: int, generator) -> None:
        form, b = self.form, len(self.live)
        row = torch.arange(form.sq).expand(b, -1)
        counts = torch.tensor(rows if rows is not None else (form.sq,) * b)
        self.seq_q.copy_(counts.view(-1, 1, 1, 1))
        data = form.values("q", row.to(DEVICE), tuple(self.q.shape), generator).to(form.dtype)
        hidden = (row >= counts[:, None]).to(DEVICE)[:, None, :, None]
        as_integers(self.q).copy_(as_integers(data).masked_fill(hidden, bits))

    # -- the graph --------------------------------------------------------------------------------

    def tensor(self, name: str, value: torch.Tensor) -> Any:
        uid = self.uid[name] = len(self.pack) + 1
        self.pack[uid] = value
        dim, stride = list(value.shape), list(value.stride())
        kind = TYPES[value.dtype]
        made = self.graph.tensor(dim=dim, stride=stride, data_type=kind, name=name, uid=uid)
        self.tensors[name] = made
        return made

    def _output(self, name: str, tensor: Any, value: torch.Tensor) -> None:
        uid = self.uid[name] = len(self.pack) + 1
        self.pack[uid] = value
        tensor.set_output(True).set_uid(uid).set_data_type(TYPES[value.dtype])
        tensor.set_dim(list(value.shape)).set_stride(list(value.stride()))

    def _declare(self) -> None:
        form = self.form
        words: dict[str, Any] = {"attn_scale": form.d[0] ** -0.5, "generate_stats": form.stats}
        if form.padding:
            words["use_padding_mask"] = True
            words["seq_len_q"] = self.tensor("seq_len_q", self.seq_q)
            words["seq_len_kv"] = self.tensor("seq_len_kv", self.seq_kv)
        if form.page:
            for port in "kv":
                name = f"paged_attention_{port}_table"
                words[name] = self.tensor(f"{port}_table", self.tables[port])
            if form.maximum is not None:
                words["paged_attention_max_seq_len_kv"] = form.maximum
        if form.sink is not None:
            sink = torch.tensor(form.sink, device=DEVICE).view(1, -1, 1, 1)
            words["sink_token"] = self.tensor("sink_token", sink)
        words.update({name: self.tensor(name, value) for name, value in self.scales.items()})
        words.update(form.words)
        op = self.graph.sdpa_fp8 if form.fp8 else self.graph.sdpa
        o, stats, *amax = op(*(self.tensor(p, getattr(self, p)) for p in "qkv"), **words)
        self._output("o", o, self.o)
        if stats is not None:
            self._output("stats", stats, self.stats)
        for tensor, (name, value) in zip(amax, self.amax.items(), strict=False):
            self._output(name, tensor, value)

    def plan(self) -> None:
        self.graph.validate()
        self.graph.create_execution_plans([cudnn.heur_mode.A])
        self.plans = plans_of(self.graph, self.form.row)
        assert self.plans, f"{plan_names(self.graph)}\n{self.graph.explain()}"

    def declines(self) -> list[str]:
        """Why the row does not take this graph."""
        verdict = next(v for v in self.graph.explain().verdicts if v.row.name == self.form.row)
        return [decline.render() for decline in verdict.declines]

    # -- running ----------------------------------------------------------------------------------

    def poison(self) -> None:
        """Outputs as no run leaves them."""
        for x in (self.o_arena, self.stats, *self.amax.values()):
            x.view(torch.uint8).fill_(0xFF)

    def run(self, index: int | None = None, fill: int = 0xFF) -> None:
        """Into poisoned outputs; by the row's first plan if not said otherwise."""
        self.poison()
        index = self.plans[0] if index is None else index
        run_plan(self.graph, index, self.form.row, self.pack, self.handle, fill)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Copies of what is bound as an output."""
        values = {"o": self.o, "stats": self.stats, **self.amax}
        return {name: x.clone() for name, x in values.items() if name in self.uid}

    def answer(self, index: int | None = None, fill: int = 0xFF) -> dict[str, torch.Tensor]:
        self.run(index, fill)
        return self.outputs()

    def verify(self) -> None:
        """What the outputs hold now against the oracle."""
        expected, base = oracle(self.graph, self.pack), baseline(self.graph, self.pack)
        self._compare(expected, base)

    def check(self) -> None:
        """Every plan of the row against the oracle."""
        expected, base = oracle(self.graph, self.pack), baseline(self.graph, self.pack)
        for index in self.plans:
            try:
                self.run(index)
                self._compare(expected, base)
            except AssertionError as error:
                error.add_note(f"in {self.graph.get_plan_name_at_index(index)}")
                raise

    def _compare(self, expected, base) -> None:
        actual = read_outputs(self.graph, self.pack)
        compare(actual, expected, base, io_dtype=self.form.dtype)

    def operands(self, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Float64 q (H_q, rows, D), k and v (H_q, keys, D) of one sequence, descaled."""
        form = self.form
        group = form.heads[0] // form.heads[1]
        sides = [self.q[b, :, : int(self.seq_q[b])].double()]
        for port, pool in (("k", self.k), ("v", self.v)):
            count = -(-self.live[b] // form.size)
            ids = self.tables[port][b, 0, :count, 0].long()
            ids = ids if form.page else torch.tensor([b], device=DEVICE)
            pages = as_integers(pool)[ids].view(form.dtype).transpose(0, 1)
            side = pages.reshape(form.heads[1], -1, pool.shape[3])[:, : self.live[b]]
            sides.append(side.double().repeat_interleave(group, 0))
        scales = {name: float(x) for name, x in self.scales.items()}
        factors = (scales.get(f"descale_{port}", 1.0) for port in "qkv")
        return tuple(x * factor for x, factor in zip(sides, factors, strict=True))  # type: ignore


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, x in wanted.items():
        assert torch.equal(as_bytes(found[name]), as_bytes(x)), f"{name} differs"
