"""The Hopper prefill kernel on a GPU, from libraries built elsewhere: checks, then timings.

    python tests/gpu/prefill_standalone.py build FOLDER    # any x86-64 machine with the CuTe DSL
    python tests/gpu/prefill_standalone.py check FOLDER    # Hopper: every case against float64
    python tests/gpu/prefill_standalone.py time FOLDER     # Hopper: beside torch's own attention

The folder's `manifest.json` names the configuration of each library.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cudnn_frost.kernels.configs.prefill_sm90 import (
    PrefillArgs,
    PrefillBand,
    PrefillExtents,
    PrefillPointers,
    PrefillSm90Config,
    PrefillStrides,
    shipped_configs,
)
from cudnn_frost.runtime import artifacts
from cudnn_frost.vocab import DType


def build(folder: Path, configs: list[PrefillSm90Config]) -> None:
    """Compile and write each configuration, and the manifest."""
    from cudnn_frost.kernels.sm90 import prefill

    folder.mkdir(parents=True, exist_ok=True)
    manifest = []
    for index, config in enumerate(configs):
        start = time.time()
        file = f"prefill_{index}.so"
        artifacts.export(prefill.compile(config, config.signature()), folder / file)
        manifest.append({"file": file, "config": asdict(config)})
        print(f"{time.time() - start:5.1f} s  {config.key()}", flush=True)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


class Kernels:
    """The libraries of a folder, loaded when first used."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = {}
        self.loaded = {}
        for entry in json.loads((folder / "manifest.json").read_text()):
            values = {**entry["config"], "dtype": DType(entry["config"]["dtype"])}
            self.files[PrefillSm90Config(**values)] = entry["file"]

    def get(self, config: PrefillSm90Config):
        if config not in self.loaded:
            self.loaded[config] = artifacts.load(self.folder / self.files[config])
        return self.loaded[config]


# layouts: (B, H, S, D) views with unit head-dimension stride, NaN in the memory between


