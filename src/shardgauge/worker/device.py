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
    """One rank's device. `count` is how many of its kind are present; None where ranks share what there is."""

    name: DeviceName
    torch_device: torch.device
    backend: str
    count: Callable[[], int | None]
    register_backend: Callable[[], None]
    select: Callable[[], None]
    synchronize: Callable[[], None]
    peak_memory_bytes: Callable[[], int]


def _nothing() -> None:
    """A CPU has no queue to wait for and nothing to select."""


def _cpu(local_rank: int) -> Device:  # noqa: ARG001 -- every row is called alike, and a CPU is shared
    return Device(
        name="cpu",
        torch_device=torch.device("cpu"),
        backend=link.BACKEND,
        count=lambda: None,
        register_backend=link.register,
        select=_nothing,
        synchronize=_nothing,
        peak_memory_bytes=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _accelerator(name: DeviceName, backend: str, module: Any, local_rank: int) -> Device:
    return Device(
        name=name,
        torch_device=torch.device(name, local_rank),
        backend=backend,
        count=module.device_count,
        register_backend=_nothing,
        select=lambda: module.set_device(local_rank),
        synchronize=module.synchronize,
        peak_memory_bytes=module.max_memory_allocated,
    )


def _torch_npu() -> Any:
    """`torch.npu`, which importing torch_npu puts there."""
    return getattr(torch, "npu")  # noqa: B009 -- not an attribute that a type checker can know


DEVICES: dict[DeviceName, Callable[[int], Device]] = {
    "npu": lambda local_rank: _accelerator("npu", "hccl", _torch_npu(), local_rank),
    "cuda": lambda local_rank: _accelerator("cuda", "nccl", torch.cuda, local_rank),
    "cpu": _cpu,
}


def open_device(name: DeviceName, *, local_rank: int, local_world_size: int) -> Device:
    """The device of one rank, selected; `local_world_size` ranks of this node want one each.

    Raises:
        MissingDevice: there are fewer.
    """
    device = DEVICES[name](local_rank)
    present = device.count()
    if present is not None and present < local_world_size:
        raise MissingDevice(
            f"{local_world_size} ranks asked, {present} {name} device{'' if present == 1 else 's'} present "
            f"(as torch.{name}.device_count() says); use a smaller mesh, or --gauge-world-size"
        )
    device.select()
    return device
