"""Writes the pages that are made from tables of the package: `python docs/reference.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shoal.compat.flags import Flag
from shoal.compat.front import SYSTEMS
from shoal.runs.metrics import METRICS, is_clock
from shoal.trainer.callbacks import TRL_NAMES

EVALUATION: Mapping[str, tuple[str, str]] = {
    "num_questions": ("questions", "number of questions"),
    "protocol": ("text", "how the answers were generated"),
    "accuracy": ("share", "right answers; absent if the task does not define which are right"),
    "accuracy_interval": (
        "shares",
        "its 95% interval (Wilson); with several answers to a question that of one answer each, "
        "which is never too narrow",
    ),
    "accuracy_by": (
        "text",
        "`reward` if a reward function's `acc` says which answers are right; absent if the task "
        "does",
    ),
    "accuracy_any_form": (
        "share",
        "answers that are right wherever the text says it; in shoal eval of a task that asks for "
        "a form",
    ),
    "well_formed": (
        "share",
        "answers in the form that the task requests; absent if it requests none",
    ),
    "mean_reward": ("reward", "mean weighted reward of the answers"),
    "rewards/{function}": ("reward", "mean value of one reward function"),
    "rewards/logged/{name}": (
        "as logged",
        "mean of a number that a reward function stored with each answer: by log_extra, or in "
        "verl's dict beside `score`",
    ),
    "accuracy/{source}": (
        "share",
        "that of the questions of one data set, if the column `data_source` names several; so too "
        "`mean_reward/{source}` and `rewards/logged/{name}/{source}`",
    ),
    "best_reward": (
        "reward",
        "mean of the highest reward of each question; without verdicts, with evaluation.samples "
        "above 1",
    ),
    "mean_length": ("tokens", "mean tokens of an answer"),
    "truncated": ("share", "answers that reached the token limit"),
    "pass@{k}": (
        "share",
        "unbiased chance that one of k sampled answers is right; in the first and last evaluation, "
        "with evaluation.samples above 1 in each",
    ),
    "pass@{k}_error": ("share", "its standard error over questions"),
    "pass@1": (
        "share",
        "share of right answers among the samples; in the same evaluations",
    ),
    "pass@1_error": ("share", "its standard error over questions"),
    "maj@{k}": (
        "share",
        "questions whose most frequent sample is right; absent if the task extracts no answers",
    ),
    "maj@{k}_error": ("share", "its standard error over questions"),
    "sampled_accuracy": ("share", "the same as pass@1"),
    "sampled_accuracy_error": ("share", "its standard error over questions"),
    "sampled_mean_reward": ("reward", "mean weighted reward of the samples"),
    "sampled_num_questions": ("questions", "how many were sampled (`train.quick_questions`)"),
    "sampled_protocol": ("text", "how the samples were generated"),
}
"""Figure of an evaluation -> unit, meaning."""

VERL_NAMES: Mapping[str, str] = {
    "reward/mean": "`critic/score/mean`",
    "reward/min": "`critic/score/min`",
    "reward/max": "`critic/score/max`",
    "completions/length_mean": "`response_length/mean`",
    "completions/length_min": "`response_length/min`",
    "completions/length_max": "`response_length/max`",
    "completions/truncated": "`response_length/clip_ratio`",
    "prompts/length_mean": "`prompt_length/mean`",
    "loss": "`actor/pg_loss`, with the KL term",
    "kl": "`actor/kl_loss`",
    "critic/vf_loss": "`critic/vf_loss`",
    "critic/vf_explained_var": "`critic/vf_explained_var`",
    "critic/vf_clipfrac": "`critic/vf_clipfrac`",
    "critic/vpred_mean": "`critic/vpred_mean`",
    "critic/values/mean": "`critic/values/mean`",
    "critic/values/min": "`critic/values/min`",
    "critic/values/max": "`critic/values/max`",
    "critic/returns/mean": "`critic/returns/mean`",
    "critic/returns/min": "`critic/returns/min`",
    "critic/returns/max": "`critic/returns/max`",
    "critic/grad_norm": "`critic/grad_norm`",
    "critic/lr": "`critic/lr`",
    "entropy": "`actor/entropy`",
    "clip/fraction": "`actor/pg_clipfrac`",
    "grad_norm": "`actor/grad_norm`",
    "lr": "`actor/lr`",
    "staleness": "`training/off_policy/trajectory_staleness/mean`",
    "staleness/max": "`training/off_policy/trajectory_staleness/max`",
    "time/step_seconds": "`timing_s/step`",
    "time/sample_seconds": "`timing_s/gen`",
    "time/reward_seconds": "`timing_s/reward`",
    "time/update_seconds": "`timing_s/update_actor`",
    "mfu": "`perf/mfu/actor`, of updates only",
}
"""Metric -> what verl calls the same thing."""

TRL_TERMS: Mapping[str, str] = {name: f"`{theirs}`" for name, theirs in TRL_NAMES.items()} | {
    "groups/nonzero_std": "1 - `frac_reward_zero_std`",
}
"""Metric -> what TRL calls the same thing."""

_METRICS_HEAD = """\
# Metrics

