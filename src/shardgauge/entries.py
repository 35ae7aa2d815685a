"""One entry of thresholds.yaml: a claim, its parts, its limits, and the figures that it quotes from the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from shardgauge.boundary import Boundary
from shardgauge.errors import ThresholdError
from shardgauge.evidence import Bounds, Comparison
from shardgauge.quantities import Quantity, Unit, parse_quantity
from shardgauge.spec import DeviceName, Precision

Kind = Literal[
    "faster",
    "slower",
    "not_slower",
    "equivalent",
    "at_least",
    "at_most",
    "ordering",
    "exact_count",
    "loss_aligned",
    "gradient_aligned",
    "deterministic",
]
CURVE_KINDS: frozenset[Kind] = frozenset({"loss_aligned", "gradient_aligned", "deterministic"})
SIDES: Mapping[Kind, tuple[str, ...]] = {
    "faster": ("at_most",),
    "slower": ("at_least",),
    "not_slower": ("at_most",),
    "equivalent": ("at_least", "at_most"),
    "at_least": ("at_least",),
    "at_most": ("at_most",),
    "ordering": ("at_most",),
    "exact_count": ("exact",),
    "loss_aligned": ("at_most",),
    "gradient_aligned": ("at_most",),
    "deterministic": ("at_most",),
}
"""What a limit of each kind consists of."""

LINE = "(line)"
"""The key under which the reader hands an entry its line; no file can spell it by accident."""


def _as_written(quoted: Any) -> Any:
    if isinstance(quoted, list):
        return tuple(str(figure) for figure in quoted)
    return None if quoted is None else str(quoted)


Quotation = Annotated[str, BeforeValidator(_as_written)]
Quotations = Annotated[str | tuple[str, ...] | None, BeforeValidator(_as_written)]
_RUN = r"[A-Za-z]\w*"
_EVIDENCE = re.compile(rf"({_RUN})(?:([/-])({_RUN})| < ({_RUN}(?:, {_RUN})*))?")


class Limit(Boundary):
    """Where the effect has to lie on one device, or why that device cannot decide.

    With `margin` the limit is the published effect widened by it, and that sum is checked. Without, `provenance` says
    where the limit comes from. `exact: wrap_plan` expects what follows from the model and its wrapping.
    """

    at_least: Decimal | None = None
    at_most: Decimal | None = None
    exact: Literal["wrap_plan"] | None = None
    margin: Annotated[Decimal, Field(ge=0)] | None = None
    provenance: str | None = None
    undecidable: str | None = None
    line: int = Field(alias=LINE)

    @property
    def sides(self) -> tuple[str, ...]:
        """Which of at_least, at_most and exact are given."""
        return tuple(side for side in ("at_least", "at_most", "exact") if getattr(self, side) is not None)

    @property
    def bounds(self) -> Bounds:
        """The limit for the judge."""
        low, high = self.at_least, self.at_most
        return Bounds(at_least=None if low is None else float(low), at_most=None if high is None else float(high))

    @model_validator(mode="after")
    def _decides_or_says_why_not(self) -> Limit:
        if self.undecidable is not None and (self.sides or self.margin is not None):
            raise ThresholdError("undecidable stands alone: a device that cannot decide has no limit")
        if self.undecidable is None and not self.sides:
            raise ThresholdError("give at_least, at_most, both, or exact; or undecidable with a reason to act on")
        if self.sides and "exact" not in self.sides and self.margin is None and self.provenance is None:
            raise ThresholdError("a limit needs a margin on the published effect, or provenance")
        return self


class Published(Boundary):
    """The report's own figures, quoted a second time: `of`, `to`, and the effect that follows from them."""

    of: Quotation
    to: Quotations = None
    effect: Decimal | None = None


