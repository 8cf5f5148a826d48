"""Logs of other harnesses, as small files of our own in their layouts, with the traps of each."""

import json
import zipfile
from pathlib import Path

import pandas as pd
import pytest

from semkv_bench.cli import main
from semkv_bench.errors import MissingError, UsageError
from semkv_bench.importers import FORMATS, Options, Setting, import_logs, split_arguments
from semkv_bench.importers.kvpress import ruler_score
from semkv_bench.importers.rows import one_of


def _jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _lm_line(doc: int, score: object, filter_name: str = "none", **more) -> dict:
    return {
        "doc_id": doc,
        "filter": filter_name,
        "metrics": ["exact_match"],
        "exact_match": score,
        "prompt_hash": f"p{doc}",
        "filtered_resps": [f"answer {doc}"],
        **more,
    }


def _lm_eval(path: Path, scores: list, date: str = "2026-01-02T03-04-05.678", **more) -> Path:
    _jsonl(
        path / "org__m" / f"samples_toy_{date}.jsonl", [_lm_line(i, s, **more) for i, s in enumerate(scores)]
    )
    return path


def _records(kind: str, settings: dict[str, tuple[Path, float | None]], **options):
    chosen = [Setting(name, path, bits) for name, (path, bits) in settings.items()]
    return import_logs(kind, chosen, Options(**options))


def test_lm_eval_becomes_paired_records(tmp_path):
    full, small = _lm_eval(tmp_path / "a", [1, 0, 1.0]), _lm_eval(tmp_path / "b", [True, 0.0, 0])
    frame, notes = _records("lm-eval", {"full": (full, None), "fp8": (small, 8)})
    fp8 = frame[frame.setting == "fp8"].set_index("example_id")
    assert list(fp8.score) == [1, 0, 0] and set(fp8.code_bits) == {8} and not notes
    assert set(frame[frame.setting == "full"].code_bits) == {16} and fp8.prediction["2"] == "answer 2"


def test_lm_eval_newest_of_several_dates_is_taken_and_said(tmp_path):
    path = _lm_eval(tmp_path / "a", [1, 1])
    _lm_eval(path, [0, 0], date="2026-01-03T00-00-00.0")
    frame, notes = _records("lm-eval", {"full": (path, None), "q": (path, 4.5)})
    assert set(frame.score) == {0} and "run 2 times" in notes[0]


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        ({"metrics": ["acc", "acc_norm"], "acc": 1, "acc_norm": 0}, {}, "choose one with metric=NAME: acc, acc_norm"),
        ({}, {"metric": "f1"}, "has no metric f1; it holds exact_match"),
        ({}, {"filter": "strict-match"}, "has no filter strict-match"),
        ({"metrics": ["word_perplexity"], "word_perplexity": [-3.0, 2]}, {}, "averaged over a corpus"),
        ({"metrics": ["bypass"]}, {}, "names no metric"),
        ({}, {"task": "gsm8k"}, "has no task gsm8k; it holds toy"),
    ],
)  # fmt: skip
def test_lm_eval_asks_what_it_cannot_know(tmp_path, more, options, words):
    path = _lm_eval(tmp_path / "a", [1], **more)
    with pytest.raises(UsageError, match=words):
        _records("lm-eval", {"full": (path, None)}, **options)


def test_lm_eval_two_filters_are_no_two_examples(tmp_path):
    lines = [
        _lm_line(doc, float(name == "flexible-extract"), name)
        for doc in range(3)
        for name in ("strict-match", "flexible-extract")
    ]
    _jsonl(tmp_path / "m" / "samples_gsm8k_2026-01-02T03-04-05.6.jsonl", lines)
    with pytest.raises(UsageError, match="choose one with filter=NAME: flexible-extract, strict-match"):
        _records("lm-eval", {"full": (tmp_path, None)})
    frame, _ = _records("lm-eval", {"full": (tmp_path, None), "q": (tmp_path, 8)}, filter="strict-match")
    assert len(frame) == 6 and set(frame.score) == {0}


