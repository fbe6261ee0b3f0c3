"""docs/tools and the command lines of all pages and of ``--help``, compared with the parser of ``fairseq-deep``; links.

``tests/run.sh --docs`` also checks anchors, equations and the site.
"""

import re
import shlex
from importlib import import_module
from itertools import pairwise

import pytest

from fairseq_deep.cli import COMMANDS as MODULES
from fairseq_deep.cli import RAW, make_parser
from fairseq_deep.recipes.commands.recipe import tasks
from fairseq_deep.recipes.compare.options import Compare
from fairseq_deep.recipes.recipe import Recipe
from tests.helpers.docs import PAGES, command_lines
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs/tools"
PARSER, COMMANDS = make_parser()
DRIVERS = {"recipe": Recipe, "compare": Compare}
CURRENT = [page for page in map(str, PAGES) if not page.startswith("benchmarks")]  # the others were run once
EXAMPLES = {name: shlex.split(import_module(f"fairseq_deep.{module}").EXAMPLE) for name, module in MODULES.items()}
LINES = [(page, words[1:]) for page in CURRENT for words in command_lines(page, "fairseq-deep")]
LINES += [("--help", words[1:]) for words in EXAMPLES.values()]
SCRIPTS = ["./run_wmt16_ende.sh", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/run.sh")))]


def test_every_command_is_in_the_index_and_has_an_example():
    text = (FOLDER / "README.md").read_text(encoding="utf-8").partition("## ")[0]
    assert sorted(re.findall(r"(?m)^\| `([a-z]+)` \|", text)) == sorted(COMMANDS)
    assert {*COMMANDS} - {*RAW, "path"} <= {words[0] for page, words in LINES if page != "--help"}


def test_examples_in_help_are_of_their_command():
    assert all(words[:2] == ["fairseq-deep", name] for name, words in EXAMPLES.items())


@pytest.mark.parametrize("page", sorted(path.name for path in FOLDER.glob("*.md")))
def test_tables_of_pages_have_no_unknown_option(page):
    """tests/snapshots/help.txt has all options; the site shows it as a page."""
    known = re.findall(r"--[a-z][\w-]*", (ROOT / "tests/snapshots/help.txt").read_text(encoding="utf-8"))
    tables = re.findall(r"(?m)^\| option \|.*\n((?:\|.*\n)+)", (FOLDER / page).read_text(encoding="utf-8"))
    rows = "".join(tables).splitlines()
    assert {name for row in rows for name in re.findall(r"--[a-z][\w-]*", row.split(" | ")[0])} <= {*known}


@pytest.mark.parametrize("page", sorted({page for page, _ in LINES}))
def test_command_lines_are_accepted(page):
    """The parser accepts every command of the page; a lone ``...`` stands for more."""
    for words in (words for owner, words in LINES if owner == page):
        words = [word for before, word in pairwise(("", *words)) if word != "..." or before.startswith("--")]
        if words[0] in DRIVERS:
            kind, *rest = words
            assert kind != "recipe" or rest[0] in tasks()
            DRIVERS[kind]().parse(rest[kind == "recipe" :])
        else:
            _, unknown = PARSER.parse_known_args(words)
            assert not unknown or words[0] == "diagnose", words


@pytest.mark.parametrize("script", SCRIPTS)
def test_recipe_lines_are_accepted(script):
    """Those of each recipe, on all pages."""
    kind = re.search(r'/start\.sh" (\w+)', (ROOT / script).read_text(encoding="utf-8"))[1]
    lines = [words[1:] for page in CURRENT for words in command_lines(page, script)]
    assert lines
    for words in lines:
        DRIVERS[kind]().parse(words)


def test_links_lead_to_files():
    broken = []
    for page in PAGES:
        text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`(?!\])", "", (ROOT / page).read_text(encoding="utf-8"))
        targets = [it for it in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in it]
        broken += [f"{page}: {it}" for it in targets if not ((ROOT / page).parent / it).exists()]
    assert PAGES and broken == []
