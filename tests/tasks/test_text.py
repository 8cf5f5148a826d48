"""``task=text``: windows of a file, scored by what the model thinks of them."""

import math

import pytest
from thinned import thinned

from semkv_bench.cli import main
from semkv_bench.config.compose import compose_config
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.models.embedded import EmbeddedModel
from semkv_bench.plan.plan import make_plan
from semkv_bench.records.folder import read_run
from semkv_bench.report.command import analysed_run
from semkv_bench.stats import StatsOptions, analyze
from semkv_bench.tasks import Text

pytestmark = pytest.mark.usefixtures("without_figures")

WORDS = "The harbour master wrote down every ship that came in with the tide and what it carried. "


@pytest.fixture(scope="module")
def tokenizer():
    return EmbeddedModel().tokenizer()


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number}. {WORDS}" for number in range(60)))
    return path


def test_windows_do_not_overlap_and_together_are_the_text(tokenizer, book):
    examples = Text(str(book), length=100).examples(tokenizer, [0])
    ids = tokenizer(book.read_text(), add_special_tokens=False)["input_ids"]
    begin = tokenizer("a")["input_ids"][:-1]
    read = [token for e in examples for token in (*e.input_ids, *e.target_ids)[len(begin) :]]
    assert len(examples) == len(ids) // (100 - len(begin)) and read == ids[: len(read)]
    assert {len(e.input_ids) for e in examples} == {50} and {len(e.target_ids) for e in examples} == {50}
    assert all(e.forced for e in examples) and len({e.example_id for e in examples}) == len(examples)


def test_a_larger_sample_keeps_a_smaller_one_and_seeds_draw_others(tokenizer, book):
    task = Text(str(book), length=60, context=20)
    few, many = ([e.example_id for e in task.examples(tokenizer, [0], per_task=number)] for number in (3, 6))
    assert many[:3] == few and len(many) == 6
    assert few != [e.example_id for e in task.examples(tokenizer, [1], per_task=3)]
    assert {len(e.input_ids) for e in task.examples(tokenizer, [0])} == {20}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"length": 3}, "task.length=3 must be a whole number of at least 4"),
        ({"length": 50, "context": 50}, "task.context=50 must be a whole number from 2 to 49"),
        ({"length": 100_000}, "fewer than one window of task.length=100000"),
    ],
)
def test_windows_that_cannot_be_are_refused(tokenizer, book, options, told):
    with pytest.raises(UsageError) as raised:
        Text(str(book), **options).examples(tokenizer, [0])
    assert told in str(raised.value)


def test_files_that_are_no_text(tokenizer, tmp_path):
    with pytest.raises(MissingError, match="cannot be read"):
        Text(str(tmp_path / "none.txt")).examples(tokenizer, [0])
    (tmp_path / "noise").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        Text(str(tmp_path / "noise")).examples(tokenizer, [0])


@pytest.mark.parametrize("protocol", thinned(["prefill", "through"], "through"))
def test_a_sweep_of_a_text_reports_perplexity_kl_and_agreement(
    protocol, local_folder, book, tmp_path, capsys
):
    given = ["sweep", "model=custom", f"model.path={local_folder}", "task=text", f"task.path={book}"]
    given += [
        "task.length=64",
        "per_task=5",
        "grid.levels=[64,2]",
        f"protocol={protocol}",
        f"out={tmp_path}/run",
    ]
    assert main([*given, "methods=[affine,turboquant]", "engine.noise_examples=1"]) == 0
    frame, charter = read_run(tmp_path / "run")
    assert len(frame) == 5 * 5 and set(frame.protocol) == {protocol}
    assert charter["engine"]["teacher_tokens"] == 32 and frame.runaway.isna().all()
    full = frame[frame.setting == "full"]
    assert (full.score == 1).all() and (full.quantized_reads == 0).all()
    coded = frame[frame.setting != "full"]
    assert (coded.score == coded.top1_agreement).all() and (coded.quantized_reads > 0).all()
    report = analysed_run(tmp_path / "run", {})
    rows = {row.setting: row for row in report.texts}
    assert rows["full"].ratio == 1 and rows["full"].n_windows == 5
    assert rows["full"].perplexity == pytest.approx(math.exp(full.nll.mean()))
    assert rows["affine-L2"].kl > rows["affine-L64"].kl
    low, high = rows["affine-L2"].perplexity_ci
    assert low <= rows["affine-L2"].perplexity <= high
    assert main(["cliff-report", f"run={tmp_path}/run"]) == 0
    assert f"under protocol {protocol}" in capsys.readouterr().out


def test_intervals_are_over_windows():
    import pandas as pd

    rows = [
        {"task": "book", "example_id": k, "setting": setting, "score": 1.0, "kind": kind, "quantizer": quantizer,
         "code_bits": bits, "nll": 2.0 + 0.1 * (k % 3) + more, "kl": more, "top1_agreement": 1.0}
        for k in range(30)
        for setting, kind, quantizer, bits, more in
        (("full", "full", None, 16.0, 0.0), ("affine-L2", "uniform", "affine", 1.0, 0.5))
    ]  # fmt: skip
    full, coded = analyze(pd.DataFrame(rows), StatsOptions(resamples=400)).texts
    assert full.nll == pytest.approx(2.1) and full.perplexity == pytest.approx(math.exp(2.1))
    # A constant difference has no spread: the ratio is known exactly, the perplexity is not.
    assert coded.ratio == pytest.approx(math.exp(0.5)) and coded.ratio_ci == pytest.approx((coded.ratio,) * 2)
    assert coded.perplexity_ci[0] < coded.perplexity < coded.perplexity_ci[1]


def test_a_text_is_read_through_and_a_question_is_not(book):
    with pytest.raises(UsageError, match="use task=text"):
        make_plan(compose_config("sweep", ["protocol=through", "per_task=1"]))
    ranked = ["task=text", f"task.path={book}", "task.length=64", "protocol=through", "allocation=two_level"]
    with pytest.raises(UsageError, match="ranks tokens by what a whole prompt shows"):
        make_plan(compose_config("sweep", ranked))


def test_an_engine_without_distributions_cannot_score_a_text(book):
    with pytest.raises(UsageError, match="scored by the model's distributions"):
        make_plan(
            compose_config("sweep", ["task=text", f"task.path={book}", "task.length=64", "engine=llamacpp"])
        )
