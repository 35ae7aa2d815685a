"""The metered link: a c10d backend on which communication takes time, yet no core.

gloo on loopback spends processor time where a real interconnect spends link time, so nothing could overlap on a
laptop. This backend moves the data through shared memory (arena.py) and keeps a clock beside it: every rank owns one
serialised link, a collective of n payload bytes occupies it for `LinkSpec.transfer_ns(n)` behind those already queued,
and `Work.wait` sleeps until the collective's turn is over. Computation that runs meanwhile hides the transfer, as on a
device with its own communication stream.

The clock of a transfer starts when its own rank issues it. A peer that issues late delays the data, which `wait` also
waits for; that time counts as waiting, not as transfer.

No thread takes part, which keeps a per-parameter step of some 270 collectives affordable in Python.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from shardgauge.plan import CollectiveKind
from shardgauge.presets import LinkSpec
from shardgauge.records import LinkUse
from shardgauge.worker.arena import LARGEST_REGION_BYTES, Arena

dist: Any = torch.distributed
"""Untyped: torch's stubs know neither the option classes nor how a Python process group overrides."""

BACKEND = "metered"
_NO_TIMEOUT = timedelta(0)


class Link:
    """One rank's link: its speed, the time until which it is taken, and what it saw since `reset`."""

    def __init__(self) -> None:
        self.spec: LinkSpec | None = None
        self._free_at_ns = 0
        self._transfers: list[tuple[int, int]] = []
        self._waits: list[tuple[int, int]] = []

    def reset(self) -> None:
        """Forget what was recorded; the queue itself goes on."""
        self._transfers.clear()
        self._waits.clear()

    def enqueue(self, payload_bytes: int) -> int:
        """Put a transfer behind those queued; returns when it is over (`perf_counter_ns`), 0 if nothing is metered."""
        if self.spec is None or payload_bytes == 0:
            return 0
        begin_ns = max(time.perf_counter_ns(), self._free_at_ns)
        self._free_at_ns = begin_ns + self.spec.transfer_ns(payload_bytes)
        self._transfers.append((begin_ns, self._free_at_ns))
        return self._free_at_ns

    def note_wait(self, begin_ns: int, end_ns: int) -> None:
        """The rank did nothing but wait from `begin_ns` to `end_ns`."""
        self._waits.append((begin_ns, end_ns))

    def use(self) -> LinkUse:
        """What the link carried since `reset`, and how much of it the rank sat waiting through.

        Both lists are ordered and free of overlap: the link is serialised, and one thread waits.
        """
        exposed_ns = 0
        waits = iter(self._waits)
        wait = next(waits, None)
        for begin_ns, end_ns in self._transfers:
            while wait is not None:
                exposed_ns += max(0, min(end_ns, wait[1]) - max(begin_ns, wait[0]))
                if wait[1] > end_ns:
                    break
                wait = next(waits, None)
        return LinkUse(
            transfer_ns=sum(end - begin for begin, end in self._transfers),
            exposed_ns=exposed_ns,
            waited_ns=sum(end - begin for begin, end in self._waits),
        )


LINK = Link()
"""This process's link; all its groups share it, as they would share one network interface."""


