"""Backends for machines without a GPU: libcudnn itself, and a played one.

`hopper()` returns the constructor arguments with which the installed libcudnn plans, builds and
serializes for an H200 without a device: a `device_property` out of JSON, and `sm_version` so that
the frontend does not ask the driver. libcudnn links against libcuda; where that is missing, a
library of that name is compiled whose every call answers "no device", except that modules load.

`PlayedBackend` is a `cudnn.pygraph` whose plans are made up; everything else (builders,
validation, freezing, tensors) is the installed frontend's own.
"""

from __future__ import annotations

import ctypes
import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cudnn
from cudnn.engines import PlanConfig

import cudnn_frost

MODE_A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
KNOB = cudnn.knob_type.KERNEL_CFG
B, H, HK, S, D = 2, 4, 2, 16, 32

PLANS = (
    ("eng8_k24=1", PlanConfig(8, {KNOB: 1}, cpp_index=0, mode=MODE_A)),
    ("eng9_k24=7", PlanConfig(9, {KNOB: 7}, cpp_index=1, mode=MODE_A)),
    ("eng1_k24=0", PlanConfig(1, {KNOB: 0}, cpp_index=2, mode=FALLBACK)),
)


H200 = {
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "cudaDeviceId": 0,
    "pciDeviceId": 0,
    "isTccDriver": 0,
    "totalGlobalMem": 150323855360,
    "multiProcessorCount": 132,
    "warpSize": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxCtasPerSM": 32,
    "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "oversizedSharedMemoryPerBlock": 0,
    "reservedSharedMemoryPerBlock": 1024,
    "supportCoopLaunch": 1,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "l2CacheSize": 62914560,
}

_DRIVER = """
static int no_device(void) { return 100; }
int cuGetProcAddress_v2(const char *name, void **p) { *p = no_device; return 0; }
int cuGetProcAddress(const char *name, void **p) { *p = no_device; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
"""
_NO_DEVICE = """
cuCtxGetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet
cuDeviceGetCount cuGetErrorName cuGetErrorString cuInit cuLaunchCooperativeKernel cuLaunchKernel
cuLaunchKernelEx cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy cuLibraryLoadFromFile
cuPointerGetAttribute cuStreamGetCtx cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""
_HANDS_OUT_A_HANDLE = """
cuKernelGetFunction cuLibraryGetKernel cuLibraryLoadData cuModuleGetFunction cuModuleLoadData
"""
_SUCCEEDS = """
cuKernelGetAttribute cuKernelSetAttribute cuLibraryUnload cuModuleUnload
cuOccupancyMaxPotentialClusterSize
"""


class Unavailable(Exception):
    """Why libcudnn cannot plan here."""


def _driver_source() -> str:
    return "\n".join(
        [_DRIVER]
        + [f"int {name}(void) {{ return 100; }}" for name in _NO_DEVICE.split()]
        + [f"int {name}(void **p) {{ *p = p; return 0; }}" for name in _HANDS_OUT_A_HANDLE.split()]
        + [f"int {name}(void) {{ return 0; }}" for name in _SUCCEEDS.split()]
    )


@functools.cache
def _load_driver() -> ctypes.CDLL:
    """The machine's libcuda, else a compiled one without devices, for libcudnn to link against."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("no libcuda.so.1 and no C compiler to make one without devices")
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "driver.c"), Path(folder, "driver.so")
        code.write_text(_driver_source())
        command = [compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([*command, "-o", str(library), str(code)], check=True)
        return ctypes.CDLL(str(library))


@functools.cache
def hopper() -> dict[str, Any]:
    """`cudnn.pygraph` arguments that plan for an H200 without one; Unavailable says why not."""
    _load_driver()
    try:
        properties = cudnn.create_device_properties(json.dumps(H200))
    except Exception as error:
        raise Unavailable(f"libcudnn does not take device properties: {error}") from error
    return {"sm_version": 90, "device_property": properties}


class PlayedBackend(cudnn.pygraph):
    """declines: the backend has no plan. unbuildable: names whose build is a decline."""

    declines = False
    unbuildable: tuple[str, ...] = ()
    notes: tuple[Any, ...] = (cudnn.behavior_note.RUNTIME_COMPILATION,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listed: list[tuple[str, PlanConfig]] = []
        self.built: list[int] = []
        self.ran: list[tuple[int, dict[str, Any]]] = []

    @property
    def plans(self) -> list[PlanConfig]:
        return [plan for _, plan in self.listed]

    def get_execution_plan_count(self) -> int:
        return len(self.listed)

    def create_execution_plans(self, heuristics: Any = None) -> None:
        if self.listed:
            raise RuntimeError("create_execution_plans() was already called on this graph")
        self.validate()
        self._freeze()
        if self.declines:
            raise cudnn.cudnnGraphNotSupportedError("the played backend declined")
        asked = heuristics or [MODE_A, FALLBACK]
        self.listed = [(name, plan) for name, plan in PLANS if plan.mode in asked]

    def create_execution_plan(self, engine_id: int, knobs: Any = None) -> PlayedBackend:
        self.listed.append((f"eng{engine_id}_again", PlanConfig(engine_id, knobs)))
        return self

    def get_plan_name_at_index(self, index: int) -> str:
        return self.listed[index][0]

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, Any]:
        plan = self.listed[index][1]
        return plan.engine_id, plan.knobs

    def get_behavior_notes_for_plan_at_index(self, index: int, *args: Any, **kwargs: Any) -> list:
        return list(self.notes)

    def check_support(self) -> None:
        if self.declines:
            raise cudnn.cudnnGraphNotSupportedError("the played backend declined")

    def build_plan_at_index(self, index: int) -> PlayedBackend:
        name = self.listed[index][0]
        if any(part in name for part in self.unbuildable):
            raise cudnn.cudnnGraphNotSupportedError(f"{name} does not build")
        self.built.append(index)
        return self

    def get_workspace_size_plan_at_index(self, index: int, *args: Any, **kwargs: Any) -> int:
        return 1000 + index

    def execute_plan_at_index(
        self, pack: Any, workspace: Any, index: int, handle: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        self.ran.append((index, {"pack": pack, "workspace": workspace, **kwargs}))

    def backend_plan_entries(self) -> list[PlanConfig]:
        return self.plans

    def serialize(self, *, as_bytes: bool = False, include_kernels: bool = True) -> Any:
        return b"played" if as_bytes else list(b"played")


def declare(cls: Any = None, options: dict[str, Any] | None = None, **sdpa: Any) -> Any:
    """A causal GQA graph of B, H, HK, S, D: uids 1 to 5 are q, k, v, O and Stats."""
    cls = cls or cudnn_frost.Graph
    g = cls(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **(options or {}),
    )
    q = g.tensor(dim=[B, H, S, D], name="q", uid=1)
    k, v = (g.tensor(dim=[B, HK, S, D], name=n, uid=i) for i, n in ((2, "k"), (3, "v")))
    sdpa = {"attn_scale": 0.2, "use_causal_mask": True, "generate_stats": True, **sdpa}
    o, stats = g.sdpa(q=q, k=k, v=v, name="sdpa", **sdpa)
    o.set_output(True).set_uid(4)
    if stats is not None:
        stats.set_output(True).set_uid(5).set_data_type(cudnn.data_type.FLOAT)
    return g
