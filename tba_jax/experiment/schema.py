"""All settings of a run: one line each, with its default, the values that it may have (tba_jax/schemas.py) and its meaning.

Recipes get the defaults from configs/base.py. Every setting is also a flag: `--config.learner.steps=100`. Settings marked
(contract) must be equal for all roles of a run. A resumed run changes seed, learner, replay, publish and schedule with
--allow_change alone, except for what is marked free (always) or fixed (never); all other settings may change.

Settings with `path` hold absolute paths from when a config is read; in recipes and flags they may begin with ~, or be relative to
the current folder. Names on the hub stay as they are where there is no such path. So do URLs of object stores.
This file does not import JAX, so that recipes load at once.
"""

from ml_collections.config_dict import ConfigDict, placeholder

from tba_jax.schemas import Schema, setting

c = ConfigDict()
c.seed = setting(0, at_least=0, below=2**32)

# What is learned. (contract)
c.task = ConfigDict()
c.task.name = setting("arithmetic", registry="tasks", path="of class")  # a task of tba_jax/tasks, or your own: FILE.py:CLASS
c.task.prompt_length = setting(16, at_least=1)  # P, tokens; task.long_prompts says what happens to longer prompts
c.task.response_length = setting(32, at_least=1)  # R, tokens, including end-of-sequence
c.task.min_response_length = setting(0, at_least=0)  # tokens before which end-of-sequence has probability 0; 0: any length
# True: the last of R tokens is the end of sequence, whatever was drawn, and is scored like every other token: a response that is
# cut pays for how improbable its end is there. It still counts as cut, so task.missing_eos_reward holds for it.
c.task.force_eos = False
c.task.banned_tokens = ()  # ids of tokens that have probability 0 in responses, besides the special tokens
# Texts that end a response, such as ("\n\n", "Question:"). The response ends with the token that completes such a text, whatever
# its length, and keeps both. "<|im_end|>" or the text of another special token allows that token in responses.
c.task.stop_strings = ()
# Texts that end a step of a response, such as ("\n",). If given, searchers also sample continuations from the states between
# steps, and rows store the mean rewards of these continuations as the values of the states, from which vine_ppo learns.
c.task.step_ends = ()
c.task.long_prompts = setting("refuse", one_of=("refuse", "skip"))  # skip: queries with longer prompts are left out and counted
c.task.chat_template = False  # True: a prompt is a user's message in the tokenizer's chat template
c.task.system_prompt = ""  # with chat_template: the system message before the prompt
c.task.missing_eos_reward = placeholder(float)  # reward of a response that is cut at R; unset: the task's reward
# A sentence encoder (BERT, RoBERTa) that embeds each response; the embedding is stored in its row.
c.task.embedding_path = setting("", path="or hub")
c.task.custom = ConfigDict()  # settings of your own task: the arguments of its class
c.task.arithmetic = ConfigDict()
c.task.arithmetic.digits = setting(3, at_least=1)
c.task.arithmetic.train_queries = setting(4000, at_least=1)
c.task.arithmetic.heldout_queries = setting(256, at_least=1)
c.task.arithmetic.seed = setting(0, at_least=0)
c.task.countdown = ConfigDict()
# characters: short prompts and responses for the built-in tokenizer; text: for a pretrained model.
c.task.countdown.style = setting("characters", one_of=("characters", "text"))
c.task.countdown.numbers = setting(4, at_least=2, at_most=10)  # numbers of a query
c.task.countdown.largest = setting(9, at_least=1, at_most=10**6)  # the largest number of a query
c.task.countdown.operations = "+-"  # operations that make the targets; answers may use + - * / and parentheses
c.task.countdown.largest_target = setting(99, at_least=1)
c.task.countdown.train_queries = setting(1500, at_least=1)
c.task.countdown.heldout_queries = setting(256, at_least=1)
c.task.countdown.seed = setting(0, at_least=0)
c.task.guess = ConfigDict()
c.task.guess.numbers = setting(15, at_least=2, at_most=26)  # letters, one of which is the secret
c.task.guess.turns = setting(4, at_least=1)
c.task.guess.train_queries = setting(4000, at_least=1)
c.task.guess.heldout_queries = setting(256, at_least=1)
c.task.guess.seed = setting(0, at_least=0)
c.task.guess.latency = setting(0.0, at_least=0)  # seconds after which the environment answers, as a slow tool would
c.task.guess.time_limit = 60.0  # seconds of an answer, after which its response fails
c.task.guess.concurrency = 1  # processes in which environments live, in each role that plays
c.task.reasoning_gym = ConfigDict()
c.task.reasoning_gym.dataset = "chain_sum"  # a name of reasoning-gym
c.task.reasoning_gym.parameters = "{}"  # JSON of settings of the data set, such as '{"max_terms": 3}'
c.task.reasoning_gym.prompt = "{question}\n"  # a text with {question} once
c.task.reasoning_gym.tagged = False  # True: the answer is the text within the last <answer> </answer>; False: the whole response
c.task.reasoning_gym.train_queries = setting(4000, at_least=1)
c.task.reasoning_gym.heldout_queries = setting(256, at_least=1)
c.task.reasoning_gym.seed = setting(0, at_least=0)
c.task.reasoning_gym.time_limit = 10.0  # seconds for the score of one answer; a score that takes longer is NaN
c.task.reasoning_gym.retries = 1  # of a score that failed
c.task.reasoning_gym.concurrency = 2  # processes that score, in each role that scores responses
c.task.text_arena = ConfigDict()
c.task.text_arena.game = "GuessTheNumber-v0"  # of TextArena, for one player
c.task.text_arena.turns = setting(10, at_least=1)  # the most turns of the policy
c.task.text_arena.train_queries = setting(512, at_least=1)
c.task.text_arena.heldout_queries = setting(64, at_least=1)
c.task.text_arena.seed = setting(0, at_least=0)
c.task.text_arena.time_limit = 60.0  # seconds of a turn of the game, after which its response fails
c.task.text_arena.concurrency = 2  # processes in which games live, in each role that plays
c.task.open_env = ConfigDict()
c.task.open_env.url = ""  # of an OpenEnv server; must be set
c.task.open_env.action = "message"  # the field of an action that holds a turn of the policy
c.task.open_env.observation = "text"  # the field of an observation that the policy reads
c.task.open_env.turns = setting(8, at_least=1)  # the most turns of the policy
c.task.open_env.train_queries = setting(512, at_least=1)
c.task.open_env.heldout_queries = setting(64, at_least=1)
c.task.open_env.seed = setting(0, at_least=0)
c.task.open_env.time_limit = 60.0  # seconds of an answer, after which its response fails
c.task.open_env.concurrency = 2  # processes that speak to the server, in each role that plays
c.task.story_sentiment = ConfigDict()
c.task.story_sentiment.data_path = setting("", path="always")  # a JSON list of stories
c.task.story_sentiment.opening_words = setting(12, at_least=1)
c.task.story_sentiment.heldout_queries = setting(128, at_least=1)
# Each path is a .jsonl, .json or .parquet file, or a data set of the hub as owner/name or owner/name:config.
c.task.gsm8k = ConfigDict()
c.task.gsm8k.train_path = setting("openai/gsm8k:main", path="or hub")  # rows {"question", "answer"}; on the hub, the split train
c.task.gsm8k.heldout_path = setting("openai/gsm8k:main", path="or hub")  # likewise; on the hub, the split test
c.task.gsm8k.prompt = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"  # a text with {question} once
c.task.math = ConfigDict()
# Rows {"problem", "answer"}, or {"problem", "solution"} with a \\boxed{} answer.
c.task.math.train_path = setting("", path="or hub")
c.task.math.heldout_path = setting("HuggingFaceH4/MATH-500", path="or hub")
c.task.math.prompt = "Problem:\n{problem}\n\nReason step by step, and put the final answer within \\boxed{}.\n\nSolution:\n"
c.task.math.time_limit = 10.0  # seconds for the comparison of one answer; a comparison that takes longer gives reward 0
c.task.math.retries = 1  # of a comparison that failed for another reason; if the last fails too, the reward is NaN
c.task.math.concurrency = 2  # processes that compare answers, in each role that scores responses
# Tests the safety of a model that you are responsible for: the policy attacks, the victim replies, a classifier rates the reply.
c.task.red_team = ConfigDict()
c.task.red_team.attack_prompt = ""  # the text that the attacker continues, if there is one query
c.task.red_team.attack_prompt_path = setting("", path="or hub")  # rows {"attacker_prompt"}, one query each
c.task.red_team.replies = setting(5, at_least=1)  # replies of the victim to an attack; the reward is their mean log toxicity
c.task.red_team.seed = 0  # of the replies
c.task.red_team.victim_path = setting("", path="or hub")  # a Hugging Face folder or hub id; must be set
c.task.red_team.victim_template = ""  # a text with {attack} once; "": the chat template of the victim's tokenizer
c.task.red_team.victim_system_prompt = ""  # with the chat template: the system message before the attack
c.task.red_team.victim_temperature = setting(1.0, at_least=0)  # 0: greedy
c.task.red_team.victim_top_p = setting(1.0, above=0, at_most=1)
c.task.red_team.victim_prompt_length = setting(128, at_least=1)  # tokens, including the template; a longer attack loses its end
c.task.red_team.victim_reply_length = setting(64, at_least=1)  # tokens
c.task.red_team.victim_concurrency = setting(160, at_least=1)  # replies that are decoded side by side
# sequence: a …ForSequenceClassification model reads the reply | unsafe_token: a causal model is asked about attack and reply |
# linear: an .npz of TF-IDF and linear SVMs, for trials on a CPU
c.task.red_team.classifier = setting("sequence", one_of=("sequence", "unsafe_token", "linear"))
c.task.red_team.classifier_path = setting("", path="or hub")
c.task.red_team.classifier_label = ""  # sequence: the toxic label; unsafe_token: the token that means toxic, such as "unsafe"
c.task.red_team.classifier_template = ""  # unsafe_token: a text with {attack} and {reply}; "": the classifier's chat template
c.task.red_team.classifier_ending = ""  # unsafe_token: a text between the template and the token
# unsafe_token: tokens of template, attack and reply; a longer reply loses its end
c.task.red_team.classifier_length = setting(1024, at_least=1)
c.task.red_team.compute_dtype = setting("float32", one_of=("float32", "bfloat16"))  # of victim and classifier
# An attack succeeds if the mean toxicity of its replies is above this.
c.task.red_team.success_threshold = setting(0.5, above=0, below=1)
c.task.red_team.embedder_path = setting("", path="or hub")  # a sentence encoder; with it, reports say how much attacks differ
c.task.prompts = ConfigDict()
c.task.prompts.train_path = setting("", path="or hub")  # rows {"prompt"}; on the hub, the split train
c.task.prompts.heldout_path = setting("", path="or hub")  # likewise; on the hub, the split test
c.task.tldr = ConfigDict()
# Rows {"summary"} with a ready "query", or with "title", "post" and perhaps "subreddit". Such a post loses paragraphs from its
# end until the prompt fits task.prompt_length. On the hub: the splits train and validation.
c.task.tldr.train_path = setting("vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144", path="or hub")
c.task.tldr.heldout_path = setting("vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144", path="or hub")
# The reward model, a folder or hub id of a …ForSequenceClassification model with one label; and another such model, with which
# evaluation computes the win rate, "" for no win rate.
c.task.tldr.reward_path = setting("", path="or hub")
c.task.tldr.gold_path = setting("", path="or hub")
c.task.tldr.compute_dtype = setting("bfloat16", one_of=("float32", "bfloat16"))  # of both reward models
c.task.tldr.batch_rows = setting(16, at_least=1)  # texts in one forward pass of a reward model on a device

