"""What a claim may ask, and what evidence answers: the seam between judging and measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from shardgauge.boundary import Boundary
from shardgauge.errors import SpecError
from shardgauge.plan import CollectiveKind
from shardgauge.quantities import Quantity, Unit
from shardgauge.records import Mode
from shardgauge.spec import DeviceName, Experiment, Precision

EvidenceName = Literal["recorded", "live"]
Comparison = Literal["value", "ratio", "difference"]
Basis = Literal["samples", "published figures", "exact"]
ACTIVE_STEPS = 2
"""Steps that a profile covers, as in the report (wait 2, warm-up 1, active 2)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A named experiment that tests speak of.

    `experiment` is what the report ran; live evidence fits it to the machine at hand. `report_id` is the report's name
    for the run in this mode, `profiled_id` its name for the same run under a profiler.
    """

    name: str
    experiment: Experiment
    mode: Mode = "timed"
    report_id: str | None = None
    profiled_id: str | None = None

    @property
    def profiled(self) -> Run:
        """The same experiment under a profiler."""
        return replace(self, mode="profiled", report_id=self.profiled_id)

    @property
    def label(self) -> str:
        """`hyper_prefetch (T4)`; profiled runs without a published twin say so."""
        return f"{self.name} ({self.report_id or self.mode})"

    def at_precision(self, precision: Precision) -> Run:
        """The same experiment in another precision, which the report did not run."""
        experiment = self.experiment.model_copy(update={"precision": precision})
        return replace(self, experiment=experiment, report_id=None, profiled_id=None)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Where an effect has to lie for its claim to hold; a side that is None is open."""

    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """One effect to measure: a quantity of a run, or its ratio or difference to another run's.

    `bounds` and `confidence` tell live evidence when it has seen enough.
    """

    of: Run
    quantity: Quantity
    to: Run | None = None
    to_quantity: Quantity
    comparison: Comparison
    bounds: Bounds
    confidence: float


class Figure(Boundary):
    """One side of a comparison, and the file that it lies in; `approximate`: the source gives it with a tilde."""

    run: str
    quantity: str
    value: float
    unit: Unit
    where: str
    approximate: bool = False


class Effect(Boundary):
    """An answer: the estimate, with its interval where there are samples.

    `estimate`, `low` and `high` are in the question's terms (a ratio, a difference or a value); `noise_ratio` is the
    relative standard deviation of one pair, `smallest_detectable_ratio` the relative change that would have been
    seen with 90 % power.
    """

    basis: Basis
    estimate: float
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    noise_ratio: float | None = None
    smallest_detectable_ratio: float | None = None
    figures: tuple[Figure, ...]


class Counts(Boundary):
    """Collectives that a rank issued over `steps` steps of `experiment`, the one that really ran.

    `collectives` is None where only the report's rows are known; `rows_*` are counted as the report counted them
    (`plan.rows_as_published`).
    """

    experiment: Experiment
    steps: int
    rows_all_gather: int
    rows_reduce_scatter: int
    collectives: Mapping[CollectiveKind, int] | None = None
    where: str


class Curve(Boundary):
    """The losses of one run, step by step, and its gradient norms by parameter (`gradient_norms[name][step]`).

    `parameters_sha256` is over each rank's shards after the last step, bit by bit; empty where it was not kept.
    """

    run: str
    losses: tuple[float, ...]
    gradient_norms: Mapping[str, tuple[float, ...]]
    parameters_sha256: tuple[str, ...] = ()
    where: str


class Evidence(Protocol):
    """Measured now or recorded earlier; a claim is decided on either in the same way.

    Every method raises `NotMeasurable` where the evidence is missing, incomplete or not comparable, and
    `UnsupportedSwitch` where the engine at hand lacks a switch of the run.
    """

    @property
    def name(self) -> EvidenceName:
        """Which of the two it is."""

    def device_of(self, run: Run) -> DeviceName:
        """The device that the run ran on, or will: it chooses the row of limits."""

    def measure(self, question: Question) -> Effect:
        """The effect asked for."""

    def counts(self, run: Run) -> Counts:
        """The run's collectives."""

    def curve(self, run: Run, *, repetition: int = 0) -> Curve:
        """The run's losses and gradient norms from step 0; another `repetition` is another run of the same."""


def refuse_mixed_modes(of: Run, to: Run | None) -> None:
    """Timed and profiled runs are never compared: a profiler costs time.

    Raises:
        SpecError: one of the two is timed, the other profiled.
    """
    if to is not None and of.mode != to.mode:
        raise SpecError(
            f"{of.label} is {of.mode} and {to.label} is {to.mode}; a profiler costs time, so the two are never "
            "compared: take both from the same kind of run"
        )
