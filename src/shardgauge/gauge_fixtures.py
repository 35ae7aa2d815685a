"""The fixtures: `gauge`, and the evidence behind it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import cast

import pytest

from shardgauge.claims import Docket
from shardgauge.entries import Part
from shardgauge.errors import ThresholdError
from shardgauge.evidence import Evidence
from shardgauge.gauge import Gauge, is_on
from shardgauge.options import GaugeOptions
from shardgauge.recorded import RecordedEvidence, read_records
from shardgauge.thresholds import Thresholds, read_thresholds

MESH_MARKS = ("fsdp8", "hsdp24")


class CaseFiles:
    """The files that decide claims, each read once, when the first test needs it.

    `fault` is what was wrong with them when tests were collected, where the run could not be ended there.
    """

    def __init__(self, options: GaugeOptions) -> None:
        self.options = options
        self.told_by_live = ""
        """What live evidence cost, for the summary; empty where none was opened."""
        self.fault: ThresholdError | None = None

    @cached_property
    def thresholds(self) -> Thresholds:
        """The claims; a ThresholdError where the file is wrong."""
        return read_thresholds(self.options.thresholds, name=self.options.shown(self.options.thresholds))

    @cached_property
    def recorded(self) -> RecordedEvidence:
        """The recorded runs."""
        return read_records(self.options.results, shown_as=self.options.shown(self.options.results))


FILES = pytest.StashKey[CaseFiles]()
GAUGE = pytest.StashKey[Gauge]()


@pytest.fixture(scope="session")
def gauge_options(pytestconfig: pytest.Config) -> GaugeOptions:
    """What the command line asks for."""
    return pytestconfig.stash[FILES].options


@pytest.fixture(scope="session")
def live_evidence(gauge_options: GaugeOptions, pytestconfig: pytest.Config) -> Iterator[Evidence]:
    """Live evidence, opened by the first test that needs it and closed when the session ends."""
    # Imported here so that recorded claims don't pay for the statistics and the launcher.
    from shardgauge.live import open_live_evidence

    with open_live_evidence(gauge_options) as evidence:
        yield evidence
        pytestconfig.stash[FILES].told_by_live = getattr(evidence, "cost", "")


@pytest.fixture
def gauge(request: pytest.FixtureRequest) -> Gauge:
    """Decides the claim that the test is marked with, on the evidence that it is parametrized by."""
    files = request.config.stash[FILES]
    if files.fault is not None:
        raise files.fault
    claim = files.thresholds.find(claim_name(request.node))
    meshes = meshes_of(request.node)
    if request.param == "live":
        skip_undecidable([part for part in claim.parts if is_on(part, meshes)], files.options)
        evidence = cast(Evidence, request.getfixturevalue("live_evidence"))
    else:
        evidence = files.recorded
    gauge = Gauge(Docket(claim=claim, file=files.thresholds.name, evidence=evidence), meshes=meshes)
    request.node.stash[GAUGE] = gauge
    return gauge


def claim_name(item: pytest.Item) -> str:
    """The claim that a test is marked with.

    Raises:
        ThresholdError: it is marked with none, or with more than a name.
    """
    marker = item.get_closest_marker("claim")
    if marker is None or len(marker.args) != 1 or marker.kwargs or not isinstance(marker.args[0], str):
        raise ThresholdError(f'{item.nodeid} uses gauge: mark it @pytest.mark.claim("the claim\'s id")')
    return marker.args[0]


def meshes_of(item: pytest.Item) -> frozenset[str]:
    """The meshes that a test is marked with."""
    return frozenset(mark for mark in MESH_MARKS if item.get_closest_marker(mark))


def skip_undecidable(parts: list[Part], options: GaugeOptions) -> None:
    """Skip the test before anything is launched where the device can decide none of its parts."""
    reasons = [part.limits[options.device].undecidable for part in parts]
    if parts and all(reasons):
        pytest.skip(f"not decidable on {options.device}: {'; '.join(dict.fromkeys(str(reason) for reason in reasons))}")