def strides_of(layout: str, b: int, h: int, s: int, d: int) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements."""
    return {
        "bshd": (s * h * d, d, h * d),
        "bhsd": (h * s * d, s * d, d),
        "interleaved": (s * 3 * h * d, d, 3 * h * d),
        "padded": (h * s * (d + 8) + 64, s * (d + 8), d + 8),
        "sbhd": (h * d, d, b * h * d),
        "far_batch": (2**31 + 1024, s * d, d),
        "far_row": (h * d, d, 2**23 + 64),
        "one_head": (s * d, 0, d),
        "one_batch": (0, s * d, d),
    }[layout]


class Buffer:
    """A strided view of a buffer that is NaN everywhere else."""

    EDGE = 256

    def __init__(self, layout: str, shape: tuple[int, int, int, int], dtype):
        import torch

        b, h, s, d = shape
        self.strides = strides_of(layout, b, h, s, d)
        span = 1 + sum((n - 1) * st for n, st in zip(shape, (*self.strides, 1), strict=True))
        self.flat = torch.full((span + 2 * self.EDGE,), float("nan"), dtype=dtype, device="cuda")
        self.view = self.flat.as_strided(shape, (*self.strides, 1), self.EDGE)
        self.shape = shape

    def fill(self, values) -> Buffer:
        """A broadcast dimension takes its first slice."""
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)
        self.view[once].copy_(values[once])
        return self

    def stray_writes(self) -> int:
        """Elements outside the view that are no longer NaN."""
        import torch

        written = torch.zeros(self.flat.shape, dtype=torch.bool, device="cuda")
        written.as_strided(self.shape, (*self.strides, 1), self.EDGE).fill_(True)
        return int((~written & ~self.flat.isnan()).sum())


@dataclass(frozen=True)
class Case:
    """One problem.

    offset: the band's right end, None for none, "br" for bottom right. window: keys seen up to
    the right end (the diagonal where there is none), None for all.
    """

    name: str
    batch: int = 2
    heads: tuple[int, int, int] = (4, 2, 2)
    seq: tuple[int, int] = (256, 256)
    dims: tuple[int, int] = (128, 128)
    offset: int | str | None = None
    window: int | None = None
    scale: float = 1 / math.sqrt(128)
    layouts: tuple[str, str, str, str] = ("bshd", "bshd", "bshd", "bshd")
    data: str = "normal"
    dtype: str = "BFLOAT16"
    stats: bool = True

    @property
    def right(self) -> int | None:
        return self.seq[1] - self.seq[0] if self.offset == "br" else self.offset

    @property
    def left(self) -> int | None:
        return None if self.window is None else (self.right or 0) - self.window

    def hidden(self, i, j):
        """Which keys j rows i do not see; None when they see all."""
        hidden = None if self.right is None else j > i + self.right
        if self.left is None:
            return hidden
        before = j <= i + self.left
        return before if hidden is None else hidden | before


def make_data(case: Case, generator):
    """q, k, v as float32 on the device."""
    import torch

    def normal(h, s, d):
        return torch.randn((case.batch, h, s, d), device="cuda", generator=generator)

    (hq, hk, hv), (sq, sk), (dqk, dv) = case.heads, case.seq, case.dims
    q, k, v = normal(hq, sq, dqk), normal(hk, sk, dqk), normal(hv, sk, dv)
    if case.data == "near_minus_100":
        # every score is close to -100, so a column past seqlen_k counted as 0 would win
        q, k = q * 0.01 + 1.0, k * 0.01 - 100.0 / (case.scale * dqk)
    if case.data == "growing":
        # later keys score higher, so every block rescales the accumulator
        k = k * (1 + torch.arange(sk, device="cuda")[:, None] / 64.0)
    return q, k, v


def reference(case: Case, q, k, v, dtype):
    """(o, lse) in float64, and o with operands of P V rounded to dtype: the baseline."""
    import torch

    (hq, hk, hv), (sq, sk) = case.heads, case.seq
    o = torch.empty((*q.shape[:3], v.shape[-1]), dtype=torch.float64, device="cuda")
    baseline, lse = torch.empty_like(o), torch.empty(q.shape[:3], dtype=o.dtype, device="cuda")
    i = torch.arange(sq, device="cuda")[:, None]
    j = torch.arange(sk, device="cuda")[None, :]
    hidden = case.hidden(i, j)
    for b in range(case.batch):
        for h in range(hq):
            s = q[b, h].double() @ k[b, h // (hq // hk)].double().T * case.scale
            if hidden is not None:
                s = s.masked_fill(hidden, -math.inf)
            top = s.max(-1, keepdim=True).values
            p = (s - top.masked_fill(top == -math.inf, 0.0)).exp()
            total = p.sum(-1, keepdim=True)
            values = v[b, h // (hq // hv)].double()
            live = total > 0
            o[b, h] = torch.where(live, p @ values / total, 0.0)
            rounded = p.to(dtype).double() @ values / total
            baseline[b, h] = torch.where(live, rounded, 0.0)
            lse[b, h] = (total.log() + top)[:, 0]
    return o, lse, baseline.to(dtype).double()


def arguments(case: Case, buffers, stats, stream: int, num_ctas: int) -> PrefillArgs:
    q, k, v, o = buffers
    extents = PrefillExtents(case.batch, *case.heads, *case.seq, *case.dims)
    stats_pointer = 0 if stats is None else stats.view.data_ptr()
    stats_strides = (0, 0, 0) if stats is None else stats.strides
    strides = PrefillStrides(*q.strides, *k.strides, *v.strides, *o.strides, *stats_strides)
    return PrefillArgs(
        PrefillPointers(*(x.view.data_ptr() for x in (q, k, v, o)), stats_pointer),
        extents,
        strides,
        PrefillBand(case.left or 0, case.right or 0),
        case.scale,
        num_ctas,
        stream,
    )


def run_case(
    kernels: Kernels, base: PrefillSm90Config, case: Case, repeats: int = 1, alter=lambda args: args
) -> str:
    """Empty when the case passes, else what is wrong. alter: plants a fault in the arguments."""
    import torch

    dtype = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16}[case.dtype]
    generator = torch.Generator("cuda").manual_seed(zlib.crc32(case.name.encode()))
    data = make_data(case, generator)
    inputs = [
        Buffer(layout, tuple(x.shape), dtype).fill(x)
        for layout, x in zip(case.layouts, data, strict=False)
    ]
    (hq, _, _), (sq, _) = case.heads, case.seq
    o = Buffer(case.layouts[3], (case.batch, hq, sq, case.dims[1]), dtype)
    stats_layout = "bhsd" if case.layouts[3].startswith("far") else case.layouts[3]
    stats = Buffer(stats_layout, (case.batch, hq, sq, 1), torch.float32) if case.stats else None
    config = replace(
        base,
        dtype=DType(case.dtype),
        left_bound=case.left is not None,
        right_bound=case.right is not None,
        stats=case.stats,
    )
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    stream = torch.cuda.current_stream().cuda_stream
    kernel = kernels.get(config)
    args = alter(arguments(case, (*inputs, o), stats, stream, sms))
    kernel(*args)
    torch.cuda.synchronize()
    q, k, v = (x.view.float() for x in inputs)
    ref, lse, baseline = reference(case, q, k, v, dtype)
    faults = []
    got = o.view.double()
    error = (got - ref).abs().max().item()
    allowed = 2 * (baseline - ref).abs().max().item() + 1e-6
    if not error <= allowed:
        faults.append(f"O error {error:.3e}, allowed {allowed:.3e}")
    if o.stray_writes():
        faults.append(f"{o.stray_writes()} stray writes around O")
    if stats is not None:
        got_lse = stats.view[..., 0].double()
        keyless = lse == -math.inf
        lse_error = (got_lse - lse)[~keyless].abs()
        bound = 1e-4 + 2e-6 * lse[~keyless].abs()
        if not bool((lse_error <= bound).all()):
            faults.append(f"LSE error {lse_error.max().item():.3e}")
        if not bool((got_lse[keyless] == -math.inf).all()):
            faults.append("LSE of a keyless row is not -inf")
        if stats.stray_writes():
            faults.append(f"{stats.stray_writes()} stray writes around Stats")
    first = o.view.clone()
    for _ in range(repeats - 1):
        kernel(*args)
        if not torch.equal(o.view, first):
            faults.append("another run gave other bits")
            break
    return "; ".join(faults)


def cases() -> list[Case]:
    """Every layout, shape, group, mask and scale the kernel claims."""
    listed = [
        Case("full"),
        Case("causal", offset=0),
        Case("half full", dtype="HALF"),
        Case("half causal", dtype="HALF", offset=0),
        Case("no stats", stats=False),
        Case("no stats causal", stats=False, offset=0),
        Case("half no stats", stats=False, dtype="HALF"),
        Case("half no stats causal", stats=False, dtype="HALF", offset=0),
        Case("long full", batch=1, seq=(2048, 2048)),
        Case("long causal", batch=1, seq=(2048, 2048), offset=0),
        Case("many heads causal", batch=3, heads=(40, 8, 8), seq=(1000, 1000), offset=0),
        Case("many heads full", batch=3, heads=(40, 8, 8), seq=(700, 500)),
    ]
    lengths = [(1, 1), (1, 1000), (2, 129), (5, 64), (64, 1), (127, 127), (128, 129), (129, 128)]
    lengths += [(191, 200), (193, 65), (255, 257), (300, 1111), (777, 333), (1000, 1000)]
    for seq in lengths:
        for offset in (None, 0, "br"):
            listed.append(Case(f"lengths {seq} {offset}", seq=seq, offset=offset))
    for group in (1, 2, 3, 4, 5, 7, 8, 12):
        heads = (2 * group, 2, 2)
        listed.append(Case(f"group {group}", heads=heads, seq=(200, 300), offset="br"))
    listed += [
        Case("mqa", heads=(8, 1, 1), seq=(200, 300)),
        Case("unequal k and v heads", heads=(8, 4, 2), seq=(200, 300), offset=0),
        Case("keyless tiles", seq=(700, 300), offset="br"),
        Case("keyless tiles 2", seq=(1500, 70), offset="br", heads=(16, 4, 4)),
        Case("nothing visible", seq=(300, 200), offset=-300),
        Case("future keys", seq=(300, 400), offset=37),
        Case("scale 1", scale=1.0),
        Case("scale 0", scale=0.0, seq=(200, 300)),
        Case("scale 0 causal", scale=0.0, seq=(200, 300), offset=0),
        Case("scale 0 keyless", scale=0.0, seq=(300, 200), offset="br"),
        Case("negative scale", scale=-0.1, seq=(200, 300)),
        Case("negative scale causal", scale=-0.1, seq=(400, 300), offset="br", dtype="HALF"),
        Case("near -100", data="near_minus_100", seq=(200, 333)),
        Case("near -100 causal", data="near_minus_100", seq=(200, 333), offset="br"),
        Case("far batch", layouts=("far_batch",) * 4, seq=(130, 140), offset=0, heads=(2, 1, 1)),
        Case("far row", layouts=("far_row",) * 4, seq=(257, 257), batch=1, heads=(2, 1, 1)),
        Case("one key head", layouts=("bshd", "one_head", "one_head", "bshd"), offset=0),
        Case("one key batch", layouts=("bhsd", "one_batch", "one_batch", "bhsd")),
    ]
    for layout in ("bhsd", "interleaved", "padded", "sbhd"):
        for offset in (None, "br"):
            name = f"layout {layout} {offset}"
            listed.append(Case(name, layouts=(layout,) * 4, seq=(200, 333), offset=offset))
    for window in (1, 2, 50, 128, 129, 300, 5000):
        for offset in (None, 0, "br", 20):
            name = f"window {window} {offset}"
            seq = (300, 200) if window == 50 else (333, 700)
            listed.append(Case(name, window=window, offset=offset, seq=seq))
    listed += [
        Case("window half", window=70, offset=0, seq=(333, 333), dtype="HALF"),
        Case("window no stats", window=70, offset=0, seq=(333, 333), stats=False),
        Case("window tiles past the keys", window=64, offset=0, seq=(1000, 150)),
        Case("window long", window=1024, offset=0, seq=(4096, 4096), batch=1, heads=(2, 1, 1)),
    ]
    mixed = ("interleaved", "padded", "bhsd", "sbhd")
    listed.append(Case("mixed layouts", layouts=mixed, seq=(200, 333), offset=0))
    for dims in ((72, 80), (96, 128), (128, 64), (8, 112), (120, 16)):
        for offset in (None, 0):
            listed.append(Case(f"dims {dims} {offset}", dims=dims, seq=(200, 333), offset=offset))
    return listed


# thread blocks to run at once: any number is right, however many multiprocessors there are
CTAS = (1, 7, 131, 1000)


def check(folder: Path, base: PrefillSm90Config) -> int:
    """Run every case; returns the number that failed."""
    import torch

    kernels = Kernels(folder)
    started = time.time()
    listed = cases()
    failed = 0
    for fault in (check_capture(kernels, base), *check_planted(kernels, base)):
        failed += bool(fault)
        if fault:
            print(f"FAIL {fault}", flush=True)
    for case in listed:
        fault = run_case(kernels, base, case)
        failed += bool(fault)
        if fault:
            print(f"FAIL {case.name}: {fault}", flush=True)
        torch.cuda.empty_cache()
    for offset in (None, 0):
        case = Case("growing", data="growing", seq=(1024, 1024), offset=offset, heads=(8, 2, 2))
        fault = run_case(kernels, base, case, repeats=200)
        failed += bool(fault)
        if fault:
            print(f"FAIL growing {offset}: {fault}", flush=True)
    for num_ctas in CTAS:
        case = Case("grid", seq=(700, 900), offset="br", heads=(6, 3, 1))
        fault = run_case(kernels, base, case, alter=lambda a, n=num_ctas: a._replace(num_ctas=n))
        failed += bool(fault)
        if fault:
            print(f"FAIL {num_ctas} thread blocks: {fault}", flush=True)
    fault = check_many_blocks(kernels, base)
    failed += bool(fault)
    if fault:
        print(f"FAIL many blocks: {fault}", flush=True)
    total = len(listed) + 4 + len(PLANTED) + len(CTAS)
    print(f"checked {total} cases, {failed} failed, {time.time() - started:.0f} s", flush=True)
    return failed


def check_capture(kernels: Kernels, base: PrefillSm90Config) -> str:
    """The first launch of a library happens inside a stream capture; replay sees new values."""
    import torch

    case = Case("capture", seq=(200, 300), offset="br", stats=False)
    shapes = [(case.batch, h, s, 128) for h, s in ((4, 200), (2, 300), (2, 300), (4, 200))]
    buffers = [Buffer("bshd", shape, torch.bfloat16) for shape in shapes]
    kernel = kernels.get(replace(base, right_bound=True))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            kernel(*arguments(case, buffers, None, stream, 132))
    except RuntimeError as error:
        return f"capture: {error}"
    for buffer in buffers[:3]:
        buffer.fill(torch.randn(buffer.shape, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    ref, _, baseline = reference(case, *(b.view.float() for b in buffers[:3]), torch.bfloat16)
    error = (buffers[3].view.double() - ref).abs().max().item()
    allowed = 2 * (baseline - ref).abs().max().item()
    return "" if error <= allowed else f"capture: error {error:.3e}, allowed {allowed:.3e}"


def _extents(args: PrefillArgs, **changes) -> PrefillArgs:
    return args._replace(extents=args.extents._replace(**changes))


PLANTED = {
    "scale": lambda a: a._replace(softmax_scale=a.softmax_scale * 1.05),
    "band": lambda a: a._replace(band=a.band._replace(right=a.band.right + 1)),
    "a key more": lambda a: _extents(a, seqlen_k=a.extents.seqlen_k + 1),
    "a key less": lambda a: _extents(a, seqlen_k=a.extents.seqlen_k - 1),
    "a query more": lambda a: _extents(a, seqlen_q=a.extents.seqlen_q + 1),
    "a query less": lambda a: _extents(a, seqlen_q=a.extents.seqlen_q - 1),
    "a head less": lambda a: _extents(a, num_heads_q=a.extents.num_heads_q - 2),
    "narrow V": lambda a: _extents(a, head_dim_v=120),
    "narrow Q": lambda a: _extents(a, head_dim_qk=120),
    "O stride": lambda a: a._replace(strides=a.strides._replace(o_row=a.strides.o_row + 8)),
    "stats stride": lambda a: a._replace(
        strides=a.strides._replace(stats_head=a.strides.stats_head + 1)
    ),
}


def check_planted(kernels: Kernels, base: PrefillSm90Config) -> list[str]:
    """Each planted fault must be found: a check that cannot fail proves nothing."""
    case = Case("planted", seq=(200, 300), offset="br", layouts=("bhsd",) * 4)
    missed = []
    for name, alter in PLANTED.items():
        if not run_case(kernels, base, case, alter=alter):
            missed.append(f"planted fault not found: {name}")
    return missed


def check_many_blocks(kernels: Kernels, base: PrefillSm90Config) -> str:
    """More than 65,535 heads over the batch, against a whole-tensor product in float32."""
    import torch

    case = Case("many blocks", batch=9000, heads=(8, 8, 8), seq=(16, 16), offset=0, stats=False)
    shape = (case.batch, 8, 16, 128)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    buffers = [Buffer("bhsd", shape, torch.bfloat16).fill(x) for x in made]
    o = Buffer("bhsd", shape, torch.bfloat16)
    args = arguments(case, (*buffers, o), None, torch.cuda.current_stream().cuda_stream, 132)
    kernels.get(replace(base, right_bound=True))(*args)
    torch.cuda.synchronize()
    q, k, v = (x.float() for x in made)
    hidden = torch.ones(16, 16, device="cuda", dtype=torch.bool).triu(1)
    p = (q @ k.transpose(-1, -2) * case.scale).masked_fill(hidden, -math.inf).softmax(-1)
    error = (o.view.float() - p @ v).abs().max().item()
    return "" if error < 2e-2 else f"error {error:.3e}"


# timings


def median_ms(run, iterations: int = 20) -> float:
    """Median time of one call, second-level cache cold."""
    import torch

    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(iterations):
        scratch.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def torch_attention(backend: str, q, k, v, causal: bool):
    """A call of torch's attention with one backend, None when it refuses."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def run():
        with sdpa_kernel([chosen]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    try:
        run()
    except RuntimeError as error:
        print(f"torch {backend}: {str(error)[:100]}")
        return None
    return run


def time_problem(kernels: Kernels, problem: tuple[int, int, int, int], causal: bool) -> list[str]:
    """Lines of TFLOP/s for one problem: every matching library, then torch."""
    import torch

    batch, hq, hk, seq = problem
    case = Case("time", batch, (hq, hk, hk), (seq, seq), offset=0 if causal else None)
    shapes = [(batch, h, seq, 128) for h in (hq, hk, hk, hq)]
    buffers = [Buffer("bshd", shape, torch.bfloat16) for shape in shapes]
    for buffer in buffers[:3]:
        buffer.fill(torch.randn(buffer.shape, device="cuda"))
    flops = 4 * batch * hq * seq * seq * 128 / (2 if causal else 1)
    name = f"B={batch} S={seq} {hq}/{hk} {'causal' if causal else 'full'}"
    lines = []
    stats = Buffer("bhsd", (batch, hq, seq, 1), torch.float32)
    stream = torch.cuda.current_stream().cuda_stream
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    args = arguments(case, buffers, stats, stream, sms)
    q, k, v, o = (buffer.view for buffer in buffers)
    expected = None
    for backend in ("cudnn", "flash"):
        run = torch_attention(backend, q, k, v, causal)
        if run is not None:
            expected = run() if expected is None else expected
            lines.append(f"{name:32} torch {backend:20} {flops / median_ms(run) / 1e9:6.0f}")
    for config in kernels.files:
        if config.dtype == DType.BFLOAT16 and (config.left_bound, config.right_bound) == (
            False,
            causal,
        ):
            kernel = kernels.get(config)
            ms = median_ms(lambda kernel=kernel: kernel(*args))
            label = f"{config.tile_m}x{config.tile_n}x{config.num_stages}"
            label += " stats" if config.stats else ""
            worst = (o.float() - expected.float()).abs().max().item()
            suffix = "" if worst < 0.05 else f"  WRONG by {worst:.3e}"
            lines.append(f"{name:32} {label:26} {flops / ms / 1e9:6.0f}{suffix}")
    return lines


def time_all(folder: Path) -> None:
    """Print the table of TFLOP/s last."""
    import torch

    kernels = Kernels(folder)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lines = [f"{'matmul 8192^3':59} {2 * 8192**3 / median_ms(lambda: a @ b) / 1e9:6.0f}"]
    for problem in ((4, 32, 8, 4096), (1, 32, 8, 16384), (4, 32, 32, 4096), (8, 16, 16, 1024)):
        for causal in (True, False):
            lines += time_problem(kernels, problem, causal)
            torch.cuda.empty_cache()
    lines.append(f"{'matmul 8192^3':59} {2 * 8192**3 / median_ms(lambda: a @ b) / 1e9:6.0f}")
    lines.append(enqueue_line(kernels))
    print("\n".join(lines))


def enqueue_line(kernels: Kernels) -> str:
    """Host time of a call, launch included, on a tiny problem."""
    import torch
    import tvm_ffi

    case = Case("enqueue", 1, (1, 1, 1), (64, 64), stats=False)
    buffers = [Buffer("bshd", (1, 1, 64, 128), torch.bfloat16) for _ in range(4)]
    stream = torch.cuda.current_stream().cuda_stream
    args = arguments(case, buffers, None, stream, 132)
    config = next(iter(kernels.files))
    kernel = kernels.get(config)
    converted = [tvm_ffi.convert(value) for value in args]
    line = "enqueue, us a call:"
    for name, values in (("tuples", args), ("converted once", converted)):
        kernel(*values)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            kernel(*values)
        line += f" {name} {(time.perf_counter() - start) * 1e3:.2f}"
        torch.cuda.synchronize()
    return line


def main(action: str, folder: Path) -> int:
    base = PrefillSm90Config(DType.BFLOAT16)
    if action == "build":
        build(folder, shipped_configs())
        return 0
    if action == "check":
        return check(folder, base)
    time_all(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
