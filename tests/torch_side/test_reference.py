from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardgauge.plan import wrap_plan
from shardgauge.presets import find_preset
from tests.torch_side.reference_ranks import STEPS, scenario
from tests.torch_side.spawn import run_ranks

WORLD = 4
ENGINES = (
    "native",
    "native prefetch",
    "default",
    "prefetch",
    "pr707",
    "deep",
    "fused",
    "fused prefetch",
    "split",
    "native hsdp",
    "hsdp",
    "hsdp fused",
)
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What four ranks saw of every scenario."""
    directory = tmp_path_factory.mktemp("reference")
    return run_ranks(Path(__file__).with_name("reference_ranks.py"), directory, world=WORLD)


def losses(reports: Reports, name: str) -> list[float]:
    """The mean loss of each step."""
    members = [report[name]["steps"] for report in reports if report[name]["member"]]
    return [statistics.fmean(step["loss"] for step in ranks) for ranks in zip(*members, strict=True)]


def norms(reports: Reports, name: str) -> list[float]:
    """Every gradient norm of every step, as rank 0 has them."""
    return [norm for step in reports[0][name]["steps"] for norm in step["grad_norms"]]


def step_counts(reports: Reports, name: str) -> list[Mapping[str, int]]:
    """The last step's counts, a rank each."""
    return [report[name]["steps"][-1]["counts"] for report in reports if report[name]["member"]]


