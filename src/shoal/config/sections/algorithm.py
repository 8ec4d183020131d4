"""Settings of the algorithm: what is learned from a group, by advantages, losses, KL and
corrections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shoal.config.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    OWN_ADVANTAGE,
    POLICY_LOSSES,
    REJECTIONS,
    advantage_of,
)
from shoal.config.key import at_least, key, require
from shoal.text import exact


@dataclass(frozen=True)
class AlgorithmSection:
    """The keys `algorithm.*`: how rewards become a loss."""

    name: str = key("", stages=(), on_resume="warn")
    """A paper's settings, which your own keys override: dapo, dr_grpo, gspo, cispo, ...
    (`shoal help train algorithm`)."""
    advantage: Annotated[str, ADVANTAGES] = key(
        "grpo", stages=("update", "sampling"), names_code="advantage"
    )
    """Advantage estimator: how the rewards of a group become advantages. gae: by a critic, for each
    token (PPO); its settings are critic.*. none ignores rewards (distillation from a teacher
    alone). sft learns the data's own answers instead of samples (`shoal sft`). `file.py:function`
    is your own function."""
    credit: Literal["completion", "turn", "state"] = key("completion", stages=("rewards", "update"))
    """What is compared within a group, and so gets an advantage. completion: whole completions.
    turn: the sum of the rewards from each turn on, compared with that of the other completions at
    that turn (rloo; grpo also divides by the standard deviation; with gae, a critic's time steps
    are turns instead of tokens). state: completions, and also turns that began with the same words
    of the environment (GiGPO)."""
    discount: float = key(1.0, stages=("update",))
    """credit=turn, state: factor of a reward for the turn before its own, discount^2 for the turn
    before that, and so on. 1: later rewards count as much as early ones. gae: the same between time
    steps, which are tokens, or turns with credit=turn."""
    lam: float = key(1.0, stages=("update",))
    """gae: lambda of the advantages. 1: the return from a time step on minus the critic's value,
    unbiased whatever the critic says; lower: less noise, but more of the critic's errors."""
    lam_alpha: float = key(0.0, stages=("update",))
    """gae: if above 0, lambda is 1 - 1 / (lam_alpha x time steps of the completion) instead of lam
    (VAPO, 0.05)."""
    whiten: bool = key(True, stages=("update",))
    """gae: subtract the mean of a step's advantages, and divide by their standard deviation
    (std_*), over all tokens (verl, TRL's PPO). false: the plain policy gradient."""
    std_ddof: int = key(1, stages=("update",))
    """Delta degrees of freedom of the standard deviation, as in numpy: 1 divides by n - 1 (TRL,
    Tunix), 0 by n (MaxText)."""
    std_eps: float = key(1e-4, stages=("update",))
    """Keeps the division of advantages by the standard deviation finite; std_eps_mode says how."""
    std_eps_mode: Literal["add", "max"] = key("add", stages=("update",))
    """add: divide by the standard deviation + std_eps. max: divide by the larger of the two
    (TorchRL)."""
    whiten_over: Literal["completions", "tokens"] = key("completions", stages=("update",))
    """reinforce++, reinforce++-baseline, gdpo: whether the mean and deviation of a step's
    advantages count each completion once, or once for each of its tokens (verl)."""
    loss: Annotated[str, POLICY_LOSSES] = key("grpo", stages=("update",))
    """Policy loss."""
    clip_low: float = key(0.2, stages=("update",))
    """Lower clipping epsilon: the ratio is clipped below 1 - clip_low (gmpo: exp(-clip_low); dppo:
    how far a token's probability may fall)."""
    clip_high: float = key(0.2, stages=("update",))
    """Upper clipping epsilon: the ratio is clipped above 1 + clip_high (gmpo: exp(clip_high);
    cispo: see cispo_bound; dppo: how far a token's probability may grow)."""
    clip_dual: float = key(0.0, stages=("update",))
    """Dual clip (verl's clip_ratio_c): for a negative advantage the loss is at most clip_dual x
    |advantage|; 0 for off."""
    cispo_bound: Literal["paper", "absolute", "both"] = key("paper", stages=("update",))
    """cispo: bounds of the importance weight. paper: at most 1 + clip_high; absolute: at most
    clip_high (TRL); both: from 1 - clip_low to 1 + clip_high (verl)."""
    sapo_positive: float = key(1.0, stages=("update",))
    """sapo: temperature of the gate for positive advantages."""
    sapo_negative: float = key(1.05, stages=("update",))
    """sapo: temperature of the gate for negative advantages."""
    kl: Annotated[str, KL_ESTIMATORS] = key("k3", stages=("update",))
    """KL estimator, by Schulman's names: k1 is the log-ratio, k2 half its square, k3 unbiased and
    never negative."""
    kl_coef: float = key(0.0, stages=("update",))
    """Weight of the KL divergence from the reference (beta of TRL and MaxText); 0 loads no
    reference."""
    reference: Literal["start", "base"] = key("start", stages=("update",))
    """The reference of the KL divergence. start: the policy at the start of the run, with the
    adapter that it starts from (model.lora.path, a run or folder with one), of which a copy is
    kept. base: the model without its adapter. Both are the same for full weights and for a new
    adapter."""
    kl_metric: bool = key(False, stages=("update",))
    """Report `kl` even if kl_coef is 0, as TorchRL does; this costs a forward pass per step and the
    reference's memory."""
    kl_placement: Literal["loss", "reward"] = key("loss", stages=("update",))
    """loss: the KL divergence is a term of the loss. reward: its sum over a completion is
    subtracted from the reward."""
    kl_clamp_input: float = key(0.0, stages=("update",))
    """Bound on the size of the log-ratio inside the KL estimator (verl 20); 0 for no bound."""
    kl_clamp_value: float = key(0.0, stages=("update",))
    """Bound on the size of a token's KL estimate (verl 10); 0 for no bound."""
    kl_weighted: bool = key(False, stages=("update",))
    """Multiply the KL term of the loss by the differentiable ratio exp(logprob - old_logprob)
    (TRL's use_bias_correction_kl)."""
    kl_sampler_coef: float = key(0.0, stages=("update",))
    """Weight of a KL divergence (k3) from the sampler's log-probs in the loss (TorchRL's
    kl_to_inference_coeff)."""
    entropy_coef: float = key(0.0, stages=("update",))
    """Weight of the entropy bonus, which is subtracted from the loss."""
    context_coef: float = key(0.0, stages=("update",))
    """Weight of the cross-entropy of what tools and environments said, so that the model learns to
    predict it (ECHO; alpha of prime-rl's echo, 0.1 there). It is the mean over all such tokens of
    an update, whatever aggregation is; 0 for off."""
    aggregation: Annotated[str, AGGREGATIONS] = key("token-mean", stages=("update",))
    """How token losses are averaged (verl's loss_agg_mode, TRL's loss_type), over the whole batch
    of an update."""
    aggregation_tokens: int = key(
        0, stages=("update",), decided_from=("sampling.max_completion_tokens",)
    )
    """seq-mean-token-sum-norm: the constant length to divide by (verl's loss_scale_factor); 0 for
    sampling.max_completion_tokens."""
    correction: Annotated[str, CORRECTIONS] = key(
        "auto",
        stages=("update",),
        decided_from=(
            "train.max_staleness",
            "train.weight_sync_interval",
            "sampler.kind",
            "sampler.quantise",
        ),
    )
    """Importance weights w = exp(old_logprob - sampler_logprob) that correct the gap between
    sampler and trainer. tis: w clipped to [correction_floor, correction_cap]; mis, icepop: w, and 0
    outside these bounds; none. direct: no weight, but the policy loss's ratio is exp(logprob -
    sampler_logprob) itself, clipped (TorchRL). auto: tis if samples may come from older weights
    (train.max_staleness, train.weight_sync_interval), else none."""
    correction_level: Literal["token", "sequence", "geometric"] = key("token", stages=("update",))
    """Weight of a token: its own, the product over its completion, or the geometric mean over its
    completion."""
    correction_cap: float = key(2.0, stages=("update",), may_be_infinite=True)
    """Upper bound of the correction weight; inf for none."""
    correction_floor: float = key(-1.0, stages=("update",), decided_from=("algorithm.correction",))
    """Lower bound of the correction weight; 0 for none, -1 for the correction's own: 0.5 for
    icepop, as in its paper, and none for the others."""
    rejection: Annotated[str, REJECTIONS] = key("none", stages=("update",))
    """Remove from the loss the tokens (token_*) or completions (seq_*) for which sampler and
    trainer are too far apart (verl's rollout_rs), by the estimate k1, k2 or k3 of each token, or
    its sum, mean or maximum over a completion. They still count in the denominator. k1 bounds the
    weight w of `correction`; seq_mean_k1 bounds its geometric mean."""
    rejection_cap: float = key(2.0, stages=("update",), may_be_infinite=True)
    """Upper bound of w with k1, otherwise of the estimate, in nats; inf for none."""
    rejection_floor: float = key(
        -1.0,
        stages=("update",),
        undecided_because="it is a formula of algorithm.rejection_cap, for the estimator k1 alone",
    )
    """With k1, the lower bound of w; 0 for none, -1 for 1 / rejection_cap."""
    match_sampling_support: bool = key(True, stages=("update", "sampling"))
    """Compute the trainer's log-probs over the tokens that top_k, top_p and min_p kept in sampling;
    false biases the ratio."""
    mask_truncated: bool = key(False, stages=("update",))
    """Exclude truncated completions from the loss (TRL's mask_truncated_completions); they still
    count in the group's mean and standard deviation."""
    dynamic_sampling: bool = key(False, stages=("data", "sampling"))
    """DAPO's dynamic sampling: replace groups without variance by further groups until the step is
    full."""
    dynamic_sampling_by: str = key("correct", stages=("data", "sampling"))
    """What must vary within a group for it to be kept. correct: the task's own check of its
    completions (the paper: some right, some wrong), or the `acc` that a reward function logs next
    to its score (verl), or without both the score; score: the reward minus the overlong penalty;
    reward: the whole reward; any other name: the number that a reward function logs under it."""
    max_sampling_rounds: int = key(10, stages=("data", "sampling"))
    """How often dynamic sampling may request the prompts of a step again: a step samples at most
    (1 + this) x batch.prompts_per_step prompts, each once."""
    on_too_few_groups: Literal["fill", "stop"] = key("fill", stages=("data", "sampling"))
    """If dynamic sampling then still lacks groups: fill the step with groups that it rejects, and
    warn, or stop the run with an error (verl's filter_groups)."""
    num_epochs: int = key(1, stages=("update",))
    """Passes over each step's groups (TRL's num_iterations, PPO epochs)."""
    num_minibatches: int = key(1, stages=("update",))
    """Optimizer updates in each pass."""
    zero_std_groups: Literal["include", "exclude"] = key("include", stages=("update",))
    """Whether completions of groups without variance count in the loss's denominator: include (the
    papers) or exclude (DAPO)."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a value is out of its
        range, or if a lower bound is above its upper bound. The first fault found is raised. Of the
        lower bounds, -1 stands for their default."""
        require(self.std_ddof in (0, 1), "algorithm.std_ddof", self.std_ddof, "0 or 1")
        self._check_credit()
        require(
            0 <= self.clip_low <= 1 or POLICY_LOSSES[self.loss].in_logarithms,
            "algorithm.clip_low",
            self.clip_low,
            "a number in [0, 1]",
        )
        at_least(
            self,
            "algorithm.",
            0,
            "std_eps",
            "clip_low",
            "clip_high",
            "kl_coef",
            "kl_clamp_input",
            "kl_clamp_value",
            "kl_sampler_coef",
            "entropy_coef",
            "context_coef",
            "aggregation_tokens",
        )
        for name in ("sapo_positive", "sapo_negative", "correction_cap", "rejection_cap"):
            require(
                getattr(self, name) > 0,
                f"algorithm.{name}",
                getattr(self, name),
                "a number above 0",
            )
        at_least(self, "algorithm.", 1, "num_epochs", "num_minibatches")
        at_least(self, "algorithm.", 0, "max_sampling_rounds")
        require(
            self.clip_dual == 0 or self.clip_dual > 1,
            "algorithm.clip_dual",
            self.clip_dual,
            "0 (off) or above 1",
        )
        for name in ("correction_floor", "rejection_floor"):
            floor = getattr(self, name)
            require(
                floor >= 0 or floor == -1,
                f"algorithm.{name}",
                floor,
                "-1 (its default), 0 (none) or more",
            )
        floor = CORRECTIONS[self.correction].lower_bound(self.correction_floor)
        require(
            floor <= self.correction_cap,
            "algorithm.correction_floor",
            floor,
            f"at most algorithm.correction_cap ({exact(self.correction_cap)})",
        )
        least, most = REJECTIONS[self.rejection].bounds(self.rejection_cap, self.rejection_floor)
        require(
            least <= most,
            "algorithm.rejection_cap",
            self.rejection_cap,
            "at least algorithm.rejection_floor, and with -1 for that at least 1",
        )

    def _check_credit(self) -> None:
        """Raises ShoalError for a discount that is out of its range or not read, and for an
        advantage or a loss that cannot tell turns apart."""
        require(0 <= self.discount <= 1, "algorithm.discount", self.discount, "a number in [0, 1]")
        require(0 <= self.lam <= 1, "algorithm.lam", self.lam, "a number in [0, 1]")
        at_least(self, "algorithm.", 0, "lam_alpha", note="off")
        if self.has_critic:
            require(
                not POLICY_LOSSES[self.loss].one_gradient,
                "algorithm.loss",
                self.loss,
                "a loss by token (such as grpo) with algorithm.advantage=gae: this one has one "
                "gradient for all tokens of a completion",
            )
        if self.credit == "completion":
            require(
                self.discount == 1 or self.has_critic,
                "algorithm.discount",
                self.discount,
                "1, or algorithm.credit=turn or state: a whole completion has no later turns",
            )
            return
        among_turns = {"turn": ("rloo", "grpo", "gae"), "state": ("grpo", "dr_grpo", "rloo")}
        names = among_turns[self.credit]
        # A function of the user's gets the rewards of turns as they are.
        is_own_of_turns = self.has_own_advantage and self.credit == "turn"
        or_own = " or file.py:function" if self.credit == "turn" else ""
        require(
            self.advantage in names or is_own_of_turns,
            "algorithm.advantage",
            self.advantage,
            f"{' or '.join(names)}{or_own} with algorithm.credit={self.credit}",
        )
        require(
            self.discount == 1 or not is_own_of_turns,
            "algorithm.discount",
            self.discount,
            "1 with your own function: it gets the reward of each turn, and applies its own "
            "discount",
        )
        require(
            not POLICY_LOSSES[self.loss].one_gradient,
            "algorithm.loss",
            self.loss,
            f"a loss by token (such as gspo-token) with algorithm.credit={self.credit}: this one "
            "has one gradient for all tokens of a completion",
        )

    @property
    def has_own_advantage(self) -> bool:
        """True if `advantage` names a function of the user's."""
        return advantage_of(self.advantage) is OWN_ADVANTAGE

    @property
    def uses_rewards(self) -> bool:
        """False if rewards are no signal of training, because a teacher or the data's answers are
        the only one."""
        return advantage_of(self.advantage).uses_rewards

    @property
    def has_critic(self) -> bool:
        """True if advantages come from the values of a critic, which is trained too."""
        return advantage_of(self.advantage).of_critic

    @property
    def learns_from_data(self) -> bool:
        """True if training learns the data's own answers and samples nothing."""
        return advantage_of(self.advantage).of_data

    @property
    def scores_reference(self) -> bool:
        """True if a reference model is loaded and scores the completions of each step."""
        return self.kl_coef > 0 or self.kl_metric
