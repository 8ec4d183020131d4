"""Settings of an update: the optimizer and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.config.key import at_least, key, require
from shoal.config.sections.devices import WEIGHTS_ON_DEVICES


@dataclass(frozen=True)
class OptimizerSection:
    """The keys `optimizer.*`: AdamW and its learning rate."""

    lr: float = key(1.5e-4, stages=("update",))
    """Peak learning rate of AdamW."""
    warmup_steps: int = key(5, stages=("update",))
    """Updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = key("constant", stages=("update",))
    """Learning rate after warm-up: constant, or falling to 0 at the last update."""
    weight_decay: float = key(0.0, stages=("update",))
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad_norm: float = key(1.0, stages=("update",))
    """Largest global gradient norm; 0 for no limit."""
    beta1: float = key(0.9, stages=("update",))
    """Decay of AdamW's first moment."""
    beta2: float = key(0.95, stages=("update",))
    """Decay of AdamW's second moment."""
    eps: float = key(1e-8, stages=("update",))
    """Added to the root of AdamW's second moment."""
    moments: Literal["float32", "bfloat16"] = key("float32", stages=("update",))
    """Type in which AdamW's moments are kept between updates. bfloat16 takes half the memory, 4
    bytes per parameter, and is rounded stochastically, so that small changes are right in the
    mean."""
    offload: bool = key(False, stages=("update",), on_resume="bits")
    """Keep AdamW's moments in the host's memory between updates, which saves 8 bytes per parameter
    on the devices (4 with optimizer.moments=bfloat16). An update fetches them one layer at a time;
    its result is the same."""
    reduce_dtype: Literal["float32", "bfloat16"] = key("float32", stages=("update",))
    """Type in which the gradients of several devices are summed; those of norms and biases are
    always summed in float32. bfloat16 halves the bytes that are moved; it needs a computation in
    bfloat16."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range. The first fault found is raised. beta1 and beta2 are from 0 to below 1; the other
        numbers are 0 or more."""
        at_least(self, "optimizer.", 0, "lr", "eps", "warmup_steps", "weight_decay")
        at_least(self, "optimizer.", 0, "clip_grad_norm", note="off")
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "a number in [0, 1)")


@dataclass(frozen=True)
class BatchSection:
    """The keys `batch.*`: sizes of a step, a group and a micro-batch."""

    prompts_per_step: int = key(
        32,
        stages=("data", "sampling", "update"),
        decided_from=("batch.prompts_per_device", "devices of the trainer"),
    )
    """P: prompts in a step (verl's train_batch_size)."""
    prompts_per_device: int = key(0, stages=("data", "sampling", "update"))
    """Prompts in a step for each device of the trainer, instead of prompts_per_step; 0 for off."""
    group_size: int = key(8, stages=("sampling", "update"))
    """G: completions of each prompt (TRL's num_generations, verl's rollout.n)."""
    micro_tokens: int = key(
        0,
        stages=("update",),
        decided_from=(
            "batch.prompts_per_step",
            "batch.group_size",
            "sampling.max_prompt_tokens",
            "sampling.max_completion_tokens",
            "algorithm.name",
            "algorithm.num_minibatches",
            "model.remat",
            "mesh.sampler_tensor",
            *WEIGHTS_ON_DEVICES,
            "devices of the trainer",
        ),
    )
    """Tokens of a micro-batch on one device, padding included, in one row that prompts and
    completions fill; it holds at least the longest prompt with the longest completion. 0 means
    2,048 on CPU; on an accelerator it means 4,096, or, up to 32,768, as many whole groups as leave
    a quarter of its memory free. This replaces micro-batch size and gradient accumulation: it
    affects memory and speed, never the result."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if prompts_per_device or
        micro_tokens is below 0, or prompts_per_step or group_size is below 1."""
        at_least(self, "batch.", 0, "prompts_per_device", note="off")
        at_least(self, "batch.", 0, "micro_tokens", note="auto")
        at_least(self, "batch.", 1, "prompts_per_step", "group_size")
