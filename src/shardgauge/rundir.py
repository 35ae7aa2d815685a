"""Every file of a run is a property of one of these two objects; nothing else joins paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SessionDir:
    """The mailbox and logs of one session: small JSON files, written under a temporary name and renamed."""

    root: Path

    @property
    def spec(self) -> Path:
        """The SessionSpec that the ranks read."""
        return self.root / "session.json"

    @property
    def doorbell(self) -> Path:
        """A named pipe: a byte in it wakes rank 0, which otherwise sleeps without using a core."""
        return self.root / "doorbell"

    @property
    def logs(self) -> Path:
        """Where the launcher writes each rank's stdout and stderr."""
        return self.root / "logs"

    @property
    def launcher_log(self) -> Path:
        """The launcher's own stdout and stderr."""
        return self.root / "launcher.log"

    def command(self, index: int) -> Path:
        """The parent's command number `index`, from 1."""
        return self.root / "mailbox" / f"{index:06d}.command.json"

    def reply(self, index: int, rank: int) -> Path:
        """The answer of `rank` to command `index`; index 0 is its hello."""
        return self.root / "mailbox" / f"{index:06d}.rank{rank}.json"


@dataclass(frozen=True)
class RunDir:
    """One invocation's files: a journal, and a folder a session."""

    root: Path

    @property
    def journal(self) -> Path:
        """Append-only JSON lines: every session, block and verdict, in the order in which they came to be."""
        return self.root / "journal.jsonl"

    def session(self, name: str) -> SessionDir:
        """The folder of the session called `name`."""
        return SessionDir(self.root / f"session-{name}")
