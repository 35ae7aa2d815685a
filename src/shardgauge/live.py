"""Live evidence: what a claim asks, measured on the machine at hand, or replayed from the journal of a run."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal

from shardgauge.bench import Arm, Bench, BenchSettings, EndOfEvidence, LiveBench, ReplayBench
from shardgauge.claims import judge
from shardgauge.errors import NotMeasurable, SpecError, Undecidable
from shardgauge.evidence import Counts, Curve, Effect, EvidenceName, Figure, Question, Run
from shardgauge.journal import VerdictEntry
from shardgauge.options import GaugeOptions
from shardgauge.plan import COLLECTIVE_KINDS, parameter_shapes, rows_as_published
from shardgauge.quantities import Quantity
from shardgauge.records import Block, StepRecord
from shardgauge.rundir import RunDir
from shardgauge.spec import DeviceName, EngineName, Experiment, Mesh, build_experiment
from shardgauge.stats import Interval, looks, mean_interval
from shardgauge.verdict import Verdict

COUNTED_STEPS = 2
CURVE_STEPS = 20
WARM_UP_STEPS = 5
BLOCK_S = 0.5
FEWEST_BLOCK_STEPS = 3
MOST_BLOCK_STEPS = 20
PUBLISHED_RANKS = 8
CALIBRATED_RANKS = 4
LIVE_PRESETS: Mapping[DeviceName, str] = {"npu": "qwen3-8b-lite", "cuda": "qwen3-8b-lite", "cpu": "qwen3-nano"}


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How experiments are fitted to the machine. `timing_ranks` may be fewer than `world_size` on a small one."""

    device: DeviceName
    candidate: EngineName
    world_size: int
    timing_ranks: int
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one block of one arm yields: its metrics by name."""

    metrics: Mapping[str, float]

    def value(self, quantity: Quantity) -> float:
        """The quantity's value in this block."""
        return float(quantity.evaluate(lambda name: Decimal(self.metrics[name])))


