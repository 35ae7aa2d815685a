"""Model presets: the sizes of Qwen3 that shardgauge trains, and the metered link that suits each on a CPU."""

from __future__ import annotations

from shardgauge.boundary import Boundary
from shardgauge.errors import SpecError


class LinkSpec(Boundary):
    """A serialised link per rank: a transfer of n bytes occupies it for latency + n / bandwidth."""

    latency_us: float
    bandwidth_gbit_s: float

    def transfer_ns(self, payload_bytes: int) -> int:
        """Time in ns that `payload_bytes` occupy the link."""
        return round(self.latency_us * 1_000 + payload_bytes * 8 / self.bandwidth_gbit_s)


class Preset(Boundary):
    """Sizes of one Qwen3 decoder; `rope_theta` and `norm_eps` are Qwen3's published values."""

    name: str
    dim: int
    layers: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    seq_len: int
    batch: int
    data_ranks: int = 8
    data_steps: int = 32
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    link: LinkSpec


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="qwen3-8b-lite",
            dim=4096,
            layers=8,
            ffn_dim=12288,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            seq_len=4096,
            batch=1,
            link=LinkSpec(latency_us=20, bandwidth_gbit_s=200),
        ),
        Preset(
            name="qwen3-nano",
            dim=128,
            layers=8,
            ffn_dim=384,
            heads=8,
            kv_heads=4,
            head_dim=16,
            vocab_size=512,
            seq_len=64,
            batch=1,
            link=LinkSpec(latency_us=50, bandwidth_gbit_s=1.5),
        ),
    )
}


def find_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        SpecError: no preset has that name.
    """
    if name not in PRESETS:
        raise SpecError(f"unknown preset {name!r}; known presets: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
