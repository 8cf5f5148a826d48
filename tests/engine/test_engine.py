import math

import pytest
import torch
from transformers import DynamicCache

from semkv_bench.engine import decode as decoding
from semkv_bench.engine import engine as running
from semkv_bench.engine.decode import fill
from semkv_bench.engine.engine import Engine, Request
from semkv_bench.engine.options import EngineOptions
from semkv_bench.errors import SemkvError, UsageError
from semkv_bench.quantizers import Affine, NonFiniteError
from semkv_bench.settings.sets import uniform_settings
from semkv_bench.settings.setting import FULL

GRID = uniform_settings(Affine(), Affine(), [16, 5, 3, 2])


def _request(tiny, length=40, new=12, seed=0, **changes) -> Request:
    ids = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    values = {
        "input_ids": ids,
        "reference_ids": [5, 6, 7],
        "max_new_tokens": new,
        "stop_ids": frozenset(tiny.eos_ids),
        **changes,
    }
    return Request(**values)


@torch.inference_mode()
def _generate(tiny, request) -> list[int]:
    out = tiny.model.generate(
        torch.tensor([request.input_ids]),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=sorted(request.stop_ids),
        **{tiny.cache_keyword: DynamicCache(config=tiny.model.config)},
    )
    new = out[0, len(request.input_ids) :].tolist()
    return new[:-1] if new[-1] in request.stop_ids else new


def test_full_equals_generate(tiny):
    engine = Engine(tiny)
    for seed in range(5):
        request = _request(tiny, length=20 + 7 * seed, seed=seed)
        outcome = engine.run(request, [FULL, *GRID])[0]
        assert outcome.tokens == _generate(tiny, request)
        assert outcome.kl == 0 and outcome.top1_agreement == 1


def test_each_row_equals_the_setting_run_alone(tiny):
    together = Engine(tiny).run(_request(tiny), [FULL, *GRID])
    assert [o.setting.name for o in together] == ["full", *(s.name for s in GRID)]
    for outcome in together[1:]:
        alone = Engine(tiny, EngineOptions(max_rows=1)).run(_request(tiny), [FULL, outcome.setting])[1]
        assert alone.tokens == outcome.tokens and alone.batch_rows == 1
        assert alone.kl == pytest.approx(outcome.kl, rel=1e-3, abs=1e-6)


def test_quantized_rows_see_quantized_keys_and_values(tiny_llama):
    """The row's logits equal a plain forward over a DynamicCache that holds the quantized prompt."""
    request, setting = _request(tiny_llama, reference_ids=[5]), GRID[2]
    engine = Engine(tiny_llama)
    engine.run(request, [FULL, setting])
    model, keyword = tiny_llama.model, tiny_llama.cache_keyword
    with torch.inference_mode():
        plain = DynamicCache(config=model.config)
        model(input_ids=torch.tensor([request.input_ids[:-1]]), use_cache=True, **{keyword: plain})
        reference = DynamicCache(config=model.config)
        coder = Affine().coder(16)
        for index, layer in enumerate(plain.layers):
            keys, values = (
                coder.quantize_dequantize(x[0], torch.tensor([[3]])) for x in (layer.keys, layer.values)
            )
            reference.update(keys, values, index)
        last = torch.tensor([[request.input_ids[-1]]])
        logits = [
            model(input_ids=last, use_cache=True, **{keyword: cache}).logits[0, -1]
            for cache in (plain, reference)
        ]
    log_p, log_q = (torch.log_softmax(x.float(), -1) for x in logits)
    kl = (log_p.exp() * (log_p - log_q)).sum().item()
    assert engine.run(request, [FULL, setting])[1].kl_first == pytest.approx(kl, rel=1e-3)


