"""What making and loading alignment data costs in memory: anonymous pages, and file pages that can be taken back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardgauge.worker.align_store import load_weights

_SAMPLE_INTERVAL_S = 0.02


@dataclass(kw_only=True)
class MemoryPeaks:
    """This process's peaks, final once the watch has ended.

    `resident_bytes` (VmHWM) counts mapped file pages too, which are shared between ranks and dropped under pressure;
    `anonymous_bytes` (RssAnon, sampled every 20 ms) is what the process cannot do without.
    """

    resident_bytes: int = 0
    anonymous_bytes: int = 0

    def sample(self) -> None:
        """Take the present values into account."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        kib = {key: int(status[key].split()[0]) for key in ("VmHWM", "RssAnon")}
        self.resident_bytes = max(self.resident_bytes, kib["VmHWM"] * 1024)
        self.anonymous_bytes = max(self.anonymous_bytes, kib["RssAnon"] * 1024)

    def describe(self) -> str:
        """Both peaks in MiB."""
        return (
            f"peak resident {self.resident_bytes / 2**20:.0f} MiB (VmHWM), "
            f"of which anonymous at most {self.anonymous_bytes / 2**20:.0f} MiB (RssAnon)"
        )


@contextmanager
def watch_memory() -> Iterator[MemoryPeaks]:
    """Sample this process's memory in a thread until the block ends."""
    peaks, ended = MemoryPeaks(), threading.Event()

    def sample_until_ended() -> None:
        while not ended.wait(_SAMPLE_INTERVAL_S):
            peaks.sample()

    sampler = threading.Thread(target=sample_until_ended, name="memory-sampler", daemon=True)
    sampler.start()
    try:
        yield peaks
    finally:
        ended.set()
        sampler.join()
        peaks.sample()


def measure_shard_load(weights: Path, *, shards: int) -> str:
    """Load the first of `shards` dim-0 shards of every weight into new fp32 tensors, as a rank does, and say the cost.

    The file's pages are dropped from the page cache first, so that the time includes reading them from disk.
    """
    with weights.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = MemoryPeaks()
    before.sample()
    start = time.perf_counter()
    with watch_memory() as peaks:
        loaded = {name: weight.chunk(shards)[0].clone() for name, weight in load_weights(weights).items()}
    seconds = time.perf_counter() - start
    loaded_bytes = sum(shard.nbytes for shard in loaded.values())
    return (
        f"shard 1 of {shards}: {loaded_bytes / 2**20:.0f} MiB of {len(loaded)} tensors loaded in {seconds:.1f} s "
        f"from a cold page cache; {peaks.describe()}; before loading: {before.describe()}"
    )
