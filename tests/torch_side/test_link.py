from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgauge.presets import LinkSpec
from shardgauge.worker.arena import LARGEST_REGION_BYTES
from shardgauge.worker.link import Link
from tests.torch_side.spawn import run_ranks

WORLD = 4
TRANSFER_NS = 20_000_000


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks saw."""
    return run_ranks(Path(__file__).with_name("link_ranks.py"), tmp_path_factory.mktemp("link"), world=WORLD)


def test_collectives_give_the_right_numbers(reports: list[dict[str, Any]]) -> None:
    """Gather, reduce-scatter and all-reduce, small and larger than the arena, many in flight and out of order."""
    assert [report["wrong"] for report in reports] == [[]] * WORLD


def test_collectives_are_tallied_once_each(reports: list[dict[str, Any]]) -> None:
    """Three sizes: one gather, two reduce-scatters and one all-reduce each, and the MAX all-reduce."""
    assert [report["counts"] for report in reports] == [{"all_gather": 3, "reduce_scatter": 6, "all_reduce": 4}] * WORLD


def test_bytes_are_those_of_the_full_tensor(reports: list[dict[str, Any]]) -> None:
    """A reduce-scatter counts its input, as a gather counts its output; 4 bytes an element."""
    sizes = (8, 1000 * WORLD, LARGEST_REGION_BYTES // 4 + WORLD)
    expected = {
        "all_gather": sum(4 * WORLD * size for size in sizes),
        "reduce_scatter": sum(2 * 4 * (size // WORLD * WORLD) for size in sizes),
        "all_reduce": sum(4 * size for size in sizes) + 4 * 8,
    }
    assert [report["payload_bytes"] for report in reports] == [expected] * WORLD


def test_waiting_exposes_the_transfer(reports: list[dict[str, Any]]) -> None:
    """Two transfers take twice one's time, since the link is serialised, and a rank that waits sits through both."""
    for report in reports:
        waited = report["clock"]["waited"]
        assert waited["transfer_ns"] >= 2 * TRANSFER_NS
        assert waited["exposed_ns"] > 0.9 * waited["transfer_ns"]
        assert waited["elapsed_s"] >= 2 * TRANSFER_NS * 1e-9


def test_computing_hides_the_transfer(reports: list[dict[str, Any]]) -> None:
    """A rank that computes for longer than the transfers take waits through none of them."""
    for report in reports:
        hidden = report["clock"]["hidden"]
        assert hidden["transfer_ns"] >= 2 * TRANSFER_NS
        assert hidden["exposed_ns"] == 0


def test_a_missing_peer_is_named(reports: list[dict[str, Any]]) -> None:
    """A rank whose peer stays away says which, of what, after how long."""
    assert "group rank 1 did not join collective 0 within 1 s" in reports[0]["missing"]


@pytest.mark.usefixtures("reports")
def test_no_shared_memory_file_is_left() -> None:
    """The arena's file has no name once every rank has mapped it."""
    assert not glob.glob("/dev/shm/shardgauge-arena-*")  # noqa: PTH207, S108 -- the very folder that must be clean


@given(
    gaps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=8),
    pauses=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=8),
)
def test_exposed_time_is_the_overlap_of_transfers_and_waits(
    gaps: list[tuple[int, int]], pauses: list[tuple[int, int]]
) -> None:
    """Against counting nanosecond by nanosecond."""

    def lay_out(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        intervals, now = [], 0
        for gap, length in pieces:
            intervals.append((now + gap, now + gap + length))
            now += gap + length
        return intervals

    transfers, waits = lay_out(gaps), lay_out(pauses)
    link = Link()
    link._transfers.extend(transfers)
    for wait in waits:
        link.note_wait(*wait)
    busy = {ns for begin, end in transfers for ns in range(begin, end)}
    waiting = {ns for begin, end in waits for ns in range(begin, end)}
    use = link.use()
    assert (use.transfer_ns, use.exposed_ns, use.waited_ns) == (len(busy), len(busy & waiting), len(waiting))


def test_transfer_time_is_latency_plus_bytes_over_bandwidth() -> None:
    """1 Gbit/s moves a byte in 8 ns."""
    assert LinkSpec(latency_us=100, bandwidth_gbit_s=1).transfer_ns(1_000) == 108_000
