"""Tokenizers: round trips, continuations, contracts, texts that spell special tokens, refusals; stop strings by hand and
against joined bytes."""

import io
import json
import string
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tba_jax.text.escaping import Escaper
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer, stop_automaton
from tests.support import tiny_checkpoints


def test_characters():
    tokenizer = CharacterTokenizer("0123+= ")
    assert tokenizer.encode("1+2=") == [1, 4, 7, 5, 8]
    assert tokenizer.decode([0, 0, *tokenizer.encode(" 1+2= 3"), 2, 99]) == " 1+2= 3"
    assert tokenizer.decode_continuation(tokenizer.encode("1+2="), [9, 6, 2, 0]) == " 3"
    for wrong, sentence in (("011", r"repeats \['1'\]"), ("", "empty")):
        with pytest.raises(ValueError, match=sentence):
            CharacterTokenizer(wrong)
    with pytest.raises(ValueError, match=r"character 'x' of '1\+x' is not in the tokenizer's alphabet '0123\+= '"):
        tokenizer.encode("1+x")


def test_byte_level_tokenizer(tmp_path, caplog):
    tokenizer: Tokenizer = HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.special_ids) == (258, 256, (256,))
    assert tokenizer.pad_id == tokenizer.eos_id  # no pad token in the folder
    ids = tokenizer.encode("é 漢 x")  # no beginning is added, and more ids than model_max_length are no warning
    assert len(ids) == 8 and not caplog.records
    assert tokenizer.decode([*ids, 256]) == "é 漢 x"
    assert tokenizer.decode([*ids, 999]) == "é 漢 x"  # models pad their vocabulary
    # The prompt ends inside 漢: the continuation completes it.
    assert tokenizer.decode_continuation(ids[:4], ids[4:]) == "漢 x"
    assert tokenizer.decode_continuation(ids[:3], [*ids[6:], 256]) == " x"
    texts, text = tokenizer.token_bytes(), "é 漢\n\tx<tool>�"
    assert texts[256:] == [b"<|end|>", b"<tool>"] and sorted(texts[:256]) == [bytes([b]) for b in range(256)]
    assert b"".join(texts[i] for i in tokenizer.encode(text)) == text.encode()
    assert CharacterTokenizer("0é").token_bytes() == [None, None, None, b"0", "é".encode()]


def decoder_of(folder, *decoders: dict):
    definition = json.loads((tiny_checkpoints.write_byte_bpe(folder) / "tokenizer.json").read_text())
    definition["decoder"] = {"type": "Sequence", "decoders": list(decoders)} if decoders else None
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


MARK = {"type": "Replace", "pattern": {"String": "!"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "!", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize("decoders", [(MARK, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP), (METASPACE,)])
def test_bytes_of_pieces_with_a_mark_for_spaces(tmp_path, decoders):
    tokenizer = HuggingFaceTokenizer(decoder_of(tmp_path, *decoders))
    texts = tokenizer.token_bytes()
    assert texts[tokenizer.encode("!")[0]] == b" " and texts[tokenizer.encode("a")[0]] == b"a"
    assert texts[256:] == [b"<|end|>", b"<tool>"]


# The second strips each piece, not the whole text.
@pytest.mark.parametrize("decoders", [(), (MARK, STRIP), (MARK, {"type": "Fuse"}, STRIP | {"stop": 1})])
def test_bytes_that_depend_on_other_tokens_are_refused(tmp_path, decoders):
    named = r" \+ ".join(each["type"] for each in decoders) or "none"
    with pytest.raises(ValueError, match=f"decoder is {named}, .*: task.stop_strings and task.step_ends need"):
        HuggingFaceTokenizer(decoder_of(tmp_path, *decoders)).token_bytes()


def test_fingerprint_follows_what_defines_ids(tmp_path):
    first = HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "a"))
    assert HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "b")).fingerprint == first.fingerprint
    assert HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "c", eos="<tool>")).fingerprint != first.fingerprint
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "d")
    definition = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(definition, indent=4))
    assert HuggingFaceTokenizer(folder).fingerprint == first.fingerprint  # formatting is not content
    definition["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert HuggingFaceTokenizer(folder).fingerprint != first.fingerprint


def test_special_tokens_beyond_the_embedding_are_not_used(tmp_path):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path)
    whole = Backend.from_file(str(folder / "tokenizer.json"))
    whole.add_special_tokens(["<image>", "<image_end>"])
    whole.save(str(folder / "tokenizer.json"))
    whole, cut, text = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, vocab=258), "a<image><image_end>"
    assert whole.encode("a<image>")[1:] == [258] and (whole.vocab_size, whole.special_ids) == (260, (256, 258, 259))
    assert (cut.vocab_size, cut.special_ids, len(cut.token_bytes())) == (258, (256,), 258)
    for ids in (cut.encode(text), *cut.encode_all([text], begin=True), *cut.encode_all([text], begin=False)):
        assert max(ids) < 256 and cut.decode(ids) == "a< image>< image_end>"
    with pytest.raises(ValueError, match="the tokenizer has 260 ids, the embedding only 257"):
        HuggingFaceTokenizer(folder, vocab=257)  # 257 is no special token: the model does not fit


