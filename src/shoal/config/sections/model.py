"""Settings of the models: the one that is trained, its adapter, and a teacher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.config.key import at_least, key, require
from shoal.config.sections.devices import WEIGHTS_ON_DEVICES


@dataclass(frozen=True)
class LoraSection:
    """The keys `model.lora.*`: an adapter that is trained in place of all weights."""

    rank: int = key(0, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Rank of a LoRA adapter, which alone is then trained; 0: all weights are. 16 is usual, with
    five to ten times the learning rate of full training."""
    alpha: float = key(32.0, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """The adapter's change is multiplied by alpha / rank."""
    targets: tuple[str, ...] = key(
        ("all-linear",), stages=("update", "sampling", "evaluation"), on_resume="fixed"
    )
    """Products that have an adapter, by PEFT's names: all-linear, or [q_proj,v_proj], or a regular
    expression. Experts, which are parameters to PEFT, are named: experts.gate_up_proj,
    experts.down_proj."""
    rslora: bool = key(False, stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Multiply by alpha / sqrt(rank) in place of alpha / rank."""
    path: str = key("", stages=("update", "sampling", "evaluation"), on_resume="fixed")
    """Folder of an adapter in PEFT's format, or run folder with one, to begin with; its rank, alpha
    and targets hold."""

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


@dataclass(frozen=True)
class ModelSection:
    """The keys `model.*`: the model, its types and how it is computed."""

    path: str = key("tiny", stages=("sampling", "update", "data", "evaluation"), on_resume="fixed")
    """The model to train: a folder or hub id in Hugging Face format, a run folder, or a packaged
    one: `tiny` for word problems, `tiny-tools` for calculator and guess."""
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
    optimizer state stay float32. float16, on CPU and GPU, rounds 8 times less than bfloat16, and
    has a loss scale that adapts."""
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
    with what is kept, and each block's input, in the host's memory. auto keeps what there is memory
    for, nothing on a TPU that computes again as fast as it reads (8B on v6e); where the memory is
    not known, as on a CPU, it is dots, or full where a micro-batch's activations would exceed 2
    GiB."""
    lora: LoraSection = field(default_factory=LoraSection)
    quantise: Literal["none", "int8", "fp8"] = key(
        "none", stages=("sampling", "update", "evaluation"), on_resume="fixed"
    )
    """Type of frozen weights of products: 8 bits an element and a scale an output channel, from
    when they are read. In training with model.lora; in eval and generate for any model."""
    router_replay: Literal["auto", "on", "off"] = key(
        "auto",
        stages=("sampling", "update"),
        decided_from=("sampler.kind", "experts of the model"),
    )
    """Mixtures of experts: whether the policy, when it scores and learns, sends each token to the
    experts that the sampler sent it to, which the groups' files then record (R3, arXiv:2510.11370).
    Rounding makes a router choose other experts now and then, and log-probs of such tokens differ
    much. auto is on for a model with experts, unless another engine samples, which returns no
    routes. Reference and teacher choose their own."""
    attention: Literal["auto", "reference", "blocked", "pallas"] = key(
        "auto",
        stages=("sampling", "update", "evaluation"),
        undecided_because="each program chooses by the shape of its rows, and each start by "
        "whether the kernels pass their test there",
    )
    """How training, scoring and prefill compute attention: all scores of a row at once (reference),
    only the blocks of them that a prompt and its completions need (blocked), or the same by our own
    kernels, on a TPU or an NVIDIA GPU (pallas). auto takes a kernel for rows of 512 tokens and
    more, else blocked. Decoding has a kernel of ours, too, with auto and with pallas. With auto
    they are taken if their results are right in a test at the start, else blocked for
    everything."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if 8-bit weights are asked for
        with float16."""
        require(
            self.quantise == "none" or self.dtype != "float16",
            "model.quantise",
            self.quantise,
            "none with model.dtype=float16, whose largest number the products of 8 bits pass",
        )


@dataclass(frozen=True)
class TeacherSection:
    """The keys `teacher.*`: a second model whose log-probs the policy learns from."""

    path: str = key("", stages=("update",), on_resume="fixed")
    """Teacher checkpoint with the model's vocabulary, for on-policy distillation; empty for none.
    With algorithm.advantage=none it is the only signal."""
    coef: float = key(1.0, stages=("update",))
    """Weight of the teacher's term."""
    divergence: Literal["sampled", "topk", "full"] = key("sampled", stages=("update",))
    """What of the teacher's distribution is learned from. sampled: the teacher's log-prob of the
    sampled token minus the policy's is added to the token's advantage. full: the divergence of both
    distributions over the whole vocabulary is a term of the loss. topk: that over the teacher's
    teacher.top_k likeliest tokens, with all others as one; needs no second head beside the
    policy's."""
    beta: float = key(1.0, stages=("update",))
    """Which divergence, as in TRL: 0 forward KL(teacher, policy), 1 reverse KL(policy, teacher),
    between them Jensen-Shannon's, generalised. sampled has 1 alone."""
    top_k: int = key(64, stages=("update",))
    """Tokens of topk."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, or if sampled tokens cannot estimate the divergence that is asked for."""
        at_least(self, "teacher.", 0, "coef", "beta")
        at_least(self, "teacher.", 1, "top_k")
        require(self.beta <= 1, "teacher.beta", self.beta, "a number from 0 to 1")
        require(
            self.divergence != "sampled" or self.beta == 1,
            "teacher.beta",
            self.beta,
            "1 with teacher.divergence=sampled, whose samples of the policy estimate KL(policy, "
            "teacher) alone; or teacher.divergence=full or topk",
        )

    @property
    def scores_samples(self) -> bool:
        """True if there is a teacher, of which only the log-probs of sampled tokens are read."""
        return bool(self.path) and self.divergence == "sampled"

    @property
    def gives_distributions(self) -> bool:
        """True if there is a teacher whose distributions are compared with the policy's."""
        return bool(self.path) and self.divergence != "sampled"
