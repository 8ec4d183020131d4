"""How the weights in a model's files are quantised, by the entry `quantization_config` of its
config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.model.config_json import Entries
from shoal.records import ShoalError


@dataclass(frozen=True)
class FileQuantisation:
    """How the weights in a model's files are quantised: `fp8`, matrices of 8-bit floats with a
    scale for each block, as DeepSeek's and Qwen3's files have them; or `mxfp4`, experts in 4 bits,
    as gpt-oss' have them."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] = (0, 0)  # of fp8: rows and columns with one scale


def quantisation_in(
    content: Mapping[str, Any], folder: Path, reads_mxfp4: bool
) -> FileQuantisation | None:
    """Returns how weights are quantised by the content of a config.json; None if they are not.
    `reads_mxfp4`: True if the family's files may have experts in 4 bits. ShoalError, which calls
    the file `folder`'s, if they are quantised in another way."""
    config = Entries(folder, content)
    config.check_type("quantization_config", dict, "a mapping")
    quantisation = config.get("quantization_config") or {}
    method = quantisation.get("quant_method")
    if method == "mxfp4" and reads_mxfp4:
        return FileQuantisation("mxfp4")
    is_known = (
        method == "fp8"
        and quantisation.get("fmt", "e4m3") == "e4m3"
        and quantisation.get("activation_scheme", "dynamic") == "dynamic"
    )
    match quantisation.get("weight_block_size"):
        case [int(rows), int(columns)] if is_known and min(rows, columns) > 0:
            return FileQuantisation("fp8", (rows, columns))
    if not quantisation:
        return None
    entries = []
    for name in ("fmt", "activation_scheme", "weight_block_size"):
        if name in quantisation:
            entries.append(f"{name} {quantisation[name]}")
    in_brackets = f" ({', '.join(entries)})" if entries else ""
    raise ShoalError(
        f"{folder}/config.json: the weights are quantised by quant_method "
        f"{method}{in_brackets}; expected {'mxfp4, ' * reads_mxfp4}fp8 (e4m3) with a "
        "weight_block_size, "
        "or none: give the model's folder with weights in bfloat16; model.quantise=int8 makes "
        "frozen ones small"
    )
