"""Where live evidence gets its blocks: from sessions started for it, or from an earlier run's journal."""

from __future__ import annotations

import os
import resource
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardgauge import errors
from shardgauge.errors import NotMeasurable, SessionError, ShardgaugeError
from shardgauge.journal import (
    BlockEntry,
    Entry,
    FaultEntry,
    Journal,
    PreparedEntry,
    SessionEntry,
    VerdictEntry,
    read_journal,
)
from shardgauge.launch.session import Session
from shardgauge.protocol import SessionSpec
from shardgauge.records import Block
from shardgauge.rundir import RunDir, SessionDir
from shardgauge.spec import DeviceName, EngineName, Experiment


class EndOfEvidence(Exception):
    """The journal holds no further block of this arm. The message says which, and where."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm on the bench. Its name is the experiment's digest and its purpose, so a replay finds it again."""

    name: str
    experiment: Experiment
    purpose: str
    session: str
    environment: Mapping[str, str]


class Bench(Protocol):
    """Prepares arms and yields their blocks, in the order asked for."""

    @property
    def where(self) -> str:
        """Where the blocks can be read."""

    @property
    def cost(self) -> str:
        """What they cost, in a line."""

    def open_arm(self, experiment: Experiment, purpose: str) -> Arm:
        """An arm at step 0. Every (experiment, purpose) is opened at most once."""

    def run(self, arm: Arm, *, steps: int, gradients: bool = False) -> Block:
        """The arm's next block. Raises EndOfEvidence when a journal holds no more."""

    def close_arm(self, arm: Arm) -> None:
        """Free the arm."""

    def note_verdict(self, entry: VerdictEntry) -> None:
        """Keep a verdict beside the blocks that it rests on."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What sessions are started with."""

    device: DeviceName
    world_size: int
    candidate: EngineName
    hyper_source: str | None
    align_dir: Path


class LiveBench:
    """Sessions, one an engine and source, started when first needed; every block is journalled as it is made."""

    def __init__(
        self,
        settings: BenchSettings,
        rundir: RunDir,
        *,
        shown_as: str | None = None,
        make_session: Callable[[SessionSpec, SessionDir], Session] = Session,
    ) -> None:
        """Begin the journal. Messages name it `shown_as`; `make_session` makes a session that is not open yet."""
        self._shown_as = shown_as or str(rundir.journal)
        self._make_session = make_session
        self._settings = settings
        self._rundir = rundir
        self._journal = Journal(rundir.journal)
        self._sessions: dict[str, Session] = {}
        self._failed: dict[str, ShardgaugeError] = {}
        self._placed: dict[str, str] = {}
        self._blocks: dict[str, int] = {}
        self._peak_bytes = 0
        self._stack = ExitStack()

    @property
    def where(self) -> str:
        """The journal."""
        return self._shown_as

    @property
    def cost(self) -> str:
        """What the blocks cost so far: launches, and the peak memory of this process and of the ranks, in MiB."""
        own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
        names = ", ".join(self._sessions) or "none"
        return (
            f"live: launches: {names}; peak memory: pytest {own_bytes >> 20} MiB, a rank "
            f"{self._peak_bytes >> 20} MiB; journal: {self._shown_as}"
        )

    def open_arm(self, experiment: Experiment, purpose: str) -> Arm:
        """See `Bench.open_arm`."""
        key = self._session_key(experiment)
        name = f"{experiment.digest}:{purpose}"
        with self._journalling_faults(key, name):
            session = self._session(key, experiment)
            session.prepare(name, experiment)
        self._placed[name] = key
        self._append(PreparedEntry(session=key, arm=name, experiment=experiment, digest=experiment.digest))
        return Arm(name=name, experiment=experiment, purpose=purpose, session=key, environment=session.environment)

    def run(self, arm: Arm, *, steps: int, gradients: bool = False) -> Block:
        """See `Bench.run`."""
        key = self._placed[arm.name]
        with self._journalling_faults(key, arm.name):
            ranks = self._sessions[key].run(arm.name, steps=steps, gradients=gradients)
        self._peak_bytes = max(self._peak_bytes, *(rank.peak_memory_bytes for rank in ranks))
        index = self._blocks.get(arm.name, 0)
        self._blocks[arm.name] = index + 1
        block = Block(
            session=key,
            arm=arm.name,
            experiment=arm.experiment.digest,
            purpose=arm.purpose,
            index=index,
            ranks=ranks,
        )
        self._append(BlockEntry(block=block))
        return block

    def close_arm(self, arm: Arm) -> None:
        """See `Bench.close_arm`; an arm of a session that is over went with it."""
        key = self._placed.pop(arm.name)
        if key not in self._failed:
            with self._journalling_faults(key, arm.name):
                self._sessions[key].discard(arm.name)

    def note_verdict(self, entry: VerdictEntry) -> None:
        """See `Bench.note_verdict`."""
        self._append(entry)

    def close(self) -> None:
        """End every session and the journal."""
        try:
            self._stack.close()
        finally:
            self._journal.close()

    def _session_key(self, experiment: Experiment) -> str:
        """`single` needs no launch of its own: it runs on rank 0 of the candidate's session."""
        engine = self._engine(experiment)
        return engine if experiment.source is None else f"{engine}-{experiment.source.strip('/').replace('/', '_')}"

    def _engine(self, experiment: Experiment) -> EngineName:
        return self._settings.candidate if experiment.engine == "single" else experiment.engine

    def _session(self, key: str, experiment: Experiment) -> Session:
        if key in self._failed:
            error = self._failed[key]
            raise type(error)(f"session {key!r} failed earlier: {error}")
        if key not in self._sessions:
            spec = SessionSpec(
                session=key,
                engine=self._engine(experiment),
                device=self._settings.device,
                world_size=self._settings.world_size,
                hyper_source=self._settings.hyper_source,
                align_dir=str(self._settings.align_dir.absolute()),
                parent_pid=os.getpid(),
            )
            try:
                session = self._stack.enter_context(self._make_session(spec, self._rundir.session(key)))
            except ShardgaugeError as error:
                self._failed[key] = error
                raise
            self._sessions[key] = session
            self._append(
                SessionEntry(
                    session=key,
                    engine=spec.engine,
                    device=spec.device,
                    world_size=spec.world_size,
                    hyper_source=spec.hyper_source,
                    environment=session.environment,
                )
            )
        return self._sessions[key]

    def _append(self, entry: Entry) -> None:
        self._journal.append(entry)

    @contextmanager
    def _journalling_faults(self, key: str, arm: str) -> Iterator[None]:
        """Write a session's fault down before it goes on its way; a session that is over stays so."""
        try:
            yield
        except ShardgaugeError as error:
            if isinstance(error, SessionError):
                self._failed.setdefault(key, error)
            self._append(FaultEntry(session=key, arm=arm, error=type(error).__name__, message=str(error)))
            raise
        except BaseException as error:  # Ctrl-C: nothing more is asked of the session, so that nothing covers it
            self._failed.setdefault(key, SessionError(f"the run was ended by {type(error).__name__}"))
            raise


