"""The plugin from outside: what a user sees of each verdict, and of each mistake."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.unit.fake_evidence import CANDIDATE_RECORD, CONFTEST, NATIVE_RECORD, TEST, THRESHOLDS

pytest_plugins = ["pytester"]

HOLDS = "fake_evidence.ratio(0.90, 0.88, 0.92)"
REFUTED = "fake_evidence.ratio(1.02, 1.00, 1.04)"
INCONCLUSIVE = "fake_evidence.ratio(0.95, 0.90, 1.00)"
NOT_MEASURABLE = "__import__('shardgauge.errors').errors.NotMeasurable('rank 3 is missing from block 7')"
ROOT = Path(__file__).parents[2]
QUIET = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-ra")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with one claim, two records and one test, whose live evidence holds."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makefile(".yaml", thresholds=THRESHOLDS)
    pytester.mkdir("results")
    (pytester.path / "results" / "native.json").write_text(NATIVE_RECORD)
    (pytester.path / "results" / "candidate.json").write_text(CANDIDATE_RECORD)
    pytester.makeconftest(CONFTEST.format(live=HOLDS))
    pytester.makepyfile(test_candidate=TEST)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run the project's tests on a CPU."""
    return project.runpytest(*QUIET, "--gauge-device=cpu", *args)


def change(project: pytest.Pytester, name: str, old: str, new: str) -> None:
    """Edit one file of the project."""
    path = project.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_test_runs_on_each_kind_of_evidence(project: pytest.Pytester) -> None:
    """Recorded and live, each with its mark; both hold, and the summary tells both."""
    result = run(project, "-v")
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "shardgauge: live on cpu, candidate reference; recorded in results; limits in thresholds.yaml",
            "*test_candidate_is_faster*recorded* PASSED*",
            "*test_candidate_is_faster*live* PASSED*",
            "*= claims =*",
            "candidate-faster  live      holds  T4/T1  0.9000 [[]0.8800, 0.9200], at most 0.9500",
            "candidate-faster  recorded  holds  T4/T1  0.9654, at most 0.9825",
            "1 holds (live), 1 holds (recorded)",
        ]
    )


@pytest.mark.parametrize(("marks", "passed"), [("recorded", 1), ("live", 1), ("fsdp8", 2), ("hsdp24", 0)])
def test_marks_select(project: pytest.Pytester, marks: str, passed: int) -> None:
    """Evidence and mesh are marks like any other."""
    run(project, "-m", marks).assert_outcomes(passed=passed, deselected=2 - passed)


def test_refuted_fails_with_the_verdict_and_no_traceback(project: pytest.Pytester) -> None:
    """A failure that shows figures, not our source."""
    project.makeconftest(CONFTEST.format(live=REFUTED))
    result = run(project, "-m", "live")
    result.assert_outcomes(failed=1, deselected=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "candidate-faster: REFUTED on live evidence",
            "  The candidate is faster than native.",
            "    effect  1.0200 [[]1.0000, 1.0400]",
            "    limit   at most 0.9500 on cpu (measured on a laptop)",
            "FAILED *test_candidate_is_faster*live* - candidate-faster: REFUTED on live evidence",
        ]
    )
    result.stdout.no_fnmatch_line("*gauge.py*")
    result.stdout.no_fnmatch_line("*raise *")


