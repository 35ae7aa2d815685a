"""The hooks: tests that use `gauge` are run once for each kind of evidence, and their verdicts are told."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import pytest

from shardgauge.errors import ShardgaugeError, ThresholdError
from shardgauge.evidence import EvidenceName
from shardgauge.gauge import ClaimNotMeasurable, ClaimRefuted, Gauge, is_on
from shardgauge.gauge_fixtures import GAUGE, CaseFiles, claim_name, meshes_of
from shardgauge.verdict import Verdict
from shardgauge.verdict_table import tell_verdict, tell_verdicts

VERDICT_PROPERTY = "shardgauge"


class GaugeSuite:
    """The hooks; what they read is the session's case files."""

    def __init__(self, files: CaseFiles) -> None:
        self._files = files
        self._told: list[Verdict] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that uses `gauge` on each kind of evidence that can say something about its claim."""
        if "gauge" in metafunc.fixturenames:
            kinds = self._evidence_for(metafunc.definition)
            params = [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in kinds]
            metafunc.parametrize("gauge", params, indirect=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Hold the tests' claims against the file's, before `-m` and `-k` take any away.

        Raises:
            pytest.UsageError: the file is wrong, a test stands for no claim, or a claim has no test although all tests
                were collected.
        """
        gauged = [item for item in items if "gauge" in getattr(item, "fixturenames", ())]
        if not gauged:
            return
        try:
            names = {claim_name(item) for item in gauged}
            for name in sorted(names):
                self._files.thresholds.find(name)
            if _collected_everything(session):
                self._files.thresholds.check_tests(names)
                self._check_meshes(gauged)
        except ThresholdError as error:
            if hasattr(session.config, "workerinput"):  # an xdist worker has no way to end the run: its tests tell it
                self._files.fault = error
                return
            raise pytest.UsageError(str(error)) from error

    def _check_meshes(self, gauged: list[pytest.Item]) -> None:
        """A claim's tests together have every part of it, whichever meshes each is marked with.

        Raises:
            ThresholdError: a part is on a mesh that none of them is marked with.
        """
        for claim in self._files.thresholds.claims.values():
            marked = [meshes_of(item) for item in gauged if claim_name(item) == claim.claim]
            for part in claim.parts:
                if not any(is_on(part, meshes) for meshes in marked):
                    raise ThresholdError(
                        f"{self._files.thresholds.name}:{part.line}: claim {claim.claim!r} has a part on {part.mesh}, "
                        f"and no test of the claim is marked with it; add one marked @pytest.mark.{part.mesh}"
                    )

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """When a test has asserted all it wants, see that no part of its claim was left out, and how it ends."""
        gauge = pyfuncitem.stash.get(GAUGE, None)
        if gauge is None:
            return (yield)
        try:
            result = yield
        except (ClaimRefuted, ClaimNotMeasurable):
            gauge.keep_verdict()
            raise
        gauge.keep_verdict()
        _conclude(gauge, strict=self._files.options.strict)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Tell our own errors without a traceback, and count what could not be measured as an error, not a failure."""
        gauge = item.stash.get(GAUGE, None)
        if call.when == "call" and gauge is not None and gauge.verdict.parts and _is_verdict(call.excinfo):
            item.user_properties.append((VERDICT_PROPERTY, gauge.verdict.model_dump_json()))
        report = yield
        if call.when == "call" and gauge is not None and gauge.verdict.parts and report.passed:
            report.sections.append(("verdict", gauge.verdict.render()))  # what -rA and -rP show of a pass
        excinfo = call.excinfo
        if excinfo is not None and isinstance(excinfo.value, ShardgaugeError):
            # `Any`: the crash line, from which pytest's summary is made, is not in the representation's public type.
            told: Any = excinfo.getrepr(style="value", chain=False)
            told.reprcrash.message = str(excinfo.value).splitlines()[0]
            report.longrepr = told
            if report.when == "call" and not isinstance(excinfo.value, ClaimRefuted):
                report.when = "setup"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather verdicts where they are told: in xdist's controller too, which runs no test itself."""
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == VERDICT_PROPERTY:
                    self._told.append(Verdict.model_validate_json(str(value)))

    def pytest_report_header(self) -> str:
        """Say what live evidence would be taken from, and which files decide."""
        options = self._files.options
        return (
            f"shardgauge: live on {options.device}, candidate {options.candidate}"
            + (f" from {options.hyper_source}" if options.hyper_source else "")
            + f"; recorded in {options.shown(options.results)}; limits in {options.shown(options.thresholds)}"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line a verdict, and the whole of those that pytest would show as no more than a skip."""
        if not self._told:
            return
        terminalreporter.section("claims")
        for line in tell_verdicts(self._told):
            terminalreporter.write_line(line)
        if self._files.told_by_live:
            terminalreporter.write_line(self._files.told_by_live)
        for verdict in self._told:
            if verdict.outcome == "inconclusive" and not self._files.options.strict:
                terminalreporter.write_line(f"\n{verdict.render()}")

    def _evidence_for(self, definition: pytest.Item) -> Iterable[EvidenceName]:
        try:
            claim = self._files.thresholds.find(claim_name(definition))
        except ThresholdError:
            return ("recorded",)  # told, once and without a traceback, when collection is complete
        meshes = meshes_of(definition)
        published = any(part.published and is_on(part, meshes) for part in claim.parts)
        return ("recorded", "live") if published else ("live",)


def _collected_everything(session: pytest.Session) -> bool:
    """Whether every test of the project was collected, so that a claim without a test is a fault."""
    config = session.config
    hidden = ("ignore", "ignore_glob", "deselect", "lf", "last_failed")
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return whole and not session.testsfailed and not any(config.getoption(name, None) for name in hidden)


def _is_verdict(excinfo: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """Whether the test ended as its verdict says; one that broke off has none, whatever its parts said until then."""
    return excinfo is None or isinstance(excinfo.value, (ClaimRefuted, ClaimNotMeasurable, pytest.skip.Exception))


def _conclude(gauge: Gauge, *, strict: bool) -> None:
    if gauge.missing_parts:
        raise ThresholdError("the test leaves out a part of its claim:\n  " + "\n  ".join(gauge.missing_parts))
    verdict = gauge.verdict
    if strict and any(part.left_out for part in verdict.parts):
        raise ClaimRefuted(f"{verdict.render()}\n  --gauge-strict: a switch that the engine lacks is a failure")
    if verdict.outcome == "inconclusive":
        if strict:
            raise ClaimRefuted(f"{verdict.render()}\n  --gauge-strict: inconclusive is a failure")
        pytest.skip(tell_verdict(verdict))
    if verdict.outcome is None:
        pytest.skip("; ".join(dict.fromkeys(part.note for part in verdict.parts)) or "nothing to decide")
