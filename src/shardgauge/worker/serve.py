"""A rank's life between hello and close: take a command from rank 0, carry it out, leave a reply."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardgauge.errors import SessionError, ShardgaugeError
from shardgauge.protocol import (
    COMMAND,
    Close,
    Command,
    Discard,
    Done,
    Hello,
    Prepare,
    Refused,
    Reply,
    Run,
    SessionSpec,
)
from shardgauge.records import RankBlock
from shardgauge.spec import Experiment
from shardgauge.worker.device import Device
from shardgauge.worker.post_box import PostBox

_PARKED = timedelta(days=30)
"""A session may wait this long for its next command; the control group must not time out meanwhile."""


class Arm(Protocol):
    """An experiment, prepared on this rank. On a rank outside the experiment's mesh, `run` does nothing."""

    def run(self, steps: int, gradients: bool) -> RankBlock | None:  # noqa: FBT001 -- always called by keyword
        """Run the next `steps` steps."""

    def close(self) -> None:
        """Free the arm's memory and process groups."""


BuildArm = Callable[[Experiment, SessionSpec, int, Device], Arm]
"""(experiment, session, rank, device) to an arm that is ready at step 0; a ShardgaugeError refuses."""


@dataclass(frozen=True, kw_only=True)
class Station:
    """What a rank serves with."""

    spec: SessionSpec
    rank: int
    device: Device
    post_box: PostBox
    build_arm: BuildArm


def serve(station: Station, environment: Mapping[str, str]) -> None:
    """Join the ranks, say hello, and carry out commands until Close. What a command raises ends the rank."""
    station.device.register_backend()
    timeout = timedelta(seconds=station.spec.collective_timeout_s)
    dist.init_process_group(station.device.backend, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=_PARKED)
    assert control is not None  # noqa: S101 -- torch's invariant: every rank is a member of this group
    box = station.post_box
    box.reply(Hello(rank=station.rank, pid=os.getpid(), environment=dict(environment)))
    arms: dict[str, Arm] = {}
    command: Command | None = None
    while not isinstance(command, Close):
        command = COMMAND.validate_json(_next_command(box, control))
        box.reply(_carry_out(command, arms, station, control))
    dist.destroy_process_group()


def _next_command(box: PostBox, control: dist.ProcessGroup) -> bytes:
    """Rank 0 reads the file, the others have its bytes from rank 0 and sleep until then."""
    content = box.fetch() if box.rank == 0 else b""
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=0, group=control)
    payload = torch.empty(int(size.item()), dtype=torch.uint8)
    if box.rank == 0:
        payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(payload, src=0, group=control)
    return payload.numpy().tobytes()


def _carry_out(command: Command, arms: dict[str, Arm], station: Station, control: dist.ProcessGroup) -> Reply:
    if isinstance(command, Prepare):
        return _prepare(command, arms, station, control)
    block = None
    if isinstance(command, Run):
        block = arms[command.arm].run(steps=command.steps, gradients=command.gradients)
    elif isinstance(command, Discard):
        arms.pop(command.arm).close()
    else:
        while arms:
            arms.popitem()[1].close()
    return Done(rank=station.rank, block=block)


def _prepare(command: Prepare, arms: dict[str, Arm], station: Station, control: dist.ProcessGroup) -> Reply:
    """All ranks have the arm afterwards, or none."""
    refusal: Refused | None = None
    try:
        arms[command.arm] = station.build_arm(command.experiment, station.spec, station.rank, station.device)
    except SessionError:
        raise
    except ShardgaugeError as error:
        refusal = Refused(rank=station.rank, error=type(error).__name__, message=str(error))
    refusals = torch.tensor([0 if refusal is None else 1])
    dist.all_reduce(refusals, group=control)
    if refusal is None and refusals.item():
        arms.pop(command.arm).close()
    return refusal or Done(rank=station.rank)
