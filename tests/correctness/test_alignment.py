"""Conclusions about what is computed: losses and gradients agree, and repeat themselves."""

import pytest

from fixtures.engines import Runs
from shardgauge.gauge import Gauge

pytestmark = pytest.mark.correctness


@pytest.mark.claim("loss-aligned")
def test_losses_are_aligned(gauge: Gauge, mesh_runs: Runs) -> None:
    """The loss curves of all engines and switches agree with native's, on FSDP8 and on HSDP24."""
    gauge.assert_loss_aligned(*mesh_runs.hyper, mesh_runs.single, to=mesh_runs.native)


@pytest.mark.claim("gradient-aligned")
def test_gradients_are_aligned(gauge: Gauge, mesh_runs: Runs) -> None:
    """Every parameter's gradient norm agrees with native's, on FSDP8 and on HSDP24."""
    gauge.assert_gradients_aligned(*mesh_runs.hyper, mesh_runs.single, to=mesh_runs.native)


@pytest.mark.fsdp8
@pytest.mark.claim("deterministic")
def test_runs_repeat_themselves(gauge: Gauge, runs: Runs) -> None:
    """Two runs of one experiment give the same losses and gradients, bit for bit."""
    gauge.assert_deterministic(runs.native, runs.hyper_default, runs.hyper_prefetch)
