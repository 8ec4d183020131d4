"""What a configuration says about learning: whether it can be, what it makes of samples, and who makes the updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.config.loading import packaged_values
from shoal.config.schema import AlgorithmSection, Config, TrainSection
from shoal.model.transformer import Model
from shoal.run.brief import num_updates
from shoal.tasks.task import TASKS
from shoal.trainer.loop import Schedule, sampling_params
from shoal.trainer.loss import Objective
from shoal.trainer.step import Learner, ModelScorer, ParameterScorer
from shoal.trainer.update import Updater, needs_all_groups
from shoal.types import Params, ShoalError

BOUNDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "gspo", "gspo-token"), ("clip_low", "clip_high", "clip_dual")),
    "cispo": ("clip_low", "clip_high"), "gmpo": ("clip_low", "clip_high"), "sapo": ("sapo_positive", "sapo_negative"),
}
"""By the policy loss, the keys that bound its ratio."""

CHECKED = tuple(name for name in TASKS if name != "custom")
"""Tasks that say of an answer whether it is right, whatever the reward functions are."""


def check_trainable(config: Config) -> None:
    """Raises ShoalError for settings from which nothing can be learnt."""
    a = config.algorithm
    if config.sampling.temperature == 0:
        raise ShoalError("sampling.temperature=0: in training every completion of a group would be the same; "
                         "set it to 1.0")
    if a.advantage == "none" and not config.teacher.path:
        raise ShoalError("algorithm.advantage=none: nothing teaches, the rewards have no part and there is no teacher; "
                         "set teacher.path, or another advantage")
    if a.advantage == "none" and a.kl_placement == "reward" and a.kl_coef:
        raise ShoalError("algorithm.kl_placement=reward with algorithm.advantage=none: a divergence taken off the reward has "
                         "no part here; set algorithm.kl_placement=loss")
    if a.advantage == "gdpo" and a.kl_placement == "reward" and a.kl_coef:
        raise ShoalError("algorithm.kl_placement=reward with algorithm.advantage=gdpo: each part of the reward is divided by "
                         "its own deviation, so algorithm.kl_coef would cancel; set algorithm.kl_placement=loss")
    if a.dynamic_sampling and a.advantage == "none":
        raise ShoalError("algorithm.dynamic_sampling=true with algorithm.advantage=none: groups are chosen by their "
                         "rewards, which have no part here; set one of them otherwise")


def algorithm_warnings(config: Config) -> Iterator[str]:
    """What is allowed and hardly meant."""
    a, s, truncated = config.algorithm, config.sampling, sampling_params(config.sampling).truncated
    if a.loss.startswith("gspo") and max(a.clip_low, a.clip_high) > 0.01:
        yield (f"algorithm.loss={a.loss} with clip_low={a.clip_low:g} clip_high={a.clip_high:g} practically "
               "never clips: a sequence's ratio moves far less than a token's; the paper has 3e-4 and 4e-4")
    if a.kl == "k1" and a.kl_placement == "loss" and a.kl_coef:
        yield ("algorithm.kl=k1 in the loss regularises nothing: its on-policy gradient is zero in expectation; set "
               "algorithm.kl_placement=reward, or kl=k2 or k3")
    if truncated and not a.match_sampling_support:
        yield ("algorithm.match_sampling_support=false: log-probs are over all tokens, samples over those that top_k, top_p "
               "and min_p keep; the ratio is biased by the mass that is kept")
    if truncated and a.match_sampling_support:
        yield (f"samples are truncated: at each place at most {max_support(config)} tokens (sampling.max_support="
               f"{s.max_support}, the likeliest) are kept, stored and replayed by the trainer")
        if config.teacher.path:
            yield ("a teacher with truncated samples is asked about the kept tokens alone: where one is kept it says "
                   "nothing; set sampling.top_k=0, top_p=1, min_p=0")
    if (oldest := max(config.train.max_staleness, config.train.weight_sync_interval - 1)) > 0 and a.correction == "none":
        yield (f"samples may be {oldest} version{'s' * (oldest > 1)} old (train.max_staleness, train.weight_sync_interval) "
               "and with algorithm.correction=none are learnt from as if they were new: set algorithm.correction=tis")
    if config.teacher.path and a.loss in ("gspo", "gmpo"):
        yield (f"a teacher with algorithm.loss={a.loss}: what it says of each token is averaged over the completion, "
               "all of whose tokens have one gradient; set algorithm.loss=gspo-token, or grpo")
    own = config.reward.functions and config.task.name in CHECKED
    if a.dynamic_sampling and a.dynamic_sampling_by == "correct" and own:
        yield (f"dynamic sampling keeps groups that the check of task={config.task.name} finds partly right, whatever "
               "reward.functions say of them; algorithm.dynamic_sampling_by=reward goes by these")
    yield from unread_settings(config)


def unread_settings(config: Config) -> Iterator[str]:
    """Keys that were set and that nothing reads, or that mean another thing, beside the others."""
    a = config.algorithm
    yield from unread_bounds(config)
    if a.aggregation_tokens and a.aggregation != "seq-mean-token-sum-norm":
        yield (f"algorithm.aggregation_tokens={a.aggregation_tokens} has no effect on "
               f"algorithm.aggregation={a.aggregation}: it is for seq-mean-token-sum-norm")
    if a.loss == "cispo" and a.cispo_bound == "absolute" and a.clip_high <= 1:
        yield (f"algorithm.clip_high={a.clip_high:g} with algorithm.cispo_bound=absolute bounds every weight below the "
               "1 that it starts from; 5 is usual")
    if a.kl_coef and a.kl_placement == "reward" and a.kl != "k1":
        yield f"algorithm.kl={a.kl} in the reward: k1 is the unbiased one there"
    if a.kl_coef and a.kl_placement == "reward" and a.kl_weighted:
        yield "algorithm.kl_weighted=true has no effect on a divergence in the reward"
    if a.zero_std_groups == "exclude" and needs_all_groups(a, bool(config.teacher.path)):
        yield ("algorithm.zero_std_groups=exclude has no effect where a divergence, an entropy bonus or a teacher acts "
               "on every group")
    shifted = config.reward.overlong_buffer_tokens or (a.kl_coef and a.kl_placement == "reward")
    if a.advantage == "maxrl" and (shifted or any(weight < 0 for weight in config.reward.weights)):
        yield ("algorithm.advantage=maxrl divides by the group's mean reward, for rewards of 0 or more: a group with "
               "one below 0 (a penalty, a divergence, a weight below 0) teaches nothing")


def unread_bounds(config: Config) -> Iterator[str]:
    """Bounds of the ratio that the loss does not read, or that cannot act since every ratio is 1; what a recipe or an
    algorithm brought by name is not spoken of there."""
    a, defaults = config.algorithm, AlgorithmSection()
    if a.clip_dual and "clip_dual" not in BOUNDS[a.loss]:
        users = ", ".join(loss for loss, bounds in BOUNDS.items() if "clip_dual" in bounds)
        yield f"algorithm.clip_dual={a.clip_dual:g} has no effect on algorithm.loss={a.loss}: it is for {users}"
    changed = [name for name in BOUNDS[a.loss] if getattr(a, name) != getattr(defaults, name)]
    if not changed or a.num_epochs * a.num_minibatches > 1:
        return
    brought = packaged_values(config)
    own = [f"algorithm.{name}={getattr(a, name):g}" for name in changed
           if getattr(a, name) != brought.get(f"algorithm.{name}")]
    if own:
        yield (f"{', '.join(own)} cannot act: with one update a step every ratio is 1 and nothing is clipped; set "
               "algorithm.num_minibatches or algorithm.num_epochs above 1")


def max_support(config: Config) -> int:
    """Places, at each token, for those that it was chosen from; 0 where all were kept or nobody reads them."""
    s = config.sampling
    if not (sampling_params(s).truncated and config.algorithm.match_sampling_support):
        return 0
    return min(s.max_support, s.top_k or s.max_support)


def schedule_of(t: TrainSection) -> Schedule:
    """`max_staleness = lag + weight_sync_interval - 1`."""
    lag = 0 if t.max_staleness == -1 else t.max_staleness - (t.weight_sync_interval - 1)
    return Schedule(lag, t.weight_sync_interval)


def make_learner(config: Config, model: Model) -> Learner:
    return Learner(model, Objective.of(config.algorithm), config.optimizer, num_updates(config))


def make_updater(config: Config, learner: Learner, first: Params | None, teacher: ModelScorer | None) -> Updater:
    """`first`: the weights that the reference keeps; read only where there is one."""
    a = config.algorithm
    reference = ParameterScorer(learner, first) if a.kl_coef > 0 else None
    return Updater(learner, a, config.batch, config.sampling.temperature, config.seed, reference, teacher,
                   config.teacher.coef, config.sampling.max_completion_tokens, max_support(config))
