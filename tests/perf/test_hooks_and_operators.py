"""Conclusions about single hooks and operators: what PR 707, the split, P0 and P1 change, and where the tail lies."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge

TAIL = "hook_ms:post_backward:norm"
LM_HEAD = "hook_ms:post_backward:lm_head"
LAYER_7 = "hook_ms:post_backward:layers.7"
OTHER_LAYERS = "hook_ms:post_backward:layers.*"
PREFETCH_LAYER_7 = "hook_ms:pre_backward prefetch:layers.7"
FIRST_UNSHARD = "hook_ms:unshard:tok_embeddings"
SPLIT_COPY = "operator_ms:split_with_sizes_copy"


@pytest.mark.fsdp8
@pytest.mark.claim("pr707-shortens-first-unshard")
def test_pr707_shortens_the_first_unshard(gauge: Gauge, runs: Runs) -> None:
    """PR 707 shortens the first unshard's device time on FSDP8."""
    gauge.assert_faster(runs.hyper_pr707.profiled, than=runs.hyper_prefetch.profiled, metric=FIRST_UNSHARD)


@pytest.mark.fsdp8
@pytest.mark.claim("split-costs-in-reduce-scatter")
def test_split_costs_in_reduce_scatter(gauge: Gauge, runs: Runs) -> None:
    """Two reduce-scatters of norm and lm_head cost more than the one of both, and layers.7 waits longer, on FSDP8."""
    split, bound = runs.hyper_split.profiled, runs.hyper_pr707.profiled
    gauge.assert_at_least(f"{TAIL} + {LM_HEAD}", of=split, over=bound, other_metric=TAIL)
    gauge.assert_at_least(LAYER_7, of=split, over=bound)


@pytest.mark.fsdp8
@pytest.mark.claim("tail-hook")
def test_the_tail_is_the_largest_hook(gauge: Gauge, runs: Runs) -> None:
    """post_backward:norm takes more device time than any other hook on FSDP8, and prefetch cuts it."""
    prefetch = runs.hyper_prefetch.profiled
    gauge.assert_faster(prefetch, than=runs.hyper_default.profiled, metric=TAIL)
    others = {
        runs.hyper_default: (LAYER_7, OTHER_LAYERS),
        runs.hyper_prefetch: (PREFETCH_LAYER_7, LAYER_7, OTHER_LAYERS, FIRST_UNSHARD),
        runs.hyper_pr707: (PREFETCH_LAYER_7, LAYER_7, OTHER_LAYERS, FIRST_UNSHARD),
        runs.hyper_fusion_p1: (PREFETCH_LAYER_7, OTHER_LAYERS),
    }
    for run, hooks in others.items():
        for hook in hooks:
            gauge.assert_at_least(TAIL, of=run.profiled, over=run.profiled, other_metric=hook)


@pytest.mark.fsdp8
@pytest.mark.claim("fixed-tail-prefetch")
def test_the_last_layers_prefetch_is_a_fixed_tail(gauge: Gauge, runs: Runs) -> None:
    """pre_backward prefetch:layers.7 takes about 107 ms whatever the hook order, the split or fusion, on FSDP8."""
    for run in (runs.hyper_pr707, runs.hyper_split, runs.hyper_fusion_p1):
        gauge.assert_equivalent(run.profiled, to=runs.hyper_prefetch.profiled, metric=PREFETCH_LAYER_7)


@pytest.mark.hsdp24
@pytest.mark.claim("hsdp-layer7")
def test_prefetch_relieves_layer_7_on_hsdp(gauge: Gauge, hsdp_runs: Runs) -> None:
    """Prefetch cuts the device time of post_backward:layers.7 on HSDP24."""
    gauge.assert_faster(hsdp_runs.hyper_prefetch.profiled, than=hsdp_runs.hyper_default.profiled, metric=LAYER_7)


@pytest.mark.fsdp8
@pytest.mark.claim("no-split-copy")
def test_p1_removes_split_copies(gauge: Gauge, runs: Runs) -> None:
    """P1 removes split_with_sizes_copy, and P0 cuts aten::copy_, on FSDP8."""
    before, p0, p1 = (run.profiled for run in (runs.hyper_fusion_prefetch, runs.hyper_fusion_p0, runs.hyper_fusion_p1))
    gauge.assert_at_most(SPLIT_COPY, of=p1)
    gauge.assert_at_most(SPLIT_COPY, of=p1, minus=before)
    gauge.assert_faster(p0, than=before, metric="operator_ms:aten::copy_")
