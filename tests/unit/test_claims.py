from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shardgauge.claims import Docket, judge
from shardgauge.curves import greatest_deviation, greatest_gradient_deviation, greatest_loss_deviation
from shardgauge.errors import NotMeasurable, SpecError, ThresholdError, UnsupportedSwitch
from shardgauge.evidence import Bounds, Effect, Evidence, Figure, Run
from shardgauge.gauge import ClaimNotMeasurable, ClaimRefuted, Gauge
from shardgauge.marked_yaml import parse_marked_yaml
from shardgauge.recorded import read_records
from shardgauge.thresholds import load_thresholds
from shardgauge.verdict import Verdict
from shardgauge.verdict_table import tell_verdicts
from tests.unit.fake_evidence import (
    CANDIDATE,
    CANDIDATE_RECORD,
    NATIVE,
    NATIVE_RECORD,
    THRESHOLDS,
    FakeLive,
    curve,
    ratio,
)

COUNTS = """\
format: 1
source: https://example.org/report
claims:
  - claim: counts
    sentence: The candidate issues one collective a parameter.
    kind: exact_count
    unit: rows
    provenance: ours
    why: A count is exact.
    limits: {npu: {exact: wrap_plan}, cuda: {exact: wrap_plan}, cpu: {exact: wrap_plan}}
    parts:
      - {evidence: T4, metric: rows_all_gather}
      - {evidence: T4, metric: rows_reduce_scatter}
"""
CURVES = """\
format: 1
source: https://example.org/report
claims:
  - claim: curves
    sentence: Losses agree.
    kind: loss_aligned
    unit: loss
    provenance: ours
    why: They should.
    limits: {npu: &cpu {at_most: 0.01, provenance: ours}, cuda: *cpu, cpu: *cpu}
    parts: [{precision: fp32}]
"""


def gauge_for(text: str, evidence: Evidence) -> Gauge:
    """A gauge on the only claim of a thresholds file."""
    thresholds = load_thresholds(parse_marked_yaml(text, name="thresholds.yaml"), name="thresholds.yaml")
    (claim,) = thresholds.claims.values()
    return Gauge(Docket(claim=claim, file=thresholds.name, evidence=evidence), meshes=frozenset())


@pytest.mark.parametrize(
    ("low", "high", "bounds", "outcome"),
    [
        (0.90, 0.94, Bounds(at_most=0.95), "holds"),
        (0.90, 0.95, Bounds(at_most=0.95), "holds"),
        (0.90, 0.96, Bounds(at_most=0.95), "inconclusive"),
        (0.96, 0.99, Bounds(at_most=0.95), "refuted"),
        (1.06, 1.08, Bounds(at_least=1.05), "holds"),
        (1.04, 1.08, Bounds(at_least=1.05), "inconclusive"),
        (1.01, 1.04, Bounds(at_least=1.05), "refuted"),
        (0.98, 1.02, Bounds(at_least=0.97, at_most=1.03), "holds"),
        (0.96, 1.02, Bounds(at_least=0.97, at_most=1.03), "inconclusive"),
        (0.90, 1.20, Bounds(at_least=0.97, at_most=1.03), "inconclusive"),
        (1.04, 1.20, Bounds(at_least=0.97, at_most=1.03), "refuted"),
        (0.90, 0.96, Bounds(at_least=0.97, at_most=1.03), "refuted"),
    ],
)
def test_an_interval_is_judged_as_a_whole(low: float, high: float, bounds: Bounds, outcome: str) -> None:
    """Wholly inside holds, wholly outside refutes, everything else is inconclusive; equivalence has two sides."""
    assert judge(low, high, bounds) == outcome


def test_a_single_bound_and_its_opposite_never_both_hold() -> None:
    """What holds as at most the bound is refuted as at least it, and the other way round, unless it is touched."""
    opposite = {"holds": "refuted", "refuted": "holds", "inconclusive": "inconclusive"}
    for low, high in itertools.combinations_with_replacement((-2.0, -1.0, 0.0, 1.0, 2.0), 2):
        for bound in (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5):
            below = judge(low, high, Bounds(at_most=bound))
            assert judge(low, high, Bounds(at_least=bound)) == opposite[below]


