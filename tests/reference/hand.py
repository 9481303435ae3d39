"""Graphs of one sdpa node written by hand, out of torch tensors."""

from __future__ import annotations

import cudnn
import torch

from .oracle import oracle

TYPES = {
    torch.float16: cudnn.data_type.HALF,
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float32: cudnn.data_type.FLOAT,
    torch.float64: cudnn.data_type.DOUBLE,
    torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
    torch.float8_e5m2: cudnn.data_type.FP8_E5M2,
    torch.int32: cudnn.data_type.INT32,
    torch.int64: cudnn.data_type.INT64,
    torch.bool: cudnn.data_type.BOOLEAN,
}


class Attention:
    """A graph made of torch tensors: every tensor keyword becomes a graph tensor of its geometry.

    `words` are the op's keywords. `ragged` maps a port (q, k, v, O, Stats) to (offsets tensor,
    multiplier, declared dim, declared stride). Outputs are declared and have no buffers. A call
    gives the oracle's values of a port.
    """

    def __init__(self, q, k, v, *, op="sdpa", ragged=None, o_dtype=None, **words) -> None:
        self.graph = cudnn.pygraph(
            io_data_type=TYPES[q.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self.buffers, self.ragged = {}, ragged or {}
        qkv = [self.tensor(x, port) for x, port in ((q, "q"), (k, "k"), (v, "v"))]
        words = {name: self.word(name, value) for name, value in words.items()}
        out = getattr(self.graph, op)(*qkv, **{"generate_stats": True, **words})
        o, stats = out[0], out[1]
        for port, tensor, dtype in (
            ("O", o, TYPES[o_dtype or q.dtype]),
            ("Stats", stats, cudnn.data_type.FLOAT),
        ):
            if tensor is not None:
                tensor.set_output(True).set_data_type(dtype)
                self.pack(tensor, port)
        self.graph.validate()

    def word(self, name, value):
        if isinstance(value, tuple):
            return tuple(self.word(name, x) for x in value)
        return self.tensor(value, name) if isinstance(value, torch.Tensor) else value

    def tensor(self, x: torch.Tensor, port: str):
        dim, stride = list(x.shape), list(x.stride())
        if port in self.ragged:
            dim, stride = (list(part) for part in self.ragged[port][2:])
        t = self.graph.tensor(dim=dim, stride=stride, data_type=TYPES[x.dtype])
        self.buffers[t.uid] = x
        return self.pack(t, port)

    def pack(self, tensor, port: str):
        if port in self.ragged:
            offsets, multiplier = self.ragged[port][:2]
            tensor.set_ragged_offset(self.tensor(offsets, ""))
            tensor.set_ragged_offset_multiplier(multiplier)
        return tensor

    def __call__(self, port: str = "O") -> torch.Tensor:
        return oracle(self.graph, self.buffers)[port].values
