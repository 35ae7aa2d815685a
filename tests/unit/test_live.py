"""Live evidence over a bench of made-up blocks: what is asked of it, what is decided, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardgauge.claims import judge_effect
from shardgauge.errors import NotMeasurable, RankDied, SpecError, Undecidable, UnsupportedSwitch
from shardgauge.evidence import Bounds, Comparison, Effect, Question, Run
from shardgauge.live import WARM_UP_STEPS, LiveEvidence, LiveSettings, fit_mesh, read_sample
from shardgauge.presets import PRESETS
from shardgauge.quantities import parse_quantity
from shardgauge.records import Block, RankBlock
from shardgauge.spec import Experiment, Fault, Mesh, Switches, build_experiment, parse_mesh
from tests.unit.fake_bench import FakeBench, pace

PREFETCH = Switches(forward_prefetch=1, backward_prefetch=1)
LIMIT = Bounds(at_most=0.95)
Spoil = Callable[[Block], Block]


def run_of(engine: str = "hyper_torch", *, name: str | None = None, **fields: Any) -> Run:
    """A run as the report has it: the large model on 8 ranks."""
    mesh = fields.pop("mesh", Mesh(shape=(8,)))
    experiment = build_experiment(engine=engine, preset="qwen3-8b-lite", mesh=mesh, **fields)
    return Run(name=name or engine, experiment=experiment, report_id="T0")


DEFAULT = run_of(name="default")
PREFETCHED = run_of(name="prefetched", switches=PREFETCH)


def evidence_from(bench: FakeBench, **settings: Any) -> LiveEvidence:
    """Live evidence on a CPU with 4 ranks and a budget of 60 s, of which each block takes half a second."""
    defaults = {"device": "cpu", "candidate": "reference", "world_size": 4, "timing_ranks": 4, "budget_s": 60.0}
    return LiveEvidence(LiveSettings(**(defaults | settings)), bench, clock=lambda: bench.now_s)


def question(
    of: Run = PREFETCHED,
    to: Run | None = DEFAULT,
    *,
    metric: str = "step_ms",
    comparison: Comparison = "ratio",
    bounds: Bounds = LIMIT,
) -> Question:
    """Is the one at least 5 % faster than the other?"""
    quantity = parse_quantity(metric)
    return Question(
        of=of,
        quantity=quantity,
        to=to,
        to_quantity=quantity,
        comparison=comparison,
        bounds=bounds,
        confidence=0.99,
    )


def overlap(bounds: Bounds) -> Question:
    """One arm's overlap ratio against a limit."""
    return question(PREFETCHED, None, metric="overlap_ratio", comparison="value", bounds=bounds)


def on_rank(rank: int, change: Callable[[RankBlock], RankBlock], *, block: int = 3) -> Spoil:
    """Change one rank's part of one block."""

    def spoil(found: Block) -> Block:
        if found.index != block:
            return found
        ranks = tuple(change(part) if part.rank == rank else part for part in found.ranks)
        return found.model_copy(update={"ranks": ranks})

    return spoil


def with_ranks(*kept: int, block: int = 3) -> Spoil:
    """A block with these ranks' parts only."""

    def spoil(found: Block) -> Block:
        parts = tuple(found.ranks[rank] for rank in kept)
        return found.model_copy(update={"ranks": parts}) if found.index == block else found

    return spoil


def keep_steps(*places: int) -> Callable[[RankBlock], RankBlock]:
    """A rank's part with the steps at these places."""
    return lambda part: part.model_copy(update={"steps": tuple(part.steps[place] for place in places)})


def lose_loss(place: int) -> Callable[[RankBlock], RankBlock]:
    """A rank's part whose loss was not finite at one step."""

    def change(part: RankBlock) -> RankBlock:
        steps = list(part.steps)
        steps[place] = steps[place].model_copy(update={"loss": None})
        return part.model_copy(update={"steps": tuple(steps)})

    return change


