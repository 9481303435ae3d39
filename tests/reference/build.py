"""From a drawn `Case` to a declared graph with bound buffers.

Every arena starts as 0xFF bytes, which is NaN in each float type; live positions get data. So
memory that nobody may trust (past lengths, page tails, dead pages, gaps, capacity tails, margins)
is NaN in inputs, and in outputs whatever is not 0xFF was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .declaration import DTYPES, FP8
from .draws import Case, Ragged
from .oracle import quantize

MARGIN_BYTES = 256
GARBAGE_PAGES = (-1, 0, 2**31 - 1, -(2**31), 1 << 20)


@dataclass(frozen=True)
class Place:
    """Where the rows of a (B,H,S,D) tensor lie in its arena, in elements from the arena's start.

    rows: how many rows of each batch are live (inputs) or writable (outputs); origins: start of
    each batch, ragged or not.
    """

    arena: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    base: int
    origins: tuple[int, ...]
    rows: tuple[int, ...]

    def index(self, b: int) -> torch.Tensor:
        """(H, rows[b], D) flat positions."""
        _, h, _, d = self.dim
        steps = (torch.arange(n) for n in (h, self.rows[b], d))
        grids = torch.meshgrid(*steps, indexing="ij")
        offset = self.base + self.origins[b]
        return sum((g * s for g, s in zip(grids, self.stride[1:], strict=True)), offset)


@dataclass
class Built:
    """A declared graph, its tensors by port, buffers by uid, and the uids of its outputs by port.

    `arenas` own the memory of the buffers; `places` say which positions of an output are writable.
    """

    case: Case
    graph: Any
    tensors: dict[str, Any] = field(default_factory=dict)
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    arenas: dict[str, torch.Tensor] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)

    def poison(self) -> None:
        """Outputs as they were before any run."""
        for place in self.places.values():
            self.arenas[place.arena].view(torch.uint8).fill_(0xFF)

    def check_canaries(self) -> None:
        """Assert that no input and nothing around or between the outputs' rows was written."""
        writable = {place.arena: port for port, place in self.places.items()}
        for name, arena in self.arenas.items():
            now = arena.view(torch.uint8)
            if name not in writable:
                same = torch.equal(now, self.snapshot[name])
                assert same, f"the run wrote into the input {name}"
                continue
            place = self.places[writable[name]]
            may = torch.zeros(arena.numel(), dtype=torch.bool)
            for b in range(len(place.rows)):
                may[place.index(b).flatten()] = True
            may = may.to(arena.device).repeat_interleave(arena.itemsize)
            bad = ((now != 0xFF) & ~may).nonzero()
            assert not len(bad), (
                f"{writable[name]}: {len(bad)} bytes outside its rows were written, the first "
                f"in element {int(bad[0]) // arena.itemsize - place.base} from its start"
            )


def build(case: Case, graph_factory=None, device: str = "cpu") -> Built:
    """Declare `case` and make its buffers on `device`."""
    return _Builder(case, graph_factory, device).build()


