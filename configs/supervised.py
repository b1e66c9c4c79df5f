"""The complete schema of supervised training: SFT policies and reward models. Locked: a misspelt key fails.

    python -m tba_jax supervised --config=configs/supervised.py --workdir=DIR --output=DIR --config.model.path=FOLDER \\
        --config.data.train=pairs.jsonl --config.kind=reward

A recipe is a file beside this one: `c = supervised.get_config()`, then it sets leaves. Settings marked (free) may differ when a
run is resumed; any other must be what the run began with.
"""

from ml_collections import config_dict


def get_config() -> config_dict.ConfigDict:
    c = config_dict.ConfigDict()
    c.seed = 0  # of the examples' order, and of weights that are not loaded
    c.kind = "sft"  # sft: maximum likelihood of responses | reward: a score of responses, from preferences between two

    c.model = config_dict.ConfigDict()
    c.model.path = ""  # a Hugging Face folder or hub id with weights and tokenizer
    c.model.random_init = False  # only shape and tokenizer come from model.path, the weights are random
    c.model.compute_dtype = "float32"  # float32 | bfloat16; master weights, log-prob sums and scores are always float32
    c.model.attention = "auto"  # (free) auto | xla | cudnn

    # JSON lines: one object a line, with the fields below (others are ignored). Texts are taken as they are: no template, no
    # space between prompt and response. The end of sequence is added to every response.
    c.data = config_dict.ConfigDict()
    c.data.train = ""  # path
    c.data.heldout = ""  # path; "": data.heldout_share of the prompts of data.train, chosen by their hash
    c.data.heldout_share = 0.05
    c.data.prompt_field = "prompt"
    c.data.response_field = "response"  # of sft
    c.data.chosen_field = "chosen"  # of reward
    c.data.rejected_field = "rejected"  # of reward
    c.data.prompt_length = 128  # P, tokens
    c.data.response_length = 128  # R, tokens, end of sequence included
    c.data.long_examples = "refuse"  # refuse | skip (left out and counted)
    c.data.identical_pairs = "refuse"  # chosen equals rejected: refuse | skip (left out and counted)

    c.training = config_dict.ConfigDict()
    c.training.steps = 0  # 0: as many as training.epochs make
    c.training.epochs = 1.0
    c.training.batch_size = 32  # examples a step; for reward: pairs
    c.training.micro_batch_rows = 0  # (free) examples or pairs in one pass, also of an evaluation; 0: the whole batch
    c.training.learning_rate = 1e-5  # the schedule's peak
    c.training.schedule = "linear"  # constant | linear | wsd
    c.training.warmup_steps = 10
    c.training.decay_steps = 0  # of wsd
    c.training.adam_beta1 = 0.9
    c.training.adam_beta2 = 0.95
    c.training.adam_epsilon = 1e-8
    c.training.weight_decay = 0.0
    c.training.clip_norm = 1.0  # of the gradient; 0: off
    c.training.remat = "full"  # (free) what the backward pass recomputes: none | full (all but a layer's input) | dots
    c.training.logit_megabytes = 1024  # (free) the most that the logits of one block of time may take, over all devices
    c.training.mesh = config_dict.ConfigDict(dict(data=-1, fsdp=1, tensor=1))  # (free) data=-1: all devices that are left

    c.checkpoint = config_dict.ConfigDict()
    c.checkpoint.every_steps = 500  # (free) besides the last step, and where a signal stops the run
    c.checkpoint.keep = 2  # (free)

    c.evaluation = config_dict.ConfigDict()
    c.evaluation.every_steps = 100  # (free) besides before the first and after the last step
    c.evaluation.examples = 1024  # (free) the first of the held-out ones; 0: all

    c.metrics = config_dict.ConfigDict()
    c.metrics.every_steps = 10  # (free)

    c.output = config_dict.ConfigDict()
    c.output.dtype = "float32"  # (free) float32 | bfloat16, of the saved weights
    return c.lock()
