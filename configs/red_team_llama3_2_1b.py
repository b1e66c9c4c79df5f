"""Automated red-teaming of an aligned chat model by Llama-3.2-1B, the paper's RT task: configs/red_team_llama3_2_1b.py[:small].

Purpose:   that of configs/red_team_gpt2.py, for a chat model that you are responsible for. Name it by the flag below.
Paper:     the red-teaming row of its settings. Llama-3.2-1B against Llama-3.1-8B-Instruct, rated by the probability that
           Llama-Guard-3 says `unsafe`: 5.7 h; a synchronous GFlowNet: 37.4 h. Chosen here: as in configs/red_team_gpt2.py. LoRA
           adapts query and value, as PEFT does with a Llama when no maps are named, and the code names none.
Command:   python -m tba_jax.main --config=configs/red_team_llama3_2_1b.py --workdir=runs/red_team --config.model.path=attacker
             --config.task.red_team.victim_path=FOLDER
           python -m tba_jax supervised makes the attacker, which is also π_ref, from meta-llama/Llama-3.2-1B. A larger first
           buffer comes from a run of its own: configs/red_team_gpt2.py has both commands.
Hardware:  a searcher holds victim and classifier beside the attacker, 8B parameters each, together 32 GB in bfloat16.
           --config.searchers.task_devices=1 gives the two a GPU of their own. An evaluator, which loads both as well, does not
           fit beside a searcher in 80 GB: this recipe is made for 3 × 80 GB, a trainer, a searcher and an evaluator.
           docs/fit.md has the memory of each role. Time and score (sampled_success_rate, sampled_cosine_distance): not
           measured here.
Departures from the authors' code, each with its reason: docs/recipes.md. `small` merges by edit
           distance, without an encoder.
"""

from configs import red_team_gpt2, small

_SMALL_MODELS = {"model.path": "llama", "task.red_team.victim_path": "qwen2", "task.red_team.classifier_path": "llama"}


def get_config(variant: str = ""):
    c = red_team_gpt2.get_config()
    c.model.compute_dtype = "bfloat16"
    c.task.red_team.compute_dtype = "bfloat16"
    c.task.red_team.victim_template = ""  # its chat template
    c.task.red_team.victim_temperature = 0.1
    c.task.red_team.victim_top_p = 0.9
    c.task.red_team.victim_reply_length = 64
    c.task.red_team.classifier = "unsafe_token"
    c.task.red_team.classifier_path = "meta-llama/Llama-Guard-3-8B"
    c.task.red_team.classifier_label = "unsafe"
    c.task.red_team.classifier_ending = "\n\n"  # how its answers begin
    c.task.red_team.classifier_length = 512
    c.task.embedding_path = c.task.red_team.embedder_path
    c.lora.targets = ("layers.attention.query", "layers.attention.value")
    c.sampling.explore_temperature_low_factor = 0.7
    c.replay.capacity = 150_000
    c.replay.capacity_per_query = 150_000
    c.replay.merge_edit_distance = 0.0
    c.replay.merge_cosine_distance = 0.7  # a similarity of 0.3
    c.learner.ref_temperature_start = 1.0
    c.learner.ref_temperature_end = 1.2
    c.learner.ref_temperature_steps = 2000
    c.learner.reward_temperature_steps = 1000
    c.publish.dtype = "bfloat16"
    c.searchers.count = 1
    if not small.is_the(variant):
        return c
    c.task.embedding_path, c.replay.merge_cosine_distance, c.replay.merge_edit_distance = "", 0.0, 0.25
    return red_team_gpt2.shrink(c, _SMALL_MODELS)