class _Builder:
    def __init__(self, case: Case, graph_factory, device: str) -> None:
        import cudnn

        self.cudnn, self.case, self.device = cudnn, case, device
        data_type = cudnn.data_type
        self.graph = (graph_factory or cudnn.pygraph)(
            io_data_type=getattr(data_type, case.dtype),
            intermediate_data_type=data_type.FLOAT,
            compute_data_type=data_type.FLOAT,
        )
        self.out = Built(case, self.graph)
        self.random = torch.Generator().manual_seed(case.seed)
        self.next_uid = case.first_uid
        self.offsets: dict[tuple, Any] = {}

    def build(self) -> Built:
        case, kwargs = self.case, {}
        self._qkv(kwargs)
        self._lengths(kwargs)
        self._scale(kwargs)
        self._extras(kwargs)
        self._words(kwargs)
        self._score_outputs(kwargs)
        positional = [self.out.tensors[p] for p in "qkv"]
        op = getattr(self.graph, case.op)
        if case.op == "sdpa_fp8":
            for name, value in case.fp8.items():
                kwargs[name] = self._plain(name, (1, 1, 1, 1), "FLOAT", torch.tensor([value]))
            o, stats, amax_s, amax_o = op(*positional, **kwargs)
            self._amax(amax_s, amax_o)
        else:
            o, stats = op(*positional, **kwargs)
        self._output_o(o)
        if stats is not None:
            self._output_stats(stats)
        out = self.out
        outputs = {place.arena for place in out.places.values()}
        for name in out.arenas:
            out.arenas[name] = out.arenas[name].to(self.device)
        for name, arena in out.arenas.items():
            if name not in outputs:
                out.snapshot[name] = arena.view(torch.uint8).clone()
        out.buffers = {uid: bind(out.arenas) for uid, bind in out.buffers.items()}
        return out

    # -- memory -----------------------------------------------------------------------------------

    def _uid(self) -> int:
        self.next_uid += 1
        return self.next_uid - 1

    def _arena(self, name: str, dtype: torch.dtype, numel: int) -> int:
        """A poisoned arena with margins; returns the element its payload starts at."""
        margin = MARGIN_BYTES // dtype.itemsize
        nbytes = (numel + 2 * margin) * dtype.itemsize
        self.out.arenas[name] = torch.full((nbytes,), 0xFF, dtype=torch.uint8).view(dtype)
        return margin

    def _bind(self, uid: int, arena: str, base: int, size, stride) -> None:
        """A buffer of this geometry or the flat rest of the arena, made once arenas are final."""
        if "flat_buffers" in self.case.on:
            self.out.buffers[uid] = lambda arenas: arenas[arena][base:]
        else:
            self.out.buffers[uid] = lambda arenas: arenas[arena].as_strided(size, stride, base)

    def _plain(self, name: str, dim, dtype: str, values: torch.Tensor, stride=None, host=False):
        """A dense operand without dead memory; `values` in row-major order of `dim`."""
        stride = tuple(stride or row_major(dim))
        kind = DTYPES[dtype]
        base = self._arena(name, kind, span(dim, stride))
        view = self.out.arenas[name].as_strided(dim, stride, base)
        view.copy_(values.reshape(dim).to(kind))
        uid = self._uid()
        self._bind(uid, name, base, dim, stride)
        if host:
            self.out.buffers[uid] = lambda _arenas: view.clone()
        tensor = self.graph.tensor(
            dim=list(dim),
            stride=list(stride),
            data_type=getattr(self.cudnn.data_type, dtype),
            is_pass_by_value=host,
            name=name,
            uid=uid,
        )
        self.out.tensors[name] = tensor
        return tensor

    def _declare(self, port: str, place: Place, ragged: Ragged | None):
        """The graph tensor of an input at `place`."""
        uid = self._uid()
        more = {}
        if ragged is not None:
            more["ragged_offset"] = self._offset(port, place, ragged)
            more["ragged_offset_multiplier"] = place.stride[2] if ragged.in_tokens else 1
        tensor = self.graph.tensor(
            dim=list(place.dim), stride=list(place.stride), name=port, uid=uid, **more
        )
        self.out.tensors[port] = tensor
        self._bind_place(uid, place, ragged)
        return tensor

    def _bind_place(self, uid: int, place: Place, ragged: Ragged | None) -> None:
        size, stride = place.dim, place.stride
        if ragged is not None:  # [tokens, H, D], as a caller of packed tensors holds it
            size = (ragged.capacity, place.dim[1], place.dim[3])
            stride = (place.stride[2], place.stride[1], 1)
        self._bind(uid, place.arena, place.base, size, stride)

    def _offset(self, port: str, place: Place, ragged: Ragged):
        """The ragged offset tensor of a port, shared between ports of equal offsets if drawn so."""
        unit = 1 if ragged.in_tokens else place.stride[2]
        ends = [o + n for o, n in zip(ragged.origins, place.rows, strict=True)]
        values = tuple(o * unit for o in (*ragged.origins, max(ends)))
        key = (values, ragged.dtype)
        if "shared_offsets" in self.case.on and key in self.offsets:
            return self.offsets[key]
        name = f"offset_{port}"
        dim = (len(values), 1, 1, 1)
        self.offsets[key] = self._plain(name, dim, ragged.dtype, torch.tensor(values))
        return self.offsets[key]

    # -- Q, K, V ----------------------------------------------------------------------------------

    def _qkv(self, kwargs: dict[str, Any]) -> None:
        case = self.case
        shapes = {
            "q": (case.b, case.hq, case.sq, case.dqk),
            "k": (case.b, case.hk, case.skv, case.dqk),
            "v": (case.b, case.hv, case.skv, case.dv),
        }
        joint = {p: n for p, n in case.layouts.items() if n in ("qkv", "kv")}
        width = sum(shapes[p][1] * shapes[p][3] for p in joint)
        ahead = 0
        paged = self._paged_ports()
        self._pools(paged, kwargs)
        for port, shape in shapes.items():
            if port in paged:
                continue
            ragged = case.ragged.get(port)
            rows = case.len_q if port == "q" else case.len_kv
            if port in joint:
                place = self._joint_place(port, shape, width, ahead, rows)
                ahead += shape[1] * shape[3]
            else:
                place = self._place(port, shape, case.layouts[port], rows, ragged)
            self._fill(port, place)
            self._declare(port, place, ragged)

    def _joint_place(self, port: str, shape, width: int, ahead: int, rows) -> Place:
        """One of several operands side by side in the token's `width` elements."""
        b, _, s, d = shape
        ragged = self.case.ragged.get(port)
        stride = (s * width, d, width, 1)
        origins = tuple(i * stride[0] for i in range(b))
        tokens = b * s
        if ragged is not None:
            stride, tokens = (width, d, width, 1), ragged.capacity
            origins = tuple(o * width for o in ragged.origins)
        if "joint" not in self.out.arenas:
            self._arena("joint", DTYPES[self.case.dtype], tokens * width)
        base = MARGIN_BYTES // DTYPES[self.case.dtype].itemsize + ahead
        return Place("joint", shape, stride, base, origins, rows)

    def _place(
        self, port: str, shape, layout: str, rows, ragged: Ragged | None, dtype=None
    ) -> Place:
        kind = DTYPES[dtype or self.case.dtype]
        if ragged is None:
            stride = dense_stride(layout, shape)
            base = self._arena(port, kind, span(shape, stride))
            origins = tuple(i * stride[0] for i in range(shape[0]))
            return Place(port, shape, stride, base, origins, rows)
        stride = ragged_stride(layout, shape, ragged.capacity)
        extent = span((ragged.capacity, *shape[1::2]), (stride[2], stride[1], 1))
        base = self._arena(port, kind, extent)
        origins = tuple(o * stride[2] for o in ragged.origins)
        return Place(port, shape, stride, base, origins, rows)

    def _fill(self, port: str, place: Place) -> None:
        for b in range(len(place.rows)):
            index = place.index(b)
            self._store(place.arena, index, self._values(port, index.shape))

    def _store(self, arena: str, index: torch.Tensor, values: torch.Tensor) -> None:
        """Scatter into an arena through integers of its width (float8 has no scatter)."""
        flat = self.out.arenas[arena]
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.itemsize]
        data = quantize(values, flat.dtype).view(integer)
        flat.view(integer)[index.flatten()] = data.flatten()

    def _values(self, port: str, shape) -> torch.Tensor:
        """Unit normal fp32 data, shifted or scaled as the case says."""
        case, on = self.case, self.case.on
        x = torch.randn(tuple(shape), generator=self.random)
        descales = case.fp8.get("descale_q", 1.0) * case.fp8.get("descale_k", 1.0)
        if "low_scores" in on and port in "qk":  # scores near -100 with any scale in use
            c = math.sqrt(100.0 / (case.scale[1] * case.dqk * descales))
            x = x * (0.25 if DTYPES[case.dtype] in FP8 else 0.05) + (c if port == "q" else -c)
        if "prefolded" in on and port == "q":
            x = x * case.scale[1] * math.log2(math.e)
        if "v_mean" in on and port == "v":
            x = x + 1.0
        return x

    # -- pages ------------------------------------------------------------------------------------

    def _paged_ports(self) -> dict[str, int]:
        paging = self.case.paging
        if paging is None:
            return {}
        return {p: n for p, n in (("k", paging.k), ("v", paging.v)) if n is not None}

    def _pools(self, paged: dict[str, int], kwargs: dict[str, Any]) -> None:
        """Pools and tables. Live pages get distinct random ids (one may serve two batches); all
        other table entries are garbage and all other pages NaN."""
        case, paging = self.case, self.case.paging
        if paging is None:
            return
        ids = {}
        for port, size in paged.items():
            if port == "v" and paging.shared and "k" in ids:
                ids["v"] = ids["k"]
            else:
                ids[port] = self._page_ids(size)
        one_pool = paging.pool == "kv" and len(paged) == 2 and case.dqk == case.dv
        pages = {p: paging.spare + sum(len(row) for row in ids[p]) for p in paged}
        if one_pool:
            pages = dict.fromkeys(paged, max(pages.values()))
        for port, size in paged.items():
            place = self._pool_place(port, size, pages[port], one_pool)
            for b, row in enumerate(ids[port]):
                self._fill_pages(port, place, row, case.len_kv[b])
            self._declare(port, place, None)
        for port in paged:
            word = f"paged_attention_{port}_table"
            if port == "v" and paging.shared and "k" in paged:
                kwargs[word] = kwargs["paged_attention_k_table"]
            else:
                columns = paging.columns_k if port == "k" else paging.columns_v
                kwargs[word] = self._table(f"table_{port}", ids[port], columns)
        if paging.maximum:
            kwargs["paged_attention_max_seq_len_kv"] = case.skv

    def _page_ids(self, size: int) -> list[list[int]]:
        """Live pages of each batch: distinct, except a full first page that two batches share."""
        case = self.case
        counts = [-(-n // size) for n in case.len_kv]
        order = torch.randperm(sum(counts) + case.paging.spare, generator=self.random).tolist()
        rows = [[order.pop() for _ in range(n)] for n in counts]
        full = [b for b, n in enumerate(case.len_kv) if n >= size]
        if "prefix_pages" in case.on and len(full) > 1:
            rows[full[1]][0] = rows[full[0]][0]
        return rows

    def _pool_place(self, port: str, size: int, pages: int, one_pool: bool) -> Place:
        """[pages, H, page_size, D]; rows and origins are per page, all of them."""
        case = self.case
        h, d = (case.hk, case.dqk) if port == "k" else (case.hv, case.dv)
        dim, kind = (pages, h, size, d), DTYPES[case.dtype]
        stride = {
            "hnd": (h * size * d, size * d, d, 1),
            "nhd": (size * h * d, d, h * d, 1),
            "padded": (size * h * d + 64, d, h * d, 1),
            "kv": (size * h * d, d, h * d, 1),
        }[case.paging.pool]
        if not one_pool:
            base = self._arena(port, kind, span(dim, stride))
        else:  # [pages, 2 sides, page_size, H, D]
            both = size * d * (case.hk + case.hv)
            stride = (both, *stride[1:])
            if "pool" not in self.out.arenas:
                self._arena("pool", kind, pages * both)
            base = MARGIN_BYTES // kind.itemsize + (size * d * case.hk if port == "v" else 0)
        origins = tuple(i * stride[0] for i in range(pages))
        return Place("pool" if one_pool else port, dim, stride, base, origins, (size,) * pages)

    def _fill_pages(self, port: str, place: Place, row: list[int], live: int) -> None:
        size = place.dim[2]
        for i, page in enumerate(row):
            index = place.index(page)[:, : min(size, live - i * size)]
            self._store(place.arena, index, self._values(port, index.shape))

    def _table(self, name: str, ids: list[list[int]], columns: int):
        """[B,1,columns,1] int32."""
        b = len(ids)
        step = 2 if self.case.paging.table == "strided" else 1
        wide = columns * step + (0 if self.case.paging.table == "row" else 3)
        rows = torch.tensor(GARBAGE_PAGES, dtype=torch.int64)
        pick = torch.randint(len(GARBAGE_PAGES), (b, columns), generator=self.random)
        values = rows[pick]
        for i, row in enumerate(ids):
            values[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        dim = (b, 1, columns, 1)
        return self._plain(name, dim, "INT32", values, (wide, wide, step, 1))

    # -- the other operands -----------------------------------------------------------------------

    def _lengths(self, kwargs: dict[str, Any]) -> None:
        lengths = self.case.lengths
        if lengths is None:
            return
        kwargs["use_padding_mask"] = True
        sides = (("q", lengths.q, lengths.q_form), ("kv", lengths.kv, lengths.kv_form))
        for side, values, form in sides:
            data, dtype = torch.tensor(values), "INT32"
            name = f"seq_len_{side}"
            if form == "cu":
                data = torch.cat([data.new_zeros(1), data.cumsum(0)])
                name, dtype = f"cu_seq_len_{side}", lengths.cu_dtype
            dim = (len(data),) if lengths.rank1 else (len(data), 1, 1, 1)
            kwargs[name] = self._plain(name, dim, dtype, data)
        for side, port in (("q", "q"), ("kv", "k")):
            ragged = self.case.ragged.get(port)
            if ragged is not None and "max_total" in self.case.on:
                kwargs[f"max_total_seq_len_{side}"] = ragged.capacity

    def _scale(self, kwargs: dict[str, Any]) -> None:
        form, value = self.case.scale
        if form == "prefolded":
            kwargs["attn_scale_prefolded"] = True
        elif form in ("float", "int"):
            kwargs["attn_scale"] = value if form == "float" else int(value)
        elif form == "embedded":
            kind = self.cudnn.scalar_type.COMPILE_TIME_CONST
            kwargs["attn_scale"] = self.graph.tensor_scalar(value, kind, "attn_scale")
        elif form in ("device", "host"):
            data = torch.tensor([value])
            kwargs["attn_scale"] = self._plain(
                "attn_scale", (1, 1, 1, 1), "FLOAT", data, host=form == "host"
            )

    def _extras(self, kwargs: dict[str, Any]) -> None:
        """Bias, sink, dropout mask and kv_mask."""
        case, on = self.case, self.case.on
        if case.bias is not None:
            one_b, one_h, dtype, pad = case.bias
            dim = (1 if one_b else case.b, 1 if one_h else case.hq, case.sq, case.skv)
            row = case.skv + pad
            stride = (dim[1] * case.sq * row, case.sq * row, row, 1)
            data = torch.randn(dim, generator=self.random)
            kwargs["bias"] = self._plain("bias", dim, dtype, data, stride)
        if "sink" in on:
            data = torch.randn(case.hq, generator=self.random) * 2
            if "extreme_sink" in on:
                data[0], data[-1] = 100.0, -1000.0
            kwargs["sink_token"] = self._plain("sink_token", (1, case.hq, 1, 1), "FLOAT", data)
        if "dropout" in on:
            dim = (case.b, case.hq, case.sq, case.skv)
            keep = (torch.rand(dim, generator=self.random) > 0.25).float()
            scale = self._plain("dropout_scale", (1, 1, 1, 1), "FLOAT", torch.tensor([1 / 0.75]))
            kind = "BFLOAT16" if case.op == "sdpa_fp8" else case.dtype
            kwargs["dropout"] = (self._plain("dropout_mask", dim, kind, keep), scale)
        if case.kv_mask is not None:
            dtype, one_b = case.kv_mask
            dim = (1 if one_b else case.b, 1, 1, case.skv)
            keep = torch.rand(dim, generator=self.random) > 0.3
            kind = case.dtype if dtype == "IO" else dtype
            data = keep if dtype == "BOOLEAN" else torch.where(keep, 0.5, -1e4)
            kwargs["kv_mask"] = self._plain("kv_mask", dim, kind, data)

    def _words(self, kwargs: dict[str, Any]) -> None:
        """Masks as spelled, flags and hints."""
        case, on, cudnn = self.case, self.case.on, self.cudnn
        for word, value in case.words.items():
            aligned = word == "diagonal_alignment"
            kwargs[word] = getattr(cudnn.diagonal_alignment, value) if aligned else value
        if "alibi" in on:
            kwargs["use_alibi_mask"] = True
        wanted = bool(on & {"stats", "virtual_stats"})
        if "is_inference" in on:
            kwargs["is_inference"] = not wanted
        else:
            kwargs["generate_stats"] = wanted
        if "log2" in on:
            kwargs["stats_use_log2"] = True
        if "softmax_precision" in on:
            kwargs["softmax_precision"] = cudnn.data_type.FLOAT
        if "inert_words" in on:
            kwargs["implementation"] = cudnn.attention_implementation.AUTO
            kwargs["unfuse_fma"] = False
            kwargs["compute_data_type"] = cudnn.data_type.FLOAT
            kwargs["name"] = "attention"

    # -- outputs ----------------------------------------------------------------------------------

    def _output_o(self, o) -> None:
        case = self.case
        shape = (case.b, case.hq, case.sq, case.dv)
        ragged = case.ragged.get("o")
        rows = case.len_q if ragged else (case.sq,) * case.b
        place = self._place("O", shape, case.layouts["o"], rows, ragged, case.o_dtype)
        self._mark("O", o, place, ragged, case.o_dtype)

    def _stats_place(self, port: str) -> tuple[Place, Ragged | None]:
        """A [B,Hq,Sq,1] fp32 output like Stats: row-major, token-major or with padded heads."""
        case = self.case
        b, h, s = case.b, case.hq, case.sq
        shape, layout, ragged = (b, h, s, 1), case.stats_layout, case.ragged.get("stats")
        if ragged is None:
            stride = {
                "row": (h * s, s, 1, 1),
                "nh": (s * h, 1, h, 1),
                "padded": (h * (s + 3), s + 3, 1, 1),
            }[layout]
            base = self._arena(port, torch.float32, span(shape, stride))
            origins = tuple(i * stride[0] for i in range(b))
            return Place(port, shape, stride, base, origins, (s,) * b), None
        tokens = ragged.capacity
        stride = (h, 1, h, 1) if layout == "nh" else (h * tokens, tokens, 1, 1)
        base = self._arena(port, torch.float32, tokens * h)
        origins = tuple(o * stride[2] for o in ragged.origins)
        return Place(port, shape, stride, base, origins, case.len_q), ragged

    def _output_stats(self, stats) -> None:
        if "virtual_stats" in self.case.on:
            return
        place, ragged = self._stats_place("Stats")
        self._mark("Stats", stats, place, ragged, "FLOAT")

    def _score_outputs(self, kwargs: dict[str, Any]) -> None:
        """score_max and score_sum_exp are graph tensors handed to the op."""
        if "score_outputs" not in self.case.on:
            return
        for port in ("score_max", "score_sum_exp"):
            place, ragged = self._stats_place(port)
            tensor = self.graph.tensor(
                dim=list(place.dim),
                stride=list(place.stride),
                data_type=self.cudnn.data_type.FLOAT,
                name=port,
            )
            kwargs[port] = self._mark(port, tensor, place, ragged, "FLOAT")

    def _amax(self, amax_s, amax_o) -> None:
        if "amax" not in self.case.on:
            return
        for port, tensor in (("Amax_S", amax_s), ("Amax_O", amax_o)):
            base = self._arena(port, torch.float32, 1)
            place = Place(port, (1, 1, 1, 1), (1, 1, 1, 1), base, (0,), (1,))
            self._mark(port, tensor, place, None, "FLOAT")

    def _mark(self, port: str, tensor, place: Place, ragged: Ragged | None, dtype: str):
        """Make `tensor` a real output at `place`."""
        uid = self._uid()
        tensor.set_output(True).set_uid(uid).set_dim(list(place.dim)).set_stride(list(place.stride))
        tensor.set_data_type(getattr(self.cudnn.data_type, dtype))
        if ragged is not None:
            tensor.set_ragged_offset(self._offset(port, place, ragged))
            if ragged.in_tokens:
                tensor.set_ragged_offset_multiplier(place.stride[2])
        self._bind_place(uid, place, ragged)
        self.out.tensors[port], self.out.outputs[port] = tensor, uid
        self.out.places[port] = place
        return tensor


def row_major(dim) -> tuple[int, ...]:
    stride = [1]
    for extent in reversed(dim[1:]):
        stride.insert(0, stride[0] * extent)
    return tuple(stride)


def span(dim, stride) -> int:
    """Elements from the first to the last of a strided tensor."""
    return sum((n - 1) * s for n, s in zip(dim, stride, strict=True)) + 1


def dense_stride(layout: str, shape) -> tuple[int, ...]:
    """Strides of a (B,H,S,D) tensor by the name of its memory order."""
    b, h, s, d = shape
    row, gap = d + 1, h * d + 16
    return {
        "bhsd": (h * s * d, s * d, d, 1),
        "bshd": (s * h * d, d, h * d, 1),
        "sbhd": (h * d, d, b * h * d, 1),
        "hbsd": (s * d, b * s * d, d, 1),
        "padded": (s * gap + 32, d, gap, 1),
        "odd": (h * s * row, s * row, row, 1),
        "bcast_b": (0, s * d, d, 1),
        "bcast_h": (s * d, 0, d, 1),
    }[layout]


def ragged_stride(layout: str, shape, capacity: int) -> tuple[int, ...]:
    """Strides of a packed tensor; the batch stride means nothing and is the token stride."""
    _, h, _, d = shape
    if layout == "htd":
        return (d, capacity * d, d, 1)
    token = h * d + (16 if layout == "padded" else 0)
    return (token, d, token, 1)
