"""Samples to estimates and intervals. Pure functions; scipy is imported when the first interval is asked for.

A claim is looked at more than once: after a few pairs, and again after more, until it is decided or the budget ends.
Each look k spends the share 1 / (k (k + 1)) of the claim's error probability; the shares add up to 1 over any number
of looks, so looking often does not raise the false-alarm rate (Bonferroni's inequality; Lan & DeMets, Biometrika 70,
1983, call the scheme alpha spending). Within a look the interval is Student's, over samples that are one pair of
blocks each: neighbours in time, in alternating order, so that a drift of the machine cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST_LOOK = 6
LOOK_GROWTH = 1.4
POWER = 0.9


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at the evidence: after how many samples, and with which two-sided error probability."""

    samples: int
    error_probability: float


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its confidence interval; `deviation` is the samples' standard deviation.

    `detectable` is the shift of the true mean that this many such samples would have told from none with 90 % power.
    """

    mean: float
    low: float
    high: float
    deviation: float
    detectable: float


def looks(confidence: float) -> Iterator[Look]:
    """The schedule of looks for one claim at `confidence`; endless."""
    samples = float(FIRST_LOOK)
    index = 1
    while True:
        yield Look(samples=round(samples), error_probability=(1 - confidence) / (index * (index + 1)))
        samples *= LOOK_GROWTH
        index += 1


def mean_interval(samples: Sequence[float], error_probability: float) -> Interval:
    """Student's interval for the mean of independent samples.

    Args:
        samples: at least two finite values.
        error_probability: two-sided, between 0 and 1.

    Raises:
        ValueError: too few samples, or one that is not finite.
    """
    if len(samples) < 2:
        raise ValueError(f"an interval needs at least 2 samples, not {len(samples)}")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError("an interval needs finite samples")
    from scipy.special import stdtrit

    freedom = len(samples) - 1
    mean = statistics.fmean(samples)
    deviation = statistics.stdev(samples)
    error = deviation / math.sqrt(len(samples))
    quantile = float(stdtrit(freedom, 1 - error_probability / 2))
    power_quantile = float(stdtrit(freedom, POWER))
    return Interval(
        mean=mean,
        low=mean - quantile * error,
        high=mean + quantile * error,
        deviation=deviation,
        detectable=(quantile + power_quantile) * error,
    )
