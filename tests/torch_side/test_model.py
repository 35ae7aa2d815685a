"""The model against Qwen3 in transformers: the same weights must give the same logits, loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from shardgauge.plan import parameter_shapes
from shardgauge.presets import PRESETS, Preset, find_preset
from shardgauge.worker.model import Qwen3, RMSNorm, Rotary, next_token_loss

THEIR_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "layers.": "model.layers.",
    ".attention.wq.": ".self_attn.q_proj.",
    ".attention.wk.": ".self_attn.k_proj.",
    ".attention.wv.": ".self_attn.v_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.": ".self_attn.q_norm.",
    ".attention.k_norm.": ".self_attn.k_norm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}
SMALL = find_preset("qwen3-nano").model_copy(update={"layers": 3, "seq_len": 24, "vocab_size": 96})
# The published theta hides a wrong frequency behind angles close to zero; this one makes every angle count.
STEEP = SMALL.model_copy(update={"rope_theta": 50.0})


def their_name(name: str) -> str:
    """The name that transformers gives our parameter `name`."""
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("norm.weight", "model.norm.weight") if name == "norm.weight" else name


def random_weights(preset: Preset) -> dict[str, torch.Tensor]:
    """fp32 weights whose norms are far from one, so that a norm left out or misplaced shows."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.05) + (len(shape) == 1)
        for name, shape in parameter_shapes(preset).items()
    }


def random_tokens(preset: Preset, *, batch: int) -> torch.Tensor:
    """[batch, seq_len + 1] tokens below the vocabulary's size."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(preset.vocab_size, (batch, preset.seq_len + 1), generator=generator)


def ours(preset: Preset, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Qwen3:
    """Our model, built on the meta device as the engines build it, holding `weights`."""
    with torch.device("meta"):
        model = Qwen3(preset)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return model


def theirs(preset: Preset, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The model of transformers of the same sizes, holding the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=preset.vocab_size,
        hidden_size=preset.dim,
        intermediate_size=preset.ffn_dim,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_position_embeddings=preset.seq_len,
        rms_norm_eps=preset.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": preset.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    model.load_state_dict({their_name(name): weight.to(dtype) for name, weight in weights.items()})
    return model


def train_both(preset: Preset, dtype: torch.dtype) -> tuple[Qwen3, Any, torch.Tensor, torch.Tensor]:
    """One forward and backward of each model on the same weights and tokens, and both models' logits."""
    weights, tokens = random_weights(preset), random_tokens(preset, batch=2)
    our_model, their_model = ours(preset, weights, dtype), theirs(preset, weights, dtype)
    our_logits = our_model(tokens[:, :-1])
    their_logits = their_model(tokens[:, :-1], use_cache=False).logits
    next_token_loss(our_logits, tokens[:, 1:]).backward()
    next_token_loss(their_logits, tokens[:, 1:]).backward()
    return our_model, their_model, our_logits.detach(), their_logits.detach()


@pytest.mark.parametrize("preset", [SMALL, STEEP], ids=["published-theta", "steep-theta"])
def test_fp32_logits_and_gradients_are_those_of_transformers(preset: Preset) -> None:
    """In fp32 the two differ by rounding only: logits, and the gradient of every parameter."""
    our_model, their_model, our_logits, their_logits = train_both(preset, torch.float32)
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=2e-6)
    their_gradients = {name: parameter.grad for name, parameter in their_model.named_parameters()}
    for name, parameter in our_model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, their_gradients[their_name(name)], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bf16_is_as_close_to_fp32_as_transformers_bf16_is() -> None:
    """Rounding to bf16 moves our logits and gradients away from fp32 no more than it moves those of transformers.

    Each lies about 2 % of a tensor's norm away; the ratio of the two distances is 0.7 to 1.1 on these weights.
    """
    our_model, their_model, our_logits, their_logits = train_both(SMALL, torch.bfloat16)
    _, exact_model, _, exact_logits = train_both(SMALL, torch.float32)
    assert our_logits.dtype == torch.bfloat16
    assert relative_distance(our_logits, exact_logits) < 1.3 * relative_distance(their_logits, exact_logits)
    rounded = {name: parameter.grad for name, parameter in their_model.named_parameters()}
    exact = {name: parameter.grad for name, parameter in exact_model.named_parameters()}
    for name, parameter in our_model.named_parameters():
        theirs = their_name(name)
        allowed = 1.3 * relative_distance(rounded[theirs], exact[theirs])
        assert relative_distance(parameter.grad, exact[theirs]) < allowed, name


def relative_distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of `expected`."""
    assert found is not None
    assert expected is not None
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_bf16_norm_casts_back_before_the_weight() -> None:
    """Qwen3 rounds the normalised value to bf16 and then multiplies; the other order gives other bits."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, generator=generator).bfloat16()
    hidden = torch.randn(512, 64, generator=generator).bfloat16()
    our_norm, their_norm = RMSNorm(64, eps=1e-6).bfloat16(), Qwen3RMSNorm(64, eps=1e-6).bfloat16()
    for norm in (our_norm, their_norm):
        norm.load_state_dict({"weight": weight})
    assert torch.equal(our_norm(hidden), their_norm(hidden))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_those_of_the_plan(name: str) -> None:
    """On the meta device: the plan's names, order and shapes, 91 parameters, and nothing else to save or to move."""
    preset = find_preset(name)
    with torch.device("meta"):
        model = Qwen3(preset)
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    assert shapes == parameter_shapes(preset)
    assert list(shapes) == list(parameter_shapes(preset))
    assert len(shapes) == 91
    assert list(model.state_dict()) == list(shapes)
    assert list(model.buffers()) == []
    assert all(parameter.is_meta for parameter in model.parameters())


def test_rotary_tables_made_while_inferring_serve_training_too() -> None:
    """A model that is first run under inference_mode can be trained afterwards."""
    model = ours(SMALL, random_weights(SMALL), torch.float32)
    tokens = random_tokens(SMALL, batch=1)
    with torch.inference_mode():
        model(tokens[:, :-1])
    next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()


def test_rotary_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers and steps share one pair of tables per sequence length, device and dtype."""
    made = []
    make_tables = Rotary._make_tables

    def count_and_make(*args: Any) -> Any:
        made.append(args[1:])
        return make_tables(*args)

    monkeypatch.setattr(Rotary, "_make_tables", count_and_make)
    model = ours(SMALL, random_weights(SMALL), torch.float32)
    for batch in (1, 2):
        model(random_tokens(SMALL, batch=batch)[:, :-1])
    assert made == [(SMALL.seq_len, torch.device("cpu"), torch.float32)]


def test_loss_of_equal_logits_is_the_entropy_of_the_vocabulary() -> None:
    """Logits that say nothing cost ln(vocabulary) nats, in fp32 whatever the logits' dtype."""
    targets = torch.zeros(2, 5, dtype=torch.int64)
    loss = next_token_loss(torch.zeros(2, 5, 96, dtype=torch.bfloat16), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(96), rel=1e-6)