After reading this page you know what each number of a run means, and what TRL and verl call it.

<!-- made by `python docs/reference.py`; change `src/shoal/runs/metrics.py` instead -->

Each step writes a line to `metrics.jsonl`, with `step` counted from 1. TensorBoard
(`report.tensorboard=true`), Weights & Biases, MLflow and Trackio (`report.wandb.mode=online`, or
`offline`; `report.mlflow.mode`, `report.trackio.mode`) get the same figures under the same names.
In Python:

```python
run = shoal.load_run("outputs/first")
run.metrics["reward/mean"]     # one value for each step
run.metrics.to_pandas()        # one row for each step
```

The column *reduction* says how values become one figure for a step:

* **mean**: their sum over all items of the step, divided by the number of items; never a mean of
  means;
* **sum**, **min**, **max**: over all items of the step;
* **last**: the value at the end of the step.

Figures of groups, rewards, completions and updates are of the groups that the step trains on.
Groups that dynamic sampling discarded are counted in `groups/discarded`, and their work only where
work is counted: in `tokens/sampled`, `rewards/failed`, times, speeds and the sampler's counters.

A metric that was not measured in a step is absent, not zero: `kl` without a reference, `mfu` on a
device with an unknown peak rate, a reward function that scored nothing. Metrics marked ⏱ depend on
the machine; a resumed run repeats all others bit for bit.
"""

_EVALUATION_HEAD = """
## Evaluations