def test_a_much_faster_arm_holds_at_the_first_look() -> None:
    """20 % at 1 % of noise needs 6 pairs, and the budget stays unspent."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    effect = evidence_from(bench).measure(question())
    assert judge_effect(effect, LIMIT) == "holds"
    assert effect.pairs == 6
    assert effect.estimate == pytest.approx(0.8, rel=0.02)
    assert effect.basis == "samples"
    assert effect.low is not None
    assert effect.high is not None
    assert effect.low < effect.estimate < effect.high
    assert bench.now_s == 14 * 0.5


def test_a_slower_arm_is_refuted_at_the_first_look() -> None:
    """The whole interval is beyond the limit."""
    effect = evidence_from(FakeBench(step_ms=pace(prefetch=120))).measure(question())
    assert judge_effect(effect, LIMIT) == "refuted"
    assert effect.pairs == 6


def test_an_effect_at_the_limit_stays_open_until_the_budget_ends() -> None:
    """The last look in the budget counts, with its own pairs; those measured after it are no part of the answer."""
    bench = FakeBench(step_ms=pace(prefetch=95, noise=0.03))
    effect = evidence_from(bench, budget_s=15).measure(question())
    assert judge_effect(effect, LIMIT) == "inconclusive"
    assert effect.pairs == 12
    assert 15 < bench.now_s <= 16.5
    assert len(bench.asked) > 2 + 2 * 12


def test_blocks_after_the_last_look_are_no_part_of_the_figures() -> None:
    """23 blocks of 45 % and 55 % in turn straddle the limit; what comes after them is not looked at any more."""
    bench = FakeBench(exposed=lambda index: 0.0 if index > 23 else 0.55 if index % 2 else 0.45)
    effect = evidence_from(bench, budget_s=15).measure(overlap(Bounds(at_least=0.5)))
    assert effect.pairs == 23
    assert len(bench.asked) > 24
    assert effect.figures[0].value == pytest.approx(0.45)
    assert effect.estimate == pytest.approx(0.5, abs=0.01)


def test_a_budget_too_small_for_one_look_still_gets_one() -> None:
    """Six pairs are the least that a verdict is given on."""
    bench = FakeBench(step_ms=pace(prefetch=95, noise=0.03))
    assert evidence_from(bench, budget_s=0.1).measure(question()).pairs == 6


def test_figures_are_medians_of_the_pairs_that_count() -> None:
    """With the quantity, the unit, what really ran, and where it can be read."""
    effect = evidence_from(FakeBench(step_ms=pace(prefetch=80, noise=0.0))).measure(question())
    of, to = effect.figures
    assert (of.value, to.value) == (pytest.approx(80.0), pytest.approx(100.0))
    assert of.run == "prefetched: reference fsdp4 (prefetch 1/1) qwen3-nano bf16"
    assert (of.unit, of.where) == ("ms", "journal.jsonl")


@pytest.mark.parametrize("switches", [Switches(forward_prefetch=depth) for depth in range(1, 9)])
def test_pairs_alternate_and_the_digest_draws_who_is_first(switches: Switches) -> None:
    """A B, B A, ...: the first pair's order follows from the experiment, so a repetition has the same one."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    evidence = evidence_from(bench)
    of = run_of(switches=switches)
    evidence.measure(question(of))
    roles = [role for role, _ in bench.asked[2:]]
    drawn = int(evidence.fit(of, ranks=4, metered=True).digest, 16) % 2
    expected = [("of", "to"), ("to", "of")]
    pairs = list(zip(roles[::2], roles[1::2], strict=True))
    assert pairs == [expected[(place + drawn) % 2] for place in range(6)]


def test_both_orders_are_drawn() -> None:
    """Over several experiments neither arm is always first."""
    first = set()
    for depth in range(1, 9):
        bench = FakeBench(step_ms=pace(prefetch=80))
        evidence_from(bench).measure(question(run_of(switches=Switches(forward_prefetch=depth))))
        first.add(bench.asked[2][0])
    assert first == {"of", "to"}


def test_the_warm_up_is_not_counted() -> None:
    """A first block ten times as slow changes nothing; it only tells how many steps fill half a second."""

    def slow_start(experiment: Experiment, index: int) -> float:
        return 1000.0 if index == 0 else 80.0 if experiment.switches.forward_prefetch else 100.0

    bench = FakeBench(step_ms=slow_start)
    effect = evidence_from(bench).measure(question())
    assert effect.estimate == pytest.approx(0.8)
    assert bench.asked[:2] == [("of", WARM_UP_STEPS), ("to", WARM_UP_STEPS)]
    assert {steps for _, steps in bench.asked[2:]} == {3}


