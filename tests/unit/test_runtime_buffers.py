"""What may be bound to an operand, and how it is named when it may not."""

from __future__ import annotations

import pytest
import torch

from cudnn_frost.analyzer.facts import Operand, Ragged
from cudnn_frost.runtime.buffers import Slot, TorchViews, workspace_address
from cudnn_frost.vocab import DType


def operand(dim=(2, 3, 4, 8), stride=None, dtype=DType.BFLOAT16, **kwargs) -> Operand:
    if stride is None:
        stride = [1]
        for extent in reversed(dim[1:]):
            stride.insert(0, stride[0] * extent)
    return Operand(uid=7, name="K", dtype=dtype, dim=dim, stride=tuple(stride), **kwargs)


def slot(align=1, **kwargs) -> Slot:
    return Slot("k", operand(**kwargs), align)


def test_the_address_is_the_tensors():
    x = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    assert slot().address(x) == x.data_ptr()


def test_a_dense_buffer_of_another_shape_is_read_as_declared():
    x = torch.zeros(2 * 3 * 4 * 8, dtype=torch.bfloat16)
    assert slot().address(x) == x.data_ptr()


def test_bytes_are_read_as_declared():
    x = torch.zeros(2 * 3 * 4 * 8 * 2, dtype=torch.uint8)
    assert slot().address(x) == x.data_ptr()


def test_a_bare_address_is_taken():
    assert slot().address(4096) == 4096


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (torch.zeros(2, 3, 4, 8, dtype=torch.float16), "bound as torch.float16"),
        (torch.zeros(2, 3, 4, 8, dtype=torch.float32), "bound as torch.float32"),
        (torch.zeros(2, 3, 4, 7, dtype=torch.bfloat16), "336 bytes"),
        (torch.zeros(2, 4, 3, 8, dtype=torch.bfloat16).transpose(1, 2), "bound with strides"),
    ],
)
def test_what_cannot_be_meant_names_the_tensor(bound, said):
    with pytest.raises(ValueError, match=said) as error:
        slot().address(bound)
    assert "tensor k ('K'), uid 7" in str(error.value)


def test_a_rejected_buffer_stays_rejected():
    checked = slot()
    bad = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError):
            checked.address(bad)


def test_an_int64_table_is_not_an_int32_table():
    with pytest.raises(ValueError, match=r"bound as torch\.int64, declared INT32"):
        slot(dtype=DType.INT32).address(torch.zeros(2, 3, 4, 8, dtype=torch.int64))


def test_a_packed_tensors_batch_stride_means_nothing():
    ragged = Ragged(uid=9, dtype=DType.INT32, dim=(3, 1, 1, 1))
    packed = Slot("q", operand(stride=(24, 8, 24, 1), ragged=ragged))
    view = torch.zeros(4096, dtype=torch.bfloat16).as_strided((2, 3, 4, 8), (96, 8, 24, 1))
    assert packed.address(view) == view.data_ptr()


@pytest.mark.parametrize("address", [4097, 4104])
def test_an_unaligned_address_names_the_tensor(address):
    with pytest.raises(ValueError, match=r"tensor k .* not 16-byte aligned"):
        slot(align=16).address(address)


def test_a_host_buffer_is_refused_by_a_device_plan():
    bound = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bound on cpu"):
        Slot("k", operand(), device=0).address(bound)


def test_something_without_a_buffer_is_a_type_error():
    with pytest.raises(TypeError, match="cannot bind a object"):
        slot().address(object())


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "needs 64 bytes"), (torch.zeros(63, dtype=torch.uint8), "has 63 bytes.*needs 64")],
)
def test_a_short_workspace_states_the_size(given, said):
    with pytest.raises(ValueError, match=said):
        workspace_address(given, 64)


def test_a_strided_workspace_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        workspace_address(torch.zeros(64, 4, dtype=torch.uint8)[:, :2], 64)


def test_no_workspace_is_asked_for_when_none_is_needed():
    assert workspace_address(None, 0) == 0


@pytest.mark.parametrize("as_address", [False, True])
def test_views_read_the_declaration(as_address):
    x = torch.arange(2 * 3 * 4 * 8, dtype=torch.float32).bfloat16()
    views = TorchViews({7: x.data_ptr() if as_address else x}, torch.device("cpu"))
    seen = views.view(operand(), (4, 8), (8, 1), offset=96)
    assert torch.equal(seen, x[96:128].view(4, 8))
    seen.zero_()
    assert float(x[96:128].abs().sum()) == 0


def test_a_view_beyond_the_buffer_names_the_tensor():
    views = TorchViews({7: torch.zeros(10, dtype=torch.bfloat16)}, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"tensor .K., uid 7.*bytes"):
        views.view(operand(), (4, 8), (8, 1))
