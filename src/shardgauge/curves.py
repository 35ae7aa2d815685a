"""Judging curves: losses and gradients of several runs, held against those of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardgauge.claims import Docket, decided, judge_effect, undecided
from shardgauge.entries import Part
from shardgauge.errors import NotMeasurable, UnsupportedSwitch
from shardgauge.evidence import Curve, Effect, Figure, Run
from shardgauge.verdict import PartVerdict


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The place where two curves differ most: `amount` is absolute for losses, relative for gradient norms."""

    amount: float
    quantity: str
    of: float
    to: float


def greatest_loss_deviation(of: Curve, to: Curve) -> Deviation:
    """The greatest absolute difference of two loss curves.

    Raises:
        NotMeasurable: the curves are empty or of different lengths.
    """
    _refuse_unlike(of.losses, to.losses, of, to)
    return max(
        (
            Deviation(amount=abs(a - b), quantity=f"loss at step {step}", of=a, to=b)
            for step, (a, b) in enumerate(zip(of.losses, to.losses, strict=True))
        ),
        key=lambda deviation: deviation.amount,
    )


def greatest_gradient_deviation(of: Curve, to: Curve) -> Deviation:
    """The greatest relative difference of any parameter's gradient norm at any step.

    Raises:
        NotMeasurable: there are no gradient norms, or not of the same parameters and steps.
    """
    if not of.gradient_norms or of.gradient_norms.keys() != to.gradient_norms.keys():
        other = sorted(of.gradient_norms.keys() ^ to.gradient_norms.keys())
        raise NotMeasurable(
            f"{of.run} and {to.run} have no gradient norms of the same parameters to compare; only one of them has: "
            f"{', '.join(other[:5]) or 'none at all'} ({of.where}; {to.where})"
        )
    return max(_gradient_deviations(of, to), key=lambda deviation: deviation.amount)


def greatest_deviation(of: Curve, to: Curve) -> Deviation:
    """The greater of both, losses taken absolutely: 0 only where the curves are equal bit for bit.

    Where the parameters at the end are known, they have to be the same bits too.
    """
    deviations = [greatest_loss_deviation(of, to), greatest_gradient_deviation(of, to)]
    if of.parameters_sha256 != to.parameters_sha256:
        what = "parameters after the last step (1: their bits differ)"
        deviations.append(Deviation(amount=1.0, quantity=what, of=1.0, to=0.0))
    return max(deviations, key=lambda deviation: deviation.amount)


def judge_curves(docket: Docket, part: Part, runs: Sequence[Run], to: Run) -> PartVerdict:
    """Hold the curves of `runs` against `to`'s. What the engine at hand cannot run is left out, and named.

    Raises:
        NotMeasurable: a curve is missing or incomplete.
    """
    compare = greatest_loss_deviation if part.kind == "loss_aligned" else greatest_gradient_deviation
    reference = docket.evidence.curve(_at_precision(part, to))
    curves, left_out = _curves_of(docket, part, runs)
    found = [(compare(curve, reference), curve, reference) for _, curve in curves]
    return _decide(docket, part, to, found, left_out)


def judge_repetition(docket: Docket, part: Part, runs: Sequence[Run]) -> PartVerdict:
    """Hold each run's curve against that of a second run of the same experiment.

    Raises:
        NotMeasurable: a curve is missing or incomplete.
    """
    curves, left_out = _curves_of(docket, part, runs)
    again = [docket.evidence.curve(run, repetition=1) for run, _ in curves]
    found = [
        (greatest_deviation(curve, second), curve, second) for (_, curve), second in zip(curves, again, strict=True)
    ]
    return _decide(docket, part, runs[0], found, left_out)


def _curves_of(docket: Docket, part: Part, runs: Sequence[Run]) -> tuple[list[tuple[Run, Curve]], list[str]]:
    curves, left_out = [], []
    for run in (_at_precision(part, run) for run in runs):
        try:
            curves.append((run, docket.evidence.curve(run)))
        except UnsupportedSwitch as error:
            left_out.append(f"left out: {run.name}: {error}")
    return curves, left_out


def _decide(
    docket: Docket, part: Part, run: Run, found: list[tuple[Deviation, Curve, Curve]], left_out: list[str]
) -> PartVerdict:
    device = docket.evidence.device_of(run)
    if not found:
        return undecided(docket, part, device, "\n".join(left_out)).model_copy(update={"left_out": tuple(left_out)})
    worst, of, to = max(found, key=lambda item: item[0].amount)
    effect = Effect(
        basis="exact",
        estimate=worst.amount,
        figures=tuple(
            Figure(run=curve.run, quantity=worst.quantity, value=value, unit="loss", where=curve.where)
            for curve, value in ((of, worst.of), (to, worst.to))
        ),
    )
    outcome = judge_effect(effect, part.limits[device].bounds)
    verdict = decided(docket, part, device, outcome=outcome, effect=effect)
    note = "\n".join([f"curves compared: {len(found)}", *left_out])
    return verdict.model_copy(update={"note": note, "left_out": tuple(left_out)})


def _at_precision(part: Part, run: Run) -> Run:
    return run if part.precision is None else run.at_precision(part.precision)


def _gradient_deviations(of: Curve, to: Curve) -> Iterable[Deviation]:
    for name, norms in of.gradient_norms.items():
        _refuse_unlike(norms, to.gradient_norms[name], of, to)
        for step, (a, b) in enumerate(zip(norms, to.gradient_norms[name], strict=True)):
            scale = max(abs(a), abs(b))
            amount = abs(a - b) / scale if scale else 0.0
            yield Deviation(amount=amount, quantity=f"gradient norm of {name} at step {step}", of=a, to=b)


def _refuse_unlike(a: Sequence[object], b: Sequence[object], of: Curve, to: Curve) -> None:
    """Refuse to compare what is empty or of another length."""
    if not a or len(a) != len(b):
        raise NotMeasurable(
            f"{of.run} has {len(a)} entries and {to.run} {len(b)}: curves are compared whole or not at all "
            f"({of.where}; {to.where})"
        )
