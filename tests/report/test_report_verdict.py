"""The verdict sentences, for every status a report can have."""

import math

import pytest
from typed import cards, cliff_words, confirmation_words, detail_table, headline, limits


def mark(report, verdicts):
    """Give settings other verdicts: name to verdict, or one verdict for all."""
    for row in report["settings"]:
        if row["verdict"] != "reference":
            row["verdict"] = (
                verdicts if isinstance(verdicts, str) else verdicts.get(row["setting"], row["verdict"])
            )


def cliff(report, status, lower=None, upper=None):
    report["cliff"] |= {
        "status": status,
        "lower_bits": lower and math.log2(lower),
        "upper_bits": upper and math.log2(upper),
        "lower_setting": lower and f"affine-L{lower}",
        "upper_setting": upper and f"affine-L{upper}",
    }


@pytest.fixture
def point(report):
    report["operating_point"] = {
        "setting": "affine-L8",
        "code_bits": 3.0,
        "effective_bits": 3.5,
        "compression": 16 / 3.5,
        "verdict": "equivalent",
    }
    return report


def test_located(point):
    assert headline(point) == (
        "SmolLM2-135M-Instruct with affine quantization holds down to 2.807 bits (L=7) and "
        "collapses at 2.322 (L=5); cheapest safe cache: affine-L8, coded part 3.50 effective bits per value, "
        "4.6x smaller than 16-bit."
    )


def test_located_without_an_operating_point(point):
    point["operating_point"] = None
    assert headline(point).endswith(
        "collapses at 2.322 (L=5); no setting is shown to be no worse than the 16-bit cache."
    )


def test_above_grid_names_the_most_bits_tested(point):
    cliff(point, "above_grid", lower=16)
    point["operating_point"] = None
    assert headline(point) == (
        "SmolLM2-135M-Instruct with affine quantization collapses already at 4.0 bits (L=16, int4), the "
        "most bits tested, so its cliff lies above the grid; no setting is shown to be no worse than "
        "the 16-bit cache."
    )


@pytest.mark.parametrize("given", [True, False], ids=["bits given", "bits missing"])
def test_below_grid_names_the_fewest_bits_tested(point, given):
    cliff(point, "below_grid", upper=2 if given else None)
    assert headline(point).startswith(
        "SmolLM2-135M-Instruct with affine quantization holds down to 1.0 bits (L=2), the "
        "fewest bits tested, so its cliff lies below the grid; cheapest safe cache: affine-L8"
    )


def test_undetermined_counts_the_grid(point):
    cliff(point, "undetermined")
    mark(point, "inconclusive")
    mark(point, {"affine-L16": "equivalent", "affine-L8": "floor", "affine-L2": "degraded"})
    assert headline(point).startswith(
        "The cliff of SmolLM2-135M-Instruct with affine quantization could not be located: of 8 grid points, "
        "2 hold, 1 collapses and 5 are undecided; cheapest safe cache: affine-L8"
    )


ASSAY = {"sensitive": False, "positive_control": None, "reference_above_chance": True, "chance": 0.0}


@pytest.mark.parametrize("status", ["located", "above_grid", "below_grid", "undetermined"])
def test_an_insensitive_run_calls_nothing_safe(point, status):
    cliff(point, status)
    mark(point, "insensitive")
    point |= {"operating_point": None, "assay": ASSAY}
    assert headline(point) == (
        "This run could not have seen a loss of quality for SmolLM2-135M-Instruct with affine quantization, so it "
        "calls no setting safe: no grid point, down to 1.0 bits, is shown to lose quality (no positive control)."
    )
    assert limits(point).startswith("It cannot say that any setting is safe until one with fewer levels")


def test_a_reference_at_chance_is_named_as_the_reason(report):
    mark(report, "insensitive")
    report["assay"] = ASSAY | {"reference_above_chance": False, "chance": 0.25}
    score = report["settings"][0]["score"]
    assert headline(report).endswith(
        f": on 60 examples, the full-precision score ({score:.3f}) is not shown to be above the chance level of 0.250."
    )
    assert limits(report).startswith(
        "It cannot say anything about these settings until full precision is shown"
    )


