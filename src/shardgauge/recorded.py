"""Recorded evidence: the runs that lie in results/, answering as they were published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from shardgauge.errors import NotMeasurable, RecordError
from shardgauge.evidence import ACTIVE_STEPS, Counts, Curve, Effect, EvidenceName, Figure, Question, Run
from shardgauge.quantities import Quantity, divide
from shardgauge.records import RecordedRun, read_recorded_run
from shardgauge.spec import DeviceName, Experiment


@dataclass(frozen=True, kw_only=True)
class QuotedFigure:
    """One figure of a run as a claim quotes it, and where it does."""

    run: Run
    metric: str
    quoted: Decimal
    where: str


@dataclass(frozen=True, kw_only=True)
class FiledRun:
    """A record, and the file that it was read from as messages name it."""

    record: RecordedRun
    where: str


@dataclass(frozen=True, kw_only=True)
class RecordedEvidence:
    """Records by report id; `faults` are the files that could not be read, one message each."""

    folder: str
    runs: Mapping[str, FiledRun]
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> EvidenceName:
        """Recorded."""
        return "recorded"

    def device_of(self, run: Run) -> DeviceName:
        """The device that the run was recorded on."""
        return self._find(run).record.device

    def confirm(self, quotes: Iterable[QuotedFigure]) -> None:
        """Hold every quotation against the record: a figure mistyped in either place is found by the other.

        Raises:
            NotMeasurable: a record is missing, lacks the figure, or differs from the quotation.
        """
        for quote in quotes:
            filed = self._find(quote.run)
            recorded = _figure(filed, quote.metric)
            if recorded != quote.quoted:
                raise NotMeasurable(
                    f"{quote.metric} of {quote.run.label}: the record says {recorded}, the claim quotes "
                    f"{quote.quoted}; one of them was mistyped, compare both with {filed.record.source} "
                    f"(record: {filed.where}; quotation: {quote.where})"
                )

    def measure(self, question: Question) -> Effect:
        """The effect between published figures, which carry no samples and so no interval."""
        of = self._evaluate(question.of, question.quantity)
        figures = [self._show(question.of, question.quantity, of)]
        estimate = of
        if question.to is not None:
            to = self._evaluate(question.to, question.to_quantity)
            figures.append(self._show(question.to, question.to_quantity, to))
            estimate = divide(of, to, what=question.to.label) if question.comparison == "ratio" else of - to
        return Effect(basis="published figures", estimate=float(estimate), figures=tuple(figures))

    def counts(self, run: Run) -> Counts:
        """The rows that the report counted over the profile's active steps."""
        filed = self._find(run)
        if filed.record.profiled_steps is None:
            raise NotMeasurable(f"{filed.where}: counts without profiled_steps; say how many steps they cover")
        return Counts(
            experiment=filed.record.experiment,
            steps=filed.record.profiled_steps,
            rows_all_gather=_whole(filed, "rows_all_gather"),
            rows_reduce_scatter=_whole(filed, "rows_reduce_scatter"),
            where=filed.where,
        )

    def curve(self, run: Run, *, repetition: int = 0) -> Curve:
        """Never there: the report printed no losses."""
        raise NotMeasurable(f"{run.label}, run {repetition}: {self.folder} has no losses; decide this claim live")

    def _find(self, run: Run) -> FiledRun:
        if run.report_id is None:
            raise NotMeasurable(f"{run.name} was not {run.mode} by the report: there is no record to look for")
        filed = self.runs.get(run.report_id)
        if filed is None:
            faults = "".join(f"\n  {fault}" for fault in self.faults)
            raise NotMeasurable(
                f"no record of {run.label} in {self.folder} ({len(self.runs)} records read"
                + (f"); not read:{faults}" if faults else "); put it there or name another folder by --gauge-results")
            )
        _refuse_another_run(filed, run)
        return filed

    def _evaluate(self, run: Run, quantity: Quantity) -> Decimal:
        filed = self._find(run)
        return quantity.evaluate(lambda metric: _figure(filed, metric))

    def _show(self, run: Run, quantity: Quantity, value: Decimal) -> Figure:
        filed = self._find(run)
        return Figure(
            run=run.label,
            quantity=quantity.text,
            value=float(value),
            unit=quantity.unit,
            where=filed.where,
            approximate=any(name in filed.record.approximate for name in quantity.names),
        )


def read_records(folder: Path, *, shown_as: str | None = None) -> RecordedEvidence:
    """Every record under `folder`; messages call the folder `shown_as`.

    A file that cannot be read is no fault of the claims that rest on others: it is kept as a message, and told to
    whoever asks for a run that is not there.
    """
    name = shown_as or str(folder)
    filed: dict[str, list[FiledRun]] = {}
    faults = [] if folder.is_dir() else [f"{name}: no such folder"]
    for path in sorted(folder.rglob("*.json")):
        where = f"{name}/{path.relative_to(folder).as_posix()}"
        try:
            record = read_recorded_run(path)
        except RecordError as error:
            faults.append(str(error).replace(str(path), where))
            continue
        filed.setdefault(record.id, []).append(FiledRun(record=record, where=where))
    for report_id, runs in filed.items():
        if len(runs) > 1:
            faults.append(f"{report_id} stands in {' and '.join(run.where for run in runs)}; keep one")
    unique = {report_id: runs[0] for report_id, runs in filed.items() if len(runs) == 1}
    return RecordedEvidence(folder=name, runs=unique, faults=tuple(faults))


def _refuse_another_run(filed: FiledRun, run: Run) -> None:
    record = filed.record
    steps = ACTIVE_STEPS if run.mode == "profiled" else None
    differences = [
        f"{what} {there!r} instead of {here!r}"
        for what, there, here in (
            ("mode", record.mode, run.mode),
            ("profiled_steps", record.profiled_steps, steps),
            *_experiment_differences(record.experiment, run.experiment),
        )
        if there != here
    ]
    if differences:
        raise NotMeasurable(f"{filed.where} is not {run.label}: it has {', '.join(differences)}")


def _experiment_differences(there: Experiment, here: Experiment) -> list[tuple[str, object, object]]:
    if there == here:
        return []
    return [(field, getattr(there, field), getattr(here, field)) for field in Experiment.model_fields]


def _figure(filed: FiledRun, metric: str) -> Decimal:
    figures = filed.record.figures
    if metric not in figures:
        raise NotMeasurable(f"{filed.where} has no {metric}; it has {', '.join(figures) or 'no figures at all'}")
    return Decimal(repr(figures[metric]))


def _whole(filed: FiledRun, metric: str) -> int:
    rows = _figure(filed, metric)
    if rows != int(rows):
        raise NotMeasurable(f"{filed.where}: {metric} is {rows}, and a count is a whole number")
    return int(rows)
