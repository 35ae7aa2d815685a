"""What the parent and the ranks say to each other: small JSON messages in the session's mailbox."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shardgauge.boundary import Boundary
from shardgauge.records import RankBlock
from shardgauge.spec import DeviceName, EngineName, Experiment


class SessionSpec(Boundary):
    """Written before the launch; every rank reads it. Paths are absolute."""

    session: str
    engine: EngineName
    device: DeviceName
    world_size: Annotated[int, Field(ge=1)]
    hyper_source: str | None = None
    align_dir: str
    parent_pid: int
    collective_timeout_s: float = 120.0


class Prepare(Boundary):
    """Build an arm: model, weights, engine, optimizer, ready at step 0."""

    kind: Literal["prepare"] = "prepare"
    arm: str
    experiment: Experiment


class Run(Boundary):
    """Run the arm's next `steps` training steps. `gradients` adds each parameter's full gradient norm to the records."""

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
    """The command asked for what cannot be had; nothing was started and the session goes on. `error` names our class."""

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
