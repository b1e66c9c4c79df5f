"""MATH with Qwen2.5-7B (base) and TBA′, evaluated on MATH-500: --config=configs/math_qwen2_5_7b.py[:VARIANT].

VARIANT: async2 (the default: rows are of the weights of at least 2 updates ago) | async10 | a name of configs/baselines.py, such
as dr_grpo, with which the paper compares: its objective at async10 | instruct[-VARIANT] (the same with Qwen2.5-7B-Instruct) |
small[-VARIANT] (configs/small.py).

Paper:     TBA′ on MATH: β 0.005, reference reset every ρ = 50 steps, K 16, 32 × 16 rows, 400 steps; MATH-500 pass@1 above that of
           Dr. GRPO, most clearly at async 10. In its public discussion, from Qwen2.5-7B-Instruct: TBA 70 %, asynchronous GRPO
           67.3 % (here :instruct and :instruct-grpo, with the settings of the base model).
Command:   python -m tba_jax.main --config=configs/math_qwen2_5_7b.py --workdir=runs/math --config.task.math.train_path=MATH.jsonl
           MATH.jsonl holds rows {"problem", "solution"} of the MATH training set. MATH-500 comes from the hub, or from
           --config.task.math.heldout_path=FILE.
Hardware:  a trainer on 8 × 80 GB, over which its state is divided, and searcher and evaluator on 8 × 80 GB, four each: start
           them with --role=…, each with its own CUDA_VISIBLE_DEVICES. docs/fit.md has the memory of each role. The paper used a
           trainer of several GPUs, and searchers. A trainer of N devices: --config.learner.mesh.fsdp=N.
Score:     not measured here.
Departures from the authors' code, each with its reason: docs/recipes.md.
"""

from configs import base, baselines, small

_LEVELS = {"": 2, "async2": 2, "async10": 10}


def get_config(variant: str = ""):
    is_small, variant = small.asked(variant)
    is_instruct = variant.partition("-")[0] == "instruct"
    variant = variant.removeprefix("instruct").removeprefix("-") if is_instruct else variant
    c = base.get_config()
    c.task.name = "math"
    c.task.math.concurrency = 8
    c.task.math.prompt = "{problem}"
    c.task.prompt_length = 1024
    c.task.response_length = 3072
    c.task.long_prompts = "skip"
    c.task.chat_template = True
    c.task.system_prompt = "Please reason step by step, and put your final answer within \\boxed{}."
    # A base model ends a turn with this token or with end-of-sequence.
    c.task.stop_strings = ("<|im_end|>",)
    c.model.path = "Qwen/Qwen2.5-7B-Instruct" if is_instruct else "Qwen/Qwen2.5-7B"
    c.model.compute_dtype = "bfloat16"
    c.sampling.scoring_temperature = 1.0
    c.sampling.temperature = 1.0
    c.searchers.count = 1
    c.searchers.samples_per_query = 16
    c.searchers.queries_per_batch = 32
    c.searchers.slots = 96  # 16 GiB of caches at these lengths, over all devices
    c.searchers.mesh.tensor = 4
    c.evaluation.mesh.tensor = 4
    # Each row is trained on once, the newest first. Searchers wait while two batches, which are the rows of two
    # updates, have not been drawn.
    level = _LEVELS.get(variant, 10)
    c.searchers.lag = level
    c.searchers.max_updates_ahead = 2
    c.replay.recent_probability = 1.0
    c.replay.max_staleness = level + 2
    c.replay.max_draws_per_row = 1
    c.replay.merge_duplicates = False
    c.learner.objective = "tba_prime"
    c.learner.steps = 400
    c.learner.queries = 32
    c.learner.completions = 16
    c.learner.micro_batch_tokens = 65_536  # 16 full rows
    c.learner.mesh.fsdp = 8
    c.learner.learning_rate = 1e-6
    c.learner.schedule = "constant"
    c.learner.warmup_steps = 0
    c.learner.adam_beta2 = 0.99
    c.learner.weight_decay = 0.01
    c.learner.row_divisor = "row_length"
    c.learner.beta_start = 0.005
    c.learner.beta_end = 0.005
    c.learner.reference.kind = "reset"
    c.learner.reference.reset_steps = 50
    c.learner.reference.offload = True
    c.publish.every_steps = 1
    c.publish.dtype = "bfloat16"
    c.publish.keep = 16
    c.evaluation.queries = 500
    c.evaluation.every_steps = 50
    if variant not in _LEVELS:
        c.learner.reference.kind, c.learner.reference.offload = "initial", False
        baselines.apply(c, variant, besides=["small", "instruct", *filter(None, _LEVELS)])
        c.learner.row_divisor = "response_budget"
        c.task.step_ends = ("\n",) if variant == "vine_ppo" else ()
    data = {"task.math.train_path": "math.jsonl", "task.math.heldout_path": "math.jsonl"}
    return small.shrink(c, {"model.path": "qwen2", **data}) if is_small else c