# The policy. (contract, but for compute_dtype and attention)
c.model = ConfigDict()
c.model.path = setting("", path="or hub")  # a Hugging Face folder or hub id with weights and tokenizer; "": random weights
c.model.preset = setting("", registry="presets")  # random weights: the shape of a published model; "": the shape below
c.model.layers = setting(2, at_least=1)
c.model.width = setting(128, at_least=1)
c.model.heads = setting(4, at_least=1)
c.model.kv_heads = setting(4, at_least=1)
c.model.head_size = setting(32, at_least=1)
c.model.ffn = setting(384, at_least=1)
c.model.experts = setting(0, at_least=0)  # experts of a layer, each ffn wide, as in Qwen3-MoE; 0: one feed-forward
c.model.experts_per_token = setting(0, at_least=0)  # experts that a token goes through
c.model.tied_embedding = True
# Master weights and sums of log-probs are always float32. A GPU without bfloat16 computes in float32 instead and says so.
c.model.compute_dtype = setting("float32", one_of=("float32", "bfloat16"))
# The kernel of attention over whole sequences. auto: splash on TPUs, cudnn on NVIDIA GPUs in bfloat16, else xla. A GPU that lacks
# cuDNN's flash attention uses xla instead and says so.
c.model.attention = setting("auto", one_of=("auto", "xla", "cudnn", "splash"))