Each evaluation of a data set writes a line to `evaluations.jsonl`: `step` is the version of the
weights, `name` the data set. TensorBoard and the services get the numbers as
`evaluate/<name>/<figure>`. verl calls `accuracy/<source>` `val-core/<source>/acc/mean@n`, with n of
`evaluation.samples`, `pass@k` `best@k/mean`, `maj@k` `maj@k/mean`, and `best_reward`
`reward/best@n/mean`.
"""


class Difference(NamedTuple):
    system: str
    setting: str
    theirs: str
    ours: str


DIFFERENCES: dict[str, Difference] = {
    "trl unscorable": Difference(
        "TRL",
        "completions for which every reward function returns `None`",
        "stay in every denominator",
        "are left out of the denominator",
    ),
    "trl updates": Difference(
        "TRL",
        "`loss_type` `dapo`, `cispo` with several updates of one generation",
        "divide an update by the generation's tokens over the number of updates",
        "divide an update by its own tokens",
    ),
    "trl means of means": Difference(
        "TRL",
        "`loss_type=bnpo`, `entropy_coef`",
        "means of micro-batches' means over tokens, whatever `loss_type`",
        "one denominator for the whole update, that of `algorithm.aggregation`",
    ),
    "trl minibatches": Difference(
        "TRL",
        "several updates of one generation",
        "each has completions from any group",
        "each has whole groups, so a step has at least as many as updates",
    ),
    "trl greedy evaluation": Difference(
        "TRL",
        "an evaluation without `num_generations_eval`",
        "samples `num_generations` answers to each prompt",
        "has one greedy answer to each question",
    ),
    "trl long prompts": Difference(
        "TRL",
        "a prompt of any length, with `recipe=trl`",
        "is trained on: there is no limit",
        "rows of a file or from Python have room for the longest prompt; others are dropped if "
        "they have more than 1,024 tokens (data to download, prompts that go on in turns), with a "
        "warning (`sampling.max_prompt_tokens`)",
    ),
    "trl max_staleness": Difference(
        "TRL",
        "`max_staleness`",
        "learns from groups as they finish; drops a sample that is older when its turn comes",
        "a step learns from the groups that were requested for it; none starts on older weights, "
        "so none is dropped",
    ),
    "trl weights in flight": Difference(
        "TRL",
        "`AsyncGRPOTrainer`",
        "the sampler's weights change in the middle of completions",
        "each completion comes from one version, unless `train.versions=newest`",
    ),
    "verl staleness_threshold": Difference(
        "verl",
        "`async_training.staleness_threshold`",
        "bounds the samples taken ahead; a long completion may be older when its turn comes",
        "bounds the age of the weights that a group starts on",
    ),
    "verl batch": Difference(
        "verl",
        "`reward_manager=batch`",
        "calls the reward function once with all completions of a step",
        "calls it with the completions of one prompt at a time, which matters to a function that "
        "compares prompts",
    ),
    "verl test_freq": Difference(
        "verl",
        "`trainer.test_freq` of 0 or less, its default, with `trainer.val_before_train=True`",
        "evaluates before training alone",
        "evaluates after the last step too",
    ),
    "verl gen_batch_size": Difference(
        "verl",
        "`algorithm.filter_groups.enable=True`",
        "samples `data.gen_batch_size` prompts at a time, those of the next epoch too, and drops "
        "what is beyond a step; an epoch has rows // `data.gen_batch_size` steps",
        "samples as many as are likely to be needed, each prompt at most once in a step, so a step "
        "consumes fewer prompts; an epoch has rows // `data.train_batch_size` steps",
    ),
    "verl longest response": Difference(
        "verl",
        "`loss_agg_mode=seq-mean-token-sum-norm` without `loss_scale_factor`",
        "divides by the longest response of each micro-batch",
        "divides by `data.max_response_length`",
    ),
    "verl long prompts": Difference(
        "verl",
        "a prompt that is too long, without `data.filter_overlong_prompts`",
        "is cut from the left, whatever `data.truncation` says",
        "is an error",
    ),
    "verl best@k": Difference(
        "verl",
        "`mean@n`, `best@k` and `maj@k` of a validation with `val_kwargs.n` answers",
        "means of `acc`, or of the number that the function returns alone; of k answers over "
        "random draws of k of the n",
        "`accuracy` counts the answers with `acc` 1, `rewards/logged/acc` is the mean of `acc`, "
        "`mean_reward` that of a number alone; `pass@k` is exact; `maj@n` is of all n answers, "
        "of tasks that extract answers: a function's `pred` has no vote",
    ),
    "verl rows in both files": Difference(
        "verl",
        "training rows whose prompt is in `data.val_files` too",
        "are trained on",
        "are left out, so an epoch may have fewer steps; the line about `trainer.total_epochs` "
        "counts them",
    ),
    "verl clip_ratio": Difference(
        "verl",
        "`clip_ratio` alone",
        "no effect, since its own file sets both bounds",
        "sets both bounds",
    ),
    "verl rewards to go": Difference(
        "verl",
        "`adv_estimator=reinforce_plus_plus` with `use_kl_in_reward`",
        "each token has the divergence of the tokens after it",
        "all tokens have the whole completion's divergence",
    ),
    "verl gigpo": Difference(
        "verl",
        "`adv_estimator=gigpo` of verl-agent",
        "in the mean of a group a rollout counts once for each of its turns",
        "it counts once",
    ),
    "verl means": Difference(
        "verl",
        "`loss_mode` `sapo`, `geo_mean` with a divergence or entropy term",
        "means over completions for the policy term, `loss_agg_mode` for the other terms",
        "means over completions for all terms",
    ),
    "verl rejected rewards": Difference(
        "verl",
        "`rollout_rs` with `adv_estimator=reinforce_plus_plus`",
        "a reward whose token is rejected is lost, and rejected tokens are left out of the "
        "whitening",
        "rejection changes no advantage",
    ),
    "verl geo_mean": Difference(
        "verl",
        "`loss_mode=geo_mean` with `rollout_is=token` or several micro-batches",
        "one weight per completion; the micro-batches' means are added up",
        "one weight per token; micro-batches change no number",
    ),
    "verl whitening": Difference(
        "verl",
        "`adv_estimator` `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`",
        "divides by the root of the variance + 1e-8",
        "divides by the standard deviation + `algorithm.std_eps`: 33 to 75% apart at deviations "
        "near 1e-4",
    ),
    "verl clamp of the ratio": Difference(
        "verl, Tunix",
        "the ratio of a token's probabilities",
        "its logarithm is clamped to 20, verl's `gspo` to 10",
        "is not clamped",
    ),
    "tunix unscorable": Difference(
        "Tunix",
        "completions for which a reward function returns `None` or NaN",
        "count as reward 0",
        "are left out of their group's mean and of the denominator",
    ),
    "tunix micro-batches": Difference(
        "Tunix",
        "`loss_agg_mode=token-mean` with micro-batches",
        "the mean of the micro-batches' means",
        "one denominator for the whole update",
    ),
    "torchrl means": Difference(
        "TorchRL",
        "`train.kl_to_ref_coeff` in the loss, `train.kl_to_inference_coeff`",
        "the mean over all positions, prompt and padding included",
        "the mean over sampled tokens",
    ),
    "torchrl KL in the reward": Difference(
        "TorchRL",
        "`train.kl_coef_in_loss=false`",
        "subtracts each token's divergence from its reward; mean and deviation are over the "
        "group's tokens",
        "subtracts the sum over a completion's tokens from its reward",
    ),
    "torchrl scale": Difference(
        "TorchRL",
        "the gradient",
        "an eighth by default, since the recipe averages logged values into the loss",
        "not scaled, so a limit on the gradient's norm acts earlier",
    ),
    "sampler ratios": Difference(
        "MaxText",
        "the ratio that is clipped",
        "to the sampler's log-probs",
        "to the trainer's from before the update; `algorithm.correction` weights by their ratio to "
        "the sampler's",
    ),
    "maxtext reward": Difference(
        "MaxText",
        "the reward of its experimental GRPO trainer",
        "a placeholder: the completion's length",
        "the task's reward, by `reward.preset`",
    ),
    "trl warm-up": Difference(
        "TRL, verl, MaxText",
        "the first update of a warm-up of n updates",
        "has learning rate 0",
        "has 1/n of the learning rate",
    ),
    "verl rejected whitening": Difference(
        "verl",
        "`rollout_rs` with `adv_estimator` `reinforce_plus_plus_baseline`, `gdpo`",
        "rejected tokens are left out of the whitening",
        "rejection changes no advantage",
    ),
    "verl rejected means": Difference(
        "verl",
        "`rollout_rs` by token with `loss_agg_mode=seq-mean-token-mean`, `loss_mode` `sapo`, "
        "`geo_mean`",
        "the mean of a completion is over the tokens that are kept",
        "it is over all its tokens, with rejected ones as 0",
    ),
    "verl weight decay": Difference(
        "verl, MaxText",
        "weight decay",
        "of all parameters, norms and biases included",
        "of matrices only",
    ),
    "trl sft newline": Difference(
        "TRL",
        "`shoal sft`: the newline that a chat template writes after an end of turn",
        "is learned, one or two tokens per turn",
        "is context: an answer ends with its end of turn",
    ),
    "trl pad row": Difference(
        "TRL, verl",
        "the pad token's row of the embedding",
        "has no gradient in transformers",
        "is trained as any other; no row of data holds it",
    ),
    "trl metrics of groups": Difference(
        "TRL, verl",
        "the metrics `clip/*`, `entropy`, `kl`",
        "over all tokens",
        "over trained tokens: groups without variance are left out",
    ),
    "trl metric reward_std": Difference(
        "TRL",
        "the metric `reward_std`",
        "the standard deviation of all rewards of a step",
        "`reward/std` is the mean of the standard deviations within groups",
    ),
    "trl metric kl": Difference(
        "TRL",
        "the metric `kl` with `use_bias_correction_kl`",
        "of weighted estimates",
        "of the estimates themselves",
    ),
    "trl metric clip_ratio": Difference(
        "TRL",
        "the metrics `clip_ratio/*` with `importance_sampling_level=sequence`",
        "a share of completions",
        "`clip/*` are shares of tokens",
    ),
    "verl metric clipfrac": Difference(
        "verl",
        "the metric `actor/pg_clipfrac`",
        "without the dual clip, which is `actor/pg_clipfrac_lower`",
        "`clip/fraction` includes the dual clip",
    ),
    "verl critic adapter": Difference(
        "verl",
        "`actor_rollout_ref.model.lora_rank` without `critic.model.lora_rank`",
        "the critic is trained whole",
        "the critic has an adapter of the same rank, and a head that is trained whole",
    ),
    "verl critic mean": Difference(
        "verl",
        "the critic's loss with a `loss_agg_mode` other than `token-mean`",
        "aggregated by `loss_agg_mode`",
        "the mean over tokens",
    ),
    "verl metric aggregation": Difference(
        "verl",
        "the metrics `actor/entropy`, `actor/kl_loss`",
        "aggregated by `loss_agg_mode`",
        "means over tokens",
    ),
    "verl metric length": Difference(
        "verl",
        "the metric `response_length/clip_ratio`",
        "responses of the greatest possible length, whether they ended there or not",
        "`completions/truncated` are those that the limit ended",
    ),
}
"""What differs from another system although its flag or recipe is accepted, by a name that tests
use: `tests/compat/test_figures.py` compares with numbers of the systems' own code, and says which
each row explains."""


def metrics_page() -> str:
    """`docs/metrics.md`."""
    metrics = [
        (
            f"`{name}`" + (" ⏱" if is_clock(name) else ""),
            row.unit,
            row.reduction.value,
            row.meaning,
            TRL_TERMS.get(name, ""),
            VERL_NAMES.get(name, ""),
        )
        for name, row in METRICS.items()
    ]
    figures = [(f"`{name}`", unit, meaning) for name, (unit, meaning) in EVALUATION.items()]
    return (
        "\n".join(
            [
                _METRICS_HEAD,
                *_table(("metric", "unit", "reduction", "meaning", "TRL", "verl"), metrics),
                _EVALUATION_HEAD,
                *_table(("figure", "unit", "meaning"), figures),
            ]
        )
        + "\n"
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


_INSTALLATION: tuple[tuple[str, str], ...] = (
    (
        "`pip install trl`, `pip install verl`, `pip install google-tunix`, MaxText's `pip install "
        "-e .`, `bash tools/setup/setup.sh` and `bash "
        "src/MaxText/examples/install_tunix_vllm_requirement.sh`",
        "nothing: Shoal is installed already",
    ),
    (
        "`pip install -r sota-implementations/grpo/requirements_gsm8k.txt`, "
        "`requirements_ifeval.txt`",
        "`shoal compat FOLDER` writes files of these names, which require nothing",
    ),
    (
        "`pip install` of vllm, tpu-inference, flash-attn, deepspeed, math-verify",
        "nothing; vLLM as the sampler has an environment of its own ([Engines](engines.md))",
    ),
    (
        "`accelerate launch --config_file ...`, `torchrun --nproc_per_node=8 ...` before a script",
        "`trl grpo ...` or `shoal train recipe=trl ...`: one process has all devices of a host",
    ),
    (
        "`hydra.run.dir`, `hydra.sweep.dir` and other `hydra.*`",
        "nothing: `base_output_directory` and `run_name` name a run's folder; `report.hydra=true` "
        "writes `.hydra/`",
    ),
    (
        "`checkpoints/checkpoint_*.pt`",
        "`checkpoints/STEP` in the run folder; `shoal export from=RUN to=FOLDER` writes "
        "Hugging Face's format, which TorchRL's `model.name` reads",
    ),
)
"""Lines and names of other systems' documents that are not flags -> what stands for them."""

