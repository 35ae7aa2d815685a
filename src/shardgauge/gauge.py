"""The `gauge` of a test: its verbs decide the parts of the claim that the test is marked with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shardgauge.claims import Docket, judge_part, name_part, undecided, unmeasured
from shardgauge.curves import judge_curves, judge_repetition
from shardgauge.entries import Kind, Part
from shardgauge.errors import (
    NotMeasurable,
    ShardgaugeError,
    SpecError,
    ThresholdError,
    Undecidable,
    UnsupportedSwitch,
)
from shardgauge.evidence import Comparison, Run, refuse_mixed_modes
from shardgauge.quantities import Quantity, parse_quantity
from shardgauge.verdict import KeepsVerdicts, PartVerdict, Verdict

VERBS: Mapping[Kind, str] = {
    "faster": "assert_faster",
    "slower": "assert_slower",
    "not_slower": "assert_not_slower",
    "equivalent": "assert_equivalent",
    "at_least": "assert_at_least",
    "at_most": "assert_at_most",
    "ordering": "assert_fastest",
    "exact_count": "assert_counts",
    "loss_aligned": "assert_loss_aligned",
    "gradient_aligned": "assert_gradients_aligned",
    "deterministic": "assert_deterministic",
}


class ClaimRefuted(ShardgaugeError):
    """The evidence contradicts the claim. The message is the verdict."""


class ClaimNotMeasurable(NotMeasurable):
    """Nothing can be concluded from the evidence. The message is the verdict."""


class Gauge:
    """Decides one claim on one kind of evidence, part by part, as a test asserts them.

    A refuted part ends the test at once, and so does one that cannot be measured; an inconclusive or undecidable part
    lets it go on, and `missing_parts` tells in the end what was not asserted.
    """

    def __init__(self, docket: Docket, *, meshes: frozenset[str]) -> None:
        self._docket = docket
        self._meshes = meshes
        self._verdicts: dict[tuple[str | None, ...], PartVerdict] = {}

    @property
    def verdict(self) -> Verdict:
        """What has been decided so far."""
        claim = self._docket.claim
        return Verdict(
            claim=claim.claim,
            sentence=claim.sentence,
            evidence=self._docket.evidence.name,
            entry=self._docket.entry(claim.line),
            parts=tuple(self._verdicts.values()),
        )

    @property
    def missing_parts(self) -> tuple[str, ...]:
        """Parts of the claim, on the test's meshes, that no verb has asserted yet."""
        concerned = (part for part in self._parts if self._docket.concerns(part))
        return tuple(
            f"{name_part(part)} {part.metric} ({VERBS[part.kind]}, {self._docket.entry(part.line)})"
            for part in concerned
            if part.key not in self._verdicts
        )

    def keep_verdict(self) -> None:
        """Hand the verdict to evidence that has a journal, once the test has ended."""
        if self._verdicts and isinstance(self._docket.evidence, KeepsVerdicts):
            self._docket.evidence.keep_verdict(self.verdict)

    def assert_faster(self, run: Run, *, than: Run, metric: str = "step_ms") -> None:
        """`run` takes less of `metric` than the other."""
        self._decide("faster", run, [than], metric)

    def assert_slower(self, run: Run, *, than: Run, metric: str = "step_ms") -> None:
        """`run` takes more of `metric` than the other."""
        self._decide("slower", run, [than], metric)

    def assert_not_slower(self, run: Run, *, than: Run, metric: str = "step_ms") -> None:
        """`run` takes no more of `metric` than the other, within the claim's limit."""
        self._decide("not_slower", run, [than], metric)

    def assert_equivalent(self, run: Run, *, to: Run, metric: str = "step_ms") -> None:
        """`run` and the other take the same of `metric`, within the claim's two limits."""
        self._decide("equivalent", run, [to], metric)

    def assert_fastest(self, run: Run, *, among: Sequence[Run]) -> None:
        """No other run of `among` is ahead of `run` by more than the claim's limit."""
        self._decide("ordering", run, [other for other in among if other != run], "step_ms")

    def assert_at_least(
        self,
        metric: str,
        *,
        of: Run,
        over: Run | None = None,
        minus: Run | None = None,
        other_metric: str | None = None,
    ) -> None:
        """The metric's value, or its ratio `over` or difference to another run's, is no less than the claim's limit."""
        self._decide_bound("at_least", metric, of=of, over=over, minus=minus, other_metric=other_metric)

    def assert_at_most(
        self,
        metric: str,
        *,
        of: Run,
        over: Run | None = None,
        minus: Run | None = None,
        other_metric: str | None = None,
    ) -> None:
        """The metric's value, or its ratio `over` or difference to another run's, is no more than the claim's limit."""
        self._decide_bound("at_most", metric, of=of, over=over, minus=minus, other_metric=other_metric)

    def assert_counts(self, *runs: Run) -> None:
        """Each run issued exactly the collectives that follow from its wrap plan."""
        for run in runs:
            for metric in ("rows_all_gather", "rows_reduce_scatter"):
                self._decide("exact_count", run, [], metric)

    def assert_loss_aligned(self, *runs: Run, to: Run) -> None:
        """Each run's losses agree with those of `to`, at every precision that the claim names."""
        for part in self._of_kind("loss_aligned"):
            self._take(part, partial(judge_curves, self._docket, part, runs, to), to)

    def assert_gradients_aligned(self, *runs: Run, to: Run) -> None:
        """Each run's gradient norms, parameter by parameter, agree with those of `to`."""
        for part in self._of_kind("gradient_aligned"):
            self._take(part, partial(judge_curves, self._docket, part, runs, to), to)

    def assert_deterministic(self, *runs: Run) -> None:
        """A second run of each experiment gives the same losses and gradients, bit for bit."""
        for part in self._of_kind("deterministic"):
            self._take(part, partial(judge_repetition, self._docket, part, runs), runs[0])

    @property
    def _parts(self) -> tuple[Part, ...]:
        return tuple(part for part in self._docket.claim.parts if is_on(part, self._meshes))

    def _decide_bound(
        self, kind: Kind, metric: str, *, of: Run, over: Run | None, minus: Run | None, other_metric: str | None
    ) -> None:
        if over is not None and minus is not None:
            raise SpecError(f"{metric} of {of.label}: take it over another run's or minus another's, not both")
        comparison: Comparison = "ratio" if over else "difference" if minus else "value"
        others = [other for other in (over, minus) if other]
        self._decide(kind, of, others, metric, other_metric=other_metric, comparison=comparison)

    def _decide(
        self,
        kind: Kind,
        of: Run,
        others: Sequence[Run],
        metric: str,
        *,
        other_metric: str | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        for other in others:
            refuse_mixed_modes(of, other)
        quantities = (parse_quantity(metric), parse_quantity(other_metric or metric))
        part = self._find(kind, of, others, quantities, comparison)
        if self._docket.concerns(part):
            runs = {str(run.report_id): run for run in (of, *others)}
            self._take(part, partial(judge_part, self._docket, part, runs), of)

    def _find(
        self,
        kind: Kind,
        of: Run,
        others: Sequence[Run],
        quantities: tuple[Quantity, Quantity],
        comparison: Comparison | None,
    ) -> Part:
        metric = quantities[0].text
        wanted = (of.report_id, frozenset(other.report_id for other in others), *quantities)
        same = [part for part in self._parts if _operands(part) == wanted and comparison in (None, part.comparison)]
        for part in same:
            if part.kind == kind:
                return part
        names = " and ".join(run.label for run in (of, *others))
        claim = self._docket.claim
        if same:
            raise ThresholdError(
                f"{self._docket.entry(same[0].line)}: claim {claim.claim!r} has {name_part(same[0])} {metric} as "
                f"{same[0].kind}, which {VERBS[same[0].kind]} decides; the test says {VERBS[kind]}"
            )
        known = ", ".join(f"{name_part(part)} {part.metric}" for part in self._parts) or "none on the test's meshes"
        raise ThresholdError(
            f"{self._docket.entry(claim.line)}: claim {claim.claim!r} has no part on {metric} of {names}; "
            f"its parts are: {known}"
        )

    def _of_kind(self, kind: Kind) -> tuple[Part, ...]:
        parts = tuple(part for part in self._parts if part.kind == kind)
        if not parts:
            claim = self._docket.claim
            raise ThresholdError(
                f"{self._docket.entry(claim.line)}: claim {claim.claim!r} is {claim.kind}, which "
                f"{VERBS[claim.kind]} decides; the test says {VERBS[kind]}"
            )
        return parts

    def _take(self, part: Part, judge: Callable[[], PartVerdict], run: Run) -> None:
        """Decide a part and note it down; what contradicts or cannot be measured ends the test."""
        evidence = self._docket.evidence
        try:
            device = evidence.device_of(run)
        except NotMeasurable as error:
            self._verdicts[part.key] = unmeasured(self._docket, part, None, str(error))
            raise ClaimNotMeasurable(self.verdict.render()) from error
        reason = part.limits[device].undecidable
        if reason is not None:
            self._verdicts[part.key] = undecided(self._docket, part, device, reason)
            return
        try:
            self._verdicts[part.key] = judge()
        except Undecidable as error:
            self._verdicts[part.key] = undecided(self._docket, part, device, str(error))
        except UnsupportedSwitch as error:
            verdict = undecided(self._docket, part, device, str(error))
            self._verdicts[part.key] = verdict.model_copy(update={"left_out": (str(error),)})
        except ThresholdError:
            raise
        except ShardgaugeError as error:
            self._verdicts[part.key] = unmeasured(self._docket, part, device, str(error))
            raise ClaimNotMeasurable(self.verdict.render()) from error
        if self._verdicts[part.key].outcome == "refuted":
            raise ClaimRefuted(self.verdict.render())


def is_on(part: Part, meshes: frozenset[str]) -> bool:
    """Whether a part belongs to a test that is marked with `meshes`; a test with no such mark has every part."""
    return not meshes or part.mesh == "both" or part.mesh in meshes


def _operands(part: Part) -> tuple[object, ...]:
    if part.of is None:
        return ()
    return (part.of, frozenset(part.others), part.quantity, part.to_quantity)
