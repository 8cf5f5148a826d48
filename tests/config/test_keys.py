"""What ``--help`` says of keys, and what is said of keys and choices that do not exist."""

import pytest
from omegaconf import OmegaConf

from semkv_bench.config import keys
from semkv_bench.config.choices import choices, conf_dir
from semkv_bench.config.compose import compose_config
from semkv_bench.config.keys import completions, groups_of, known_keys, own_keys, read_keys
from semkv_bench.config.overrides import as_overrides
from semkv_bench.config.own import joined
from semkv_bench.errors import UsageError

CONFIGS = ("sweep", "recipe", "search", "regress", "cliff_report", "storage", "measure")


def help_lines(name):
    return keys.help_lines(name, compose_config(name))


def _leaves(node, prefix="") -> set[str]:
    """Names of all values of a composed configuration but for Hydra's own."""
    found = set()
    for name in node:
        value = OmegaConf.to_container(node, resolve=False)[name]
        if isinstance(value, dict):
            found |= _leaves(node[name], f"{prefix}{name}.")
        elif not name.startswith("_"):
            found.add(prefix + name)
    return found


@pytest.mark.parametrize(
    "name", [name if name == "sweep" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_help_has_every_key_with_its_default_and_its_meaning(name):
    lines = help_lines(name)
    for key in known_keys(name):
        folder = key.name.partition(".")[0]
        if folder == "value_quantizer" or key.name in {g.partition("@")[0] for g in choices(name)}:
            continue
        (line,) = [line for line in lines if line.strip().startswith(f"{key.name}=")]
        assert (
            len(line.partition("  " if line.startswith("  ") else " ")[2].split("  ", 1)[-1].strip()) > 3
        ), line
    composed = compose_config(name)
    told = {line.strip().partition("=")[0] for line in lines if "=" in line}
    assert {leaf for leaf in _leaves(composed) if not leaf.startswith("value_quantizer")} <= told


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_that_ships_is_explained_in_its_file(name):
    composed = compose_config(name)
    found = own_keys(name, composed) + [key for group in groups_of(name, composed) for key in group.keys]
    assert not [key.name for key in found if len(key.meaning) < 4]


def test_every_choice_s_keys_are_found():
    """A key of any choice's file, read as YAML, is one that help knows."""
    # Of a nested key, the first part is enough.
    known = {".".join(key.name.split(".")[:2]) for key in known_keys("sweep")}
    for group in ("quantizer", "allocation", "protocol", "task", "model", "stats", "engine", "grid"):
        for path in (conf_dir() / group).rglob("*.yaml"):
            names = [name for name in OmegaConf.load(path) if not name.startswith("_")]
            assert {f"{group}.{name}" for name in names if name != "defaults"} <= known, path


def test_a_file_s_comments_stand_behind_a_key_or_above_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# About the file.\n_target_: mine.Mine\n# two lines\n# above\na: [1, 2]\nb: x   # behind\n"
        "c:\n  d: 1.5  # nested\ne: null\n"
    )
    found = [(key.name, key.default, key.meaning) for key in read_keys(path, "q.")]
    assert found == [
        ("q.a", "[1, 2]", "two lines above"),
        ("q.b", "x", "behind"),
        ("q.c.d", "1.5", "nested"),
        ("q.e", "null", ""),
    ]


def test_help_shows_the_defaults_in_force():
    """An experiment that a command begins with sets some, the command's own file others."""
    assert any(line.startswith("  per_task=16 ") for line in help_lines("regress"))
    assert any(line.startswith("    task.length=300 ") for line in help_lines("regress"))
    assert any("allocation.fraction=[0.1,0.25,0.5,0.75]" in line for line in help_lines("recipe"))


def test_keys_and_choices_of_a_folder_of_ones_own(tmp_path):
    (tmp_path / "quantizer").mkdir()
    (tmp_path / "quantizer/mine.yaml").write_text("_target_: mine.Mine\nwidth: 3  # how wide\n")
    with joined([str(tmp_path)]):
        assert any(
            line.startswith("    quantizer.width=3 ") and "(of mine)" in line for line in help_lines("sweep")
        )
        assert {"quantizer=mine", "quantizer.width=", "seeds=", "task=longform"} <= set(completions("sweep"))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["grdi.levels=[3]"], "did you mean grid.levels?"),
        (["per_tsk=3"], "did you mean per_task?"),
        (["+per_tsk=3"], "did you mean per_task?"),
        (["quantiser=affine"], "did you mean quantizer?"),
        (["quantizer=afine"], "did you mean affine?"),
        (["model=lama31"], "did you mean llama31?"),
        (["experiment=small/afine_uniform"], "did you mean small/affine_uniform?"),
        (["task.lenght=3"], "did you mean task.length?"),
        (["protocol.block=16"], "it is one of protocol=generation or multiturn"),
        (["value_quantizer.rotation=qr"], "value_quantizer=turboquant"),
        (["value_quantizer.group_size=32"], "it is one of value_quantizer=affine"),
    ],
)
def test_what_does_not_exist_comes_with_what_may_be_meant(overrides, told):
    with pytest.raises(UsageError) as raised:
        compose_config("sweep", overrides)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_hub_name_or_folder_is_a_model():
    for given in ("org/name", "/some/folder", "./model.gguf"):
        config = compose_config("sweep", as_overrides([f"model={given}"], "sweep"))
        assert config.model.path == given
    for given in ("model=smollm2", "model={path: a/b}", "model=null", "model='a/b'"):
        assert as_overrides([given], "sweep") == [given]
    with pytest.raises(UsageError, match=r"model=custom model.path=a/b,c/d"):
        as_overrides(["model=a/b,c/d"], "sweep", several=True)


def test_an_argument_without_a_key_is_the_value_of_the_one_it_belongs_to(tmp_path, monkeypatch):
    assert as_overrides(["my run"], "cliff_report", "run") == ["run='my run'"]
    (tmp_path / "a=1" / "b=2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert as_overrides(["./a=1/b=2"], "cliff_report", "run") == ["run='./a=1/b=2'"]
    assert as_overrides(["out=x/y", "a"], "cliff_report", "run") == ["out='x/y'", "run='a'"]
    with pytest.raises(UsageError, match=r"runs=\[DIR,DIR\]"):
        as_overrides(["a", "b"], "cliff_report", "run")
    with pytest.raises(UsageError, match="not of the form key=value"):
        as_overrides(["a"], "sweep")
