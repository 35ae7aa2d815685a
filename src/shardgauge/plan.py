"""The wrap plan of a preset, and the collective counts that follow from it on any hardware.

Nothing here imports torch: the pytest process derives its expectations from the same plan that the ranks wrap by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from shardgauge.presets import Preset

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class WrapUnit:
    """One `fully_shard` call: its range name, the module paths that it wraps, its parameter names."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]


def parameter_shapes(preset: Preset) -> Mapping[str, tuple[int, ...]]:
    """Every parameter's name and full shape, in the model's own order."""
    q_dim, kv_dim = preset.heads * preset.head_dim, preset.kv_heads * preset.head_dim
    layer = {
        "attention_norm.weight": (preset.dim,),
        "attention.wq.weight": (q_dim, preset.dim),
        "attention.wk.weight": (kv_dim, preset.dim),
        "attention.wv.weight": (kv_dim, preset.dim),
        "attention.wo.weight": (preset.dim, q_dim),
        "attention.q_norm.weight": (preset.head_dim,),
        "attention.k_norm.weight": (preset.head_dim,),
        "ffn_norm.weight": (preset.dim,),
        "feed_forward.w1.weight": (preset.ffn_dim, preset.dim),
        "feed_forward.w2.weight": (preset.dim, preset.ffn_dim),
        "feed_forward.w3.weight": (preset.ffn_dim, preset.dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (preset.vocab_size, preset.dim)}
    for index in range(preset.layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["norm.weight"] = (preset.dim,)
    shapes["lm_head.weight"] = (preset.vocab_size, preset.dim)
    return shapes


@cache
def wrap_plan(preset: Preset, *, split_last_unit: bool) -> tuple[WrapUnit, ...]:
    """Units in forward order. `split_last_unit` wraps norm and lm_head apart, as experiment P12 did."""
    tail = (("norm",), ("lm_head",)) if split_last_unit else (("norm", "lm_head"),)
    layers = tuple((f"layers.{index}",) for index in range(preset.layers))
    names = tuple(parameter_shapes(preset))

    def unit(modules: tuple[str, ...]) -> WrapUnit:
        owned = tuple(n for n in names if any(n.startswith(module + ".") for module in modules))
        return WrapUnit(name=modules[0], modules=modules, parameters=owned)

    return tuple(unit(modules) for modules in (("tok_embeddings",), *layers, *tail))


def collective_counts(
    units: tuple[WrapUnit, ...], *, fused: bool, replicated: bool, steps: int
) -> Mapping[CollectiveKind, int]:
    """Collectives that each rank must issue over `steps` training steps.

    Every unit is gathered in forward and again in backward, except the last, which stays gathered; every unit's
    gradients are reduced once. A fused engine issues one collective a unit, a per-parameter engine one a parameter.
    On a two-dimensional mesh each reduce-scatter is followed by an all-reduce across the replicas.
    """
    per_unit = [1 if fused else len(unit.parameters) for unit in units]
    all_gathers = 2 * sum(per_unit) - per_unit[-1]
    reduce_scatters = sum(per_unit)
    return {
        "all_gather": steps * all_gathers,
        "reduce_scatter": steps * reduce_scatters,
        "all_reduce": steps * reduce_scatters if replicated else 0,
    }


def rows_as_published(counts: Mapping[CollectiveKind, int]) -> tuple[int, int]:
    """(all-gather, reduce-scatter) rows as issue 192 printed them: reduce-scatters come out doubled.

    torch_npu writes three nested operator rows a collective. A case-sensitive search for `HcclAllGather` meets one
    of an all-gather's rows (`HcclAllgatherBase` is spelled with a small g), a search for `HcclReduceScatter` meets
    two of a reduce-scatter's. So 38/20 real collectives were published as 38/40, and 360/182 as 360/364.
    """
    return counts["all_gather"], 2 * counts["reduce_scatter"]
