"""What a claim quotes, states and sets has to follow from one another, whatever the records say."""

from __future__ import annotations

import pytest

from shardgauge.double_entry import check_limit, check_sense, published_effect
from shardgauge.entries import Part
from shardgauge.errors import NotMeasurable, ThresholdError
from shardgauge.marked_yaml import parse_marked_yaml
from shardgauge.thresholds import load_thresholds
from tests.unit.fake_evidence import THRESHOLDS

RESTATED = (
    THRESHOLDS.replace("kind: faster", "kind: at_most")
    .replace("unit: ratio", "unit: fraction")
    .replace("evidence: T4/T1", "evidence: P1\n        metric: exposed_share")
    .replace(
        "published: {of: 543.59, to: 563.08, effect: 0.965}",
        'published: {of: 0.072}\n        restates: {metric: exposed_ms / stage_ms, of: "40.7 / 566.8"}',
    )
    .replace("{at_most: 0.9825, margin: 0.0175}", "{at_most: 0.090, margin: 0.018}")
)


def part_of(text: str, *changes: tuple[str, str]) -> Part:
    """The only part of the only claim of a thresholds file, after some changes."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (claim,) = load_thresholds(parse_marked_yaml(text, name="t"), name="t").claims.values()
    return claim.parts[0]


@pytest.mark.parametrize("text", [THRESHOLDS, RESTATED], ids=["ratio", "restated"])
def test_a_consistent_entry_passes(text: str) -> None:
    """As it stands in the file."""
    part = part_of(text)
    check_limit(part, part.limits["npu"])


def test_an_effect_that_does_not_follow_is_refused_though_its_limit_does() -> None:
    """543.59 / 563.08 is 0.9654: whoever writes 0.966 has mistyped something, and a fitting limit does not heal it."""
    part = part_of(THRESHOLDS, ("effect: 0.965", "effect: 0.966"), ("at_most: 0.9825", "at_most: 0.9835"))
    with pytest.raises(NotMeasurable, match=r"states 0\.966, but T4/T1 = 543\.59 / 563\.08 is 0\.965387; one of"):
        check_limit(part, part.limits["npu"])


@pytest.mark.parametrize(("stated", "right"), [("0.97", True), ("0.9654", True), ("0.96", False), ("0.9653", False)])
def test_an_effect_is_held_at_the_precision_in_which_it_is_written(stated: str, right: bool) -> None:  # noqa: FBT001 # a table
    """0.97 and 0.9654 are both what 0.965387 rounds to."""
    part = part_of(THRESHOLDS, ("effect: 0.965", f"effect: {stated}"))
    if right:
        assert str(published_effect(part)) == stated
    else:
        with pytest.raises(NotMeasurable, match=f"states {stated}"):
            published_effect(part)


def test_a_restatement_that_contradicts_is_refused() -> None:
    """50.7 / 566.8 is not 7.2 %."""
    part = part_of(RESTATED, ("40.7", "50.7"))
    with pytest.raises(NotMeasurable, match=r"states 0\.072, but exposed_ms / stage_ms = 50\.7 / 566\.8 is 0\.089450"):
        check_limit(part, part.limits["npu"])


def test_a_limit_beyond_equality_makes_nothing_faster() -> None:
    """An effect widened past 1 would let a slower run pass as faster."""
    part = part_of(THRESHOLDS, ("at_most: 0.9825, margin: 0.0175", "at_most: 1.0025, margin: 0.0375"))
    with pytest.raises(NotMeasurable, match=r"a limit of 1\.0025 does not make a run faster: choose it past 1"):
        check_sense(part, part.limits["npu"])


def test_a_zero_to_divide_by_is_refused() -> None:
    """A mistyped figure must not end in a crash."""
    part = part_of(THRESHOLDS, ("to: 563.08", "to: 0"))
    with pytest.raises(NotMeasurable, match="the figure to divide by is 0"):
        published_effect(part)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cpu: {at_most: 0.95,", "cpu: {at_most: 1.95,", r"a limit of 1\.95 does not make a run faster"),
        ("cpu: {at_most: 0.95,", "cpu: {at_most: 1,", "a limit of 1 does not make a run faster"),
    ],
)
def test_a_limit_without_margin_has_a_sense_too(old: str, new: str, said: str) -> None:
    """A CPU's limit is nobody's effect widened, and still has to mean faster."""
    part = part_of(THRESHOLDS, (old, new))
    with pytest.raises(NotMeasurable, match=said):
        check_sense(part, part.limits["cpu"])


def test_a_published_effect_needs_a_margin_on_its_own_device() -> None:
    """Without one, any limit would do."""
    with pytest.raises(ThresholdError, match=r"npu: a limit on a published effect.*give margin"):
        part_of(THRESHOLDS, ("npu: {at_most: 0.9825, margin: 0.0175}", "npu: {at_most: 5, provenance: x}"))
