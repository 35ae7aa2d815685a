"""The conclusion about how many collectives a step takes."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge


@pytest.mark.fsdp8
@pytest.mark.claim("collective-counts")
def test_collective_counts(gauge: Gauge, runs: Runs) -> None:
    """Native and fused engines issue one collective a unit, the others one a parameter, whatever the other switches.

    A unit is gathered twice, the last one once: 38 all-gathers and 20 reduce-scatters over two steps, or 360 and 182.
    """
    fused = (runs.hyper_fusion_prefetch, runs.hyper_fusion_p0, runs.hyper_fusion_p1)
    per_parameter = (runs.hyper_default, runs.hyper_prefetch, runs.hyper_pr707, runs.hyper_depth2, runs.hyper_split)
    for run in (runs.native, *fused, *per_parameter):
        gauge.assert_counts(run.profiled)
    for rows in ("rows_all_gather", "rows_reduce_scatter"):
        gauge.assert_equivalent(runs.hyper_split.profiled, to=runs.hyper_pr707.profiled, metric=rows)


@pytest.mark.hsdp24
@pytest.mark.claim("collective-counts")
def test_collective_counts_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """Native and fused engines issue one collective a unit, the others one a parameter, whatever the other switches.

    A second mesh dimension changes neither gathers nor reduce-scatters; it adds an all-reduce to each of the latter.
    """
    for run in (hsdp_runs.native, hsdp_runs.hyper_default, hsdp_runs.hyper_prefetch):
        gauge.assert_counts(run.profiled)