@pytest.mark.parametrize(("step_ms", "steps"), [(1.0, 20), (49.0, 11), (100.0, 5), (5000.0, 3)])
def test_a_block_lasts_about_half_a_second(step_ms: float, steps: int) -> None:
    """Never fewer than 3 steps, never more than 20."""
    bench = FakeBench(step_ms=lambda experiment, _: step_ms * (0.8 if experiment.switches.forward_prefetch else 1.0))
    evidence_from(bench).measure(question())
    assert {asked for role, asked in bench.asked[2:] if role == "to"} == {steps}


def test_a_step_lasts_as_long_as_on_its_slowest_rank_and_a_block_as_its_median_step() -> None:
    """One slow rank is a slow step, one slow step is no slow block."""
    bench = FakeBench(step_ms=pace(noise=0.0))
    experiment = build_experiment(engine="reference", mesh=Mesh(shape=(2,)))
    block = bench.run(bench.open_arm(experiment, "sample"), steps=3)
    times_ms = ((10, 11), (30, 12), (20, 90))
    ranks = tuple(
        part.model_copy(
            update={
                "steps": tuple(
                    step.model_copy(update={"duration_ns": pair[part.rank] * 1_000_000})
                    for step, pair in zip(part.steps, times_ms, strict=True)
                )
            }
        )
        for part in block.ranks
    )
    timed = block.model_copy(update={"ranks": ranks})
    assert read_sample(timed).metrics == {"step_ms": pytest.approx(30.0)}
    assert read_sample(timed, dropped_steps=1).metrics == {"step_ms": pytest.approx(60.0)}


@pytest.mark.parametrize(("rival", "more"), [("native", 1), ("hyper_torch", 0)])
def test_a_step_more_is_run_where_the_arms_live_in_different_processes(rival: str, more: int) -> None:
    """The first step after the other process is dropped from every block, so each is one longer."""
    bench = FakeBench(step_ms=pace(noise=0.0))
    evidence_from(bench).measure(question(to=run_of(rival), bounds=Bounds(at_most=1.05)))
    assert {steps for _, steps in bench.asked} == {5 + more}


def test_overlap_is_what_was_not_waited_for() -> None:
    """Of 10 ms of transfer a step 3 ms are waited for: 7 ms are overlapped, 70 %, and 3 % of a 100 ms step exposed."""
    bench = FakeBench(step_ms=pace(noise=0.0), exposed=lambda _: 0.3)
    evidence = evidence_from(bench)
    experiment = evidence.fit(PREFETCHED, ranks=2, metered=True)
    sample = read_sample(bench.run(bench.open_arm(experiment, "sample"), steps=4))
    assert sample.metrics == {
        "step_ms": pytest.approx(100.0),
        "exposed_ms": pytest.approx(3.0),
        "overlapped_ms": pytest.approx(7.0),
        "overlap_ratio": pytest.approx(0.7),
        "exposed_share": pytest.approx(0.03),
    }
    assert sample.value(parse_quantity("exposed_ms + overlapped_ms")) == pytest.approx(10.0)


def test_a_value_needs_one_arm_only() -> None:
    """An overlap ratio is held against its limit without a rival."""
    bench = FakeBench(exposed=lambda index: 0.3 + 0.01 * (index % 3))
    bounds = Bounds(at_least=0.4)
    effect = evidence_from(bench).measure(overlap(bounds))
    assert judge_effect(effect, bounds) == "holds"
    assert effect.estimate == pytest.approx(0.69)
    assert {role for role, _ in bench.asked} == {"of"}


