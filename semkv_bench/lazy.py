"""Imports at the first use, so that what needs no torch does not wait for it: names of a package, torch, SciPy."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["called", "on_demand", "scipy", "torch"]


def on_demand(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``: what its file imports under ``if TYPE_CHECKING``, each name once asked for.

    The names stand in the file as imports do, so that readers, editors and linters find them.
    """
    tree = ast.parse(Path(sys.modules[package].__file__).read_text())
    imports = [
        line
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
    ]
    module_of = {alias.name: line.module for line in imports for alias in line.names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def called(package: str, module: str) -> None:
    """Make ``package`` itself callable, as the function of its own name in ``module``.

    So ``semkv_bench.sweep`` is the room and ``semkv_bench.sweep(model, ...)`` runs one.
    """
    name = package.rpartition(".")[2]

    class Callable(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(module), name)(*args, **kwargs)

    sys.modules[package].__class__ = Callable


class _Late:
    """A module that is imported once something of it is asked for, and is as quick as the module from then on."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = import_module(self._name)
        self.__dict__ = module.__dict__
        return getattr(module, name)


if TYPE_CHECKING:
    import scipy
    import torch
else:
    scipy, torch = _Late("scipy"), _Late("torch")