_MIGRATING_HEAD = """\
# Migrating

After reading this page you can run your command of TRL, verl, MaxText, Tunix or TorchRL here, and
know which numbers differ.

<!-- made by `python docs/reference.py`; change the tables in `src/shoal/compat/` instead -->

Each system has a page with its command lines in Shoal's keys and with every flag: ^^.

`shoal train` and `shoal doctor` accept the flags of MaxText, TorchRL, TRL, Tunix and verl under
their own names, and so do `shoal eval` and `shoal convert` if the flag has a use there. They work
on the command line (`name=value`, `--name=value`, `--name value`), in files, in sweeps and in
Python. A flag with the value `None`, or none, keeps its default. The run reports each flag whose
meaning differs; `--dry-run` lists what every flag becomes (a flag that has the name of a Shoal key,
such as `checkpoint_period`, is listed among the keys that differ from the defaults). MaxText's
names are those of its `base.yml`, `grpo.yml` and `rl.yml` of August 2026, Tunix's those of 0.1.7:

```bash
shoal train --model_name_or_path Qwen/Qwen3-8B --dataset_name openai/gsm8k --num_generations 4 \
--beta 0.04 --dry-run
shoal train grpo.yml --model_name=llama3.1-8b --num_generations=4 --grpo_beta=0.04 --dry-run
shoal train --help num_generations
```

A flag changes only what it names. All other settings keep Shoal's defaults. For another system's
defaults use its preset or recipe:

@@

A configuration file of these systems loads unchanged: `shoal train their.yml`, or with an entry
point `python grpo_demo.py --config_file=their.yml`, over that entry point's preset. A recipe, in
the file or on the command line, sets only what the file leaves out:
`shoal train their.yml recipe=trl`. Keys with a counterpart work. One line lists the keys that have
no effect here. Keys that matter but have no counterpart are errors, all in one message; override
such a key on the command line
(`train.kl_to_inference_coeff=0`).

`hf_access_token=` sets `HF_TOKEN` for the process; Shoal never writes it anywhere. If two flags set
one key, the last one counts, and a line says so; in a file this is an error, and so are `steps` and
`num_batches` together anywhere.

The commands of these systems' documents that install them are not needed here; leave them out:

&&

verl writes a run to `trainer.default_local_dir`, by default
`checkpoints/PROJECT/EXPERIMENT`. Here its folder is

| with `trainer.project_name=PROJECT trainer.experiment_name=EXPERIMENT` | the run's folder |
| --- | --- |
| and no directory | `outputs/PROJECT/EXPERIMENT` |
| `trainer.default_local_dir=D/EXPERIMENT` | `D/EXPERIMENT` |
| `trainer.default_local_dir=D` with another end | `D/EXPERIMENT` |

A run that an earlier version put into `outputs/EXPERIMENT` or `D/EXPERIMENT/EXPERIMENT` goes on
there, and a line says so. `trainer.resume_mode=auto` is how it always is: the same script goes on
with its run. With `disable` verl overwrites what the folder holds; here a run in it is an error.
`resume_path` takes a run of Shoal, and goes on in that run's folder: another experiment_name has
no effect, and a warning says so.

verl's functions get `reward_model.ground_truth` of each row. Rows whose `reward_model` has none, or
is JSON text instead of an object, are an error before any step, which counts them and names the
first.

TorchRL's metrics have other names here: `training/loss_objective` is `objective`,
`training/clip_fraction` `clip/fraction`, `training/kl_to_ref` `kl`, `training/kl_to_inference`
`sampler_gap/kl`, `training/ESS` `sampler_gap/ess` (a share), `training/grad_norm` `grad_norm`,
`inference/staleness_mean` and `_max` `staleness` and `staleness/max`, `buffer/reward_mean`
`reward/mean`, `buffer/seq_length_mean` `completions/length_mean`.

A mapping in a file below a key without effect (`accelerator_config`,
`gradient_checkpointing_kwargs`) has none either, and TRL's `max_steps=-1` counts as not
set. A schedule that ends before the run (`learning_rate_schedule_steps`, Tunix's `decay_steps`)
is an error.

TRL's `delta` below 1 + `epsilon_high` is an error: TRL then also bounds the ratio of completions
with a positive advantage, which `algorithm.clip_dual` does not.

Shoal accepts these flags and recipes, but the numbers differ:

%%

## Callbacks

`shoal.train` takes TRL's `callbacks`: objects or classes with the methods of `TrainerCallback`,
your own or those of transformers, which Shoal does not import:

```python
from transformers import TrainerCallback

class StopAtReward(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("reward", 0) > 0.9:
            control.should_training_stop = True

result = shoal.train(model=model, reward_funcs=[reward], train_dataset=rows,
                     callbacks=[StopAtReward])
result["stopped_by"], result["steps_made"]    # "the callback StopAtReward", 37
```

* **Methods** that are called: `on_init_end` and `on_train_begin`; in each step `on_step_begin`,
  `on_step_end`, `on_log`, then `on_evaluate` and `on_save` where there is an evaluation or a
  checkpoint; `on_train_end`. A method of yours that no run calls, like `on_epoch_end`, is a
  warning.
* **`control`**: `should_training_stop` ends the run after the step, with a checkpoint and a last
  evaluation. `should_save` and `should_evaluate` act after the step if `on_step_begin`,
  `on_step_end` or `on_log` sets them. Each step is logged. `should_epoch_stop` is an error.
* **`state`**: `global_step` and `max_steps` count Shoal's steps, which may make several updates.
  `epoch`, `log_history` and `best_metric` are as in transformers. `run_folder` is the run's folder.
* **`logs`** and **`metrics`**: the figures of [Metrics](metrics.md) under TRL's names and their
  own. Those of an evaluation begin with `eval_`: `eval_reward`, `eval_accuracy`; of further data
  sets, and of each one that `eval_dataset={NAME: rows}` names, with `eval_NAME_`.
* **`args`**: the GRPOConfig that was given. Without one it has `output_dir`, `max_steps`,
  `learning_rate`, `eval_steps` and some more, and your keyword arguments.
* **`model`**, **`optimizer`**: cannot be read; the error says what there is instead.

`EarlyStoppingCallback` needs evaluations while training (`eval_strategy="steps", eval_steps=10`)
and a figure of them (`metric_for_best_model="eval_reward"`). The evaluation before training counts,
if there is one. `load_best_model_at_end` is an error, as without callbacks: `save_strategy="best"`
keeps the best checkpoint, and the run's last line is the `shoal export` that writes it.

A callback that raises ends the run with its error, after a checkpoint of the step. A run that a
callback stopped has come to its end: the same call returns its result, and `resume=` continues it
with the bits that it would have had. Callbacks of a resumed run get the history in `state`; what a
callback counts itself begins anew. With several processes the first one calls them.
"""