@dataclass(kw_only=True)
class _Replayed:
    """What the journal tells of one arm, in order. `arm` None: it could not be opened."""

    arm: Arm | None = None
    story: deque[Block | FaultEntry] = field(default_factory=deque)

    def raise_fault(self) -> None:
        """What went wrong at this place then goes wrong again, in the same words."""
        if self.story and isinstance(self.story[0], FaultEntry):
            entry = self.story.popleft()
            assert isinstance(entry, FaultEntry)  # noqa: S101 -- seen above
            kind = getattr(errors, entry.error, None)
            if isinstance(kind, type) and issubclass(kind, ShardgaugeError):
                raise kind(entry.message)
            raise NotMeasurable(f"{entry.error}: {entry.message}")


class ReplayBench:
    """An earlier run's journal: the same arms yield the same blocks and faults, so the same verdicts follow."""

    def __init__(self, path: Path, *, shown_as: str | None = None) -> None:
        """Read the journal; messages name it `shown_as`.

        Raises:
            RecordError: it is malformed or of another version.
        """
        self._shown_as = shown_as or str(path)
        self._arms: defaultdict[str, _Replayed] = defaultdict(_Replayed)
        self._faults: list[FaultEntry] = []
        environments: dict[str, Mapping[str, str]] = {}
        content = read_journal(path)
        self._cut_line = content.cut_line
        for entry in content.entries:
            if isinstance(entry, SessionEntry):
                environments[entry.session] = entry.environment
            elif isinstance(entry, PreparedEntry):
                self._arms[entry.arm].arm = Arm(
                    name=entry.arm,
                    experiment=entry.experiment,
                    session=entry.session,
                    purpose=entry.arm.partition(":")[2],
                    environment=environments.get(entry.session, {}),
                )
            elif isinstance(entry, BlockEntry):
                self._arms[entry.block.arm].story.append(entry.block)
            elif isinstance(entry, FaultEntry):
                self._faults.append(entry)
                if entry.arm is not None:
                    self._arms[entry.arm].story.append(entry)

    @property
    def where(self) -> str:
        """The journal."""
        return self._shown_as

    @property
    def cost(self) -> str:
        """Nothing: no rank was started."""
        return f"live: replayed from {self._shown_as}; nothing was measured"

    @property
    def timed_ranks(self) -> int | None:
        """On how many ranks time was measured over a metered link; None where it was not."""
        arms = (replayed.arm for replayed in self._arms.values() if replayed.arm is not None)
        return max((arm.experiment.mesh.size for arm in arms if arm.experiment.link), default=None)

    def open_arm(self, experiment: Experiment, purpose: str) -> Arm:
        """See `Bench.open_arm`.

        Raises:
            NotMeasurable: the journal has no such arm.
            ShardgaugeError: what could not be opened then.
        """
        replayed = self._arms[f"{experiment.digest}:{purpose}"]
        if replayed.arm is None:
            replayed.raise_fault()
            faults = "".join(f"\n  it notes a fault: {fault.error}: {fault.message}" for fault in self._faults)
            raise NotMeasurable(
                f"{self._shown_as} holds no arm {purpose!r} of {experiment.describe()} ({experiment.digest}); "
                f"replay with the options of the run that wrote it{self._tell_cut()}{faults}"
            )
        return replayed.arm

    def run(self, arm: Arm, *, steps: int, gradients: bool = False) -> Block:  # noqa: ARG002 -- the journal decides
        """See `Bench.run`: what was measured then, whatever the number of steps."""
        replayed = self._arms[arm.name]
        replayed.raise_fault()
        if not replayed.story:
            raise EndOfEvidence(f"{self._shown_as} holds no further block of arm {arm.purpose!r}{self._tell_cut()}")
        block = replayed.story.popleft()
        assert isinstance(block, Block)  # noqa: S101 -- a fault was raised above
        return block

    def close_arm(self, arm: Arm) -> None:
        """Nothing is held; what went wrong then goes wrong again."""
        self._arms[arm.name].raise_fault()

    def _tell_cut(self) -> str:
        return "" if self._cut_line is None else f"; its line {self._cut_line} was cut short and is dropped"

    def note_verdict(self, entry: VerdictEntry) -> None:
        """The journal has its verdicts; a replay adds none."""

    def close(self) -> None:
        """Nothing is held."""
