"""What mypyc makes of the modules that setup.py compiles is right only under some rules, which nothing else checks."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled() -> list[str]:
    """The modules by name."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            found: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return [f"twostroke.{folder}.{name}" for folder, names in found.items() for name in names]
    raise AssertionError("setup.py has no COMPILED")


def classes() -> dict[str, ast.ClassDef]:
    """Their classes; no two have one name."""
    found: dict[str, ast.ClassDef] = {}
    for module in compiled():
        path = ROOT / "services" / Path(*module.split(".")).with_suffix(".py")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert found.setdefault(f"{module}.{node.name}", node) is node
    return found


def test_all_are_compiled_or_none() -> None:
    kinds = {Path(str(importlib.import_module(name).__file__)).suffix for name in compiled()}
    assert len(kinds) == 1, "some are compiled and some are not"


def test_no_class_declares_an_attribute_of_its_base_again() -> None:
    """The garbage collector would count what it refers to twice, and free it while it is in use."""
    known = {name.rpartition(".")[2]: node for name, node in classes().items()}
    for name, node in known.items():
        inherited: set[str] = set()
        bases = list(node.bases)
        while bases:
            base = known.get(ast.unparse(bases.pop()))
            if base is not None:
                inherited |= _attributes(base, declared=False)
                bases += base.bases
        assert not inherited & _attributes(node, declared=True), name


def test_no_dataclass_is_to_have_slots() -> None:
    """It would be made a second time, without what was compiled; compiled classes have slots anyway."""
    for name, node in classes().items():
        assert not any("slots" in ast.unparse(decorator) for decorator in node.decorator_list), name


def _attributes(node: ast.ClassDef, *, declared: bool) -> set[str]:
    """declared: those with a type only."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            found.add(ast.unparse(each.target).removeprefix("self."))
        elif isinstance(each, ast.Assign) and not declared:
            found |= {ast.unparse(target).removeprefix("self.") for target in each.targets}
    return found
