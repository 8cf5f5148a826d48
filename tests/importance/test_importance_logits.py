"""Surprisal and entropy against the model's own loss and whole softmaxes."""

import math

import pytest
import torch

from semkv_bench.errors import UsageError
from semkv_bench.importance import logits, observe
from semkv_bench.importance.logits import Head, next_token_statistics

BOTH = ["surprisal", "logit_entropy"]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles whose edges fall inside prompt and vocabulary."""
    monkeypatch.setattr(logits, "_TILE_TOKENS", 7)
    monkeypatch.setattr(logits, "_TILE_WORDS", 20)
    monkeypatch.setattr(logits, "_WAITING_TOKENS", 16)


def whole(loaded, ids):
    """Loss, surprisal of tokens 1.. and entropy at all tokens from the model's own logits, in float64."""
    given = torch.tensor([ids])
    with torch.no_grad():
        out = loaded.model(given, labels=given)
    log_p = out.logits[0].double().log_softmax(-1)
    surprisal = -log_p[:-1].gather(1, given[0, 1:, None])[:, 0]
    return out.loss.item(), surprisal, -(log_p.exp() * log_p).sum(-1)


def check(loaded, ids, found):
    loss, surprisal, entropy = whole(loaded, ids)
    assert found["surprisal"].shape == found["logit_entropy"].shape == (1, len(ids))
    assert found["surprisal"][0, 0].item() == pytest.approx(math.log(97))
    assert found["surprisal"][0, 1:].mean().item() == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(found["surprisal"][0, 1:].double(), surprisal, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["logit_entropy"][0].double(), entropy, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 1, 25])
def test_agree_with_the_loss(tiny, prompt, scored, small_tiles, chunk):
    check(tiny, prompt, scored(tiny, BOTH, prompt, chunk=chunk, logits_dtype=torch.float32))


def test_agree_on_architectures_that_scale_or_cap_their_logits(further, prompt, scored, small_tiles):
    check(further, prompt, scored(further, BOTH, prompt, logits_dtype=torch.float32))


def test_bfloat16_product_stays_close(tiny, prompt, scored):
    # A bfloat16 logit near 20 is off by up to 0.06; these models' logits reach 40.
    loss, surprisal, entropy = whole(tiny, prompt)
    found = scored(tiny, BOTH, prompt, logits_dtype=torch.bfloat16)
    assert found["surprisal"][0, 1:].mean().item() == pytest.approx(loss, abs=0.02)
    assert (found["surprisal"][0, 1:] - surprisal).abs().max() < 0.25
    assert (found["logit_entropy"][0] - entropy).abs().max() < 0.25


def test_logits_are_rounded_only_after_the_targets_is_taken_off():
    # Logits 40.1 and 39.4, but 39.4 in bfloat16 is 39.5.
    head = Head(torch.tensor([[40.0, 0.1], [39.0, 0.4]]), None, 1.0, None, torch.bfloat16)
    surprisal, _ = next_token_statistics(head, torch.ones(1, 2), torch.tensor([0]))
    assert surprisal.item() == pytest.approx(math.log(1 + math.exp(-0.7)), abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_by_hand(dtype):
    # Logits 0 and ln 3 after adding the bias: probabilities 1/4 and 3/4.
    head = Head(torch.tensor([[0.0], [math.log(3) - 1]]), torch.tensor([0.0, 1.0]), 1.0, None, dtype)
    surprisal, entropy = next_token_statistics(head, torch.ones(2, 1), torch.tensor([0, 1]))
    loose = {} if dtype is torch.float32 else {"abs": 5e-3}
    assert surprisal.tolist() == pytest.approx([math.log(4), math.log(4 / 3)], **loose)
    assert entropy.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)] * 2, **loose)


def test_scale_and_cap_by_hand():
    # 2 tanh(3 * 0.5 / 2) = 1.270; the other logit is 0.
    head = Head(torch.tensor([[0.0], [0.5]]), None, 3.0, 2.0, torch.float32)
    surprisal, _ = next_token_statistics(head, torch.ones(1, 1), torch.tensor([0]))
    assert surprisal.item() == pytest.approx(math.log(1 + math.exp(2 * math.tanh(0.75))))


def test_a_sure_prediction_survives_bfloat16():
    # 40.1 is not a bfloat16; rounded to 40 or 40.25 its share of the sum would be off by 10 %.
    weight = torch.zeros(50, 1)
    weight[7] = 40.1
    head = Head(weight, None, 1.0, None, torch.bfloat16)
    surprisal, entropy = next_token_statistics(head, torch.ones(1, 1), torch.tensor([7]))
    assert 0 <= surprisal.item() < 1e-6
    assert 0 <= entropy.item() < 1e-6


def test_the_product_type_follows_the_weights(tiny_llama, monkeypatch):
    for fast, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(logits, "_has_bfloat16_instructions", lambda fast=fast: fast)
        assert Head.of(tiny_llama).dtype == expected
        assert Head.of(tiny_llama, torch.float32).dtype == torch.float32


def test_a_head_that_is_no_matrix_is_refused(copied):
    copied.model.lm_head = torch.nn.Sequential(copied.model.lm_head)
    with pytest.raises(UsageError, match="plain linear head; copy has Sequential"):
        observe(copied, ["surprisal"], tokens=5)


class _Codes(torch.Tensor):
    """Stands in for the tensors in which quantization packages keep codes and say that they are numbers."""


@pytest.mark.parametrize("kind", ["float8", "int8", "a class of its own"])
def test_a_quantized_head_is_refused_in_one_line(kind, copied):
    head = copied.model.lm_head
    if kind == "float8":
        head.weight = torch.nn.Parameter(head.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    elif kind == "int8":
        head.weight = torch.nn.Parameter(head.weight.detach().to(torch.int8), requires_grad=False)
    else:
        del head.weight
        head.__dict__["weight"] = torch.zeros(97, 64).as_subclass(_Codes)
    line = "plain linear head; copy has Linear with weights of .*: leave the head out of the model's quantization"
    with pytest.raises(UsageError, match=line):
        observe(copied, ["surprisal"], tokens=5)
