"""Automated red-teaming of an aligned chat model by Llama-3.2-1B, the paper's RT task: configs/red_team_llama3_2_1b.py.

Purpose:   as of configs/red_team_gpt2.py, for a chat model that one is responsible for; it has to be named.
Paper:     the red-teaming row of its settings. Llama-3.2-1B against Llama-3.1-8B-Instruct, judged by how likely Llama-Guard-3
           says `unsafe`: 5.7 h, a synchronous GFlowNet 37.4 h. What is ours: as in configs/red_team_gpt2.py.
Command:   python -m tba_jax.main --config=configs/red_team_llama3_2_1b.py --workdir=runs/red_team --config.model.path=attacker
             --config.task.red_team.victim_path=FOLDER
           The attacker, which is π_ref as well, comes of python -m tba_jax supervised with meta-llama/Llama-3.2-1B, and a first
           buffer of more of its samples of a run of its own: see configs/red_team_gpt2.py.
Hardware:  a searcher holds 8B parameters each of the victim and the classifier, 32 GB in bfloat16, beside the attacker;
           --config.searchers.task_devices=1 gives the two a GPU of their own. Memory of each role: --dry_run. Time and score
           (sampled_success_rate, sampled_cosine_distance): not measured here.
"""

from configs import red_team_gpt2


def get_config():
    c = red_team_gpt2.get_config()
    c.model.compute_dtype = "bfloat16"
    c.task.red_team.compute_dtype = "bfloat16"
    c.task.red_team.victim_template = ""  # its chat template
    c.task.red_team.victim_reply_length = 64
    c.task.red_team.classifier = "unsafe_token"
    c.task.red_team.classifier_path = "meta-llama/Llama-Guard-3-8B"
    c.task.red_team.classifier_label = "unsafe"
    c.task.red_team.classifier_ending = "\n\n"  # how its answers begin
    c.task.red_team.classifier_length = 512
    # Temperatures of samples are uniform in [0.7, 2].
    c.sampling.temperature = 0.7
    c.sampling.explore_temperature_factor = 2 / 0.7
    c.replay.capacity = 150_000
    c.replay.capacity_per_query = 150_000
    c.learner.ref_temperature_start = 1.0
    c.learner.ref_temperature_end = 1.2
    c.learner.ref_temperature_steps = 2000
    c.learner.reward_temperature_steps = 1000
    c.publish.dtype = "bfloat16"
    # An evaluator that shares a searcher's GPU, the two models twice: 80 GB are enough.
    c.searchers.memory_fraction = c.evaluation.memory_fraction = 0.47
    return c
