"""Settings of the critic, a model that learns what a rollout will earn."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.key import at_least, key, require


@dataclass(frozen=True)
class CriticSection:
    """The keys `critic.*`, which count with algorithm.advantage=gae."""

    shared: bool = key(False, stages=("update",), on_resume="fixed")
    """Put the head on the policy's own layers, in place of a second model: no memory for another
    model, and one forward and backward pass for both. The layers then also learn to predict values,
    as much as critic.coef says, which changes the policy."""
    coef: float = key(0.1, stages=("update",))
    """Factor of the loss of the values in the gradient of the layers, with critic.shared (TRL's
    vf_coef)."""
    path: str = key("", stages=("update",), on_resume="fixed")
    """Checkpoint whose layers the critic begins with, of the model's sizes and vocabulary; empty
    for the model's own. The head that gives values is new, and trained whole. With model.lora.* the
    critic has an adapter of its own, and without a path the model's frozen weights."""
    lr: float = key(0.0, stages=("update",), undecided_because="it is optimizer.lr")
    """Peak learning rate of the critic; 0 for optimizer.lr. The rest is as optimizer.* says."""
    lam: float = key(-1.0, stages=("update",), undecided_because="it is algorithm.lam")
    """Lambda of the returns that the critic learns: 1 for the actual return (VAPO); lower values
    rely more on the critic's later predictions; -1 for algorithm.lam, that of the policy's
    advantages."""
    value_clip: float = key(0.5, stages=("update",))
    """How far the updates of a step may move a value with gain (verl's and TRL's cliprange_value);
    0 for no limit."""
    warmup_steps: int = key(0, stages=("update",))
    """Steps at the beginning in which the critic alone is updated (verl's critic_warmup)."""
    warmup_until: float = key(1.0, stages=("update",))
    """End the warm-up early, in the first step in which the critic explains so much of the returns'
    variance (critic/vf_explained_var); 1 for never."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, for a number that is out of
        its range."""
        at_least(self, "critic.", 0, "lr", note="optimizer.lr")
        at_least(self, "critic.", 0, "value_clip", note="off")
        at_least(self, "critic.", 0, "warmup_steps")
        require(
            self.coef > 0,
            "critic.coef",
            self.coef,
            "a number above 0: the head learns nothing with 0",
        )
        require(
            not (self.shared and self.path),
            "critic.path",
            self.path,
            "empty with critic.shared=true: the critic has the policy's layers",
        )
        require(
            0 <= self.lam <= 1 or self.lam == -1,
            "critic.lam",
            self.lam,
            "a number in [0, 1], or -1 (algorithm.lam)",
        )
        require(
            self.warmup_until <= 1,
            "critic.warmup_until",
            self.warmup_until,
            "at most 1, the share of the variance that a perfect critic explains",
        )
