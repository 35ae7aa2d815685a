"""What the parent and the ranks say to each other: small JSON messages in the session's mailbox."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shardgauge.boundary import Boundary
from shardgauge.records import RankBlock
from shardgauge.spec import DeviceName, EngineName, Experiment

ANSWER_BELL = "answers"
"""Name, beside the doorbell, of the named pipe in which a rank's byte wakes the parent."""


class SessionSpec(Boundary):
    """Written before the launch; every rank reads it. Paths are absolute.

    `parent_started_s` (seconds since the epoch) tells the parent from a later process of its pid; the session fills it
    and `parent_pid` in when it opens. A rank ends itself when that process is gone.
    """

    session: str
    engine: EngineName
    device: DeviceName
    world_size: Annotated[int, Field(ge=1)]
    hyper_source: str | None = None
    align_dir: str
    parent_pid: int
    parent_started_s: float | None = None
    collective_timeout_s: float = 120.0


class Prepare(Boundary):
    """Build an arm: model, weights, engine, optimizer, ready at step 0."""

    kind: Literal["prepare"] = "prepare"
    arm: str
    experiment: Experiment


class Run(Boundary):
    """Run the arm's next `steps` training steps. `gradients` adds each parameter's full gradient norm."""

    kind: Literal["run"] = "run"
    arm: str
    steps: Annotated[int, Field(ge=1)]
    gradients: bool = False


class Discard(Boundary):
    """Forget an arm and free its memory."""

    kind: Literal["discard"] = "discard"
    arm: str


class Close(Boundary):
    """End the session; every rank exits with 0."""

    kind: Literal["close"] = "close"


Command = Annotated[Prepare | Run | Discard | Close, Field(discriminator="kind")]
COMMAND: TypeAdapter[Command] = TypeAdapter(Command)


class Hello(Boundary):
    """A rank's first word, once its process group stands: who it is and what it runs on."""

    kind: Literal["hello"] = "hello"
    rank: int
    pid: int
    environment: dict[str, str]


class Done(Boundary):
    """The command was carried out on this rank; `block` answers `run` on ranks that are members of the arm's mesh."""

    kind: Literal["done"] = "done"
    rank: int
    block: RankBlock | None = None


class Refused(Boundary):
    """The command asked for what cannot be had; nothing was started, the session goes on. `error` names our class."""

    kind: Literal["refused"] = "refused"
    rank: int
    error: str
    message: str


class Raised(Boundary):
    """The rank raised; the session is over."""

    kind: Literal["raised"] = "raised"
    rank: int
    message: str
    traceback: str


Reply = Annotated[Hello | Done | Refused | Raised, Field(discriminator="kind")]
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


def post(path: Path, message: Boundary) -> None:
    """Leave `message` at `path`, all of it or nothing: written under a temporary name and renamed."""
    draft = path.with_suffix(".draft")
    draft.write_text(message.model_dump_json(), encoding="utf-8")
    draft.replace(path)


def open_pipe(path: Path) -> int:
    """A descriptor on a named pipe that neither blocks on opening nor sees an end of file when the others are gone."""
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def ring(pipe: int) -> None:
    """Wake whoever sleeps on the pipe."""
    with contextlib.suppress(BlockingIOError):  # a full pipe is ringing already
        os.write(pipe, b"\0")
