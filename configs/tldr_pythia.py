"""TL;DR summaries with Pythia, the paper's preference tuning: --config=configs/tldr_pythia.py:SIZE[-STEPS][-BASELINE].

SIZE: 410m | 1b | 2.8b | small (configs/small.py). STEPS: another number than 256, as in 410m-825; β comes down during the first
eighth of them. BASELINE: a name of configs/baselines.py, as in 410m-online_dpo: its objective in the same steps, at the β of its
paper.

Paper:     the TL;DR row of its settings. Pythia 410M about 15 steps off-policy, win rate against the reference summaries and
           perplexity of π_ref: TBA 0.86 / 1.13, Online DPO 0.82 / 1.12, RLOO 0.77 / 1.10, PPO 0.76 / 1.10; by recency
           m = 0.4, 0.5, 0.6 (--config.replay.recent_probability): 0.67, 0.82, 0.80. About 5 × faster than asynchronous DPO.
           The runs of its frontier of win rate and perplexity have 425 to 825 steps: :410m-425 to :410m-825.
Command:   python -m tba_jax.main --config=configs/tldr_pythia.py:410m --workdir=runs/tldr
           Policy, reward model and data come from the hub. --config.model.path, --config.task.tldr.reward_path and
           --config.task.tldr.{train,heldout}_path name local files instead (models as safetensors).
Score:     python -m tba_jax evaluate --workdir=runs/tldr --step=last
             --config.task.tldr.gold_path=cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr
           prints the paper's figures, greedy_win_rate_strict and greedy_ref_perplexity_paper, with their standard errors: of the
           whole validation split, at a temperature of 0.01. The gold model takes 14 GB.
           The run itself evaluates without it, unless gold_path is set. Not measured here.
Hardware:  the paper used 4 GPUs, for three searchers and a trainer. Each searcher holds policy, reference and reward model.
           --config.searchers.task_devices=1 gives the reward model a GPU of its own. docs/fit.md has the memory of each role.
Departures from the authors' code, each with its reason: docs/recipes.md.
"""

from configs import base, baselines, small

_SIZES = ("410m", "1b", "2.8b", "small")


def get_config(variant: str = "410m"):
    size, *others = variant.split("-")
    if size not in _SIZES:
        raise ValueError(
            f"no size {size!r}: --config=configs/tldr_pythia.py:SIZE[-STEPS][-BASELINE] takes one of {', '.join(_SIZES)}"
        )
    steps = int(others.pop(0)) if others and others[0].isdecimal() else small.STEPS if size == "small" else 256
    c = base.get_config()
    c.task.name = "tldr"
    c.task.tldr.reward_path = f"mnoukhov/pythia{size}-rm-tldr6.9b"
    c.task.prompt_length = 512
    c.task.response_length = 128
    c.task.long_prompts = "skip"
    c.task.missing_eos_reward = -1.0
    c.model.path = f"mnoukhov/pythia{size}-sft-tldr"
    c.model.compute_dtype = "bfloat16"
    c.sampling.scoring_temperature = 0.7
    c.sampling.temperature = 0.7
    c.searchers.count = 2 if size == "2.8b" else 3  # 80 GB do not hold a searcher of the largest and the evaluator
    c.searchers.samples_per_query = 20
    c.searchers.queries_per_batch = 8
    c.replay.recent_probability = 0.5
    c.replay.strategy = "softmax"
    c.replay.capacity_per_query = 100
    c.replay.min_rows = 10_000
    c.learner.steps = steps
    c.learner.queries = 8
    c.learner.completions = 20
    c.learner.micro_batch_tokens = 12_800  # 20 full rows
    c.learner.learning_rate = 3e-6
    c.learner.schedule = "linear"
    c.learner.warmup_steps = 0
    c.learner.adam_beta2 = 0.999
    c.learner.weight_decay = 0.0
    c.learner.clip_norm = 0.0
    c.learner.beta_start = 1.0
    c.learner.beta_end = 0.05
    c.learner.beta_steps = max(1, c.learner.steps // 8)
    c.publish.every_steps = 10
    c.publish.dtype = "bfloat16"
    c.publish.keep = 5
    c.evaluation.queries = 0  # the whole validation split
    c.evaluation.greedy_temperature = 0.01
    c.evaluation.batch_size = 64
    c.evaluation.every_steps = max(1, steps // 4)
    if others:
        baseline = "-".join(others)
        baselines.apply(c, baseline)
        c.task.step_ends = (".",) if baseline == "vine_ppo" else ()
    return _small(c, steps) if size == "small" else c


def _small(c, steps: int):
    data = {"task.tldr.train_path": "posts.jsonl", "task.tldr.heldout_path": "posts.jsonl"}
    models = {"model.path": "gpt_neox", "task.tldr.reward_path": "gpt_neox_reward", "task.tldr.gold_path": "gpt_neox_reward"}
    return small.shrink(
        c, data | models, learner__steps=steps, evaluation__every_steps=steps, task__tldr__compute_dtype="float32"
    )