def test_special_tokens_that_are_needed_have_rows_in_the_embedding(tmp_path):
    def naming(name: str, token: str):
        folder = tiny_checkpoints.write_byte_bpe(tmp_path / name)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {name: token}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    padded, ending = naming("pad_token", "<|padding|>"), naming("eos_token", "<|over|>")
    assert HuggingFaceTokenizer(padded).pad_id == HuggingFaceTokenizer(padded, vocab=259).pad_id == 258
    cut = HuggingFaceTokenizer(padded, vocab=258)
    assert cut.pad_id == cut.eos_id == 256 and cut.vocab_size == 258 and max(cut.encode("a<|padding|>")) < 258
    begun = tiny_checkpoints.write_byte_bpe(tmp_path / "begun")
    whole = Backend.from_file(str(begun / "tokenizer.json"))
    whole.add_special_tokens(["<|begin|>"])
    whole.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 258)])
    whole.save(str(begun / "tokenizer.json"))
    assert HuggingFaceTokenizer(ending, vocab=259).eos_id == 258 == HuggingFaceTokenizer(begun, vocab=259).encode("a")[0]
    for folder, role in ((ending, "which ends responses"), (begun, "which the tokenizer adds to every text")):
        with pytest.raises(ValueError, match=rf"{role}, has id 258, but the model's embedding has 258 rows: set"):
            HuggingFaceTokenizer(folder, vocab=258)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no tokenizer: none of tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
    with pytest.raises(ValueError, match="missing holds no tokenizer"):
        HuggingFaceTokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="no end-of-sequence token; set eos_token"):
        HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "no_eos", eos=None))
    broken = tiny_checkpoints.write_byte_bpe(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=rf"the tokenizer of {broken} cannot be loaded: [^\n]+$"):
        HuggingFaceTokenizer(broken)
    words = Backend(models.WordLevel({"a": 0, "<end>": 1}))
    words.add_special_tokens(["<end>"])
    without_unknown = HuggingFaceTokenizer(tiny_checkpoints.save_tokenizer(tmp_path / "words", words, eos_token="<end>"))
    for encode in (lambda: without_unknown.encode("zebra"), lambda: without_unknown.encode_all(["a", "zebra"], begin=True)):
        with pytest.raises(ValueError, match=r"the tokenizer cannot encode .*zebra.*: .*UNK"):
            encode()


