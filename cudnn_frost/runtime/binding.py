"""The forms in which a caller hands over buffers, reduced to uid -> buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..analyzer.record import GraphRecord


class Names:
    """Tensor names of a declaration; built once per graph."""

    def __init__(self, record: GraphRecord) -> None:
        self.uid_of: dict[str, int] = {}
        self.ambiguous: set[str] = set()
        for node in record.nodes:
            for tensor in (*node.inputs.values(), *node.outputs.values()):
                self._add(tensor.name, tensor.uid)
                if tensor.ragged_offset is not None:
                    self._add(tensor.ragged_offset.name, tensor.ragged_offset.uid)

    def _add(self, name: str, uid: int) -> None:
        if name and self.uid_of.setdefault(name, uid) != uid:
            self.ambiguous.add(name)

    def resolve(self, name: str) -> int:
        """The uid of a name; KeyError when unknown, ValueError when several tensors carry it."""
        if name in self.ambiguous:
            raise ValueError(
                f"tensor name {name!r} is ambiguous (duplicate labels); "
                "key the variant pack by uid or Tensor"
            )
        return self.uid_of[name]


def bind_mapping(pack: Mapping[Any, Any], names: Names, auto: Mapping[int, Any]) -> dict[int, Any]:
    """A mapping keyed by tensor, name or uid; None keys are ignored and explicit buffers win."""
    bound = dict(auto)
    for key, data in pack.items():
        kind = type(key)
        if kind is int:
            bound[key] = data
        elif kind is str:
            bound[names.resolve(key)] = data
        elif key is not None:
            try:
                bound[key.uid] = data
            except AttributeError:
                bound[key.get_uid()] = data
    return bound


def bind_ordered(
    buffers: Sequence[Any], tensor_uids: Sequence[int], auto: Mapping[int, Any]
) -> dict[int, Any]:
    """Buffers in the order of `tensor_uids`; ValueError on unequal lengths or a repeated uid."""
    if isinstance(buffers, Mapping):
        raise ValueError("with tensor_uids, pass the buffers as a list or tuple, not a mapping")
    if len(buffers) != len(tensor_uids):
        raise ValueError(
            f"tensor_uids names {len(tensor_uids)} tensors, {len(buffers)} buffers were passed"
        )
    bound = dict(auto)
    seen: set[int] = set()
    for uid, data in zip(tensor_uids, buffers, strict=True):
        if uid in seen:
            raise ValueError(f"Duplicate tensor uid {uid} in tensor_uids")
        seen.add(uid)
        bound[uid] = data
    return bound


def apply_overrides(
    record: GraphRecord,
    uids: Sequence[int],
    shapes: Sequence[Sequence[int]] | None,
    strides: Sequence[Sequence[int]] | None,
) -> GraphRecord:
    """The declaration with these tensors' extents and strides (elements) replaced.

    Raises ValueError when the three lists differ in length or a uid is not in the graph.
    """
    shapes, strides = shapes or (), strides or ()
    if not len(uids) == len(shapes) == len(strides):
        raise ValueError(
            "override_uids, override_shapes and override_strides must name the same tensors: got "
            f"{len(uids)}, {len(shapes)} and {len(strides)} entries"
        )
    wanted = dict(zip(uids, zip(shapes, strides, strict=True), strict=True))
    known: set[int] = set()

    def replaced(tensor: Any) -> Any:
        known.add(tensor.uid)
        if tensor.uid not in wanted:
            return tensor
        shape, stride = wanted[tensor.uid]
        return tensor.model_copy(update={"dim": tuple(shape), "stride": tuple(stride)})

    nodes = tuple(
        node.model_copy(
            update={
                side: {port: replaced(t) for port, t in getattr(node, side).items()}
                for side in ("inputs", "outputs")
            }
        )
        for node in record.nodes
    )
    for uid in uids:
        if uid not in known:
            raise ValueError(
                f"override_uids names tensor uid {uid}, which is not an operand of this graph"
            )
    return record.model_copy(update={"nodes": nodes})
