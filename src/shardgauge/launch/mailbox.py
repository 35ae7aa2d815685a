"""The parent's end of a session's mailbox: commands out, every rank's reply in, nobody polling.

Messages are plain files. Two named pipes beside them only wake the other side: the doorbell wakes rank 0, the answer
bell wakes the parent.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from shardgauge.boundary import explain_validation
from shardgauge.errors import SessionError
from shardgauge.protocol import ANSWER_BELL, REPLY, Command, Raised, Refused, Reply, open_pipe, post, ring
from shardgauge.rundir import SessionDir

LOOK_AROUND_S = 0.25
"""How often a waiting parent makes sure that the launcher lives; answers wake it at once."""

End = Literal["complete", "launcher_gone", "deadline"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for all replies, and for the other ranks' once one of them has raised or refused."""

    replies_s: float
    after_raised_s: float = 5.0
    after_refused_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What came back for one command, and why the waiting ended. `arrived_ns` is each reply file's time stamp."""

    end: End
    replies: Mapping[int, Reply]
    arrived_ns: Mapping[int, int]
    silent: tuple[int, ...]
    waited_s: float


class Mailbox:
    """Commands are numbered from 1; number 0 stands for the ranks' hellos, which nobody asked for."""

    def __init__(self, directory: SessionDir, *, world_size: int) -> None:
        self._directory = directory
        self._world_size = world_size
        self._last = 0
        directory.command(1).parent.mkdir(parents=True)
        answer_bell = directory.doorbell.with_name(ANSWER_BELL)
        os.mkfifo(directory.doorbell, 0o600)
        os.mkfifo(answer_bell, 0o600)
        self._doorbell = open_pipe(directory.doorbell)
        self._answer_bell = open_pipe(answer_bell)

    def close(self) -> None:
        """Let go of the pipes; the files stay."""
        os.close(self._doorbell)
        os.close(self._answer_bell)

    def send(self, command: Command) -> int:
        """Leave `command` for rank 0 and ring; returns its number."""
        self._last += 1
        post(self._directory.command(self._last), command)
        ring(self._doorbell)
        return self._last

    def wait(self, index: int, *, patience: Patience, launcher_lives: Callable[[], bool]) -> Answers:
        """Sleep until every rank has answered command `index`, the launcher is gone, or patience is.

        Raises:
            SessionError: a reply is malformed, or speaks for another rank.
        """
        begin_s = time.monotonic()
        replies: dict[int, Reply] = {}
        arrived_ns: dict[int, int] = {}
        deadline_s = begin_s + patience.replies_s
        while True:
            lives = launcher_lives()  # asked before looking: what was said before the end is then not missed
            news = [rank for rank in self._unheard(replies) if self._directory.reply(index, rank).exists()]
            for rank in news:
                path = self._directory.reply(index, rank)
                replies[rank], arrived_ns[rank] = read_reply(path, rank), path.stat().st_mtime_ns
                deadline_s = min(deadline_s, time.monotonic() + _rest_s(replies[rank], patience))
            if end := self._ending(replies, lives=lives, remaining_s=deadline_s - time.monotonic()):
                waited_s = time.monotonic() - begin_s
                silent = self._unheard(replies)
                return Answers(end=end, replies=replies, arrived_ns=arrived_ns, silent=silent, waited_s=waited_s)
            self._sleep(min(LOOK_AROUND_S, max(0.0, deadline_s - time.monotonic())))

    def _unheard(self, replies: Mapping[int, Reply]) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._world_size) if rank not in replies)

    def _ending(self, replies: Mapping[int, Reply], *, lives: bool, remaining_s: float) -> End | None:
        if not self._unheard(replies):
            return "complete"
        if not lives:
            return "launcher_gone"
        return "deadline" if remaining_s <= 0 else None

    def _sleep(self, longest_s: float) -> None:
        rung, _, _ = select.select([self._answer_bell], [], [], longest_s)
        if rung:
            os.read(self._answer_bell, 4096)


def _rest_s(reply: Reply, patience: Patience) -> float:
    if isinstance(reply, Raised):
        return patience.after_raised_s
    return patience.after_refused_s if isinstance(reply, Refused) else patience.replies_s


def read_reply(path: Path, rank: int) -> Reply:
    """The reply of `rank` that lies at `path`.

    Raises:
        SessionError: it is not a reply, or not that rank's.
    """
    try:
        reply = REPLY.validate_json(path.read_bytes())
    except ValidationError as error:
        raise SessionError(
            f"rank {rank} sent a malformed reply: {explain_validation(error)}. It lies in {path}"
        ) from error
    if reply.rank != rank:
        raise SessionError(f"the reply in {path} should be rank {rank}'s and says that it is rank {reply.rank}'s")
    return reply
