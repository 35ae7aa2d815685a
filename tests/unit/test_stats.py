"""Estimates and intervals: held against known values, and by simulation against what they promise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgauge.claims import judge
from shardgauge.evidence import Bounds
from shardgauge.stats import POWER, looks, mean_interval
from shardgauge.verdict import Outcome

CONFIDENCE = 0.99
LOOKS = 6
RUNS = 2000
Draw = Callable[[random.Random], float]


def normal(source: random.Random) -> float:
    """A pair's log-ratio when one pair scatters by 5 %."""
    return source.gauss(0.0, 0.05)


def heavy_tailed(source: random.Random) -> float:
    """Student's t with 3 degrees of freedom: about one pair in 50 lies beyond 15 %."""
    return 0.05 * source.gauss(0.0, 1.0) / math.sqrt(source.gammavariate(1.5, 2.0) / 3)


def stolen_core(source: random.Random) -> float:
    """Each of the two blocks has a core taken away once in ten times, and is then slower by 40 % on average."""
    of, to = (source.expovariate(1 / 0.4) if source.random() < 0.1 else 0.0 for _ in range(2))
    return source.gauss(0.0, 0.05) + of - to


NOISES: dict[str, Draw] = {"normal": normal, "heavy-tailed": heavy_tailed, "stolen-core": stolen_core}


def decide(draw: Draw, source: random.Random, *, truth: float, bounds: Bounds) -> Outcome:
    """One claim on a ratio, looked at as often as live evidence looks in a short budget. `truth` is a log-ratio."""
    samples: list[float] = []
    outcome: Outcome = "inconclusive"
    for look in itertools.islice(looks(CONFIDENCE), LOOKS):
        samples += [truth + draw(source) for _ in range(look.samples - len(samples))]
        interval = mean_interval(samples, look.error_probability)
        outcome = judge(math.exp(interval.low), math.exp(interval.high), bounds)
        if outcome != "inconclusive":
            break
    return outcome


def outcomes(draw: Draw, *, truth: float, bounds: Bounds, runs: int = RUNS) -> dict[Outcome, float]:
    """How often each outcome came, from a fixed seed."""
    source = random.Random(192)  # noqa: S311 -- a simulation, no secret
    found = [decide(draw, source, truth=truth, bounds=bounds) for _ in range(runs)]
    return {outcome: found.count(outcome) / runs for outcome in ("holds", "refuted", "inconclusive")}


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99, 0.999])
def test_looks_never_spend_more_than_the_claims_error_probability(confidence: float) -> None:
    """However often the evidence is looked at, the shares add up to no more than 1 - confidence, and nearly to it."""
    shares = [look.error_probability for look in itertools.islice(looks(confidence), 1000)]
    assert all(share > 0 for share in shares)
    assert 0.998 * (1 - confidence) < math.fsum(shares) <= 1 - confidence


def test_every_look_has_more_samples_than_the_one_before() -> None:
    """6, 8, 12, 16, 23, 32: a look without new evidence would spend its share for nothing."""
    counts = [look.samples for look in itertools.islice(looks(CONFIDENCE), 30)]
    assert counts[:6] == [6, 8, 12, 16, 23, 32]
    assert all(before < after for before, after in itertools.pairwise(counts))


def test_an_interval_is_students_by_the_tables() -> None:
    """0, 2, 4, 6, 8 has mean 4 and standard deviation sqrt(10); t with 4 degrees of freedom is 2.776 at 95 %."""
    interval = mean_interval([0.0, 2.0, 4.0, 6.0, 8.0], 0.05)
    error = math.sqrt(10) / math.sqrt(5)
    assert interval.mean == 4.0
    assert interval.deviation == pytest.approx(math.sqrt(10))
    assert interval.high - 4.0 == pytest.approx(2.7764451 * error)
    assert 4.0 - interval.low == pytest.approx(2.7764451 * error)
    assert interval.detectable == pytest.approx((2.7764451 + 1.5332063) * error)


@pytest.mark.parametrize("count", [2, 3, 6, 40])
@pytest.mark.parametrize("error_probability", [0.5, 0.05, 0.005, 1e-6])
def test_an_interval_ends_where_a_t_test_begins_to_reject(count: int, error_probability: float) -> None:
    """The t-test of either end of the interval has exactly the error probability as its p-value."""
    from scipy.stats import ttest_1samp

    source = random.Random(count)  # noqa: S311 -- a simulation, no secret
    samples = [source.gauss(1.0, 0.3) for _ in range(count)]
    interval = mean_interval(samples, error_probability)
    for end in (interval.low, interval.high):
        assert ttest_1samp(samples, end).pvalue == pytest.approx(error_probability, rel=1e-6)


@pytest.mark.parametrize(
    ("noise", "truth", "bounds"),
    [
        ("normal", 0.0, Bounds(at_most=1.0)),
        ("normal", math.log(1.05), Bounds(at_least=0.95, at_most=1.05)),
        ("heavy-tailed", math.log(0.95), Bounds(at_most=0.95)),
        ("stolen-core", math.log(1.05), Bounds(at_least=1.05)),
    ],
    ids=["normal", "normal-equivalence", "heavy-tailed", "stolen-core"],
)
def test_a_truth_at_the_limit_is_hardly_ever_decided(noise: str, truth: float, bounds: Bounds) -> None:
    """There both "holds" and "refuted" would be luck; over all looks they come no more often than 1 - confidence."""
    found = outcomes(NOISES[noise], truth=truth, bounds=bounds)
    assert found["holds"] + found["refuted"] <= 1 - CONFIDENCE


