"""Plans that can run: immutable, shareable between threads, launched on the caller's stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..analyzer.facts import SdpaFacts
from .buffers import Slot, TorchViews, as_strided_source, missing, workspace_address
from .device import current_device, pointer_is_device
from .launcher import launcher

_LOG = logging.getLogger("cudnn_frost")

WORKSPACE_ALIGNMENT = 16
"""Of a workspace's address, bytes."""


class CompiledPlan(Protocol):
    """What a built row plan answers to.

    workspace_bytes: scratch that the caller must pass to `execute`.
    key: the compile key; plans of one key share one compiled artifact.
    """

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def key(self) -> str: ...

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        """Run on `stream` (a CUDA stream address, None or 0 = the default stream).

        bound: uid -> buffer. Raises ValueError naming the tensor that is missing or unusable.
        """


def slots_of(facts: SdpaFacts, device: int | None, aligned: Mapping[str, int]) -> dict[str, Slot]:
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
        return cls(facts, tuple(slots_of(facts, None, {}).values()))

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        from ..engines.reference import run_reference

        devices = set()
        for slot in self.slots:
            data = bound.get(slot.uid)
            if data is None:
                raise missing(slot)
            slot.address(data)
            if type(data) is not int and slot.path != "attn_scale":
                devices.add(as_strided_source(data).device)
        if len(devices) > 1:
            shown = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"buffers are bound on several devices: {shown}")
        device = devices.pop() if devices else self._device_of_addresses(bound)
        with self._on_stream(stream, device):
            run_reference(self.facts, TorchViews(bound, device))

    def _device_of_addresses(self, bound: Mapping[int, Any]) -> Any:
        """Where bare addresses live, when nothing but addresses is bound."""
        import torch

        on_cuda = pointer_is_device(bound[self.facts.o.uid])
        return torch.device("cuda", current_device()) if on_cuda else torch.device("cpu")

    @staticmethod
    def _on_stream(stream: int | None, device: Any) -> Any:
        import torch

        if device.type != "cuda":
            return nullcontext()
        if stream:
            return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device))
        return torch.cuda.stream(torch.cuda.default_stream(device))


class SteadyState:
    """A plan's launch for buffers that look as some that its checks have passed before.

    It holds no rule of its own: what it does not recognize is left to the checks.
    """

    def __init__(self, plan: KernelPlan) -> None:
        used = [(place, slot) for place, slot in enumerate(plan.pointers) if slot is not None]
        places, alignments = [place for place, _ in used], [slot.align for _, slot in used]
        self._uids = tuple(slot.uid for _, slot in used)
        self._takes_workspace = plan.workspace_index is not None
        if plan.workspace_index is not None:
            places.append(plan.workspace_index)
            alignments.append(WORKSPACE_ALIGNMENT)
        count = len(plan.pointers)
        recognize = launcher().get_function("recognize")
        self._launch, self._remember = recognize(
            plan.entry, plan.constants, places, alignments, count
        )

    def launch(self, bound: Mapping[int, Any], workspace: Any, stream: int) -> bool:
        """Launch, or False and nothing happened."""
        try:
            buffers = [bound[uid] for uid in self._uids]
            if self._takes_workspace:
                buffers.append(workspace)
            return self._launch(*buffers, stream)
        except (KeyError, TypeError, BufferError):
            # missing, or nothing that can be handed over: the checks say it by name
            return False

    def remember(self, bound: Mapping[int, Any], workspace: Any) -> None:
        """These buffers passed the checks."""
        buffers = [bound[uid] for uid in self._uids]
        with suppress(TypeError, BufferError):
            self._remember(*buffers, *([workspace] if self._takes_workspace else []))


@dataclass(frozen=True)
class KernelPlan:
    """A compiled kernel and everything about its call that the declaration fixes.

    entry: the compiled host entry: `entry(pointers, *constants, stream)`.
    pointers: the slots behind its addresses, in order; None is an absent operand (0).
    workspace_index: the place of the workspace among the addresses, None when it takes none.
    """

    entry: Callable[..., Any]
    key: str
    pointers: tuple[Slot | None, ...]
    constants: tuple[Any, ...]
    workspace_index: int | None = None
    workspace_bytes: int = 0
    _steady: SteadyState | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            steady = SteadyState(self)
        except NotImplementedError as error:
            _LOG.info("every execute checks in Python: %s", error)
            steady = None
        object.__setattr__(self, "_steady", steady)

    def execute(self, bound: Mapping[int, Any], workspace: Any, stream: int | None) -> None:
        steady = self._steady
        if steady is not None and steady.launch(bound, workspace, stream or 0):
            return
        self._checked(bound, workspace, stream or 0)
        if steady is not None:
            steady.remember(bound, workspace)

    def _checked(self, bound: Mapping[int, Any], workspace: Any, stream: int) -> None:
        addresses = []
        for slot in self.pointers:
            if slot is None:
                addresses.append(0)
            elif (data := bound.get(slot.uid)) is not None:
                addresses.append(slot.address(data))
            else:
                raise missing(slot)
        if self.workspace_index is not None:
            addresses[self.workspace_index] = workspace_address(
                workspace, self.workspace_bytes, WORKSPACE_ALIGNMENT
            )
        self.entry(tuple(addresses), *self.constants, stream)