def test_inconclusive_skips(project: pytest.Pytester) -> None:
    """A skip that shows the interval; exit code 0."""
    project.makeconftest(CONFTEST.format(live=INCONCLUSIVE))
    result = run(project, "-m", "live")
    result.assert_outcomes(skipped=1, deselected=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*candidate-faster: INCONCLUSIVE on live evidence*", "*[[]0.9000, 1.0000]*"])


def test_inconclusive_fails_when_strict(project: pytest.Pytester) -> None:
    """CI asks for an answer."""
    project.makeconftest(CONFTEST.format(live=INCONCLUSIVE))
    result = run(project, "-m", "live", "--gauge-strict")
    result.assert_outcomes(failed=1, deselected=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*--gauge-strict: inconclusive is a failure"])


UNSUPPORTED = "__import__('shardgauge.errors').errors.UnsupportedSwitch('this tree has no prefetch')"


def test_what_the_engine_refuses_is_skipped_and_fails_when_strict(project: pytest.Pytester) -> None:
    """An engine that refuses every switch must not pass where an answer is asked for."""
    project.makeconftest(CONFTEST.format(live=UNSUPPORTED))
    run(project, "-m", "live").assert_outcomes(skipped=1, deselected=1)
    result = run(project, "-m", "live", "--gauge-strict")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*this tree has no prefetch*", "*--gauge-strict: a switch that the engine lacks*"])


def test_what_cannot_be_measured_is_an_error_not_a_failure(project: pytest.Pytester) -> None:
    """It counts like a broken fixture: nothing was learnt about the claim."""
    project.makeconftest(CONFTEST.format(live=NOT_MEASURABLE))
    result = run(project, "-m", "live")
    result.assert_outcomes(errors=1, deselected=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "candidate-faster: NOT MEASURABLE on live evidence",
            "    note    rank 3 is missing from block 7",
            "ERROR *test_candidate_is_faster*live* - candidate-faster: NOT MEASURABLE on live evidence",
        ]
    )
    result.stdout.no_fnmatch_line("*raise *")


def test_an_undecidable_claim_is_skipped_before_anything_is_launched(project: pytest.Pytester) -> None:
    """The reason stands in the file; live evidence is not even opened."""
    project.makeconftest(
        "import pytest\n\n@pytest.fixture(scope='session')\ndef live_evidence():\n    raise OSError('launched')\n"
    )
    result = run(project, "-m", "live", "--gauge-device=cuda")
    result.assert_outcomes(skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*not decidable on cuda: no GPU was measured*"])


def test_a_test_that_leaves_out_a_part_is_an_error(project: pytest.Pytester) -> None:
    """Otherwise a claim would look held while half of it was never looked at."""
    project.makepyfile(test_candidate=TEST.replace("gauge.assert_faster(CANDIDATE, than=NATIVE)", "pass"))
    result = run(project, "-m", "recorded")
    result.assert_outcomes(errors=1, deselected=1)
    result.stdout.fnmatch_lines(
        ["the test leaves out a part of its claim:", "  T4/T1 step_ms (assert_faster, thresholds.yaml:14)"]
    )


def test_a_wrong_verb_is_an_error_that_names_the_entry(project: pytest.Pytester) -> None:
    """The verb and the claim's kind have to say the same."""
    project.makepyfile(test_candidate=TEST.replace("assert_faster", "assert_slower"))
    result = run(project, "-m", "recorded")
    result.assert_outcomes(errors=1, deselected=1)
    result.stdout.fnmatch_lines(["thresholds.yaml:14: *assert_faster decides; the test says assert_slower"])
    result.stdout.no_fnmatch_line("*gauge.py*")


def test_an_ordinary_failure_keeps_its_traceback(project: pytest.Pytester) -> None:
    """Only our own messages are told without one."""
    project.makepyfile(test_candidate=TEST + "    assert 1 == 2\n")
    result = run(project, "-m", "recorded")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines([">       assert 1 == 2", "E       assert 1 == 2"])


def test_one_changed_digit_in_a_record_is_seen_from_outside(project: pytest.Pytester) -> None:
    """Recorded and quoted figure are shown with both places; live evidence is not concerned."""
    change(project, "results/candidate.json", "543.59", "543.58")
    result = run(project)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*step_ms of candidate (T4): the record says 543.58, the claim quotes 543.59; one of them was mistyped, *"
            "(record: results/candidate.json; quotation: thresholds.yaml:14)"
        ]
    )


def test_one_changed_digit_in_a_limit_is_seen_from_outside(project: pytest.Pytester) -> None:
    """A limit that is not the effect widened by its margin decides nothing."""
    change(project, "thresholds.yaml", "0.9825", "0.9925")
    result = run(project, "-m", "recorded")
    result.assert_outcomes(errors=1, deselected=1)
    result.stdout.fnmatch_lines(["*at_most is 0.9925, but the published effect 0.965 + margin 0.0175 is 0.9825*"])


