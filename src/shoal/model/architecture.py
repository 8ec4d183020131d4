"""Sizes and switches of a decoder, as its config.json says them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the pretraining length: `llama3` (by wavelength) or `linear`."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder: Llama 2/3, Qwen2/2.5 (biases on q, k, v), Qwen3 (norms on q and k)."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # A
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # on the attention's output projection (Llama's `attention_bias`)
    mlp_bias: bool = False
    qk_norm: bool = False
