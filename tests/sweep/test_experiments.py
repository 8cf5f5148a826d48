import pytest
from thinned import thinned

from semkv_bench.cli import main
from semkv_bench.config.choices import choices
from semkv_bench.config.compose import compose_config
from semkv_bench.plan.settings import planned_settings
from semkv_bench.records.folder import read_run

EXPERIMENTS = choices("sweep")["experiment"]
QUICK = ["per_task=1", "seeds=[0]", "subset=null", "max_new_tokens=2", "stats.looks=null"]


def test_every_paper_experiment_has_a_small_twin():
    paper = {name.removeprefix("paper/") for name in EXPERIMENTS if name.startswith("paper/")}
    small = {name.removeprefix("small/") for name in EXPERIMENTS if name.startswith("small/")}
    assert paper <= small and len(paper) == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, local_folder, tmp_path):
    model = ["model=custom", f"model.path={local_folder}"]
    task = {
        "generation": ["task=longform", "protocol.block=2", "max_new_tokens=6"],
        "multiturn": ["task=synthetic_multiturn", "task.turns=2"],
    }.get(name.rpartition("_")[2], ["task=synthetic", "task.length=300"])
    assert main(["sweep", f"experiment={name}", *model, *QUICK, *task, f"out={tmp_path}"]) == 0
    frame, protocol = read_run(tmp_path)
    turns = 2 if name.endswith("multiturn") else 1
    assert len(frame) == protocol["examples"]["count"] * turns * len(protocol["settings"]) > 0


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n.startswith("paper/")])
@pytest.mark.parametrize("model", thinned(["llama31", "mistral7b"], "llama31"))
def test_paper_experiments_compose_for_both_models(name, model):
    config = compose_config("sweep", [f"experiment={name}", f"model={model}"])
    assert list(config.seeds) == [0, 1, 2] and "LongBench" in config.task["_target_"]
    assert len(planned_settings(config)) > 4


def test_the_papers_settings_are_there():
    def named(name: str) -> dict:
        return {s.name: s for s in planned_settings(compose_config("sweep", [f"experiment=paper/{name}"]))}

    semkv = named("affine_semkv")
    assert [n for n in semkv if "@" in n] == [
        f"affine-L6/5@{f:g}:key_norm" for f in (0, 0.1, 0.25, 0.5, 0.75, 1)
    ]
    assert semkv["affine-L6/5@0.25:key_norm"].storage(128).effective_bits == pytest.approx(2.65)
    mix = named("turboquant_semkv")["turboquant-L4/3@0.75:key_norm"].storage(128)
    assert (round(mix.code_bits, 1), round(mix.effective_bits, 3)) == (1.9, 2.025)
    split = {s.storage(128).code_bits for s in named("turboquant_channel_split").values()}
    assert 2.25 in split
    assert sum("@" in n for n in named("widened_gap")) == 20
    assert all(
        s.storage(128).effective_bits == 4 for n, s in named("pruning").items() if n.startswith("prune")
    )
