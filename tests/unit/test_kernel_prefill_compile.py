"""The Hopper prefill kernel without a GPU: legality, keys, host logic, and its machine code."""

import dataclasses
import importlib.util
import random
import re
from pathlib import Path

import pytest

from cudnn_frost.kernels.configs.prefill_sm90 import (
    PrefillArgs,
    PrefillBand,
    PrefillExtents,
    PrefillPointers,
    PrefillSm90Config,
    PrefillStrides,
    shipped_configs,
)
from cudnn_frost.kernels.configs.signature import Operand, Signature
from cudnn_frost.runtime import artifacts
from cudnn_frost.vocab import KNOWN_TARGETS, DeclineCode, DType

from .machine_code import host_compile, sass_of, spills

BASE = PrefillSm90Config(DType.BFLOAT16)

# one legal other value of every field
OTHER = {
    "dtype": DType.HALF,
    "head_dim_qk": 64,
    "head_dim_v": 64,
    "tile_m": 64,
    "tile_n": 64,
    "num_stages": 3,
    "num_q_stages": 1,
    "left_bound": True,
    "right_bound": True,
    "stats": True,
}


def changed(name: str, value: object, base: PrefillSm90Config = BASE) -> PrefillSm90Config:
    return dataclasses.replace(base, **{name: value})


# configurations


def test_shipped_configs_are_feasible_and_distinct():
    configs = shipped_configs()
    assert len({config.key() for config in configs}) == len(configs)
    for config in configs:
        assert config.infeasible() is None
        assert config.smem_bytes() <= KNOWN_TARGETS["sm90"].smem_per_block
    served = {(c.dtype, c.right_bound, c.stats) for c in configs if not c.left_bound}
    flags = (False, True)
    assert served == {
        (t, causal, stats)
        for t in (DType.HALF, DType.BFLOAT16)
        for causal in flags
        for stats in flags
    }


@pytest.mark.parametrize(
    ("name", "value", "subject"),
    [
        ("dtype", DType.FLOAT, "dtype"),
        ("dtype", DType.FP8_E4M3, "dtype"),
        ("head_dim_qk", 120, "head_dim_qk"),
        ("head_dim_qk", 0, "head_dim_qk"),
        ("head_dim_v", 272, "head_dim_v"),
        ("tile_m", 96, "tile_m"),
        ("tile_m", 256, "tile_m"),
        ("tile_m", 192, "registers"),
        ("tile_n", 72, "tile_n"),
        ("tile_n", 272, "tile_n"),
        ("tile_n", 192, "registers"),
        ("num_stages", 1, "num_stages"),
        ("num_stages", 3, "shared_memory"),
        ("num_q_stages", 0, "num_q_stages"),
        ("num_q_stages", 3, "shared_memory"),
    ],
)
def test_infeasible_names_the_reason(name, value, subject):
    decline = changed(name, value).infeasible()
    assert decline is not None
    assert (decline.code, decline.subject) == (DeclineCode.KERNEL_CONFIG, subject)
    assert decline.got in decline.render()


def test_register_budget_of_an_sm_holds():
    for tile_m in (64, 128, 192):
        config = changed("tile_m", tile_m)
        producer, consumer = config.registers()
        assert 128 * (producer + config.num_consumers * consumer) <= 65536
        assert producer % 8 == consumer % 8 == 0


# keys


def test_every_field_is_in_the_config_key():
    assert set(OTHER) == {field.name for field in dataclasses.fields(BASE)}
    keys = {changed(name, value).key() for name, value in OTHER.items()}
    assert len(keys | {BASE.key()}) == len(OTHER) + 1
    assert BASE.key() == PrefillSm90Config(DType.BFLOAT16).key()


def test_key_text_is_stable():
    assert BASE.key() == (
        "prefill_sm90(dtype=BFLOAT16,head_dim_qk=128,head_dim_v=128,tile_m=128,tile_n=128,"
        "num_stages=2,num_q_stages=2,left_bound=False,right_bound=False,stats=False)"
    )
    assert BASE.signature().key() == (
        "signature(k:BFLOAT16@16,o:BFLOAT16@16,q:BFLOAT16@16,v:BFLOAT16@16)"
    )


def test_signature_key_sensitivity():
    q = Operand("q", DType.HALF, 16)
    base = Signature.of([q, Operand("k", DType.HALF, 16)])
    others = [
        Signature.of([q]),
        Signature.of([q, Operand("v", DType.HALF, 16)]),
        Signature.of([q, Operand("k", DType.BFLOAT16, 16)]),
        Signature.of([q, Operand("k", DType.HALF, 8)]),
        Signature.of([q, Operand("k", DType.HALF, 16), Operand("stats", DType.FLOAT, 4)]),
    ]
    assert len({base.key(), *(other.key() for other in others)}) == len(others) + 1
    assert Signature.of(reversed(base.operands)) == base
    assert base.get("q") == q
    assert base.get("stats") is None


