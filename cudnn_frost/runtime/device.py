"""The machine at hand, asked through the driver: no framework is imported to find out."""

from __future__ import annotations

import ctypes
import functools
from importlib import metadata

from ..vocab import KNOWN_TARGETS, Target

_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch", "nvidia-cudnn-frontend")

# CUdevice_attribute and CUpointer_attribute values of the driver API
_SM_COUNT = 16
_CC_MAJOR = 75
_CC_MINOR = 76
_REGISTERS_PER_SM = 82
_SMEM_PER_BLOCK_OPTIN = 97
_POINTER_MEMORY_TYPE = 2
_MEMORY_TYPE_DEVICE = 2


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """libcuda, initialized; None without a usable driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


@functools.cache
def installed_versions() -> dict[str, str]:
    """Distribution -> version of the packages that rows may need; an absent one is missing."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def current_device() -> int:
    """The calling thread's current device ordinal, 0 without a current context."""
    driver = _driver()
    device = ctypes.c_int(0)
    if driver is None or driver.cuCtxGetDevice(ctypes.byref(device)) != 0:
        return 0
    return device.value


@functools.cache
def target_here(ordinal: int = 0) -> Target:
    """The `Target` of a device of this machine; a CPU target when there is no such device."""
    driver = _driver()
    device = ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
        cpu = KNOWN_TARGETS["cpu"]
        return Target(cpu.name, cpu.cc, 0, 0, 0, versions=installed_versions())

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), which, device) != 0:
            raise RuntimeError(f"the driver does not report attribute {which} of device {ordinal}")
        return value.value

    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGetName(name, len(name), device)
    return Target(
        name=name.value.decode(),
        cc=(attribute(_CC_MAJOR), attribute(_CC_MINOR)),
        sm_count=attribute(_SM_COUNT),
        smem_per_block=attribute(_SMEM_PER_BLOCK_OPTIN),
        registers_per_sm=attribute(_REGISTERS_PER_SM),
        versions=installed_versions(),
    )


def pointer_is_device(pointer: int) -> bool:
    """Whether a bare address is device memory, as the driver knows it."""
    driver = _driver()
    kind = ctypes.c_uint(0)
    if driver is None:
        return False
    query = driver.cuPointerGetAttribute
    status = query(ctypes.byref(kind), _POINTER_MEMORY_TYPE, ctypes.c_uint64(pointer))
    return status == 0 and kind.value == _MEMORY_TYPE_DEVICE
