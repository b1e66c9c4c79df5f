"""All settings of supervised training: one line each, with its default, its limits (tba_jax/schemas.py) and its meaning.

Recipes get the defaults from configs/supervised.py. A resumed run may change the settings with free=True, which say how the same
numbers are computed, reported and stored; every other setting must be what the run began with.
"""

from ml_collections.config_dict import ConfigDict

from tba_jax.schemas import Schema, setting

c = ConfigDict()
c.seed = setting(0, at_least=0, below=2**32)  # of the order of examples, and of weights that are not loaded
c.kind = setting("sft", registry="kinds")  # sft: maximum likelihood of responses | reward: a score, from pairs of responses

c.model = ConfigDict()
c.model.path = setting("", given=True, path="or hub")  # a Hugging Face folder or hub id with weights and tokenizer
c.model.random_init = False  # True: random weights, and only shape and tokenizer come from model.path
c.model.compute_dtype = setting("float32", one_of=("float32", "bfloat16"))  # weights, log-prob sums, scores are always float32
c.model.attention = setting("auto", one_of=("auto", "xla", "cudnn", "splash"), free=True)

# JSON lines: one object a line, with the fields below; other fields are ignored. Texts are taken as they are, without a template
# and without a space between prompt and response. End-of-sequence is added to every response. Files may move: a run knows its
# examples by their fingerprint.
c.data = ConfigDict()
c.data.train = setting("", given=True, path="always", free=True)
# "": data.heldout_share of the prompts of data.train, chosen by their hash.
c.data.heldout = setting("", path="always", free=True)
c.data.heldout_share = setting(0.05, at_least=0, below=1)
c.data.prompt_field = setting("prompt", given=True)
c.data.response_field = setting("response", given=True)  # of sft
c.data.chosen_field = setting("chosen", given=True)  # of reward
c.data.rejected_field = setting("rejected", given=True)  # of reward
c.data.prompt_length = setting(128, at_least=1)  # P, tokens
c.data.response_length = setting(128, at_least=1)  # R, tokens, including end-of-sequence
# Examples that are too long, and pairs of equal responses; skip: they are left out and counted.
c.data.unfit = setting("refuse", one_of=("refuse", "skip"))

c.training = ConfigDict()
c.training.steps = setting(0, at_least=0)  # 0: as many as training.epochs make
c.training.epochs = setting(1.0, above=0)
c.training.batch_size = setting(32, at_least=1)  # examples a step; for reward: pairs
c.training.micro_batch_rows = setting(0, at_least=0, free=True)  # examples or pairs in one forward pass; 0: the whole batch
c.training.learning_rate = setting(1e-5, above=0)  # the schedule's peak
c.training.schedule = setting("linear", registry="schedules")  # constant | linear | wsd
c.training.warmup_steps = setting(10, at_least=0)
c.training.decay_steps = setting(0, at_least=0)  # of wsd
c.training.decay = setting("linear", registry="decays")  # of wsd: linear | cosine
c.training.adam_beta1 = setting(0.9, at_least=0, below=1)
c.training.adam_beta2 = setting(0.95, at_least=0, below=1)
c.training.adam_epsilon = setting(1e-8, above=0)
c.training.weight_decay = setting(0.0, at_least=0)
c.training.clip_norm = setting(1.0, at_least=0)  # of the gradient; 0: off
c.training.remat = setting("full", registry="remat", free=True)  # none | dots | full: what the backward pass computes again
c.training.logit_megabytes = setting(1024, at_least=1, free=True)  # most memory of logits, on each device
c.training.mesh = ConfigDict()
c.training.mesh.data = setting(-1, free=True)  # -1: all devices that are left
c.training.mesh.fsdp = setting(1, free=True)
c.training.mesh.tensor = setting(1, free=True)

c.checkpoint = ConfigDict()
c.checkpoint.every_steps = setting(500, at_least=1, free=True)  # besides the last step, and the step where a signal stops the run
c.checkpoint.keep = setting(2, at_least=1, free=True)

c.evaluation = ConfigDict()
c.evaluation.every_steps = setting(100, at_least=1, free=True)  # besides before the first and after the last step
c.evaluation.examples = setting(1024, at_least=0, free=True)  # the first held-out examples; 0: all

c.metrics = ConfigDict()
c.metrics.every_steps = setting(10, at_least=1, free=True)
c.metrics.megabytes = setting(256.0, above=0, free=True)  # of JSON lines that are kept, the newest
c.metrics.sinks = setting(("tensorboard",), registry="sinks", free=True)  # also wandb, trackio; metrics.jsonl has every point
c.metrics.project = setting("tba_jax", free=True)  # of wandb and trackio
c.metrics.group = setting("", free=True)  # of wandb and trackio; "": name of the workdir and id of the run

c.output = ConfigDict()
c.output.dtype = setting("float32", one_of=("float32", "bfloat16"), free=True)  # of the saved weights

SCHEMA = Schema(c)
