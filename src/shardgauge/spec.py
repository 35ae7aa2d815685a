"""What to run: an experiment is engine, source, switches, model, mesh, precision and length, and has a digest."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError

from shardgauge.boundary import Boundary, explain_validation
from shardgauge.errors import SpecError
from shardgauge.plan import CollectiveKind, WrapUnit, collective_counts, wrap_plan
from shardgauge.presets import LinkSpec, Preset, find_preset

EngineName = Literal["native", "hyper_torch", "hyper_mindspore", "reference", "single"]
DeviceName = Literal["npu", "cuda", "cpu"]
HookOrder = Literal["unshard_first", "prefetch_first"]
Precision = Literal["bf16", "fp32"]
FaultKind = Literal[
    "delay",
    "lost_forward_prefetch",
    "lost_backward_prefetch",
    "doubled_all_gather",
    "dropped_reduce_scatter",
    "serialised_communication",
    "scaled_gradient",
    "hook_pile_up",
    "nan_loss",
    "nondeterminism",
    "dead_rank",
    "hung_rank",
    "raising_rank",
]


class Mesh(Boundary):
    """(shard,) for FSDP, (replicate, shard) for HSDP; rank = replicate index * shard size + shard index."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1, max_length=2)]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    @property
    def shard(self) -> int:
        """Number of ranks that one parameter is sharded over."""
        return self.shape[-1]

    @property
    def replicate(self) -> int:
        """Number of replicas of each shard; 1 for FSDP."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def name(self) -> str:
        """fsdp8, hsdp24 and so on; sizes past 9 are joined with an x (hsdp2x16)."""
        kind = "fsdp" if len(self.shape) == 1 else "hsdp"
        joint = "" if all(extent < 10 for extent in self.shape) or len(self.shape) == 1 else "x"
        return kind + joint.join(str(extent) for extent in self.shape)


def parse_mesh(text: str) -> Mesh:
    """Read `fsdp8`, `hsdp24` or `hsdp2x16`.

    Raises:
        SpecError: the text names no mesh.
    """
    if match := re.fullmatch(r"fsdp([1-9]\d*)", text.lower()):
        return Mesh(shape=(int(match[1]),))
    if match := re.fullmatch(r"hsdp(?:([1-9])([1-9])|([1-9]\d*)x([1-9]\d*))", text.lower()):
        return Mesh(shape=tuple(int(extent) for extent in match.groups() if extent))
    raise SpecError(f"unknown mesh {text!r}; write fsdp8, hsdp24 (2 replicas of 4 shards) or hsdp2x16")


class Switches(Boundary):
    """The report's switches. Depths are in wrap units; 0 is no prefetch."""

    forward_prefetch: Annotated[int, Field(ge=0)] = 0
    backward_prefetch: Annotated[int, Field(ge=0)] = 0
    comm_fusion: bool = False
    hook_order: HookOrder = "prefetch_first"
    split_last_unit: bool = False

    def describe(self) -> str:
        """A few words for messages: `prefetch 1/1, unshard-first`, or `no switches`."""
        words = []
        if self.forward_prefetch or self.backward_prefetch:
            words.append(f"prefetch {self.forward_prefetch}/{self.backward_prefetch}")
        if self.hook_order == "unshard_first":
            words.append("unshard-first (PR 707)")
        if self.comm_fusion:
            words.append("comm_fusion")
        if self.split_last_unit:
            words.append("norm and lm_head split")
        return ", ".join(words) or "no switches"


class Fault(Boundary):
    """A fault that the reference engine can be told to have, to prove that a check sees it.

    `amount` is ms a step for delay and hook_pile_up, a factor for scaled_gradient. `step` counts from 0 and says from
    which step on; nan_loss, dead_rank, hung_rank and raising_rank bite at that step only. `rank` None is every rank;
    `unit` names the wrap unit, None being every unit.
    """

    kind: FaultKind
    amount: float = 0.0
    step: Annotated[int, Field(ge=0)] = 0
    rank: int | None = None
    unit: str | None = None


class Experiment(Boundary):
    """One immutable training run to measure."""

    engine: EngineName
    source: str | None = None
    switches: Switches = Switches()
    preset: str = "qwen3-nano"
    mesh: Mesh = Mesh(shape=(8,))
    data_ranks: int | None = None
    precision: Precision = "bf16"
    link: LinkSpec | None = None
    seed: int = 42
    faults: tuple[Fault, ...] = ()

    @property
    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of the experiment's JSON: equal digests, equal experiments."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    @property
    def model_preset(self) -> Preset:
        """The preset's sizes."""
        return find_preset(self.preset)

    @property
    def data_parallel(self) -> int:
        """Number of sequences in the global batch, in units of the preset's batch; `single` runs them all itself."""
        return self.data_ranks or self.mesh.size

    @property
    def fused(self) -> bool:
        """Whether one collective carries a whole unit."""
        return self.engine == "native" or self.switches.comm_fusion

    @property
    def units(self) -> tuple[WrapUnit, ...]:
        """The wrap plan."""
        return wrap_plan(self.model_preset, split_last_unit=self.switches.split_last_unit)

    def expected_counts(self, *, steps: int) -> dict[CollectiveKind, int]:
        """Collectives that each rank must issue over `steps` steps, from the wrap plan."""
        counts = collective_counts(self.units, fused=self.fused, replicated=self.mesh.replicate > 1, steps=steps)
        return dict(counts)

    def describe(self) -> str:
        """engine, mesh, switches, preset and precision in one line."""
        where = f" from {self.source}" if self.source else ""
        faults = f", FAULTS {', '.join(fault.kind for fault in self.faults)}" if self.faults else ""
        return (
            f"{self.engine}{where} {self.mesh.name} ({self.switches.describe()}) {self.preset} {self.precision}{faults}"
        )


def build_experiment(**fields: object) -> Experiment:
    """An `Experiment` whose faults are worded for a user.

    Raises:
        SpecError: a field is unknown, of the wrong type or out of range, or names no preset or engine.
    """
    try:
        experiment = Experiment.model_validate(fields)
    except ValidationError as error:
        engines = ", ".join(get_args(EngineName))
        raise SpecError(f"no such experiment: {explain_validation(error)}. Engines: {engines}") from error
    preset = experiment.model_preset
    if experiment.data_parallel > preset.data_ranks:
        raise SpecError(
            f"{experiment.preset} has batches for {preset.data_ranks} ranks, {experiment.mesh.name} asks for "
            f"{experiment.data_parallel}; choose a mesh of at most {preset.data_ranks} ranks"
        )
    if experiment.faults and experiment.engine != "reference":
        raise SpecError(f"only the reference engine has faults to switch on, not {experiment.engine}")
    return experiment