@pytest.mark.parametrize(
    ("names", "chosen", "words"),
    [
        ([], None, "log.json holds no scorer"),
        ([], "f1", "log.json holds no scorer"),
        (["em"], "f1", "log.json has no scorer f1; it holds em"),
        (["em", "f1"], None, "log.json holds 2 scorers; choose one with metric=NAME: em, f1"),
    ],
)
def test_one_score_of_a_log_is_read(names, chosen, words):
    with pytest.raises(UsageError, match=words):
        one_of(names, chosen, Path("logs/log.json"), "scorer")
    assert one_of(["em"], None, Path("log.json"), "scorer") == "em"
    assert one_of(["em", "f1"], "f1", Path("log.json"), "scorer") == "f1"


def test_lm_eval_a_loss_is_refused(tmp_path):
    path = _lm_eval(tmp_path / "a", [0.5])
    (path / "org__m" / "results_2026-01-02T03-04-05.678.json").write_text(
        json.dumps({"higher_is_better": {"toy": {"exact_match": False}}})
    )
    with pytest.raises(UsageError, match="is a loss"):
        _records("lm-eval", {"full": (path, None)})


def test_other_prompts_are_refused_and_lone_examples_are_said(tmp_path):
    full = _lm_eval(tmp_path / "a", [1, 1, 1])
    other = _lm_eval(tmp_path / "b", [1, 1, 1], prompt_hash="of another template")
    with pytest.raises(UsageError, match="task toy, example 0 had another prompt under q than under full"):
        _records("lm-eval", {"full": (full, None), "q": (other, 4)})
    _, notes = _records("lm-eval", {"full": (full, None), "q": (_lm_eval(tmp_path / "c", [1, 1]), 4)})
    assert notes == ["full: 1 of 3 examples are not in every log (toy 2)"]


def test_two_models_in_one_folder_are_refused(tmp_path):
    _lm_eval(tmp_path, [1])
    _jsonl(tmp_path / "other" / "samples_toy_2026-01-02T03-04-05.6.jsonl", [_lm_line(0, 1)])
    with pytest.raises(UsageError, match="logs of several models"):
        _records("lm-eval", {"full": (tmp_path, None)})


def _kvpress(path: Path, predictions: list[str], removed: float) -> Path:
    path.mkdir(parents=True)
    pd.DataFrame(
        {
            "task": ["niah", "niah", "qa_1"],
            "question": ["which?", "which?", "who?"],
            "answer": ["['12' '34']", "['12', '34']", '["Ann", "Bob"]'],
            "predicted_answer": predictions,
            "compression_ratio": removed,
        }
    ).to_csv(path / "predictions.csv", index=False)
    (path / "config.yaml").write_text("dataset: ruler\nmodel: org/m\n")
    return path


def test_kvpress_is_scored_and_priced_by_what_was_measured(tmp_path):
    full = _kvpress(tmp_path / "no_press", ["12 34", "34", "bob"], 0.0)
    small = _kvpress(tmp_path / "knorm", ["12", "", "nobody"], 0.76)
    frame, notes = _records("kvpress", {"full": (full, None), "knorm": (small, None)})
    assert list(frame[frame.setting == "full"].sort_values("task").score) == [1.0, 0.5, 1.0]
    assert list(frame[frame.setting == "knorm"].sort_values("task").score) == [0.5, 0.0, 0.0]
    assert list(frame[frame.setting == "knorm"].code_bits) == pytest.approx([3.84] * 3)
    assert any("paired in their order" in note for note in notes) and set(frame.model) == {"org/m"}


def test_kvpress_knows_only_ruler(tmp_path):
    path = _kvpress(tmp_path / "a", ["", "", ""], 0.5)
    (path / "config.yaml").write_text("dataset: infinitebench\n")
    with pytest.raises(UsageError, match="a result on infinitebench"):
        _records("kvpress", {"full": (path, None)})


def test_ruler_score_by_hand():
    assert ruler_score("qa_2", "It was BOB", ["Ann", "bob"]) == 1
    assert ruler_score("vt", "VAR A", ["var a", "var b", "c", "d"]) == 0.25
    assert ruler_score("vt", "", []) == 0


