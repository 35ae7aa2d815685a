"""The devices that ranks run on, one row each: backend, count, synchronize, memory peak."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardgauge.errors import MissingDevice
from shardgauge.spec import DeviceName
from shardgauge.worker import link


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's device."""

    name: DeviceName
    torch_device: torch.device
    backend: str
    register_backend: Callable[[], None]
    synchronize: Callable[[], None]
    peak_memory_bytes: Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One kind of device: its c10d backend, and the torch module that counts, selects and synchronizes it.

    No module: a CPU, which the ranks share and which has no queue to wait for.
    """

    backend: str
    register_backend: Callable[[], None]
    find_module: Callable[[], Any] | None


def _nothing() -> None:
    """Nothing to register, nothing to wait for."""


DEVICES: dict[DeviceName, DeviceRow] = {
    "npu": DeviceRow(
        backend="hccl",
        register_backend=_nothing,
        find_module=lambda: getattr(torch, "npu"),  # noqa: B009 -- torch_npu puts it there, which mypy can't know
    ),
    "cuda": DeviceRow(backend="nccl", register_backend=_nothing, find_module=lambda: torch.cuda),
    "cpu": DeviceRow(backend=link.BACKEND, register_backend=link.register, find_module=None),
}


def open_device(name: DeviceName, *, local_rank: int, local_world_size: int) -> Device:
    """The device of one rank, selected; `local_world_size` ranks of this node want one each.

    Raises:
        MissingDevice: there are fewer.
    """
    row = DEVICES[name]
    if row.find_module is None:
        return Device(
            name=name,
            torch_device=torch.device(name),
            backend=row.backend,
            register_backend=row.register_backend,
            synchronize=_nothing,
            peak_memory_bytes=_process_peak_bytes,
        )
    module = row.find_module()
    present = module.device_count()
    if present < local_world_size:
        raise MissingDevice(
            f"{local_world_size} ranks asked, {present} {name} device{'' if present == 1 else 's'} present "
            f"(as torch.{name}.device_count() says); use a smaller mesh, or --gauge-world-size"
        )
    module.set_device(local_rank)
    return Device(
        name=name,
        torch_device=torch.device(name, local_rank),
        backend=row.backend,
        register_backend=row.register_backend,
        synchronize=module.synchronize,
        peak_memory_bytes=module.max_memory_allocated,
    )


def _process_peak_bytes() -> int:
    """Linux counts `ru_maxrss` in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