def test_a_difference_is_taken_pair_by_pair() -> None:
    """In the metric's own unit, not as a ratio."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    bounds = Bounds(at_most=-5.0)
    effect = evidence_from(bench).measure(question(comparison="difference", bounds=bounds))
    assert effect.estimate == pytest.approx(-20.0, abs=1.0)
    assert judge_effect(effect, bounds) == "holds"


SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing-rank": (with_ranks(0, 1, 3), "block 3 has no record of rank 2"),
    "missing-ranks": (with_ranks(1, 3), "block 3 has no record of rank 0, 2"),
    "no-rank": (with_ranks(), "block 3 has no record of rank 0, 1, 2, 3"),
    "rank-twice": (with_ranks(0, 1, 2, 2, 3), r"block 3 holds records of ranks \[0, 1, 2, 2, 3\]"),
    "ranks-out-of-order": (with_ranks(1, 0, 2, 3), r"block 3 holds records of ranks \[1, 0, 2, 3\]"),
    "missing-step": (on_rank(2, keep_steps(0, 1, 3, 4)), r"block 3 of rank 2 holds steps \[15, 16, 18, 19\], steps "),
    "missing-first-step": (on_rank(0, keep_steps(1, 2, 3, 4)), r"block 3 of rank 0 holds steps \[16, 17, 18, 19\]"),
    "missing-last-step": (on_rank(1, keep_steps(0, 1, 2, 3)), r"block 3 of rank 1 holds steps \[15, 16, 17, 18\]"),
    "step-twice": (on_rank(3, keep_steps(0, 1, 1, 2, 3)), r"rank 3 holds steps \[15, 16, 16, 17, 18\]"),
    "steps-out-of-order": (on_rank(1, keep_steps(1, 0, 2, 3, 4)), r"rank 1 holds steps \[16, 15, 17, 18, 19\]"),
    "no-step": (on_rank(0, keep_steps()), r"block 3 of rank 0 holds steps \[\], steps \[15, 16, 17, 18, 19\] belong"),
    "no-loss": (on_rank(2, lose_loss(1)), "the loss of rank 2 is not finite at step 16: nothing after it counts"),
    "no-loss-while-warming-up": (on_rank(1, lose_loss(4), block=0), "the loss of rank 1 is not finite at step 4"),
    "missing-rank-while-warming-up": (with_ranks(0, block=0), "block 0 has no record of rank 1, 2, 3"),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
@pytest.mark.parametrize(
    "asked", [question(bounds=Bounds(at_most=1.05)), overlap(Bounds(at_least=0.4))], ids=["ratio", "value"]
)
def test_a_spoilt_block_is_no_evidence(asked: Question, spoil: Spoil, said: str) -> None:
    """What would hold becomes not measurable, naming engine, block, rank or step, and the journal; arms are closed."""
    steady = pace(noise=0.0)
    assert judge_effect(evidence_from(FakeBench(step_ms=steady)).measure(asked), asked.bounds) == "holds"
    bench = FakeBench(step_ms=steady, edit=spoil)
    with pytest.raises(NotMeasurable, match=said) as caught:
        evidence_from(bench).measure(asked)
    assert str(caught.value).startswith("reference fsdp4 (")
    assert str(caught.value).endswith("(journal.jsonl)")
    assert_all_closed(bench)


def assert_all_closed(bench: FakeBench) -> None:
    """Every arm that was opened was closed."""
    assert sorted(arm.name for arm in bench.closed) == sorted(arm.name for arm in bench.opened)


WHOLE_OR_NOTHING: dict[str, tuple[Spoil, str]] = {
    "missing-rank": (with_ranks(0, 1, 3, block=0), "block 0 has no record of rank 2"),
    "rank-twice": (with_ranks(0, 1, 1, 2, 3, block=0), r"block 0 holds records of ranks \[0, 1, 1, 2, 3\]"),
    "missing-step": (on_rank(2, keep_steps(0), block=0), r"block 0 of rank 2 holds steps \[0\], steps \[0, 1"),
    "step-twice": (on_rank(1, keep_steps(0, 0), block=0), r"block 0 of rank 1 holds steps \[0, 0\]"),
    "later-steps": (lambda block: later(block, by=5), r"block 0 of rank 0 holds steps \[5, 6"),
}


@pytest.mark.parametrize(("spoil", "said"), WHOLE_OR_NOTHING.values(), ids=WHOLE_OR_NOTHING)
@pytest.mark.parametrize("ask", [LiveEvidence.counts, LiveEvidence.curve], ids=["counts", "curve"])
def test_a_spoilt_block_gives_neither_counts_nor_curve(
    ask: Callable[[LiveEvidence, Run], object], spoil: Spoil, said: str
) -> None:
    """They are one block each, from step 0, and it has to be whole."""
    bench = FakeBench(edit=spoil)
    with pytest.raises(NotMeasurable, match=said):
        ask(evidence_from(bench), DEFAULT)
    assert_all_closed(bench)


def test_a_block_that_does_not_follow_the_one_before_is_no_evidence() -> None:
    """A whole block that is missing is as bad as a missing step."""

    def skip(block: Block) -> Block:
        return block if block.index < 3 else later(block, by=5)

    with pytest.raises(NotMeasurable, match=r"holds steps \[20, 21, 22, 23, 24\], steps \[15, 16, 17, 18, 19\] belong"):
        evidence_from(FakeBench(step_ms=pace(noise=0.0), edit=skip)).measure(question())


def later(block: Block, *, by: int) -> Block:
    """The same block, so many steps later."""
    ranks = tuple(
        part.model_copy(
            update={"steps": tuple(step.model_copy(update={"step": step.step + by}) for step in part.steps)}
        )
        for part in block.ranks
    )
    return block.model_copy(update={"ranks": ranks})


def change_step(place: int, **update: Any) -> Callable[[RankBlock], RankBlock]:
    """A rank's part with one step changed."""

    def change(part: RankBlock) -> RankBlock:
        steps = list(part.steps)
        steps[place] = steps[place].model_copy(update=update)
        return part.model_copy(update={"steps": tuple(steps)})

    return change


