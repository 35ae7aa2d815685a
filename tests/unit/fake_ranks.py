"""A launcher without torch: one process speaks for both ranks, as a script says. For faults no real rank shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardgauge.launch.torchrun import rank_environment
from shardgauge.rundir import SessionDir

_PROLOGUE = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from shardgauge.protocol import Done, Hello, Raised
from shardgauge.rundir import SessionDir
from shardgauge.worker.post_box import PostBox
faulthandler.register(signal.SIGUSR1)
ranks = [PostBox(SessionDir(Path(sys.argv[1])), rank=rank) for rank in (0, 1)]
def hello(rank, **environment):
    ranks[rank].reply(Hello(rank=rank, pid=os.getpid(), environment=environment))
def done(rank):
    ranks[rank].reply(Done(rank=rank))
def fail(rank):
    ranks[rank].reply(Raised(rank=rank, message=f"rank {rank} fails", traceback="its traceback"))
"""


@dataclass(frozen=True, kw_only=True)
class FakeRanks:
    """Runs `script`, which may use `hello(rank)`, `ranks[0].fetch()`, `done(rank)`, `fail(rank)`; see `Launcher`.

    `exits` is what the launcher reports of the ranks.
    """

    script: str
    exits: Mapping[int, int] = field(default_factory=dict)

    def start(self, directory: SessionDir, *, world_size: int) -> FakeLaunch:  # noqa: ARG002 -- always two
        """One process, whose stderr is both ranks' log."""
        command = [sys.executable, "-c", _PROLOGUE + self.script, str(directory.root), "shardgauge.worker"]
        environment = rank_environment({}, directory=directory, extra={"RANK": "1"})
        with directory.launcher_log.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=environment)
        return FakeLaunch(process, directory.launcher_log, self.exits)


class FakeLaunch:
    """See `Launch`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, exits: Mapping[int, int]) -> None:
        self._process = process
        self._exits = exits
        self._log = log

    @property
    def pid(self) -> int:
        """The process that speaks for the ranks."""
        return self._process.pid

    def lives(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, if it ends in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def rank_exits(self) -> Mapping[int, int]:
        """As it was told to report."""
        return self._exits

    def rank_log(self, rank: int) -> Path | None:  # noqa: ARG002 -- the ranks share it
        """Both ranks' log."""
        return self._log

    def import_fault(self) -> str | None:
        """It imports nothing that could be missing."""
        return None