def farthest(these: list[float], those: list[float]) -> float:
    """The largest relative distance."""
    return max(abs(a - b) / abs(b) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("name", ENGINES)
def test_losses_equal_one_unsharded_process(reports: Reports, name: str) -> None:
    """Sharding, prefetch, fusion, hook order and replicas change nothing of what is learned."""
    assert losses(reports, name) == pytest.approx(losses(reports, "single"), abs=1e-5)
    assert farthest(norms(reports, name), norms(reports, "single")) < 2e-5


def test_losses_fall(reports: Reports) -> None:
    """There is something to compare: the model learns."""
    assert losses(reports, "single")[-1] < losses(reports, "single")[0] - 0.01


def test_bf16_equals_one_unsharded_process(reports: Reports) -> None:
    """Mixed precision too: bf16 in computing, fp32 in reducing and in the masters."""
    assert losses(reports, "bf16") == pytest.approx(losses(reports, "bf16 single"), abs=1e-4)
    assert losses(reports, "bf16") != losses(reports, "default")


@pytest.mark.parametrize("name", ["prefetch", "pr707", "deep"])
def test_prefetch_changes_no_bit(reports: Reports, name: str) -> None:
    """Only when a collective is issued changes, not what it carries."""
    for report in reports:
        assert report[name]["sha256"] == report["default"]["sha256"]


def test_a_second_run_is_the_same_to_the_bit(reports: Reports) -> None:
    """Same experiment, same parameters."""
    for report in reports:
        assert report["again"]["sha256"] == report["default"]["sha256"]


@pytest.mark.parametrize("name", [*ENGINES, "half"])
def test_counts_follow_from_the_wrap_plan(reports: Reports, name: str) -> None:
    """Every rank issues what the plan says, in every step."""
    expected = scenario(name, WORLD).expected_counts(steps=1)
    assert step_counts(reports, name) == [expected] * len(step_counts(reports, name))


def test_a_mesh_of_half_the_ranks_leaves_the_others_idle(reports: Reports) -> None:
    """Ranks outside the mesh take part in nothing."""
    assert [report["half"]["member"] for report in reports] == [True, True, False, False]


UNITS = [unit.name for unit in wrap_plan(find_preset("qwen3-nano"), split_last_unit=False)]
REQUIRED_RANGES = {
    *(f"pre_forward unshard:{unit}" for unit in UNITS),
    *(f"forward reshard:{unit}" for unit in UNITS[:-1]),
    *(f"pre_backward unshard:{unit}" for unit in UNITS),
    *(f"post_backward:{unit}" for unit in UNITS),
}
PREFETCH_RANGES = {
    *(f"pre_forward prefetch:{unit}" for unit in UNITS[1:]),
    *(f"pre_backward prefetch:{unit}" for unit in UNITS[:-1]),
}


@pytest.mark.parametrize("name", ["native", "native prefetch", "default", "prefetch", "pr707"])
def test_engines_open_the_same_ranges(reports: Reports, name: str) -> None:
    """A profile of any engine can be read by the same names."""
    ranges = set(reports[0][name]["ranges"])
    assert ranges >= REQUIRED_RANGES
    if "prefetch" in name or name == "pr707":
        assert ranges >= PREFETCH_RANGES


def test_hook_order_decides_which_comes_first(reports: Reports) -> None:
    """The older order queues the next unit before it waits for its own; PR 707 turns that round."""
    for name, first in (("prefetch", "pre_forward prefetch:layers.0"), ("pr707", "pre_forward unshard:tok_embeddings")):
        assert next(r for r in reports[0][name]["ranges"] if r.startswith("pre_forward")) == first


def test_lost_prefetch_opens_no_prefetch_range(reports: Reports) -> None:
    """Forward and backward are lost apart; the other stays."""
    for lost, kept in (("forward", "backward"), ("backward", "forward")):
        ranges = reports[0][f"lost {lost} prefetch"]["ranges"]
        assert not [r for r in ranges if r.startswith(f"pre_{lost} prefetch")]
        assert [r for r in ranges if r.startswith(f"pre_{kept} prefetch")]


def test_doubled_all_gather_is_counted(reports: Reports) -> None:
    """One layer's 11 parameters are gathered twice, forward and backward."""
    expected = scenario("default", WORLD).expected_counts(steps=1)
    assert step_counts(reports, "doubled all-gather")[0]["all_gather"] == expected["all_gather"] + 2 * 11


def test_dropped_reduce_scatter_is_counted_and_seen_in_gradients(reports: Reports) -> None:
    """One layer's 11 reductions are missing, and its gradients are wrong."""
    expected = scenario("default", WORLD).expected_counts(steps=1)
    assert step_counts(reports, "dropped reduce-scatter")[0]["reduce_scatter"] == expected["reduce_scatter"] - 11
    assert farthest(norms(reports, "dropped reduce-scatter"), norms(reports, "default")) > 1e-2


def test_scaled_gradient_is_seen_in_gradient_norms_and_not_in_losses(reports: Reports) -> None:
    """Adam forgives a scale, so losses alone would pass it: this is why gradients are compared."""
    assert farthest(norms(reports, "scaled gradient"), norms(reports, "default")) == pytest.approx(1e-3, rel=0.1)
    assert losses(reports, "scaled gradient") == pytest.approx(losses(reports, "default"), abs=1e-5)


def test_nondeterminism_changes_bits(reports: Reports) -> None:
    """Noise in the gradients is seen in the parameters."""
    assert reports[0]["nondeterminism"]["sha256"] != reports[0]["default"]["sha256"]


def test_nan_is_reported_as_not_finite(reports: Reports) -> None:
    """Rank 1's loss at step 2; what follows is poisoned on all ranks."""
    assert [step["loss"] is None for step in reports[1]["nan"]["steps"]] == [False, False, True, True]
    assert reports[0]["nan"]["steps"][2]["loss"] is not None
    assert reports[0]["nan"]["steps"][3]["loss"] is None


def test_delay_and_pile_up_take_their_time(reports: Reports) -> None:
    """A step lasts at least what its hook sleeps; a pile-up sleeps longer each step."""
    delayed = [step["duration_ns"] for step in reports[0]["delay"]["steps"]]
    assert min(delayed) >= 150e6
    piled = reports[0]["hook pile-up"]["steps"]
    assert all(step["duration_ns"] >= 60e6 * index for index, step in enumerate(piled))


def test_serialised_communication_leaves_the_numbers_alone(reports: Reports) -> None:
    """It is a fault of time only: its overlap is judged live."""
    assert reports[0]["serialised"]["sha256"] == reports[0]["default"]["sha256"]


def test_a_rank_told_to_raise_raises(reports: Reports) -> None:
    """All of them, at the step that was named."""
    assert [report["raising"]["raised"] for report in reports] == [
        f"rank {rank} was told to raise at step 0" for rank in range(WORLD)
    ]


def test_closed_arms_leave_nothing_behind(reports: Reports) -> None:
    """A session serves dozens of arms: not one parameter of any engine outlives its arm."""
    assert [report["parameters left"]["count"] for report in reports] == [0] * WORLD


def test_every_record_is_whole(reports: Reports) -> None:
    """All steps, in order, with finite durations."""
    for report in reports:
        steps = report["default"]["steps"]
        assert [step["step"] for step in steps] == list(range(STEPS))
        assert all(math.isfinite(step["duration_ns"]) for step in steps)
