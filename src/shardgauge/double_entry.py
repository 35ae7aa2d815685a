"""Double entry: what a claim quotes, the effect it states and the limit it sets have to follow from one another."""

from __future__ import annotations

from decimal import Decimal

from shardgauge.entries import Limit, Part
from shardgauge.errors import NotMeasurable
from shardgauge.quantities import divide, parse_quantity


def published_effect(part: Part) -> Decimal:
    """The effect as the claim states it, checked against the figures that it quotes.

    Raises:
        NotMeasurable: the quoted figures give another effect, or other quoted figures contradict the value.
    """
    if part.published is None:
        raise NotMeasurable(f"{part.evidence} has no published effect to decide on")
    of = evaluate_quotation(part.published.of)
    if part.restates:
        _check(evaluate_quotation(part.restates.of), of, f"{part.restates.metric} = {part.restates.of}")
    if part.published.effect is None:
        return of
    to = min(evaluate_quotation(quotation) for quotation in part.other_quotations)
    effect = divide(of, to, what=str(part.evidence)) if part.comparison == "ratio" else of - to
    _check(effect, part.published.effect, f"{part.evidence} = {part.published.of} {_SIGNS[part.comparison]} {to}")
    return part.published.effect


def check_limit(part: Part, limit: Limit) -> None:
    """Hold a limit with a margin against the published effect: it is the effect widened by exactly that margin.

    Raises:
        NotMeasurable: it is not.
    """
    effect = published_effect(part)
    if limit.margin is None:
        return
    for side, widened in (("at_least", effect - limit.margin), ("at_most", effect + limit.margin)):
        stated: Decimal | None = getattr(limit, side)
        if stated is not None and stated != widened:
            sign = "-" if side == "at_least" else "+"
            raise NotMeasurable(
                f"{side} is {stated}, but the published effect {effect} {sign} margin {limit.margin} is {widened}; "
                "one of the three was mistyped"
            )


def check_sense(part: Part, limit: Limit) -> None:
    """Hold any limit to what its kind means, with a margin or without.

    Raises:
        NotMeasurable: nothing can satisfy it, or it lies on the wrong side of "as fast as".
    """
    if limit.at_least is not None and limit.at_most is not None and limit.at_least > limit.at_most:
        raise NotMeasurable(f"at_least {limit.at_least} is above at_most {limit.at_most}: nothing lies between them")
    if part.comparison == "ratio" and not _beyond_equal(part, limit):
        bound = limit.at_least if limit.at_most is None else limit.at_most
        raise NotMeasurable(f"a limit of {bound} does not make a run {part.kind}: choose it past 1")


def evaluate_quotation(quotation: str) -> Decimal:
    """The value of `47.6 + 278.5` or `193.6 / 193.6 + 40.7`."""
    return parse_quantity(quotation).evaluate(Decimal)


_SIGNS = {"ratio": "/", "difference": "-", "value": ""}


def _beyond_equal(part: Part, limit: Limit) -> bool:
    if part.kind == "faster":
        return limit.at_most is not None and limit.at_most < 1
    return part.kind != "slower" or (limit.at_least is not None and limit.at_least > 1)


def _check(exact: Decimal, stated: Decimal, how: str) -> None:
    exponent = stated.as_tuple().exponent
    assert isinstance(exponent, int), "pydantic lets finite numbers through only"  # noqa: S101 # our own invariant
    half_a_digit = Decimal(5).scaleb(exponent - 1)
    if abs(exact - stated) > half_a_digit:
        raise NotMeasurable(f"the claim states {stated}, but {how} is {exact:.6f}; one of the figures was mistyped")
