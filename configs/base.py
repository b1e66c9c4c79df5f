"""The complete schema of a run: every setting there is, with its default. Locked: a misspelt key fails.

A recipe is a file beside this one: `c = base.get_config()`, then it sets leaves. Every leaf is also a flag:
`--config.learner.learning_rate=3e-4`. Settings marked (contract) must be equal for all roles that share a workdir.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    c = config_dict.ConfigDict()
    c.seed = 0

    # What is learned. (contract)
    c.task = config_dict.ConfigDict()
    c.task.name = "arithmetic"  # a task of tba_jax/tasks, or one's own: FILE.py:CLASS
    c.task.prompt_length = 16  # P, tokens; a longer prompt is handled as long_prompts says
    c.task.response_length = 32  # R, tokens, end-of-sequence included
    c.task.min_response_length = 0  # tokens, end-of-sequence included: it has probability 0 before. 0: any length
    c.task.banned_tokens = ()  # ids of tokens that no response holds, besides special ones: they have probability 0
    # Texts that end a response, such as ("\n\n", "Question:"): it ends with the token that completes one, whatever its length,
    # and keeps that token and its text. "<|im_end|>" or another special token's text lets responses hold that token.
    c.task.stop_strings = ()
    # Texts that end a step of a response, such as ("\n",). Where given, searchers also sample on from the states between steps,
    # and rows hold these states' values, the mean rewards of that: vine_ppo learns from them.
    c.task.step_ends = ()
    c.task.long_prompts = "refuse"  # refuse | skip (left out and counted)
    c.task.chat_template = False  # prompts are a user's message in the chat template of the tokenizer
    c.task.system_prompt = ""  # with chat_template: a message before it
    c.task.missing_eos_reward = config_dict.placeholder(float)  # reward of a response cut at R; unset: the task's reward
    c.task.embedding_path = ""  # a sentence encoder (BERT, RoBERTa) that embeds each response; the embedding is stored in its row
    c.task.custom = config_dict.ConfigDict()  # of a task of one's own: whatever its class takes
    c.task.arithmetic = config_dict.ConfigDict()
    c.task.arithmetic.digits = 3
    c.task.arithmetic.train_queries = 4000
    c.task.arithmetic.heldout_queries = 256
    c.task.arithmetic.seed = 0
    c.task.countdown = config_dict.ConfigDict()
    c.task.countdown.style = "characters"  # characters (short, of the built-in tokenizer) | text (for a pretrained model)
    c.task.countdown.numbers = 4  # of a query
    c.task.countdown.largest = 9  # of them
    c.task.countdown.operations = "+-"  # by which targets are made; answers may use + - * / and parentheses
    c.task.countdown.largest_target = 99
    c.task.countdown.train_queries = 1500
    c.task.countdown.heldout_queries = 256
    c.task.countdown.seed = 0
    c.task.story_sentiment = config_dict.ConfigDict()
    c.task.story_sentiment.data_path = ""  # a JSON list of stories
    c.task.story_sentiment.opening_words = 12
    c.task.story_sentiment.heldout_queries = 128
    # Each path: a .jsonl, .json or .parquet file, or a data set of the hub as owner/name or owner/name:config.
    c.task.gsm8k = config_dict.ConfigDict()
    c.task.gsm8k.train_path = "openai/gsm8k:main"  # rows {"question", "answer"}; of the hub, the split train
    c.task.gsm8k.heldout_path = "openai/gsm8k:main"  # ... the split test
    c.task.math = config_dict.ConfigDict()
    c.task.math.train_path = ""  # rows {"problem", "answer"}, or {"problem", "solution"} with a \\boxed{} answer
    c.task.math.heldout_path = "HuggingFaceH4/MATH-500"
    c.task.math.prompt = "Problem:\n{problem}\n\nReason step by step, and put the final answer within \\boxed{}.\n\nSolution:\n"
    c.task.math.time_limit = 10.0  # seconds that comparing an answer may take; then its reward is 0
    c.task.math.retries = 1  # of a comparison that failed otherwise; after them its reward is NaN
    c.task.math.concurrency = 2  # processes that compare answers, in each role that scores responses
    # Tests the safety of a model that one is responsible for: the policy attacks, the victim replies, a classifier tells how bad.
    c.task.red_team = config_dict.ConfigDict()
    c.task.red_team.attack_prompt = ""  # what the attacker continues, or ...
    c.task.red_team.attack_prompt_path = ""  # ... rows {"attacker_prompt"}, a query each
    c.task.red_team.replies = 5  # of the victim to an attack; the reward is their mean log toxicity
    c.task.red_team.seed = 0  # of the replies
    c.task.red_team.victim_path = ""  # a Hugging Face folder or hub id; has to be named
    c.task.red_team.victim_template = ""  # a text with {attack} once; "": the chat template of the victim's tokenizer
    c.task.red_team.victim_system_prompt = ""  # with the chat template: a message before
    c.task.red_team.victim_temperature = 1.0
    c.task.red_team.victim_top_p = 1.0
    c.task.red_team.victim_prompt_length = 128  # tokens, template included; a longer attack loses its end
    c.task.red_team.victim_reply_length = 64  # tokens
    c.task.red_team.victim_concurrency = 160  # replies that are decoded side by side
    # sequence: a ...ForSequenceClassification of the reply | unsafe_token: a causal model that is asked about attack and reply |
    # linear: an .npz of TF-IDF and linear SVMs, for trials on a CPU
    c.task.red_team.classifier = "sequence"
    c.task.red_team.classifier_path = ""
    c.task.red_team.classifier_label = ""  # of sequence: the label that is toxic; of unsafe_token: the token, such as "unsafe"
    c.task.red_team.classifier_template = ""  # of unsafe_token: a text with {attack} and {reply}; "": its chat template
    c.task.red_team.classifier_ending = ""  # of unsafe_token: a text between that and the token
    c.task.red_team.classifier_length = 1024  # of unsafe_token: tokens, all included; a longer reply loses its end
    c.task.red_team.compute_dtype = "float32"  # float32 | bfloat16, of victim and classifier
    c.task.red_team.success_threshold = 0.5  # an attack whose replies' mean toxicity is above it has succeeded
    c.task.red_team.embedder_path = ""  # a sentence encoder, by which reports tell how different attacks are; "": they do not

    c.task.tldr = config_dict.ConfigDict()
    # Rows {"summary"} with a ready "query", or with "title", "post" and perhaps "subreddit", whose post loses paragraphs from its
    # end down to task.prompt_length; of the hub, train and validation.
    c.task.tldr.train_path = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    c.task.tldr.heldout_path = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    c.task.tldr.reward_path = ""  # the reward model: a Hugging Face folder or hub id of a …ForSequenceClassification, one label
    c.task.tldr.gold_path = ""  # likewise, by which evaluation compares with the reference summaries; "": no win rate
    c.task.tldr.compute_dtype = "bfloat16"  # of both: float32 | bfloat16
    c.task.tldr.batch_rows = 16  # texts of one pass of either on a device

    # The policy. (contract, but for compute_dtype and attention)
    c.model = config_dict.ConfigDict()
    c.model.path = ""  # a Hugging Face folder or hub id with weights and tokenizer; "": random weights of a shape:
    c.model.preset = ""  # ... of a published model (tba_jax/models/presets.py); "": the shape below, which is else not read
    c.model.layers = 2
    c.model.width = 128
    c.model.heads = 4
    c.model.kv_heads = 4
    c.model.head_size = 32
    c.model.ffn = 384
    c.model.tied_embedding = True
    c.model.compute_dtype = "float32"  # float32 | bfloat16; master weights and log-prob sums are always float32
    c.model.attention = "auto"  # auto | xla | cudnn: the kernel of whole sequences; auto: cudnn on NVIDIA GPUs in bfloat16

    # Low-rank adapters: only they are trained and published. (contract)
    c.lora = config_dict.ConfigDict()
    c.lora.rank = 0  # 0: the whole policy is trained
    c.lora.alpha = 16.0  # the update is scaled by alpha / rank
    c.lora.targets = ("layers.*",)  # linear maps, by patterns: layers.attention.query, layers.feed_forward.*, lm_head (if untied)

    # Supervised warm start on the task's worked examples; its result is the reference policy. (contract)
    c.warm_start = config_dict.ConfigDict()
    c.warm_start.steps = 0  # 0: none
    c.warm_start.batch_size = 128
    c.warm_start.learning_rate = 2e-3
    c.warm_start.warmup_steps = 30
    c.warm_start.report_every_steps = 25

    # Generation by searchers.
    c.sampling = config_dict.ConfigDict()
    c.sampling.scoring_temperature = 1.0  # (contract) defines the policy and the reference: softmax(logits / T)
    c.sampling.temperature = 1.0
    c.sampling.top_k = 0  # 0: off
    c.sampling.top_p = 1.0
    c.sampling.min_p = 0.0
    c.sampling.explore_temperature_probability = 0.0  # share of rows with a temperature from [T, T * factor]
    c.sampling.explore_temperature_factor = 1.1 / 0.7
    c.sampling.explore_top_p_probability = 0.0  # share of rows with a top-p from [explore_top_p_low, 1]
    c.sampling.explore_top_p_low = 0.7

    c.searchers = config_dict.ConfigDict()
    c.searchers.count = 2  # processes that --role=all starts; any number more may join; 0: rows of replay.mount alone
    c.searchers.queries_per_batch = 8
    c.searchers.samples_per_query = 24  # S, at least learner.completions
    c.searchers.value_samples = 9  # responses that are continued from each state between steps (task.step_ends)
    c.searchers.value_states = 0  # states of a response that are valued so at most, evenly chosen; 0: all
    c.searchers.slots = 0  # sequences decoded side by side; 0: queries_per_batch * samples_per_query
    c.searchers.decode_chunk = 32  # between looks at the host: new weights and queries wait as many steps at most
    # How a new snapshot is taken up: at_once (by all sequences, between two decode steps) | new_sequences (samples whose prompt
    # the old weights have computed end with them, up to two prompts a group; slots idle until the last of them has ended).
    c.searchers.swap = "at_once"
    c.searchers.reward_batches = 32  # that wait for their rewards, each asked for in a thread, while the next are decoded
    c.searchers.cpu_devices = 1  # without accelerators, of a role of its own: data-parallel decoders, best one for each core
    c.searchers.task_devices = 0  # the last devices of a searcher are its task's models' own; 0: they share those of the policy
    c.searchers.max_rows_per_snapshot = 0  # backpressure: a searcher pauses after this many rows until a newer snapshot; 0: never
    c.searchers.poll_seconds = 0.2  # of a local folder; an object store is asked every 2 s at most
    c.searchers.stop_seconds = 10.0  # that the batch in flight may take after SIGTERM; then it is abandoned. 0: at once
    c.searchers.weights = "full"  # full | int8 (weight-only, per output channel): of the policy that is sampled
    c.searchers.logit_megabytes = 128  # of each device: the most that logits take at a time in reference scoring
    c.searchers.memory_fraction = 0.2  # of a GPU that roles share, each searcher
    c.searchers.mesh = config_dict.ConfigDict(dict(data=-1, fsdp=1, tensor=1))

    c.replay = config_dict.ConfigDict()
    c.replay.capacity = 50_000  # resident rows; the oldest leave first
    c.replay.capacity_per_query = 100
    c.replay.merge_duplicates = True  # identical responses to a query are kept once, the newest wins
    c.replay.merge_edit_distance = 0.0  # share of tokens up to which responses to a query count as the same; 0: identical only
    c.replay.merge_cosine_distance = 0.0  # likewise by cosine distance of embeddings (task.embedding_path); 0: off
    c.replay.drop = "oldest"  # what leaves a full query or window: oldest | lowest_reward
    c.replay.recent_probability = 0.95  # m: share of queries drawn from what is recent
    c.replay.recent_window = 0  # trainer steps that count as recent; 0: publish.every_steps
    c.replay.strategy = "uniform"  # how the other queries' rows are drawn: uniform | softmax (of reward)
    c.replay.inverse_temperature = 1.0  # of the softmax strategy
    c.replay.max_draws_per_row = 0  # 0: no limit
    c.replay.max_staleness = 0  # trainer steps; 0: no limit
    c.replay.min_rows = 0  # rows that must be resident before a step; 0: as many as a batch needs
    c.replay.segment_appends = 256
    c.replay.retention = "all"  # all | checkpoints: segments that no kept checkpoint needs are removed; the audit names them
    c.replay.poll_seconds = 0.2  # likewise
    # Workdirs of other runs, finished or not, whose rows are trained on beside this run's own; they are only read. Their
    # contract and reference policy must be ours. Staleness of their rows is counted from step 0 of this run.
    c.replay.mount = ()

    c.learner = config_dict.ConfigDict()
    # trajectory_balance (VarGrad) | learned_log_z (a head predicts log Z from the prompt) | tba_prime (token level, TBA′) |
    # reinforce | rloo | proximal_rloo | ppo (a head predicts values) | vine_ppo (Monte-Carlo values in rows) | grpo | dr_grpo |
    # online_dpo | raft | icepop | gspo | cispo. What each needs: tba_jax/objectives/__init__.py
    c.learner.objective = "trajectory_balance"
    c.learner.steps = 500
    c.learner.queries = 7  # Q
    c.learner.completions = 20  # K; 1 is enough for learned_log_z, ppo and vine_ppo
    c.learner.micro_batch_rows = 0  # 0: the whole batch in one pass
    c.learner.logit_megabytes = 128  # of each device: the most that logits take at a time
    c.learner.remat = "full"  # none | dots | full: what of a layer the backward pass computes again
    c.learner.learning_rate = 1e-5
    c.learner.schedule = "constant"  # constant | linear | wsd
    c.learner.warmup_steps = 10
    c.learner.decay_steps = 0  # of wsd
    # The optimum is ∝ exp((log π_ref / γ + r / β) / τ), γ and τ of trajectory balance and TBA′ alone. Each: linear from start to
    # end over so many steps, then end. β = 0 leaves the KL term out, where the objective can be without it.
    c.learner.beta_start = 0.012  # β, the KL coefficient; raft, gspo and cispo have none, it is only measured with
    c.learner.beta_end = 0.004
    c.learner.beta_steps = 500
    c.learner.ref_temperature_start = 1.0  # γ
    c.learner.ref_temperature_end = 1.0
    c.learner.ref_temperature_steps = 0
    c.learner.reward_temperature_start = 1.0  # τ
    c.learner.reward_temperature_end = 1.0
    c.learner.reward_temperature_steps = 0
    c.learner.log_z_learning_rate = 1e-2  # of the head of learned_log_z; its schedule is the policy's
    c.learner.importance_clip = 8.0  # of tba_prime: π_θ/π_behaviour up to this; 0: log π_θ, without importance weights
    c.learner.log_ratio_clip = 10.0  # of tba_prime: nats, a token's log π_θ − log π_ref counts up to this
    c.learner.clip_low = 0.2  # of proximal_rloo, ppo, vine_ppo, grpo, dr_grpo: π_θ/π_behaviour counts from 1 − this
    c.learner.clip_high = 0.2  # ... up to 1 + this; of cispo, too
    c.learner.sequence_clip_low = 3e-4  # of gspo: likewise of the whole response's ratio, its length taken out
    c.learner.sequence_clip_high = 4e-4
    c.learner.icepop_low = 0.5  # of icepop: tokens with π_θ/π_behaviour below this, or above icepop_high, do not count
    c.learner.icepop_high = 5.0
    c.learner.gae_lambda = 0.95  # of ppo: λ
    c.learner.value_coefficient = 0.1  # of ppo: of the value's loss beside the policy's
    c.learner.value_learning_rate = 1e-4  # of the head of ppo; its schedule is the policy's
    c.learner.reference = config_dict.ConfigDict()
    # initial: that of step 0 | reset: the policy of the last multiple of reset_steps | ema: ref ← α·ref + (1 − α)·θ each step |
    # surrogate: that average to first order, from the log-probs that searchers stored; no reference is held. For fresh rows it is
    # the policy itself, and what separates samplers from the learner (bfloat16, int8) counts up to α/(1 − α) times.
    c.learner.reference.kind = "initial"
    c.learner.reference.reset_steps = 50  # ρ
    c.learner.reference.reset_optimizer = False  # of reset: Adam's moments begin anew, too
    c.learner.reference.ema_decay = 0.95  # α of ema and surrogate
    c.learner.reference.offload = False  # of reset and ema: the reference rests in host memory between uses
    # Where a loss or a gradient is not finite: stop | skip (the update is left out and counted; where all rows are at fault, or
    # 10 such steps come in a row, the run stops nevertheless).
    c.learner.non_finite = "stop"
    c.learner.adam_beta1 = 0.9
    c.learner.adam_beta2 = 0.95
    c.learner.adam_epsilon = 1e-8
    c.learner.weight_decay = 0.0
    c.learner.clip_norm = 1.0
    c.learner.logprob_gap_every_steps = 50  # compare sampler's and learner's log-probs on the same weights
    c.learner.logprob_gap_limit = 0.0  # nats per token; above it: an alarm. 0: 1e-3 in float32, 0.1 in bfloat16
    c.learner.memory_fraction = 0.45  # of a GPU that roles share
    c.learner.mesh = config_dict.ConfigDict(dict(data=-1, fsdp=1, tensor=1))

    c.publish = config_dict.ConfigDict()
    c.publish.every_steps = 2  # k
    c.publish.keep = 0  # newest snapshots kept, at least 3 (steps that are evaluated stay too); 0: all
    c.publish.dtype = "float32"

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.every_steps = 100
    c.checkpoint.keep = 2

    c.evaluation = config_dict.ConfigDict()
    c.evaluation.enabled = True  # --role=all starts an evaluator
    c.evaluation.every_steps = 100  # besides the first and the last step
    c.evaluation.queries = 256
    c.evaluation.samples_per_query = 1  # besides the greedy response; above 1: pass@k and majority@k
    c.evaluation.batch_size = 128
    c.evaluation.task_devices = 0  # as searchers.task_devices
    c.evaluation.logit_megabytes = 128  # as searchers.logit_megabytes
    c.evaluation.samples = 8  # decoded responses in each report
    c.evaluation.memory_fraction = 0.1  # of a GPU that roles share
    c.evaluation.mesh = config_dict.ConfigDict(dict(data=-1, fsdp=1, tensor=1))

    c.schedule = config_dict.ConfigDict()
    c.schedule.mode = "asynchronous"  # asynchronous | interleaved (search and training in turn, in one process)
    c.schedule.lag = 0  # interleaved: fresh rows come from the policy of this many steps ago; 0: on-policy

    c.supervisor = config_dict.ConfigDict()
    c.supervisor.max_restarts = 20  # of each role, without a life of ten minutes between
    c.supervisor.stop_seconds = 10.0  # between asking a role to stop and killing it

    c.metrics = config_dict.ConfigDict()
    c.metrics.every_steps = 5
    c.lock()
    c.task.custom.unlock()
    return c
