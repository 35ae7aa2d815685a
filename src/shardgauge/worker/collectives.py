"""Counting collectives and their bytes at the c10d call, at one level only, on every device.

On a CPU the metered group tallies itself. Elsewhere the methods of `ProcessGroup` that torch.distributed and every
engine call are wrapped once; newer torch calls `all_gather_single`, older `_allgather_base`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardgauge.plan import COLLECTIVE_KINDS, CollectiveKind
from shardgauge.worker.link import MeteredGroup

_FULL_TENSOR: dict[str, tuple[CollectiveKind, Callable[..., int]]] = {
    "all_gather_single": ("all_gather", lambda output, *_: output.nbytes),
    "_allgather_base": ("all_gather", lambda output, *_: output.nbytes),
    "reduce_scatter_single": ("reduce_scatter", lambda _output, source, *_: source.nbytes),
    "_reduce_scatter_base": ("reduce_scatter", lambda _output, source, *_: source.nbytes),
    "allreduce": ("all_reduce", lambda tensors, *_: sum(tensor.nbytes for tensor in tensors)),
}


class CollectiveTally:
    """Counts and full-tensor bytes per kind while it is counting."""

    def __init__(self) -> None:
        self._counting = False
        self.counts: dict[CollectiveKind, int] = {}
        self.payload_bytes: dict[CollectiveKind, int] = {}
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.counts = dict.fromkeys(COLLECTIVE_KINDS, 0)
        self.payload_bytes = dict.fromkeys(COLLECTIVE_KINDS, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is issued inside; what the control group says outside is not training traffic."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def note(self, kind: CollectiveKind, payload_bytes: int) -> None:
        """One collective was issued."""
        if self._counting:
            self.counts[kind] += 1
            self.payload_bytes[kind] += payload_bytes


@functools.cache
def install_tally(device_type: str) -> CollectiveTally:
    """The process's tally, installed where this device's engines issue their collectives."""
    tally = CollectiveTally()
    if device_type == "cpu":
        MeteredGroup.tally = staticmethod(tally.note)
        return tally
    for method, (kind, full_bytes) in _FULL_TENSOR.items():
        original = getattr(dist.ProcessGroup, method, None)
        if original is not None:
            setattr(dist.ProcessGroup, method, _tallied(original, tally, kind, full_bytes))
    return tally


def _tallied(
    original: Callable[..., Any], tally: CollectiveTally, kind: CollectiveKind, full_bytes: Callable[..., int]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def issue(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], (torch.Tensor, list)):
            tally.note(kind, full_bytes(*args))
        return original(group, *args, **kwargs)

    return issue
