"""Published models: their sizes are those of transformers' classes."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import jax
import pytest

from shoal.model.parameters import param_specs
from shoal.model.published import MODELS

_FILE = resources.files("shoal").joinpath("assets", "published_models.json")
ROWS: dict[str, Any] = json.loads(_FILE.read_text("utf-8"))
DESCRIBED = [name for name in ROWS if name in MODELS]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_model_has_as_many_parameters_as_published(name):
    row = ROWS[name]
    count = 0
    for spec in jax.tree.leaves(param_specs(MODELS[name].architecture)):
        if not spec.name.endswith("layer_scalar"):  # a buffer in transformers
            count += math.prod(spec.shape)
    assert count == row["parameters"]
    assert row["source"] and row["hub_id"].count("/") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", DESCRIBED)
def test_transformers_class_has_as_many(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(ROWS[name]["config"])
    text = dict(config.get("text_config") or config)
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    model_type = text.pop("model_type")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(model_type, **text)
        )
    # A tied head is the embedding's own parameter, counted once.
    assert sum(p.numel() for p in model.parameters()) == ROWS[name]["parameters"]