def test_signature_refuses_a_name_twice():
    with pytest.raises(ValueError, match="twice"):
        Signature.of([Operand("q", DType.HALF, 16), Operand("q", DType.HALF, 8)])


# host logic, run on this machine's processor


@pytest.fixture(scope="module")
def numbers():
    """An array type and example arguments for host functions."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import nullptr

    return nullptr(cutlass.Int32, cute.AddressSpace.generic, assumed_align=4)


def walk_schedule(longest_first: bool, out):
    """A host function that counts how often each tile is scheduled."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.schedule import TileSchedule

    @cute.jit
    def walk(
        out: cute.Pointer, num_ctas: Int32, num_m_blocks: Int32, num_heads: Int32, group: Int32
    ):
        if cutlass.const_expr(longest_first):
            schedule = TileSchedule.longest(num_ctas, num_m_blocks, num_heads, group)
        else:
            schedule = TileSchedule.in_order(num_ctas, num_m_blocks, num_heads)
        num_tiles = num_m_blocks * num_heads
        counts = cute.make_tensor(out, cute.make_layout(num_tiles + 1))
        for round_idx in cutlass.range(schedule.num_rounds):
            for cta in cutlass.range(num_ctas):
                tile = schedule.tile(cta, round_idx)
                if tile.is_valid:
                    index = tile.head * num_m_blocks + tile.m_block
                    # a tile that does not exist counts in the last place
                    index = index if (index >= 0) & (index < num_tiles) else num_tiles
                    counts[index] = counts[index] + 1

    return host_compile(walk, out, Int32(1), Int32(1), Int32(1), Int32(1))


@pytest.mark.parametrize("longest_first", [False, True])
def test_schedule_visits_every_tile_once(longest_first, numbers):
    numpy = pytest.importorskip("numpy")
    walk = walk_schedule(longest_first, numbers)
    rng = random.Random(0)
    for _ in range(300):
        ctas, blocks, heads = rng.randint(1, 140), rng.randint(1, 70), rng.randint(1, 90)
        group = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        counts = numpy.zeros(blocks * heads + 1, dtype=numpy.int32)
        walk(counts.ctypes.data, ctas, blocks, heads, group)
        assert (counts[:-1] == 1).all(), (ctas, blocks, heads, group)
        assert counts[-1] == 0, (ctas, blocks, heads, group)


