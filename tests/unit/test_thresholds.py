from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shardgauge.errors import ThresholdError
from shardgauge.marked_yaml import parse_marked_yaml, read_marked_yaml
from shardgauge.thresholds import Thresholds, load_thresholds, read_thresholds
from tests.unit.fake_evidence import THRESHOLDS

ROOT = Path(__file__).parents[2]
PART_LINE = 1 + THRESHOLDS.splitlines().index("      - evidence: T4/T1")


def load(text: str) -> Thresholds:
    """The thresholds in a text."""
    return load_thresholds(parse_marked_yaml(text, name="thresholds.yaml"), name="thresholds.yaml")


def fault_of(old: str, new: str) -> str:
    """What is said of the small thresholds file after one change."""
    assert old in THRESHOLDS
    with pytest.raises(ThresholdError) as raised:
        load(THRESHOLDS.replace(old, new, 1))
    return str(raised.value)


def test_the_projects_own_file_is_read() -> None:
    """Every row of the report's conclusions has its entry, with limits for all three devices."""
    thresholds = read_thresholds(ROOT / "thresholds.yaml")
    assert {"prefetch-beats-native", "collective-counts", "recommended-config"} <= set(thresholds.claims)
    parts = [part for claim in thresholds.claims.values() for part in claim.parts]
    assert all(set(part.limits) == {"npu", "cuda", "cpu"} for part in parts)


NO_GPU = "    limits:\n      cuda: {undecidable: no GPU was measured}\n"
SENTENCE = "    sentence: The candidate is faster than native.\n"
FAULTS: dict[str, tuple[str, str, int, list[str]]] = {
    "key": ("    why:", "    wyh:", 10, ["unknown key 'wyh'", "allowed:", "why"]),
    "key-in-limit": ("margin:", "margn:", PART_LINE + 3, ["'parts.0.limits.npu.margn'", "margin"]),
    "key-in-quote": ("effect:", "efect:", PART_LINE + 1, ["published.efect", "allowed: of, to, effect"]),
    "key-on-top": ("source:", "sauce:", 2, ["unknown key 'sauce'", "source"]),
    "kind": ("kind: faster", "kind: quicker", 6, ["'faster', 'slower'", "'quicker'"]),
    "unit": ("unit: ratio", "unit: ms", PART_LINE, ["unit ms", "is in ratio"]),
    "nan": ("at_most: 0.95", "at_most: .nan", PART_LINE + 4, ["finite number", "nan"]),
    "infinity": ("confidence: 0.99", "confidence: .inf", 8, ["confidence", "inf"]),
    "device": ("cuda: {", "gpu: {", 12, ["'npu', 'cuda' or 'cpu'", "gpu"]),
    "gap": (NO_GPU, "", 12, ["no limit for cuda"]),
    "side": ("at_most: 0.95", "at_least: 0.95", PART_LINE, ["faster takes at_most; cpu has at_least"]),
    "unfounded": (", provenance: measured on a laptop", "", PART_LINE + 4, ["provenance"]),
    "both": ("no GPU was measured", "no GPU, at_most: 1", 12, ["undecidable stands alone"]),
    "evidence": ("evidence: T4/T1", "evidence: T4 / T1", PART_LINE, ["'T4 / T1'", "`T4/T1`"]),
    "no-effect": ("effect: 0.965", "effect: ~", PART_LINE, ["an effect for a ratio"]),
    "shape": ("of: 543.59", 'of: "543.59 + 1"', PART_LINE, ["'543.59 + 1'", "one figure for each metric"]),
    "id": ("claim: candidate-faster", "claim: Candidate", 4, ["pattern", "'Candidate'"]),
    "missing": (SENTENCE, "", 4, ["sentence: Field required"]),
    "version": ("format: 1", "format: 2", 1, ["format", "should be 1", "2"]),
    "line": ("        limits:\n", "        line: 3\n        limits:\n", PART_LINE + 2, ["unknown key 'parts.0.line'"]),
}


@pytest.mark.parametrize(("old", "new", "line", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told_where_it_stands(old: str, new: str, line: int, words: list[str]) -> None:
    """The message names file, line and entry, shows the value, and says what is allowed."""
    lines = fault_of(old, new).splitlines()
    told = [fault for fault in lines if fault.startswith(f"thresholds.yaml:{line}: ")]
    assert told, lines
    assert "claim 'candidate-faster'" in told[0] or line < 4 or "claim: Candidate" in new
    for word in words:
        assert word in told[0]


def test_both_yaml_loaders_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML without its C part is slower, not different: same values, same lines."""
    fast = read_marked_yaml(ROOT / "thresholds.yaml")
    monkeypatch.setattr("shardgauge.marked_yaml._LOADER", yaml.SafeLoader)
    assert read_marked_yaml(ROOT / "thresholds.yaml") == fast


def test_a_key_that_stands_twice_is_refused() -> None:
    """PyYAML would keep the last of two; a threshold must not be overwritten unseen."""
    message = fault_of("    why:", "    why: first\n    why:")
    assert message == "thresholds.yaml:11: 'why' stands here a second time, first in line 10; keep one"


def test_a_claim_that_stands_twice_is_refused() -> None:
    """Two entries of one name are told with both lines."""
    entry = THRESHOLDS[THRESHOLDS.index("  - claim:") :]
    with pytest.raises(ThresholdError, match=r":19: .*'candidate-faster' stands here a second time, first in line 4"):
        load(THRESHOLDS + entry)


def test_a_part_that_stands_twice_is_refused() -> None:
    """Two parts on the same comparison could contradict each other."""
    part = THRESHOLDS[THRESHOLDS.index("      - evidence:") :]
    with pytest.raises(ThresholdError, match=r"thresholds.yaml:4: claim 'candidate-faster': two parts on faster T4/T1"):
        load(THRESHOLDS + part)


def test_what_is_not_yaml_is_told_with_its_line() -> None:
    """A syntax error has a line too."""
    with pytest.raises(ThresholdError, match=r"^thresholds.yaml:3: not YAML: mapping values are not allowed"):
        load("format: 1\nsource: x\nclaims: a: b\n")


def test_a_missing_file_is_told_by_its_path(tmp_path: Path) -> None:
    """The path is in the message, and why it could not be read."""
    with pytest.raises(ThresholdError, match=r"nowhere\.yaml: cannot be read: .*No such file"):
        read_thresholds(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("text", ["", "[]", "claims: 3", "claims: []", "claims: [3]", "claims: [{parts: [3]}]"])
def test_a_file_of_another_shape_is_a_fault_not_a_crash(text: str) -> None:
    """Whatever YAML it is, the answer is a ThresholdError with a line."""
    with pytest.raises(ThresholdError, match=r"^thresholds.yaml:1: "):
        load(text)


def test_a_claim_without_a_test_is_named_with_its_line() -> None:
    """An entry that nobody asserts would look as if it were held."""
    with pytest.raises(ThresholdError, match=r"thresholds.yaml:4: claim 'candidate-faster' has no test; .*mark"):
        load(THRESHOLDS).check_tests([])


def test_a_test_without_a_claim_is_named_with_what_there_is() -> None:
    """A misspelt claim is told together with the ones that exist."""
    with pytest.raises(ThresholdError, match=r"no claim 'candidate-fastre'; it has: candidate-faster"):
        load(THRESHOLDS).check_tests(["candidate-faster", "candidate-fastre"])