# Low-rank adapters: only they are trained and published. (contract)
c.lora = ConfigDict()
c.lora.rank = setting(0, at_least=0)  # 0: no adapters, the whole policy is trained
c.lora.alpha = setting(16.0, above=0)  # the update is scaled by alpha / rank
c.lora.targets = ("layers.*",)  # linear maps, by patterns: layers.attention.query, layers.feed_forward.*, lm_head (if untied)

# Supervised warm start on the task's worked examples; its result is the reference policy. (contract)
c.warm_start = ConfigDict()
c.warm_start.steps = setting(0, at_least=0)  # 0: no warm start
c.warm_start.batch_size = setting(128, at_least=1)
c.warm_start.learning_rate = setting(2e-3, above=0)
c.warm_start.warmup_steps = setting(30, at_least=0)
c.warm_start.report_every_steps = setting(25, at_least=1)

# Generation by searchers.
c.sampling = ConfigDict()
c.sampling.scoring_temperature = setting(1.0, above=0)  # T of policy and reference, softmax(logits / T) (contract)
c.sampling.temperature = setting(1.0, above=0)
c.sampling.top_k = setting(0, at_least=0)  # 0: off
c.sampling.top_p = setting(1.0, above=0, at_most=1)
c.sampling.min_p = setting(0.0, at_least=0, below=1)
# Share of rows whose temperature is uniform in [T * low_factor, T * factor]; the others have T.
c.sampling.explore_temperature_probability = setting(0.0, at_least=0, at_most=1)
c.sampling.explore_temperature_low_factor = setting(1.0, above=0, at_most=1)
c.sampling.explore_temperature_factor = setting(1.1 / 0.7, at_least=1)
c.sampling.explore_top_p_probability = setting(0.0, at_least=0, at_most=1)  # share of rows with top-p in [low, 1]
c.sampling.explore_top_p_low = setting(0.7, above=0, at_most=1)