class Restatement(Boundary):
    """The same value from other figures of the same run, which must agree with it at the precision it is written in."""

    metric: str
    of: Quotation


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One recorded figure that a claim rests on, as the claim quotes it."""

    report_id: str
    metric: str
    quoted: Decimal


class Part(Boundary):
    """One comparison of a claim. `evidence`: `P1`, `T4/T1`, `P12-P4`, or `T5 < T1, T2` (T5 is the least of all)."""

    kind: Kind
    evidence: str | None = None
    mesh: Literal["fsdp8", "hsdp24", "both"] = "fsdp8"
    metric: str = "step_ms"
    to_metric: str | None = None
    unit: Unit
    precision: Precision | None = None
    published: Published | None = None
    restates: Restatement | None = None
    limits: Mapping[DeviceName, Limit]
    line: int = Field(alias=LINE)

    @property
    def key(self) -> tuple[str | None, ...]:
        """What tells the part from the claim's others."""
        return (self.kind, self.evidence, self.metric, self.to_metric, self.mesh, self.precision)

    @property
    def of(self) -> str | None:
        """The first operand's report id."""
        return self._operands[0]

    @property
    def to(self) -> str | None:
        """The second operand's report id, of a ratio or a difference."""
        return self._operands[2]

    @property
    def rivals(self) -> tuple[str, ...]:
        """The report ids of an ordering's other runs."""
        return tuple(self._operands[3].split(", ")) if self._operands[3] else ()

    @property
    def comparison(self) -> Comparison:
        """What is computed: an ordering is decided by the ratio to the nearest rival."""
        if self.rivals or self._operands[1] == "/":
            return "ratio"
        return "difference" if self._operands[1] == "-" else "value"

    @cached_property
    def quantity(self) -> Quantity:
        """The first operand's quantity."""
        return parse_quantity(self.metric)

    @cached_property
    def to_quantity(self) -> Quantity:
        """The second operand's quantity; the first's, unless it is given."""
        return parse_quantity(self.to_metric or self.metric)

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """Every recorded figure that the part rests on, with the claim's own quotation of it."""
        if self.published is None or self.of is None:
            return ()
        found = _references(self.of, self.quantity, self.published.of)
        for other, quotation in zip(self.others, self.other_quotations, strict=True):
            found += _references(other, self.to_quantity, quotation)
        if self.restates:
            found += _references(self.of, parse_quantity(self.restates.metric), self.restates.of)
        return found

    @cached_property
    def _operands(self) -> tuple[str | None, ...]:
        match = _EVIDENCE.fullmatch(self.evidence or "")
        return match.groups() if match else (None, None, None, None)

    @property
    def others(self) -> tuple[str, ...]:
        """The report ids of whatever the first operand is compared with."""
        return self.rivals or ((self.to,) if self.to else ())

    @property
    def other_quotations(self) -> tuple[str, ...]:
        """What is quoted of the second operand, or of every rival."""
        to = self.published.to if self.published else None
        return to if isinstance(to, tuple) else (to,) if to else ()

    @model_validator(mode="after")
    def _has_the_shape_of_its_kind(self) -> Part:
        if self.kind in CURVE_KINDS:
            if self.evidence or self.published:
                raise ThresholdError(f"{self.kind} compares live curves: it takes neither evidence nor published")
        elif self.evidence is None or not _EVIDENCE.fullmatch(self.evidence):
            raise ThresholdError(f"evidence {self.evidence!r}; write `P1`, `T4/T1`, `P12-P4` or `T5 < T1, T2`")
        if (self.kind == "ordering") != bool(self.rivals):
            raise ThresholdError("kind ordering goes with evidence such as `T5 < T1, T2`, and only with it")
        self._check_limits()
        self._check_published()
        return self

    def _check_limits(self) -> None:
        missing = [device for device in get_args(DeviceName) if device not in self.limits]
        if missing:
            raise ThresholdError(f"no limit for {', '.join(missing)}; give one, or undecidable with a reason")
        for device, limit in self.limits.items():
            if limit.undecidable is None and limit.sides != SIDES[self.kind]:
                wanted = " and ".join(SIDES[self.kind])
                raise ThresholdError(f"{self.kind} takes {wanted}; {device} has {' and '.join(limit.sides)}")
            if self.kind == "deterministic" and limit.at_most not in (None, 0):
                raise ThresholdError(
                    f"{device}: deterministic means equal bit for bit: at_most is 0, not {limit.at_most}"
                )
            if device == "npu" and self.published and limit.margin is None and limit.sides and not limit.exact:
                raise ThresholdError(
                    "npu: a limit on a published effect is that effect widened by a margin; give margin"
                )
            if limit.margin is not None and self.published is None:
                raise ThresholdError(f"{device} has a margin, but there is no published effect to widen by it")

    def _check_published(self) -> None:
        implied = self.quantity.unit if self.comparison != "ratio" else "ratio"
        if self.kind not in CURVE_KINDS and self.unit != implied:
            raise ThresholdError(f"unit {self.unit}: a {self.comparison} of {self.metric!r} is in {implied}")
        if self.published is None:
            return
        if len(self.others) != len(self.other_quotations):
            raise ThresholdError(f"published quotes {len(self.other_quotations)} figures for {self.others}")
        if (self.comparison == "value") != (self.published.effect is None):
            raise ThresholdError("published gives an effect for a ratio, difference or ordering, and none for a value")
        _ = self.references


class Claim(Boundary):
    """A published sentence, made decidable. `parts` are every comparison that it takes."""

    claim: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    sentence: str
    kind: Kind
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.99
    provenance: str
    why: str
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    line: int = Field(alias=LINE)

    @model_validator(mode="after")
    def _has_each_part_once(self) -> Claim:
        keys = [part.key for part in self.parts]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ThresholdError(f"two parts on {' '.join(str(word) for word in twice[0] if word)}; keep one")
        return self

    @property
    def published(self) -> bool:
        """Whether the report gave figures, so that recorded evidence can decide."""
        return any(part.published for part in self.parts)


def _references(report_id: str, quantity: Quantity, quotation: str) -> tuple[Reference, ...]:
    quoted = parse_quantity(quotation)
    same_shape = [sign for sign, _ in quoted.upper] == [sign for sign, _ in quantity.upper] and [
        sign for sign, _ in quoted.lower
    ] == [sign for sign, _ in quantity.lower]
    if not same_shape:
        raise ThresholdError(f"published quotes {quotation!r} for {quantity.text!r}; quote one figure for each metric")
    return tuple(
        Reference(report_id=report_id, metric=metric, quoted=_number(text, quotation))
        for metric, text in zip(quantity.names, quoted.names, strict=True)
    )


def _number(text: str, quotation: str) -> Decimal:
    if not re.fullmatch(r"-?\d+(\.\d+)?", text):
        raise ThresholdError(f"published quotes {quotation!r}; {text!r} is not a plain number")
    return Decimal(text)