def test_longbench_files_pair_by_content_and_not_by_line(tmp_path):
    lines = [
        {"pred": "Paris is it", "answers": ["Paris"], "all_classes": None, "length": 10},
        {"pred": "Rome", "answers": ["Rome"], "all_classes": None, "length": 20},
    ]
    _jsonl(tmp_path / "a" / "qasper.jsonl", lines)
    _jsonl(tmp_path / "b" / "qasper.jsonl", [{**line, "pred": "Rome"} for line in reversed(lines)])
    frame, _ = _records("longbench", {"full": (tmp_path / "a", None), "q": (tmp_path / "b", 4)})
    wide = frame.pivot(index="example_id", columns="setting", values="score")
    assert sorted(map(tuple, wide[["full", "q"]].round(3).to_numpy().tolist())) == [(0.5, 0.0), (1.0, 1.0)]


def _inspect(path: Path, values: list, status: str = "success", **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [
        {
            "id": i // 2,
            "epoch": i % 2 + 1,
            "input": f"q{i // 2}",
            "scores": {"exact": {"value": value}},
            **more,
        }
        for i, value in enumerate(values)
    ]
    header = {"status": status, "eval": {"task": "toy", "model": "m"}}
    if path.suffix == ".json":
        path.write_text(json.dumps({**header, "samples": samples}))
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"status": "started"}))
        archive.writestr("summaries.json", json.dumps(samples))
        archive.writestr("header.json", json.dumps(header))
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("ending", [".eval", ".json"])
def test_inspect_epochs_are_seeds_and_letters_are_numbers(tmp_path, ending):
    full = _inspect(tmp_path / f"a{ending}", ["C", "I", "P", 1.0])
    small = _inspect(tmp_path / f"b{ending}", ["C", "N", 0.25, float("nan")])
    frame, notes = _records("inspect", {"full": (full, None), "q": (small, 4)})
    assert list(frame[frame.setting == "full"].score) == [1, 0, 0.5, 1]
    assert set(frame.seed) == {0, 1} and "1 samples ended" in notes[0] and "1 of 4" in notes[1]


def test_inspect_unfinished_and_wordy_scores_are_refused(tmp_path):
    with pytest.raises(UsageError, match="status error"):
        _records("inspect", {"full": (_inspect(tmp_path / "a.json", ["C"], status="error"), None)})
    with pytest.raises(UsageError, match="the score 'well'"):
        _records("inspect", {"full": (_inspect(tmp_path / "b.json", ["well"]), None)})
    with pytest.raises(UsageError, match="give the file of one"):
        _records("inspect", {"full": (tmp_path, None)})


def test_lighteval_details(tmp_path):
    for name, right in (("full", [1.0, 1.0]), ("q", [1.0, 0.0])):
        rows = {
            "doc": [{"id": str(i), "task_name": "toy|0", "query": f"q{i}"} for i in range(2)],
            "metric": [{"em": score} for score in right],
        }
        folder = tmp_path / name / "details"
        folder.mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(folder / "details_toy|0_2026-01-02T03-04-05.6.parquet")
    frame, _ = _records("lighteval", {"full": (tmp_path / "full", None), "q": (tmp_path / "q", 8)})
    assert list(frame[frame.setting == "q"].score) == [1, 0]
    with pytest.raises(UsageError, match="has no metric f1; it holds em"):
        _records("lighteval", {"full": (tmp_path / "full", None)}, metric="f1")


