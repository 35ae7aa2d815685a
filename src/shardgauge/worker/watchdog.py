"""Ends a rank whose parent is gone: a killed pytest process can't close its session."""

from __future__ import annotations

import os
import sys
import threading
import time

import psutil

from shardgauge.protocol import SessionSpec

ORPHANED_EXIT_CODE = 75
_PERIOD_S = 2.0
_CLOCK_STEP_S = 10.0


def watch_parent(spec: SessionSpec) -> None:
    """Look every two seconds whether the parent lives, on a thread of its own."""
    threading.Thread(target=_watch, args=(spec,), name="parent watchdog", daemon=True).start()


def _watch(spec: SessionSpec) -> None:
    try:
        parent = psutil.Process(spec.parent_pid)
        while _is_parent(parent, spec) and parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_PERIOD_S)
    except psutil.NoSuchProcess:
        pass  # what we watch for
    print(f"the parent, pid {spec.parent_pid}, is gone; this rank ends itself", file=sys.stderr, flush=True)  # noqa: T201 -- to the rank's log
    # The main thread may sit in a collective that no exception reaches.
    os._exit(ORPHANED_EXIT_CODE)


def _is_parent(process: psutil.Process, spec: SessionSpec) -> bool:
    """Whether it started when the parent did; start times of two readers differ when the clock was set in between."""
    return spec.parent_started_s is None or abs(process.create_time() - spec.parent_started_s) < _CLOCK_STEP_S
