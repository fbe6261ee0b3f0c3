"""A method in a package of one's own: the example of CONTRIBUTING.md, installed as its entry point says."""

import re
import sys

import pytest

from fairseq_deep.cli import main
from fairseq_deep.core.aggregators import AGGREGATORS, Aggregator
from fairseq_deep.core.fields import Option
from fairseq_deep.core.registry import PLUGINS, UsageError, load_plugins
from fairseq_deep.plugin.models.hydra import known_flags
from fairseq_deep.runtime.packaged.config import model_settings
from fairseq_deep.tools import doctor
from tests.helpers.commands import BIN, WITHOUT_FAIRSEQ, run, train_command
from tests.helpers.paths import ROOT


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(code): a package with the entry point of the page and this module, as pip writes it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    text = text.replace("mine", "page").replace("Mine", "Page")  # the package may have the example
    entry = re.search(r'"(fairseq_deep.plugins)"\]\n(my-methods = )"(page)"', text)
    monkeypatch.setattr(AGGREGATORS, "_entries", dict(AGGREGATORS._entries))
    monkeypatch.delitem(sys.modules, "page", raising=False)

    def install(code=""):
        code = code or re.search(r"```python\n(.*?)```", text, re.S)[1]
        info = tmp_path / "site" / "my_methods-1.0.dist-info"
        info.mkdir(parents=True)
        (info.parent / "page.py").write_text(code)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]}{entry[3]}\n")
        monkeypatch.syspath_prepend(info.parent)
        monkeypatch.setenv("PYTHONPATH", str(info.parent))
        load_plugins()

    yield install
    sys.modules.pop("page", None)
    PLUGINS.clear()


def test_all_commands_know_a_method_of_an_installed_package(install, small, tmp_path, capsys):
    assert "page_weight" not in {*model_settings(), *known_flags()}  # a process may ask before the method is there
    install()
    assert "page_weight" in model_settings() and "page_weight" in known_flags()
    flags = ("--layer-agg", "page", "--page-weight", "0.3", "--max-update", "1")
    program, *words = train_command(small, tmp_path / "save", *flags, arch="transformer_prenorm_2l2l_tiny")
    run(BIN / program, *words)
    checkpoint, package = tmp_path / "save/checkpoint_last.pt", tmp_path / "package"
    line = tmp_path / "line"
    line.write_text("1 2 3\n")
    for words in (
        ["package", checkpoint, "--data", small, "--output", package, "--tokenizer", "none"],
        ["check", checkpoint], ["check", package], ["flags", "page"], ["doctor"],
        ["average", "--inputs", checkpoint, "--output", tmp_path / "mean.pt"],
        ["diagnose", small, "--path", checkpoint],
        ["translate", checkpoint, "--data", small, "--input", line, "--cpu"],
        ["translate", package, "--input", line, "--cpu"],
    ):  # fmt: skip
        assert main([str(word) for word in words]) == 0, words
    told = capsys.readouterr().out
    assert "--page-weight" in told and re.search(r"plugins +ok +page \(my-methods\)", told)
    assert "unusual  cannot build" not in told
    translation = told.splitlines()[-1]
    done = run("fairseq-deep", "translate", package, "--input", line, "--cpu", prepare=WITHOUT_FAIRSEQ)
    assert (done.stdout.strip(), done.stderr) == (translation, "")


def test_a_broken_plugin_is_reported_and_the_rest_works(install, caplog):
    install("raise ValueError('broken')")
    assert "cannot import the plugin page (my-methods): broken; correct or uninstall it" in caplog.text
    check = doctor.Row("plugins", doctor._plugins).run()
    assert (check.state, check.reason) == ("FAIL", "page (my-methods): broken")


TAKEN = "is already a flag of fairseq or of another method; rename"


@pytest.mark.parametrize("name, option, text, said", [
    ("ema", "decay", "x", f"--layer-agg ema: --ema-decay {TAKEN}"),
    ("label", "decay", "x", ""),
    ("label", "smoothing", "x", TAKEN),  # of a criterion
    ("toy", "weight", "x", "--layer-agg toy: its flags are not valid ('weight'); each of the options of Toy must be"),
    ("Toy", "decay", "x", "--layer-agg 'Toy': use lower-case letters, digits and hyphens as a name"),
    ("toy", "decay", "50 % off", "--layer-agg toy: its flags are not valid ("),
])  # fmt: skip
def test_flags_of_a_method_are_checked_when_it_is_registered(monkeypatch, name, option, text, said):
    monkeypatch.setattr(AGGREGATORS, "_entries", dict(AGGREGATORS._entries))

    class Toy(Aggregator):
        options = {option: Option(text)}

        def __init__(self, stack, decay: float = 0.1, smoothing: float = 0.1):
            super().__init__(stack)

    Toy.__qualname__ = "Toy"
    if not said:
        assert AGGREGATORS.register(name)(Toy) is AGGREGATORS.get(name)
        return
    with pytest.raises(UsageError) as error:
        AGGREGATORS.register(name)(Toy)
    assert said in str(error.value) and name not in AGGREGATORS.names()


@pytest.mark.parametrize("other", [float, lambda stack: None], ids=["class", "function"])
def test_what_is_no_method_is_refused(other):
    with pytest.raises(UsageError, match="is not a subclass of the base class of its axis"):
        AGGREGATORS.register("toy")(other)
