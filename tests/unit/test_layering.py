"""Imports go one way, and methods know torch but not fairseq: design.md, rules 2 and 4."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fairseq_deep"
ORDER = [
    ["stack", "exact", "compat", "papers", "errors", "records"],
    ["registry", "dropout"],
    ["aggregators", "attention", "residuals", "decoding"],
    ["memories", "inits"],
    ["layers", "diagnostics"],
    ["training"],
    ["models"],
    ["row"],
    ["architectures", "generator"],
    ["task", "packaged"],
    ["translation"],
    ["tools"],
]
LEVELS = {part: level for level, parts in enumerate(ORDER) for part in parts}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Absolute names of the modules that *path* imports anywhere."""
    inside = ["fairseq_deep", *path.relative_to(PACKAGE).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = inside[: len(inside) - node.level] if node.level else []
            module = ".".join(package + ([node.module] if node.module else []))
            yield from ([module] if node.module else [f"{module}.{alias.name}" for alias in node.names])


def level(module):
    parts = module.split(".")
    return LEVELS[parts[1]] if parts[0] == "fairseq_deep" and len(parts) > 1 else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_from_lower_levels_only(path):
    part = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if part not in LEVELS:  # __init__.py and __main__.py of the package stand above all
        assert part in ("__init__", "__main__")
        return
    for module in imports(path):
        other = level(module)
        same_part = module.split(".")[:2] == ["fairseq_deep", part]
        assert other is None or same_part or other < LEVELS[part], f"{path.name} imports {module}"


@pytest.mark.parametrize(
    "folder", ["aggregators", "attention", "decoding", "diagnostics", "inits", "memories", "residuals"]
)
def test_methods_do_not_know_fairseq(folder):
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert files
    for path in files:
        assert not [name for name in imports(path) if name.split(".")[0] == "fairseq"], path
