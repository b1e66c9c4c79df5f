"""What the study of word problems learns from, all of it made here: problems in GSM8K's form, a tokenizer, a small model.

A template is an opening, one or two events and a question: its text has places for a person, a friend, a thing and numbers, and
its solution takes two to four arithmetic steps. Every sentence occurs in training, while the sequences of held-out templates do
not. A row is GSM8K's, {"question", "answer"}: a line a step, `12+5=<<12+5=17>>17 pens`, and the answer after `####`. Supervised
training sees many solutions that forget the last step, so that there is something to find out by trial.
"""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import side_by_side
from configs import base
from tba_jax import outputs
from tba_jax.tasks.mathematics import GSM8K

LENGTHS = {"prompt": 64, "response": 32}  # tokens
TEMPLATES, ROWS = {"train": 600, "heldout": 256}, {"train": 24_000, "heldout": 512}
LARGEST = 40  # of all numbers of a problem
TRIES = 100_000  # to find numbers for a template; the rarest ones take about 1,000
EXAMPLES, BATCH = 13_600, 16  # of supervised training, the second at a time
FORGOTTEN = 0.6  # share of its solutions that leave out the step of the question, where it has one
END = "<|endoftext|>"
SHAPE: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
SHAPE |= {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SHAPE |= {"max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
STEPS = (2, 3, 4)  # arithmetic steps of a problem
SHE, HE = ("Ann", "Cleo", "Eve", "Ida", "Mia", "Nora"), ("Ben", "Dan", "Finn", "Gus", "Hal", "Omar")
THINGS = ("pens", "eggs", "books", "cards", "shells", "stamps", "coins", "apples", "beads", "cups", "figs", "hats")


class Sentence(NamedTuple):
    """text: with {name}, {He}, {he}, {friend}, {things} and the numbers {a} and {b}; steps: a number, an operation and a number
    each: a, b, n for what the person has, or m for the result of the step before. The last result is what the person has then."""

    text: str
    steps: tuple[str, ...] = ()
    unit: str = "{things}"


OPENINGS = (
    Sentence("{name} has {a} {things}."),
    Sentence("{name} has {a} boxes of {b} {things}.", ("a*b",)),
    Sentence("{name} has {a} red and {b} blue {things}.", ("a+b",)),
    Sentence("{friend} has {a} {things}. {name} has {b} more than {friend}.", ("a+b",)),
    Sentence("{friend} has {a} {things}. {name} has {b} times as many.", ("a*b",)),
    Sentence("{name} had {a} {things} and lost {b}.", ("a-b",)),
)
EVENTS = (
    Sentence("{He} buys {a} more.", ("n+a",)),
    Sentence("{friend} gives {name} {a} {things}.", ("n+a",)),
    Sentence("{He} finds {a} at home.", ("n+a",)),
    Sentence("{He} loses {a}.", ("n-a",)),
    Sentence("{He} gives {a} to {friend}.", ("n-a",)),
    Sentence("{He} sells {a} of them.", ("n-a",)),
    Sentence("Then {he} gets {a} times as many.", ("n*a",)),
    Sentence("{He} makes {a} equal piles and keeps one pile.", ("n/a",)),
    Sentence("{He} buys {a} bags of {b}.", ("a*b", "n+m")),
    Sentence("{He} sells {a} bags of {b}.", ("a*b", "n-m")),
    Sentence("{friend} brings {a} big and {b} small ones.", ("a+b", "n+m")),
)
QUESTIONS = (
    Sentence("How many {things} does {name} have?"),
    Sentence("How many {things} are there in the end?"),
    Sentence("{He} sells all for {a} dollars each. How many dollars is that?", ("n*a",), "dollars"),
    Sentence("{He} puts {a} in each bag. How many bags are there?", ("n/a",), "bags"),
)

Template = tuple[Sentence, ...]


def split(seed: int) -> dict[str, list[Template]]:
    """Templates of train and held-out problems, each with about as many of 2 as of 3 and 4 steps."""
    of_length: dict[int, list[Template]] = {steps: [] for steps in STEPS}
    for events in (1, 2):
        for template in itertools.product(OPENINGS, *[EVENTS] * events, QUESTIONS):
            of_length.get(sum(len(sentence.steps) for sentence in template), []).append(template)
    rng = random.Random(seed)
    for known in of_length.values():
        rng.shuffle(known)
    mixed = [each for group in itertools.zip_longest(*of_length.values()) for each in group if each]
    return {"heldout": mixed[: TEMPLATES["heldout"]], "train": mixed[TEMPLATES["heldout"] :][: TEMPLATES["train"]]}


def _tell(sentence: Sentence, has: int, rng: random.Random) -> tuple[dict[str, int], list[tuple[str, int]]] | None:
    """Numbers of a sentence, and the calculations of its steps with their results, such as (12+5, 17); None: a result is no whole
    number within 1 and LARGEST. Factors and divisors are small."""
    small = {place for left, operation, right in map(tuple, sentence.steps) for place in (left, right) if operation in "*/"}
    values = {place: rng.randint(2, 5 if place in small else 12) for place in "ab"}
    numbers, calculations = values | {"n": has}, []
    for left, operation, right in map(tuple, sentence.steps):
        of, by = numbers[left], numbers[right]
        result = {"+": of + by, "-": of - by, "*": of * by, "/": of // by}[operation]
        if not 1 <= result <= LARGEST or (operation == "/" and of % by):
            return None
        calculations.append((f"{of}{operation}{by}", result))
        numbers["m"] = result
    return values, calculations


def problem(template: Template, rng: random.Random) -> dict[str, str]:
    """A row {"question", "answer"} of a template. Raises ValueError: LARGEST, or the ranges of the numbers, leave it none."""
    name, friend = rng.sample(SHE + HE, 2)
    he = "He" if name in HE else "She"
    words = dict(name=name, friend=friend, He=he, he=he.lower(), things=rng.choice(THINGS))
    for _ in range(TRIES):
        has, texts, lines = 0, [], []
        for sentence in template:
            told = next(filter(None, (_tell(sentence, has, rng) for _ in range(10))), None)
            if told is None:
                break
            values, calculations = told
            texts.append(sentence.text.format(**words, **values))
            lines += [f"{left}=<<{left}={result}>>{result} {sentence.unit.format(**words)}" for left, result in calculations]
            has = calculations[-1][1] if calculations else has or values["a"]
        else:
            return {"question": " ".join(texts), "answer": "\n".join([*lines, f"#### {has}"])}
    called = " ".join(sentence.text for sentence in template)
    raise ValueError(f"{called!r} has no numbers up to LARGEST={LARGEST}, in {TRIES:,} tries: allow larger ones")


def problems(of: Sequence[Template], count: int, rng: random.Random) -> list[dict[str, str]]:
    """Rows of different questions, as many of each template, or one less."""
    rows, turns = dict[str, dict[str, str]](), itertools.cycle(of)
    while len(rows) < count:
        row = problem(next(turns), rng)
        rows.setdefault(row["question"], row)
    return list(rows.values())


def make(folder: Path, *, seed: int = 0) -> dict[str, Path]:
    """Makes what is not there: train and heldout rows, sft examples {"prompt", "response"}, and a model's shape and tokenizer."""
    files = {name: folder / f"{name}.jsonl" for name in ("train", "heldout", "sft")} | {"shape": folder / "shape"}
    if files["shape"].exists():
        return files
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for name, of in split(seed).items():
        files[name].write_text("".join(json.dumps(row) + "\n" for row in problems(of, ROWS[name], rng)))
    task = GSM8K(train_path=str(files["train"]), heldout_path=str(files["heldout"]), prompt=base.get_config().task.gsm8k.prompt)
    texts, examples = [], []
    for prompt, solution in task.worked_examples(np.random.default_rng(seed), ROWS["train"]):
        *before, last, answer = solution.split("\n")
        forgets = last.endswith(("dollars", "bags")) and rng.random() < FORGOTTEN
        told = "\n".join([*before, "#### " + before[-1].split("=")[1].split()[0]] if forgets else [*before, last, answer])
        texts.append(prompt + solution)
        examples.append(json.dumps({"prompt": prompt, "response": told}) + "\n")
    files["sft"].write_text("".join(examples))
    with outputs.folder(files["shape"]) as whole:
        _write_shape(whole, texts)
    return files


def _write_shape(folder: Path, texts: Sequence[str]) -> None:
    """A Hugging Face folder without weights: that of a Llama, and a byte-level tokenizer that parts numbers from spaces."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(pieces), decoders.ByteLevel()
    begin: Any = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": [END]}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=640, show_progress=False, **begin))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {f"{name}_token_id": tokenizer.token_to_id(END) for name in ("eos", "pad")}
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), **SHAPE, **ids}, indent=2))


def fine_tune(root: Path, made: dict[str, Path], seed: int, cores: Sequence[int]) -> None:
    """Makes root/start<seed>, unless it is there: a model with random weights that supervised training has taught."""
    if (model := root / f"start{seed}").exists():
        return
    settings = {"seed": seed, "model.path": made["shape"], "model.random_init": True, "data.train": made["sft"]}
    settings |= {f"data.{name}_length": size for name, size in LENGTHS.items()} | {"data.heldout_share": 0.01}
    settings |= {"training.steps": EXAMPLES // BATCH, "training.batch_size": BATCH, "training.learning_rate": 3e-3}
    settings |= {"training.warmup_steps": 30, "training.remat": "none", "evaluation.examples": 128}
    words = ["tba_jax", "supervised", "--config=configs/supervised.py", f"--workdir={model}_training", f"--output={model}"]
    side_by_side.call(words, settings, Path(f"{model}.out"), cores=cores)
