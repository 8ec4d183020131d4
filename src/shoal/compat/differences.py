"""What differs from another system although its flag or recipe is accepted: a table of `docs/migrating.md`.

`tests/compat/test_figures.py` compares with numbers of the systems' own code, and says which of them each row explains.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    system: str
    setting: str
    theirs: str
    ours: str


DIFFERENCES: dict[str, Difference] = {
    "trl unscorable": Difference(
        "TRL", "completions for which every reward function returns `None`", "stay in every denominator",
        "leave the denominator"),
    "trl updates": Difference(
        "TRL", "`loss_type` `dapo`, `cispo` with several updates of one generation",
        "divide an update by the generation's tokens over the number of updates",
        "divide an update by its own tokens"),
    "trl means of means": Difference(
        "TRL", "`loss_type=bnpo`, `entropy_coef`", "means of micro-batches' means over tokens, whatever `loss_type`",
        "one denominator for the whole update, that of `algorithm.aggregation`"),
    "trl minibatches": Difference(
        "TRL", "several updates of one generation", "each has completions from any group", "each has whole groups"),
    "trl max_staleness": Difference(
        "TRL", "`max_staleness`",
        "learns from groups as they finish; drops a sample that is older when its turn comes",
        "a step learns from the groups it asked for; none starts on older weights, so none is dropped"),
    "trl weights in flight": Difference(
        "TRL", "`AsyncGRPOTrainer`", "the sampler's weights change while completions go on",
        "each completion is of one version, unless `train.versions=newest`"),
    "verl staleness_threshold": Difference(
        "verl", "`async_training.staleness_threshold`",
        "bounds the samples drawn ahead; a long completion may be older when its turn comes",
        "bounds the age of the weights that a group starts on"),
    "verl longest response": Difference(
        "verl", "`loss_agg_mode=seq-mean-token-sum-norm` without `loss_scale_factor`",
        "divides by the longest response of each micro-batch", "divides by `data.max_response_length`"),
    "verl clip_ratio": Difference(
        "verl", "`clip_ratio` alone", "no effect, since its own file sets both bounds", "sets both bounds"),
    "verl rewards to go": Difference(
        "verl", "`adv_estimator=reinforce_plus_plus` with `use_kl_in_reward`",
        "each token has the divergence of the tokens after it", "all tokens have the whole completion's divergence"),
    "verl means": Difference(
        "verl", "`loss_mode` `sapo`, `geo_mean` with a divergence or entropy term",
        "means over completions for the policy term, `loss_agg_mode` for the other terms",
        "means over completions for all terms"),
    "verl geo_mean": Difference(
        "verl", "`loss_mode=geo_mean` with `rollout_is=token` or several micro-batches",
        "one weight a completion; the micro-batches' means are added up",
        "a weight a token; micro-batches change no number"),
    "verl whitening": Difference(
        "verl", "`adv_estimator` `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`",
        "divides by the root of the variance + 1e-8",
        "divides by the deviation + `algorithm.std_eps`: 33 to 75% apart at deviations near 1e-4"),
    "verl clamp of the ratio": Difference(
        "verl, Tunix", "the ratio of a token's probabilities", "its logarithm is clamped to 20, verl's `gspo` to 10",
        "is not clamped"),
    "tunix unscorable": Difference(
        "Tunix", "completions for which a reward function returns `None` or NaN", "count as reward 0",
        "leave their group's mean and the denominator"),
    "tunix micro-batches": Difference(
        "Tunix", "`loss_agg_mode=token-mean` with micro-batches", "the mean of the micro-batches' means",
        "one denominator for the whole update"),
    "torchrl means": Difference(
        "TorchRL", "`train.kl_to_ref_coeff` in the loss", "the mean over all positions, prompt and padding included",
        "the mean over sampled tokens"),
    "torchrl KL in the reward": Difference(
        "TorchRL", "`train.kl_coef_in_loss=false`",
        "subtracts each token's divergence from its reward; mean and deviation are over the group's tokens",
        "subtracts the sum over a completion's tokens from its reward"),
    "torchrl KL to the sampler": Difference(
        "TorchRL", "the recipe's `train.kl_to_inference_coeff` of 0.01", "a divergence from the sampler in the loss",
        "refused as a flag, not part of `recipe=torchrl`"),
    "torchrl scale": Difference(
        "TorchRL", "the gradient", "an eighth by default, since the recipe averages logged values into the loss",
        "whole: a bound of the gradient's norm acts earlier"),
    "sampler ratios": Difference(
        "TorchRL, MaxText", "the ratio that is clipped", "to the sampler's log-probs",
        "to the trainer's from before the update; `algorithm.correction` weights by their ratio to the sampler's"),
    "maxtext reward": Difference(
        "MaxText", "the reward of its experimental GRPO trainer", "a placeholder: the completion's length",
        "the task's reward, by `reward.preset`"),
}
"""By a name that tests use."""