NORMS = (1.0,) * 91
CURVES: dict[str, tuple[Spoil, str]] = {
    "loss": (on_rank(3, lose_loss(7), block=0), "the loss of rank 3 is not finite at step 7: nothing after it counts"),
    "gradient": (
        on_rank(0, change_step(4, grad_norms=(*NORMS[:90], None)), block=0),
        "the gradient of lm_head.weight is not finite at step 4",
    ),
    "no-gradients": (on_rank(0, change_step(4, grad_norms=None), block=0), "0 gradient norms at step 4, one for each"),
    "few-gradients": (on_rank(0, change_step(4, grad_norms=NORMS[1:]), block=0), "90 gradient norms at step 4"),
    "no-digest": (
        on_rank(2, lambda part: part.model_copy(update={"parameters_sha256": None}), block=0),
        "no digest of rank 2's parameters after the last step",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), CURVES.values(), ids=CURVES)
def test_a_curve_with_a_hole_is_no_evidence(spoil: Spoil, said: str) -> None:
    """Whatever is not finite or not there is named, with its step, before anything is compared."""
    with pytest.raises(NotMeasurable, match=said) as caught:
        evidence_from(FakeBench(edit=spoil)).curve(DEFAULT)
    assert str(caught.value).startswith("reference fsdp4 (no switches) qwen3-nano bf16: ")
    assert str(caught.value).endswith("(journal.jsonl)")


def test_a_curve_is_the_mean_over_ranks_from_step_0() -> None:
    """Twenty losses, a norm a parameter and step, and every rank's digest."""
    bench = FakeBench()
    curve = evidence_from(bench).curve(DEFAULT)
    assert curve.losses == pytest.approx([7.5 - 0.01 * step for step in range(20)])
    assert len(curve.gradient_norms) == 91
    assert set(map(len, curve.gradient_norms.values())) == {20}
    assert len(curve.parameters_sha256) == 4
    assert bench.asked == [("of", 20)]


def test_counts_are_of_two_steps_and_as_the_report_counts_them() -> None:
    """Reduce-scatters come doubled in the report's rows, not in the collectives themselves."""
    counts = evidence_from(FakeBench()).counts(DEFAULT)
    assert (counts.steps, counts.rows_all_gather, counts.rows_reduce_scatter) == (2, 360, 364)
    assert counts.collectives == {"all_gather": 360, "reduce_scatter": 182, "all_reduce": 0}


def test_ranks_that_disagree_on_counts_are_no_evidence() -> None:
    """Not the first rank's word: the ranks that differ are told with both counts."""
    more = {"all_gather": 181, "reduce_scatter": 91, "all_reduce": 0}
    bench = FakeBench(edit=on_rank(3, change_step(1, counts=more), block=0))
    with pytest.raises(NotMeasurable, match=r"rank 3 issued \{'all_gather': 361, .*\}, rank 0 \{'all_gather': 360, "):
        evidence_from(bench).counts(DEFAULT)


