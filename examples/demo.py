"""Two attention graphs from declaration to checked result, on whatever machine this is.

A bf16 causal GQA prefill and an FP8 paged decode with a block table: for each, the ranked plans and
every row's reasons here and on Hopper, then execution by the first plan that builds and a check
against plain torch. On a machine without a GPU the reference row serves.
"""

from __future__ import annotations

import math
import sys

import cudnn
import torch

import cudnn_frost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prefill() -> tuple[float, float]:
    """bf16, causal, 8 query heads on 2 KV heads. Returns (relative error, its bound)."""
    b, h_q, h_kv, s, d = 2, 8, 2, 256, 128
    scale = 1 / math.sqrt(d)
    q = torch.randn(b, s, h_q, d, device=DEVICE).bfloat16().transpose(1, 2)
    k, v = (torch.randn(b, s, h_kv, d, device=DEVICE).bfloat16().transpose(1, 2) for _ in "kv")
    o = torch.full_like(q, float("nan"))
    stats = torch.full((b, h_q, s, 1), float("nan"), device=DEVICE)

    g = cudnn_frost.Graph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(),
    )
    tq, tk, tv = (
        g.tensor(dim=list(x.shape), stride=list(x.stride()), name=n, uid=uid)
        for uid, (n, x) in enumerate([("q", q), ("k", k), ("v", v)], 1)
    )
    to, ts = g.sdpa(
        q=tq,
        k=tk,
        v=tv,
        attn_scale=scale,
        use_causal_mask=True,
        generate_stats=True,
        name="prefill",
    )
    to.set_output(True).set_uid(4).set_dim(list(o.shape)).set_stride(list(o.stride()))
    ts.set_output(True).set_uid(5).set_data_type(cudnn.data_type.FLOAT)
    _plan_and_run(g, {1: q, 2: k, 3: v, 4: o, 5: stats})

    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, scale=scale, enable_gqa=True
    )
    return _error(o, expected), 2e-2


def paged_decode() -> tuple[float, float]:
    """E4M3 K/V pages behind a block table, one query token a sequence, bf16 output."""
    b, h_q, h_kv, d, page, pages_per_seq = 3, 8, 2, 128, 16, 8
    lengths = torch.tensor([1, 37, 128], dtype=torch.int32, device=DEVICE)
    pool_shape = (b * pages_per_seq, page, h_kv, d)
    k_pool, v_pool = (torch.randn(pool_shape, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv")
    q = torch.randn(b, h_q, 1, d, device=DEVICE).to(torch.float8_e4m3fn)
    table = torch.randperm(b * pages_per_seq, device=DEVICE, dtype=torch.int32).view(b, 1, -1, 1)
    o = torch.full((b, h_q, 1, d), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    ones = torch.ones(b, 1, 1, 1, dtype=torch.int32, device=DEVICE)
    unit = torch.ones(1, 1, 1, 1, device=DEVICE)
    descale_k = torch.full((1, 1, 1, 1), 0.5, device=DEVICE)

    g = cudnn_frost.Graph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(),
    )

    def declare(name: str, uid: int, x: torch.Tensor, data_type: object = None) -> cudnn.Tensor:
        return g.tensor(
            dim=list(x.shape), stride=list(x.stride()), data_type=data_type, name=name, uid=uid
        )

    int32, fp32 = cudnn.data_type.INT32, cudnn.data_type.FLOAT
    pools = k_pool.transpose(1, 2), v_pool.transpose(1, 2)
    to, _, _, _ = g.sdpa_fp8(
        q=declare("q", 1, q),
        k=declare("k_pool", 2, pools[0]),
        v=declare("v_pool", 3, pools[1]),
        descale_q=declare("descale_q", 10, unit, fp32),
        descale_k=declare("descale_k", 11, descale_k, fp32),
        descale_v=declare("descale_v", 12, unit, fp32),
        descale_s=declare("descale_s", 13, unit, fp32),
        scale_s=declare("scale_s", 14, unit, fp32),
        scale_o=declare("scale_o", 15, unit, fp32),
        attn_scale=1 / math.sqrt(d),
        use_padding_mask=True,
        seq_len_q=declare("seq_len_q", 20, ones, int32),
        seq_len_kv=declare("seq_len_kv", 21, lengths.view(b, 1, 1, 1), int32),
        paged_attention_k_table=declare("table_k", 22, table, int32),
        paged_attention_v_table=declare("table_v", 23, table, int32),
        paged_attention_max_seq_len_kv=page * pages_per_seq,
        generate_stats=False,
        name="decode",
    )
    to.set_output(True).set_uid(4).set_data_type(cudnn.data_type.BFLOAT16)
    to.set_dim(list(o.shape)).set_stride(list(o.stride()))
    buffers = {1: q, 2: pools[0], 3: pools[1], 4: o, 10: unit, 11: descale_k, 12: unit}
    buffers |= {13: unit, 14: unit, 15: unit, 20: ones, 21: lengths, 22: table, 23: table}
    _plan_and_run(g, buffers)

    expected = torch.empty(o.shape, device=DEVICE)
    for i, length in enumerate(lengths.tolist()):
        rows = table[i, 0, :, 0].long()
        k, v = (
            pool[rows].float().reshape(-1, h_kv, d)[:length].repeat_interleave(h_q // h_kv, 1)
            for pool in (k_pool, v_pool)
        )
        scores = torch.einsum("hd,khd->hk", q[i, :, 0].float(), k * 0.5) / math.sqrt(d)
        expected[i, :, 0] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    return _error(o, expected), 2e-2


def _handle() -> cudnn.Handle | None:
    return cudnn.create_handle() if DEVICE == "cuda" else None


def _plan_and_run(g: cudnn_frost.Graph, buffers: dict[int, torch.Tensor]) -> None:
    """Plan, print the list and the reasons, build, execute, print who served."""
    g.validate()
    g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    print(g.explain())
    print(f"\nand on sm90:\n\n{g.explain('sm90').rows_text()}")
    g.build()
    nbytes = g.get_workspace_size()
    workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=DEVICE)
    g.execute(buffers, workspace)
    engine = g.selected_engine
    print(f"\nserved by: {engine.name if engine is not None else 'the cuDNN backend'}")


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN when anything was left unwritten."""
    return float((actual.float() - expected).norm() / expected.norm())


def main() -> int:
    torch.manual_seed(0)
    failed = False
    for title, run in (("bf16 causal GQA prefill", prefill), ("FP8 paged decode", paged_decode)):
        print(f"\n=== {title} on {DEVICE} ===")
        error, bound = run()
        good = error <= bound
        failed |= not good
        print(f"relative error {error:.2e}, bound {bound:.0e}: {'ok' if good else 'WRONG'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
