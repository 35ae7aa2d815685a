"""Which engine an experiment's name stands for."""

from __future__ import annotations

from shardgauge.errors import UnsupportedSwitch
from shardgauge.spec import Experiment
from shardgauge.worker.engines import Engine


def find_engine(experiment: Experiment, hyper_source: str | None) -> Engine:
    """The engine of `experiment`; only the one that is asked for is imported.

    Raises:
        UnsupportedSwitch: the engine has no implementation on this platform.
    """
    if experiment.engine == "native":
        from shardgauge.worker.engines.native import NativeEngine

        return NativeEngine()
    if experiment.engine == "single":
        from shardgauge.worker.engines.single import SingleEngine

        return SingleEngine()
    if experiment.engine == "reference":
        from shardgauge.worker.engines.reference import ReferenceEngine

        return ReferenceEngine()
    if experiment.engine == "hyper_torch":
        from shardgauge.worker.engines.hyper_torch import HyperTorchEngine

        return HyperTorchEngine(experiment.source or hyper_source)
    raise UnsupportedSwitch(
        f"engine {experiment.engine} has no live implementation here: its published figures are decided on recorded "
        "evidence (pytest tests/perf -m recorded)"
    )
