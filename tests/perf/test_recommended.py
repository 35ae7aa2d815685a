"""The conclusion that sums the others up: which configuration to choose for which purpose."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge


@pytest.mark.fsdp8
@pytest.mark.claim("recommended-config")
def test_recommended_configurations(gauge: Gauge, runs: Runs) -> None:
    """For each scenario, the configuration that the report recommends is the fastest or closest to native's counts.

    On FSDP8, prefetch with PR 707 is the fastest, and fusion with P0 and P1 the fastest that has native's counts.
    """
    gauge.assert_fastest(runs.hyper_pr707, among=runs.timed_by_the_report)
    with_native_counts = (runs.hyper_fusion_prefetch, runs.hyper_fusion_p0, runs.hyper_fusion_p1)
    recommended = runs.hyper_fusion_p1.profiled
    for rows in ("rows_all_gather", "rows_reduce_scatter"):
        gauge.assert_equivalent(recommended, to=runs.native.profiled, metric=rows)
    gauge.assert_fastest(recommended, among=[run.profiled for run in with_native_counts])


@pytest.mark.hsdp24
@pytest.mark.claim("recommended-config")
def test_recommended_configuration_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """For each scenario, the configuration that the report recommends is the fastest or closest to native's counts.

    On HSDP24, prefetch draws level with native and is ahead of everything else.
    """
    gauge.assert_fastest(hsdp_runs.hyper_prefetch, among=hsdp_runs.timed_by_the_report)