class LiveEvidence:
    """Answers questions with blocks from a bench; every answer is kept, so that no claim measures twice."""

    name: EvidenceName = "live"

    def __init__(self, settings: LiveSettings, bench: Bench, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`, in seconds, is what the budget is held against."""
        self.settings = settings
        self.bench = bench
        self.clock = clock
        self._counts: dict[str, Counts] = {}
        self._curves: dict[tuple[str, int], Curve] = {}
        self._effects: dict[tuple[object, ...], Effect] = {}
        self._opened: Counter[tuple[str, str]] = Counter()

    @property
    def cost(self) -> str:
        """What really ran, and what it cost, for the summary."""
        settings = self.settings
        stand_in = ", a stand-in: nothing here speaks of hyper_parallel" if settings.candidate == "reference" else ""
        return (
            f"live: candidate {settings.candidate}{stand_in}; {settings.world_size} ranks on {settings.device}, "
            f"{settings.timing_ranks} of them timed\n{self.bench.cost}"
        )

    def device_of(self, run: Run) -> DeviceName:  # noqa: ARG002 -- all runs share the machine
        """The device at hand."""
        return self.settings.device

    def fit(self, run: Run, *, ranks: int, metered: bool) -> Experiment:
        """The experiment that stands for `run` on this machine.

        hyper_torch's place is taken by the candidate, the model by the device's preset, the mesh keeps its kind on
        `ranks` ranks, and on a CPU claims about time run over the preset's metered link. Faults stay, so that a
        check of the gate itself can ask for a run that has them.
        """
        published = run.experiment
        if published.source is not None:
            raise Undecidable(
                f"{run.label} is source {published.source!r} of hyper_parallel, and a run has one source: apply the "
                "patch and give that tree with --gauge-hyper-src"
            )
        preset = LIVE_PRESETS[self.settings.device]
        engine = self.settings.candidate if published.engine == "hyper_torch" else published.engine
        experiment = build_experiment(
            engine=engine,
            switches=published.switches,
            preset=preset,
            mesh=Mesh(shape=(1,)) if engine == "single" else fit_mesh(published.mesh, ranks),
            data_ranks=ranks if engine == "single" else None,
            precision=published.precision,
            seed=published.seed,
            faults=published.faults,
        )
        if metered and self.settings.device == "cpu":
            return experiment.model_copy(update={"link": experiment.model_preset.link})
        return experiment

    def counts(self, run: Run) -> Counts:
        """Collectives over two steps, the same on every rank.

        Raises:
            NotMeasurable: ranks disagree.
        """
        experiment = self.fit(run, ranks=self.settings.world_size, metered=False)
        if experiment.digest not in self._counts:
            with self._arms({"of": experiment}, "counts") as arms:
                block = self._whole_block(arms["of"], steps=COUNTED_STEPS)
            self._counts[experiment.digest] = self._read_counts(experiment, block)
        return self._counts[experiment.digest]

    def curve(self, run: Run, *, repetition: int = 0) -> Curve:
        """Losses (mean over the global batch) and gradient norms over 20 steps from step 0.

        Raises:
            NotMeasurable: a loss or norm is not finite.
        """
        experiment = self.fit(run, ranks=self.settings.world_size, metered=False)
        key = (experiment.digest, repetition)
        if key not in self._curves:
            with self._arms({"of": experiment}, f"curve-{repetition}") as arms:
                block = self._whole_block(arms["of"], steps=CURVE_STEPS, gradients=True)
            self._curves[key] = self._read_curve(run, experiment, block)
        return self._curves[key]

    def measure(self, question: Question) -> Effect:
        """The effect, with an interval that is as narrow as the claim needs or the budget allows.

        Raises:
            Undecidable: the metric cannot be had on this device.
            UnsupportedSwitch: the engine lacks a switch.
            NotMeasurable: an arm is broken, or the arms' environments differ.
        """
        ranks = self.settings.timing_ranks
        if self.settings.device == "cpu" and ranks != CALIBRATED_RANKS:
            raise Undecidable(
                f"the CPU's limits on time and overlap were calibrated on {CALIBRATED_RANKS} ranks, this run has "
                f"{ranks}; give --gauge-world-size of {CALIBRATED_RANKS} or more"
            )
        experiments = {"of": self.fit(question.of, ranks=ranks, metered=True)}
        if question.to is not None:
            experiments["to"] = self.fit(question.to, ranks=ranks, metered=True)
        names = {*question.quantity.names, *question.to_quantity.names}
        known = _metric_names(self.settings.device)
        if unknown := sorted(names - known):
            raise Undecidable(
                f"{', '.join(unknown)}: not measured live on {self.settings.device} (which measures "
                f"{', '.join(sorted(known))}); decide it on recorded evidence (-m recorded)"
            )
        digests = tuple(experiment.digest for experiment in experiments.values())
        key = (digests, *_asked(question))
        if key not in self._effects:
            with self._arms(experiments, f"measure {question.quantity.text} {'/'.join(digests)}") as arms:
                self._effects[key] = _Measurement(question, arms, self).decide()
        return self._effects[key]

    def keep_verdict(self, verdict: Verdict) -> None:
        """Journal a verdict behind the blocks that it rests on."""
        self.bench.note_verdict(
            VerdictEntry(
                claim=verdict.claim,
                outcome=verdict.outcome or "undecidable",
                message=verdict.render(),
                details=verdict.model_dump(mode="json"),
            )
        )

    @contextmanager
    def _arms(self, experiments: Mapping[str, Experiment], purpose: str) -> Iterator[Mapping[str, Arm]]:
        opened: dict[str, Arm] = {}
        with ExitStack() as stack:
            for role, experiment in experiments.items():
                opened[role] = arm = self.bench.open_arm(experiment, self._new_purpose(experiment, f"{purpose} {role}"))
                stack.callback(self.bench.close_arm, arm)
            _require_one_environment(opened, where=self.bench.where)
            yield opened

    def _new_purpose(self, experiment: Experiment, purpose: str) -> str:
        """Two questions of one experiment, or a second attempt, must not share an arm's name: a replay goes by it."""
        self._opened[experiment.digest, purpose] += 1
        times = self._opened[experiment.digest, purpose]
        return purpose if times == 1 else f"{purpose} #{times}"

    def _whole_block(self, arm: Arm, *, steps: int, gradients: bool = False) -> Block:
        try:
            block = self.bench.run(arm, steps=steps, gradients=gradients)
        except EndOfEvidence as end:
            raise NotMeasurable(f"{arm.experiment.describe()}: {end}") from None
        require_whole(block, arm.experiment, steps=range(steps), where=self.bench.where)
        return block

    def _read_counts(self, experiment: Experiment, block: Block) -> Counts:
        totals = [
            {kind: sum(step.counts.get(kind, 0) for step in rank.steps) for kind in COLLECTIVE_KINDS}
            for rank in block.ranks
        ]
        for rank, total in enumerate(totals):
            if total != totals[0]:
                raise NotMeasurable(
                    f"{experiment.describe()}: rank {rank} issued {total}, rank 0 {totals[0]}; ranks that do not issue "
                    f"the same collectives train by luck ({self.bench.where})"
                )
        gathers, scatters = rows_as_published(totals[0])
        return Counts(
            experiment=experiment,
            steps=COUNTED_STEPS,
            rows_all_gather=gathers,
            rows_reduce_scatter=scatters,
            collectives=totals[0],
            where=self.bench.where,
        )

    def _read_curve(self, run: Run, experiment: Experiment, block: Block) -> Curve:
        where = self.bench.where
        losses = tuple(statistics.fmean(row) for row in finite_losses(block, experiment, where=where))
        _require_learning(losses, experiment, where=where)
        names = tuple(parameter_shapes(experiment.model_preset))
        norms = [step.grad_norms or () for step in block.ranks[0].steps]
        for step, row in enumerate(norms):
            if len(row) != len(names):
                raise NotMeasurable(
                    f"{experiment.describe()}: {len(row)} gradient norms at step {step}, one for each of "
                    f"{len(names)} parameters belongs there ({where})"
                )
            for name, norm in zip(names, row, strict=True):
                if norm is None:
                    raise NotMeasurable(
                        f"{experiment.describe()}: the gradient of {name} is not finite at step {step} ({where})"
                    )
        for rank in block.ranks:
            if not rank.parameters_sha256:
                raise NotMeasurable(
                    f"{experiment.describe()}: no digest of rank {rank.rank}'s parameters after the last step ({where})"
                )
        return Curve(
            run=f"{run.label}: {experiment.describe()}",
            losses=losses,
            gradient_norms={
                name: tuple(row[i] for row in norms if row[i] is not None)  # none is None: checked above
                for i, name in enumerate(names)
            },
            parameters_sha256=tuple(rank.parameters_sha256 or "" for rank in block.ranks),
            where=where,
        )


class _Measurement:
    """One question's sequence of blocks and looks."""

    def __init__(self, question: Question, arms: Mapping[str, Arm], evidence: LiveEvidence) -> None:
        self._question = question
        self._arms = arms
        self._evidence = evidence
        self._samples: dict[str, list[Sample]] = {role: [] for role in arms}
        self._block_steps = dict.fromkeys(arms, WARM_UP_STEPS)
        self._next_step = dict.fromkeys(arms, 0)
        # Between processes, a block's first step finds caches and clocks as the other process left them.
        self._dropped_steps = int(len({arm.session for arm in arms.values()}) > 1)

    def decide(self) -> Effect:
        """Look until the claim is decided, the budget has ended or a journal is at its end; then the last look counts.

        Pairs that were measured after it are no part of the answer.
        """
        deadline_s = self._evidence.clock() + self._evidence.settings.budget_s
        interval: Interval | None = None
        pairs = 0
        try:
            for role in self._arms:
                self._warm_up(role)
            for look in looks(self._question.confidence):
                while len(self._samples["of"]) < look.samples:
                    if interval is not None and self._evidence.clock() > deadline_s:
                        raise EndOfEvidence
                    self._measure_pair()
                pairs = look.samples
                interval = mean_interval(self._effects(), look.error_probability)
                self._require_real_clock(interval)
                if judge(*self._on_scale(interval), self._question.bounds) != "inconclusive":
                    break
        except EndOfEvidence as end:
            if interval is None:
                raise NotMeasurable(
                    f"{self._question.of.label}: only {len(self._samples['of'])} pairs of blocks, too few for an "
                    f"interval: {end}"
                ) from None
        assert interval is not None  # noqa: S101 -- our own invariant: the schedule of looks is endless
        return self._effect(interval, pairs)

    def _require_real_clock(self, interval: Interval) -> None:
        """No clock gives the same time to the nanosecond for every pair: such a journal was not measured."""
        if interval.deviation == 0 and "step_ms" in self._question.quantity.names:
            raise NotMeasurable(
                f"{self._question.of.label}: all {len(self._samples['of'])} pairs of blocks are exactly alike, which "
                f"no clock measures ({self._evidence.bench.where})"
            )

    def _warm_up(self, role: str) -> None:
        block = self._block(role)
        step_s = statistics.median(step.duration_ns for step in block.ranks[0].steps) * 1e-9
        self._block_steps[role] = min(MOST_BLOCK_STEPS, max(FEWEST_BLOCK_STEPS, math.ceil(BLOCK_S / step_s)))

    def _measure_pair(self) -> None:
        """Both arms once; the order alternates from pair to pair (A B, B A), and the first pair's is drawn."""
        roles = list(self._arms)
        drawn = int(self._arms["of"].experiment.digest, 16)
        if (len(self._samples["of"]) + drawn) % 2:
            roles.reverse()
        measured = {role: self._read_sample(role, self._block(role)) for role in roles}
        for role, sample in measured.items():
            self._samples[role].append(sample)

    def _block(self, role: str) -> Block:
        arm, where = self._arms[role], self._evidence.bench.where
        first = self._next_step[role]
        steps = range(first, first + self._block_steps[role] + self._dropped_steps)
        block = self._evidence.bench.run(arm, steps=len(steps))
        require_whole(block, arm.experiment, steps=steps, where=where)
        finite_losses(block, arm.experiment, where=where)
        require_collectives(block, arm.experiment, where=where)
        self._next_step[role] = steps.stop
        return block

    def _read_sample(self, role: str, block: Block) -> Sample:
        sample = read_sample(block, dropped_steps=self._dropped_steps)
        quantity = self._question.quantity if role == "of" else self._question.to_quantity
        if missing := sorted(set(quantity.names) - sample.metrics.keys()):
            raise NotMeasurable(
                f"{self._arms[role].experiment.describe()}: block {block.index} yields no {', '.join(missing)}, since "
                f"nothing went over the metered link ({self._evidence.bench.where})"
            )
        return sample

    def _effects(self) -> list[float]:
        """One number a pair: a log-ratio, a difference, or the value itself."""
        question = self._question
        values = [sample.value(question.quantity) for sample in self._samples["of"]]
        if question.comparison == "value":
            return values
        others = [sample.value(question.to_quantity) for sample in self._samples["to"]]
        if question.comparison == "difference":
            return [value - other for value, other in zip(values, others, strict=True)]
        for value, other in zip(values, others, strict=True):
            if value <= 0 or other <= 0:
                raise NotMeasurable(
                    f"{question.quantity.text} of {question.of.label}: a ratio needs figures above 0, not {value:g} "
                    f"over {other:g} ({self._evidence.bench.where})"
                )
        return [math.log(value / other) for value, other in zip(values, others, strict=True)]

    def _on_scale(self, interval: Interval) -> tuple[float, float]:
        if self._question.comparison == "ratio":
            return math.exp(interval.low), math.exp(interval.high)
        return interval.low, interval.high

    def _effect(self, interval: Interval, pairs: int) -> Effect:
        ratio = self._question.comparison == "ratio"
        low, high = self._on_scale(interval)
        scale = 1.0 if ratio else abs(interval.mean) or 1.0
        return Effect(
            basis="samples",
            estimate=math.exp(interval.mean) if ratio else interval.mean,
            low=low,
            high=high,
            pairs=pairs,
            noise_ratio=interval.deviation / scale,
            smallest_detectable_ratio=math.expm1(interval.detectable) if ratio else interval.detectable / scale,
            figures=tuple(self._figure(role, pairs) for role in self._arms),
        )

    def _figure(self, role: str, pairs: int) -> Figure:
        question = self._question
        run = question.of if role == "of" or question.to is None else question.to
        quantity = question.quantity if role == "of" else question.to_quantity
        return Figure(
            run=f"{run.name}: {self._arms[role].experiment.describe()}",
            quantity=quantity.text,
            value=statistics.median(sample.value(quantity) for sample in self._samples[role][:pairs]),
            unit=quantity.unit,
            where=self._evidence.bench.where,
        )


@contextmanager
def open_live_evidence(options: GaugeOptions) -> Iterator[LiveEvidence]:
    """Live evidence as the options ask for it: sessions are started when first needed and ended here.

    Raises:
        RecordError: the journal to replay is malformed.
        JournalWriteFailed: no journal can be begun in the run directory.
    """
    world_size = options.world_size or PUBLISHED_RANKS
    settings = LiveSettings(
        device=options.device,
        candidate=options.candidate,
        world_size=world_size,
        timing_ranks=_timing_ranks(options.device, world_size),
        budget_s=options.budget_s,
    )
    if options.replay is not None:
        replay = ReplayBench(options.replay, shown_as=options.shown(options.replay))
        # On how many ranks and for how long was measured, the journal says: not this machine's cores or clock.
        settings = replace(settings, timing_ranks=replay.timed_ranks or settings.timing_ranks)
        yield LiveEvidence(settings, replay, clock=lambda: 0.0)
        return
    bench_settings = BenchSettings(
        device=options.device,
        world_size=world_size,
        candidate=options.candidate,
        hyper_source=options.hyper_source,
        align_dir=options.align_dir,
    )
    started = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    run_dir = options.run_dir / f"{started}-{os.getpid()}"
    bench = LiveBench(bench_settings, RunDir(run_dir), shown_as=options.shown(RunDir(run_dir).journal))
    try:
        yield LiveEvidence(settings, bench)
    finally:
        bench.close()


def _timing_ranks(device: DeviceName, world_size: int) -> int:
    """On a CPU, as many as its limits were calibrated with, if there are so many."""
    return min(world_size, CALIBRATED_RANKS) if device == "cpu" else world_size


def fit_mesh(published: Mesh, ranks: int) -> Mesh:
    """The published mesh's kind on `ranks` ranks; HSDP keeps two replicas.

    Raises:
        SpecError: the mesh does not divide the ranks.
    """
    replicas = published.replicate
    if ranks % replicas or ranks < 2 * replicas:
        raise SpecError(
            f"{published.name} keeps {replicas} replicas of at least 2 shards, which does not divide {ranks} ranks; "
            f"choose --gauge-world-size as a multiple of {2 * replicas}"
        )
    return Mesh(shape=(replicas, ranks // replicas) if replicas > 1 else (ranks,))


def _require_learning(losses: tuple[float, ...], experiment: Experiment, *, where: str) -> None:
    """Curves that agree because nothing was trained are no evidence.

    Raises:
        NotMeasurable: the losses of the last quarter are not below those of the first.
    """
    quarter = max(1, len(losses) // 4)
    first, last = statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])
    if not last < first:
        raise NotMeasurable(
            f"{experiment.describe()}: the loss does not fall over {len(losses)} steps (mean of the first {quarter}: "
            f"{first:.4f}, of the last: {last:.4f}); a model that does not learn shows nothing ({where})"
        )


def require_collectives(block: Block, experiment: Experiment, *, where: str) -> None:
    """A step that exchanged nothing is fast for the wrong reason.

    Raises:
        NotMeasurable: a rank of a sharded run issued no collective in a step.
    """
    if experiment.mesh.size == 1:
        return
    metered = {step.link is not None for rank in block.ranks for step in rank.steps}
    if len(metered) > 1:
        raise NotMeasurable(
            f"{experiment.describe()}: block {block.index} has the link's use of some ranks or steps only ({where})"
        )
    for rank in block.ranks:
        for step in rank.steps:
            if not any(step.counts.values()):
                raise NotMeasurable(
                    f"{experiment.describe()}: rank {rank.rank} issued no collective at step {step.step}, so its time "
                    f"says nothing about sharded training ({where})"
                )


def read_sample(block: Block, *, dropped_steps: int = 0) -> Sample:
    """A block's metrics, without its first `dropped_steps`.

    A step lasts as long as on its slowest rank; the block's time is its steps' median. On the metered link,
    communication is transfer time, and exposed is what the rank sat waiting through; both are means over ranks and
    steps, their ratio is of the sums.
    """
    steps = list(zip(*_by_rank(block), strict=True))[dropped_steps:]
    step_ms = statistics.median(max(step.duration_ns for step in ranks) for ranks in steps) * 1e-6
    metrics = {"step_ms": step_ms}
    uses = [step.link for ranks in steps for step in ranks if step.link is not None]
    transfer_ns, exposed_ns = sum(use.transfer_ns for use in uses), sum(use.exposed_ns for use in uses)
    if uses and transfer_ns:
        exposed_ms = exposed_ns / len(uses) * 1e-6
        metrics |= {
            "exposed_ms": exposed_ms,
            "overlapped_ms": (transfer_ns - exposed_ns) / len(uses) * 1e-6,
            "overlap_ratio": 1 - exposed_ns / transfer_ns,
            "exposed_share": exposed_ms / step_ms,
        }
    return Sample(metrics=metrics)


def _asked(question: Question) -> tuple[object, ...]:
    """What makes two questions one; whether the report timed or profiled a run is nothing to live evidence."""
    names = question.of.name, question.to.name if question.to else None
    return (*names, question.quantity, question.to_quantity, question.comparison, question.bounds, question.confidence)


def _metric_names(device: DeviceName) -> frozenset[str]:
    on_the_link = {"exposed_ms", "overlapped_ms", "overlap_ratio", "exposed_share"}
    return frozenset({"step_ms"} | (on_the_link if device == "cpu" else set()))


def require_whole(block: Block, experiment: Experiment, *, steps: range, where: str) -> None:
    """Every rank of the mesh once, each with exactly these steps.

    Raises:
        NotMeasurable: a rank or a step is missing, or there twice, or the block is of another experiment.
    """
    if block.experiment != experiment.digest:
        raise NotMeasurable(
            f"{experiment.describe()}: block {block.index} is of experiment {block.experiment}, not of "
            f"{experiment.digest}; evidence of one run says nothing about another ({where})"
        )
    ranks, members = [rank.rank for rank in block.ranks], range(experiment.mesh.size)
    if ranks != list(members):
        missing = sorted(set(members) - set(ranks))
        fault = (
            f"has no record of rank {', '.join(map(str, missing))}"
            if missing
            else f"holds records of ranks {ranks}, where one each of {list(members)} belongs"
        )
        raise NotMeasurable(
            f"{experiment.describe()}: block {block.index} {fault}; an incomplete block is no evidence ({where})"
        )
    for rank in block.ranks:
        found = [step.step for step in rank.steps]
        if found != list(steps):
            raise NotMeasurable(
                f"{experiment.describe()}: block {block.index} of rank {rank.rank} holds steps {found}, "
                f"steps {list(steps)} belong there ({where})"
            )


def finite_losses(block: Block, experiment: Experiment, *, where: str) -> list[list[float]]:
    """Losses, step by step, a rank each.

    Raises:
        NotMeasurable: one is not finite.
    """
    for steps in zip(*_by_rank(block), strict=True):
        for rank, step in enumerate(steps):
            if step.loss is None:
                raise NotMeasurable(
                    f"{experiment.describe()}: the loss of rank {rank} is not finite at step {step.step}: nothing "
                    f"after it counts ({where})"
                )
    return [[step.loss for step in steps if step.loss is not None] for steps in zip(*_by_rank(block), strict=True)]


def _by_rank(block: Block) -> list[tuple[StepRecord, ...]]:
    return [rank.steps for rank in block.ranks]


def _require_one_environment(arms: Mapping[str, Arm], *, where: str) -> None:
    first, *others = arms.values()
    for other in others:
        if differing := sorted(dict(first.environment).items() ^ dict(other.environment).items()):
            named = sorted({name for name, _ in differing})
            raise NotMeasurable(
                f"{first.experiment.describe()} and {other.experiment.describe()} ran in different environments: "
                f"{', '.join(named)} differ; measure both arms in one ({where})"
            )