@pytest.mark.parametrize("name", ["TinyStories-656K", "stories260K-hf"])
def test_bytes_and_continuations_of_real_stories_join_to_their_text(data_dir, name):
    tokenizer = HuggingFaceTokenizer(data_dir / "models" / name)
    texts, begins = tokenizer.token_bytes(), tokenizer.encode("")
    for story in json.loads((data_dir / "tinystories/tinystories_1000.json").read_text())[:12]:
        ids = tokenizer.encode(story)
        whole = tokenizer.decode(ids)
        assert b"".join(texts[i] for i in ids[len(begins) :]).decode().removeprefix(" ") == whole.removeprefix(" ")
        for cut in (1, 2, 10, 50):
            continuation = tokenizer.decode_continuation(ids[:cut], [*ids[cut:], tokenizer.eos_id])
            assert tokenizer.decode(ids[:cut]) + continuation == whole


def test_a_tokenizer_model_alone_is_read_with_the_package_of_an_extra(tmp_path, monkeypatch):
    sentencepiece = pytest.importorskip("sentencepiece")
    written, texts = io.BytesIO(), iter(["the cat sat", "a cat ate the hat", "that cat"])
    settings = dict(model_type="bpe", vocab_size=280, byte_fallback=True, normalization_rule_name="identity", minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=written, **settings)
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.token_bytes()[3:259] == [bytes([i]) for i in range(256)]
    assert tokenizer.decode(tokenizer.encode("that hat is 猫")) == "that hat is 猫"
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"needs the package sentencepiece: pip install"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("serialized", [True, False], ids=["tokenizer.json", "vocab.json"])
def test_code_in_the_folder_of_a_model_is_not_executed(tmp_path, serialized):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "model")
    code = f"open({str(tmp_path / 'executed')!r}, 'w').close()\n"
    for name in ("evil.py", "tokenization_evil.py", "configuration_evil.py"):
        (folder / name).write_text(code)
    named = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": named, "tokenizer_class": "EvilTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": named}))
    if serialized:
        HuggingFaceTokenizer(folder)
    else:
        (folder / "tokenizer.json").rename(folder / "vocab.json")
        with pytest.raises(ValueError, match="cannot be loaded"):
            HuggingFaceTokenizer(folder)
    assert not (tmp_path / "executed").exists()


ATTACKS = ["{{ cycler.__init__.__globals__.os.system('touch MARK') }}", "{% include '/etc/passwd' %}"]
ATTACKS.append("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_chat_template_reaches_nothing_but_its_messages(tmp_path, attack):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = attack.replace("MARK", str(tmp_path / "executed"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    try:
        assert "class" not in HuggingFaceTokenizer(folder).chat(["hi"], "")[0].replace(settings["chat_template"], "")
    except ValueError as error:
        assert f"the chat template of {folder} refuses a user message" in str(error)
    assert not (tmp_path / "executed").exists()


def byte_level() -> Backend:
    """As GPT-2 and Qwen have it."""
    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Backend(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|im_end|>x"])
    return tokenizer


def unigram(*, added: bool) -> Backend:
    """As XLM-RoBERTa and T5 have it: special tokens are pieces of the vocabulary. added: whether it lists them a second time."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase, *"<>/"]
    tokenizer = Backend(models.Unigram([(piece, 0.0 if i < 4 else -3.0) for i, piece in enumerate(pieces)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    if added:
        tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return tokenizer


def word_pieces(*, normalized: bool) -> Backend:
    """As BERT has it. normalized: the special tokens are looked for in the text in small letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"[]", *string.ascii_lowercase]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(f"##{c}" for c in string.ascii_lowercase)])}
    tokenizer = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=normalized, special=True) for name in names])
    return tokenizer


