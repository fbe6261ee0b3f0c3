"""The command itself, and its sub-commands path and archs."""

import argparse
import errno
import json
import os
import subprocess
import sys

import pytest

import fairseq_deep
from fairseq_deep.core.aggregators import AGGREGATORS
from fairseq_deep.plugin import compat
from fairseq_deep.tools import (
    UsageError,
    archs,
    check_output_path,
    flags,
    format_table,
    main,
    replacing,
    write_text,
)
from fairseq_deep.tools.main import COMMANDS
from tests.helpers.commands import run
from tests.helpers.forkserver import server


def call(*arguments, stdin=None):
    """Run the real command in a process of its own."""
    command = [sys.executable, "-m", "fairseq_deep", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=300)


def test_path_prints_the_folder_and_nothing_else():
    result = call("path")
    assert (result.returncode, result.stdout) == (0, os.path.abspath(fairseq_deep.__path__[0]) + "\n")


def test_every_command_is_in_the_help_with_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for module in COMMANDS:
        assert main.name_of(module) in text
        assert module.__doc__.splitlines()[0] in text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"fairseq_deep {fairseq_deep.__version__}\n")


def test_no_command_prints_the_help_and_fails(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and "average" in captured.err


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["avrage"], "fairseq-deep: argument COMMAND: invalid choice: 'avrage'"),
        (["archs", "--jsn"], "fairseq-deep archs: unrecognised arguments: --jsn"),
        (["score", "--sys"], "fairseq-deep score: argument --sys: expected at least one argument"),
        (["average", "--last", "0", "--dir", ".", "--output", "x"], "fairseq-deep average: argument --last: must be"),
        (["average", "--last", "two", "--dir", ".", "--output", "x"], "fairseq-deep average: argument --last: must be"),
        (["average", "--output", "x"], "fairseq-deep average: one of the arguments --inputs"),
    ],
)
def test_wrong_arguments_take_one_line_and_exit_code_2(arguments, start, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert captured.err.startswith(start) and captured.err.count("\n") == 1


def test_user_error_becomes_one_line(monkeypatch, capsys):
    def run(args):
        raise UsageError("first\nsecond")

    monkeypatch.setattr("fairseq_deep.tools.path.run", run)
    assert main.main(["path"]) == 2
    assert capsys.readouterr().err == "fairseq-deep path: first second\n"


def test_an_error_of_the_system_does_not_blame_standard_output(monkeypatch, capsys):
    def run(args):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("fairseq_deep.tools.path.run", run)
    assert main.main(["path"]) == 2
    assert capsys.readouterr().err == "fairseq-deep path: Cannot allocate memory\n"


def test_interrupt_is_one_line(monkeypatch, capsys):
    def run(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fairseq_deep.tools.path.run", run)
    assert main.main(["path"]) == 130
    assert capsys.readouterr().err == "fairseq-deep path: interrupted\n"


def test_table_is_aligned():
    assert format_table([("a", "10", "x"), ("bbb", "2", "")], right=(1,)) == "a    10  x\nbbb   2"


def test_failed_writing_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "out"
    target.write_text("old")
    with pytest.raises(ValueError, match="midway"), replacing(str(target)) as temporary:
        with open(temporary, "w") as file:
            file.write("half")
        raise ValueError("midway")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["out"]
    write_text(str(target), "new\n")
    assert target.read_bytes() == b"new\n" and os.listdir(tmp_path) == ["out"]


def test_output_path_is_checked_beforehand(tmp_path):
    check_output_path(str(tmp_path / "new"))
    with pytest.raises(UsageError, match="does not exist"):
        check_output_path(str(tmp_path / "missing" / "new"))
    with pytest.raises(UsageError, match="not a regular file"):
        check_output_path(str(tmp_path))


def test_archs_selects_by_wildcard_in_natural_order():
    known = ["t_dlcl_30l", "t_dlcl_6l", "t_post_6l", "t_dlcl_16l"]
    for pattern in ("t_dlcl*", "dlcl"):
        assert archs.select_names(known, pattern) == ["t_dlcl_6l", "t_dlcl_16l", "t_dlcl_30l"]
    assert archs.select_names([*known, "t"], "t") == ["t"]
    with pytest.raises(UsageError, match="no architecture matches 't_dlcl_31l'; similar: t_dlcl_30l"):
        archs.select_names(known, "t_dlcl_31l")
    with pytest.raises(UsageError, match="lists all"):
        archs.select_names(known, "zzz")


def test_archs_table_of_a_known_row():
    lines = run("fairseq-deep", "archs", "transformer_dlcl_30l").stdout.splitlines()
    assert lines[0].split() == "name norm depth size parameters paper's BLEU in".split()
    assert lines[1].split() == "transformer_dlcl_30l pre 30/6 base 137,264,114 29.3 W19".split()
    assert len(lines) == 3


@pytest.mark.parametrize("command, width", [("archs", 100), ("flags", 100)])
def test_a_list_fits_a_terminal(command, width, monkeypatch, capsys):
    """And the list of architectures builds none of them."""
    from fairseq_deep.plugin import architectures

    monkeypatch.setattr(architectures, "build_architecture", None)
    assert main.main([command]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_archs_lists_twins(capsys):
    assert main.main(["archs", "deep_transformer_iwslt"]) == 0
    assert capsys.readouterr().out == "deep_transformer_iwslt_de_en: as transformer_iwslt_de_en, with our flags\n"


def test_archs_json_has_every_row_with_its_size(monkeypatch, capsys):
    from fairseq_deep.plugin import architectures

    monkeypatch.setattr(architectures, "stored_count", lambda name: len(name))
    assert main.main(["archs", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    twins = [record for record in records if "twin_of" in record]
    assert {each["name"]: each["twin_of"] for each in twins} == architectures.TWINS
    records = records[: -len(twins)]
    assert [record["name"] for record in records] == sorted(fairseq_deep.list_archs(), key=archs.natural_key)
    for record in records:
        assert record["parameters"] == len(record["name"])
        assert record["norm"] in ("pre", "post", "-") and record["encoder_layers"] >= 1
    by_name = {record["name"]: record for record in records}
    assert by_name["transformer_dlcl_30l"]["bleu"] == "29.3"
    for name, family, origin in (
        ("prenorm_6l", "pre-norm", "Wang 2019"),
        ("ds_matt_6l", "ds+merged", "Zhang 2019"),
        ("transparent_16l", "transparent", "Bapna 2018"),
        ("denseformer_20l", "dlcl", "Pagliardini 2024"),
    ):
        record = by_name[f"transformer_{name}"]
        assert (record["family"], record["origin"]) == (family, origin)
    assert by_name["transformer_dlcl_6l_iwslt"]["bleu"] is None


def test_archs_verbose_names_what_the_architecture_function_fills_in(capsys):
    assert main.main(["archs", "transformer_lstm_6l", "--verbose"]) == 0
    presets = capsys.readouterr().out.partition("transformer_lstm_6l: lstm, Xu 2024; presets\n")[2]
    shown = dict(line.split() for line in presets.splitlines())
    assert shown["--layer-agg"] == "lstm" and shown["--encoder-layers"] == "6" and shown["--dropout"] == "0.1"
    assert shown["--lstm-no-attn-residual"] == "False"
    assert shown["--encoder-ffn-embed-dim"] == "0"  # the aggregator's, not the row's 2048


def test_presets_rebuild_every_architecture_from_the_bare_model():
    from fairseq.models import ARCH_CONFIG_REGISTRY

    from fairseq_deep.plugin.architectures import resolved_presets

    for name in fairseq_deep.list_archs("*_6l*"):
        row, bare = (argparse.Namespace(**flags) for flags in ({}, resolved_presets(name)))
        ARCH_CONFIG_REGISTRY[name](row)
        ARCH_CONFIG_REGISTRY["deep_transformer"](bare)
        assert vars(bare) == vars(row), name


def test_list_archs_takes_a_pattern():
    names = fairseq_deep.list_archs()
    assert fairseq_deep.list_archs("*dlcl_*") == [name for name in names if "dlcl_" in name] != []
    assert fairseq_deep.list_archs("no such") == []


def test_flags_lists_each_of_our_flags_once(capsys):
    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
    from fairseq_deep.tools import flags
    from fairseq_deep.tools.export import own_flags

    assert main.main(["flags", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    actions = flags.actions(DeepTransformerModel.add_args)
    ours = [record["flag"] for record in records if record["axis"] != "task"]
    assert sorted(ours) == sorted(max(actions[dest].option_strings, key=len) for dest in own_flags())
    by_flag = {record["flag"]: record for record in records}
    axis, window = by_flag["--layer-agg"], by_flag["--dlcl-window"]
    assert axis["default"] == "residual" and {"dlcl", "lstm"} <= {*axis["choices"]}
    found = [window[name] for name in ("axis", "methods", "type", "default")]
    assert found == ["--layer-agg", ["dlcl"], "int", None]
    assert by_flag["--dlcl-init"]["default"] == "avg" and by_flag["--decode-precision"]["default"] == "fp32"
    assert by_flag["--encoder-residual"]["axis"] == "--residual" != by_flag["--value-residual"]["axis"]
    assert all(record["help"] for record in records)


@pytest.mark.parametrize(
    ("name", "found"), [("dlcl", "--dlcl-init"), ("--layer-agg", "--dlcl-init"), ("task", "--gnmt-lenpen")]
)
def test_flags_of_a_method_or_an_axis(name, found, capsys):
    assert main.main(["flags", "--", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("--")]
    assert found in flags and lines[-1] == f"{len(flags)} flags"


def test_names_have_hyphens_or_underscores(monkeypatch):
    monkeypatch.setattr(AGGREGATORS, "names", lambda: ["my_method", "hyper-connections"])
    records = [{"axis": "", "methods": [name]} for name in AGGREGATORS.names()]
    for name in ("my_method", "my-method", "hyper_connections"):
        [found] = flags._select(records, name)
        assert found["methods"][0].replace("_", "-") == name.replace("_", "-")


def test_flags_of_an_unknown_method_names_the_nearest(capsys):
    assert main.main(["flags", "dclc"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fairseq-deep flags: METHOD: unknown method or axis (dclc) (did you mean dlcl?)")
    assert main.main(["flags", "modern"]) == 2
    assert "(modern); for architectures, run: fairseq-deep archs modern;" in capsys.readouterr().err


def test_archs_without_fairseq_names_the_doctor(monkeypatch, capsys):
    monkeypatch.setattr(compat, "FAIRSEQ_ERROR", ImportError("no fairseq here"))
    assert main.main(["archs"]) == 2
    error = capsys.readouterr().err
    assert "no fairseq here" in error and "fairseq-deep doctor" in error and error.count("\n") == 1


def test_archs_into_a_closed_pipe_is_silent():
    command = ["bash", "-c", server().stand_in("fairseq-deep"), "bash", "archs", "*tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 141 and "Traceback" not in error and "BrokenPipe" not in error


def test_path_and_doctor_run_without_fairseq(monkeypatch, tmp_path):
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq" / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert call("path").stdout == os.path.abspath(fairseq_deep.__path__[0]) + "\n"
    result = call("doctor")
    assert result.returncode == 1 and "broken on purpose" in result.stdout and "Traceback" not in result.stderr
    assert "Training does not work here: fairseq" in result.stdout
