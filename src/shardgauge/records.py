"""What was measured: steps and blocks of live runs, and the recorded runs of results/."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from shardgauge.boundary import Boundary, explain_validation
from shardgauge.errors import RecordError
from shardgauge.plan import CollectiveKind
from shardgauge.spec import DeviceName, Experiment

RECORD_FORMAT = 1
Mode = Literal["timed", "profiled"]


class LinkUse(Boundary):
    """One rank's use of the metered link during one step; `exposed_ns` is transfer time that the rank sat waiting."""

    transfer_ns: Annotated[int, Field(ge=0)]
    exposed_ns: Annotated[int, Field(ge=0)]
    waited_ns: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _exposed_is_both(self) -> LinkUse:
        if self.exposed_ns > min(self.transfer_ns, self.waited_ns):
            raise ValueError(f"exposed_ns {self.exposed_ns} is more than the transfer's or the wait's own time")
        return self


class StepRecord(Boundary):
    """One training step of one rank; `step` counts from the arm's start. `loss` None: it was not finite."""

    step: Annotated[int, Field(ge=0)]
    duration_ns: Annotated[int, Field(gt=0)]
    loss: float | None
    counts: Mapping[CollectiveKind, int]
    payload_bytes: Mapping[CollectiveKind, int]
    link: LinkUse | None = None
    grad_norms: tuple[float | None, ...] | None = None


class RankBlock(Boundary):
    """What one rank reports of a block of steps; memory is the process's peak on a CPU, else the device's.

    `parameters_sha256` is over its master shards after the block, where gradients were asked for.
    """

    rank: Annotated[int, Field(ge=0)]
    steps: tuple[StepRecord, ...]
    peak_memory_bytes: Annotated[int, Field(ge=0)]
    parameters_sha256: str | None = None


class Block(Boundary):
    """A run of consecutive steps of one arm, all ranks, as journalled."""

    session: str
    arm: str
    experiment: str
    purpose: str
    index: Annotated[int, Field(ge=0)]
    ranks: tuple[RankBlock, ...]


class RecordedRun(Boundary):
    """One file of results/: a published or earlier run, as figures.

    `figures` maps a metric's name to its value; the name carries the unit (`step_ms`, `overlap_ratio`) or, for hooks
    and operators, is `hook_ms:NAME` and `operator_ms:NAME` (device time in ms over `profiled_steps` steps on rank 0).
    `approximate` names the figures that the source gives with a tilde.
    """

    format: Literal[1]
    id: str
    mode: Mode
    device: DeviceName
    experiment: Experiment
    figures: Mapping[str, float]
    approximate: tuple[str, ...] = ()
    profiled_steps: int | None = None
    published_path: str
    source: str
    transcribed: datetime.date
    note: str = ""


def read_recorded_run(path: Path) -> RecordedRun:
    """Read one file of results/.

    Raises:
        RecordError: the file is unreadable, not JSON, of another format version, or not a recorded run.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != RECORD_FORMAT:
        raise RecordError(
            f"{path}: format {version!r}, but this reader knows format {RECORD_FORMAT} only; "
            "a newer file needs a newer shardgauge (pip install -U shardgauge)"
        )
    try:
        return RecordedRun.model_validate(content)
    except ValidationError as error:
        raise RecordError(f"{path}: {explain_validation(error)}") from error