@pytest.mark.parametrize("live", [HOLDS, REFUTED, INCONCLUSIVE, NOT_MEASURABLE])
def test_every_verdict_is_kept_with_the_evidence(project: pytest.Pytester, live: str) -> None:
    """However the test ends, the journal gets the verdict, once."""
    project.makeconftest(
        CONFTEST.format(live=live).replace("return ", "evidence = ")
        + "    yield evidence\n    print('kept', [verdict.claim for verdict in evidence.kept])\n"
    )
    run(project, "-m", "live", "-s").stdout.fnmatch_lines(["*kept [[]'candidate-faster']*"])


def test_junit_tells_failure_error_and_skip_apart(project: pytest.Pytester) -> None:
    """CI systems read JUnit: refuted is a failure, not measurable an error, inconclusive a skip."""
    for live, tag in ((REFUTED, "failure"), (NOT_MEASURABLE, "error"), (INCONCLUSIVE, "skipped")):
        project.makeconftest(CONFTEST.format(live=live))
        run(project, "-m", "live", "--junitxml=junit.xml")
        (case,) = ET.parse(project.path / "junit.xml").iter("testcase")  # noqa: S314 # our own file
        assert [child.tag for child in case if child.tag != "properties"] == [tag]
        (verdict,) = [p.get("value") for p in case.iter("property") if p.get("name") == "shardgauge"]
        assert json.loads(str(verdict))["claim"] == "candidate-faster"


def test_json_report_carries_outcome_and_verdict(project: pytest.Pytester) -> None:
    """pytest-json-report counts the same outcomes, and keeps the verdict with its numbers."""
    project.makeconftest(CONFTEST.format(live=NOT_MEASURABLE))
    run(project, "--json-report", "--json-report-file=report.json")
    report = json.loads((project.path / "report.json").read_text())
    assert report["summary"] == {"error": 1, "passed": 1, "total": 2, "collected": 2}
    by_name = {test["nodeid"].rpartition("[")[2]: test for test in report["tests"]}
    assert by_name["live]"]["outcome"] == "error"
    (properties,) = by_name["recorded]"]["user_properties"]
    verdict = json.loads(properties["shardgauge"])
    assert verdict["parts"][0]["effect"]["estimate"] == pytest.approx(543.59 / 563.08)


def test_xdist_gives_the_same_outcomes_and_summary(project: pytest.Pytester) -> None:
    """Verdicts travel from the workers to the controller, errors stay errors."""
    project.makeconftest(CONFTEST.format(live=NOT_MEASURABLE))
    result = project.runpytest_subprocess(*QUIET, "--gauge-device=cpu", "-n2")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "candidate-faster: NOT MEASURABLE on live evidence",
            "candidate-faster  live      not measurable  T4/T1  none, at most 0.9500",
            "candidate-faster  recorded  holds           T4/T1  0.9654, at most 0.9825",
        ]
    )


def test_a_fault_in_the_thresholds_is_a_usage_error(project: pytest.Pytester) -> None:
    """Exit code 4 and one message, no traceback."""
    change(project, "thresholds.yaml", "margin", "margn")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: thresholds.yaml:17: claim 'candidate-faster': unknown key *margn'; allowed: *"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_fault_in_the_thresholds_is_told_under_xdist_too(project: pytest.Pytester) -> None:
    """The controller collects nothing itself, and still says what is wrong."""
    change(project, "thresholds.yaml", "margin", "margn")
    result = project.runpytest_subprocess(*QUIET, "--gauge-device=cpu", "-n2")
    assert result.ret == 1
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["thresholds.yaml:17: claim 'candidate-faster': unknown key *margn'; allowed: *"])
    result.stdout.no_fnmatch_line("*raise *")


def test_an_unknown_claim_is_a_usage_error(project: pytest.Pytester) -> None:
    """A test that stands for nothing would pass or fail for no reason."""
    project.makepyfile(test_candidate=TEST.replace("candidate-faster", "candidate-fastre"))
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: thresholds.yaml has no claim 'candidate-fastre'; it has: candidate-faster"])


