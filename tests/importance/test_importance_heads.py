"""Scores by layer and head: against plain formulas, fixed numbers, other chunks, and beside other observers."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from semkv_bench.engine.engine import Engine
from semkv_bench.errors import UsageError
from semkv_bench.importance import metric, observe
from semkv_bench.importance.hooks import watch_attention


class Repeating:
    """A tokenizer whose order to repeat is three tokens, and one more."""

    eos_token_id = 2

    def encode(self, text, add_special_tokens):
        return [5, 9, 11] if "Repeat" in text else [4]


HEADS = [
    "cake-8",
    "expected_attention",
    "fastgen",
    "h2o",
    "h2o_mean",
    "keydiff",
    "knorm",
    "lagkv-8",
    "leverage",
    "r_kv",
    "random_head",
    "snapkv-8",
    "streaming",
    "tova",
    "window_entropy-8",
    "window_variance-8",
]
GOLDEN = Path(__file__).parent / "head_scores.json"


@torch.inference_mode()
def _attention(loaded, ids):
    """Weights [layers, kv_heads, group, queries, keys] and post-rotary keys [layers, kv_heads, tokens, head_dim]."""
    weights, keys = [], []

    def hear(layer, call):
        group = call.queries.shape[0] // call.keys.shape[0]
        scores = (
            call.queries.unflatten(0, (-1, group)) @ call.keys.unsqueeze(1).transpose(2, 3) * call.scaling
        )
        later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        weights.append(scores.masked_fill(later, -torch.inf).softmax(-1))
        keys.append(call.keys.clone())

    with watch_attention(loaded, hear):
        loaded.decoder(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(weights), torch.stack(keys)


def test_attention_scores_are_their_formulas(tiny_llama, prompt, scored):
    weights, keys = _attention(tiny_llama, prompt)
    found = scored(
        tiny_llama, ["snapkv-8", "snapkv-8-3-max", "h2o", "h2o_mean", "tova", "cake-8", "knorm"], prompt
    )
    near = {"atol": 1e-5, "rtol": 1e-4}
    window = weights[..., -8:, :-8]
    padded = torch.nn.functional.pad(window.mean(-2), (2, 2))
    pooled = padded.unfold(-1, 5, 1).mean(-1).mean(2)
    torch.testing.assert_close(found["snapkv-8"][..., :-8], pooled, **near)
    most = torch.nn.functional.pad(window.mean(-2), (1, 1)).unfold(-1, 3, 1).amax(-1).mean(2)
    torch.testing.assert_close(found["snapkv-8-3-max"][..., :-8], most, **near)
    shifting = torch.nn.functional.pad(window.mean(-2) + 200 * window.var(-2), (2, 2))
    torch.testing.assert_close(
        found["cake-8"][..., :-8], shifting.unfold(-1, 5, 1).mean(-1).mean(2), atol=1e-3, rtol=1e-3
    )
    received = weights.sum(-2).mean(2)
    torch.testing.assert_close(found["h2o"], received, **near)
    torch.testing.assert_close(found["h2o_mean"], received / torch.arange(60, 0, -1), **near)
    last = weights[..., -1, :-1].mean((1, 2))
    torch.testing.assert_close(found["tova"][..., :-1], last[:, None].expand(-1, 2, -1), **near)
    torch.testing.assert_close(found["knorm"], -keys.norm(dim=-1), **near)
    # What must stay leads.
    assert (found["snapkv-8"][..., -8:].amin(-1) > found["snapkv-8"][..., :-8].amax(-1)).all()


def test_scores_have_a_head_each_and_do_not_depend_on_chunks(tiny_llama, prompt, scored):
    whole, cut = scored(tiny_llama, HEADS, prompt), scored(tiny_llama, HEADS, prompt, chunk=7)
    for name in HEADS:
        assert whole[name].shape == (3, 2, 60) and whole[name].isfinite().all()
        torch.testing.assert_close(whole[name], cut[name], atol=1e-4, rtol=1e-3)


def test_scores_are_the_numbers_that_they_were(tiny_llama, prompt, scored):
    """Taken when all scores equalled those of kvpress 0.5.5 on the same prompts."""
    golden = json.loads(GOLDEN.read_text())
    loaded = replace(tiny_llama, tokenizer=Repeating())
    found = Engine(loaded).prefill(prompt, list(golden)).scores
    for name, values in golden.items():
        torch.testing.assert_close(found[name][1, 1, ::7], torch.tensor(values), atol=1e-4, rtol=1e-3)


def test_a_context_is_scored_without_what_follows(tiny_llama, prompt, scored):
    """Two observers of one prefill; the second sees what a prompt that ends there would show."""
    alone = scored(tiny_llama, HEADS, prompt[:41])
    with observe(tiny_llama, HEADS, tokens=60) as whole, observe(tiny_llama, HEADS, tokens=41) as context:
        tiny_llama.decoder(input_ids=torch.tensor([prompt]), use_cache=False)
    for name in HEADS:
        torch.testing.assert_close(context.scores()[name], alone[name], atol=1e-4, rtol=1e-3)
        assert whole.scores()[name].shape[-1] == 60


def test_watchers_of_one_pass_hear_each_layer_once(tiny_llama, prompt):
    first, second = [], []
    with (
        watch_attention(tiny_llama, lambda layer, call: first.append(layer)),
        watch_attention(tiny_llama, lambda layer, call: second.append(layer)),
        torch.no_grad(),
    ):
        tiny_llama.decoder(input_ids=torch.tensor([prompt]), use_cache=False)
    assert first == second == list(tiny_llama.shape.quantized_layers)


def test_chance_differs_by_layer_head_seed_and_prompt(tiny_llama, prompt, scored):
    first = scored(tiny_llama, ["random_head"], prompt)["random_head"]
    assert len(first.flatten(0, 1).unique(dim=0)) == 6
    assert torch.equal(first, scored(tiny_llama, ["random_head"], prompt)["random_head"])
    assert not torch.equal(first, scored(tiny_llama, ["random_head"], prompt, seed=1)["random_head"])
    assert not torch.equal(first, scored(tiny_llama, ["random_head"], prompt[::-1])["random_head"])


def test_attention_that_shifts_tells_layers_apart(tiny_llama, prompt, scored):
    weights, _ = _attention(tiny_llama, prompt)
    found = scored(tiny_llama, ["window_entropy-8", "window_variance-8"], prompt)
    window = weights[..., -8:, :]
    entropy = -(window * (window + 1e-10).log()).sum(-2).mean(2)
    torch.testing.assert_close(found["window_entropy-8"], entropy, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found["window_variance-8"], window.var(-2).mean(2), atol=1e-5, rtol=1e-3)


def test_expected_attention_is_that_of_queries_drawn_from_the_prompts_own(tiny_llama, prompt, scored):
    """Mean and covariance of the queries before the embedding, turned by the mean of 512 rotation matrices."""
    plain, values = {}, {}
    handles = []
    for i, layer in enumerate(tiny_llama.decoder.layers):
        for part, kept in ((layer.self_attn.q_proj, plain), (layer.self_attn.v_proj, values)):
            handles.append(
                part.register_forward_hook(
                    lambda m, a, out, i=i, kept=kept: kept.update({i: out[0].detach()})
                )
            )
    _, keys = _attention(tiny_llama, prompt)
    for handle in handles:
        handle.remove()
    cosine, sine = tiny_llama.decoder.rotary_emb(torch.zeros(1), torch.arange(60, 572)[None])
    turn = torch.zeros(16, 16)
    turn[8:, :8], turn[:8, 8:] = torch.eye(8), -torch.eye(8)
    rotation = (cosine[0][:, None] * torch.eye(16) + sine[0][:, None] * turn).mean(0).double()
    found = scored(tiny_llama, ["expected_attention"], prompt)["expected_attention"]
    for layer, head in itertools.product(range(3), range(2)):
        sums = torch.zeros(56, dtype=torch.float64)
        for query in (2 * head, 2 * head + 1):
            drawn = plain[layer].unflatten(1, (4, 16))[4:, query].double()
            mean, spread = rotation @ drawn.mean(0), rotation @ drawn.T.cov(correction=0) @ rotation.T
            own = keys[layer, head, 4:].double()
            sums += (own @ mean / 4 + ((own @ spread) * own).sum(-1) / 32).softmax(-1) / 2
        norms = values[layer].unflatten(1, (2, 16))[4:, head].norm(dim=-1)
        torch.testing.assert_close(found[layer, head, 4:], (sums * norms).float(), atol=1e-4, rtol=1e-3)
        assert found[layer, head, :4].min() > found[layer, head, 4:].max()


def test_leverage_is_the_share_of_a_key_that_others_do_not_span(tiny_llama, prompt, scored):
    plain = {}
    handles = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out, i=i: plain.update({i: out[0]}))
        for i, layer in enumerate(tiny_llama.decoder.layers)
    ]
    found = scored(tiny_llama, ["leverage-0"], prompt)["leverage-0"]
    for handle in handles:
        handle.remove()
    for layer, own in enumerate(found):
        x = plain[layer].detach().unflatten(1, (2, 16)).transpose(0, 1).double()
        x = x - x.mean(1, keepdim=True)
        hat = x @ torch.linalg.inv(x.transpose(1, 2) @ x + 0.01 * torch.eye(16)) @ x.transpose(1, 2)
        scores = hat.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(
            own, ((scores - scores.mean()) / scores.std()).float(), atol=1e-3, rtol=1e-3
        )


def test_redundancy_is_the_mean_cosine_less_the_newest_alike(tiny_llama, prompt, scored):
    weights, keys = _attention(tiny_llama, prompt)
    found = scored(tiny_llama, ["r_kv"], prompt)["r_kv"]
    head = torch.nn.functional.normalize(keys[1, 0], dim=-1)
    alike = head @ head.T
    alike.fill_diagonal_(0)
    for row in range(60):
        over = (alike[row] > 0.5).nonzero().flatten()
        alike[row, over[-1] if len(over) else 0] = 0
    redundancy = alike.mean(0).softmax(-1)[:52]
    most = weights[1, 0, :, -8:, :52].sum(-2).amax(0)
    pooled = torch.nn.functional.pad(most, (3, 3)).unfold(-1, 7, 1).amax(-1)
    expected = 0.1 * pooled / pooled.sum() - 0.9 * redundancy
    torch.testing.assert_close(found[1, 0, :52], expected, atol=1e-5, rtol=1e-3)
    assert found[1, 0, 52:].min() > found[1, 0, :52].max()


def test_policies_add_up_head_by_head(tiny_llama, prompt, scored):
    """A threshold of 0.05 keeps the tokens of the first policies that recover 95% of a head's attention."""

    def decode(ids, skip_special_tokens):
        return "".join("." if each % 7 == 0 else "a" for each in ids)

    tokenizer = SimpleNamespace(decode=decode, all_special_ids=[prompt[0]])
    loaded = replace(tiny_llama, tokenizer=tokenizer)
    weights, _ = _attention(tiny_llama, prompt)
    received = weights.mean(2)  # [layers, kv_heads, queries, keys]
    found = scored(loaded, ["fastgen"], prompt)["fastgen"]
    special = torch.tensor([each == prompt[0] for each in prompt])
    marks = torch.tensor([each % 7 == 0 for each in prompt]) & ~special
    assert special.any() and marks.any()
    best = received.sum(-2).argsort(-1, descending=True)[..., :18]
    frequent = torch.zeros(3, 2, 60, dtype=torch.bool).scatter(-1, best, True)
    local = torch.arange(60) >= 42
    band = (torch.arange(60) > torch.arange(60)[:, None] - 18) & torch.ones(60, 60, dtype=torch.bool).tril()
    sets = [special.expand(3, 2, 60), (special | marks).expand(3, 2, 60), special | marks | frequent]
    masses = [(received * each[..., None, :]).sum((-1, -2)) / 60 for each in sets]
    masses.append((received * (sets[2][..., None, :] | band)).sum((-1, -2)) / 60)
    sets.append(sets[2] | local)
    for limit in (0.05, 0.3, 0.7):
        kept = found >= limit
        for layer, head in itertools.product(range(3), range(2)):
            enough = [mass[layer, head] > 1 - limit for mass in masses]
            first = sets[enough.index(True)][layer, head] if any(enough) else torch.ones(60).bool()
            assert torch.equal(kept[layer, head], first), (limit, layer, head)


@pytest.mark.parametrize("label", ["snapkv-60", "lagkv-29"])
def test_a_prompt_that_says_nothing_is_refused(tiny_llama, prompt, scored, label):
    assert metric(label).least_tokens > 60
    with pytest.raises(UsageError, match="says nothing of 60 tokens"):
        scored(tiny_llama, [label], prompt)


@pytest.mark.parametrize(
    "label",
    [
        "snapkv",
        "snapkv-16",
        "cake-8-7",
        "snapkv-64-5-max",
        "lagkv-32",
        "streaming-0",
        "leverage-0",
        "kvzip-64",
        "window_entropy-8",
        "expected_attention-9",
    ],
)
def test_labels_read_back(label):
    assert metric(label).label == label