def band_ranges(has_left: bool, has_right: bool, tile_m: int, tile_n: int, out):
    """A host function that writes the four block bounds of every query block."""
    import cutlass
    from cutlass import Int32, cute

    from cudnn_frost.kernels.common.band import Band

    @cute.jit
    def ranges(out: cute.Pointer, seqlen_q: Int32, seqlen_k: Int32, left: Int32, right: Int32):
        band = Band(seqlen_q, seqlen_k, left, right, has_left, has_right, tile_m, tile_n)
        num_m_blocks = (seqlen_q + tile_m - 1) // tile_m
        bounds = cute.make_tensor(out, cute.make_layout((num_m_blocks, 4), stride=(4, 1)))
        for m_block in cutlass.range(num_m_blocks):
            first, end = band.n_block_range(m_block)
            unmasked_end = band.unmasked_end(m_block, first, end - 1)
            bounds[m_block, 0] = first
            bounds[m_block, 1] = end
            bounds[m_block, 2] = band.unmasked_first(m_block, first, unmasked_end)
            bounds[m_block, 3] = unmasked_end

    return host_compile(ranges, out, Int32(1), Int32(1), Int32(0), Int32(0))


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("has_right", [False, True])
def test_band_ranges_cover_what_is_seen_and_skip_the_rest(has_left, has_right, numbers):
    numpy = pytest.importorskip("numpy")
    tile_m, tile_n = 8, 4
    ranges = band_ranges(has_left, has_right, tile_m, tile_n, numbers)
    rng = random.Random(1)
    for _ in range(400):
        seqlen_q, seqlen_k = rng.randint(1, 40), rng.randint(1, 40)
        left, right = rng.randint(-50, 20), rng.randint(-50, 50)
        num_m_blocks = -(-seqlen_q // tile_m)
        bounds = numpy.zeros((num_m_blocks, 4), dtype=numpy.int32)
        ranges(bounds.ctypes.data, seqlen_q, seqlen_k, left, right)
        i, j = numpy.arange(seqlen_q)[:, None], numpy.arange(-(-seqlen_k // tile_n) * tile_n)
        seen = j < numpy.full_like(i, seqlen_k)
        if has_right:
            seen &= j <= i + right
        if has_left:
            seen &= j > i + left
        for m_block, (first, end, unmasked_first, unmasked_end) in enumerate(bounds):
            case = (seqlen_q, seqlen_k, left, right, m_block, list(bounds[m_block]))
            rows = seen[m_block * tile_m : (m_block + 1) * tile_m]
            needed = {n for n in range(len(j) // tile_n) if rows[:, n * tile_n :][:, :tile_n].any()}
            if first >= end:
                assert not needed, case
                continue
            assert needed <= set(range(first, end)), case
            # with both bounds, rows may see nothing between what others see
            assert (has_left and has_right) or len(needed) == end - first, case
            assert first <= unmasked_first <= unmasked_end <= end - 1, case
            inner = rows[:, unmasked_first * tile_n : unmasked_end * tile_n]
            assert inner.all(), case


# machine code


@pytest.mark.parametrize("config", shipped_configs(), ids=lambda config: config.key())
def test_shipped_config_compiles_for_hopper(config, tmp_path):
    prefill = pytest.importorskip("cudnn_frost.kernels.sm90.prefill")
    library = tmp_path / "kernel.so"
    artifacts.export(prefill.compile(config, config.signature()), library)
    (sass,) = sass_of(library, tmp_path).values()
    element = {DType.BFLOAT16: ".BF16", DType.HALF: ""}[config.dtype]
    for instruction in (f"HGMMA.64x{config.tile_n}x16.F32{element} ", "UTMALDG.4D", "UTMASTG.4D"):
        assert instruction in sass, instruction
    for registers in config.registers():
        assert re.search(rf"USETMAXREG\.[^;]*\b{registers:#x} ;", sass)
    assert spills(sass) == []
    assert artifacts.load(library) is not None


def test_spills_are_recognized():
    assert spills("/*0*/ STL.64 [R1+0x8], R2 ; LDL R4, [R1] ;") != []
    assert spills("/*0*/ STG.E [R2.64], R4 ; HGMMA R24 ;") == []


def test_compile_refuses_what_it_cannot_build():
    prefill = pytest.importorskip("cudnn_frost.kernels.sm90.prefill")
    with pytest.raises(ValueError, match="tile_n is 72"):
        prefill.compile(changed("tile_n", 72), BASE.signature())
    with pytest.raises(ValueError, match="stats"):
        prefill.compile(BASE, changed("stats", True).signature())


def test_smem_bytes_is_what_the_kernel_allocates(monkeypatch):
    """Every compile asserts it; here the assertion is seen to fire."""
    prefill = pytest.importorskip("cudnn_frost.kernels.sm90.prefill")
    smem_bytes = PrefillSm90Config.smem_bytes
    monkeypatch.setattr(PrefillSm90Config, "smem_bytes", lambda self: smem_bytes(self) + 1024)
    with pytest.raises(Exception, match="smem_bytes"):
        prefill.compile(BASE, BASE.signature())


def test_call_without_a_driver_raises(tmp_path):
    """The exported function takes PrefillArgs as they are, and reports CUDA's error."""
    prefill = pytest.importorskip("cudnn_frost.kernels.sm90.prefill")
    library = tmp_path / "kernel.so"
    artifacts.export(prefill.compile(BASE, BASE.signature()), library)
    args = PrefillArgs(
        PrefillPointers(0, 0, 0, 0, 0),
        PrefillExtents(1, 1, 1, 1, 64, 64, 128, 128),
        PrefillStrides(*[128] * 12, 0, 0, 0),
        PrefillBand(0, 0),
        1.0,
        132,
        0,
    )
    entry = artifacts.load(library)
    with pytest.raises(TypeError):
        entry(*args[:-1])
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(RuntimeError, match="[Cc]uda"):
            entry(*args)


def test_loading_without_the_runtime_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="nvidia-cutlass-dsl"):
        artifacts.runtime_library()


def test_export_reports_the_linker(tmp_path, monkeypatch):
    class Compiled:
        def export_to_c(self, path, name, export_only_tvm_ffi_symbols):
            Path(path).write_text("not an object")

    monkeypatch.setenv("CC", "cc")
    with pytest.raises(RuntimeError, match="failed"):
        artifacts.export(Compiled(), tmp_path / "kernel.so")