_FLAGS_HEAD = """\
# Coming from @@

After reading this page you can run your command line of @@ here, or write it with Shoal's keys, and
know which numbers differ.

<!-- made by `python docs/reference.py`; change the tables in `src/shoal/compat/` instead -->

$$Your command line, the same flags here, and the same job in Shoal's own keys:

```text
??
```

```bash
!!
```

A configuration file of @@ is an argument by itself, `shoal train FILE`. A recipe beside it sets
only what the file leaves out. Names of Shoal's keys, such as `seed` or `run_name`, are those keys.

%%Every other flag and what it becomes ([Migrating](migrating.md) says where they work):
"""


_UNCHANGED = """\
Your script runs unchanged, in your own folder, with the paths that it names, once Shoal has written
the modules that it starts ([Lines](lines.md)). @@ itself must not be installed for this Python:

```bash
shoal compat doors
PYTHONPATH="$PWD/doors" ??
```

"""
"""The head of a page whose line starts a module, `python3 -m NAME`."""


class SameJob(NamedTuple):
    """A line of another system, and one job in two forms: with its flags, and with our keys."""

    theirs: str
    flags: str
    keys: str


SAME_JOBS: Mapping[str, SameJob] = {
    "MaxText": SameJob(
        "python3 src/MaxText/examples/grpo_demo.py --model_name=llama3.1-8b --num_generations=4 "
        "--grpo_beta=0.04 --grpo_epsilon=0.15 --learning_rate=5e-6 --steps=200",
        "shoal train --config-name grpo --model_name=llama3.1-8b --num_generations=4 "
        "--grpo_beta=0.04 --grpo_epsilon=0.15 --learning_rate=5e-6 --steps=200",
        "shoal train --config-name grpo model.name=llama3.1-8b batch.group_size=4 "
        "algorithm.kl_coef=0.04 algorithm.clip_low=0.15 algorithm.clip_high=0.15 optimizer.lr=5e-6 "
        "steps=200",
    ),
    "Tunix": SameJob(
        "python3 -m tunix.cli.grpo_main base_config.yaml grpo_config.num_generations=4 "
        "grpo_config.beta=0.04 rl_training_config.max_steps=200 "
        "rl_training_config.actor_optimizer_config.peak_value=3e-6",
        "shoal train recipe=tunix grpo_config.num_generations=4 grpo_config.beta=0.04 "
        "rl_training_config.max_steps=200 "
        "rl_training_config.actor_optimizer_config.peak_value=3e-6",
        "shoal train recipe=tunix batch.group_size=4 algorithm.kl_coef=0.04 steps=200 "
        "optimizer.lr=3e-6",
    ),
    "TorchRL": SameJob(
        "python grpo.py --config-name grpo_ifeval env.repeats=8 optimizer.lr=2e-5 "
        "train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2",
        "shoal train --config-name grpo_ifeval env.repeats=8 optimizer.lr=2e-5 "
        "train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2",
        "shoal train --config-name grpo_ifeval batch.group_size=8 optimizer.lr=2e-5 mesh.trainer=2 "
        "mesh.reference=2 mesh.sampler=2",
    ),
    "TRL": SameJob(
        "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --num_generations 4 --beta 0.04 "
        "--learning_rate 1e-5",
        "shoal train recipe=trl --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --num_generations "
        "4 --beta 0.04 --learning_rate 1e-5",
        "shoal train recipe=trl model=Qwen/Qwen2.5-0.5B-Instruct batch.group_size=4 "
        "algorithm.kl_coef=0.04 optimizer.lr=1e-5",
    ),
    "verl": SameJob(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=128 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_training_steps=100",
        "shoal train recipe=verl algorithm.adv_estimator=grpo data.train_batch_size=128 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.actor.optim.lr=1e-6 trainer.total_training_steps=100",
        "shoal train recipe=verl batch.prompts_per_step=128 algorithm.num_minibatches=2 "
        "batch.group_size=8 optimizer.lr=1e-6 steps=100",
    ),
}
"""System -> what its page shows; a test resolves both forms to one configuration."""