def test_live_evidence_holds_and_says_what_it_saw() -> None:
    """The verdict shows sentence, figures, effect with interval, limit, pairs, noise and what would have been seen."""
    gauge = gauge_for(THRESHOLDS, FakeLive(ratio(0.90, 0.88, 0.92)))
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    assert gauge.missing_parts == ()
    assert gauge.verdict.outcome == "holds"
    assert gauge.verdict.render() == (
        "candidate-faster: HOLDS on live evidence\n"
        "  The candidate is faster than native.\n"
        "\n"
        "  T4/T1  step_ms: holds\n"
        "    figures candidate  90.00 ms  step_ms  .gauge/journal.jsonl\n"
        "            native     100.00 ms  step_ms  .gauge/journal.jsonl\n"
        "    effect  0.9000 [0.8800, 0.9200]\n"
        "    pairs   12, noise 2.00 % a pair, a change of 1.50 % would have been seen\n"
        "    limit   at most 0.9500 on cpu (measured on a laptop)\n"
        "    entry   thresholds.yaml:18"
    )


def test_live_evidence_is_asked_with_limit_and_confidence() -> None:
    """What measures knows from the question when it has seen enough."""
    live = FakeLive(ratio(0.90, 0.88, 0.92))
    gauge_for(THRESHOLDS, live).assert_faster(CANDIDATE, than=NATIVE)
    (question,) = live.asked
    assert question.bounds == Bounds(at_most=0.95)
    assert (question.confidence, question.comparison, question.quantity.text) == (0.99, "ratio", "step_ms")


def test_a_refuted_part_ends_the_test_with_its_verdict() -> None:
    """The message is the whole verdict."""
    gauge = gauge_for(THRESHOLDS, FakeLive(ratio(1.02, 1.00, 1.04)))
    with pytest.raises(
        ClaimRefuted, match=r"^candidate-faster: REFUTED on live evidence\n.*\n(.*\n)*.*1\.0200 \[1\.0000"
    ):
        gauge.assert_faster(CANDIDATE, than=NATIVE)


def test_an_inconclusive_part_lets_the_test_go_on() -> None:
    """It is no refutation; how the test ends is for the plugin to say."""
    gauge = gauge_for(THRESHOLDS, FakeLive(ratio(0.95, 0.90, 1.00)))
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    assert gauge.verdict.outcome == "inconclusive"


def test_what_cannot_be_measured_is_never_a_verdict_on_the_claim() -> None:
    """The reason is told in the verdict's form, under its own outcome."""
    gauge = gauge_for(THRESHOLDS, FakeLive(NotMeasurable("rank 3 is missing from block 7")))
    with pytest.raises(ClaimNotMeasurable, match=r"NOT MEASURABLE(.*\n)*    note    rank 3 is missing from block 7$"):
        gauge.assert_faster(CANDIDATE, than=NATIVE)


def test_a_switch_that_the_engine_lacks_leaves_the_claim_undecided() -> None:
    """Neither held nor refuted: no outcome, and the reason in the note."""
    gauge = gauge_for(THRESHOLDS, FakeLive(UnsupportedSwitch("the tree of 2026-03 has no comm_fusion")))
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    assert gauge.verdict.outcome is None
    assert "the tree of 2026-03 has no comm_fusion" in gauge.verdict.render()


def test_an_undecidable_part_is_not_measured() -> None:
    """Where the device's row says so, nothing is asked."""
    live = FakeLive(device="cuda")
    gauge = gauge_for(THRESHOLDS, live)
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    assert live.asked == []
    assert gauge.verdict.parts[0].outcome == "undecidable"