def test_a_collective_of_the_second_step_only_is_counted() -> None:
    """Counts are summed over every kind, whatever the first step says."""

    def add(block: Block) -> Block:
        for rank in range(4):
            block = on_rank(rank, change_step(0, counts={"all_gather": 180, "reduce_scatter": 91}), block=0)(block)
            late = {"all_gather": 180, "reduce_scatter": 91, "all_reduce": 1}
            block = on_rank(rank, change_step(1, counts=late), block=0)(block)
        return block

    assert evidence_from(FakeBench(edit=add)).counts(DEFAULT).collectives == {
        "all_gather": 360,
        "reduce_scatter": 182,
        "all_reduce": 1,
    }


def test_arms_in_different_environments_are_not_compared() -> None:
    """Which variable differs is said, nothing is run, and both arms are closed."""
    environments = {"native": {"torch": "2.6", "OMP_NUM_THREADS": "1"}, "reference": {"torch": "2.7"}}
    bench = FakeBench(environments=environments)
    with pytest.raises(NotMeasurable, match="different environments: OMP_NUM_THREADS, torch differ") as caught:
        evidence_from(bench).measure(question(to=run_of("native")))
    assert "native fsdp4" in str(caught.value)
    assert str(caught.value).endswith("(journal.jsonl)")
    assert bench.asked == []
    assert_all_closed(bench)


def test_arms_are_closed_when_a_block_raises() -> None:
    """The ranks' error goes on its way, and no arm stays behind."""

    def die(block: Block) -> Block:
        if block.index == 2:
            raise RankDied("rank 1 was killed")
        return block

    bench = FakeBench(edit=die)
    with pytest.raises(RankDied, match="rank 1 was killed"):
        evidence_from(bench).measure(question())
    assert len(bench.opened) == 2
    assert_all_closed(bench)


def test_an_arm_that_cannot_be_opened_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first arm is closed when the second is refused; so is the second when closing the first fails."""
    bench = FakeBench()
    open_arm = bench.open_arm

    def refuse_second(experiment: Experiment, purpose: str) -> Any:
        if purpose.endswith("to"):
            raise UnsupportedSwitch("no such switch")
        return open_arm(experiment, purpose)

    monkeypatch.setattr(bench, "open_arm", refuse_second)
    with pytest.raises(UnsupportedSwitch):
        evidence_from(bench).measure(question())
    assert len(bench.opened) == 1
    assert_all_closed(bench)


def test_every_arm_is_closed_even_when_closing_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm's trouble is not to leak the other."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    close_arm = bench.close_arm

    def fail(arm: Any) -> None:
        close_arm(arm)
        raise RankDied(f"closing {arm.purpose}")

    monkeypatch.setattr(bench, "close_arm", fail)
    with pytest.raises(RankDied):
        evidence_from(bench).measure(question())
    assert_all_closed(bench)


def test_no_claim_measures_twice() -> None:
    """Counts, curves and effects are kept; only another repetition, or another question, is measured again."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    evidence = evidence_from(bench)

    def blocks(ask: Callable[[], object]) -> int:
        before = len(bench.asked)
        ask()
        return len(bench.asked) - before

    again = (
        lambda: evidence.counts(DEFAULT),
        lambda: evidence.curve(DEFAULT),
        lambda: evidence.curve(DEFAULT, repetition=1),
        lambda: evidence.measure(question()),
    )
    assert [blocks(ask) for ask in again] == [1, 1, 1, 14]
    assert [blocks(ask) for ask in again] == [0, 0, 0, 0]
    assert blocks(lambda: evidence.counts(DEFAULT.profiled)) == 0
    assert blocks(lambda: evidence.measure(question(PREFETCHED.profiled, DEFAULT.profiled))) == 0
    assert blocks(lambda: evidence.measure(question(bounds=Bounds(at_most=0.9)))) == 14
    assert blocks(lambda: evidence.curve(DEFAULT.at_precision("fp32"))) == 1


