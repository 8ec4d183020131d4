"""Stand-in tokenizers of model families: their chat templates and markers, and about 270 other
tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tiny_models import write_tokenizer
from tokenizers import Regex, pre_tokenizers

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Chat:
    """The tokens of a family: `special` ones are skipped by decoding, `plain` ones are not."""

    special: Sequence[str]
    plain: Sequence[str] = ()
    eos: Sequence[str] = ()
    bos: str = ""


# Qwen's, and Llama 3's but for the length of numbers: newlines stay together, whatever follows
# them.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALL = ("<tool_call>", "</tool_call>")
_QWEN3 = (*_CALL, "<tool_response>", "</tool_response>", "<think>", "</think>")
_QWEN3_5 = Chat((*_QWEN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
                _QWEN3, ("<|im_end|>", "<|endoftext|>"))  # fmt: skip
_MISTRAL = Chat(("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]",
                 "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]",
                 "[/THINK]"), (), ("</s>",), "<s>")  # fmt: skip
CHATS = {
    "qwen2_5": Chat(_QWEN, _CALL, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Chat(_QWEN, _QWEN3, ("<|im_end|>", "<|endoftext|>")),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_think": _QWEN3_5,
    "qwen3_8": _QWEN3_5,
    "llama3_1": Chat(("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                      "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"), (),
                     ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|begin_of_text|>"),
    "gemma3": Chat(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (),
                   ("<eos>", "<end_of_turn>"), "<bos>"),
    "gemma4": Chat(("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>",
                    "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>",
                    "<channel|>", "<|think|>", "<|image>", "<|image|>", "<image|>"), (),
                   ("<eos>", "<turn|>", "<|tool_response>"), "<bos>"),
    "gpt_oss": Chat(("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>",
                     "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"), (),
                    ("<|return|>", "<|endoftext|>", "<|call|>")),
    "mistral": _MISTRAL,
    "mistral_args": _MISTRAL,
}  # fmt: skip


# Templates that differ from another in a few expressions: (family, {what is there: what is here}).
_THINKS = {
    "enable_thinking is defined and enable_thinking is true": "enable_thinking is undefined or "
    "enable_thinking is true"
}
_VARIANTS = {
    # Qwen3.5 from 4B on opens a thought unless it is told not to.
    "qwen3_5_think": ("qwen3_5", _THINKS),
    # Qwen3.8 keeps all thoughts, and reads them from `reasoning_content` alone.
    "qwen3_8": (
        "qwen3_5",
        {
            **_THINKS,
            "if loop.index0 > ns.last_query_index": "if preserve_thinking is undefined or "
            "preserve_thinking is true or loop.index0 > ns.last_query_index",
            "if '</think>' in content": "if false",
        },
    ),
}


def template_of(family: str) -> str:
    """The chat template of a family."""
    name, changes = _VARIANTS.get(family, (family, {}))
    text = (TEMPLATES / f"{name}.jinja").read_text()
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def write_chat_tokenizer(
    folder: Path, family: str, template: str | None = None, **config: Any
) -> Path:
    """The folder of a stand-in tokenizer; `config` are further keys of tokenizer_config.json."""
    chat = CHATS[family]
    backend: tokenizers.Tokenizer = write_tokenizer(folder, "bare")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), bytes_]
    )
    backend.add_special_tokens(list(chat.special))
    backend.add_tokens(
        [tokenizers.AddedToken(token, special=False, normalized=False) for token in chat.plain]
    )
    backend.save(str(folder / "tokenizer.json"))
    text = template_of(family) if template is None else template
    named = {"eos_token": chat.eos[0], **({"bos_token": chat.bos} if chat.bos else {})}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": text, **named, **config}
        )
    )
    eos = [backend.token_to_id(token) for token in chat.eos]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder
