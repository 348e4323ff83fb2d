"""The public names are listed, sorted, and all there is."""

import ast
import importlib
import inspect
from pathlib import Path

import twostroke.client


def test_the_list_is_sorted_and_without_repetition():
    assert twostroke.client.__all__ == sorted(set(twostroke.client.__all__))


def test_the_list_is_what_the_package_imports():
    tree = ast.parse(inspect.getsource(twostroke.client))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(twostroke.client.__all__) == imported
    for name in twostroke.client.__all__:
        assert inspect.getdoc(getattr(twostroke.client, name)), name


def test_modules_are_private():
    folder = Path(twostroke.client.__file__).parent
    assert [path.name for path in folder.glob("*.py") if not path.name.startswith("_")] == []


def test_every_value_that_a_caller_can_get_is_public():
    types = importlib.import_module("twostroke.client._types")
    defined = {
        name for name, value in vars(types).items() if inspect.isclass(value) and value.__module__ == types.__name__
    }
    assert defined <= set(twostroke.client.__all__)
    assert len(defined) == 9
