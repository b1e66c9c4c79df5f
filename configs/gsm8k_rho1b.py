"""GSM8K with RhoMath-1B, the paper's headline experiment: --config=configs/gsm8k_rho1b.py[:VARIANT].

VARIANT: nothing (1000 steps) | 700_steps (the schedules of the speed comparison: its run ends in the middle of the decay) |
lr3e-6 | lr1e-6 (1000 steps at this learning rate in place of 1e-5: docs/recipes.md, Precision on GSM8K) | a name of
configs/baselines.py (its objective, in these 700 steps; a line break ends a step of vine_ppo) | synchronous[-VARIANT] (the same
batch, on-policy: 7 × 20 samples and the update that they make, in turn, on 4 GPUs) | small[-VARIANT] (configs/small.py).

Paper:     the GSM8K row of its settings. 40.3 % before, 54.6 ± 0.9 % after 1000 steps; 54.9 ± 0.5 % with K = 40
           (--config.learner.completions=40 --config.searchers.samples_per_query=40). VinePPO 53.4 %, synchronous GRPO 49.05 %
           (:synchronous-grpo is GRPO with the batch of this recipe).
Command:   python -m tba_jax.main --config=configs/gsm8k_rho1b.py --workdir=runs/gsm8k
           Policy and data come from the hub. --config.model.path=FOLDER and --config.task.gsm8k.{train,heldout}_path=FILE.jsonl
           name local files instead. A searcher on another machine: the same command with --role=searcher, on the same
           --workdir or --shared.
Hardware:  the paper used 4 × A100, three searchers and a trainer, for 82 minutes. Here it is made for 1, 4 and 8 × 80 GB:
           docs/fit.md has the memory of each role. A GPU of :synchronous holds all roles, as in its row of 1 × 80 GB. Time:
           not measured here.
Score:     not measured here.
Departures from the authors' code, each with its reason: docs/recipes.md.
"""

from configs import base, baselines, small

_RATES = {"lr3e-6": 3e-6, "lr1e-6": 1e-6}
# Steps of the run and of the learning rate's schedule (0: of the run), those of its decay, and the first β.
_LENGTHS = {"700_steps": (700, 1000, 600, 0.014), **dict.fromkeys(("", *_RATES), (1000, 0, 500, 0.012))}


def get_config(variant: str = ""):
    is_small, variant = small.asked(variant)
    is_synchronous = variant.partition("-")[0] == "synchronous"
    variant = variant.removeprefix("synchronous").removeprefix("-") if is_synchronous else variant
    c = base.get_config()
    c.task.name = "gsm8k"
    c.task.prompt_length = 512
    c.task.response_length = 512
    c.model.path = "realtreetune/rho-1b-sft-GSM8K"
    c.model.compute_dtype = "bfloat16"
    c.sampling.scoring_temperature = 0.7
    c.sampling.temperature = 0.7
    c.searchers.count = 3
    c.searchers.samples_per_query = 24
    c.searchers.queries_per_batch = 16
    c.replay.recent_probability = 0.95
    c.replay.strategy = "uniform"
    c.replay.capacity_per_query = 100
    c.replay.min_rows = 500
    c.learner.queries = 7
    c.learner.completions = 20
    c.learner.micro_batch_tokens = 20_480  # 20 full rows
    c.learner.learning_rate = _RATES.get(variant, 1e-5)
    c.learner.schedule = "wsd"
    c.learner.decay = "cosine"
    c.learner.warmup_steps = 50
    c.learner.adam_beta2 = 0.999
    c.learner.weight_decay = 0.0
    c.learner.clip_norm = 0.0
    # 50 steps of warm-up and 450 stable ones, or 50 and 350, then decay.
    steps, c.learner.schedule_steps, c.learner.decay_steps, beta = _LENGTHS.get(variant, _LENGTHS["700_steps"])
    c.learner.steps = steps
    c.learner.beta_start = beta
    c.learner.beta_end = 0.004
    c.learner.beta_steps = 500
    c.publish.every_steps = 2
    c.publish.dtype = "bfloat16"
    c.publish.keep = 5
    c.evaluation.queries = 1319  # the whole test set
    c.evaluation.every_steps = 100
    if variant not in _LENGTHS:
        baselines.apply(c, variant, besides=["small", "synchronous", *filter(None, _LENGTHS)])
        c.task.step_ends = ("\n",) if variant == "vine_ppo" else ()
    if is_synchronous:
        _take_turns(c)
    data = {"task.gsm8k.train_path": "gsm8k.jsonl", "task.gsm8k.heldout_path": "gsm8k.jsonl"}
    return small.shrink(c, {"model.path": "llama", **data}, learner__mesh__data=-1) if is_small else c


def _take_turns(c):
    """Synchronous training: all roles on the same 4 GPUs, and each update of the samples of the policy before it, all of them."""
    c.schedule.mode = "interleaved"
    c.searchers.queries_per_batch = c.learner.queries
    c.searchers.samples_per_query = c.learner.completions
    c.replay.recent_probability = 1.0
    c.replay.recent_window = 1
    c.replay.merge_duplicates = False
    c.replay.min_rows = 0
    c.learner.mesh.data = 4
    c.learner.micro_batch_tokens *= 4  # as many rows on each GPU
