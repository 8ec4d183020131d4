"""Sizes and switches of a decoder, as its config.json says them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the pretraining length: `llama3` (by wavelength) or
    `linear`."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Adapter:
    """Low-rank changes of a frozen model's products (LoRA, Hu et al. 2021, arXiv:2106.09685,
    equation 3):

    x W + (x A) B * scale        A[in, rank], B[rank, out]
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # names from PRODUCTS
    # True: scale is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732) in place of alpha /
    # rank
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The products of a layer, as Hugging Face's files call them."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder: Llama 2/3, Qwen2/2.5 (biases on q, k, v), Qwen3 (norms on q
    and k)."""

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
    # None, or an adapter, which is then the only part that is trained
    adapter: Adapter | None = None
    # the type of the weights of frozen products; "": like all others
    quantised: Literal["", "int8", "float8_e4m3fn"] = ""
    # Tokens of the longest sequence that its positions are made for; 0: not known. Architectures
    # that differ only in this are equal.
    max_positions: int = field(default=0, compare=False)

    def key_parts(self, tensor: int) -> int:
        """Returns how many devices of `tensor` share a key/value head; each holds a part of the
        positions of the head's cache."""
        return max(1, tensor // self.num_kv_heads)

    @property
    def base(self) -> Architecture:
        """The architecture without its adapter."""
        return replace(self, adapter=None)
