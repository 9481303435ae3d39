"""From a declaration's words to facts: one reading for `sdpa` and `sdpa_fp8`.

Nothing is judged. What contradicts itself becomes a `Malformation` naming operand or parameter, and
the reading goes on, so that every contradiction of a declaration is found at once. What one value
alone shows is found here, what takes two in `contradictions`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from ..vocab import DType
from . import band
from .band import shown
from .contradictions import contradictions
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
from .layout import row_major
from .ports import DROPOUT_COUNT, FP8_SCALES, dropout_count, misplaced, unknown_arguments
from .record import GraphRecord, NodeRecord, RaggedRecord, TensorRecord

_IMPLEMENTATIONS = ("AUTO", "COMPOSITE", "UNIFIED")
# scale factors lie in memory as their own tensor cores want them; nothing else may
_REORDERED = ("sf_o",)


def analyze(record: GraphRecord) -> Analysis:
    """The facts of a graph that is one `sdpa` or `sdpa_fp8` node; otherwise the ops alone.

    A node without readable Q, K, V and O gives no facts, but the malformations that say so.
    Never raises, whatever the record holds.
    """
    ops = tuple(node.op for node in record.nodes)
    if len(record.nodes) != 1 or ops[0] not in ("sdpa", "sdpa_fp8"):
        return Analysis(ops=ops)
    reader = _Reader(record, record.nodes[0])
    unreadable = reader.unreadable()
    if unreadable:
        return Analysis(ops=ops, malformations=tuple(unreadable))
    return Analysis(ops=ops, facts=reader.facts())


def _steps(tensor: TensorRecord | RaggedRecord) -> tuple[int, ...]:
    """Strides of the axes that are stepped along; the others are free."""
    strides = tensor.stride or row_major(tensor.dim)
    return tuple(step for extent, step in zip(tensor.dim, strides, strict=False) if extent != 1)


class _Reader:
    """One node being read; contradictions collect in `bad`."""

    def __init__(self, record: GraphRecord, node: NodeRecord) -> None:
        self.record = record
        # as the builder, which drops a keyword set to None
        params = {name: value for name, value in node.params.items() if value is not None}
        self.node = node.model_copy(update={"params": params})
        self.params = params
        self.bad: list[Malformation] = []
        self.inputs = {port: self._operand(port, t) for port, t in node.inputs.items()}
        self.outputs = {port: self._operand(port, t) for port, t in node.outputs.items()}

    def _operand(self, port: str, tensor: TensorRecord) -> Operand:
        """A tensor with its type and strides as the frontend resolves what is not declared."""
        dtype = tensor.dtype
        if dtype is DType.NOT_SET:
            record = self.record
            dtype = record.io_dtype
            if port == "Stats":
                dtype = DType.FLOAT
            elif tensor.virtual and record.intermediate_dtype is not DType.NOT_SET:
                dtype = record.intermediate_dtype
        ragged = tensor.ragged_offset
        return Operand(
            uid=tensor.uid,
            name=tensor.name,
            dtype=dtype,
            dim=tensor.dim,
            stride=tensor.stride or row_major(tensor.dim),
            ragged=None
            if ragged is None
            else Ragged(
                uid=ragged.uid, dtype=ragged.dtype, dim=ragged.dim, multiplier=ragged.multiplier
            ),
        )

    # ---- single values

    def say(self, subject: str, got: object, want: str) -> None:
        self.bad.append(Malformation(subject=subject, got=str(got), want=want))

    def output(self, port: str) -> Operand | None:
        """An output's tensor; None when it is absent or the caller left it virtual."""
        tensor = self.node.outputs.get(port)
        return None if tensor is None or tensor.virtual else self.outputs[port]

    def flag(self, name: str) -> bool:
        return band.flag(self.params, name, self.bad)

    def integer(self, name: str) -> int | None:
        return band.integer(self.params, name, self.bad)

    # ---- the whole

    def unreadable(self) -> list[Malformation]:
        """What keeps facts from being made: a missing tensor, a rank that is not 4."""
        found = []
        for port, held in (*((p, self.inputs) for p in "qkv"), ("O", self.outputs)):
            operand, name = held.get(port), port.lower()
            if operand is None:
                got = "missing"
                if port in self.params:
                    got = shown(self.params[port])
                found.append(Malformation(subject=name, got=got, want="a tensor"))
                continue
            for field in ("dim", "stride"):
                value = list(getattr(operand, field))
                if len(value) != 4:
                    want = "four entries"
                    found.append(Malformation(subject=f"{name}.{field}", got=str(value), want=want))
        return found

    def facts(self) -> SdpaFacts:
        self.tensors()
        facts = SdpaFacts(**self.extents(), **self.operands(), **self.keywords())
        found = (*self.bad, *misplaced(self.node), *contradictions(facts))
        update = {
            "malformations": tuple(dict.fromkeys(found)),
            "unknown_arguments": unknown_arguments(self.node),
        }
        return facts.model_copy(update=update)

    def extents(self) -> dict[str, Any]:
        q, k, v = (self.inputs[port] for port in "qkv")
        paging = self.paging(k, v)
        return {
            "op": self.node.op,
            "name": self.node.name,
            "b": q.dim[0],
            "h_q": q.dim[1],
            "h_k": k.dim[1],
            "h_v": v.dim[1],
            "s_q": q.dim[2],
            "s_kv": self.logical_s_kv(k, paging),
            "d_qk": q.dim[3],
            "d_v": v.dim[3],
            "paging": paging,
        }

    def operands(self) -> dict[str, Any]:
        inputs, output = self.inputs, self.output
        found = {
            "q": inputs["q"],
            "k": inputs["k"],
            "v": inputs["v"],
            "o": self.outputs["O"],
            "o_virtual": self.node.outputs["O"].virtual,
            "seq_len_q": self.lengths("q"),
            "seq_len_kv": self.lengths("kv"),
            "sink": inputs.get("sink_token"),
            "bias": inputs.get("bias"),
            "block_mask": inputs.get("block_mask"),
            "kv_mask": inputs.get("kv_mask"),
            "dropout": self.dropout(),
            "stats": output("Stats"),
            "score_max": output("score_max"),
            "score_sum_exp": output("score_sum_exp"),
            "rng_dump": output("rng_dump"),
            "sf_o": output("sf_o"),
            "amax_s": output("Amax_S"),
            "amax_o": output("Amax_O"),
        }
        if self.node.op == "sdpa_fp8":
            found |= {name: self.fp8_scale(name) for name in FP8_SCALES}
        return found

    def keywords(self) -> dict[str, Any]:
        record, params = self.record, self.params
        compute = (self.node.compute_dtype, record.compute_dtype, record.io_dtype)
        return {
            "band": self.band(),
            "padding": self.flag("use_padding_mask"),
            "max_total_seq_len_q": self.integer("max_total_seq_len_q"),
            "max_total_seq_len_kv": self.integer("max_total_seq_len_kv"),
            "attn_scale": self.attn_scale(),
            "attn_scale_prefolded": self.flag("attn_scale_prefolded"),
            "alibi": self.flag("use_alibi_mask"),
            "score_mod": "score_mod" in params or "fn" in params,
            "generate_stats": self.generate_stats(),
            "stats_use_log2": self.flag("stats_use_log2"),
            "compute_dtype": next((t for t in compute if t is not DType.NOT_SET), DType.NOT_SET),
            "softmax_precision": self.softmax_precision(),
            "unfuse_fma": self.flag("unfuse_fma"),
            "implementation": self.implementation(),
            "override_shape_enabled": record.override_shape_enabled,
            "replay_expected": record.replay_expected,
        }

    def tensors(self) -> None:
        """What a tensor says that facts do not repeat, and uids that name two tensors."""
        seen: dict[int, tuple[str, Any]] = {}
        sides = (("inputs", self.node.inputs), ("outputs", self.node.outputs))
        for side, port, tensor in ((s, p, t) for s, held in sides for p, t in held.items()):
            name = port.lower() if side == "outputs" else port
            if tensor.reordering not in ("NONE", "") and port not in _REORDERED:
                self.say(f"{name}.reordering_type", tensor.reordering, "NONE")
            if tensor.value is not None and port != "attn_scale":
                got = f"the constant {tensor.value}, held by the graph"
                self.say(name, got, "a tensor bound at execute")
            meaning = [(tensor.uid, name, (side, tensor.dtype, tensor.dim, _steps(tensor)))]
            if (ragged := tensor.ragged_offset) is not None:
                what, steps = f"{name}.ragged_offset", _steps(ragged)
                meaning.append((ragged.uid, what, ("inputs", ragged.dtype, ragged.dim, steps)))
                if steps[:1] not in ((), (1,)):
                    self.say(f"{what}.stride[0]", steps[0], "1")
            for uid, what, declared in meaning:
                other, before = seen.setdefault(uid, (what, declared))
                if before != declared:
                    got = f"{uid}, also of {other}, which is declared otherwise"
                    self.say(f"{what}.uid", got, "one tensor for each uid")

    # ---- parts

    def band(self) -> Band:
        return band.resolve(self.node.op, self.params, self.bad)

    def generate_stats(self) -> bool:
        """`generate_stats` wins over the deprecated `is_inference`; neither means no Stats."""
        is_inference = self.flag("is_inference")
        if "generate_stats" in self.params:
            return self.flag("generate_stats")
        return "is_inference" in self.params and not is_inference

    def softmax_precision(self) -> DType | None:
        value = self.params.get("softmax_precision")
        if value is None:
            return None
        found = DType.parse(value)
        if found not in (DType.HALF, DType.FLOAT):
            self.say("softmax_precision", shown(value), "HALF or FLOAT")
        return found

    def implementation(self) -> str:
        value = self.params.get("implementation", "AUTO")
        if value in _IMPLEMENTATIONS:
            return str(value)
        self.say("implementation", shown(value), " or ".join(_IMPLEMENTATIONS))
        return "AUTO"

    def attn_scale(self) -> Scale:
        tensor = self.node.inputs.get("attn_scale")
        value = self.params.get("attn_scale")
        if tensor is not None:
            operand = self.inputs["attn_scale"]
            if not tensor.pass_by_value:
                return Scale(form="device", operand=operand)
            held = None if tensor.value is None else self.finite("attn_scale", tensor.value)
            return Scale(form="pass_by_value", value=held, operand=operand)
        if value is None:
            return Scale()
        found = self.finite("attn_scale", value)
        return Scale() if found is None else Scale(form="host", value=found)

    def finite(self, name: str, value: Any) -> float | None:
        """A number, bool excepted; anything else, NaN and infinity too, is a contradiction."""
        if not isinstance(value, bool) and isinstance(value, (int, float)):
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            if math.isfinite(found):
                return found
        self.say(name, shown(value), "a finite float or a tensor")
        return None

    def fp8_scale(self, name: str) -> Operand | None:
        operand = self.inputs.get(name)
        if operand is None and name not in self.params:
            self.say(name, "missing", "a FLOAT tensor of one element")
        return operand

    def lengths(self, side: Literal["q", "kv"]) -> Lengths:
        plain, prefix = f"seq_len_{side}", f"cu_seq_len_{side}"
        given = [name for name in (plain, prefix) if name in self.inputs]
        if len(given) == 2:
            self.say(prefix, f"set beside {plain}", f"{plain} or {prefix}")
        if not given:
            tried = plain in self.params or prefix in self.params
            if self.params.get("use_padding_mask") is True and not tried:
                self.say(plain, "missing", f"{plain} or {prefix} with use_padding_mask")
            return Lengths()
        form: Literal["seq_len", "cu_seq_len"] = "seq_len" if given[0] == plain else "cu_seq_len"
        return Lengths(form=form, operand=self.inputs[given[0]])

    def paging(self, k: Operand, v: Operand) -> Paging | None:
        k_table = self.inputs.get("paged_attention_k_table")
        v_table = self.inputs.get("paged_attention_v_table")
        maximum = self.integer("paged_attention_max_seq_len_kv")
        if k_table is None and v_table is None:
            if maximum is not None:
                got = f"{maximum}, without a page table"
                self.say("paged_attention_max_seq_len_kv", got, "a paged graph")
            return None
        extents = [t.dim[2] for t in (k_table, v_table) if t is not None and len(t.dim) == 4]
        return Paging(
            k_table=k_table,
            v_table=v_table,
            page_size_k=k.dim[2] if k_table is not None else None,
            page_size_v=v.dim[2] if v_table is not None else None,
            pages_per_seq=extents[0] if extents else 0,
            max_seq_len_kv=maximum,
        )

    def logical_s_kv(self, k: Operand, paging: Paging | None) -> int:
        """Declared maximum when paged, else what K's table can hold, else K's extent."""
        if paging is None:
            return k.dim[2]
        if paging.max_seq_len_kv is not None:
            return paging.max_seq_len_kv
        if paging.k_table is None:
            return k.dim[2]
        return paging.pages_per_seq * (paging.page_size_k or 0)

    def dropout(self) -> Dropout | None:
        """(probability, seed, offset) or (mask, scale); a probability of 0 is no dropout."""
        count = dropout_count(self.node)
        if count == 0:
            declared = self.params.get(DROPOUT_COUNT, 0)
            if declared != 0 or isinstance(declared, bool):
                self.say("dropout", f"{shown(declared)} elements", "two or three elements")
            return None
        tensors = [self.inputs.get(f"dropout_{i}") for i in range(count)]
        values = [self.params.get(f"dropout_{i}") for i in range(count)]
        if count == 2 and None not in tensors:
            return Dropout(form="mask", mask=tensors[0], scale=tensors[1])
        if count == 3 and tensors[0] is None and None not in tensors[1:]:
            value: Any = values[0]
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < 1:
                self.say("dropout[0]", shown(value), "a probability from 0 to below 1")
                return Dropout(form="philox", seed=tensors[1], offset=tensors[2])
            if value == 0:
                return None
            chance = float(value)
            return Dropout(form="philox", probability=chance, seed=tensors[1], offset=tensors[2])
        kinds = [
            shown(v) if t is None else "a tensor" for t, v in zip(tensors, values, strict=True)
        ]
        want = "(probability, seed, offset) or (mask, scale), tensors but for the probability"
        self.say("dropout", f"({', '.join(kinds)})", want)
        return None
