"""The model that every engine shards: Qwen3's decoder in plain torch, built from a preset, on the meta device if asked.

Its numbers are those of transformers' `Qwen3ForCausalLM`, its parameter names those of `plan.parameter_shapes`.
Each wrapped module takes one tensor, so that the hooks of `fully_shard` see nothing but tensors.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shardgauge.presets import Preset


class Rotary:
    """Rotary position embedding, one for all layers of a model.

    No module and no buffer: a model on the meta device has nothing to fill in afterwards, and its state_dict is its
    parameters. The tables are made on first use and kept per sequence length, device and dtype.
    """

    def __init__(self, *, head_dim: int, theta: float) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn each head of [batch, seq, heads, head_dim] by the angles of its position."""
        key = (heads.shape[1], heads.device, heads.dtype)
        if key not in self._tables:
            self._tables[key] = self._make_tables(*key)
        cos, signed_sin = self._tables[key]
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((second, first), dim=-1) * signed_sin

    def _make_tables(self, seq_len: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [seq, 1, head_dim], computed in fp32 as transformers does.

        The sines of the first half carry the minus sign of rotate_half, which saves a negation a call.
        """
        # A table made under inference_mode could not be saved for a later backward.
        with torch.inference_mode(mode=False), torch.no_grad():
            exponents = torch.arange(0, self._head_dim, 2, device=device, dtype=torch.float32) / self._head_dim
            positions = torch.arange(seq_len, device=device, dtype=torch.float32)
            angles = positions[:, None, None] * (1.0 / self._theta**exponents)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


class RMSNorm(nn.Module):
    """Normalises in fp32 and casts back before the weight is applied, as Qwen3 does: in bf16 the order shows."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._shape = (size,)
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of a tensor of any shape and floating dtype."""
        return functional.rms_norm(hidden.float(), self._shape, None, self._eps).to(hidden.dtype) * self.weight


class Attention(nn.Module):
    """Causal grouped-query attention; queries and keys are normalised per head before they are turned."""

    def __init__(self, preset: Preset, rotary: Rotary) -> None:
        super().__init__()
        q_dim, kv_dim = preset.heads * preset.head_dim, preset.kv_heads * preset.head_dim
        self.wq = nn.Linear(preset.dim, q_dim, bias=False)
        self.wk = nn.Linear(preset.dim, kv_dim, bias=False)
        self.wv = nn.Linear(preset.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, preset.dim, bias=False)
        self.q_norm = RMSNorm(preset.head_dim, eps=preset.norm_eps)
        self.k_norm = RMSNorm(preset.head_dim, eps=preset.norm_eps)
        self._rotary = rotary
        self._heads = [preset.heads, preset.kv_heads]
        self._head_dim = preset.head_dim

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        by_head = (*hidden.shape[:2], -1, self._head_dim)
        query = self.q_norm(self.wq(hidden).view(by_head))
        key = self.k_norm(self.wk(hidden).view(by_head))
        value = self.wv(hidden).view(by_head)
        # Queries and keys are turned together: one pass over both costs half the operators of two.
        query, key = torch.split(self._rotary(torch.cat((query, key), dim=2)), self._heads, dim=2)
        mixed: torch.Tensor = self.wo(attend(query, key, value).flatten(2))
        return mixed


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of [batch, seq, heads, head_dim] over [batch, seq, kv_heads, head_dim], shaped as `query`."""
    dtype = query.dtype
    if query.device.type == "cpu":
        # The CPU kernel's bf16 backward is four times as slow as casting to fp32 and back (torch 2.13, AVX-512).
        query, key, value = query.float(), key.float(), value.float()
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return mixed.transpose(1, 2).to(dtype)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.w1 = nn.Linear(preset.dim, preset.ffn_dim, bias=False)
        self.w2 = nn.Linear(preset.ffn_dim, preset.dim, bias=False)
        self.w3 = nn.Linear(preset.dim, preset.ffn_dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        fed: torch.Tensor = self.w2(functional.silu(self.w1(hidden)) * self.w3(hidden))
        return fed


class DecoderLayer(nn.Module):
    """One wrap unit in the middle of the model: attention, then feed-forward, each behind a norm and a residual."""

    def __init__(self, preset: Preset, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(preset.dim, eps=preset.norm_eps)
        self.attention = Attention(preset, rotary)
        self.ffn_norm = RMSNorm(preset.dim, eps=preset.norm_eps)
        self.feed_forward = FeedForward(preset)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, seq, dim] to [batch, seq, dim]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        output: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return output


class Qwen3(nn.Module):
    """Qwen3 with an untied head. Weights come from the alignment data; torch's default initial values mean nothing."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        rotary = Rotary(head_dim=preset.head_dim, theta=preset.rope_theta)
        self.tok_embeddings = nn.Embedding(preset.vocab_size, preset.dim)
        self.layers = nn.ModuleList(DecoderLayer(preset, rotary) for _ in range(preset.layers))
        self.norm = RMSNorm(preset.dim, eps=preset.norm_eps)
        self.lm_head = nn.Linear(preset.dim, preset.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 tokens [batch, seq] to logits [batch, seq, vocab_size], in the dtype of the weights."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats, computed in fp32.

    Args:
        logits: [batch, seq, vocab_size], any floating dtype.
        targets: int64 [batch, seq]; the token that follows each position.
    """
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