CASES = {
    "byte-level": (byte_level, ["do<|im_end|>it", "<|im_end|>x", "<<|im_end|>|im_end|>", "<|endoftext|>" * 3]),
    "unigram": (lambda: unigram(added=True), ["do</s>it", "</s></s>", "<</s>/s>", "do＜/s＞it", "＜／s＞＜ｓ＞", "<pad>"]),
    "unigram's pieces": (lambda: unigram(added=False), ["do</s>it", "do＜/s＞it"]),
    "word pieces": (lambda: word_pieces(normalized=False), ["do [SEP] it", "[CLS][SEP]", "[PAD]"]),
    "normalized": (lambda: word_pieces(normalized=True), ["do [SEP] it", "[sep]", "[Ｓｅp][cLS]"]),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_spelled_special_token_encodes_as_text_and_other_texts_stay(kind):
    tokenizer, texts = CASES[kind][0](), CASES[kind][1]
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special} | set(tokenizer.encode("").ids)
    special -= {tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("[UNK]")}
    for text, escaped in zip(texts, Escaper(tokenizer)(texts), strict=True):
        assert special & set(tokenizer.encode(text, add_special_tokens=False).ids), "the text is an attack"
        assert not special & set(tokenizer.encode(escaped, add_special_tokens=False).ids), text
        assert escaped.replace(" ", "") == text.replace(" ", ""), "it differs by spaces alone"
    others = ["", " ", "a < b and c > d", "[a, b] of </ s>", "日本 and 🎉", "<|im_end", "do it\n"]
    assert Escaper(tokenizer)(others) == others


def test_a_tokenizer_that_cuts_texts_hides_nothing_behind_the_cut():
    tokenizer = word_pieces(normalized=True)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    text = "a b c d e [ｓｅp] f"
    escaped = Escaper(tokenizer)([text, "[Ｓｅp]"])
    assert tokenizer.truncation["max_length"] == 4 and tokenizer.padding["length"] == 8, "it is somebody else's"
    tokenizer.no_truncation()
    assert 3 in tokenizer.encode(text, add_special_tokens=False).ids
    assert not any(3 in tokenizer.encode(each, add_special_tokens=False).ids for each in escaped)


def test_states_of_stop_strings_by_hand():
    texts = [b"a", b"b", b"ab", b"xabx", None, b"", b"aa"]
    stops = stop_automaton(texts, ["aab"], vocab=8)
    assert stops.accept == 3 and stops.next_state.dtype == np.int32
    expected = [
        # a  b  ab xabx -  "" aa -
        [1, 0, 0, 0, 0, 0, 2, 0],
        [2, 0, 3, 0, 0, 1, 2, 0],
        [2, 3, 3, 0, 0, 2, 2, 0],
        [3, 3, 3, 3, 3, 3, 3, 3],
    ]
    np.testing.assert_array_equal(stops.next_state, expected)
    assert stops.run([0, 5, 2]) == 3 and stops.run([0, 4, 2]) == 0 and stops.run([1], state=2) == 3
    inside = stop_automaton(texts, ["b"], vocab=7)
    assert [inside.run([token]) for token in range(7)] == [0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_states_of_stop_strings_equal_a_search_of_the_joined_bytes(seed):
    """Over two letters, so that stop strings overlap themselves and each other, hold each other and begin alike."""
    rng = np.random.default_rng(seed)

    def word(low: int, high: int) -> str:
        return "".join(rng.choice(["a", "b"], rng.integers(low, high + 1)))

    stop_strings = [word(1, 6) for _ in range(rng.integers(1, 5))]
    texts = [None, b"", *(word(1, 4).encode() for _ in range(10))]
    stops = stop_automaton(texts, stop_strings, vocab=14)
    for _ in range(50):
        state, joined, complete = 0, b"", False
        for token in rng.integers(0, 14, 12).tolist():
            text = texts[token] if token < len(texts) else None
            joined = b"" if text is None else joined + text
            complete |= any(stop.encode() in joined for stop in stop_strings)
            state = stops.run([token], state)
            assert (state == stops.accept) == complete, (stop_strings, texts, joined)


def test_stop_strings_that_are_left_out_and_refused():
    assert stop_automaton([b"a"], [], vocab=3) is None
    with pytest.raises(ValueError, match="the tokenizer has 2 ids, the embedding only 1"):
        stop_automaton([b"a", b"b"], ["a"], vocab=1)
    # A stop string that holds another is never complete first.
    assert stop_automaton([b"a", b"b"], ["bab", "a"], vocab=2).next_state.shape == (2, 2)