def test_arms_of_two_questions_have_names_of_their_own() -> None:
    """A journal tells them apart: the same runs asked about another limit are other arms."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    evidence = evidence_from(bench)
    for limit in (0.95, 0.9, 0.85):
        evidence.measure(question(bounds=Bounds(at_most=limit)))
    assert len({arm.name for arm in bench.opened}) == 6


def test_the_candidate_takes_hyper_torchs_place() -> None:
    """The model is the device's, switches and precision stay, other engines are themselves."""
    evidence = evidence_from(FakeBench())
    fitted = evidence.fit(PREFETCHED.at_precision("fp32"), ranks=4, metered=False)
    assert fitted.engine == "reference"
    assert (fitted.preset, fitted.precision, fitted.switches) == ("qwen3-nano", "fp32", PREFETCH)
    assert fitted.seed == PREFETCHED.experiment.seed
    assert evidence.fit(run_of("native"), ranks=4, metered=False).engine == "native"
    real = evidence_from(FakeBench(), candidate="hyper_torch").fit(PREFETCHED, ranks=4, metered=False)
    assert real.engine == "hyper_torch"


def test_the_truth_runs_all_data_on_one_rank() -> None:
    """`single` is not sharded; its global batch is that of the ranks it is held against."""
    fitted = evidence_from(FakeBench()).fit(run_of("single"), ranks=4, metered=False)
    assert (fitted.mesh.shape, fitted.data_parallel) == ((1,), 4)


@pytest.mark.parametrize(
    ("published", "ranks", "shape"),
    [
        ("fsdp8", 8, (8,)),
        ("fsdp8", 4, (4,)),
        ("fsdp8", 2, (2,)),
        ("fsdp8", 6, (6,)),
        ("hsdp24", 8, (2, 4)),
        ("hsdp24", 4, (2, 2)),
        ("hsdp24", 6, (2, 3)),
    ],
)
def test_a_mesh_keeps_its_kind(published: str, ranks: int, shape: tuple[int, ...]) -> None:
    """FSDP shards over all ranks, HSDP keeps its two replicas."""
    assert fit_mesh(parse_mesh(published), ranks).shape == shape


@pytest.mark.parametrize(("published", "ranks"), [("fsdp8", 1), ("hsdp24", 2), ("hsdp24", 7), ("hsdp24", 3)])
def test_a_mesh_that_does_not_fit_is_refused(published: str, ranks: int) -> None:
    """What would not be the same kind of mesh is no stand-in; the message says which sizes are."""
    multiple = 4 if published == "hsdp24" else 2
    with pytest.raises(SpecError, match=rf"choose --gauge-world-size as a multiple of {multiple}"):
        fit_mesh(parse_mesh(published), ranks)


def test_the_link_is_metered_for_claims_about_time_on_a_cpu() -> None:
    """Elsewhere the link is real; counts and losses need none."""
    on_cpu, on_npu = evidence_from(FakeBench()), evidence_from(FakeBench(), device="npu")
    assert on_cpu.fit(DEFAULT, ranks=8, metered=True).link == PRESETS["qwen3-nano"].link
    assert on_cpu.fit(DEFAULT, ranks=8, metered=False).link is None
    assert on_npu.fit(DEFAULT, ranks=8, metered=True).link is None


def test_time_is_measured_on_the_timing_ranks_and_counts_on_all() -> None:
    """A small machine times fewer ranks than it counts on."""
    bench = FakeBench(step_ms=pace(prefetch=80))
    evidence = evidence_from(bench, world_size=8, timing_ranks=4)
    evidence.measure(question())
    evidence.counts(DEFAULT)
    evidence.curve(DEFAULT)
    assert [arm.experiment.mesh.size for arm in bench.opened] == [4, 4, 8, 8]
    assert [arm.experiment.link is not None for arm in bench.opened] == [True, True, False, False]


def test_another_source_needs_another_run() -> None:
    """P0 is a patch to the candidate's tree, and there is one tree: undecided, without a launch."""
    bench = FakeBench()
    for ask in (LiveEvidence.counts, LiveEvidence.curve):
        with pytest.raises(Undecidable, match=r"patched \(T0\) is source 'P0'.*--gauge-hyper-src"):
            ask(evidence_from(bench), run_of(name="patched", source="P0"))
    with pytest.raises(Undecidable, match="source 'P0'"):
        evidence_from(bench).measure(question(run_of(name="patched", source="P0")))
    assert bench.opened == []


@pytest.mark.parametrize(
    ("device", "metric"),
    [("cpu", "hook_ms:post_backward:norm"), ("cpu", "stage_ms"), ("npu", "overlap_ratio"), ("npu", "computing_ms")],
)
def test_a_metric_of_a_profile_is_not_measured_live(device: str, metric: str) -> None:
    """It is named, with what this device can measure; nothing is launched."""
    bench = FakeBench()
    with pytest.raises(Undecidable, match=f"{metric}: not measured live on {device} .*step_ms.*-m recorded"):
        evidence_from(bench, device=device).measure(question(metric=metric))
    assert bench.opened == []


