"""Published models with their sizes, by name: MaxText's, or the last part of the hub id where it
has none.

Families since Qwen3.5 are in `assets/published_models.json`: for each model the entries of its
published config.json that describe it, where these were read, and its number of parameters. Another
model of a known family is another row there. Sizes of the others, below, are those of MaxText's
`src/maxtext/configs/models/<name>.yml`, hub ids those of its `src/maxtext/utils/globals.py` if it
has the name. For Llama 3.2, and for Qwen2.5 in sizes that MaxText does not have, the sizes are
those of the hub's config.json. Llama 3.1 to 3.3 stretch their rotary frequencies as their
config.json on the hub says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources

from shoal.model.architecture import Architecture, RopeScaling
from shoal.model.families import FAMILIES, MULTIMODAL, architecture_in
from shoal.records import ShoalError
from shoal.text import nearest


@dataclass(frozen=True)
class NamedModel:
    """A published model."""

    hub_id: str
    architecture: Architecture
    also: tuple[str, ...] = ()  # hub ids of other weights of the same architecture

    @property
    def hub_ids(self) -> tuple[str, ...]:
        """All hub ids with this architecture."""
        return (self.hub_id, *self.also)


_LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def _llama(
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int = 128256,
    theta: float = 500000.0,
    scaling: RopeScaling | None = None,
) -> Architecture:
    """Returns the architecture of a Llama 2 to 3.3 of these sizes, but Llama 3.2. `theta` is the
    base of rotary positions, `scaling` their scaling; heads have 128 dimensions, and the head is
    not tied to the embedding."""
    return Architecture(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=128,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=1e-5,
    )


def _llama32(hidden_size: int, layers: int, heads: int, head_dim: int) -> Architecture:
    """Returns the architecture of a Llama 3.2 of these sizes. All have 8 key/value heads and 8,192
    inner features, and the head is the embedding."""
    return Architecture(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=8192,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rope_theta=500000.0,
        rope_scaling=replace(_LLAMA3, factor=32.0),
        norm_eps=1e-5,
        tie_embeddings=True,
    )


def _qwen2(
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int = 152064,
    tied: bool = False,
    head_dim: int = 128,
) -> Architecture:
    """Returns the architecture of a Qwen2.5 of these sizes. `tied`: the head is the embedding."""
    return Architecture(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qkv_bias=True,
        model_type="qwen2",
    )


def _qwen3(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, tied: bool = False
) -> Architecture:
    """Returns the architecture of a Qwen3 of these sizes. `tied`: the head is the embedding."""
    return Architecture(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tied,
        qk_norm=True,
        model_type="qwen3",
    )


_LLAMA_8B = _llama(4096, 14336, 32, 32, 8)


_LLAMA_70B = _llama(8192, 28672, 80, 64, 8)


_LLAMA31_8B = replace(_LLAMA_8B, rope_scaling=_LLAMA3)
_LLAMA31_70B = replace(_LLAMA_70B, rope_scaling=_LLAMA3)


_QWEN3_2B = _qwen3(2048, 6144, 28, 16, tied=True)


_QWEN3_4B = _qwen3(2560, 9728, 36, 32, tied=True)


_QWEN3_8B = _qwen3(4096, 12288, 36, 32)


_QWEN3_14B = _qwen3(5120, 17408, 40, 40)


def _described() -> dict[str, NamedModel]:
    """Returns the models of `assets/published_models.json` whose families Shoal computes."""
    text = resources.files("shoal").joinpath("assets", "published_models.json").read_text("utf-8")
    models = {}
    for name, row in json.loads(text).items():
        config = row["config"]
        if config["model_type"] in FAMILIES or config["model_type"] in MULTIMODAL:
            a = architecture_in(config, row["hub_id"])
            models[name] = NamedModel(row["hub_id"], a, tuple(row["also"]))
    return models


MODELS: Mapping[str, NamedModel] = {
    "llama2-7b": NamedModel(
        "meta-llama/Llama-2-7b-hf", _llama(4096, 11008, 32, 32, 32, 32000, 10000.0)
    ),
    "llama2-13b": NamedModel(
        "meta-llama/Llama-2-13b-hf", _llama(5120, 13824, 40, 40, 40, 32000, 10000.0)
    ),
    "llama2-70b": NamedModel(
        "meta-llama/Llama-2-70b-hf", _llama(8192, 28672, 80, 64, 8, 32000, 10000.0)
    ),
    "llama3-8b": NamedModel("meta-llama/Meta-Llama-3-8B", _LLAMA_8B),
    "llama3-70b": NamedModel("meta-llama/Meta-Llama-3-70B", _LLAMA_70B),
    "llama3.1-8b": NamedModel("meta-llama/Llama-3.1-8B", _LLAMA31_8B),
    "llama3.1-8b-Instruct": NamedModel("meta-llama/Llama-3.1-8B-Instruct", _LLAMA31_8B),
    "llama3.1-70b": NamedModel("meta-llama/Llama-3.1-70B", _LLAMA31_70B),
    "llama3.1-70b-Instruct": NamedModel("meta-llama/Llama-3.1-70B-Instruct", _LLAMA31_70B),
    "llama3.1-405b": NamedModel(
        "meta-llama/Llama-3.1-405B", _llama(16384, 53248, 126, 128, 8, scaling=_LLAMA3)
    ),
    "llama3.2-1b": NamedModel("meta-llama/Llama-3.2-1B", _llama32(2048, 16, 32, 64)),
    "llama3.2-1b-Instruct": NamedModel(
        "meta-llama/Llama-3.2-1B-Instruct", _llama32(2048, 16, 32, 64)
    ),
    "llama3.2-3b": NamedModel("meta-llama/Llama-3.2-3B", _llama32(3072, 28, 24, 128)),
    "llama3.2-3b-Instruct": NamedModel(
        "meta-llama/Llama-3.2-3B-Instruct", _llama32(3072, 28, 24, 128)
    ),
    "llama3.3-70b": NamedModel("meta-llama/Llama-3.3-70B-Instruct", _LLAMA31_70B),
    "qwen2.5-0.5b": NamedModel(
        "Qwen/Qwen2.5-0.5B-Instruct", _qwen2(896, 4864, 24, 14, 2, 151936, True, 64)
    ),
    "qwen2.5-1.5b": NamedModel(
        "Qwen/Qwen2.5-1.5B-Instruct", _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True)
    ),
    "qwen2.5-3b": NamedModel(
        "Qwen/Qwen2.5-3B-Instruct", _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True)
    ),
    "qwen2.5-7b": NamedModel("Qwen/Qwen2.5-7B-Instruct", _qwen2(3584, 18944, 28, 28, 4)),
    "qwen2.5-14b": NamedModel("Qwen/Qwen2.5-14B-Instruct", _qwen2(5120, 13824, 48, 40, 8)),
    "qwen2.5-32b": NamedModel("Qwen/Qwen2.5-32B-Instruct", _qwen2(5120, 27648, 64, 40, 8)),
    "qwen2.5-72b": NamedModel("Qwen/Qwen2.5-72B-Instruct", _qwen2(8192, 29568, 80, 64, 8)),
    "qwen3-0.6b": NamedModel("Qwen/Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, tied=True)),
    "qwen3-1.7b": NamedModel("Qwen/Qwen3-1.7B", _QWEN3_2B),
    "qwen3-1.7b-base": NamedModel("Qwen/Qwen3-1.7B-Base", _QWEN3_2B),
    "qwen3-4b": NamedModel("Qwen/Qwen3-4B", _QWEN3_4B),
    "qwen3-4b-base": NamedModel("Qwen/Qwen3-4B-Base", _QWEN3_4B),
    "qwen3-4b-thinking-2507": NamedModel(
        "Qwen/Qwen3-4B-Thinking-2507", replace(_QWEN3_4B, rope_theta=5e6)
    ),
    "qwen3-8b": NamedModel("Qwen/Qwen3-8B", _QWEN3_8B),
    "qwen3-8b-base": NamedModel("Qwen/Qwen3-8B-Base", _QWEN3_8B),
    "qwen3-14b": NamedModel("Qwen/Qwen3-14B", _QWEN3_14B),
    "qwen3-14b-base": NamedModel("Qwen/Qwen3-14B-Base", _QWEN3_14B),
    "qwen3-32b": NamedModel("Qwen/Qwen3-32B", _qwen3(5120, 25600, 64, 64)),
    **_described(),
}
"""Name -> the model, for families that Shoal computes."""


UNSUPPORTED = re.compile(
    "gemma|mi[sx]tral|deepseek|qwen3.*-a[0-9]+b|qwen3-next|llama4|gpt|kimi|olmo|vision|simple"
)
"""Matches the beginnings of names of other families."""


def model_named(name: str) -> NamedModel:
    """Returns the model of a name, in whatever case; ShoalError, which suggests the nearest name,
    if there is none. ShoalError with a text of its own for `tiny`, and for families that Shoal does
    not compute."""
    by_lower = {known.lower(): model for known, model in MODELS.items()}
    lower = name.lower()
    if lower in by_lower:
        return by_lower[lower]
    if lower == "tiny":
        raise ShoalError(
            "model.name=tiny: the packaged model is model.path=tiny, the default: leave model.name "
            "out",
            "model.name",
        )
    if UNSUPPORTED.match(lower):
        raise ShoalError(
            f"model.name={name}: this family or size is not known; families are "
            f"{', '.join(FAMILIES)}. Names: {', '.join(MODELS)}",
            "model.name",
        )
    raise ShoalError(
        f"no model is called {name!r}, did you mean {nearest(name, MODELS)}? Names: "
        f"{', '.join(MODELS)}; any other model goes by its folder or hub id, without a name"
    )


def check_name(name: str, a: Architecture, where: object, key: str) -> None:
    """Raises ShoalError unless `a`, the model at `where`, has the architecture that `name` means
    (`max_positions` is not compared); also if no model has the name. `key` is the setting that has
    `name` as its value."""
    if model_named(name).architecture != a:
        raise ShoalError(
            f"{key}={name} is not the model at {where}, whose config.json has other sizes: leave "
            f"{key} out, or give the right one"
        )