_PLACES = (
    (
        "MaxText's `grpo.yml`, `rl.yml`, `base.yml`",
        "the presets `grpo`, `rl`, `base`; also with a path, if no such file exists: `shoal train "
        "grpo.yml`",
    ),
    ("TorchRL's `--config-name grpo_gsm8k`, `grpo_ifeval`", "the presets of these names"),
    (
        "verl's `ppo_trainer`, `ppo_megatron_trainer`, `dapo_trainer`, or a file that one of them "
        "names, in the `defaults` of your file, also as "
        "`actor@actor_rollout_ref.actor: dp_actor`",
        "verl's own defaults, the preset `verl`, unless you have a file of that name beside it; "
        "`hydra.searchpath` has no effect",
    ),
    (
        "a system's defaults, with your own model and data",
        "`recipe=maxtext`, `recipe=tunix`, `recipe=torchrl`, `recipe=trl`, `recipe=verl`, "
        "`recipe=scalerl`, `recipe=prime-rl`; `recipe=verl` sets those of verl's file with "
        "`algorithm.adv_estimator=grpo`, but neither `actor_rollout_ref.rollout.n` nor "
        "`trainer.total_epochs`; the script `verl.trainer.main_ppo` has verl's own "
        "unless you set them: `gae` with a critic, one completion of each prompt, 30 epochs",
    ),
    (
        "a paper's settings",
        "`algorithm=dapo`, `algorithm=gspo` and others: `shoal train --help algorithm`",
    ),
    (
        "`grpo_demo.py`, `train_rl`, `grpo.py`, `grpo-async.py`, `to_maxtext`, `test_grpo.sh`, "
        "`trl grpo`, `verl.trainer.main_ppo`, `tunix.cli.grpo_main`",
        "scripts of these names and paths: `shoal compat FOLDER` writes them, and "
        "[Lines](lines.md) lists what runs",
    ),
    (
        "`verl.model_merger`, `verl.trainer.main_generation`, `verl.trainer.main_eval`",
        "`shoal export from=RUN to=FOLDER`, `shoal generate`, `shoal eval responses=FILE`; scripts "
        "of these names end with a line that says so",
    ),
)


