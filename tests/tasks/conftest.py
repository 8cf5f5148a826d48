"""Small tokenizers built on the spot, one for each way of treating BOS and chat templates."""

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}</user>"
    "{% else %}<reply>{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(specials: list[str], template: str | None, adds_bos: bool) -> PreTrainedTokenizerFast:
    """One token a byte, after the special tokens; ``specials[0]`` is BOS, ``specials[1]`` EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
        )
    names = {"bos_token": specials[0], "eos_token": specials[1]} if specials else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        additional_special_tokens=specials[2:] or None,
        **names,
    )


@pytest.fixture(scope="session")
def plain():
    """No BOS, no chat template."""
    return byte_tokenizer([], None, adds_bos=False)


@pytest.fixture(scope="session")
def bos_twice():
    """Adds BOS itself, and writes it in the chat template too."""
    return byte_tokenizer(["<s>", "</s>", "<user>", "</user>", "<reply>"], BOS_TEMPLATE, adds_bos=True)


@pytest.fixture(scope="session")
def bos_plain():
    """Adds BOS, has no chat template."""
    return byte_tokenizer(["<s>", "</s>"], None, adds_bos=True)


@pytest.fixture(scope="session")
def chatml():
    """Names a BOS that it never adds by itself."""
    return byte_tokenizer(["<|im_start|>", "<|im_end|>"], CHATML_TEMPLATE, adds_bos=False)


@pytest.fixture(scope="session")
def longbench_data() -> Path:
    """Real LongBench items: SEMKV_LONGBENCH, or shared/longbench beside the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "longbench"
    folder = Path(os.environ.get("SEMKV_LONGBENCH", beside))
    if not folder.is_dir():
        pytest.skip("no LongBench data; set SEMKV_LONGBENCH")
    return folder
