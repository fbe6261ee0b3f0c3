"""What may import what (docs/design.md): core knows torch only, no part knows a later one."""

import ast
import graphlib
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import PACKAGE, ROOT

PARTS = ["errors", "moved", "core", "runtime", "huggingface", "serving", "plugin", "tools", "recipes"]
ABOVE = ["fairseq_deep.cli"]  # lists the commands of all parts
"""In this order: each part may import those before it."""
TORCH_ONLY = {"torch", "numpy", "triton"}
RUNTIME = {*TORCH_ONLY, "filelock", "safetensors", "sacremoses", "jieba", "subword_nmt", "sentencepiece", "ctranslate2",
           "transformers"}  # fmt: skip
ALLOWED = {
    "core": TORCH_ONLY,
    "runtime": RUNTIME,
    "huggingface": {*RUNTIME, "huggingface_hub"},
    "serving": {*RUNTIME, "prometheus_client", "starlette", "uvicorn"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path):
    """Absolute names of the modules, and of what is in them, that *path* imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from [module, *(f"{module}.{alias.name}" for alias in node.names)]


GRAPH = {name_of(path): set(imports(path)) for path in FILES}


def reached(module):
    """All modules that *module* imports, directly or through modules of this package."""
    found, open_ends = set(), [module]
    while open_ends:
        for name in GRAPH.get(open_ends.pop(), ()):
            if name not in found:
                found.add(name)
                open_ends.append(name)
    return found


def part_of(module):
    return module.split(".")[1] if module.startswith("fairseq_deep.") else None


def test_no_module_imports_a_later_part():
    wrong = []
    for module, names in GRAPH.items():
        part = part_of(module)
        assert part in PARTS or module in ABOVE or part in (None, "__main__"), f"put {module} into PARTS"
        later = PARTS[PARTS.index(part) + 1 :] if part in PARTS else ()
        wrong += [f"{module} imports {name}" for name in names if part_of(name) in later]
    assert wrong == []


@pytest.mark.parametrize("part", ALLOWED)
def test_what_needs_no_training_does_without_fairseq(part):
    known = {*ALLOWED[part], "fairseq_deep", "__future__", *sys.stdlib_module_names}
    modules = [name for name in GRAPH if part_of(name) == part]
    wrong = {f"{module} imports {name}" for module in modules for name in reached(module)
             if name.partition(".")[0] not in known}  # fmt: skip
    assert modules and wrong == set()


def test_packages_of_the_core_import_each_other_in_one_direction():
    graph = {name.removesuffix(".py"): set() for name in os.listdir(PACKAGE / "core")}
    for module, names in GRAPH.items():
        part, _, own = module.removeprefix("fairseq_deep.").partition(".")
        if part == "core" and own:
            parts = {name.split(".")[2] for name in names if name.startswith("fairseq_deep.core.")}
            graph[own.partition(".")[0]] |= parts & graph.keys() - {own.partition(".")[0]}
    assert sum(map(len, graph.values())) > 50
    graphlib.TopologicalSorter(graph).prepare()  # names a circle


def test_recipes_prepare_text_without_torch():
    """The import of torch takes longer than the preparation of a small text."""
    program = "import sys; sys.modules.update(fairseq=None, torch=None); import fairseq_deep.recipes.driver; "
    program += "from fairseq_deep.recipes.text import corpus, distilled, rebuild, subwords"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