def test_another_verb_than_the_claims_is_refused_with_both_names() -> None:
    """A claim that says faster is not asserted as slower, whatever the numbers."""
    gauge = gauge_for(THRESHOLDS, FakeLive())
    with pytest.raises(ThresholdError) as raised:
        gauge.assert_slower(CANDIDATE, than=NATIVE)
    assert str(raised.value) == (
        "thresholds.yaml:14: claim 'candidate-faster' has T4/T1 step_ms as faster, which assert_faster decides; "
        "the test says assert_slower"
    )


def test_operands_that_the_claim_does_not_name_are_refused() -> None:
    """The other way round is another comparison; the claim's own parts are listed."""
    gauge = gauge_for(THRESHOLDS, FakeLive())
    with pytest.raises(
        ThresholdError, match=r"no part on step_ms of native \(T1\) and candidate \(T4\).*: T4/T1 step_ms"
    ):
        gauge.assert_faster(NATIVE, than=CANDIDATE)


def test_over_and_minus_are_not_taken_for_each_other() -> None:
    """A ratio's limit says nothing about a difference, though runs and metric are the same."""
    gauge = gauge_for(THRESHOLDS.replace("kind: faster", "kind: at_most"), FakeLive(ratio(0.90, 0.88, 0.92)))
    with pytest.raises(ThresholdError, match=r"no part on step_ms of candidate \(T4\) and native \(T1\)"):
        gauge.assert_at_most("step_ms", of=CANDIDATE, minus=NATIVE)
    with pytest.raises(SpecError, match="not both"):
        gauge.assert_at_most("step_ms", of=CANDIDATE, over=NATIVE, minus=NATIVE)
    gauge.assert_at_most("step_ms", of=CANDIDATE, over=NATIVE)
    assert gauge.verdict.outcome == "holds"


def test_timed_and_profiled_runs_are_never_compared() -> None:
    """A profiler costs time: the two kinds of run have nothing to say to each other."""
    gauge = gauge_for(THRESHOLDS, FakeLive())
    with pytest.raises(SpecError, match=r"candidate \(T4\) is timed and native \(P1\) is profiled; .* never compared"):
        gauge.assert_faster(CANDIDATE, than=NATIVE.profiled)


def test_parts_that_were_not_asserted_are_named() -> None:
    """A test that asserts nothing leaves out the whole claim."""
    gauge = gauge_for(THRESHOLDS, FakeLive())
    assert gauge.missing_parts == ("T4/T1 step_ms (assert_faster, thresholds.yaml:14)",)


def test_counts_hold_where_they_follow_from_the_wrap_plan() -> None:
    """91 parameters in 10 units: 360 all-gathers and 182 reduce-scatters over two steps, as rows 360 and 364."""
    gauge = gauge_for(COUNTS, FakeLive())
    gauge.assert_counts(CANDIDATE)
    assert [part.effect.estimate for part in gauge.verdict.parts if part.effect] == [360, 364]
    assert "360 of 360 all_gather, 182 of 182 reduce_scatter, 0 of 0 all_reduce" in gauge.verdict.render()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_one_collective_too_many_refutes_the_counts(kind: str) -> None:
    """Each kind is held exactly, all-reduces too, which the report did not count."""
    right = CANDIDATE.experiment.expected_counts(steps=2)
    gauge = gauge_for(COUNTS, FakeLive(collectives={name: n + (name == kind) for name, n in right.items()}))
    with pytest.raises(ClaimRefuted, match=rf"{right[kind] + 1} of {right[kind]} {kind}"):  # type: ignore[index]
        gauge.assert_counts(CANDIDATE)


def test_losses_within_the_limit_hold_and_the_worst_step_is_shown() -> None:
    """The greatest difference decides, wherever it is."""
    curves = {"native": curve("native", (6.0, 5.5, 5.0)), "candidate": curve("candidate", (6.0, 5.505, 5.0))}
    live = FakeLive(curves=curves)
    gauge = gauge_for(CURVES, live)
    gauge.assert_loss_aligned(CANDIDATE, to=NATIVE)
    assert gauge.verdict.outcome == "holds"
    assert "loss at step 1" in gauge.verdict.render()