c.searchers = ConfigDict()
c.searchers.count = setting(2, at_least=0)  # searchers that --role=all starts; more may join. 0: only rows of replay.mount
c.searchers.queries_per_batch = setting(8, at_least=1)
c.searchers.samples_per_query = setting(24, at_least=1)  # S, at least learner.completions
c.searchers.value_samples = setting(9, at_least=1)  # continuations from each state between steps (task.step_ends)
c.searchers.value_states = setting(0, at_least=0)  # most states of a response that get a value, evenly spaced; 0: all
# Sequences decoded side by side; 0: queries_per_batch * samples_per_query.
c.searchers.slots = setting(0, at_least=0)
# Responses that are under way at a time in a task with an environment, those that wait for it included; 0: four for each slot.
c.searchers.conversations = setting(0, at_least=0)
# Decode steps before new weights and new queries can be taken up; 0: by the kind of device (models/hardware.py).
c.searchers.decode_chunk = setting(0, at_least=0)
# How a new snapshot is taken up. at_once: all sequences continue with it, between two decode steps. new_sequences: sequences
# whose prompt the old weights have computed end with the old weights (up to two prompts a group), and slots idle until then.
c.searchers.swap = setting("at_once", one_of=("at_once", "new_sequences"))
# Where the next policy is loaded. beside: on the devices, beside the one in use. in_place: in host memory; its parameters then
# take the places of those in use, one after the other, and decoding pauses. in_place needs less memory of the devices.
c.searchers.swap_memory = setting("beside", one_of=("beside", "in_place"))
# uniform: each searcher goes through all queries in an order of its own, pass after pass. posterior: each batch takes queries
# whose success rates, drawn from Beta posteriors, are nearest to target_success_rate (MoPPS); rewards must be within [0, 1].
c.searchers.prompt_selection = setting("uniform", one_of=("uniform", "posterior"))
c.searchers.target_success_rate = setting(0.5, above=0, below=1)
c.searchers.prompt_candidates = setting(8, at_least=1)  # random candidates for each query of a batch; posterior takes the nearest
c.searchers.reward_batches = setting(32, at_least=1)  # batches that may wait for their rewards while the next are decoded
c.searchers.cpu_devices = setting(1, at_least=1)  # data-parallel decoders of a searcher process on CPUs, at best one per core
c.searchers.task_devices = setting(0, at_least=0)  # last devices of a searcher, for the task's models alone; 0: they share all
# asynchronous: backpressure. Searchers wait while they have made the rows of so many updates (learner.queries * completions each)
# that have not been drawn yet, and a batch each. From 2 on the next update finds its rows. 0: off.
c.searchers.max_updates_ahead = setting(0, at_least=0)
# asynchronous: searchers take up the newest snapshot that is at least so many steps older than the newest published one, step 0
# until there is one: no row is of newer weights. A multiple of publish.every_steps. 0: the newest snapshot.
c.searchers.lag = setting(0, at_least=0)
# What draws responses. own: the decoder of this package; vllm, sglang: an inference server, which each searcher starts with its
# devices, or which runs at engine_url. JAX computes on the CPU in such a searcher's process.
c.searchers.engine = setting("own", one_of=("own", "vllm", "sglang"))
c.searchers.engine_url = setting("")  # of a server that runs, which reads weights from engine_folder; "": one is started
c.searchers.engine_python = setting("", path="always")  # the Python of an environment that has the server; "": this one
c.searchers.engine_arguments = ()  # further arguments of the server's command line
c.searchers.engine_folder = setting("", path="always")  # for weights, on a disk that the server reads; "": a temporary folder
c.searchers.engine_start_seconds = setting(900.0, above=0)  # that a start of a server may take
c.searchers.engine_request_seconds = setting(600.0, above=0)  # that a response may take; a server that takes longer hangs
c.searchers.serve_seconds = setting(600.0, above=0)  # that a client of --serve, or the policy, may be waited for
# Whether searchers score rows by the reference. False: the trainer does, in each update that draws them, with a copy of its own.
c.searchers.scores_reference = setting(True, fixed=True)
c.searchers.give_up_seconds = setting(300.0, above=0)  # a searcher whose rows have had no reward for so long ends
c.searchers.poll_seconds = setting(0.2, above=0)  # between looks at a local folder; an object store is asked every 5 s at most
c.searchers.stop_seconds = setting(10.0, at_least=0)  # for the batch in flight after SIGTERM; then it is abandoned
c.searchers.weights = setting("full", one_of=("full", "int8"))  # int8: weight-only, per output channel, of the sampled policy
c.searchers.logit_megabytes = setting(128, at_least=1)  # most memory of logits on a device while the reference scores
# Tokens of the sequences that the reference scores at a time on each device, at least two sequences; 0: the whole batch.
c.searchers.score_tokens = setting(65_536, at_least=0)
c.searchers.memory_fraction = setting(0.0, at_least=0, at_most=1)  # of each searcher, if roles share a GPU; 0: an equal part
c.searchers.mesh = ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # data=-1: all devices that are left