def test_opencompass_split_prompts_and_lists_of_details(tmp_path):
    for name, right in (("full", [True, True, False]), ("q", [True, False, False])):
        results, predictions = (tmp_path / name / part / "m" for part in ("results", "predictions"))
        results.mkdir(parents=True)
        predictions.mkdir(parents=True)
        details = {str(i): {"correct": flag} for i, flag in enumerate(right)}
        content = {"accuracy": 50, "details": list(details.values()) if name == "q" else details}
        (results / "toy.json").write_text(json.dumps(content))
        for part, numbers in enumerate(((0, 1), (2,))):
            items = {str(i): {"origin_prompt": f"p{n}", "prediction": ""} for i, n in enumerate(numbers)}
            (predictions / f"toy_{part}.json").write_text(json.dumps(items))
    frame, _ = _records("opencompass", {"full": (tmp_path / "full", None), "q": (tmp_path / "q", 8)})
    assert list(frame[frame.setting == "q"].score) == [1, 0, 0] and frame.prompt_hash.nunique() == 3


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("inspect", {"a.json": {"status": "success", "eval": {"task": "t"}, "samples": ["no mapping"]}}),
        ("inspect", {"a.json": {"status": "success", "eval": ["no mapping"], "samples": []}}),
        (
            "inspect",
            {
                "a.json": {
                    "status": "success",
                    "eval": {},
                    "samples": [{"id": 1, "epoch": "two", "scores": {"s": {"value": 1}}}],
                }
            },
        ),
        (
            "opencompass",
            {"results/m/toy.json": {"details": {"0": {"correct": True}}}, "predictions/m/toy.json": []},
        ),
        (
            "opencompass",
            {"results/m/toy.json": {"details": {"0": {"correct": [True, False]}}}, "predictions/m/x": 0},
        ),
        (
            "opencompass",
            {"results/m/toy.json": {"details": {"0": {"correct": "False"}}}, "predictions/m/x": 0},
        ),
        (
            "opencompass",
            {
                "results/m/toy.json": {"details": {"0": {"correct": True}}},
                "predictions/m/toy.json": {"first": {"origin_prompt": "p"}},
            },
        ),
        (
            "lm-eval",
            {
                "samples_toy_2026-01-02T03-04-05.6.jsonl": _lm_line(0, 1),
                "results_2026-01-02T03-04-05.6.json": {"higher_is_better": ["no mapping"]},
            },
        ),
    ],
)
def test_logs_of_another_layout_are_one_line(tmp_path, kind, files):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    path = tmp_path / "a.json" if kind == "inspect" else tmp_path
    with pytest.raises(UsageError) as caught:
        _records(kind, {"full": (path, None), "q": (path, 4)})
    assert "\n" not in str(caught.value) and ("toy" in str(caught.value) or str(path) in str(caught.value))


def test_a_damaged_archive_is_one_line(tmp_path):
    path = _inspect(tmp_path / "a.eval", ["C"] * 200)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.eval"):
        _records("inspect", {"full": (path, None)})


def test_scores_of_opencompass_between_right_and_wrong_stay(tmp_path):
    for part in ("results", "predictions"):
        (tmp_path / part / "m").mkdir(parents=True)
    details = {"0": {"correct": 0.25}, "1": {"correct": 1}, "2": {"correct": False}}
    (tmp_path / "results" / "m" / "toy.json").write_text(json.dumps({"details": details}))
    frame, _ = _records("opencompass", {"full": (tmp_path, None), "q": (tmp_path, 4)})
    assert list(frame[frame.setting == "q"].score) == [0.25, 1, 0]


def _line(chunk: int, kl: float, same: float) -> str:
    sigma = "±    0.01000"
    return (
        f"{chunk:4d}      11.0000 {sigma}       0.05000 {sigma}      {kl:.5f} {sigma}     5.000 {sigma} %   "
        f" {same:.3f} {sigma} %"
    )


PERPLEXITY = "\n".join(
    [
        "chunk  PPL  ln(PPL(Q)/PPL(base))  KL Divergence  Δp RMS  Same top p",
        _line(1, 0.04, 90),
        _line(2, 0.06, 85),
        _line(3, 0.05, 86),
        "====== Perplexity statistics ======",
        "Mean PPL(Q)                   :  12.000000 ±   1.000000",
    ]
)


def test_llama_perplexity_chunks_are_taken_back_from_running_means(tmp_path):
    (tmp_path / "q4.txt").write_text(PERPLEXITY)
    frame, _ = _records("auto", {"q4_0": (tmp_path / "q4.txt", 4.5)})
    chunks = frame[frame.setting == "q4_0"]
    assert list(chunks.kl) == pytest.approx([0.04, 0.08, 0.03])
    assert list(chunks.top1_agreement) == pytest.approx([0.9, 0.8, 0.88])
    assert set(frame[frame.setting == "full"].score) == {1}
    (tmp_path / "cut.txt").write_text(PERPLEXITY.replace("   2      11", "   4      11"))
    with pytest.raises(UsageError, match="chunk 4 follows chunk 1"):
        _records("llama-perplexity", {"q4_0": (tmp_path / "cut.txt", 4.5)})