@pytest.mark.parametrize("noise", NOISES)
def test_no_effect_is_hardly_ever_a_gain(noise: str) -> None:
    """Two equal arms: that one is 5 % faster is nearly always refuted or left open, and never held more than 1 %."""
    found = outcomes(NOISES[noise], truth=0.0, bounds=Bounds(at_most=0.95), runs=500)
    assert found["holds"] <= 1 - CONFIDENCE


def test_a_clear_effect_is_decided() -> None:
    """15 % against a limit of 5 %, with 5 % of noise: a gauge that never decides would make no mistake either."""
    found = outcomes(normal, truth=math.log(0.85), bounds=Bounds(at_most=0.95), runs=300)
    assert found["holds"] > 0.95
    found = outcomes(normal, truth=math.log(1.1), bounds=Bounds(at_most=0.95), runs=300)
    assert found["refuted"] > 0.95


@pytest.mark.parametrize(
    ("truth", "outcome"), [(0.0, "holds"), (0.15, "refuted"), (-0.15, "refuted"), (math.log(1.05), "inconclusive")]
)
def test_equivalence_holds_only_inside_its_limits(truth: float, outcome: Outcome) -> None:
    """Within 5 %, at 2 % of noise: inside it holds, beyond either limit it is refuted, at a limit it stays open."""
    found = outcomes(
        lambda source: source.gauss(0.0, 0.02), truth=truth, bounds=Bounds(at_least=0.95, at_most=1.05), runs=300
    )
    assert found[outcome] > 0.95


def test_little_evidence_is_not_equivalence() -> None:
    """At 50 % of noise no difference could be seen, and that is inconclusive instead of the same."""
    found = outcomes(
        lambda source: source.gauss(0.0, 0.5), truth=0.0, bounds=Bounds(at_least=0.95, at_most=1.05), runs=300
    )
    assert found["holds"] == 0


def test_the_detectable_change_is_seen_as_often_as_is_said() -> None:
    """A shift as large as `detectable` says is told from none in nine cases of ten."""
    source = random.Random(7)  # noqa: S311 -- a simulation, no secret
    count, error_probability = 16, 0.005
    unit = mean_interval([-1.0, 1.0] * (count // 2), error_probability)
    shift = unit.detectable / unit.deviation * 0.05
    seen = [
        mean_interval([shift + normal(source) for _ in range(count)], error_probability).low > 0 for _ in range(RUNS)
    ]
    assert sum(seen) / RUNS == pytest.approx(POWER, abs=0.03)


@pytest.mark.parametrize("samples", [[], [1.0]])
def test_too_few_samples_are_refused(samples: Sequence[float]) -> None:
    """One sample has no spread; the message says how many there were."""
    with pytest.raises(ValueError, match=rf"at least 2 samples, not {len(samples)}"):
        mean_interval(samples, 0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    """A NaN compares false with every limit, so it must not come that far."""
    with pytest.raises(ValueError, match="finite samples"):
        mean_interval([1.0, bad, 2.0], 0.01)


SAMPLES = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=2, max_size=30)


@settings(deadline=None, derandomize=True, database=None)
@given(SAMPLES, st.floats(min_value=1e-9, max_value=0.9))
def test_an_interval_is_around_the_mean_and_the_mean_among_the_samples(samples: list[float], share: float) -> None:
    """Whatever the samples: ordered, finite and centred."""
    interval = mean_interval(samples, share)
    assert interval.low <= interval.mean <= interval.high
    assert math.isfinite(interval.low)
    assert math.isfinite(interval.high)
    assert min(samples) - 1e-9 <= interval.mean <= max(samples) + 1e-9
    assert interval.detectable >= interval.high - interval.mean - 1e-9


@settings(deadline=None, derandomize=True, database=None)
@given(SAMPLES, st.floats(min_value=1e-9, max_value=0.4))
def test_a_smaller_error_probability_is_a_wider_interval(samples: list[float], share: float) -> None:
    """Being surer costs width, so a later look with the same samples could only be more careful."""
    sure, unsure = mean_interval(samples, share), mean_interval(samples, 2 * share)
    assert sure.low <= unsure.low
    assert sure.high >= unsure.high


@settings(deadline=None, derandomize=True, database=None)
@given(SAMPLES, st.sampled_from([2.0, 0.5, 1024.0]))
def test_an_interval_scales_with_its_samples(samples: list[float], factor: float) -> None:
    """Ms or s: the same decision. Samples turned round turn the interval round."""
    one, scaled = mean_interval(samples, 0.01), mean_interval([factor * sample for sample in samples], 0.01)
    turned = mean_interval([-sample for sample in samples], 0.01)
    assert scaled.low == pytest.approx(factor * one.low, rel=1e-9, abs=1e-6)
    assert scaled.high == pytest.approx(factor * one.high, rel=1e-9, abs=1e-6)
    assert (turned.low, turned.high) == (-one.high, -one.low)


@settings(deadline=None, derandomize=True, database=None)
@given(st.floats(min_value=-1e6, max_value=1e6), st.integers(min_value=2, max_value=20))
def test_equal_samples_have_an_interval_of_no_width(value: float, count: int) -> None:
    """No spread, no doubt: the interval is the value itself."""
    interval = mean_interval([value] * count, 0.01)
    assert interval.low == interval.high == pytest.approx(value)
    assert interval.deviation == 0
