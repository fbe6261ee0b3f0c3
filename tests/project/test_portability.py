"""docs/portability.md: its table is the record, and verdicts are those of the commands.

A release measures new methods: ``python benchmarks/portability.py --new --write``.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import portability  # noqa: E402

RECORD = json.loads(portability.RECORD.read_text(encoding="utf-8"))


def test_the_table_is_the_record():
    assert {*RECORD["systems"]} <= {*portability.systems()}
    page = portability.PAGE.read_text(encoding="utf-8")
    shown = page.split(portability.BEGIN)[1].split(portability.END)[0]
    assert shown.strip() == portability.table(RECORD)


def test_a_missing_package_is_an_error_and_not_a_no(monkeypatch, capsys):
    monkeypatch.setattr(portability.onnx, "missing", lambda *packages: ["onnx"])
    with pytest.raises(SystemExit) as ended:
        portability.main(["--only", "dlcl"])
    assert ended.value.code == 2 and "requires onnx; run: pip install onnx" in capsys.readouterr().err


def test_what_is_computed_is_near():
    """A form either says why not, or gives the same scores."""
    for name, found in RECORD["systems"].items():
        assert {*found} == {*portability.HEADS} - {"method"}, name
        for target, each in found.items():
            assert each.get("no") or each["difference"] < 5e-5, (name, target)


@pytest.mark.parametrize("name", ["`--layer-agg dlcl`", "`--decoder-attn merged`", "`--layer-agg hyper-connections`"])
def test_what_is_refused_is_refused_by_the_command(name, tmp_path):
    architecture, flags = portability.systems()[name]
    portability.make_model(tmp_path, architecture, flags)
    for target, form in (("class", "huggingface"), ("ctranslate2", "ctranslate2")):
        assert portability.of_export(tmp_path, form)["no"] == RECORD["systems"][name][target]["no"]
