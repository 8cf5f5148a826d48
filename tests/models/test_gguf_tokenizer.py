"""Tokenizers of GGUF files: those that transformers reads as the file says, and those that it does not."""

import gguf
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from semkv_bench.cli import main
from semkv_bench.errors import UsageError
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.models.load import PretrainedModel

NORMAL, CONTROL, BYTE = 1, 3, 6
SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,.?:*#()%'=" + SPACE + "Üïé"


def _write(path, architecture, model, tokens, types, **more):
    """A GGUF file of a tiny Llama or Gemma: its vocabulary, and a configuration without weights."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (("context_length", 4096), ("embedding_length", 64), ("feed_forward_length", 96)):
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in more.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _by_scores(path, architecture, backwards):
    """A SentencePiece vocabulary whose scores follow the tokens' order, or run against it."""
    words = ["th", "he", "the", "er", "ca", "al", "at", "ta", "tal", "ital", f"{SPACE}t", f"{SPACE}a", "or"]
    words += ["ue", "es", "val", "lues", "su", "um", "lu", "re", "ed", "is", "it", "ti"]
    tokens = ["<s>", "</s>", "<unk>", *BYTES, *LETTERS, *words]
    types = [CONTROL, CONTROL, 2, *[BYTE] * 256, *[NORMAL] * (len(LETTERS) + len(words))]
    scores = [0.0] * (len(tokens) - len(words)) + [-float(i) for i in range(1, len(words) + 1)]
    if backwards:
        scores[-len(words) :] = scores[-len(words) :][::-1]
    return _write(
        path, architecture, "llama", tokens, types, add_token_scores=scores, add_unk_token_id=2,
        add_add_space_prefix=architecture == "llama",
    )  # fmt: skip


def _by_merges(path, pre):
    """A byte-level vocabulary with words behind punctuation, which not every way to split text leaves whole."""
    letters = list(bytes_to_unicode().values())
    names = ["get", "set", "map", "sum", "pop", "add", "end", "key"]
    merges, made = [], []
    for mark in ".(_-":
        for name in names:
            for left, right in ((name[0], name[1]), (name[:2], name[2]), (mark, name)):
                if left + right not in made:
                    merges.append(f"{left} {right}")
                    made.append(left + right)
    tokens = ["<s>", "</s>", *letters, *made]
    types = [CONTROL, CONTROL, *[NORMAL] * (len(letters) + len(made))]
    return _write(path, "llama", "gpt2", tokens, types, add_token_merges=merges, add_tokenizer_pre=pre)


def test_what_is_read_as_the_file_says_is_taken(tmp_path):
    for number, path in enumerate(
        (
            _by_scores(tmp_path / "a.gguf", "llama", backwards=False),
            _by_scores(tmp_path / "b.gguf", "llama", backwards=True),
            _by_scores(tmp_path / "c.gguf", "gemma3", backwards=False),
            _by_merges(tmp_path / "d.gguf", "llama-bpe"),
        )
    ):
        tokenizer = PretrainedModel(str(path)).tokenizer()
        assert tokenizer.decode(tokenizer("the total")["input_ids"]).endswith("the total"), number


@pytest.mark.slow
def test_the_shipped_models_file_is_taken():
    tokenizer = PretrainedModel(str(EmbeddedModel().gguf_file())).tokenizer()
    text = "The needle is 7738705."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # Transformers orders a Gemma vocabulary by place, and never looks at its scores.
        (lambda path: _by_scores(path, "gemma3", backwards=True), "by the file's scores"),
        # A way to split that transformers does not know: it takes that of GPT-2, which cuts ".get" in two.
        (lambda path: _by_merges(path, "unheard-of"), "come back from their own text"),
    ],
)
def test_what_is_read_otherwise_is_refused_and_another_engine_named(make, reason, tmp_path, capsys):
    path = make(tmp_path / "broken.gguf")
    with pytest.raises(UsageError, match=reason) as raised:
        PretrainedModel(str(path)).tokenizer()
    assert "engine=llamacpp" in str(raised.value) and "\n" not in str(raised.value)
    assert main(["plan", "model=custom", f"model.path={path}", "per_task=1"]) == 2
    assert "engine=llamacpp" in capsys.readouterr().err
