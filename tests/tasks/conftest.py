"""Small tokenizers built on the spot, one for each way of treating BOS and chat templates."""

import os
from pathlib import Path

import pytest
from byte_tokenizers import BOS_TEMPLATE, CHATML_TEMPLATE, byte_tokenizer


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