def test_both_reasons_are_open_where_the_report_gives_none(report):
    mark(report, "insensitive")
    assert "(no positive control), or full precision is not shown to be above chance." in headline(report)


def test_every_quantizer_has_its_own_cliff(report):
    report["quantizer"] = ["affine", "turboquant"]
    for row in report["settings"][6:9]:
        row |= {"setting": row["setting"].replace("affine", "turboquant"), "quantizer": "turboquant"}
    located = report["cliff"] | {"quantizer": "affine"}
    report["cliff"] = located
    open_ = dict.fromkeys(("lower_bits", "upper_bits", "lower_setting", "upper_setting", "probability"))
    report["cliffs"] = {"turboquant": {"status": "undetermined", "intervals": [], **open_}, "affine": located}
    assert headline(report).startswith(
        "SmolLM2-135M-Instruct with affine quantization holds down to 2.807 bits (L=7) and collapses "
        "at 2.322 (L=5); with turboquant it has no located cliff (of 3 grid points, 0 hold, 3 collapse and 0 are "
        "undecided); cheapest safe cache: "
    )


def test_confirmation_is_told(point):
    assert confirmation_words(point) == ""
    point["operating_point"] |= {"confirmation": None, "confirmation_reason": "too few examples"}
    assert confirmation_words(point) == "Not confirmed on examples of its own: too few examples."
    assert "; the operating point is not confirmed on examples of its own; the margin" in limits(point)
    point["operating_point"]["confirmation"] = {
        "setting": "affine-L8",
        "clusters_to_choose": 30,
        "clusters_to_test": 29,
        "diff": -0.0104,
        "diff_ci": [-0.06, 0.04],
        "p_adjusted": 0.0314,
        "p_no_worse": 0.0123,
        "confirmed": True,
    }
    assert confirmation_words(point) == (
        "On one half of the examples (30), beside all other settings (p no worse 0.031), and by itself on the other "
        "half (29), affine-L8 is confirmed as no worse: difference -0.010 [-0.060, +0.040], p no worse 0.012."
    )
    assert "confirmed" not in limits(point)
    point["operating_point"] |= {"diff": -0.01, "diff_ci": [-0.05, 0.03], "candidates": 30}
    assert confirmation_words(point).startswith(
        "Difference -0.010 [-0.050, +0.030], allowing for the choice among 30 settings. On one half"
    )
    point["operating_point"]["confirmation"]["confirmed"] = False
    assert "not confirmed on examples of its own" in limits(point)


def test_what_was_left_out_or_is_missing_is_in_the_headline(report):
    report["assay"] = {
        "sensitive": True,
        "positive_control": "affine-L2",
        "reference_above_chance": True,
        "tasks": ["kept"],
        "dead_tasks": {"qasper": "why", "multi_news": "why"},
    }
    report["settings"][3] |= {"n_missing": 24}
    name = report["settings"][3]["setting"]
    said = headline(report)
    assert ": multi_news and qasper cannot react and are left out; " in said
    assert said.endswith(f"; rows are missing and count as lost: 24 of {name}.")


def test_two_examples_are_too_few(report):
    report["assay"] = {
        "sensitive": False,
        "positive_control": None,
        "reference_above_chance": False,
        "too_few": True,
    }
    report |= {"n_clusters": 2, "n_examples": 2}
    mark(report, "insensitive")
    assert "2 examples are too few to show that full precision does the tasks" in headline(report)


def test_repeats_of_full_precision_are_not_called_open(report):
    report["settings"].append(
        report["settings"][1] | {"setting": "full-again", "kind": "full", "verdict": "inconclusive"}
    )
    mark(report, {row["setting"]: "degraded" for row in report["settings"][1:-1]})
    assert limits(report).startswith("It says nothing about other models")


