"""Shared memory between the ranks of one host: how the metered link moves data without spending a core on it.

gloo's TCP threads cost milliseconds a collective once ranks outnumber cores, which would drown what is measured. Here
each rank copies its contribution into a row of a region that all ranks map, posts a semaphore to every peer and goes
on; whoever waits for the collective waits for its peers' posts and then reads the rows. There is no thread and no
polling, and a reduction adds the rows in rank order, so it is the same to the bit on every rank and in every run.

Ordering between processes rests on POSIX semaphores (sem_post and sem_wait order memory on every architecture).

A region is free again once every peer is known to have read it: ranks issue and await the same collectives in the same
order, so a peer that has posted collective j has awaited all that this rank had awaited when it issued j.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ARENA_BYTES = 32 << 20
LARGEST_REGION_BYTES = ARENA_BYTES // 4
_SEMAPHORE_BYTES = 64
_ALIGNMENT = 64

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class PeerMissingError(RuntimeError):
    """A peer did not join a collective before the group's timeout."""


class Arena:
    """One group's shared memory, as seen by one of its ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout.total_seconds()
        self._bytes = self._map(store)
        self._head_bytes = -(-size * size * _SEMAPHORE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._base = self._bytes.data_ptr()
        if rank == 0:
            for slot in range(size * size):
                _libc.sem_init(ctypes.c_void_p(self._base + slot * _SEMAPHORE_BYTES), 1, 0)
            store.set("arena-ready", "1")
        store.get("arena-ready")
        peers = [peer for peer in range(size) if peer != rank]
        self._outboxes = [self._semaphore(rank, peer) for peer in peers]
        self._inboxes = [(peer, self._semaphore(peer, rank)) for peer in peers]
        self._issued = 0
        self._received = 0
        self._awaited: set[int] = set()
        self._awaited_prefix = 0
        self._live: deque[tuple[int, int, int]] = deque()
        self._awaited_at_issue: deque[tuple[int, int]] = deque()
        self._next_offset = self._head_bytes

    def _map(self, store: Any) -> torch.Tensor:
        """Map one anonymous file in every rank; its name is gone as soon as all have it open."""
        total = ARENA_BYTES + mmap.PAGESIZE * (1 + self.size * self.size * _SEMAPHORE_BYTES // mmap.PAGESIZE)
        if self.rank == 0:
            handle, name = tempfile.mkstemp(prefix="shardgauge-arena-", dir=_roomy_folder(total))
            os.ftruncate(handle, total)
            store.set("arena-path", name)
        else:
            name = store.get("arena-path").decode()
            handle = os.open(name, os.O_RDWR)
        shared = mmap.mmap(handle, total)
        os.close(handle)
        if store.add("arena-mapped", 1) == self.size:
            Path(name).unlink()
        return torch.frombuffer(shared, dtype=torch.uint8)

    def _semaphore(self, source: int, target: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + (source * self.size + target) * _SEMAPHORE_BYTES)

    def post(self, contribution: torch.Tensor) -> tuple[int, int]:
        """Publish this rank's contribution to the next collective.

        Args:
            contribution: contiguous, at most LARGEST_REGION_BYTES / size bytes, the same size on every rank.

        Returns:
            The collective's number and its region's offset, for `rows`.
        """
        row_bytes = contribution.nbytes
        offset = self._allocate(row_bytes * self.size)
        begin = offset + self.rank * row_bytes
        self._bytes[begin : begin + row_bytes].copy_(contribution.view(-1).view(torch.uint8))
        number = self._issued
        self._issued += 1
        self._awaited_at_issue.append((number, self._awaited_prefix))
        for outbox in self._outboxes:
            _libc.sem_post(outbox)
        return number, offset

    def await_peers(self, number: int) -> None:
        """Block until every peer has posted collective `number`.

        Raises:
            PeerMissingError: the group's timeout has passed.
        """
        while self._received <= number:
            for peer, inbox in self._inboxes:
                self._take(peer, inbox)
            self._received += 1

    def rows(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """All contributions, [size, elements], in the type of `like`, one of them."""
        flat = self._bytes[offset : offset + like.nbytes * self.size]
        return flat.view(like.dtype).view(self.size, like.numel())

    def finish(self, number: int) -> None:
        """This rank has read collective `number`."""
        self._awaited.add(number)
        while self._awaited_prefix in self._awaited:
            self._awaited.remove(self._awaited_prefix)
            self._awaited_prefix += 1

    def _take(self, peer: int, inbox: ctypes.c_void_p) -> None:
        if _libc.sem_trywait(inbox) == 0:
            return
        deadline = time.time() + self._timeout_s
        until = _Timespec(int(deadline), int(deadline % 1 * 1e9))
        while _libc.sem_timedwait(inbox, ctypes.byref(until)) != 0:
            if ctypes.get_errno() == errno.ETIMEDOUT:
                raise PeerMissingError(
                    f"group rank {peer} did not join collective {self._received} within {self._timeout_s:.0f} s; "
                    "it died, hangs, or issues other collectives than this rank"
                )

    def _allocate(self, wanted: int) -> int:
        wanted = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        self._release()
        offset = self._fit(wanted)
        if offset is None:
            self.await_peers(self._issued - 1)
            self._release()
            offset = self._fit(wanted)
        if offset is None:
            raise MemoryError(
                f"{len(self._live)} collectives in flight fill the link's {ARENA_BYTES >> 20} MiB of shared memory; "
                "use a smaller preset or less prefetch on the metered link, or plain gloo (no link)"
            )
        self._live.append((self._issued, offset, wanted))
        self._next_offset = offset + wanted
        return offset

    def _fit(self, wanted: int) -> int | None:
        """An offset behind the newest region, wrapping round, that touches none alive."""
        end = self._head_bytes + ARENA_BYTES
        if not self._live:
            return self._head_bytes
        oldest = self._live[0][1]
        if self._next_offset > oldest:
            if self._next_offset + wanted <= end:
                return self._next_offset
            return self._head_bytes if self._head_bytes + wanted <= oldest else None
        return self._next_offset if self._next_offset + wanted <= oldest else None

    def _release(self) -> None:
        """Free the regions that every peer has read."""
        read_by_all = 0
        while self._awaited_at_issue and self._awaited_at_issue[0][0] < self._received:
            read_by_all = self._awaited_at_issue.popleft()[1]
        while self._live and self._live[0][0] < read_by_all:
            self._live.popleft()


def _roomy_folder(total: int) -> str | None:
    """Memory-backed storage where it has room (containers often give it 64 MB), else the default temporary folder."""
    shm = Path("/dev/shm")  # noqa: S108 -- the kernel's shared-memory mount; the file gets a random name, mode 600
    try:
        stat = os.statvfs(shm)
    except OSError:
        return None
    return str(shm) if stat.f_bavail * stat.f_frsize > 2 * total and os.access(shm, os.W_OK) else None
