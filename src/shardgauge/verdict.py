"""Verdicts: what was decided, on which figures, against which limit; and how a verdict is told."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from shardgauge.boundary import Boundary
from shardgauge.evidence import Comparison, Effect, EvidenceName, Figure
from shardgauge.quantities import Unit, format_figure
from shardgauge.spec import DeviceName

Outcome = Literal["holds", "refuted", "inconclusive", "not_measurable"]
PartOutcome = Literal["holds", "refuted", "inconclusive", "not_measurable", "undecidable"]
_ORDER: tuple[Outcome, ...] = ("refuted", "not_measurable", "inconclusive")


class PartVerdict(Boundary):
    """One comparison of a claim, decided. `limit` and what it rests on are in words; `entry` is its file and line.

    `device` None: there is no run to take it from. `left_out` tells what the engine at hand refused to run; with
    --gauge-strict that is a failure, since an engine that refuses everything must not pass.
    """

    part: str
    quantity: str
    comparison: Comparison
    unit: Unit
    outcome: PartOutcome
    device: DeviceName | None
    limit: str
    limit_basis: str = ""
    entry: str
    effect: Effect | None = None
    note: str = ""
    left_out: tuple[str, ...] = ()


class Verdict(Boundary):
    """A claim, decided on one kind of evidence by all the parts that this evidence and device can decide."""

    claim: str
    sentence: str
    evidence: EvidenceName
    entry: str
    parts: tuple[PartVerdict, ...]

    @property
    def outcome(self) -> Outcome | None:
        """The worst of the parts'; None where no part could be decided."""
        outcomes = {part.outcome for part in self.parts}
        worst = next((outcome for outcome in _ORDER if outcome in outcomes), None)
        return worst or ("holds" if "holds" in outcomes else None)

    @property
    def line(self) -> int:
        """The line of the claim's entry."""
        return int(self.entry.rpartition(":")[2])

    def render(self) -> str:
        """The whole verdict for a terminal, its first line telling claim, outcome and evidence."""
        decided = (self.outcome or "undecidable").replace("_", " ").upper()
        lines = [f"{self.claim}: {decided} on {self.evidence} evidence", f"  {self.sentence}"]
        for part in self.parts:
            lines += ["", *_render_part(part)]
        return "\n".join(lines)


@runtime_checkable
class KeepsVerdicts(Protocol):
    """Evidence with a journal, which keeps each verdict beside the measurements that it rests on."""

    def keep_verdict(self, verdict: Verdict) -> None:
        """Write the verdict down."""


def _render_part(part: PartVerdict) -> list[str]:
    lines = [f"  {part.part}  {part.quantity}: {part.outcome.replace('_', ' ')}"]
    rows: list[tuple[str, str]] = []
    if part.effect:
        width = max(len(figure.run) for figure in part.effect.figures)
        for place, figure in enumerate(part.effect.figures):
            rows.append(("figures" if place == 0 else "", f"{figure.run:<{width}}  {_tell_figure(figure)}"))
        rows += [("effect", tell_effect(part) + _tell_basis(part.effect)), ("pairs", _tell_pairs(part.effect))]
    basis = f" ({part.limit_basis})" if part.limit_basis else ""
    rows += [("limit", f"{part.limit} on {part.device or 'an unknown device'}{basis}"), ("entry", part.entry)]
    for place, line in enumerate(part.note.splitlines()):
        rows.append(("note" if place == 0 else "", line))
    return lines + [f"    {title:<8}{text}" for title, text in rows]


def tell_effect(part: PartVerdict) -> str:
    """The effect, with its interval where it has one."""
    effect = part.effect
    if effect is None:
        return "none"
    change = part.comparison == "difference"

    def told(value: float) -> str:
        return format_figure(value, part.unit, change=change)

    if effect.low is None or effect.high is None:
        return told(effect.estimate)
    return f"{told(effect.estimate)} [{told(effect.low)}, {told(effect.high)}]"


def _tell_basis(effect: Effect) -> str:
    return f" (no interval: {effect.basis})" if effect.low is None else ""


def _tell_pairs(effect: Effect) -> str:
    if effect.pairs is None:
        return f"none: {effect.basis}"
    told = str(effect.pairs)
    if effect.noise_ratio is not None:
        told += f", noise {effect.noise_ratio * 100:.2f} % a pair"
    if effect.smallest_detectable_ratio is not None:
        told += f", a change of {effect.smallest_detectable_ratio * 100:.2f} % would have been seen"
    return told


def _tell_figure(figure: Figure) -> str:
    tilde = "~" if figure.approximate else ""
    return f"{tilde}{format_figure(figure.value, figure.unit)}  {figure.quantity}  {figure.where}"
