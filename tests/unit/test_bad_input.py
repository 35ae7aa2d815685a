"""What a user's mistake in a record or an experiment gets: a message to act on, and no verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardgauge.claims import Docket
from shardgauge.errors import NotMeasurable, RecordError, SpecError
from shardgauge.evidence import Run
from shardgauge.gauge import ClaimNotMeasurable, Gauge
from shardgauge.marked_yaml import parse_marked_yaml
from shardgauge.plan import COLLECTIVE_KINDS
from shardgauge.presets import find_preset
from shardgauge.recorded import read_records
from shardgauge.records import read_recorded_run
from shardgauge.spec import build_experiment, parse_mesh
from shardgauge.thresholds import load_thresholds
from tests.unit.fake_evidence import CANDIDATE, CANDIDATE_RECORD, NATIVE, NATIVE_RECORD, THRESHOLDS


def verdict_on(folder: Path, candidate: str) -> str:
    """What the verdict says when the candidate's record is another text."""
    (folder / "native.json").write_text(NATIVE_RECORD)
    (folder / "candidate.json").write_text(candidate)
    thresholds = load_thresholds(parse_marked_yaml(THRESHOLDS, name="thresholds.yaml"), name="thresholds.yaml")
    docket = Docket(
        claim=thresholds.find("candidate-faster"),
        file=thresholds.name,
        evidence=read_records(folder, shown_as="results"),
    )
    with pytest.raises(ClaimNotMeasurable) as raised:
        Gauge(docket, meshes=frozenset()).assert_faster(CANDIDATE, than=NATIVE)
    return str(raised.value)


def changed(old: str, new: str) -> str:
    """The candidate's record after one change."""
    assert old in CANDIDATE_RECORD
    return CANDIDATE_RECORD.replace(old, new, 1)


FAULTS: dict[str, tuple[str, list[str]]] = {
    "cut-short": (CANDIDATE_RECORD[:90], ["no record of candidate (T4)", "results/candidate.json: not JSON"]),
    "future": (changed('"format": 1', '"format": 9'), ["format 9", "knows format 1 only", "newer shardgauge"]),
    "no-format": (changed('"format": 1, ', ""), ["results/candidate.json: format None"]),
    "not-an-object": ("[]", ["results/candidate.json: format None"]),
    "nan": (changed("543.59", "NaN"), ["figures.step_ms", "finite number", "nan"]),
    "infinity": (changed("543.59", "Infinity"), ["figures.step_ms", "finite number", "inf"]),
    "words": (changed("543.59", '"fast"'), ["figures.step_ms", "valid number", "'fast'"]),
    "unknown-key": (changed('"figures"', '"steps": 3, "figures"'), ["steps: Extra inputs are not permitted"]),
    "unknown-engine": (changed('"hyper_torch"', '"fsdp1"'), ["experiment.engine", "'native'", "'fsdp1'"]),
    "no-steps": (changed('"step_ms": 543.59', ""), ["results/candidate.json has no step_ms; it has no figures at all"]),
    "other-figure": (changed("step_ms", "stage_ms"), ["has no step_ms; it has stage_ms"]),
    "other-mode": (changed('"timed"', '"profiled"'), ["is not candidate (T4)", "mode 'profiled' instead of 'timed'"]),
    "other-run": (changed('"forward_prefetch": 1', '"forward_prefetch": 2'), ["is not candidate (T4)", "switches"]),
    "other-preset": (changed('"preset": "qwen3-8b-lite"', '"preset": "qwen9"'), ["preset 'qwen9' instead of"]),
    "twice": (changed('"T4"', '"T1"'), ["T1 stands in results/candidate.json and results/native.json; keep one"]),
}