def test_keys_and_values_are_quantized_apart(tiny_llama):
    keys_only, values_only = (
        uniform_settings(Affine(), Affine(), [2], **{side: "full"})[0]
        for side in ("value_levels", "key_levels")
    )
    request = _request(tiny_llama)
    engine = Engine(tiny_llama)
    fill(
        tiny_llama,
        engine.prefill(request.input_ids[:-1]),
        [FULL, keys_only, values_only],
        engine.rows,
        room=1,
    )
    for layer in engine.rows.layers:
        keys, values = layer.stored()
        assert torch.equal(keys[0], keys[2]) and not torch.equal(keys[0], keys[1])
        assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


def test_sliding_layers_stay_as_they_are(tiny):
    engine = Engine(tiny)
    fill(tiny, engine.prefill(_request(tiny).input_ids), [FULL, GRID[-1]], engine.rows, room=1)
    changed = [not torch.equal(*layer.stored()[0]) for layer in engine.rows.layers]
    assert [i for i, differs in enumerate(changed) if differs] == list(tiny.shape.quantized_layers)


def test_groups_give_the_same_answers(tiny_llama):
    whole = Engine(tiny_llama).run(_request(tiny_llama), [FULL, *GRID])
    split = Engine(tiny_llama, EngineOptions(max_rows=2)).run(_request(tiny_llama), [FULL, *GRID])
    assert [o.tokens for o in whole] == [o.tokens for o in split]
    assert [o.batch_rows for o in split] == [2, 2, 2, 2, 1]


def test_out_of_memory_halves_the_group(tiny_llama, monkeypatch):
    engine, whole = Engine(tiny_llama), decoding.fill
    expected = Engine(tiny_llama).run(_request(tiny_llama), [FULL, *GRID])

    def scarce(loaded, prefilled, settings, *rest):
        if len(settings) > 2:
            raise torch.OutOfMemoryError("no memory")
        return whole(loaded, prefilled, settings, *rest)

    monkeypatch.setattr(decoding, "fill", scarce)
    got = engine.run(_request(tiny_llama), [FULL, *GRID])
    assert [o.tokens for o in got] == [o.tokens for o in expected]
    assert [o.batch_rows for o in got] == [2, 2, 2, 2, 1]
    assert got[0].kl == 0
    # The next prompt is tried whole again.
    monkeypatch.setattr(decoding, "fill", whole)
    assert {o.batch_rows for o in engine.run(_request(tiny_llama), [FULL, *GRID])} == {5}

    monkeypatch.setattr(
        decoding, "fill", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
    )
    with pytest.raises(SemkvError, match="single cache row"):
        engine.run(_request(tiny_llama), [FULL, *GRID])