def flags_page(system: str) -> str:
    """`docs/flags-<system>.md`."""
    job = SAME_JOBS[system]
    rows = [row[1:] for row in DIFFERENCES.values() if system in row[0].split(", ")]
    table = "\n".join(
        f"| {' | '.join(row)} |" for row in (("setting", "there", "here"), ("---",) * 3, *rows)
    )
    differ = f"These are accepted, but the numbers differ:\n\n{table}\n\n" if rows else ""
    unchanged = ""
    if job.theirs.startswith("python3 -m "):
        command, module, name, *_ = job.theirs.split()
        unchanged = _UNCHANGED.replace("??", f"{command} {module} {name} ...")
    texts = {
        "$$": unchanged,
        "@@": system,
        "??": job.theirs,
        "!!": f"{job.flags}\n{job.keys}",
        "%%": differ,
    }
    head = _FLAGS_HEAD
    for mark, text in texts.items():
        head = head.replace(mark, text)
    return "\n".join([head, *_flags(SYSTEMS[system])]) + "\n"


def file_of(system: str) -> str:
    return f"flags-{system.lower()}.md"


def migrating_page() -> str:
    """`docs/migrating.md`."""
    links = ", ".join(f"[{system}]({file_of(system)})" for system in sorted(SYSTEMS, key=str.lower))
    places = "\n".join(
        f"| {had} | {here} |" for had, here in (("what you had", "here"), ("---", "---"), *_PLACES)
    )
    rows = [("", "setting", "there", "here"), ("---",) * 4, *DIFFERENCES.values()]
    differences = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    install = "\n".join(
        f"| {line} | {here} |"
        for line, here in (("theirs", "here"), ("---", "---"), *_INSTALLATION)
    )
    head = _MIGRATING_HEAD.replace("&&", install)
    return head.replace("^^", links).replace("@@", places).replace("%%", differences)


