"""The Python code of the pages, as they have it, with a tiny model in the place of the demo's."""

import re
import textwrap

import pytest
import torch

from fairseq_deep.core.stack import Stack
from fairseq_deep.core.transformer import Transformer
from tests.helpers.docs import PAGES
from tests.helpers.paths import ROOT

STARTS = ("import ", "from ")
TESTED_ELSEWHERE = {
    "docs/tools/export-ctranslate2.md": "tests/tools/test_export_ctranslate2.py",
    "docs/tools/export-onnx.md": "benchmarks/portability.py",
    "examples/own_text/tutorial.md": "tests/recipes/test_tutorial.py",
}


def programs(page):
    """The code blocks of a page that start with an import."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    indented = re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", re.sub(r"(?ms)^```.*?^```$", "", text))
    blocks = [textwrap.dedent(block).strip() + "\n" for block in (*fenced, *indented)]
    return [block for block in blocks if block.startswith(STARTS)]


WITH_CODE = [page for page in map(str, PAGES) if programs(page)]


def model():
    stacks = {side: Stack(2, 16, side=side, ffn_dim=32, heads=2) for side in ("encoder", "decoder")}
    return Transformer.build(stacks, 40)


@pytest.fixture
def demo(recipe, package, tmp_path, monkeypatch):
    """A folder with exp/demo and its package."""
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/demo").symlink_to(recipe)
    (tmp_path / "demo_model").symlink_to(package)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in TESTED_ELSEWHERE])
def test_the_code_of_a_page_runs(page, demo, capsys):
    names = {"source": torch.randint(4, 40, (3, 7)), "model": model()} if page == "docs/site/api/search.md" else {}
    for program in programs(page):
        exec(compile(program, page, "exec"), names)
        assert "print(" not in program or capsys.readouterr().out.strip()


def test_other_tests_run_the_rest():
    assert all((ROOT / name).is_file() for name in TESTED_ELSEWHERE.values())
