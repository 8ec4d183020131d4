"""Settings of the models: the one that is trained, its adapter, and its teachers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from shoal.config.key import at_least, key, require
from shoal.config.sections.devices import WEIGHTS_ON_DEVICES
from shoal.text import shorten


@dataclass(frozen=True)
class LoraSection:
    """The keys `model.lora.*`: an adapter that is trained instead of all weights."""

    rank: int = key(0, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Rank of a LoRA adapter, which is then the only thing that is trained; 0: all weights are
    trained. 16 is usual, with five to ten times the learning rate of full training."""
    alpha: float = key(32.0, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """The adapter's change is multiplied by alpha / rank."""
    targets: tuple[str, ...] = key(
        ("all-linear",), stages=("update", "sampling", "evaluation"), on_resume="fixed"
    )
    """Products that get an adapter, by PEFT's names: all-linear, or [q_proj,v_proj], or a regular
    expression. Experts, which are parameters to PEFT, must be named: experts.gate_up_proj,
    experts.down_proj."""
    rslora: bool = key(False, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Multiply by alpha / sqrt(rank) instead of alpha / rank."""
    path: str = key("", stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Folder of an adapter in PEFT's format, or run folder with one, to start from; its rank, alpha
    and targets are used."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if the rank or alpha is out of
        its range, or no targets are named. The first fault found is raised. The rank is 0 or more,
        alpha above 0."""
        at_least(self, "model.lora.", 0, "rank", note="all weights are trained")
        require(self.alpha > 0, "model.lora.alpha", self.alpha, "a number above 0")
        require(
            bool(self.targets),
            "model.lora.targets",
            self.targets,
            "names of products, or all-linear",
        )


LONGEST_FILE_NAME = 255
"""Bytes of a name in a path, on Linux and macOS."""


@dataclass(frozen=True)
class ModelSection:
    """The keys `model.*`: the model, its types and how it is computed."""

    path: str = key("tiny", stages=("sampling", "update", "data", "evaluation"), on_resume="fixed")
    """The model to train: a folder or hub id in Hugging Face format, a run folder, `last` for the
    run started last, or a packaged one: `tiny` for word problems, `tiny-tools` for calculator and
    guess."""
    name: str = key("", stages=("sampling", "update", "evaluation"))
    """MaxText's name of the architecture (llama3.1-8b, ...), for a checkpoint without config.json.
    Without model.path, the hub's model of that name is loaded."""
    tokenizer: str = key("", stages=("data", "sampling", "rewards", "evaluation"))
    """Folder or hub id of a tokenizer that replaces the model's own."""
    scan_layers: bool = key(True, stages=("sampling", "update", "evaluation"))
    """MaxText checkpoints only: true if the layers are stacked in one array."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto",
        stages=("sampling", "update", "evaluation"),
        decided_from=("platform of the trainer",),
    )
    """Type of the computation; auto is float32 on CPU, bfloat16 elsewhere. Master weights and
    optimizer state stay float32. float16, on CPU and GPU, rounds 8 times more finely than bfloat16,
    and uses an adaptive loss scale."""
    template: str = key("", stages=("data", "environment", "evaluation"), on_resume="fixed")
    """Jinja chat template, or a file with one, that replaces the tokenizer's own."""
    template_variables: tuple[str, ...] = key(
        (), stages=("data", "environment", "evaluation"), on_resume="fixed"
    )
    """Variables that the chat template reads, such as enable_thinking=false, as NAME=VALUE."""
    remat: Literal["auto", "none", "dots", "attention", "full", "offload"] = key(
        "auto",
        stages=("update",),
        decided_from=(
            *WEIGHTS_ON_DEVICES,
            "batch.micro_tokens",
            "sampling.max_prompt_tokens",
            "sampling.max_completion_tokens",
            "devices of the trainer",
        ),
    )
    """What the backward pass recomputes (gradient checkpointing): nothing, all but products with
    weights (dots), the feed-forward part (attention), or whole blocks (full). offload is attention
    with what is kept, and each block's input, in the host's memory. auto keeps what fits in memory,
    but nothing on a TPU that recomputes as fast as it reads (8B on v6e); if the memory is not
    known, as on a CPU, it is dots, or full if a micro-batch's activations would exceed 2 GiB."""
    lora: LoraSection = field(default_factory=LoraSection)
    quantise: Literal["none", "int8", "fp8"] = key(
        "none", stages=("sampling", "update", "evaluation"), on_resume="fixed"
    )
    """Type of the frozen weights of products: 8 bits per element and one scale per output channel,
    as soon as they are read. In training only with model.lora; in eval and generate for any
    model."""
    router_replay: Literal["auto", "on", "off"] = key(
        "auto",
        stages=("sampling", "update"),
        decided_from=("sampler.kind", "experts of the model"),
    )
    """Mixtures of experts: whether the policy, when it scores and learns, sends each token to the
    experts that the sampler sent it to, which the groups' files then record (R3, arXiv:2510.11370).
    Rounding now and then makes a router choose other experts, and the log-probs of such tokens
    differ a lot. auto is on for a model with experts, unless another engine samples, because it
    returns no routes. Reference and teacher choose their own experts."""
    attention: Literal["auto", "reference", "blocked", "pallas"] = key(
        "auto",
        stages=("sampling", "update", "evaluation"),
        undecided_because="each program chooses by the shape of its rows, and each start by "
        "whether the kernels pass their test there",
    )
    """How training, scoring and prefill compute attention: all scores of a row at once (reference),
    only the blocks of them that a prompt and its completions need (blocked), or the same by our own
    kernels, on a TPU or an NVIDIA GPU (pallas). auto uses a kernel for rows of 512 tokens or more,
    else blocked. Decoding has a kernel of ours, too, with auto and with pallas. With auto the
    kernels are used only if their results pass a test at the start; otherwise everything is
    blocked."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a name in the path is
        longer than a file's name can be, or if 8-bit weights are asked for with float16. The first
        fault found is raised."""
        longest_name = max(len(name.encode()) for name in self.path.split("/"))
        require(
            longest_name <= LONGEST_FILE_NAME,
            "model.path",
            shorten(self.path, 100),
            f"a folder or a hub id, without a name of more than {LONGEST_FILE_NAME} bytes",
        )
        require(
            self.quantise == "none" or self.dtype != "float16",
            "model.quantise",
            self.quantise,
            "none with model.dtype=float16, whose largest number products of 8-bit weights exceed",
        )


@dataclass(frozen=True)
class TeacherSection:
    """The keys `teacher.*`: one or several models whose log-probs the policy learns from."""

    path: str = key("", stages=("update",), on_resume="fixed")
    """Teacher checkpoint with the model's vocabulary, for on-policy distillation; empty for none.
    With algorithm.advantage=none it is the only signal. Several are NAME=PATH,NAME=PATH, all in
    memory: the column `teacher` of each row names its own."""
    address: str = key("", stages=("update",))
    """Address of a server that is the teacher, instead of teacher.path: http://HOST:PORT of vLLM,
    which returns log-probs of a prompt's tokens (prompt_logprobs). Several are NAME=URL,NAME=URL.
    teacher.divergence must be sampled or topk. A key is read from OPENAI_API_KEY."""
    coef: float = key(1.0, stages=("update",))
    """Weight of the teacher's term."""
    divergence: Literal["sampled", "topk", "full"] = key("sampled", stages=("update",))
    """Which part of the teacher's distribution is learned from. sampled: the teacher's log-prob of
    the sampled token minus the policy's is added to the token's advantage. full: the divergence of
    both distributions over the whole vocabulary is a term of the loss. topk: the same over the
    teacher's teacher.top_k likeliest tokens, with all others as one; needs no second head in
    addition to the policy's."""
    beta: float = key(1.0, stages=("update",))
    """Which divergence, as in TRL: 0 forward KL(teacher, policy), 1 reverse KL(policy, teacher),
    between them the generalised Jensen-Shannon divergence. With sampled only 1."""
    top_k: int = key(64, stages=("update",))
    """Number of tokens of topk."""
    quantise: Literal["none", "int8", "fp8"] = key("none", stages=("update",), on_resume="fixed")
    """Type of the weights of the teacher's products, as in model.quantise: 8 bits per element and
    one scale per output channel, as soon as they are read."""
    hint: str = key("", stages=("update",), on_resume="fixed")
    """What the teacher reads in place of a row's last user message, as text or a file with text:
    {prompt} is that message, other names in braces are columns of the row. Without {prompt} the
    hint follows the message, after a blank line. Without another teacher the model itself is the
    teacher (SDFT, OPSD)."""
    weights: Literal["base", "live"] = key("base", stages=("update",), on_resume="fixed")
    """Which weights the model has when it is its own teacher, as in TRL: base, those that the run
    began with; live, the current ones that are being trained."""
    hint_tokens: int = key(256, stages=("update",))
    """Largest number of tokens by which teacher.hint may lengthen a prompt; rows of an update have
    room for them."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, if sampled tokens cannot estimate the divergence that is asked for, if names of
        several teachers are not distinct, or if a setting is of a teacher that is not there."""
        at_least(self, "teacher.", 0, "coef", "beta", "hint_tokens")
        at_least(self, "teacher.", 1, "top_k")
        require(self.beta <= 1, "teacher.beta", self.beta, "a number from 0 to 1")
        require(
            self.divergence != "sampled" or self.beta == 1,
            "teacher.beta",
            self.beta,
            "1 with teacher.divergence=sampled, whose samples of the policy estimate KL(policy, "
            "teacher) alone; or teacher.divergence=full or topk",
        )
        for name, text in (("path", self.path), ("address", self.address)):
            are_several = bool(_SEVERAL.fullmatch(text))
            num_entries = text.count(",") + 1
            require(
                not are_several or len(_by_name(text)) == num_entries,
                f"teacher.{name}",
                text,
                "a name for each teacher that no other has, as in math=./a,code=./b",
            )
        require(
            not (self.path and self.address),
            "teacher.address",
            self.address,
            "empty with teacher.path: teachers are all servers, or all have their weights here",
        )
        for url in self.addresses.values():
            require(
                url.startswith(("http://", "https://")),
                "teacher.address",
                url,
                "http://HOST:PORT, the address of a server that scores given tokens",
            )
        require(
            not self.address or self.divergence != "full",
            "teacher.divergence",
            self.divergence,
            "sampled or topk with teacher.address: a server gives log-probs of the likeliest "
            "tokens, not of the whole vocabulary",
        )
        require(
            self.quantise == "none" or bool(self.path),
            "teacher.quantise",
            self.quantise,
            "none, or a teacher with weights of its own (teacher.path)",
        )
        require(
            self.weights == "base" or self.is_policy,
            "teacher.weights",
            self.weights,
            "base, or teacher.hint without another teacher: only then the model is its own",
        )

    @property
    def paths(self) -> dict[str, str]:
        """The checkpoints of teachers with weights of their own, by name; the name of a single one
        is "". Empty without any.

        >>> TeacherSection(path="math=./a,code=./b").paths
        {'math': './a', 'code': './b'}
        """
        return _by_name(self.path)

    @property
    def addresses(self) -> dict[str, str]:
        """The servers that are teachers, by name, like `paths`."""
        return _by_name(self.address)

    @property
    def names(self) -> list[str]:
        """Names of all teachers; "" is that of a single one, also of the model itself."""
        return [*self.paths, *self.addresses] or [""]

    @property
    def exists(self) -> bool:
        """True if there is a teacher."""
        return bool(self.path or self.address or self.hint)

    @property
    def is_policy(self) -> bool:
        """True if the model that is trained is its own teacher, by a prompt with a hint."""
        return bool(self.hint) and not (self.path or self.address)

    @property
    def is_first_policy(self) -> bool:
        """True if the teacher is the model with the weights that the run began with."""
        return self.is_policy and self.weights == "base"

    @property
    def is_live_policy(self) -> bool:
        """True if the teacher is the model with the weights that are trained, as they are."""
        return self.is_policy and self.weights == "live"

    @property
    def room(self) -> int:
        """Tokens by which the teacher's prompt may be longer than the policy's."""
        return self.hint_tokens if self.hint else 0

    @property
    def scores_samples(self) -> bool:
        """True if there is a teacher, of which only the log-probs of sampled tokens are read."""
        return self.exists and self.divergence == "sampled"

    @property
    def gives_distributions(self) -> bool:
        """True if there is a teacher whose distributions are compared with the policy's."""
        return self.exists and self.divergence != "sampled"


_SEVERAL = re.compile(r"[\w.-]+=[^,]+(,[\w.-]+=[^,]+)+")
"""Several teachers, each with a name: `math=./a,code=./b`. A single path may have a `=` itself."""


def _by_name(text: str) -> dict[str, str]:
    """Returns what the value of `teacher.path` or `teacher.address` names, by the teachers' names;
    {} if it is empty."""
    if not text:
        return {}
    if not _SEVERAL.fullmatch(text):
        return {"": text}
    return dict(entry.split("=", 1) for entry in text.split(","))
