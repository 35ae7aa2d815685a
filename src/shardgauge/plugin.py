"""The pytest plugin's front door: options and markers always, everything else only where there are claims to decide."""

from __future__ import annotations

import pytest

from shardgauge.options import add_options, is_asked_for, read_options, refuse_misplaced_root

MARKERS = (
    "claim(name): the claim of thresholds.yaml that the test decides",
    "fsdp8: concerns the mesh FSDP8, eight shards",
    "hsdp24: concerns the mesh HSDP24, two replicas of four shards",
    "live: decided by measuring now",
    "recorded: decided on recorded runs",
    "correctness: concerns losses and gradients, not time",
    "gate: concerns the gate for pull requests",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the --gauge options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and the rest of the plugin where this run has claims."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if is_asked_for(config):
        # Imported here so that a project without claims pays nothing for having the plugin installed.
        from shardgauge import gauge_fixtures, suite

        files = gauge_fixtures.CaseFiles(read_options(config))
        config.stash[gauge_fixtures.FILES] = files
        config.pluginmanager.register(gauge_fixtures, "shardgauge-fixtures")
        config.pluginmanager.register(suite.GaugeSuite(files), "shardgauge-suite")
    else:
        refuse_misplaced_root(config)