def test_llama_perplexity_logs_of_two_bases_are_refused(tmp_path):
    (tmp_path / "q8.txt").write_text(PERPLEXITY)
    # A worse cache of the same base: both move by as much.
    (tmp_path / "q4.txt").write_text(
        PERPLEXITY.replace(" 11.0000", " 12.1569").replace(" 0.05000", " 0.15000")
    )
    settings = {"q8": (tmp_path / "q8.txt", 8.5), "q4": (tmp_path / "q4.txt", 4.5)}
    assert len(_records("llama-perplexity", settings)[0]) == 9
    (tmp_path / "q4.txt").write_text(PERPLEXITY.replace(" 11.0000", " 12.1569"))
    with pytest.raises(UsageError, match="q4 was compared with another base than q8: at chunk-00001"):
        _records("llama-perplexity", settings)


def test_auto_knows_every_format_from_the_others(tmp_path):
    assert not [name for name, module in FORMATS.items() if module.looks_like(tmp_path)]
    path = _lm_eval(tmp_path / "a", [1])
    assert [name for name, module in FORMATS.items() if module.looks_like(path)] == ["lm-eval"]
    with pytest.raises(UsageError, match="none of the known formats fits"):
        _records("auto", {"full": (tmp_path / "a" / "org__m" / "..", None), "q": (Path("/nowhere"), 4)})


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_what_is_no_log_is_one_clear_line(tmp_path, kind):
    for name, content in (("empty", b""), ("noise.json", b"\xff\xfe\x00{"), ("words.txt", b"nothing here")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises((UsageError, MissingError)) as caught:
            _records(kind, {"full": (tmp_path / name, None)})
        assert "\n" not in str(caught.value)
    with pytest.raises(MissingError, match="does not exist"):
        _records(kind, {"full": (tmp_path / "nowhere", None)})


def test_arguments_of_the_command():
    known = ("stats", "out")
    kind, settings, options, rest = split_arguments(
        ["import=lm-eval", "full=a", "fp8:8=b", "q4:4.5=c", "metric=acc", "stats.margin=0.1", "out=d"], known
    )
    assert kind == "lm-eval" and options.metric == "acc" and rest == ["stats.margin=0.1", "out=d"]
    assert [(s.name, s.bits) for s in settings] == [("full", None), ("fp8", 8), ("q4", 4.5)]
    for argument, words in (
        ("fp8:eight=b", "no number of bits"),
        ("full:16=b", "takes no bits"),
        ("q:0=b", "at most 32"),
        ("q:4=", "neither a key"),
        ("full=b", "named more than once"),
    ):
        with pytest.raises(UsageError, match=words):
            split_arguments(["import=auto", "full=a", argument], known)
    arguments = ["import=lm-eval", "full=a", "export=[csv]", "+log=mlflow", "log.mode=online"]
    assert split_arguments(arguments, ("stats", "out", "export", "log"))[3] == arguments[2:]
    with pytest.raises(UsageError, match="leave records out"):
        split_arguments(["import=lm-eval", "full=a", "records=b"], known)
    with pytest.raises(UsageError, match="import=helm is not known"):
        split_arguments(["import=helm", "full=a"], known)


def test_bits_must_be_given_where_the_log_tells_none(tmp_path):
    path = _lm_eval(tmp_path / "a", [1])
    with pytest.raises(UsageError, match="fp8 has no bits: write fp8:BITS=PATH"):
        _records("lm-eval", {"full": (path, None), "fp8": (path, None)})
    with pytest.raises(UsageError, match="the reference is missing"):
        _records("lm-eval", {"fp8": (path, 8)})


@pytest.mark.slow
def test_the_command_exports_what_it_imported(tmp_path, without_figures):
    full, small = (_lm_eval(tmp_path / name, [1, 0] * 6) for name in "ab")
    given = ["cliff-report", "import=lm-eval", f"full={full}", f"fp8:8={small}", f"out={tmp_path / 'out'}"]
    assert main([*given, "stats.resamples=100", "export=[csv]"]) == 0
    assert len(pd.read_csv(tmp_path / "out" / "records.csv")) == 24
    assert main([*given, "export=[xls]"]) == 2
