"""What a claim speaks of: a metric, a sum of metrics, or one sum over another, written as a reader would write it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

from shardgauge.errors import NotMeasurable, ThresholdError

Unit = Literal["ratio", "fraction", "ms", "rows", "loss"]


@dataclass(frozen=True)
class Quantity:
    """`a + b - c` or `a + b / c + d`, the slash parting the whole left side from the whole right side.

    The operators stand between spaces; a metric's own name may hold any other character, spaces included
    (`hook_ms:pre_backward prefetch:layers.7`). A quotation of figures (`193.6 / 193.6 + 40.7`) reads the same way.
    """

    upper: tuple[tuple[int, str], ...]
    lower: tuple[tuple[int, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Every metric in the order in which it is written."""
        return tuple(name for _, name in (*self.upper, *self.lower))

    @property
    def text(self) -> str:
        """As a reader writes it."""
        return " / ".join(_join(side) for side in (self.upper, self.lower) if side)

    @property
    def unit(self) -> Unit:
        """What a value of it is counted in."""
        return "fraction" if self.lower else metric_unit(self.names[0])

    def evaluate(self, value_of: Callable[[str], Decimal]) -> Decimal:
        """Its value, given each metric's.

        Raises:
            NotMeasurable: the lower side is zero.
        """
        upper = _total(self.upper, value_of)
        if not self.lower:
            return upper
        return divide(upper, _total(self.lower, value_of), what=self.text)


def parse_quantity(text: str) -> Quantity:
    """Read `step_ms`, `hook_ms:A + hook_ms:B` or `exposed_ms / stage_ms`.

    Raises:
        ThresholdError: an operand is missing, or there is more than one slash.
    """
    sides = [_parse_sum(side, text) for side in text.split(" / ")]
    if len(sides) > 2:
        raise ThresholdError(f"{text!r} has more than one ' / '; write one sum over another")
    return Quantity(*sides)


def metric_unit(name: str) -> Unit:
    """The unit that a metric's name carries.

    Raises:
        ThresholdError: the name carries none.
    """
    kind = name.split(":", 1)[0]
    if kind.endswith("_ms"):
        return "ms"
    if kind.startswith("rows_"):
        return "rows"
    if kind.endswith(("_ratio", "_share")):
        return "fraction"
    raise ThresholdError(f"metric {name!r} carries no unit; names end in _ms, _ratio or _share, or begin with rows_")


def divide(upper: Decimal, lower: Decimal, *, what: str) -> Decimal:
    """The quotient.

    Raises:
        NotMeasurable: `lower` is zero.
    """
    try:
        return upper / lower
    except (ZeroDivisionError, InvalidOperation) as error:
        raise NotMeasurable(f"{what}: the figure to divide by is 0") from error


def format_figure(value: float, unit: Unit, *, change: bool = False) -> str:
    """A figure with its unit; `change` signs it, and a changed fraction is told in percentage points."""
    sign = "+" if change else ""
    if unit == "fraction":
        return f"{value * 100:{sign}.2f} {'pp' if change else '%'}"
    digits = {"ms": f"{sign}.2f", "ratio": ".4f", "rows": f"{sign}.0f", "loss": ".3g"}[unit]
    return f"{value:{digits}}" + (f" {unit}" if unit != "ratio" else "")


def _parse_sum(side: str, whole: str) -> tuple[tuple[int, str], ...]:
    pieces = re.split(r" ([+-]) ", side)
    names, signs = pieces[0::2], ["+", *pieces[1::2]]
    if not all(name and name == name.strip() for name in names):
        raise ThresholdError(f"{whole!r}: an operand is missing; write `a + b - c`, one space around each sign")
    return tuple((1 if sign == "+" else -1, name) for sign, name in zip(signs, names, strict=True))


def _join(side: tuple[tuple[int, str], ...]) -> str:
    head, *rest = side
    return head[1] + "".join(f" {'+' if sign > 0 else '-'} {name}" for sign, name in rest)


def _total(side: tuple[tuple[int, str], ...], value_of: Callable[[str], Decimal]) -> Decimal:
    return sum((sign * value_of(name) for sign, name in side), Decimal(0))