def test_a_prefill_without_memory_is_fed_in_chunks(tiny_llama, monkeypatch):
    whole, chunks = running.prefill, []
    request = _request(tiny_llama, length=300)
    expected = Engine(tiny_llama).run(request, [FULL, *GRID])

    def scarce(loaded, ids, metrics, seed, chunk, cache, *rest):
        chunks.append(chunk)
        if chunk > 100:
            raise torch.OutOfMemoryError("no memory")
        return whole(loaded, ids, metrics, seed, chunk, cache, *rest)

    monkeypatch.setattr(running, "prefill", scarce)
    got = Engine(tiny_llama).run(request, [FULL, *GRID])
    assert [o.tokens for o in got] == [o.tokens for o in expected] and chunks == [299, 149, 74]
    # The next prompt is tried whole again; one that is cut into chunks has them halved.
    chunks.clear()
    engine = Engine(tiny_llama, EngineOptions(prefill_chunk=128))
    engine.prefill(request.input_ids)
    engine.prefill(request.input_ids)
    assert chunks == [128, 64, 128, 64]

    def nothing(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(running, "prefill", nothing)
    with pytest.raises(SemkvError, match="while the model reads 299 tokens"):
        Engine(tiny_llama).run(request, [FULL, *GRID])


def test_other_errors_are_not_taken_for_memory(tiny_llama, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(decoding, "fill", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Engine(tiny_llama).run(_request(tiny_llama), [FULL])


def test_rows_end_at_their_own_stop_token(tiny_llama):
    free = Engine(tiny_llama).run(_request(tiny_llama), [FULL, *GRID])
    stop = free[0].tokens[3]
    cut = Engine(tiny_llama).run(_request(tiny_llama, stop_ids=frozenset({stop})), [FULL, *GRID])
    for before, after in zip(free, cut, strict=True):
        expected = before.tokens[: before.tokens.index(stop)] if stop in before.tokens else before.tokens
        assert after.tokens == expected
        assert after.ended == (stop in before.tokens)


def test_stop_tokens_are_held_back_before_min_new_tokens(tiny_llama):
    first = Engine(tiny_llama).run(_request(tiny_llama), [FULL])[0].tokens[0]
    held = Engine(tiny_llama).run(
        _request(tiny_llama, stop_ids=frozenset({first}), min_new_tokens=1), [FULL]
    )[0]
    assert len(held.tokens) >= 1 and held.tokens[0] != first


def test_prompts_are_read_whole_on_a_cpu_and_in_chunks_on_a_gpu():
    def chunk(device, tokens=5000, why=None, **options):
        return EngineOptions(**options).chunk_of(tokens, device, lambda: why)

    assert (chunk("cpu"), chunk("cuda"), chunk("mps"), chunk("cuda", 2000)) == (5000, 2048, 2048, 2000)
    assert chunk("cuda", prefill_chunk=None) == 5000 and chunk("cpu", prefill_chunk=64) == 64
    assert chunk("cuda", why="states") == 5000 == chunk("cpu", why="states", prefill_chunk=5000)
    with pytest.raises(UsageError, match="states"):
        chunk("cpu", why="states", prefill_chunk=64)


def test_prefill_in_chunks(tiny):
    whole = Engine(tiny).run(_request(tiny), [FULL, *GRID])
    chunked = Engine(tiny, EngineOptions(prefill_chunk=7)).run(_request(tiny), [FULL, *GRID])
    assert [o.tokens for o in whole] == [o.tokens for o in chunked]


def test_reads_are_counted(tiny):
    outcome = Engine(tiny).run(_request(tiny, new=4, stop_ids=frozenset()), [FULL, GRID[0]])[1]
    assert outcome.reads == 4 * len(tiny.shape.quantized_layers)


def test_sampling_shares_its_random_numbers(tiny_llama):
    engine = Engine(tiny_llama, EngineOptions(temperature=1.0))
    rows = engine.run(_request(tiny_llama), [FULL, FULL, FULL])
    assert rows[0].tokens == rows[1].tokens == rows[2].tokens
    other = engine.run(_request(tiny_llama), [FULL])[0]
    assert other.tokens == rows[0].tokens
    reseeded = Engine(tiny_llama, EngineOptions(temperature=1.0)).run(
        Request(**{**vars(_request(tiny_llama)), "seed": 1}), [FULL]
    )[0]
    assert reseeded.tokens != rows[0].tokens


def test_nan_in_the_cache_names_layer_and_tensor(tiny_llama):
    engine = Engine(tiny_llama)
    prefilled = engine.prefill(_request(tiny_llama).input_ids)
    with torch.inference_mode():
        prefilled.cache.layers[1].values[0, 0, 3, 2] = math.nan
    with pytest.raises(NonFiniteError, match="layer 1, values"):
        fill(tiny_llama, prefilled, [FULL, GRID[0]], engine.rows, room=1)


@pytest.mark.parametrize(
    "options",
    [
        {"memory_fraction": 0},
        {"memory_fraction": 1.5},
        {"max_rows": 0},
        {"teacher_tokens": 0},
        {"temperature": -1},
        {"temperature": math.nan},
        {"prefill_chunk": 0},
        {"prefill_chunk": True},
        {"prefill_chunk": "large"},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        EngineOptions(**options)