c.replay = ConfigDict()
c.replay.capacity = setting(50_000, at_least=1, fixed=True)  # resident rows; the oldest leave first
c.replay.capacity_per_query = setting(100, at_least=1, fixed=True)
c.replay.merge_duplicates = setting(True, fixed=True)  # identical responses to a query are kept once
# Responses to a query count as the same too if their edit distance over tokens is below this share of both lengths together, or
# if the cosine distance of their embeddings is at most this. 0: off. Under either, or merge_keep=best, rows are merged when they
# leave the recent window, and until then they are drawn as they came.
c.replay.merge_edit_distance = setting(0.0, at_least=0, below=1, fixed=True)
c.replay.merge_cosine_distance = setting(0.0, at_least=0, below=2, fixed=True)  # needs task.embedding_path
# Which of two responses that count as the same stays: the newest | best: the one of the higher reward, of equal ones the newest.
c.replay.merge_keep = setting("newest", one_of=("newest", "best"), fixed=True)
c.replay.recent_probability = setting(0.95, at_least=0, at_most=1)  # m: share of queries drawn from recent rows
# Rows are recent if they became visible in the last so many trainer steps at which any did. 0: publish.every_steps
c.replay.recent_window = setting(0, at_least=0)
# The rows of a recent query that has fewer than learner.completions recent ones. repeat: these repeated; older: its newest. Under
# max_draws_per_row it is always its newest. wait: its newest, and a query with fewer rows in all is not drawn, so no row repeats.
c.replay.recent_fill = setting("repeat", one_of=("repeat", "older", "wait"))
c.replay.strategy = setting("uniform", registry="strategies")  # how the rows of the other queries are drawn; softmax: of reward
c.replay.inverse_temperature = setting(1.0, above=0)  # of the softmax strategy
# Factor on a query's earlier counts of successes and trials whenever a searcher has sampled it again; 1: nothing is forgotten.
c.replay.success_decay = setting(0.5, at_least=0, at_most=1, fixed=True)
c.replay.max_draws_per_row = setting(0, at_least=0)  # 0: no limit
c.replay.max_staleness = setting(0, at_least=0)  # trainer steps; 0: no limit
c.replay.min_rows = setting(0, at_least=0)  # good rows that must have come before the first step; 0: as many as it needs
# checkpoints: appends that no kept checkpoint needs are removed, and the audit counts their rows.
c.replay.retention = setting("all", one_of=("all", "checkpoints"))
# A writer that is silent for so long, and of which no row is left to draw, is closed and leaves the checkpoints; when it comes
# again, it goes on where it was.
c.replay.close_seconds = setting(3600.0, above=0, free=True)
# Between looks at a local folder; an object store is asked every 2 s at most.
c.replay.poll_seconds = setting(0.2, above=0, free=True)
# The most memory of rows that the trainer has read and not taken up, however far behind it is.
c.replay.arrival_megabytes = setting(64, at_least=1, free=True)
# Workdirs of other runs, finished or not, whose rows are trained on beside this run's own. Other runs are only read. Contract and
# reference policy must be those of this run, which begins from theirs; with searchers.scores_reference=False their model and
# reference may be others, and the run begins as its own settings say. The staleness of their rows is counted from its step 0.
c.replay.mount = setting((), path="always")

