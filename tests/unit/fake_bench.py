"""Blocks without ranks: a bench, and a session behind the real bench, whose arms last as long as a test says."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from shardgauge.bench import Arm
from shardgauge.journal import VerdictEntry
from shardgauge.plan import parameter_shapes
from shardgauge.protocol import SessionSpec
from shardgauge.records import Block, LinkUse, RankBlock, StepRecord
from shardgauge.rundir import SessionDir
from shardgauge.spec import Experiment

BLOCK_S = 0.5
TRANSFER_NS = 10_000_000
Pace = Callable[[Experiment, int], float]
"""Experiment and block index to the time of a step in ms."""


def pace(*, default: float = 100.0, prefetch: float = 100.0, noise: float = 0.01) -> Pace:
    """A step's time with and without forward prefetch, each block scattering by `noise`, the same in every run."""

    def step_ms(experiment: Experiment, index: int) -> float:
        source = random.Random(f"{experiment.digest} {index}")  # noqa: S311 -- noise, no secret
        base = prefetch if experiment.switches.forward_prefetch else default
        return base * (1 + noise * source.gauss(0.0, 1.0))

    return step_ms


def rank_blocks(
    experiment: Experiment, *, steps: range, step_ms: float, gradients: bool, exposed: float = 0.5
) -> tuple[RankBlock, ...]:
    """What whole and healthy ranks report; on the link, `exposed` is the share of a transfer that is waited for.

    A step's time moves by a few ns from step to step, as any clock's does: times that are all alike are refused.
    """
    link = LinkUse(transfer_ns=TRANSFER_NS, exposed_ns=round(exposed * TRANSFER_NS), waited_ns=TRANSFER_NS)
    norms = tuple(1.0 for _ in parameter_shapes(experiment.model_preset))
    counts = experiment.expected_counts(steps=1)
    return tuple(
        RankBlock(
            rank=rank,
            steps=tuple(
                StepRecord(
                    step=step,
                    duration_ns=round(step_ms * 1e6) + (step * 7919 + int(experiment.digest, 16)) % 97,
                    loss=6.0 - 0.01 * step + rank,
                    counts=counts,
                    payload_bytes=dict.fromkeys(counts, 1),
                    link=link if experiment.link else None,
                    grad_norms=norms if gradients else None,
                )
                for step in steps
            ),
            peak_memory_bytes=1,
            parameters_sha256=f"digest of rank {rank}" if gradients else None,
        )
        for rank in range(experiment.mesh.size)
    )


@dataclass(kw_only=True)
class FakeBench:
    """A bench of made-up blocks; `edit` may spoil each, and `now_s` is a clock that only measuring moves."""

    step_ms: Pace = field(default_factory=pace)
    edit: Callable[[Block], Block] = lambda block: block
    exposed: Callable[[int], float] = lambda index: 0.5  # noqa: ARG005 -- the index is for tests that use it
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    where: str = "journal.jsonl"
    cost: str = ""
    now_s: float = 0.0
    opened: list[Arm] = field(default_factory=list)
    closed: list[Arm] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)
    kept: list[VerdictEntry] = field(default_factory=list)
    _next_step: dict[str, int] = field(default_factory=dict)
    _next_block: dict[str, int] = field(default_factory=dict)

    def open_arm(self, experiment: Experiment, purpose: str) -> Arm:
        """An arm in the environment of its engine."""
        name = f"{experiment.digest}:{purpose}"
        assert name not in [arm.name for arm in self.opened], "an arm's name is used once"
        environment = self.environments.get(experiment.engine, {"torch": "2"})
        arm = Arm(name=name, experiment=experiment, purpose=purpose, session=experiment.engine, environment=environment)
        self.opened.append(arm)
        return arm

    def run(self, arm: Arm, *, steps: int, gradients: bool = False) -> Block:
        """The next block, in which half a second passes."""
        assert arm in self.opened
        assert arm not in self.closed
        self.now_s += BLOCK_S
        self.asked.append((arm.purpose.rpartition(" ")[2], steps))
        first, index = self._next_step.get(arm.name, 0), self._next_block.get(arm.name, 0)
        self._next_step[arm.name], self._next_block[arm.name] = first + steps, index + 1
        ranks = rank_blocks(
            arm.experiment,
            steps=range(first, first + steps),
            step_ms=self.step_ms(arm.experiment, index),
            gradients=gradients,
            exposed=self.exposed(index),
        )
        block = Block(
            session=arm.experiment.engine,
            arm=arm.name,
            experiment=arm.experiment.digest,
            purpose=arm.purpose,
            index=index,
            ranks=ranks,
        )
        return self.edit(block)

    def close_arm(self, arm: Arm) -> None:
        """Remembered; once is enough."""
        assert arm not in self.closed
        self.closed.append(arm)

    def note_verdict(self, entry: VerdictEntry) -> None:
        """Remembered."""
        self.kept.append(entry)


@dataclass(kw_only=True)
class FakeSessions:
    """Makes sessions without ranks; `strike(doing, arm, times)` may raise what a real one would."""

    step_ms: Pace = field(default_factory=pace)
    strike: Callable[[str, str, int], None] = lambda doing, arm, times: None  # noqa: ARG005 -- nothing strikes
    now_s: float = 0.0
    launched: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    open_arms: list[str] = field(default_factory=list)

    def __call__(self, spec: SessionSpec, directory: SessionDir) -> FakeSession:
        """See `Session`."""
        assert directory.root.name == f"session-{spec.session}"
        self.launched.append(spec.session)
        return FakeSession(spec, self)


class FakeSession:
    """See `Session`."""

    def __init__(self, spec: SessionSpec, sessions: FakeSessions) -> None:
        self._spec = spec
        self._sessions = sessions
        self._experiments: dict[str, Experiment] = {}
        self._next_step: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self.environment: Mapping[str, str] = {"torch": "2"}

    def __enter__(self) -> FakeSession:
        self._sessions.strike("open", self._spec.session, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Remembered."""
        self._sessions.closed.append(self._spec.session)

    def prepare(self, arm: str, experiment: Experiment) -> None:
        """Ready at step 0."""
        self._sessions.strike("prepare", arm, 0)
        assert arm not in self._experiments
        self._experiments[arm], self._next_step[arm], self._times[arm] = experiment, 0, 0
        self._sessions.open_arms.append(arm)

    def run(self, arm: str, *, steps: int, gradients: bool = False) -> tuple[RankBlock, ...]:
        """The arm's next steps."""
        self._sessions.now_s += BLOCK_S
        times = self._times[arm]
        self._sessions.strike("run", arm, times)
        first = self._next_step[arm]
        self._next_step[arm], self._times[arm] = first + steps, times + 1
        step_ms = self._sessions.step_ms(self._experiments[arm], times)
        steps_now = range(first, first + steps)
        return rank_blocks(self._experiments[arm], steps=steps_now, step_ms=step_ms, gradients=gradients)

    def discard(self, arm: str) -> None:
        """Forgotten."""
        self._sessions.strike("discard", arm, 0)
        del self._experiments[arm]
        self._sessions.open_arms.remove(arm)
