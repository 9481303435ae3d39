"""Plans that can run: immutable, shareable between threads, launched on the caller's stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from ..analyzer.facts import SdpaFacts
from .buffers import Slot, TorchViews, as_strided_source, missing, workspace_address


class CompiledPlan(Protocol):
    """What a built row plan answers to.

    workspace_bytes: scratch that the caller must pass to `execute`.
    key: the compile key; plans of one key share one compiled artifact.
    """

    workspace_bytes: int
    key: str

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        """Run on `stream` (a CUDA stream address, None or 0 = the default stream).

        bound: uid -> buffer. Raises ValueError naming the tensor that is missing or unusable.
        """


def _slots(facts: SdpaFacts, device: int | None, aligned: Mapping[str, int]) -> dict[str, Slot]:
    """A slot for every operand the caller must bind; known host scalars need none."""
    slots = {}
    for path, operand in facts.operands().items():
        if path == "attn_scale" and facts.attn_scale.value is not None:
            continue
        on_host = path == "attn_scale" and facts.attn_scale.form == "pass_by_value"
        slots[path] = Slot(path, operand, aligned.get(path, 1), None if on_host else device)
    return slots


@dataclass(frozen=True)
class ReferencePlan:
    """The reference row on whatever device the buffers are. It synchronizes and allocates."""

    facts: SdpaFacts
    slots: tuple[Slot, ...]
    workspace_bytes: int = 0
    key: str = "reference"

    @classmethod
    def build(cls, facts: SdpaFacts) -> ReferencePlan:
        return cls(facts, tuple(_slots(facts, None, {}).values()))

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        from ..engines.reference import run_reference

        devices = set()
        for slot in self.slots:
            data = bound.get(slot.operand.uid)
            if data is None:
                raise missing(slot)
            slot.address(data)
            if type(data) is not int and slot.path != "attn_scale":
                devices.add(as_strided_source(data).device)
        if len(devices) > 1:
            shown = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"buffers are bound on several devices: {shown}")
        device = devices.pop() if devices else None
        with self._on_stream(stream, device):
            run_reference(self.facts, TorchViews(bound))

    @staticmethod
    def _on_stream(stream: int | None, device: Any) -> Any:
        import torch

        on_cuda = device.type == "cuda" if device is not None else torch.cuda.is_available()
        if not on_cuda:
            return nullcontext()
        if stream:
            return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))
        return torch.cuda.stream(torch.cuda.default_stream(device))


@dataclass(frozen=True)
class KernelPlan:
    """A compiled kernel and everything about its call that the declaration fixes.

    entry: the compiled host entry, called with `arguments` once their holes are filled.
    arguments: constants in the entry's order; None at the holes below.
    pointers: (position, slot) of each operand's address.
    stream_position, workspace_position: where those go; None = the entry takes none.
    """

    entry: Callable[..., Any]
    key: str
    arguments: tuple[Any, ...]
    pointers: tuple[tuple[int, Slot], ...]
    stream_position: int
    workspace_position: int | None = None
    workspace_bytes: int = 0

    @classmethod
    def build(
        cls,
        entry: Callable[..., Any],
        key: str,
        names: Sequence[str],
        values: Mapping[str, Any],
        slots: Mapping[str, Slot],
        workspace_bytes: int = 0,
    ) -> KernelPlan:
        """names: the entry's arguments in order: a value, a slot, `workspace` or `stream`."""
        pointers = tuple((names.index(name), slot) for name, slot in slots.items())
        return cls(
            entry=entry,
            key=key,
            arguments=tuple(values.get(name) for name in names),
            pointers=pointers,
            stream_position=names.index("stream"),
            workspace_position=names.index("workspace") if "workspace" in names else None,
            workspace_bytes=workspace_bytes,
        )

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        arguments = list(self.arguments)
        for position, slot in self.pointers:
            data = bound.get(slot.operand.uid)
            if data is None:
                raise missing(slot)
            arguments[position] = slot.address(data)
        if self.workspace_position is not None:
            address = workspace_address(workspace, self.workspace_bytes)
            arguments[self.workspace_position] = address
        arguments[self.stream_position] = stream or 0
        self.entry(*arguments)