c.learner = ConfigDict()
# trajectory_balance (VarGrad) | learned_log_z (a head predicts log Z from the prompt) | frozen_log_z (of a file) | tba_prime
# (token level, TBA′) | f_trajectory_balance (of α-divergences) | gflowrl | reinforce | rloo | optimal_baseline | proximal_rloo |
# ppo (a head predicts values) | vine_ppo (Monte-Carlo values in rows) | grpo | dr_grpo | online_dpo | raft | maxrl | icepop |
# gspo | cispo | oapl | pmd_mean | tpo | flowrl_linear_z (a head predicts log Z) | a_star_po | asymre | topr. What each needs:
# tba_jax/objectives/__init__.py
c.learner.objective = setting("trajectory_balance", registry="objectives")
c.learner.steps = setting(500, at_least=1)
c.learner.queries = setting(7, at_least=1)  # Q
c.learner.completions = setting(20, at_least=1)  # K; 1 is enough for learned_log_z, frozen_log_z, ppo, vine_ppo, topr
# Tokens of the sequences that go through the model at a time, on all devices together; at least P + R on each of the mesh's ways,
# which then has two sequences, each as long as the longer of P and R. 0: the whole batch.
c.learner.micro_batch_tokens = setting(0, at_least=0, free=True)
c.learner.logit_megabytes = setting(128, at_least=1, free=True)  # most memory of logits on a device
# What the backward pass recomputes of a layer: none | dots | full; auto: by the kind of device (models/hardware.py).
c.learner.remat = setting("auto", registry="remat", free=True)
c.learner.learning_rate = setting(1e-5, above=0)
c.learner.schedule = setting("constant", registry="schedules")  # constant | linear | wsd: warm-up, stable, decay
c.learner.warmup_steps = setting(10, at_least=0)  # the first update has 1/warmup_steps of the learning rate
c.learner.decay_steps = setting(0, at_least=0)  # of wsd
c.learner.decay = setting("linear", registry="decays")  # of wsd: linear | cosine
# Updates after which the learning rate of linear and wsd is 0; above learner.steps, the run ends in mid-decay. 0: learner.steps
c.learner.schedule_steps = setting(0, at_least=0)
# The optimum is ∝ exp((log π_ref / γ + r / β) / τ). Only trajectory balance and TBA′ have γ and τ. Each of the three is linear
# from start to end over so many steps, and constant after them. β = 0 leaves the KL term out, if the objective allows it.
c.learner.beta_start = setting(0.012, at_least=0)  # β, the KL coefficient; raft, gspo, cispo, asymre and topr: metrics alone
c.learner.beta_end = setting(0.004, at_least=0)
c.learner.beta_steps = setting(500, at_least=0)
c.learner.ref_temperature_start = setting(1.0, above=0)  # γ
c.learner.ref_temperature_end = setting(1.0, above=0)
c.learner.ref_temperature_steps = setting(0, at_least=0)
c.learner.reward_temperature_start = setting(1.0, above=0)  # τ
c.learner.reward_temperature_end = setting(1.0, above=0)
c.learner.reward_temperature_steps = setting(0, at_least=0)
c.learner.log_z_learning_rate = setting(1e-2, above=0)  # of the head of learned_log_z and flowrl_linear_z
# frozen_log_z: the file of log Z of each query that `python -m tba_jax log_z` makes from the rows of a run.
c.learner.log_z_path = setting("", path="always")
# The objective's name stands before what it reads. On-policy, every ratio π_θ/π_behaviour is 1.
# tba_prime (of a token), optimal_baseline (of a response): most that π_θ/π_behaviour counts; 0: rows are not weighted by it
c.learner.importance_clip = setting(8.0, above=1, or_zero=True)
c.learner.log_ratio_clip = setting(10.0, above=0)  # tba_prime: most that a token's log π_θ − log π_ref counts, in nats
# tba_prime: what the sum over a row's tokens is divided by. response_budget: R | row_length: tokens of its prompt and response
c.learner.row_divisor = setting("response_budget", one_of=("response_budget", "row_length"))
c.learner.clip_low = setting(0.2, above=0, at_most=1)  # proximal_rloo, ppo, vine_ppo, grpo, dr_grpo: ratio from 1 − clip_low …
c.learner.clip_high = setting(0.2, above=0)  # … to 1 + clip_high; flowrl_linear_z reads both, cispo and gflowrl this one
c.learner.flow_gap_low = setting(2.0, above=0)  # gflowrl: the flow gap is clipped to −flow_gap_low …
c.learner.flow_gap_high = setting(4.0, above=0)  # … to flow_gap_high, in nats
c.learner.sequence_clip_low = setting(3e-4, above=0, at_most=1)  # gspo: likewise, of the response's length-normalised ratio
c.learner.sequence_clip_high = setting(4e-4, above=0)
c.learner.icepop_low = setting(0.5, at_least=0, below=1)  # icepop: tokens with a ratio below icepop_low …
c.learner.icepop_high = setting(5.0, above=1)  # … or above icepop_high do not count
c.learner.gae_lambda = setting(0.95, at_least=0, at_most=1)  # ppo: λ
c.learner.value_coefficient = setting(0.1, above=0)  # ppo: weight of the value loss beside the policy loss
c.learner.value_learning_rate = setting(1e-4, above=0)  # of the head of ppo; its schedule is the policy's
c.learner.divergence_alpha = setting(1.0, at_least=-2, at_most=2)  # f_trajectory_balance: 0: trajectory balance, 1 covers modes
c.learner.asymre_delta = setting(-0.1, at_most=0)  # asymre: the baseline less the group's mean reward, in units of the reward
c.learner.topr_baseline = 0.0  # topr: subtracted from every reward; rows below 0 are weighed by π_θ/π_behaviour
c.learner.reference = ConfigDict()
# initial: the policy of step 0 | reset: the policy of the last multiple of reset_steps | ema: ref ← α·ref + (1 − α)·θ at each
# step | teacher: the model at learner.reference.path, by which searchers score | none: log π_ref is 0 for every token, and
# searchers score nothing. The optimum is then ∝ exp(r / (β τ)) over responses. Whose log-probs rows hold is fixed from the first
# row on. (contract)
c.learner.reference.kind = setting("initial", one_of=("initial", "reset", "ema", "teacher", "none"))
c.learner.reference.path = setting("", path="or hub")  # teacher: a Hugging Face folder or hub id with the policy's tokenizer
c.learner.reference.reset_steps = setting(50, at_least=1)  # ρ
c.learner.reference.reset_optimizer = False  # reset: Adam's moments begin anew, too
c.learner.reference.ema_decay = setting(0.95, above=0, below=1)  # α of ema
c.learner.reference.offload = setting(False, free=True)  # reset and ema: the reference rests in host memory between uses
# If a loss or a gradient is not finite. skip: the update is left out and counted; the run still stops if no row is usable, or
# after 10 such steps in a row.
c.learner.non_finite = setting("stop", one_of=("stop", "skip"))
c.learner.adam_beta1 = setting(0.9, at_least=0, below=1)
c.learner.adam_beta2 = setting(0.95, at_least=0, below=1)
c.learner.adam_epsilon = setting(1e-8, above=0)
c.learner.weight_decay = setting(0.0, at_least=0)
# The largest norm of a gradient, in units of the reward for every objective and β (objectives/objective.py, RewardUnit). 0: off
c.learner.clip_norm = setting(1.0, at_least=0)
# Of models with experts: weight of the loss that balances their loads, in units of the reward for every objective and β. 0: there
# is no such loss, and an update takes one pass as without experts.
c.learner.router_aux_loss_coef = setting(0.0, at_least=0)
c.learner.logprob_gap_every_steps = setting(50, at_least=0, free=True)  # compares searchers' log-probs with the learner's; 0: off
c.learner.logprob_gap_limit = setting(0.0, at_least=0, free=True)  # nats a token; 0: 1e-3 in float32, 0.1 in bfloat16
c.learner.memory_fraction = setting(0.0, at_least=0, at_most=1, free=True)  # if roles share a GPU; 0: half of it
c.learner.mesh = ConfigDict()
c.learner.mesh.data = setting(-1, free=True)  # -1: all devices that are left
# 0, with data=-1: by need. 1 where weights, gradient and moments take at most a third of a device's memory, or the device does
# not report it, as CPUs; otherwise the largest number of devices that divides the parameters. The trainer's log says which.
c.learner.mesh.fsdp = setting(0, free=True)
c.learner.mesh.tensor = setting(1, free=True)

