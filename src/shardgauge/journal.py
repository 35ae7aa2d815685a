"""Everything that happened in one invocation, in order: append-only JSON lines, on disk before the next one is made.

The first line carries the format version. A reader of this version knows format 1 only: it refuses others, rather than
guess at them. What a crash can leave behind is a cut last line, which the reader drops and reports.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter, ValidationError

from shardgauge import __version__
from shardgauge.boundary import Boundary, explain_validation
from shardgauge.errors import JournalWriteFailed, RecordError
from shardgauge.records import Block
from shardgauge.spec import DeviceName, EngineName, Experiment

JOURNAL_FORMAT = 1


def _require_finite(value: JsonValue) -> JsonValue:
    """Pydantic lets NaN and infinity pass when it reads free-form JSON."""
    json.dumps(value, allow_nan=False)
    return value


FiniteJson = Annotated[JsonValue, AfterValidator(_require_finite)]


class HeaderEntry(Boundary):
    """The first line, and no other."""

    kind: Literal["header"] = "header"
    format: int = JOURNAL_FORMAT
    shardgauge: str = __version__


class SessionEntry(Boundary):
    """A session came up: what it was asked for, and what its ranks run on."""

    kind: Literal["session"] = "session"
    session: str
    engine: EngineName
    device: DeviceName
    world_size: int
    hyper_source: str | None = None
    environment: Mapping[str, str]


class PreparedEntry(Boundary):
    """An arm stands ready at step 0. `digest` is the experiment's, by which blocks name it."""

    kind: Literal["prepared"] = "prepared"
    session: str
    arm: str
    experiment: Experiment
    digest: str


class BlockEntry(Boundary):
    """A block of steps was measured."""

    kind: Literal["block"] = "block"
    block: Block


class VerdictEntry(Boundary):
    """A claim was decided. `details` is what the verdict shows: estimate, interval, limit, pairs."""

    kind: Literal["verdict"] = "verdict"
    claim: str
    outcome: str
    message: str
    details: Mapping[str, FiniteJson] = {}


class FaultEntry(Boundary):
    """Something went wrong; `error` is our class's name. `arm` is the one that was being opened, run or closed."""

    kind: Literal["fault"] = "fault"
    session: str | None
    arm: str | None = None
    error: str
    message: str


Entry = Annotated[
    HeaderEntry | SessionEntry | PreparedEntry | BlockEntry | VerdictEntry | FaultEntry, Field(discriminator="kind")
]
ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class Journal:
    """An open journal, to append to.

    After a `JournalWriteFailed` the file ends with its last whole line, and appending may be tried again.
    """

    def __init__(self, path: Path, *, write: Callable[[int, bytes], int] = os.write) -> None:
        """Begin a new file.

        Raises:
            JournalWriteFailed: it exists already, or can't be written.
        """
        self._path = path
        self._write = write
        self._lines = 0
        self._intact_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise JournalWriteFailed(f"{path}: no journal could be begun there: {error.strerror}") from error
        try:
            self.append(HeaderEntry())
        except JournalWriteFailed:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; every line is on disk already."""
        os.close(self._file)

    def append(self, entry: Entry) -> None:
        """Write one line and wait until it is on disk.

        Raises:
            JournalWriteFailed: it could not be written whole; the lines before it are intact.
        """
        try:
            self._write_line(entry.model_dump_json().encode() + b"\n")
        except OSError as error:
            self._cut_back()
            raise JournalWriteFailed(
                f"{self._path}: line {self._lines + 1} ({entry.kind}) could not be written: {error.strerror}. "
                f"{_count(self._lines)} intact; make room there, or point the run directory elsewhere"
            ) from error

    def _write_line(self, line: bytes) -> None:
        os.ftruncate(self._file, self._intact_bytes)  # what an earlier failure left, if cutting back failed as well
        os.lseek(self._file, self._intact_bytes, os.SEEK_SET)
        rest = line
        while rest:
            rest = rest[self._write(self._file, rest) :]
        os.fsync(self._file)  # a full disk may show here only
        self._lines += 1
        self._intact_bytes += len(line)

    def _cut_back(self) -> None:
        # What fails here leaves a cut last line: the reader drops it, the next append cuts it off.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._intact_bytes)
            os.fsync(self._file)


@dataclass(frozen=True, kw_only=True)
class JournalContent:
    """A journal as read. `cut_line` is the number of a last line that was dropped because it is not whole."""

    entries: tuple[Entry, ...]
    cut_line: int | None


def read_journal(path: Path) -> JournalContent:
    """Every entry of the journal at `path`, its header first.

    Raises:
        RecordError: it is unreadable, of another format version, or a line other than a cut last one is malformed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    *lines, rest = content.split(b"\n")
    if not lines:
        raise RecordError(f"{path}: holds no whole line, so it is no journal")
    _check_format(path, lines[0])
    entries = [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]
    return JournalContent(entries=tuple(entries), cut_line=len(lines) + 1 if rest else None)


class _Versioned(Boundary, extra="ignore"):
    kind: Literal["header"]
    format: int


def _check_format(path: Path, line: bytes) -> None:
    try:
        found = _Versioned.model_validate_json(line).format
    except ValidationError as error:
        raise RecordError(f"{path}, line 1: not a journal's header: {explain_validation(error)}") from error
    if found != JOURNAL_FORMAT:
        raise RecordError(
            f"{path}, line 1: format {found}, but this reader knows format {JOURNAL_FORMAT} only; "
            "a newer file needs a newer shardgauge (pip install -U shardgauge)"
        )


def _read_line(path: Path, number: int, line: bytes) -> Entry:
    try:
        entry = ENTRY.validate_json(line)
    except ValidationError as error:
        raise RecordError(f"{path}, line {number}: {explain_validation(error)}") from error
    if isinstance(entry, HeaderEntry) != (number == 1):
        raise RecordError(
            f"{path}, line {number}: a {entry.kind} stands where it can't; the header is line 1 and no other"
        )
    return entry


def _count(lines: int) -> str:
    return "The 1 line before it is" if lines == 1 else f"The {lines} lines before it are"
