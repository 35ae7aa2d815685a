"""Which processes belong to a session, and how they are ended: all of them, whoever their parent is by now."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import psutil

from shardgauge.launch.torchrun import SESSION_MARK
from shardgauge.rundir import SessionDir

_TERMINATE_S = 2.0
_SWEEPS = 5


def session_processes(directory: SessionDir) -> tuple[psutil.Process, ...]:
    """Every live process that inherited the session's mark.

    torchrun gives each rank a session of its own, and the ranks of a killed torchrun have another parent, so neither
    the process group nor the tree finds them all; their environment does.
    """
    return tuple(_marked(str(directory.root)))


def rank_processes(directory: SessionDir) -> dict[int, psutil.Process]:
    """The ranks' own processes, by rank."""
    ranks = {}
    for process in session_processes(directory):
        with contextlib.suppress(psutil.Error):  # it ended while we looked
            rank = process.environ().get("RANK")
            if rank is not None and "shardgauge.worker" in process.cmdline():
                ranks[int(rank)] = process
    return ranks


def end_processes(directory: SessionDir) -> tuple[int, ...]:
    """SIGTERM, then SIGKILL, to all of the session; returns the pids that nothing could end."""
    remaining = session_processes(directory)
    _signal(remaining, signal.SIGTERM)
    psutil.wait_procs(remaining, timeout=_TERMINATE_S)
    for _ in range(_SWEEPS):  # again, for a process that was started meanwhile
        remaining = session_processes(directory)
        if not remaining:
            break
        _signal(remaining, signal.SIGKILL)
        psutil.wait_procs(remaining, timeout=_TERMINATE_S)
    return tuple(process.pid for process in remaining)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it ended while we looked
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(SESSION_MARK) == mark:
                yield process


def _signal(processes: tuple[psutil.Process, ...], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself, which is what we want
            process.send_signal(number)