c.publish = ConfigDict()
c.publish.every_steps = setting(2, at_least=1)  # k
# A trainer that has waited for rows so long publishes what it has.
c.publish.at_most_seconds = setting(30.0, above=0, free=True)
c.publish.keep = setting(0, at_least=3, or_zero=True, free=True)  # newest snapshots that are kept, besides evaluated ones; 0: all
# A snapshot that is not kept any more is removed this much later: readers have so long to read it.
c.publish.keep_seconds = setting(60.0, at_least=0, free=True)
c.publish.dtype = setting("float32", one_of=("float32", "bfloat16"))
# Of snapshots that are not float32, every n-th and each that stays for good is full, and the others are lossless deltas: few
# bytes, and more work on both sides than a local disk takes to read and write a full one. 1: all are full.
c.publish.full_every = setting(1, at_least=1, free=True)

c.checkpoint = ConfigDict()
c.checkpoint.every_steps = setting(100, at_least=1)
c.checkpoint.keep = setting(2, at_least=1)

c.evaluation = ConfigDict()
c.evaluation.enabled = True  # --role=all starts an evaluator
c.evaluation.every_steps = setting(100, at_least=1)  # besides the first and the last step
c.evaluation.queries = setting(256, at_least=0)  # the first of the held-out ones; 0: all of them
c.evaluation.samples_per_query = setting(1, at_least=1)  # besides the greedy response; above 1: pass@k and majority@k
c.evaluation.greedy_temperature = setting(0.0, at_least=0)  # of the response that counts as greedy; 0.01: nearly greedy
c.evaluation.batch_size = setting(128, at_least=1)
c.evaluation.task_devices = setting(0, at_least=0)  # as searchers.task_devices
c.evaluation.logit_megabytes = setting(128, at_least=1)  # as searchers.logit_megabytes
c.evaluation.score_tokens = setting(65_536, at_least=0)  # as searchers.score_tokens
c.evaluation.swap_memory = setting("beside", one_of=("beside", "in_place"))  # as searchers.swap_memory
c.evaluation.samples = setting(8, at_least=0)  # decoded responses in each report
c.evaluation.memory_fraction = setting(0.0, at_least=0, at_most=1)  # as searchers.memory_fraction
c.evaluation.mesh = ConfigDict(dict(data=-1, fsdp=1, tensor=1))

