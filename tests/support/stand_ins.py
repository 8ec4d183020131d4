"""Small stand-ins for what other systems' command lines name: models and data sets of the hub in
its cache, MaxText's names, a MaxText checkpoint, verl's files, buckets as folders. `python
stand_ins.py FOLDER` makes them.

A line runs as it stands, in FOLDER/here, which `shoal compat` fills; `environment` has its
variables.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tiny_models import write_model_with_tokenizer

from shoal import cli
from shoal.model import families, published

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
KINDS = {
    "llama-2": ("llama2", "plain"),
    "deepseek": ("llama2", "plain"),
    "llama-3": ("llama3", "llama3"),
    "qwen2": ("qwen2", "chatml"),
    "qwen3": ("qwen3", "chatml"),
}
"""Part of a hub id -> the family and the tokenizer of its stand-in."""

HUB_MODELS = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2-7B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B-base",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "deepseek-ai/deepseek-llm-7b-chat",
)
SUMS = [(f"{100 + i} + 17 = ?", str(117 + i)) for i in range(1200)]
GSM8K = [{"question": question, "answer": f"Added.\n#### {answer}"} for question, answer in SUMS]
SOLUTIONS = [
    {"prompt": [{"role": "user", "content": question}], "solution": answer}
    for question, answer in SUMS
]
VERL: list[dict] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": i},
    }
    for i, (question, answer) in enumerate(SUMS)
]
IFEVAL = [
    {
        "key": i,
        "prompt": f"Say {i} without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    for i in range(120)
]
HUB_DATA = {
    "openai/gsm8k": ("main", GSM8K),
    "google/IFEval": ("", IFEVAL),
    "custom/dataset": ("", GSM8K),
    "HuggingFaceH4/Polaris-Dataset-53K": ("", SOLUTIONS),
    "HuggingFaceH4/OpenR1-Math-220k-default-verified": ("", SOLUTIONS),
}
FILES = {
    "grpo_config.yaml": "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: "
    "HuggingFaceH4/Polaris-Dataset-53K\n"
    "reward_funcs:\n  - accuracy_reward\n",
    "rloo_config.yaml": "model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: "
    "HuggingFaceH4/Polaris-Dataset-53K\n"
    "reward_funcs:\n  - accuracy_reward\n",
    "custom_config.yml": "num_generations: 8\nmax_target_length: 1024\n",
}
TOKEN = "hf_thisIsNoTokenOfAnyone"


def kind_of(name: str) -> tuple[str, str]:
    """The family and tokenizer of a model's stand-in, by its name."""
    plain = name.lower().replace("llama2", "llama-2").replace("llama3", "llama-3")
    return next(kind for part, kind in KINDS.items() if part in plain)


def name_models(folder: Path, into: dict = published.MODELS) -> None:  # type: ignore[assignment]
    """MaxText's names mean the stand-ins from now on, in this process; those of families without a
    stand-in stay."""
    for name, model in [*into.items()]:
        if not any(part in name.lower() for part in ("llama", "qwen2", "qwen3-")):
            continue
        a = families.architecture_of(folder / "models" / kind_of(name)[0])
        into[name] = replace(model, architecture=a)


def build(folder: Path) -> Path:
    """Makes all stand-ins in a folder; they are made once."""
    if (folder / "here").is_dir():
        return folder
    for family, style in {*KINDS.values()}:
        write_model_with_tokenizer(folder / "models" / family, family, style, **SIZES)
    for hub_id in HUB_MODELS:
        _in_cache(folder, "models", hub_id).symlink_to(folder / "models" / kind_of(hub_id)[0])
    for hub_id, (subset, rows) in HUB_DATA.items():
        place = _in_cache(folder, "datasets", hub_id) / subset
        for split in ("train", "test"):
            _write(
                place / f"{'ifeval_input_data' if 'IFEval' in hub_id else split}.jsonl",
                rows[:-40] if split == "train" else rows[-40:],
            )
    for task in ("gsm8k", "math"):
        for split in ("train", "test"):
            _write(
                folder / "home" / "data" / task / f"{split}.parquet",
                VERL[:-40] if split == "train" else VERL[-40:],
            )
    (folder / "home" / "verl" / "models").mkdir(parents=True)
    (folder / "home" / "verl" / "models" / "Qwen3-4B").symlink_to(folder / "models" / "qwen3")
    assert (
        cli.main(
            [
                "convert",
                f"from={folder / 'models' / 'llama3'}",
                f"to={folder / 'bucket' / '0' / 'items'}",
            ]
        )
        == 0
    )
    assert cli.main(["compat", str(folder / "here")]) == 0
    for name, text in FILES.items():
        (folder / "here" / name).write_text(text)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"import stand_ins\nstand_ins.name_models(Path({str(folder)!r}))\n"
    )
    for name in ("python", "python3"):
        (site / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (site / name).chmod(0o755)
    return folder


def _in_cache(folder: Path, kind: str, hub_id: str) -> Path:
    """The place of a snapshot in the hub's cache."""
    place = folder / "hub" / f"{kind}--{hub_id.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    (place / "snapshots").mkdir()
    return place / "snapshots" / ("1" * 40)


def _write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def environment(folder: Path, devices: int = 1) -> dict[str, str]:
    """The variables of the lines, and those that let a process find the stand-ins and so many
    devices."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    source = Path(cli.__file__).parents[1]
    return {
        "HF_TOKEN": TOKEN,
        "MODEL": "llama3.1-8b",
        "HF_MODEL": "llama3.1-8b-Instruct",
        "RUN_NAME": "first",
        "TOKENIZER": "meta-llama/Llama-3.1-8B-Instruct",
        "BASE_OUTPUT_DIRECTORY": str(folder / "out"),
        "MAXTEXT_CKPT_PATH": str(folder / "bucket" / "0" / "items"),
        "CHIPS_PER_VM": "4",
        "USE_PATHWAYS": "0",
        "WORKLOAD": "w",
        "TPU_CLUSTER": "c",
        "TPU_TYPE": "v5p-64",
        "ZONE": "z",
        "PROJECT_ID": "p",
        "HOME": str(folder / "home"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{folder / 'site'}:{folder / 'here' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder / 'site'}:{source}",
        "JAX_PLATFORMS": "cpu",
        "WANDB_MODE": "offline",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        **{
            name: os.environ[name]
            for name in os.environ
            if name.startswith("JAX_") and name != "JAX_PLATFORMS"
        },
    }


PLACES: Mapping[str, str] = {
    "gs://path/to/checkpoint": "bucket/0/items",
    "gs://path/to/output": "out",
    "=OUT": "=out",
    "/path/to/custom_config.yml": "here/custom_config.yml",
}


def with_places(text: str, folder: Path) -> str:
    """A line with the folders of the stand-ins in place of its placeholders."""
    for placeholder, place in PLACES.items():
        equals = "=" * placeholder.startswith("=")
        text = re.sub(
            re.escape(placeholder) + r"(?=\s|$)", f"{equals}{folder / place.lstrip('=')}", text
        )
    return text


if __name__ == "__main__":
    print(json.dumps(environment(build(Path(sys.argv[1])))))
