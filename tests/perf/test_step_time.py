"""Conclusions about step time: which configuration is faster than which."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge


@pytest.mark.fsdp8
@pytest.mark.claim("hyper-default-slower")
def test_hyper_default_is_slower_than_native(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch without switches is slower than native on FSDP8."""
    gauge.assert_slower(runs.hyper_default, than=runs.native)


@pytest.mark.hsdp24
@pytest.mark.claim("hyper-default-slower-hsdp")
def test_hyper_default_is_slower_than_native_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """hyper_torch without switches is slower than native on HSDP24."""
    gauge.assert_slower(hsdp_runs.hyper_default, than=hsdp_runs.native)


@pytest.mark.claim("mindspore-slower")
def test_mindspore_is_slower_than_native(gauge: Gauge, mesh_runs: Runs) -> None:
    """hyper_mindspore is slower than native, on FSDP8 and on HSDP24."""
    gauge.assert_slower(mesh_runs.mindspore, than=mesh_runs.native)


@pytest.mark.fsdp8
@pytest.mark.claim("prefetch-beats-native")
def test_prefetch_beats_native(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with prefetch is faster than native on FSDP8."""
    gauge.assert_faster(runs.hyper_prefetch, than=runs.native)


@pytest.mark.fsdp8
@pytest.mark.claim("pr707-beats-native")
def test_pr707_beats_native(gauge: Gauge, runs: Runs) -> None:
    """hyper_torch with prefetch and PR 707 is faster than native on FSDP8."""
    gauge.assert_faster(runs.hyper_pr707, than=runs.native)


@pytest.mark.claim("prefetch-is-decisive")
def test_prefetch_is_decisive(gauge: Gauge, mesh_runs: Runs) -> None:
    """Prefetch makes hyper_torch much faster than its default, on FSDP8 and on HSDP24."""
    gauge.assert_faster(mesh_runs.hyper_prefetch, than=mesh_runs.hyper_default)


@pytest.mark.hsdp24
@pytest.mark.claim("prefetch-matches-native-hsdp")
def test_prefetch_matches_native_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """hyper_torch with prefetch is as fast as native on HSDP24."""
    gauge.assert_equivalent(hsdp_runs.hyper_prefetch, to=hsdp_runs.native)


@pytest.mark.fsdp8
@pytest.mark.claim("pr707-not-slower")
def test_pr707_is_not_slower(gauge: Gauge, runs: Runs) -> None:
    """PR 707 does not slow prefetch down on FSDP8."""
    gauge.assert_not_slower(runs.hyper_pr707, than=runs.hyper_prefetch)
    gauge.assert_not_slower(runs.hyper_pr707.profiled, than=runs.hyper_prefetch.profiled)


@pytest.mark.claim("fusion-alone-slower")
def test_fusion_alone_is_slower(gauge: Gauge, mesh_runs: Runs) -> None:
    """comm_fusion alone is slower than hyper_torch's default and than native, on FSDP8 and on HSDP24."""
    gauge.assert_slower(mesh_runs.hyper_fusion, than=mesh_runs.hyper_default)
    gauge.assert_slower(mesh_runs.hyper_fusion, than=mesh_runs.native)


@pytest.mark.fsdp8
@pytest.mark.claim("fusion-p0-faster")
def test_p0_makes_fusion_faster(gauge: Gauge, runs: Runs) -> None:
    """P0 makes comm_fusion with prefetch faster on FSDP8."""
    gauge.assert_faster(runs.hyper_fusion_p0.profiled, than=runs.hyper_fusion_prefetch.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("fusion-p1-not-slower")
def test_p1_is_not_slower(gauge: Gauge, runs: Runs) -> None:
    """P1 on top of P0 does not slow comm_fusion with prefetch down on FSDP8."""
    gauge.assert_not_slower(runs.hyper_fusion_p1.profiled, than=runs.hyper_fusion_p0.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("fusion-p1-matches-native")
def test_p1_matches_native(gauge: Gauge, runs: Runs) -> None:
    """comm_fusion with prefetch, P0 and P1 is as fast as native on FSDP8."""
    gauge.assert_equivalent(runs.hyper_fusion_p1.profiled, to=runs.native.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("prefetch-beats-fusion")
def test_prefetch_beats_fusion(gauge: Gauge, runs: Runs) -> None:
    """Prefetch without comm_fusion is faster than comm_fusion with prefetch, P0 and P1 on FSDP8."""
    gauge.assert_faster(runs.hyper_prefetch.profiled, than=runs.hyper_fusion_p1.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("best-config")
def test_pr707_with_prefetch_is_the_fastest(gauge: Gauge, runs: Runs) -> None:
    """Prefetch with PR 707 is the fastest of all timed FSDP8 runs."""
    gauge.assert_fastest(runs.hyper_pr707, among=runs.timed_by_the_report)


@pytest.mark.fsdp8
@pytest.mark.claim("depth-no-gain")
def test_deeper_prefetch_brings_nothing(gauge: Gauge, runs: Runs) -> None:
    """Prefetching two layers in backward instead of one brings nothing on FSDP8."""
    gauge.assert_equivalent(runs.hyper_depth2.profiled, to=runs.hyper_prefetch.profiled)


@pytest.mark.fsdp8
@pytest.mark.claim("split-slower")
def test_split_is_slower(gauge: Gauge, runs: Runs) -> None:
    """Wrapping norm and lm_head apart makes the step slower on FSDP8."""
    split, bound = runs.hyper_split.profiled, runs.hyper_pr707.profiled
    gauge.assert_slower(split, than=bound)
    gauge.assert_at_least("stage_ms", of=split, minus=bound)


@pytest.mark.fsdp8
@pytest.mark.hsdp24
@pytest.mark.claim("fsdp-beats-hsdp")
def test_fsdp_beats_hsdp(gauge: Gauge, runs: Runs, hsdp_runs: Runs) -> None:
    """FSDP8 is faster than HSDP24 with every engine."""
    gauge.assert_faster(runs.native, than=hsdp_runs.native)
    gauge.assert_faster(runs.hyper_default, than=hsdp_runs.hyper_default)
    gauge.assert_faster(runs.mindspore, than=hsdp_runs.mindspore)
    gauge.assert_faster(runs.hyper_prefetch, than=hsdp_runs.hyper_prefetch)
