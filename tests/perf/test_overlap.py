"""Conclusions about where the time goes: computing, exposed communication, and how much of it is hidden."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-native")
def test_native_overlaps(gauge: Gauge, runs: Runs) -> None:
    """Native hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.native.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-default")
def test_default_hardly_overlaps(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch's default hides little of its communication behind computing on FSDP8."""
    gauge.assert_at_most("overlap_ratio", of=runs.hyper_default.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-prefetch")
def test_prefetch_overlaps(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with prefetch hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_prefetch.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-pr707")
def test_pr707_overlaps(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with prefetch and PR 707 hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_pr707.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-depth2")
def test_deeper_prefetch_overlaps(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with prefetch two layers deep in backward hides most of its communication on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_depth2.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-split")
def test_split_overlaps_less(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with norm and lm_head wrapped apart leaves a third of its communication unhidden on FSDP8."""
    gauge.assert_at_most("overlap_ratio", of=runs.hyper_split.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-fusion-prefetch")
def test_fusion_with_prefetch_overlaps(gauge: Gauge, runs: Runs) -> None:
    """comm_fusion with prefetch hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_fusion_prefetch.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-fusion-p0")
def test_fusion_with_p0_overlaps(gauge: Gauge, runs: Runs) -> None:
    """comm_fusion with prefetch and P0 hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_fusion_p0.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("overlap-fusion-p1")
def test_fusion_with_p1_overlaps(gauge: Gauge, runs: Runs) -> None:
    """comm_fusion with prefetch, P0 and P1 hides most of its communication behind computing on FSDP8."""
    gauge.assert_at_least("overlap_ratio", of=runs.hyper_fusion_p1.profiled)


@pytest.mark.hsdp24
@pytest.mark.claim("overlap-native-hsdp")
def test_native_overlaps_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """Native hides most of its communication behind computing on HSDP24."""
    gauge.assert_at_least("overlap_ratio", of=hsdp_runs.native.profiled)


@pytest.mark.hsdp24
@pytest.mark.claim("overlap-default-hsdp")
def test_default_overlaps_little_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """hyper_torch's default hides no more than a third of its communication behind computing on HSDP24."""
    gauge.assert_at_most("overlap_ratio", of=hsdp_runs.hyper_default.profiled)


@pytest.mark.hsdp24
@pytest.mark.claim("overlap-prefetch-hsdp")
def test_prefetch_overlaps_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """hyper_torch with prefetch hides over half of its communication behind computing on HSDP24."""
    gauge.assert_at_least("overlap_ratio", of=hsdp_runs.hyper_prefetch.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("split-loses-overlap")
def test_split_loses_overlap(gauge: Gauge, runs: Runs) -> None:
    """Wrapping norm and lm_head apart loses overlap and exposes more communication on FSDP8."""
    split, bound = runs.hyper_split.profiled, runs.hyper_pr707.profiled
    gauge.assert_at_most("overlap_ratio", of=split, minus=bound)
    gauge.assert_at_least("exposed_ms", of=split, minus=bound)


@pytest.mark.claim("slowness-is-not-compute")
def test_slowness_is_not_compute(gauge: Gauge, mesh_runs: Runs) -> None:
    """hyper_torch's default computes for less time than native, on FSDP8 and on HSDP24."""
    gauge.assert_faster(mesh_runs.hyper_default.profiled, than=mesh_runs.native.profiled, metric="computing_ms")


@pytest.mark.claim("slowness-is-exposed-comm")
def test_slowness_is_exposed_communication(gauge: Gauge, mesh_runs: Runs) -> None:
    """hyper_torch's default is slower than native by what it exposes of communication, less what it saves in computing.

    What remains of a stage beside the two differs by no more than 5 ms, on FSDP8 and on HSDP24.
    """
    remainder = "stage_ms - computing_ms - exposed_ms"
    default, native = mesh_runs.hyper_default.profiled, mesh_runs.native.profiled
    gauge.assert_at_most(remainder, of=default, minus=native)
    gauge.assert_at_least(remainder, of=default, minus=native)


@pytest.mark.fsdp8
@pytest.mark.claim("exposed-share")
def test_exposed_share_of_a_stage(gauge: Gauge, runs: Runs) -> None:
    """Exposed communication takes a quarter of the default's stage on FSDP8, and less than a tenth with prefetch."""
    gauge.assert_at_least("exposed_share", of=runs.hyper_default.profiled)
    for run in (runs.native, runs.hyper_prefetch, runs.hyper_pr707, runs.hyper_fusion_p1):
        gauge.assert_at_most("exposed_share", of=run.profiled)


@pytest.mark.hsdp24
@pytest.mark.claim("hsdp-residual")
def test_hsdp_still_exposes_more_than_native(gauge: Gauge, hsdp_runs: Runs) -> None:
    """With prefetch, hyper_torch still exposes more communication than native on HSDP24."""
    gauge.assert_at_least("exposed_ms", of=hsdp_runs.hyper_prefetch.profiled, minus=hsdp_runs.native.profiled)