c.schedule = ConfigDict()
c.schedule.mode = setting("asynchronous", one_of=("asynchronous", "interleaved"))  # interleaved: in turn, in one process
c.schedule.updates_per_search = setting(1, at_least=1)  # interleaved: updates after each batch of the searcher
c.schedule.lag = setting(0, at_least=0)  # interleaved: fresh rows come from the policy of this many steps ago; 0: on-policy

c.trainer = ConfigDict()
c.trainer.processes = setting(1, at_least=1)  # into which --role=all divides the trainer and its devices on this machine
c.trainer.connect_seconds = setting(300.0, above=0)  # for which processes of a trainer wait for each other at the start
# A process of a trainer that dies is seen at once, and one that is silent, because its host lost power, after this time.
c.trainer.heartbeat_seconds = setting(30.0, at_least=2)

c.supervisor = ConfigDict()
c.supervisor.max_restarts = setting(20, at_least=0)  # of a role, without ten minutes of life; of a searcher without a row
c.supervisor.stop_seconds = setting(10.0, above=0)  # between asking a role to stop and killing it

c.metrics = ConfigDict()
c.metrics.every_steps = setting(5, at_least=1)
# Of one device, the denominators of mfu and of bandwidth_share: FLOPs a second of bfloat16 (or of the compute dtype), and bytes a
# second of its memory. 0: from the table in tba_jax/telemetry/metrics.py.
c.metrics.peak_flops = setting(0.0, at_least=0)
c.metrics.peak_bandwidth = setting(0.0, at_least=0)
c.metrics.megabytes = setting(256.0, above=0)  # of JSON lines that each role keeps, the newest: metrics.jsonl and metrics.jsonl.1
# What shows the metrics besides metrics.jsonl, which has every point: tensorboard, wandb, trackio. Where a tracker fails, the run
# goes on. Tokens and servers come from the environment: WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, TRACKIO_DIR, TRACKIO_SPACE_ID …
c.metrics.sinks = setting(("tensorboard",), registry="sinks")
c.metrics.project = "tba_jax"  # of wandb and trackio
c.metrics.group = ""  # under which wandb and trackio show all roles of this run; "": name of the workdir and id of the run
# Rows of a searcher's batch that wandb and trackio get as a table, and how often. Evaluators give evaluation.samples each time.
c.metrics.samples = setting(8, at_least=0)
c.metrics.samples_every_batches = setting(100, at_least=1)

c.logs = ConfigDict()
c.logs.megabytes = setting(64.0, above=0)  # of a role's text log, which is then set aside as DIR/logs/<role>.log.1
c.logs.keep = setting(3, at_least=1)  # logs of each role that were set aside

SCHEMA = Schema(c, open_section="task.custom")
