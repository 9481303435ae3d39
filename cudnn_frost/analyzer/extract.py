"""From a declaration's words to facts: one reading for `sdpa` and `sdpa_fp8`.

Nothing is judged. What contradicts itself becomes a `Malformation` naming operand or parameter, and
the reading goes on, so that every contradiction of a declaration is found at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from ..vocab import DType
from . import band
from .band import shown
from .facts import (
    Analysis,
    Band,
    Dropout,
    Lengths,
    Malformation,
    Operand,
    Paging,
    Ragged,
    Scale,
    SdpaFacts,
)
from .layout import broadcast_axes
from .ports import FP8_SCALES, unknown_arguments
from .record import GraphRecord, NodeRecord, TensorRecord

_INDEX = (DType.INT32, DType.INT64)


def analyze(record: GraphRecord) -> Analysis:
    """The facts of a graph that is one `sdpa` or `sdpa_fp8` node; otherwise the ops alone.

    A node without readable Q, K, V and O gives no facts, but the malformations that say so.
    """
    ops = tuple(node.op for node in record.nodes)
    if len(record.nodes) != 1 or ops[0] not in ("sdpa", "sdpa_fp8"):
        return Analysis(ops=ops)
    reader = _Reader(record, record.nodes[0])
    unreadable = reader.unreadable()
    if unreadable:
        return Analysis(ops=ops, malformations=tuple(unreadable))
    return Analysis(ops=ops, facts=reader.facts())


class _Reader:
    """One node being read; contradictions collect in `bad`."""

    def __init__(self, record: GraphRecord, node: NodeRecord) -> None:
        self.record = record
        self.node = node
        self.bad: list[Malformation] = []

    # ---- single values

    def say(self, subject: str, got: object, want: str) -> None:
        self.bad.append(Malformation(subject=subject, got=str(got), want=want))

    def operand(self, port: str, *, output: bool = False) -> Operand | None:
        """A port's tensor; None when it is absent, or an output the caller left virtual."""
        ports = self.node.outputs if output else self.node.inputs
        tensor = ports.get(port)
        if tensor is None or (output and tensor.virtual):
            return None
        return _operand(tensor)

    def flag(self, name: str) -> bool:
        return band.flag(self.node.params, name, self.bad)

    def integer(self, name: str) -> int | None:
        return band.integer(self.node.params, name, self.bad)

    # ---- the whole

    def unreadable(self) -> list[Malformation]:
        """What keeps facts from being made: a missing tensor, a rank that is not 4."""
        found = []
        for port, tensors in (("q", "in"), ("k", "in"), ("v", "in"), ("O", "out")):
            held = self.node.inputs if tensors == "in" else self.node.outputs
            tensor = held.get(port)
            if tensor is None:
                found.append(Malformation(subject=port.lower(), got="missing", want="a tensor"))
                continue
            for field in ("dim", "stride"):
                value = getattr(tensor, field)
                if len(value) != 4:
                    subject = f"{port.lower()}.{field}"
                    found.append(
                        Malformation(subject=subject, got=str(list(value)), want="four entries")
                    )
        return found

    def facts(self) -> SdpaFacts:
        node, params = self.node, self.node.params
        q, k, v = (_operand(node.inputs[port]) for port in "qkv")
        o = _operand(node.outputs["O"])
        paging = self.paging(k, v)
        s_kv = self.logical_s_kv(k, v, paging)
        fields: dict[str, Any] = {
            "op": node.op,
            "name": node.name,
            "b": q.dim[0],
            "h_q": q.dim[1],
            "h_k": k.dim[1],
            "h_v": v.dim[1],
            "s_q": q.dim[2],
            "s_kv": s_kv,
            "d_qk": q.dim[3],
            "d_v": v.dim[3],
            "q": q,
            "k": k,
            "v": v,
            "o": o,
            "o_virtual": node.outputs["O"].virtual,
            "band": self.band(),
            "padding": self.flag("use_padding_mask"),
            "seq_len_q": self.lengths("q", q.dim[0]),
            "seq_len_kv": self.lengths("kv", q.dim[0]),
            "paging": paging,
            "max_total_seq_len_q": self.integer("max_total_seq_len_q"),
            "max_total_seq_len_kv": self.integer("max_total_seq_len_kv"),
            "attn_scale": self.attn_scale(),
            "attn_scale_prefolded": self.flag("attn_scale_prefolded"),
            "sink": self.operand("sink_token"),
            "bias": self.operand("bias"),
            "alibi": self.flag("use_alibi_mask"),
            "block_mask": self.operand("block_mask"),
            "kv_mask": self.operand("kv_mask"),
            "dropout": self.dropout(),
            "score_mod": params.get("score_mod") is not None or params.get("fn") is not None,
            "generate_stats": self.generate_stats(),
            "stats": self.operand("Stats", output=True),
            "stats_use_log2": self.flag("stats_use_log2"),
            "score_max": self.operand("score_max", output=True),
            "score_sum_exp": self.operand("score_sum_exp", output=True),
            "rng_dump": self.operand("rng_dump", output=True),
            "sf_o": self.operand("sf_o", output=True),
            "amax_s": self.operand("Amax_S", output=True),
            "amax_o": self.operand("Amax_O", output=True),
            "compute_dtype": node.compute_dtype,
            "softmax_precision": self.softmax_precision(),
            "unfuse_fma": self.flag("unfuse_fma"),
            "implementation": str(params.get("implementation", "AUTO")),
            "override_shape_enabled": self.record.override_shape_enabled,
            "replay_expected": self.record.replay_expected,
        }
        if node.op == "sdpa_fp8":
            fields |= {name: self.fp8_scale(name) for name in FP8_SCALES}
        self.shapes(SdpaFacts(**fields))
        return SdpaFacts(
            **fields,
            malformations=tuple(self.bad),
            unknown_arguments=unknown_arguments(node),
        )

    # ---- parts

    def band(self) -> Band:
        return band.resolve(self.node.op, self.node.params, self.bad)

    def generate_stats(self) -> bool:
        """`generate_stats` wins over the deprecated `is_inference`; neither means no Stats."""
        if self.node.params.get("generate_stats") is not None:
            return self.flag("generate_stats")
        return "is_inference" in self.node.params and not self.flag("is_inference")

    def softmax_precision(self) -> DType | None:
        value = self.node.params.get("softmax_precision")
        return None if value is None else DType.parse(value)

    def attn_scale(self) -> Scale:
        tensor = self.node.inputs.get("attn_scale")
        value = self.node.params.get("attn_scale")
        if tensor is not None:
            operand = _operand(tensor)
            if tensor.pass_by_value:
                return Scale(form="pass_by_value", value=tensor.value, operand=operand)
            self.scalar("attn_scale", operand)
            return Scale(form="device", operand=operand)
        if value is None:
            return Scale()
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            self.say("attn_scale", shown(value), "a finite float or a tensor")
            return Scale()
        return Scale(form="host", value=float(value))

    def fp8_scale(self, name: str) -> Operand | None:
        operand = self.operand(name)
        if operand is not None:
            self.scalar(name, operand)
        elif name in self.node.params:
            self.say(name, shown(self.node.params[name]), "a FLOAT tensor of one element")
        else:
            self.say(name, "missing", "a FLOAT tensor of one element")
        return operand

    def scalar(self, name: str, operand: Operand) -> None:
        """A device scalar holds one float."""
        if operand.dtype is not DType.FLOAT:
            self.say(f"{name}.data_type", operand.dtype, "FLOAT")
        if any(extent != 1 for extent in operand.dim):
            self.say(f"{name}.dim", list(operand.dim), "one element")

    def lengths(self, side: Literal["q", "kv"], batch: int) -> Lengths:
        plain, prefix = f"seq_len_{side}", f"cu_seq_len_{side}"
        given = {name: op for name in (plain, prefix) if (op := self.operand(name)) is not None}
        for name in (plain, prefix):
            if name in self.node.params:
                self.say(name, shown(self.node.params[name]), "a tensor")
        if len(given) == 2:
            self.say(prefix, f"set beside {plain}", f"{plain} or {prefix}")
        padding = self.node.params.get("use_padding_mask") is True
        scored = self.node.params.get("score_mod") or self.node.params.get("fn")
        if given and not padding and not scored:
            self.say(next(iter(given)), "set", "use_padding_mask=True beside it")
        if not given:
            if padding:
                self.say(plain, "missing", f"{plain} or {prefix} with use_padding_mask")
            return Lengths()
        name, operand = next(iter(given.items()))
        cumulative = name == prefix
        self.index(name, operand, batch + 1 if cumulative else batch)
        return Lengths(form="cu_seq_len" if cumulative else "seq_len", operand=operand)

    def index(self, name: str, operand: Operand, extent: int) -> None:
        """A vector of int32 or int64 along the first axis."""
        if operand.dtype not in _INDEX:
            self.say(f"{name}.data_type", operand.dtype, "INT32 or INT64")
        rank = len(operand.dim)
        if rank not in (1, 4) or operand.dim != (extent, *(1,) * (rank - 1)):
            want = f"[{extent}] or [{extent}, 1, 1, 1]"
            self.say(f"{name}.dim", list(operand.dim), want)

    def paging(self, k: Operand, v: Operand) -> Paging | None:
        k_table = self.operand("paged_attention_k_table")
        v_table = self.operand("paged_attention_v_table")
        maximum = self.integer("paged_attention_max_seq_len_kv")
        if k_table is None and v_table is None:
            if maximum is not None:
                got = f"{maximum}, without a page table"
                self.say("paged_attention_max_seq_len_kv", got, "a paged graph")
            return None
        batch = self.node.inputs["q"].dim[0]
        sizes = {"k": k.dim[2], "v": v.dim[2]}
        extents: dict[str, int] = {}
        for side, table in (("k", k_table), ("v", v_table)):
            if table is None:
                continue
            name = f"paged_attention_{side}_table"
            if table.dtype is not DType.INT32:
                self.say(f"{name}.data_type", table.dtype, "INT32")
            if len(table.dim) != 4 or table.dim[1] != 1 or table.dim[3] != 1:
                self.say(f"{name}.dim", list(table.dim), f"[{batch}, 1, pages, 1]")
                continue
            if table.dim[0] != batch:
                self.say(f"{name}.dim[0]", table.dim[0], f"the batch, {batch}")
            extents[side] = table.dim[2]
        # pages of another size cover the same keys in another number
        if len(set(extents.values())) > 1 and sizes["k"] == sizes["v"]:
            got = f"{extents['v']} pages, {extents['k']} in the K table"
            self.say("paged_attention_v_table.dim[2]", got, "equal extents of both tables")
        return Paging(
            k_table=k_table,
            v_table=v_table,
            page_size_k=sizes["k"] if k_table is not None else None,
            page_size_v=sizes["v"] if v_table is not None else None,
            pages_per_seq=extents.get("k", extents.get("v", 0)),
            max_seq_len_kv=maximum,
        )

    def logical_s_kv(self, k: Operand, v: Operand, paging: Paging | None) -> int:
        """Declared maximum when paged, else what the tables can hold, else K's extent."""
        if paging is None:
            return k.dim[2]
        if paging.max_seq_len_kv is not None:
            return paging.max_seq_len_kv
        if paging.k_table is None:
            return k.dim[2]
        return paging.pages_per_seq * (paging.page_size_k or 0)

    def dropout(self) -> Dropout | None:
        count = self.node.params.get("_dropout_n")
        if count is None:
            return None
        elements = [self.operand(f"dropout_{i}") for i in range(count)]
        values = [self.node.params.get(f"dropout_{i}") for i in range(count)]
        if count == 3 and elements[0] is None:
            probability = values[0]
            if isinstance(probability, bool) or not isinstance(probability, (int, float)):
                self.say("dropout[0]", shown(probability), "a probability below 1")
                return Dropout(form="philox")
            if not 0 <= probability < 1:
                self.say("dropout[0]", probability, "a probability from 0 to below 1")
            if probability == 0:
                return None
            return Dropout(
                form="philox",
                probability=float(probability),
                seed=elements[1],
                offset=elements[2],
            )
        if count == 2 and None not in elements:
            return Dropout(form="mask", mask=elements[0], scale=elements[1])
        self.say("dropout", f"{count} elements", "(probability, seed, offset) or (mask, scale)")
        return None

    # ---- contradictions between tensors

    def shapes(self, facts: SdpaFacts) -> None:
        for port, tensor in (*self.node.inputs.items(), *self.node.outputs.items()):
            if tensor.reordering != "NONE" and port != "sf_o":
                self.say(f"{port.lower()}.reordering_type", tensor.reordering, "NONE")
        self.extents(facts)
        self.outputs(facts)
        self.attachments(facts)

    def extents(self, facts: SdpaFacts) -> None:
        k, v, paging = facts.k, facts.v, facts.paging
        dense_k = paging is None or paging.k_table is None
        dense_v = paging is None or paging.v_table is None
        for name, heads in (("k", facts.h_k), ("v", facts.h_v)):
            if heads == 0 or facts.h_q % heads:
                want = f"a divisor of q's {facts.h_q} heads"
                self.say(f"{name}.dim[1]", heads, want)
        if k.dim[3] != facts.d_qk:
            self.say("k.dim[3]", k.dim[3], f"q's head dim, {facts.d_qk}")
        for name, operand, dense in (("k", k, dense_k), ("v", v, dense_v)):
            if dense and operand.dim[0] != facts.b:
                self.say(f"{name}.dim[0]", operand.dim[0], f"q's batch, {facts.b}")
            if not dense and operand.ragged is not None:
                self.say(f"{name}.ragged_offset", "set on a page pool", "no ragged offset")
        if dense_k and dense_v and k.dim[2] != v.dim[2]:
            self.say("v.dim[2]", v.dim[2], f"k's sequence extent, {k.dim[2]}")
        for name, dtype in (("k", k.dtype), ("v", v.dtype)):
            if dtype is not facts.q.dtype:
                self.say(f"{name}.data_type", dtype, f"q's, {facts.q.dtype}")
        if facts.is_ragged and not facts.padding and not facts.score_mod:
            self.say("ragged_offset", "set", "use_padding_mask=True beside it")
        for name in facts.ragged:
            ragged = getattr(facts, name).ragged
            if ragged.dtype not in _INDEX:
                self.say(f"{name}.ragged_offset.data_type", ragged.dtype, "INT32 or INT64")
            if not ragged.dim or ragged.dim[0] != facts.b + 1:
                want = f"[{facts.b + 1}, 1, 1, 1]"
                self.say(f"{name}.ragged_offset.dim", list(ragged.dim), want)

    def outputs(self, facts: SdpaFacts) -> None:
        rows = (facts.b, facts.h_q, facts.s_q)
        if facts.o.dim != (*rows, facts.d_v):
            self.say("o.dim", list(facts.o.dim), str([*rows, facts.d_v]))
        for name in ("o", "stats", "score_max", "score_sum_exp"):
            written = getattr(facts, name)
            for axis in broadcast_axes(written) if written is not None else ():
                self.say(f"{name}.stride[{axis}]", 0, "a stride: rows would overwrite each other")
        for name in ("stats", "score_max", "score_sum_exp"):
            operand = getattr(facts, name)
            if operand is None:
                continue
            if operand.dtype is not DType.FLOAT:
                self.say(f"{name}.data_type", operand.dtype, "FLOAT")
            if operand.dim != (*rows, 1):
                self.say(f"{name}.dim", list(operand.dim), str([*rows, 1]))
        for name in ("amax_s", "amax_o"):
            operand = getattr(facts, name)
            if operand is not None:
                self.scalar(name, operand)

    def attachments(self, facts: SdpaFacts) -> None:
        """Sink, bias and masks against the extents they are added to."""
        if facts.sink is not None:
            if facts.sink.dtype is not DType.FLOAT:
                self.say("sink_token.data_type", facts.sink.dtype, "FLOAT")
            if facts.sink.dim != (1, facts.h_q, 1, 1):
                want = str([1, facts.h_q, 1, 1])
                self.say("sink_token.dim", list(facts.sink.dim), want)
        full = (facts.b, facts.h_q, facts.s_q, facts.s_kv)
        if facts.bias is not None:
            self.broadcast("bias", facts.bias, full)
            if facts.bias.dtype is DType.BOOLEAN:
                self.say("bias.data_type", facts.bias.dtype, "a floating type")
        if facts.kv_mask is not None:
            self.broadcast("kv_mask", facts.kv_mask, (facts.b, 1, 1, facts.s_kv))
            if facts.kv_mask.dtype not in (DType.BOOLEAN, DType.FLOAT, facts.q.dtype):
                want = f"BOOLEAN, FLOAT or q's, {facts.q.dtype}"
                self.say("kv_mask.data_type", facts.kv_mask.dtype, want)
        if facts.alibi and facts.band.right != 0:
            self.say("use_alibi_mask", "True", "a right bound of 0 beside it")

    def broadcast(self, name: str, operand: Operand, full: Iterable[int]) -> None:
        full = tuple(full)
        fits = len(operand.dim) == len(full) and all(
            have in (1, want) for have, want in zip(operand.dim, full, strict=True)
        )
        if not fits:
            self.say(f"{name}.dim", list(operand.dim), f"broadcastable to {list(full)}")


def _operand(tensor: TensorRecord) -> Operand:
    ragged = tensor.ragged_offset
    return Operand(
        uid=tensor.uid,
        name=tensor.name,
        dtype=tensor.dtype,
        dim=tensor.dim,
        stride=tensor.stride,
        ragged=None
        if ragged is None
        else Ragged(
            uid=ragged.uid, dtype=ragged.dtype, dim=ragged.dim, multiplier=ragged.multiplier
        ),
    )
