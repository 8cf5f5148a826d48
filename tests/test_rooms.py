"""The order of the rooms: a module imports from its own room and from rooms before it, never from a later one."""

import ast
from pathlib import Path

import pytest

import semkv_bench

PACKAGE = Path(semkv_bench.__file__).parent
ROOMS = (
    ("errors", "lazy"),
    ("checks",),
    ("files", "console"),
    ("grid",),
    ("config",),
    ("records",),
    ("tasks",),
    ("importers",),
    ("kernels",),
    ("models",),
    ("quantizers",),
    ("importance",),
    ("settings",),
    ("protocols",),
    ("engine",),
    ("packed",),
    ("stats",),
    ("plan",),
    ("sweep",),
    ("report",),
    ("recipe", "regress", "search", "doctor"),
    ("commands",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
AT_ROOT = 8


def _modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def _imported(path: Path, names: set[str]) -> set[str]:
    """Modules of the package that ``path`` imports anywhere but for types alone."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        parts = (node.module or "").split(".")
        if parts[0] != "semkv_bench":
            continue
        for name in node.names:
            longest = [*parts[1:], name.name]
            while (
                longest and ".".join(longest) not in names and ".".join([*longest, "__init__"]) not in names
            ):
                longest.pop()
            found.add(".".join(longest) or "__init__")
    return found


def _room(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_stands_in_a_known_room():
    assert {_room(module) for module in _modules()} == set(FLOOR)


def test_few_modules_stand_at_the_root():
    assert len([path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]) <= AT_ROOT


@pytest.mark.parametrize("module", _modules())
def test_imports_run_downwards(module):
    modules = _modules()
    upward = {
        other
        for other in _imported(modules[module], set(modules))
        if other != "__init__" and FLOOR[_room(other)] > FLOOR[_room(module)]
    }
    assert not upward, f"{module} imports from later rooms: {sorted(upward)}"


def test_no_module_imports_itself_by_way_of_others():
    modules = _modules()
    arrows = {module: _imported(path, set(modules)) - {"__init__"} for module, path in modules.items()}
    reached = {module: set(others) for module, others in arrows.items()}
    for middle in modules:
        for module in modules:
            if middle in reached[module]:
                reached[module] |= reached.get(middle, set())
    assert not [module for module in modules if module in reached[module]]


def test_an_upward_import_is_seen(tmp_path):
    path = tmp_path / "low.py"
    path.write_text("def later():\n    from semkv_bench.report import text\n")
    assert _imported(path, {"report.__init__"}) == {"report"}


def test_test_files_have_names_of_their_own():
    """Pytest imports test files by their name alone; one of two equal names would not be run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
