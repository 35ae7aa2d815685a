"""Live evidence that answers what a test tells it to, and a small project of claims to run the plugin on."""

from __future__ import annotations

from collections.abc import Mapping

from shardgauge.evidence import Counts, Curve, Effect, EvidenceName, Figure, Question, Run
from shardgauge.spec import DeviceName, Switches, build_experiment
from shardgauge.verdict import Verdict

NATIVE = Run(
    name="native",
    experiment=build_experiment(engine="native", preset="qwen3-8b-lite"),
    report_id="T1",
    profiled_id="P1",
)
CANDIDATE = Run(
    name="candidate",
    experiment=build_experiment(
        engine="hyper_torch", preset="qwen3-8b-lite", switches=Switches(forward_prefetch=1, backward_prefetch=1)
    ),
    report_id="T4",
    profiled_id="P3",
)

THRESHOLDS = """\
format: 1
source: https://example.org/report
claims:
  - claim: candidate-faster
    sentence: The candidate is faster than native.
    kind: faster
    unit: ratio
    confidence: 0.99
    provenance: the report, table 1
    why: Half of the gain has to be left.
    limits:
      cuda: {undecidable: no GPU was measured}
    parts:
      - evidence: T4/T1
        published: {of: 543.59, to: 563.08, effect: 0.965}
        limits:
          npu: {at_most: 0.9825, margin: 0.0175}
          cpu: {at_most: 0.95, provenance: measured on a laptop}
"""

NATIVE_RECORD = """\
{
  "format": 1, "id": "T1", "mode": "timed", "device": "npu",
  "experiment": {"engine": "native", "preset": "qwen3-8b-lite"},
  "figures": {"step_ms": 563.08},
  "published_path": "native.json", "source": "https://example.org/report table 1", "transcribed": "2026-11-30"
}
"""

CANDIDATE_RECORD = """\
{
  "format": 1, "id": "T4", "mode": "timed", "device": "npu",
  "experiment": {
    "engine": "hyper_torch", "preset": "qwen3-8b-lite", "switches": {"forward_prefetch": 1, "backward_prefetch": 1}
  },
  "figures": {"step_ms": 543.59},
  "published_path": "candidate.json", "source": "https://example.org/report table 1", "transcribed": "2026-11-30"
}
"""

CONFTEST = """\
import pytest

from tests.unit import fake_evidence


@pytest.fixture(scope="session")
def live_evidence():
    return fake_evidence.FakeLive({live})
"""

TEST = """\
import pytest

from tests.unit.fake_evidence import CANDIDATE, NATIVE


@pytest.mark.fsdp8
@pytest.mark.claim("candidate-faster")
def test_candidate_is_faster(gauge):
    gauge.assert_faster(CANDIDATE, than=NATIVE)
"""


def ratio(estimate: float, low: float, high: float) -> Effect:
    """A measured ratio with its interval."""
    figures = tuple(
        Figure(run=name, quantity="step_ms", value=value, unit="ms", where=".gauge/journal.jsonl")
        for name, value in (("candidate", 100 * estimate), ("native", 100.0))
    )
    return Effect(
        basis="samples",
        estimate=estimate,
        low=low,
        high=high,
        pairs=12,
        noise_ratio=0.02,
        smallest_detectable_ratio=0.015,
        figures=figures,
    )


class FakeLive:
    """Answers every question with one effect, or raises one error; curves are by run name, a repetition's with `#1`."""

    name: EvidenceName = "live"

    def __init__(
        self,
        answer: Effect | Exception | None = None,
        *,
        device: DeviceName = "cpu",
        collectives: Mapping[str, int] | None = None,
        curves: Mapping[str, Curve | Exception] | None = None,
    ) -> None:
        self.answer = answer
        self.device = device
        self.collectives = collectives
        self.curves = curves or {}
        self.by_rival: dict[str, Effect] = {}
        self.asked: list[Question] = []
        self.kept: list[Verdict] = []

    def device_of(self, run: Run) -> DeviceName:  # noqa: ARG002 # one machine, whatever the run
        """The one device."""
        return self.device

    def measure(self, question: Question) -> Effect:
        """The one answer; the question is kept."""
        self.asked.append(question)
        if question.to is not None and question.to.name in self.by_rival:
            return self.by_rival[question.to.name]
        if isinstance(self.answer, Effect):
            return self.answer
        raise self.answer or AssertionError("nothing to answer with")

    def counts(self, run: Run) -> Counts:
        """The counts that it was given, or those of the wrap plan."""
        real = dict(self.collectives or run.experiment.expected_counts(steps=2))
        return Counts(
            experiment=run.experiment,
            steps=2,
            rows_all_gather=real["all_gather"],
            rows_reduce_scatter=2 * real["reduce_scatter"],
            collectives=real,  # type: ignore[arg-type] # the table's keys are plain strings
            where=".gauge/journal.jsonl",
        )

    def keep_verdict(self, verdict: Verdict) -> None:
        """Remembered."""
        self.kept.append(verdict)

    def curve(self, run: Run, *, repetition: int = 0) -> Curve:
        """The curve of that name."""
        found = self.curves[run.name + ("#1" if repetition else "")]
        if isinstance(found, Exception):
            raise found
        return found


def curve(name: str, losses: tuple[float, ...], norms: tuple[float, ...] = (1.0, 2.0)) -> Curve:
    """A curve of one parameter."""
    return Curve(run=name, losses=losses, gradient_norms={"norm.weight": norms}, where=".gauge/journal.jsonl")
