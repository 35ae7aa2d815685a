"""One process at a time measures on a device: a lock file each, held while any of the process's sessions is open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from shardgauge.errors import DeviceBusy
from shardgauge.spec import DeviceName

_VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def default_lock_dir() -> Path:
    """A directory in the system's temporary one that is this user's alone."""
    return Path(tempfile.gettempdir()) / f"shardgauge-{os.getuid()}"


def device_ids(device: DeviceName, *, world_size: int, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What a session of `world_size` ranks occupies: `npu4`, `npu5`, ... as the visible devices say; a CPU whole."""
    if device == "cpu":
        return ("cpu",)
    visible = environment.get(_VISIBLE[device], "")
    numbers = [number.strip() for number in visible.split(",") if number.strip()] or [str(n) for n in range(world_size)]
    return tuple(f"{device}{number.replace('/', '_')}" for number in numbers[:world_size])


@contextmanager
def locked_devices(ids: tuple[str, ...], *, lock_dir: Path, timeout_s: float) -> Iterator[None]:
    """Hold every one of `ids`. Within one process the lock is shared.

    Raises:
        DeviceBusy: another process held one of them for `timeout_s`.
    """
    lock_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as held:
        for name in sorted(ids):  # one order for everybody, so that two waiters can't wait for each other
            held.enter_context(_locked(lock_dir / f"{name}.lock", timeout_s=timeout_s))
        yield


@contextmanager
def _locked(path: Path, *, timeout_s: float) -> Iterator[None]:
    # A singleton counts its acquirers in this process; not thread-local, since the process is what holds a device.
    lock = FileLock(path, is_singleton=True, thread_local=False)
    holder = path.with_suffix(".holder")
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout as error:
        raise DeviceBusy(
            f"{path.stem} is in use by another process: waited {timeout_s:g} s for {_describe(holder)}. "
            f"Wait for it or end it; the lock is {path}"
        ) from error
    try:
        holder.write_text(f"{os.getpid()} {' '.join(psutil.Process().cmdline())}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def _describe(holder: Path) -> str:
    if not holder.exists():
        return "a process that did not say who it is"
    pid, _, command = holder.read_text(encoding="utf-8").strip().partition(" ")
    return f"pid {pid} ({command})"