class MeteredWork(dist._Work):  # type: ignore[misc]
    """Completes when the data is there and the link's clock has run out."""

    def __init__(self, complete: Callable[[], object], over_at_ns: int, link: Link) -> None:
        super().__init__()
        self._complete = complete
        self._over_at_ns = over_at_ns
        self._link = link
        self._waited = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:  # noqa: ARG002 -- c10d's argument; the group's applies
        """Block until the collective is over and its output written."""
        if self._waited:
            return True
        self._waited = True
        begin_ns = time.perf_counter_ns()
        self._complete()
        if not self._over_at_ns:
            return True
        remaining_ns = self._over_at_ns - time.perf_counter_ns()
        if remaining_ns > 0:
            time.sleep(remaining_ns * 1e-9)
        self._link.note_wait(begin_ns, time.perf_counter_ns())
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for it; the output is written by waiting."""
        return self._waited

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done, since asking for it waits."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


Tally = Callable[[CollectiveKind, int], None]
"""Told of each collective at the c10d call: its kind, and the bytes of the full (unsharded) tensor."""


def _ignore(kind: CollectiveKind, payload_bytes: int) -> None:
    """Count nothing."""


class MeteredGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A group whose training collectives occupy this rank's link and are tallied at the call.

    Data moves through shared memory between ranks of one host; what is too large for it, what is not a sum or a mean,
    set-up traffic, and groups across hosts go through gloo.
    """

    tally: Tally = staticmethod(_ignore)

    def __init__(self, gloo: Any, arena: Arena | None, link: Link) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._arena = arena
        self._link = link
        self._name = ""
        self._desc = ""

    def getBackendName(self) -> str:  # noqa: N802 -- c10d's name
        """The name that it was registered under."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """c10d's name of this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """c10d's description of this group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _work(self, complete: Callable[[], object], payload_bytes: int) -> MeteredWork:
        return MeteredWork(complete, self._link.enqueue(payload_bytes), self._link)

    def _arena_for(self, contribution: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Arena | None:
        """The arena, if this collective fits it: every rank decides alike."""
        fits = contribution.nbytes * self.size() <= LARGEST_REGION_BYTES
        # `in` would compare the other way round, where pybind's enum does not know a ReduceOp object.
        adds = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG
        return self._arena if fits and adds else None

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> MeteredWork:
        """Gather `source` of every rank into `output`; (size - 1) / size of it crosses the link."""
        type(self).tally("all_gather", output.nbytes)
        arena = self._arena_for(source)
        if arena is None:
            complete = self._gloo._allgather_base(output, source, opts or dist.AllgatherOptions()).wait
        else:
            complete = _gather(arena, output, source.contiguous())
        return self._work(complete, output.nbytes - source.nbytes)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> MeteredWork:
        """Reduce `source` of every rank and leave this rank's part in `output`."""
        type(self).tally("reduce_scatter", source.nbytes)
        opts = opts or dist.ReduceScatterOptions()
        arena = self._arena_for(source, opts.reduceOp)
        if arena is None:
            complete = self._gloo._reduce_scatter_base(output, source, opts).wait
        else:
            complete = _reduce(arena, output, source.contiguous(), opts.reduceOp, scattered=True)
        return self._work(complete, source.nbytes - output.nbytes)

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MeteredWork:
        """Reduce in place on every rank; a ring moves 2 (size - 1) / size of the bytes."""
        payload_bytes = sum(tensor.nbytes for tensor in tensors)
        type(self).tally("all_reduce", payload_bytes)
        opts = opts or dist.AllreduceOptions()
        arena = self._arena_for(tensors[0], opts.reduceOp) if len(tensors) == 1 else None
        if arena is None:
            complete = self._gloo.allreduce(tensors, opts).wait
        else:
            complete = _reduce(arena, tensors[0], tensors[0].contiguous(), opts.reduceOp, scattered=False)
        size = self.size()
        return self._work(complete, 2 * (size - 1) * payload_bytes // size)

    def allgather(self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], opts: Any = None) -> Any:
        """Gather into lists: set-up traffic (object collectives), which the link does not meter."""
        return self._gloo.allgather(outputs, sources, opts or dist.AllgatherOptions())

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Broadcast: set-up traffic, not metered."""
        return self._gloo.broadcast(tensors, opts or dist.BroadcastOptions())

    def scatter(self, outputs: list[torch.Tensor], sources: list[list[torch.Tensor]], opts: Any = None) -> Any:
        """Scatter: set-up traffic, not metered."""
        return self._gloo.scatter(outputs, sources, opts or dist.ScatterOptions())

    def barrier(self, opts: Any = None) -> Any:
        """Barrier: not metered."""
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _gather(arena: Arena, output: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    number, offset = arena.post(source)

    def complete() -> None:
        arena.await_peers(number)
        with torch.no_grad():
            output.view(arena.size, -1).copy_(arena.rows(offset, source))
        arena.finish(number)

    return complete


def _reduce(
    arena: Arena, output: torch.Tensor, source: torch.Tensor, op: Any, *, scattered: bool
) -> Callable[[], object]:
    number, offset = arena.post(source)

    def complete() -> None:
        arena.await_peers(number)
        with torch.no_grad():
            rows = arena.rows(offset, source)
            if scattered:
                share = output.numel()
                rows = rows[:, arena.rank * share : (arena.rank + 1) * share]
            total = rows.sum(dim=0)
            output.copy_((total / arena.size if op == dist.ReduceOp.AVG else total).view(output.shape))
        arena.finish(number)

    return complete


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> MeteredGroup:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    arena = Arena(dist.PrefixStore("arena", store), rank, size, timeout) if size > 1 and _one_host() else None
    return MeteredGroup(gloo, arena, LINK)


def _one_host() -> bool:
    """Ask torchrun's environment how many of the ranks are here; ranks started otherwise are taken to share a host."""
    world = os.environ.get("WORLD_SIZE", "")
    return os.environ.get("LOCAL_WORLD_SIZE", world) == world


def register() -> None:
    """Make `metered` known to `init_process_group`; done once a process, before the first group."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