@pytest.mark.parametrize(("text", "words"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_record_gives_no_verdict_and_says_why(tmp_path: Path, text: str, words: list[str]) -> None:
    """Whatever is wrong with it, the file is named and the claim cannot be measured."""
    told = verdict_on(tmp_path, text)
    assert told.startswith("candidate-faster: NOT MEASURABLE on recorded evidence\n")
    for word in words:
        assert word in told


def test_a_record_that_is_no_file_is_told_by_its_path(tmp_path: Path) -> None:
    """A folder of that name cannot be read; the others can."""
    (tmp_path / "odd.json").mkdir()
    (tmp_path / "native.json").write_text(NATIVE_RECORD)
    evidence = read_records(tmp_path, shown_as="results")
    assert evidence.faults == ("results/odd.json: cannot be read: Is a directory",)
    assert list(evidence.runs) == ["T1"]


def test_two_records_of_one_run_are_both_refused(tmp_path: Path) -> None:
    """Which of the two would be right is not for the reader to guess."""
    (tmp_path / "native.json").write_text(NATIVE_RECORD)
    (tmp_path / "copy.json").write_text(NATIVE_RECORD)
    with pytest.raises(NotMeasurable, match=r"T1 stands in results/copy\.json and results/native\.json; keep one"):
        read_records(tmp_path, shown_as="results").device_of(NATIVE)


def test_a_missing_results_folder_is_named_by_whoever_needs_it(tmp_path: Path) -> None:
    """Nothing is read until a recorded claim is decided, and then it says where it looked."""
    evidence = read_records(tmp_path / "nowhere", shown_as="nowhere")
    with pytest.raises(
        NotMeasurable, match=r"no record of native \(T1\) in nowhere .*not read:\n  nowhere: no such folder"
    ):
        evidence.device_of(NATIVE)


def test_a_run_that_the_report_did_not_make_has_no_record(tmp_path: Path) -> None:
    """A name without a report id is told by its name."""
    run = Run(name="single", experiment=NATIVE.experiment)
    with pytest.raises(NotMeasurable, match="single was not timed by the report"):
        read_records(tmp_path).device_of(run)


def test_half_a_count_is_refused(tmp_path: Path) -> None:
    """A collective is issued or it isn't."""
    text = CANDIDATE_RECORD.replace('"timed"', '"profiled"').replace('"T4"', '"P3"')
    text = text.replace(
        '"step_ms": 543.59}', '"rows_all_gather": 360.5, "rows_reduce_scatter": 364}, "profiled_steps": 2'
    )
    (tmp_path / "candidate.json").write_text(text)
    with pytest.raises(NotMeasurable, match=r"rows_all_gather is 360\.5, and a count is a whole number"):
        read_records(tmp_path).counts(CANDIDATE.profiled)


def test_reading_one_record_names_file_and_fault(tmp_path: Path) -> None:
    """The reader itself raises RecordError, one clause a fault."""
    path = tmp_path / "candidate.json"
    path.write_text(changed('"device": "npu"', '"device": "tpu"'))
    with pytest.raises(
        RecordError, match=r"candidate\.json: device: Input should be 'npu', 'cuda' or 'cpu' \(got 'tpu'\)"
    ):
        read_recorded_run(path)


def test_an_unknown_engine_is_told_with_the_known_ones() -> None:
    """No experiment is made of it."""
    with pytest.raises(
        SpecError, match=r"no such experiment: engine: .*'fsdp1'.*Engines: native, hyper_torch, hyper_m"
    ):
        build_experiment(engine="fsdp1")


def test_an_unknown_switch_is_told_with_its_value() -> None:
    """A misspelt switch must not be a run without it."""
    with pytest.raises(SpecError, match=r"switches\.prefetch: Extra inputs are not permitted \(got 1\)"):
        build_experiment(engine="native", switches={"prefetch": 1})


@pytest.mark.parametrize("make", [find_preset, lambda name: build_experiment(engine="native", preset=name)])
def test_an_unknown_preset_is_told_with_the_known_ones(make: object) -> None:
    """Both where a preset is looked up and where an experiment is built."""
    assert callable(make)
    with pytest.raises(SpecError, match=r"unknown preset 'qwen3-70b'; known presets: qwen3-8b-lite, qwen3-nano"):
        make("qwen3-70b")


@pytest.mark.parametrize("text", ["fsdp", "fsdp0", "hsdp8", "hsdp2x", "ddp8", "8", ""])
def test_an_unknown_mesh_is_told_with_how_to_write_one(text: str) -> None:
    """Names are few and fixed, so the message gives examples."""
    with pytest.raises(SpecError, match=rf"unknown mesh '{text}'; write fsdp8, hsdp24"):
        parse_mesh(text)


def test_more_ranks_than_batches_are_refused() -> None:
    """A mesh that the data cannot feed is no experiment."""
    with pytest.raises(SpecError, match=r"has batches for 8 ranks, fsdp16 asks for 16; choose a mesh of at most 8"):
        build_experiment(engine="native", mesh=parse_mesh("fsdp16"))


def test_every_collective_is_expected_by_name() -> None:
    """The wrap plan says something of each kind that is counted."""
    expected = NATIVE.experiment.expected_counts(steps=2)
    assert set(expected) == set(COLLECTIVE_KINDS)
    assert (expected["all_gather"], expected["reduce_scatter"]) == (38, 20)