def test_losses_beyond_the_limit_refute() -> None:
    """A difference of 0.02 against a limit of 0.01."""
    live = FakeLive(curves={"native": curve("native", (6.0, 5.5)), "candidate": curve("candidate", (6.0, 5.52))})
    with pytest.raises(ClaimRefuted, match=r"at most 0\.01 loss"):
        gauge_for(CURVES, live).assert_loss_aligned(NATIVE, CANDIDATE, NATIVE, to=NATIVE)


def test_a_curve_that_stops_early_is_no_evidence() -> None:
    """Curves are compared whole: agreeing on the steps that both have is not agreeing."""
    live = FakeLive(curves={"native": curve("native", (6.0, 5.5)), "candidate": curve("candidate", (6.0,))})
    with pytest.raises(ClaimNotMeasurable, match=r"candidate has 1 entries and native 2: .* whole or not at all"):
        gauge_for(CURVES, live).assert_loss_aligned(CANDIDATE, to=NATIVE)


def test_a_run_that_the_engine_lacks_is_left_out_and_named() -> None:
    """The others are still compared; where none is left, nothing is decided."""
    lacking = UnsupportedSwitch("no comm_fusion in this tree")
    curves = {"native": curve("native", (6.0,)), "candidate": lacking}
    gauge = gauge_for(CURVES, FakeLive(curves=curves))
    gauge.assert_loss_aligned(NATIVE, CANDIDATE, to=NATIVE)
    assert gauge.verdict.outcome == "holds"
    assert "curves compared: 1\n            left out: candidate: no comm_fusion in this tree" in gauge.verdict.render()
    alone = gauge_for(CURVES, FakeLive(curves=curves))
    alone.assert_loss_aligned(CANDIDATE, to=NATIVE)
    assert alone.verdict.outcome is None


def test_gradient_norms_are_compared_relatively_by_parameter() -> None:
    """A thousandth of any parameter's norm is a thousandth."""
    deviation = greatest_gradient_deviation(curve("a", (1.0,), (1.0, 2002.0)), curve("b", (1.0,), (1.0, 2000.0)))
    assert deviation.amount == pytest.approx(0.001, rel=0.01)
    assert deviation.quantity == "gradient norm of norm.weight at step 1"


def test_gradients_of_other_parameters_are_no_evidence() -> None:
    """A parameter that one of two curves lacks is named."""
    one = curve("a", (1.0,))
    other = one.model_copy(update={"run": "b", "gradient_norms": {"lm_head.weight": (1.0, 2.0)}})
    with pytest.raises(NotMeasurable, match=r"lm_head.weight, norm.weight"):
        greatest_gradient_deviation(one, other)


def test_repetitions_differ_by_the_last_bit() -> None:
    """Bitwise equality has no tolerance, in losses and in gradients."""
    same, other = curve("a", (0.3, 0.2)), curve("a", (0.1 + 0.2, 0.2))
    assert greatest_deviation(same, same).amount == 0
    assert greatest_deviation(same, other).amount > 0
    assert greatest_deviation(same, curve("a", (0.3, 0.2), (1.0, 2.0 + 2**-51))).amount > 0


def test_empty_curves_are_no_evidence() -> None:
    """No step at all agrees with everything, so it is refused."""
    with pytest.raises(NotMeasurable, match="0 entries"):
        greatest_loss_deviation(curve("a", ()), curve("b", ()))


