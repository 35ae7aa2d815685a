"""The hyper_torch engine on 4 gloo ranks, against one process that shards nothing.

The tests run on a stand-in for later trees, and on the real tree that SHARDGAUGE_HYPER_SRC names.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from hyper_ranks import SCENARIOS, STEPS, experiment_of, train_plainly  # noqa: E402 -- found by the line above

WORLD = 4
DEADLINE_S = 300
GIVEN = os.environ.get("SHARDGAUGE_HYPER_SRC")
TREES = [
    pytest.param(str(HERE / "later_tree"), id="later-stand-in"),
    pytest.param(
        str(GIVEN),
        id="given",
        marks=pytest.mark.skipif(
            GIVEN is None,
            reason="no real tree: set SHARDGAUGE_HYPER_SRC to a checkout of hyper_parallel (2026-03 or later)",
        ),
    ),
]
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=TREES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What every rank saw of every scenario."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(HERE / "hyper_ranks.py"), request.param, str(directory)]
    logs = [directory / f"rank{rank}.log" for rank in range(WORLD)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            ranks.append(subprocess.Popen([*command, str(rank), str(WORLD)], stdout=output, stderr=output))
    try:
        codes = wait_for(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * WORLD, "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def wait_for(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all have ended, or one has failed: the others would wait for it until their own deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.1)


@functools.cache
def reference(size: int, precision: str) -> dict[str, Any]:
    """Losses and gradients without sharding; they depend on neither switches nor on how the mesh is laid out."""
    torch.set_num_threads(1)
    by_key = {(experiment_of(n).mesh.size, experiment_of(n).precision): n for n in SCENARIOS}
    return train_plainly(by_key[size, precision])


def members(name: str) -> range:
    """The ranks that train in a scenario."""
    return range(experiment_of(name).mesh.size)


@pytest.mark.parametrize("name", SCENARIOS)
def test_losses_equal_those_without_sharding(seen: Seen, name: str) -> None:
    """Each rank's loss at each of the AdamW steps is the one that an unsharded model has on that rank's batch."""
    expected = reference(len(members(name)), experiment_of(name).precision)["losses"]
    for rank in members(name):
        assert seen[rank][name]["losses"] == pytest.approx(expected[rank], abs=1e-5)


@pytest.mark.parametrize("name", SCENARIOS)
def test_local_gradients_are_shards_of_the_average(seen: Seen, name: str) -> None:
    """The squares of all shards add up to those of the averaged gradient, parameter by parameter, step by step."""
    expected = reference(len(members(name)), experiment_of(name).precision)["squares"]
    replicas = experiment_of(name).mesh.replicate
    for step in range(STEPS):
        shards = [seen[rank][name]["squares"][step] for rank in members(name)]
        total = {parameter: sum(shard[parameter] for shard in shards) / replicas for parameter in shards[0]}
        assert total == pytest.approx(expected[step], rel=1e-4)


@pytest.mark.parametrize("name", SCENARIOS)
def test_collectives_are_those_of_the_plan(seen: Seen, name: str) -> None:
    """Every rank issues the plan's counts in every step, whatever is prefetched."""
    expected = experiment_of(name).expected_counts(steps=1)
    for rank in members(name):
        assert seen[rank][name]["counts"] == [expected] * STEPS


@pytest.mark.parametrize(
    ("name", "alike"),
    [("unshard_first", "plain"), ("prefetch_first", "plain"), ("deep", "plain"), ("hsdp_prefetch", "hsdp")],
)
def test_prefetch_and_order_leave_losses_bitwise_unchanged(seen: Seen, name: str, alike: str) -> None:
    """When a gather starts changes no number."""
    for rank in range(WORLD):
        assert seen[rank][name]["losses"] == seen[rank][alike]["losses"]


@pytest.mark.parametrize(
    ("name", "first", "second"), [("unshard_first", "unshard", "prefetch"), ("prefetch_first", "prefetch", "unshard")]
)
@pytest.mark.parametrize(
    ("phase", "here", "next_one"), [("pre_forward", "layers.3", "layers.4"), ("pre_backward", "layers.3", "layers.2")]
)
def test_hooks_run_in_the_order_that_is_asked_for(
    seen: Seen, name: str, first: str, second: str, phase: str, here: str, next_one: str
) -> None:
    """A unit's own gather and its neighbour's follow each other as hook_order says, in both directions."""
    target = {"unshard": here, "prefetch": next_one}
    ranges = seen[0][name]["ranges"][1]
    begin = ranges.index(f"{phase} {first}:{target[first]}")
    assert ranges[begin + 1] == f"{phase} {second}:{target[second]}"


@pytest.mark.parametrize("name", ["plain", "unshard_first", "prefetch_first", "split"])
def test_every_range_of_a_unit_is_opened_and_none_twice(seen: Seen, name: str) -> None:
    """Trees with and without ranges of their own come out alike, from the first step on."""
    experiment = experiment_of(name)
    names = [unit.name for unit in experiment.units]
    expected = {f"pre_forward unshard:{unit}" for unit in names} | {f"post_backward:{unit}" for unit in names}
    expected |= {f"forward reshard:{unit}" for unit in names[:-1]}
    expected |= {f"pre_backward unshard:{unit}" for unit in names[:-1]}
    if experiment.switches.forward_prefetch:
        expected |= {f"pre_forward prefetch:{unit}" for unit in names[1:]}
        expected |= {f"pre_backward prefetch:{unit}" for unit in names[:-1]}
    for opened in seen[0][name]["ranges"]:
        of_units = [label for label in opened if label.split(":")[1] in names and "root_backward" not in label]
        assert set(of_units) == expected
        # A tree without lists of modules wraps norm and lm_head apart: two hooks under the unit's one name.
        assert all(of_units.count(label) == 1 for label in of_units if not label.endswith(":norm"))


def test_ranks_outside_the_mesh_do_not_train(seen: Seen) -> None:
    """On a mesh of 2 in a session of 4, ranks 2 and 3 hold no model."""
    assert [len(seen[rank]["submesh"]["losses"]) for rank in range(WORLD)] == [STEPS, STEPS, 0, 0]


def test_arms_in_turns_train_as_if_alone(seen: Seen) -> None:
    """A step leaves nothing behind in the tree that another model's step would find."""
    for rank in range(WORLD):
        assert seen[rank]["in_turns"] == {name: seen[rank][name]["losses"] for name in seen[rank]["in_turns"]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_closing_frees_the_model(seen: Seen, name: str) -> None:
    """Nothing of ours or of the tree's holds on to a closed model."""
    assert all(seen[rank][name]["freed"] for rank in range(WORLD))


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_model_finds_the_sizes_of_one_before_it(seen: Seen, name: str) -> None:
    """What the tree caches by identity is at most this model's own, its root included."""
    units = len(experiment_of(name).units) + 1
    assert all(cached <= units for rank in members(name) for cached in seen[rank][name]["cached_units"])


def test_comm_fusion_is_served_or_refused(seen: Seen) -> None:
    """A tree that has comm_fusion issues one collective a unit; one that has not is named in the error."""
    fused = seen[0]["fused"]
    if "refused" in fused:
        assert "comm_fusion" in fused["refused"]
        assert "fully_shard(module, mesh" in fused["refused"]
        assert str(GIVEN) in fused["refused"]
        return
    assert fused["counts"] == [{"all_gather": 19, "reduce_scatter": 10, "all_reduce": 0}] * STEPS
    assert fused["losses"] == pytest.approx(seen[0]["plain"]["losses"], abs=1e-5)
