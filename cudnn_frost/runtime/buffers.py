"""What a caller binds at execute, read once: address, bytes, and whether it fits its declaration.

A bound buffer lends its address and its bytes; the declaration says what they mean. So a dense
buffer of another shape or a byte blob is taken as declared, and what cannot be meant (a strided
view with strides of its own, another element type, too few bytes, the wrong device) raises
ValueError naming the tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..analyzer.facts import Operand
from ..analyzer.layout import span_elements
from ..vocab import DType
from .device import pointer_is_device

if TYPE_CHECKING:
    import torch

_DTYPE_OF_NAME = {
    "float16": DType.HALF,
    "bfloat16": DType.BFLOAT16,
    "float32": DType.FLOAT,
    "float64": DType.DOUBLE,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
    "int32": DType.INT32,
    "int64": DType.INT64,
    "int8": DType.INT8,
    "uint8": DType.UINT8,
    "bool": DType.BOOLEAN,
}
_TORCH_NAME = {dtype: name for name, dtype in _DTYPE_OF_NAME.items()}
_BYTE_BLOBS = (DType.UINT8, DType.INT8)


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Row-major and compact, axes of extent 1 aside."""
    expected = 1
    for extent, step in zip(reversed(shape), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def as_strided_source(data: Any) -> Any:
    """The object itself when it speaks torch's spelling, else a torch view of it (zero-copy).

    Raises TypeError for an object that publishes no buffer.
    """
    if hasattr(data, "data_ptr") and callable(getattr(data, "stride", None)):
        return data
    import torch

    if hasattr(data, "__cuda_array_interface__"):
        return torch.as_tensor(data, device="cuda")
    if hasattr(data, "__dlpack__"):
        return torch.from_dlpack(data)
    kind = type(data).__name__
    raise TypeError(f"cannot bind a {kind}: pass a tensor, a DLPack object or an int address")


@dataclass(slots=True)
class Slot:
    """One operand of a plan and the checks its buffer must pass.

    path: where it stands in the facts. align: required alignment of the address, bytes.
    device: the ordinal the plan runs on; None when the plan runs anywhere.
    """

    path: str
    operand: Operand
    align: int = 1
    device: int | None = None
    uid: int = field(init=False)
    required_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        # a packed operand's extent is known to its offsets alone
        operand = self.operand
        self.uid = operand.uid
        packed = operand.ragged is not None
        span = 0 if packed else span_elements(operand.dim, operand.stride)
        self.required_bytes = span * operand.dtype.bytes

    @property
    def label(self) -> str:
        """How errors name the tensor."""
        operand = self.operand
        name = f" ({operand.name!r})" if operand.name else ""
        return f"tensor {self.path}{name}, uid {operand.uid}"

    def address(self, data: Any) -> int:
        """The checked address of a bound buffer; ValueError names the tensor and what is wrong."""
        if type(data) is int:
            pointer = data
        else:
            source = as_strided_source(data)
            self._check(source)
            pointer = source.data_ptr()
        if pointer % self.align:
            raise ValueError(f"{self.label}: address {pointer:#x} is not {self.align}-byte aligned")
        return pointer

    def _check(self, data: Any) -> None:
        operand = self.operand
        dtype = _DTYPE_OF_NAME.get(str(data.dtype).removeprefix("torch."), DType.OTHER)
        if dtype is not operand.dtype and dtype not in _BYTE_BLOBS:
            raise ValueError(f"{self.label}: bound as {data.dtype}, declared {operand.dtype}")
        if self.device is not None and data.device.type != "cuda":
            raise ValueError(f"{self.label}: bound on {data.device}, the plan runs on CUDA")
        if self.device is not None and data.device.index != self.device:
            raise ValueError(
                f"{self.label}: bound on {data.device}, the plan was built for cuda:{self.device}"
            )
        shape, stride = tuple(data.shape), tuple(data.stride())
        self._check_view(shape, stride)
        available = span_elements(shape, stride) * data.element_size()
        if available < self.required_bytes:
            raise ValueError(
                f"{self.label}: the bound buffer has {available} bytes, "
                f"the declaration spans {self.required_bytes}"
            )

    def _check_view(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        """A view of the declared extents with strides of its own would be read wrongly."""
        operand = self.operand
        if shape != operand.dim or is_dense(shape, stride):
            return
        # a packed tensor's batch stride means nothing
        first = 1 if operand.ragged is not None else 0
        axes = range(first, len(shape))
        if any(shape[a] != 1 and stride[a] != operand.stride[a] for a in axes):
            raise ValueError(
                f"{self.label}: bound with strides {list(stride)}, declared {list(operand.stride)}"
            )


def missing(slot: Slot) -> ValueError:
    """The error of a buffer that was not bound, in the frontend's words."""
    name = f" ({slot.operand.name!r})" if slot.operand.name else ""
    uid = slot.operand.uid
    return ValueError(f"the variant pack is missing a buffer for tensor uid {uid}{name}")


def workspace_address(data: Any, needed: int, alignment: int = 1) -> int:
    """The address of a workspace of at least `needed` bytes (0 when none is needed).

    Raises ValueError stating what is needed when it is missing, too small, strided or misaligned.
    """
    if needed == 0:
        return 0
    if data is None:
        raise ValueError(f"workspace: missing, the plan needs {needed} bytes")
    pointer = data if type(data) is int else _checked_workspace(data, needed)
    if pointer % alignment:
        raise ValueError(f"workspace: address {pointer:#x} is not {alignment}-byte aligned")
    return pointer


def _checked_workspace(data: Any, needed: int) -> int:
    data = as_strided_source(data)
    if not is_dense(tuple(data.shape), tuple(data.stride())):
        raise ValueError(f"workspace: must be contiguous, got strides {list(data.stride())}")
    available = data.numel() * data.element_size()
    if available < needed:
        raise ValueError(f"workspace: has {available} bytes, the plan needs {needed}")
    return data.data_ptr()


class _DeviceBytes:
    """A device address range as an array-interface producer."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class TorchViews:
    """Strided torch views of bound buffers, as declared: how the reference row reads and writes.

    bound: uid -> what the caller bound (torch tensor, DLPack object or int address).
    device: where the operands are.
    """

    def __init__(self, bound: Mapping[int, Any], device: torch.device) -> None:
        self._bound = bound
        self._device = device

    def view(
        self, operand: Operand, dim: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """The operand's elements from `offset` elements behind its address on.

        Raises ValueError naming the tensor when the view would leave the bound buffer.
        """
        import torch

        data = self._bound[operand.uid]
        dtype = getattr(torch, _TORCH_NAME[operand.dtype])
        extent = span_elements(dim, stride)
        if extent == 0:
            # nothing is touched, wherever an empty sequence's offset may point
            return torch.empty(dim, dtype=dtype, device=self._device)
        span = offset + extent
        if type(data) is int:
            source = _bytes_at(data, max(span, 0) * operand.dtype.bytes)
            available, start = source.numel(), 0
        else:
            source = as_strided_source(data)
            bound = span_elements(tuple(source.shape), tuple(source.stride()))
            available = bound * source.element_size()
            start = source.storage_offset() * source.element_size()
        if offset < 0 or span * operand.dtype.bytes > available:
            raise ValueError(
                f"tensor {operand.name!r}, uid {operand.uid}: elements up to {span} are needed, "
                f"the bound buffer has {available} bytes"
            )
        if start % operand.dtype.bytes:
            raise ValueError(
                f"tensor {operand.name!r}, uid {operand.uid}: its address is not a multiple of "
                f"its element size, {operand.dtype.bytes} bytes"
            )
        first = start // operand.dtype.bytes + offset
        empty = torch.empty(0, dtype=dtype, device=source.device)
        return empty.set_(source.untyped_storage(), first, dim, stride)


def _bytes_at(pointer: int, nbytes: int) -> torch.Tensor:
    """A byte tensor over raw memory, on the device the driver says it is on."""
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pointer_is_device(pointer):
        return torch.as_tensor(_DeviceBytes(pointer, nbytes), device="cuda")
    raw = (ctypes.c_uint8 * nbytes).from_address(pointer)
    return torch.frombuffer(raw, dtype=torch.uint8)