def _flags(rows: Iterable[Flag]) -> Iterator[str]:
    yield "| flag | becomes | |"
    yield "| --- | --- | --- |"
    # (what flags become, their meaning) -> their names: flags that become the same share a line
    acting: dict[tuple[str, str], list[str]] = {}
    idle: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.is_pattern:
            continue
        if row.idle or (row.rule and not row.keys):
            idle.setdefault(("nothing", row.meaning), []).append(row.name)
            continue
        becomes = (
            ", ".join(f"`{key}`" for key in row.keys)
            or "not supported: an error if it is switched on"
        )
        becomes = f"only {row.expected}" if row.expected else becomes
        acting.setdefault((becomes, row.meaning), []).append(row.name)
    for (becomes, meaning), names in (acting | idle).items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {becomes} | {meaning} |"


_LINES_HEAD = """\
# Lines

After reading this page you know which command lines of MaxText's, TorchRL's, TRL's, verl's and
Tunix's documents run here as they are typed, and what the others need.

<!-- made by `python docs/reference.py` from the files in `tests/compat/lines/` -->

```bash
shoal compat doors             # writes their scripts under the paths that are typed
cd doors && export PATH="$PWD/bin:$PATH"
```

In that folder type a line as it stands in its document, also `python3 -m ...` and `bash ...`;
`bin/trl` replaces `trl`. Configuration files that the line names are read from disk if they exist;
otherwise the packaged presets of the same names are used. In a checkout of their repository nothing
is overwritten: write the scripts elsewhere and type the path to one, `python3 ../doors/grpo.py
env.dataset=ifeval`; `config/grpo_gsm8k.yaml` is then read from the checkout.

A line that starts a module, `python3 -m verl.trainer.main_ppo ...`, also runs in your own folder,
so that its relative paths stay valid: set `PYTHONPATH` to the folder of the scripts,
`PYTHONPATH="$PWD/doors"`. The other system itself must not be installed for this Python, or its own
module starts.

A test makes a dry run of every line, with small models instead of those that it names, and compares
the step below; it runs some lines of each system to their end. In lines marked *bucket*, the test
uses a folder instead of the bucket. *needs*: the line ends with an error that names what it needs.
"""


def lines_page() -> str:
    """`docs/lines.md`."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for file in sorted((Path(__file__).parents[1] / "tests" / "compat" / "lines").glob("*.sh")):
        title, *heads, text = file.read_text(encoding="utf-8").splitlines()
        values = dict(head.removeprefix("# ").split(": ", 1) for head in heads)
        system, _, where = values["source"].partition(", ")
        expect, script = (
            values["expect"],
            re.search(r"(?<= -m )\S+|[\w-]+\.(?:py|sh)(?=\s|$)|^\w+", text),
        )
        assert script, file
        devices = f", {values['devices']} devices" if "devices" in values else ""
        here = values.get("becomes", "") if expect == "runs" else f"*{expect}*"
        found.setdefault(system.split()[0], []).append(
            (
                title.removeprefix("# ") + devices + ", bucket" * ("bucket" in values),
                f"`{script[0]}`",
                here or "runs",
                where,
            )
        )
    return (
        "\n".join(
            [
                _LINES_HEAD,
                *(
                    row
                    for system, rows in found.items()
                    for row in (
                        f"## {system}\n",
                        *_table(("line", "script", "a step here", "document"), rows),
                        "",
                    )
                ),
            ]
        ).rstrip()
        + "\n"
    )


PAGES = {
    "metrics.md": metrics_page,
    "migrating.md": migrating_page,
    "lines.md": lines_page,
    **{file_of(system): partial(flags_page, system) for system in SYSTEMS},
}
"""File -> what makes its text."""


if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
