"""Judging: a part of a claim, held against evidence, becomes a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardgauge.double_entry import check_limit, check_sense
from shardgauge.entries import Claim, Limit, Part
from shardgauge.errors import NotMeasurable
from shardgauge.evidence import Bounds, Counts, Effect, Evidence, Figure, Question, Run, refuse_mixed_modes
from shardgauge.plan import COLLECTIVE_KINDS, rows_as_published
from shardgauge.quantities import format_figure
from shardgauge.recorded import QuotedFigure, RecordedEvidence
from shardgauge.spec import DeviceName
from shardgauge.verdict import Outcome, PartVerdict


@dataclass(frozen=True, kw_only=True)
class Docket:
    """A claim, the file that it stands in, and the evidence that it is held against."""

    claim: Claim
    file: str
    evidence: Evidence

    def entry(self, line: int) -> str:
        """`thresholds.yaml:42`."""
        return f"{self.file}:{line}"

    def concerns(self, part: Part) -> bool:
        """Whether this evidence has anything to say on the part: published figures exist, or it is live."""
        return self.evidence.name == "live" or part.published is not None


def judge(low: float, high: float, bounds: Bounds) -> Outcome:
    """Hold an interval against bounds: wholly inside holds, wholly outside refutes, else it is not decided.

    Bounds belong to the inside. An exact value is the interval from itself to itself.
    """
    at_least = float("-inf") if bounds.at_least is None else bounds.at_least
    at_most = float("inf") if bounds.at_most is None else bounds.at_most
    if at_least <= low and high <= at_most:
        return "holds"
    if high < at_least or low > at_most:
        return "refuted"
    return "inconclusive"


def judge_effect(effect: Effect, bounds: Bounds) -> Outcome:
    """The same of an effect; one without an interval is taken as it stands."""
    low = effect.estimate if effect.low is None else effect.low
    high = effect.estimate if effect.high is None else effect.high
    return judge(low, high, bounds)


def judge_part(docket: Docket, part: Part, runs: Mapping[str, Run]) -> PartVerdict:
    """Decide one comparison; `runs` holds every run that the part names, by report id.

    Raises:
        NotMeasurable: the evidence is missing, incomplete, not comparable, or not what the claim quotes.
        SpecError: a timed run is compared with a profiled one.
    """
    assert part.of is not None, "curves are judged in curves.py"  # noqa: S101 # our own invariant
    of, others = runs[part.of], [runs[other] for other in part.others]
    for other in others:
        refuse_mixed_modes(of, other)
    device = docket.evidence.device_of(of)
    for other in others:
        if docket.evidence.device_of(other) != device:
            raise NotMeasurable(
                f"{of.label} ran on {device} and {other.label} on {docket.evidence.device_of(other)}: not comparable"
            )
    limit = part.limits[device]
    if limit.undecidable is not None:
        return undecided(docket, part, device, limit.undecidable)
    if docket.evidence.name == "recorded" or limit.margin is not None:
        check_limit(part, limit)
    check_sense(part, limit)
    if isinstance(docket.evidence, RecordedEvidence):
        docket.evidence.confirm(_quotes(docket, part, runs))
    if part.kind == "exact_count":
        return _judge_counts(docket, part, of)
    effects = [docket.evidence.measure(question) for question in _ask(docket, part, of, others)]
    outcomes = [judge_effect(effect, limit.bounds) for effect in effects]
    worst = max(range(len(effects)), key=lambda place: (_SEVERITY[outcomes[place]], effects[place].estimate))
    return decided(docket, part, device, outcome=outcomes[worst], effect=effects[worst])


def decided(docket: Docket, part: Part, device: DeviceName, *, outcome: Outcome, effect: Effect) -> PartVerdict:
    """A verdict on a part whose effect is known."""
    return _verdict(docket, part, device).model_copy(update={"outcome": outcome, "effect": effect})


def undecided(docket: Docket, part: Part, device: DeviceName, reason: str) -> PartVerdict:
    """A verdict that says why this device or engine cannot decide the part."""
    return _verdict(docket, part, device).model_copy(update={"outcome": "undecidable", "note": reason})


def unmeasured(docket: Docket, part: Part, device: DeviceName | None, reason: str) -> PartVerdict:
    """A verdict that says why nothing can be concluded from the evidence."""
    return _verdict(docket, part, device).model_copy(update={"outcome": "not_measurable", "note": reason})


def name_part(part: Part) -> str:
    """`T4/T1`, or for curves their precision."""
    return part.evidence or f"{part.precision or 'as configured'} on {part.mesh}"


def _verdict(docket: Docket, part: Part, device: DeviceName | None) -> PartVerdict:
    limit = None if device is None else part.limits[device]
    return PartVerdict(
        part=name_part(part),
        quantity=part.metric + (f" over {part.to_metric}" if part.to_metric else ""),
        comparison=part.comparison,
        unit=part.unit,
        outcome="not_measurable",
        device=device,
        limit="not chosen" if limit is None else _tell_limit(part, limit),
        limit_basis="" if limit is None else _tell_limit_basis(part, limit),
        entry=docket.entry(part.line if limit is None else limit.line),
    )


def _tell_limit(part: Part, limit: Limit) -> str:
    if limit.undecidable is not None:
        return "none"
    if limit.exact:
        return "exactly what follows from the wrap plan"
    return " and ".join(
        f"{side.replace('_', ' ')} {format_figure(float(getattr(limit, side)), part.unit, change=_is_change(part))}"
        for side in limit.sides
    )


def _tell_limit_basis(part: Part, limit: Limit) -> str:
    if limit.margin is None or part.published is None:
        return limit.provenance or ""
    effect = part.published.of if part.published.effect is None else part.published.effect
    return f"published effect {effect} and margin {limit.margin}"


def _is_change(part: Part) -> bool:
    return part.comparison == "difference"


def _quotes(docket: Docket, part: Part, runs: Mapping[str, Run]) -> list[QuotedFigure]:
    where = docket.entry(part.line)
    return [
        QuotedFigure(run=runs[reference.report_id], metric=reference.metric, quoted=reference.quoted, where=where)
        for reference in part.references
    ]


def _ask(docket: Docket, part: Part, of: Run, others: Sequence[Run]) -> list[Question]:
    to: Sequence[Run | None] = others or [None]
    bounds = part.limits[docket.evidence.device_of(of)].bounds
    return [
        Question(
            of=of,
            quantity=part.quantity,
            to=other,
            to_quantity=part.to_quantity,
            comparison=part.comparison,
            bounds=bounds,
            confidence=docket.claim.confidence,
        )
        for other in to
    ]


def _judge_counts(docket: Docket, part: Part, run: Run) -> PartVerdict:
    counts = docket.evidence.counts(run)
    expected = counts.experiment.expected_counts(steps=counts.steps)
    metrics = ("rows_all_gather", "rows_reduce_scatter")
    if part.metric not in metrics:
        raise NotMeasurable(f"{part.metric} is no count; write {' or '.join(metrics)}")
    wanted = rows_as_published(expected)[metrics.index(part.metric)]
    found: int = getattr(counts, part.metric)
    figures = (_count(run, part.metric, found, counts), _count(run, "from the wrap plan", wanted, counts))
    exact = counts.collectives is None or all(
        counts.collectives.get(kind, 0) == expected[kind] for kind in COLLECTIVE_KINDS
    )
    effect = Effect(basis="exact" if counts.collectives else "published figures", estimate=found, figures=figures)
    outcome: Outcome = "holds" if found == wanted and exact else "refuted"
    note = f"{counts.steps} steps of {counts.experiment.describe()}"
    if counts.collectives is not None:
        real = ", ".join(f"{counts.collectives.get(kind, 0)} of {expected[kind]} {kind}" for kind in COLLECTIVE_KINDS)
        note += f"\nreal collectives: {real}"
    device = docket.evidence.device_of(run)
    return decided(docket, part, device, outcome=outcome, effect=effect).model_copy(update={"note": note})


def _count(run: Run, quantity: str, value: int, counts: Counts) -> Figure:
    return Figure(run=run.label, quantity=quantity, value=value, unit="rows", where=counts.where)


_SEVERITY: Mapping[Outcome, int] = {"holds": 0, "inconclusive": 1, "not_measurable": 2, "refuted": 3}
