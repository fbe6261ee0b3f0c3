"""What may import what (docs/design.md): core knows torch only, no part knows a later one, no test another test."""

import ast
import subprocess
import sys

import pytest

from tests.helpers.paths import ALONE, PACKAGE, ROOT

PARTS = ["errors", "moved", "core", "runtime", "huggingface", "serving", "plugin", "tools", "recipes"]
ABOVE = ["fairseq_deep.cli"]  # lists the commands of all parts
"""In this order: each part may import those before it."""
CORE = [
    ["fields"],
    ["stack", "keep_fp32", "compat", "user_cache", "xavier"],
    ["registry", "dropout", "positions", "norms"],
    ["native", "gpu"],
    ["aggregators", "attention", "residuals", "decoding"],
    ["memories", "inits", "search"],
    ["layers", "diagnostics", "alignment", "checkpoints", "folding"],
    ["layer_options", "languages", "stream_folding"],
    ["checks"],
    ["description"],
    ["transformer_stack", "decoding_state"],
    ["encoder", "decoder"],
    ["transformer", "torch_export"],
]
LEVELS = {part: level for level, parts in enumerate(CORE) for part in parts}
TORCH_ONLY = {"torch", "numpy", "triton"}
RUNTIME = {*TORCH_ONLY, "filelock", "safetensors", "sacremoses", "jieba", "subword_nmt", "sentencepiece", "ctranslate2",
           "transformers"}
ALLOWED = {
    "core": TORCH_ONLY,
    "runtime": RUNTIME,
    "huggingface": {*RUNTIME, "huggingface_hub"},
    "serving": {*RUNTIME, "prometheus_client", "starlette", "uvicorn"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return ".".join(["fairseq_deep", *path.relative_to(PACKAGE).with_suffix("").parts])


MODULES = {name_of(path).removesuffix(".__init__") for path in FILES}


def imports(path):
    """Absolute names of the modules that *path* imports anywhere."""
    inside = name_of(path).split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = inside[: len(inside) - node.level] if node.level else []
            module = ".".join(package + ([node.module] if node.module else []))
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else module for name in names)


GRAPH = {name_of(path).removesuffix(".__init__"): set(imports(path)) for path in FILES}


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


def test_packages_of_the_core_import_those_of_lower_levels():
    wrong = []
    for module, names in GRAPH.items():
        own = module.split(".")[2:3] if part_of(module) == "core" else []
        others = [(name, name.split(".")[2]) for name in names if part_of(name) == "core" and name.count(".") > 1]
        wrong += [f"{module} imports {name}" for name, other in others
                  if own and other != own[0] and LEVELS[other] >= LEVELS[own[0]]]  # fmt: skip
    assert wrong == []


def test_no_test_module_is_imported():
    """What tests share is in tests/helpers, tests/reference, tests/golden, and in fixtures of a conftest.py."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    modules = {path.stem for path in files if path.stem.startswith("test_") or path.stem == "conftest"}
    assert len(modules) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = modules & {part for name in names for part in name.split(".")}
            assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"


def test_core_works_where_fairseq_is_missing():
    """Every method is built, trained for a step and searched with, in a process that cannot import fairseq."""
    done = subprocess.run([sys.executable, ALONE, "core"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("every method works\n")


def test_recipes_prepare_text_without_torch():
    """The import of torch takes longer than the preparation of a small text."""
    program = "import sys; sys.modules.update(fairseq=None, torch=None); import fairseq_deep.recipes.driver; "
    program += "from fairseq_deep.recipes.text import corpus, distilled, rebuild, subwords"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