def test_a_test_without_a_claim_is_a_usage_error(project: pytest.Pytester) -> None:
    """`gauge` has to know what it decides."""
    project.makepyfile(test_candidate=TEST.replace('@pytest.mark.claim("candidate-faster")\n', ""))
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: test_candidate.py::test_candidate_is_faster*uses gauge: mark it @pytest.mark.claim*"]
    )


def test_a_claim_without_a_test_is_a_usage_error_when_all_are_collected(project: pytest.Pytester) -> None:
    """A run of everything tells it; a run of one file cannot know."""
    entry = THRESHOLDS[THRESHOLDS.index("  - claim:") :].replace("candidate-faster", "forgotten")
    project.makefile(".yaml", thresholds=THRESHOLDS + entry)
    project.makeini("[pytest]\ntestpaths = .\n")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: thresholds.yaml:19: claim 'forgotten' has no test; write one marked *"])
    run(project, "test_candidate.py").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gauge-results=nowhere"], "--gauge-results nowhere: no such file or folder (looked at *nowhere)"),
        (["--gauge-thresholds=nowhere.yaml"], "--gauge-thresholds nowhere.yaml: no such file or folder *"),
        (["--gauge-hyper-src=nowhere"], "--gauge-hyper-src nowhere: no such file or folder *"),
        (["--gauge-replay=nowhere"], "--gauge-replay nowhere: no such file or folder *"),
        (["--gauge-world-size=0"], "--gauge-world-size 0: give a number greater than 0"),
        (["--gauge-budget=-1"], "--gauge-budget -1.0: give a number greater than 0"),
        (["--gauge-budget=nan"], "--gauge-budget nan: give a number greater than 0"),
    ],
)
def test_a_wrong_option_is_a_usage_error(project: pytest.Pytester, args: list[str], words: str) -> None:
    """What was given, what is wrong with it, and where it was looked for."""
    result = run(project, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {words}"])


def test_another_candidate_is_refused_with_what_is_allowed(project: pytest.Pytester) -> None:
    """A word that is not in the list is told with the list."""
    result = run(project, "--gauge-candidate=fsdp1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--gauge-candidate: invalid choice: 'fsdp1' (choose from *hyper_torch*reference*auto*"]
    )


def test_a_project_without_claims_is_left_alone(pytester: pytest.Pytester) -> None:
    """Nothing of ours is imported beyond the options, no fixture is offered, no header is shown."""
    pytester.makepyfile(
        "import sys\n\ndef test_nothing():\n"
        "    ours = {name for name in sys.modules if name.startswith('shardgauge.')}\n"
        "    assert ours == {'shardgauge.plugin', 'shardgauge.options'}\n"
        "    assert 'yaml' not in sys.modules and 'pydantic' not in sys.modules\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:anyio", "-p", "no:hypothesispytest", "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*shardgauge*live on*")


def test_a_project_without_claims_has_no_gauge(pytester: pytest.Pytester) -> None:
    """The fixture belongs to projects with a thresholds file."""
    pytester.makepyfile("def test_nothing(gauge):\n    pass\n")
    result = pytester.runpytest(*QUIET)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'gauge' not found*"])


def test_another_projects_thresholds_file_is_not_read(pytester: pytest.Pytester) -> None:
    """Only a test that uses `gauge` makes the file ours."""
    pytester.makefile(".yaml", thresholds="warning: 3\nwarning: 4\n")
    pytester.makepyfile("def test_nothing():\n    pass\n")
    pytester.runpytest(*QUIET).assert_outcomes(passed=1)


def test_a_checkout_taken_for_the_root_is_told(project: pytest.Pytester, tmp_path: Path) -> None:
    """Behind `--gauge-hyper-src `, pytest takes the value for a test path; the message says how to write it."""
    (tmp_path / "setup.py").touch()
    result = project.runpytest_subprocess(*QUIET, "--gauge-hyper-src", str(tmp_path))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --gauge-hyper-src: there is no thresholds.yaml in {tmp_path}*equals sign*"])
