"""The transcribed runs: whole, claimed, and held by double entry down to the last digit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

from fixtures.engines import published_runs
from shardgauge.claims import Docket, judge_part
from shardgauge.entries import Claim
from shardgauge.errors import NotMeasurable
from shardgauge.marked_yaml import parse_marked_yaml
from shardgauge.recorded import FiledRun, RecordedEvidence, read_records
from shardgauge.records import RecordedRun
from shardgauge.thresholds import Thresholds, load_thresholds

ROOT = Path(__file__).parents[2]
RUNS = published_runs()
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "results").rglob("*.json"))}
CLAIMS_TEXT = (ROOT / "thresholds.yaml").read_text(encoding="utf-8")
REPORT_IDS = [f"T{number}" for number in range(1, 12)] + [f"P{number}" for number in range(1, 13)]


@cache
def own_thresholds() -> Thresholds:
    """The project's claims."""
    return read_text(CLAIMS_TEXT)


@cache
def own_records() -> RecordedEvidence:
    """The project's records."""
    return read_records(ROOT / "results", shown_as="results")


def read_text(text: str) -> Thresholds:
    """The claims in a text."""
    return load_thresholds(parse_marked_yaml(text, name="thresholds.yaml"), name="thresholds.yaml")


def outcomes(claims: Mapping[str, Claim], evidence: RecordedEvidence) -> dict[str, str]:
    """What recorded evidence makes of every claim that it can decide: the outcomes of its parts, in order."""
    decided = {}
    for name, claim in claims.items():
        docket = Docket(claim=claim, file="thresholds.yaml", evidence=evidence)
        told = []
        for part in (part for part in claim.parts if docket.concerns(part)):
            try:
                told.append(judge_part(docket, part, RUNS).outcome)
            except NotMeasurable:
                told.append("not_measurable")
        decided[name] = " ".join(told)
    return decided


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The claims that were decided otherwise."""
    return {name for name in before if before[name] != after[name]}


def altered_digits(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Every digit between `start` and `end` changed to its neighbour: its place, and the whole text with it."""
    for place in range(start, end):
        if text[place].isdigit():
            digit = str(int(text[place]) + 1) if text[place] != "9" else "8"
            yield place, text[:place] + digit + text[place + 1 :]


def claims_on(report_id: str, metric: str) -> set[str]:
    """The claims that quote one recorded figure."""
    return {
        name
        for name, claim in own_thresholds().claims.items()
        for part in claim.parts
        for reference in part.references
        if (reference.report_id, reference.metric) == (report_id, metric)
    }


def with_record(path: Path, text: str) -> RecordedEvidence:
    """The project's records, one of them read from another text; what is no record any more is not among them."""
    others = {key: filed for key, filed in own_records().runs.items() if key != path.stem}
    try:
        record = RecordedRun.model_validate(json.loads(text))
    except ValidationError:
        return replace(own_records(), runs=others)
    return replace(own_records(), runs={**others, record.id: FiledRun(record=record, where=str(path))})


def test_every_run_of_the_report_is_there() -> None:
    """23 runs, each under its own name, in the report's folder, with source and date."""
    assert own_records().faults == ()
    assert sorted(own_records().runs) == sorted(REPORT_IDS)
    for filed in own_records().runs.values():
        folder = filed.record.published_path.rstrip("/").rsplit("/", 1)[0] if filed.record.mode == "timed" else None
        assert folder is None or filed.where == f"results/{folder}/{filed.record.id}.json"
        assert filed.record.mode == "timed" or filed.where.startswith(f"results/{filed.record.published_path}")
        assert "issues/192" in filed.record.source


def test_every_record_is_the_run_that_the_tests_name() -> None:
    """Engine, switches, mesh and mode of each record are those of the named run with its id."""
    assert sorted(RUNS) == sorted(REPORT_IDS)
    for run in RUNS.values():
        own_records().device_of(run)


def test_every_claim_with_published_figures_holds_on_them() -> None:
    """What the report concluded follows from what it printed."""
    decided = outcomes(own_thresholds().claims, own_records())
    assert {name for name, told in decided.items() if set(told.split()) - {"holds"}} == set()
    live_only = {name for name, told in decided.items() if not told}
    assert live_only == {"loss-aligned", "gradient-aligned", "deterministic"}


def test_every_figure_is_claimed_or_says_why_not() -> None:
    """A figure that nothing rests on could be wrong unseen; the thresholds file lists each with its reason."""
    recorded = {f"{key} {metric}" for key, filed in own_records().runs.items() for metric in filed.record.figures}
    claimed = {
        f"{reference.report_id} {reference.metric}"
        for claim in own_thresholds().claims.values()
        for part in claim.parts
        for reference in part.references
    }
    unclaimed = [figure for entry in own_thresholds().unclaimed for figure in entry.figures]
    assert len(unclaimed) == len(set(unclaimed))
    assert recorded - claimed == set(unclaimed)
    assert claimed <= recorded


