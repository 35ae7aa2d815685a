"""All verdicts of a run, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from shardgauge.verdict import PartVerdict, Verdict, tell_effect


def tell_verdicts(verdicts: Iterable[Verdict]) -> list[str]:
    """A table of claim, evidence, outcome and the effect of the part that decided it; then a line of totals."""
    ordered = sorted(verdicts, key=lambda verdict: (verdict.evidence, verdict.line))
    rows = [_row(verdict) for verdict in ordered]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    totals = Counter((verdict.evidence, _outcome(verdict)) for verdict in ordered)
    told = ", ".join(f"{count} {outcome} ({evidence})" for (evidence, outcome), count in totals.items())
    return [*lines, told]


def tell_verdict(verdict: Verdict) -> str:
    """The same in one line."""
    return "  ".join(_row(verdict))


def _row(verdict: Verdict) -> tuple[str, ...]:
    decided = [part for part in verdict.parts if part.outcome != "undecidable"]
    part = _deciding(decided or verdict.parts)
    left_out = sum(len(part.left_out) for part in verdict.parts)
    refused = f", {left_out} refused by the engine" if left_out else ""
    partly = f" ({len(decided)} of {len(verdict.parts)} parts)" if len(decided) < len(verdict.parts) else ""
    return (
        verdict.claim,
        verdict.evidence,
        _outcome(verdict) + partly + refused,
        part.part,
        f"{tell_effect(part)}, {part.limit}",
    )


def _outcome(verdict: Verdict) -> str:
    return (verdict.outcome or "undecidable").replace("_", " ")


def _deciding(parts: Sequence[PartVerdict]) -> PartVerdict:
    order = ("refuted", "not_measurable", "inconclusive", "holds", "undecidable")
    return min(parts, key=lambda part: order.index(part.outcome))