def test_recorded_figures_have_no_interval_and_say_so(tmp_path: Path) -> None:
    """Published figures are compared as given."""
    (tmp_path / "native.json").write_text(NATIVE_RECORD)
    (tmp_path / "candidate.json").write_text(CANDIDATE_RECORD)
    gauge = gauge_for(THRESHOLDS, read_records(tmp_path, shown_as="results"))
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    assert gauge.verdict.render() == (
        "candidate-faster: HOLDS on recorded evidence\n"
        "  The candidate is faster than native.\n"
        "\n"
        "  T4/T1  step_ms: holds\n"
        "    figures candidate (T4)  543.59 ms  step_ms  results/candidate.json\n"
        "            native (T1)     563.08 ms  step_ms  results/native.json\n"
        "    effect  0.9654 (no interval: published figures)\n"
        "    pairs   none: published figures\n"
        "    limit   at most 0.9825 on npu (published effect 0.965 and margin 0.0175)\n"
        "    entry   thresholds.yaml:17"
    )


def test_an_ordering_is_decided_by_its_nearest_rival() -> None:
    """The worst comparison is the one that is shown."""
    text = THRESHOLDS.replace("kind: faster", "kind: ordering").replace("T4/T1", "T4 < T1, T2")
    text = text.replace("to: 563.08", "to: [563.08, 657.88]")
    rival = Run(name="rival", experiment=NATIVE.experiment, report_id="T2")
    live = FakeLive()
    live.by_rival = {"native": ratio(0.94, 0.93, 0.945), "rival": ratio(0.90, 0.88, 0.92)}
    gauge = gauge_for(text, live)
    gauge.assert_fastest(CANDIDATE, among=[CANDIDATE, NATIVE, rival])
    assert [question.to for question in live.asked] == [NATIVE, rival]
    (part,) = gauge.verdict.parts
    assert (part.outcome, part.effect) == ("holds", live.by_rival["native"])


def test_an_ordering_is_refuted_by_one_rival() -> None:
    """Being ahead of all others but one is not being ahead, whatever the order in which they were asked."""
    text = THRESHOLDS.replace("kind: faster", "kind: ordering").replace("T4/T1", "T4 < T1, T2")
    text = text.replace("to: 563.08", "to: [563.08, 657.88]")
    rival = Run(name="rival", experiment=NATIVE.experiment, report_id="T2")
    live = FakeLive()
    live.by_rival = {"native": ratio(1.02, 1.01, 1.03), "rival": ratio(0.90, 0.88, 0.92)}
    with pytest.raises(ClaimRefuted, match=r"1\.0200 \[1\.0100, 1\.0300\]"):
        gauge_for(text, live).assert_fastest(CANDIDATE, among=[NATIVE, rival])


def test_a_verdict_survives_the_journal() -> None:
    """What is written as JSON is read back equal, and told in the same words."""
    gauge = gauge_for(THRESHOLDS, FakeLive(ratio(0.90, 0.88, 0.92)))
    gauge.assert_faster(CANDIDATE, than=NATIVE)
    again = Verdict.model_validate_json(gauge.verdict.model_dump_json())
    assert again == gauge.verdict
    assert tell_verdicts([again]) == [
        "candidate-faster  live  holds  T4/T1  0.9000 [0.8800, 0.9200], at most 0.9500",
        "1 holds (live)",
    ]


def test_fractions_are_told_as_percentages_and_their_differences_as_points() -> None:
    """0.660 - 0.798 is -13.80 pp, not -0.138."""
    text = THRESHOLDS.replace("T4/T1", "T4-T1").replace("kind: faster", "kind: at_most")
    text = text.replace("unit: ratio", "unit: fraction")
    text = text.replace("- evidence", "- metric: overlap_ratio\n        evidence")
    figure = Figure(run="a", quantity="overlap_ratio", value=0.66, unit="fraction", where="here", approximate=True)
    live = FakeLive(Effect(basis="samples", estimate=-0.138, low=-0.14, high=-0.136, figures=(figure,)))
    gauge = gauge_for(text, live)
    gauge.assert_at_most("overlap_ratio", of=CANDIDATE, minus=NATIVE)
    told = gauge.verdict.render()
    assert "-13.80 pp [-14.00 pp, -13.60 pp]" in told
    assert "~66.00 %" in told