def test_the_tail_is_ranked_against_every_hook_of_its_runs() -> None:
    """`post_backward:norm` is the largest only if it was compared with all others that were recorded."""
    for key in ("P2", "P3", "P4", "P8"):
        hooks = {metric for metric in own_records().runs[key].record.figures if metric.startswith("hook_ms:")}
        assert all("tail-hook" in claims_on(key, metric) for metric in hooks)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_changed_digit_of_a_figure_flips_exactly_the_claims_on_it(path: Path) -> None:
    """Each digit of each figure in turn: the claims that quote it can no longer be measured, all others stand."""
    text, before = TEXTS[path], outcomes(own_thresholds().claims, own_records())
    block = re.search(r'"figures": \{(.*?)\n  \}', text, re.DOTALL)
    assert block
    figures = list(re.finditer(r'"([^"]+)": ([\d.]+)', text[block.start(1) : block.end(1)]))
    assert len(figures) == len(own_records().runs[path.stem].record.figures)
    for figure in figures:
        start, end = block.start(1) + figure.start(2), block.start(1) + figure.end(2)
        for place, other in altered_digits(text, start, end):
            after = outcomes(own_thresholds().claims, with_record(path, other))
            assert changed(before, after) == claims_on(path.stem, figure[1]), (figure[0], place)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_record_of_another_run_flips_exactly_the_claims_on_it(path: Path) -> None:
    """A changed seed, switch, mesh or number of steps makes it another run, on which none of its claims rests."""
    text, before = TEXTS[path], outcomes(own_thresholds().claims, own_records())
    on_run = {
        name
        for name, claim in own_thresholds().claims.items()
        for part in claim.parts
        if part.published and path.stem in (part.of, *part.others)
    }
    identity = [re.search(r'"experiment": \{.*\}', text), re.search(r'"profiled_steps": \d', text)]
    for match in identity:
        for place, other in altered_digits(text, *match.span()) if match else ():
            after = outcomes(own_thresholds().claims, with_record(path, other))
            assert changed(before, after) == on_run, text[place - 20 : place + 1]


def quoted_numbers() -> Iterator[tuple[str, int, int]]:
    """Every number of thresholds.yaml that recorded evidence rests on: published, restated, and NPU limits."""
    claim = ""
    for line in re.finditer(r".*\n", CLAIMS_TEXT):
        if named := re.match(r"  - claim: (\S+)", line[0]):
            claim = named[1]
        body = re.search(r"(published: |of: \"|npu: )(.*\d.*)", line[0])
        if claim and body and "provenance" not in body[2]:
            start = line.start() + body.start(2)
            yield claim, start, line.start() + body.end(2)


def test_a_changed_digit_of_a_claim_leaves_the_others_alone() -> None:
    """In the whole file, the last digit of each claim's first quotation: that claim flips, and no other."""
    before = outcomes(own_thresholds().claims, own_records())
    first = {claim: span for claim, *span in reversed(list(quoted_numbers()))}
    for claim, (start, end) in first.items():
        *_, (place, other) = altered_digits(CLAIMS_TEXT, start, end)
        after = outcomes(read_text(other).claims, own_records())
        assert changed(before, after) == {claim}, CLAIMS_TEXT[place - 60 : place + 1]


def test_a_changed_digit_of_a_claim_flips_it() -> None:
    """Each digit of each quotation, effect, limit and margin in turn makes its claim impossible to measure."""
    before = outcomes(own_thresholds().claims, own_records())
    spans = list(quoted_numbers())
    assert {claim for claim, _, _ in spans} == {name for name, told in before.items() if told}
    for claim, start, end in spans:
        entry_start = CLAIMS_TEXT.rindex("  - claim: ", 0, start)
        entry_end = CLAIMS_TEXT.find("\n  - claim: ", start) + 1 or len(CLAIMS_TEXT)
        head = CLAIMS_TEXT[: CLAIMS_TEXT.index("claims:\n") + len("claims:\n")]
        entry = head + CLAIMS_TEXT[entry_start:entry_end]
        for place, other in altered_digits(entry, len(head) + start - entry_start, len(head) + end - entry_start):
            alone = read_text(other).claims
            after = outcomes(alone, own_records())
            assert after[claim] != before[claim], other[place - 60 : place + 20]
            assert "not_measurable" in after[claim]