def test_limits_name_what_is_open_and_what_would_settle_it(report):
    mark(report, "degraded")
    mark(report, {"affine-L6": "inconclusive"})
    assert limits(report) == (
        "It cannot say whether affine-L6 holds (240 examples would settle it four times in five; 60 were run); "
        "the margin of 0.1 was fixed before the first record."
    )


def test_limits_of_many_open_settings_take_the_largest_sample(report):
    mark(report, "inconclusive")
    for index, row in enumerate(report["settings"]):
        row["n_needed"] = 1000 + index if row["verdict"] == "inconclusive" else None
    report["preregistered"] = False
    assert limits(report) == (
        "It cannot say whether affine-L16, affine-L8 and 10 more settings hold (1,012 examples would "
        "settle all of them four times in five; 60 were run); the margin of 0.1 is not known to have been fixed "
        "before the records were made, so its verdicts are exploratory."
    )


def test_sizes_are_clusters_where_examples_have_several_seeds(report):
    mark(report, "degraded")
    mark(report, {"affine-L6": "inconclusive"})
    report |= {"n_examples": 120}
    assert limits(report).startswith(
        "It cannot say whether affine-L6 holds (240 clusters, each an example or a document with all its answers, "
        "would settle it four times in five; 60 were run); "
    )
    assert "clusters needed" in detail_table(report).titles
    assert "Paired answers" in [card.title for card in cards(report)]
    mark(report, "insensitive")
    report["assay"] = ASSAY | {"reference_above_chance": False}
    assert "on 60 clusters, the full-precision score" in headline(report)


def test_the_sample_is_that_of_the_setting_that_needs_most(report):
    mark(report, "degraded")
    mark(report, {"affine-L6": "inconclusive"})
    row = next(row for row in report["settings"] if row["setting"] == "affine-L6")
    row |= {"n_clusters": 20, "n_needed": 30}
    assert "(30 examples would settle it four times in five; 20 were run)" in limits(report)
    assert "examples needed" in detail_table(report).titles


def test_without_a_uniform_setting_there_is_no_grid_to_count(report):
    cliff(report, "undetermined")
    report["settings"] = [row for row in report["settings"] if row["kind"] != "uniform"]
    assert headline(report).startswith(
        "The cliff of SmolLM2-135M-Instruct with affine quantization could not be located: no uniform setting was "
        "run, so there is no grid to look in; "
    )
    assert cliff_words(report, None, report["cliff"]).startswith(
        "not determined, as no uniform setting was run"
    )
    assert cards(report)[0].note.startswith("no uniform setting was run")
    mark(report, "insensitive")
    report["assay"] = ASSAY
    assert headline(report).endswith(
        ": no uniform setting was run, so none is shown to lose quality (no positive control)."
    )


def test_limits_when_everything_is_settled(report):
    mark(report, "degraded")
    assert limits(report).startswith(
        "It says nothing about other models, quantizers, tasks or longer prompts"
    )


def test_foreign_records_need_no_model_quantizer_or_effective_bits(report):
    report |= {"model": None, "quantizer": None, "margin": 0.03}
    cliff(report, "located", 4, 16)
    report["cliff"] |= {"lower_setting": "int2", "upper_setting": "int4"}
    report["operating_point"] = {
        "setting": "int4",
        "code_bits": 4.0,
        "effective_bits": None,
        "compression": None,
        "verdict": "equivalent",
    }
    assert headline(report) == (
        "The model in these records holds down to 4.0 bits (int4) and collapses at 2.0 (int2); "
        "cheapest safe cache: int4, 4.0 code bits (effective bits not recorded)."
    )
    assert "the margin of 0.03 was" in limits(report)


def test_several_quantizers_are_all_named(report):
    report["quantizer"] = ["affine", "turboquant"]
    assert "with affine and turboquant quantization" in headline(report)
