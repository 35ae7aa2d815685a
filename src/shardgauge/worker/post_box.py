"""A rank's end of the session's mailbox: rank 0 sleeps on the doorbell; every rank leaves its own replies."""

from __future__ import annotations

import os
import select

from shardgauge.protocol import ANSWER_BELL, Reply, open_pipe, post, ring
from shardgauge.rundir import SessionDir

_LOOK_S = 1.0


class PostBox:
    """What one rank reads from and writes to the mailbox. `due` is the command that its next reply answers."""

    def __init__(self, directory: SessionDir, *, rank: int) -> None:
        self.rank = rank
        self.due = 0
        self._directory = directory
        self._doorbell = open_pipe(directory.doorbell)
        self._answer_bell = open_pipe(directory.doorbell.with_name(ANSWER_BELL))

    def fetch(self) -> bytes:
        """Sleep until the due command lies there. For rank 0 only: a byte in the doorbell wakes one reader."""
        path = self._directory.command(self.due)
        while not path.exists():
            rung, _, _ = select.select([self._doorbell], [], [], _LOOK_S)
            if rung:
                os.read(self._doorbell, 4096)
        return path.read_bytes()

    def reply(self, reply: Reply) -> None:
        """Leave this rank's answer to the due command and wake the parent."""
        post(self._directory.reply(self.due, self.rank), reply)
        self.due += 1
        ring(self._answer_bell)