def test_faults_reach_the_reference_engine_and_no_other() -> None:
    """A check of the gate can ask for a faulty run; another engine with faults is refused, not run without them."""
    faults = (Fault(kind="doubled_all_gather", unit="layers.2"),)
    evidence = evidence_from(FakeBench())
    fitted = evidence.fit(run_of("reference", faults=faults), ranks=4, metered=False)
    assert fitted.faults == faults
    faulty = DEFAULT.experiment.model_copy(update={"faults": faults})
    run = Run(name="faulty", experiment=faulty)
    assert evidence.fit(run, ranks=4, metered=False).faults == faults
    with pytest.raises(SpecError, match="only the reference engine has faults to switch on, not hyper_torch"):
        evidence_from(FakeBench(), candidate="hyper_torch").fit(run, ranks=4, metered=False)


def test_an_overlap_without_a_transfer_is_no_evidence() -> None:
    """Nothing over nothing is not 100 % overlap."""

    def idle(block: Block) -> Block:
        for rank in range(4):
            for place in range(len(block.ranks[rank].steps)):
                block = on_rank(rank, change_step(place, link=None), block=block.index)(block)
        return block

    with pytest.raises(NotMeasurable, match="block 1 yields no overlap_ratio, since nothing went over the metered"):
        evidence_from(FakeBench(edit=idle)).measure(overlap(Bounds(at_least=0.4)))


def test_a_ratio_to_nothing_is_no_evidence() -> None:
    """An arm that exposes nothing at all has no ratio to another."""
    bench = FakeBench(exposed=lambda _: 0.0)
    with pytest.raises(NotMeasurable, match=r"exposed_ms of prefetched \(T0\): a ratio needs .*, not 0 over 0"):
        evidence_from(bench).measure(question(metric="exposed_ms"))


def test_one_quantity_over_another_is_evaluated_block_by_block() -> None:
    """`exposed_ms / exposed_ms + overlapped_ms` is the exposed share of the communication."""
    effect = evidence_from(FakeBench(exposed=lambda _: 0.25)).measure(
        question(to=None, metric="exposed_ms / exposed_ms + overlapped_ms", comparison="value")
    )
    assert isinstance(effect, Effect)
    assert effect.estimate == pytest.approx(0.25)


def on_every_step(**update: Any) -> Spoil:
    """Change every step of every rank of every block."""

    def spoil(found: Block) -> Block:
        ranks = tuple(
            part.model_copy(update={"steps": tuple(step.model_copy(update=update) for step in part.steps)})
            for part in found.ranks
        )
        return found.model_copy(update={"ranks": ranks})

    return spoil


def test_times_without_any_noise_are_no_evidence() -> None:
    """A journal whose pairs are all alike was written, not measured."""
    bench = FakeBench(edit=on_every_step(duration_ns=1))
    with pytest.raises(NotMeasurable, match=r"all 6 pairs of blocks are exactly alike.*journal\.jsonl"):
        evidence_from(bench).measure(question())


def test_a_timed_step_without_collectives_is_no_evidence() -> None:
    """An arm that exchanges nothing is fast for the wrong reason."""
    bench = FakeBench(edit=on_every_step(counts={"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}))
    with pytest.raises(NotMeasurable, match="rank 0 issued no collective at step 0"):
        evidence_from(bench).measure(question())


def test_a_curve_that_does_not_fall_is_no_evidence() -> None:
    """All engines agree where none of them trains."""
    bench = FakeBench(edit=on_every_step(loss=6.0))
    with pytest.raises(NotMeasurable, match="the loss does not fall over 20 steps"):
        evidence_from(bench).curve(run_of())


def test_a_block_of_another_experiment_is_no_evidence() -> None:
    """A journal whose arms were swapped must not decide anything."""
    bench = FakeBench(edit=lambda block: block.model_copy(update={"experiment": "0" * 12}))
    with pytest.raises(NotMeasurable, match="block 0 is of experiment 000000000000, not of"):
        evidence_from(bench).measure(question())
