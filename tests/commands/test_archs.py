"""fairseq-deep archs and flags: what they list, by which names, and in which form."""

import argparse
import json

import pytest

import fairseq_deep
from fairseq_deep.plugin import architectures
from fairseq_deep.plugin.architectures import resolved_presets
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from fairseq_deep.tools import archs, flags
from fairseq_deep.tools.fairseq_format import own_flags


def test_archs_selects_by_wildcard_in_natural_order():
    known = ["t_dlcl_30l", "t_dlcl_6l", "t_post_6l", "t_dlcl_16l"]
    for pattern in ("t_dlcl*", "dlcl"):
        assert archs.select_names(known, pattern) == ["t_dlcl_6l", "t_dlcl_16l", "t_dlcl_30l"]
    assert archs.select_names([*known, "t"], "t") == ["t"]
    names = fairseq_deep.list_archs()
    assert fairseq_deep.list_archs("*dlcl_*") == [name for name in names if "dlcl_" in name] != []
    assert fairseq_deep.list_archs("no such") == []


def test_the_list_builds_no_model_and_has_twins(monkeypatch, command):
    """Its rows are in tests/snapshots."""
    monkeypatch.setattr(architectures, "build_architecture", None)
    assert command("archs")[0] == 0
    told = "deep_transformer_iwslt_de_en: as transformer_iwslt_de_en, with our flags\n"
    assert command("archs", "deep_transformer_iwslt") == (0, told, "")


def test_json_has_every_architecture_with_its_size(monkeypatch, command):
    """Names, families and papers are in tests/snapshots."""
    monkeypatch.setattr(architectures, "stored_count", lambda name: len(name))
    records = json.loads(command("archs", "--json")[1])
    twins = [record for record in records if "twin_of" in record]
    assert {each["name"]: each["twin_of"] for each in twins} == architectures.TWINS
    records = records[: -len(twins)]
    assert [record["name"] for record in records] == sorted(fairseq_deep.list_archs(), key=archs.natural_key)
    for record in records:
        assert record["parameters"] == len(record["name"])
        assert record["norm"] in ("pre", "post", "-") and record["encoder_layers"] >= 1


def test_presets_rebuild_every_architecture_from_the_bare_model():
    from fairseq.models import ARCH_CONFIG_REGISTRY

    for name in fairseq_deep.list_archs("*_6l*"):
        row, bare = (argparse.Namespace(**given) for given in ({}, resolved_presets(name)))
        ARCH_CONFIG_REGISTRY[name](row)
        ARCH_CONFIG_REGISTRY["deep_transformer"](bare)
        assert vars(bare) == vars(row), name


def test_each_of_our_flags_is_listed_once(command):
    """With axis, methods, type and default of tests/snapshots."""
    records = json.loads(command("flags", "--json")[1])
    actions = flags.actions(DeepTransformerModel.add_args)
    ours = [record["flag"] for record in records if record["axis"] != "task"]
    assert sorted(ours) == sorted(max(actions[dest].option_strings, key=len) for dest in own_flags())
    assert all(record["help"] for record in records)


@pytest.mark.parametrize(
    "name, found", [("dlcl", "--dlcl-init"), ("--layer-agg", "--dlcl-init"), ("task", "--gnmt-lenpen")]
)
def test_flags_of_a_method_or_an_axis(name, found, command):
    lines = command("flags", "--", name)[1].splitlines()
    named = [line.split()[0] for line in lines if line.startswith("--")]
    assert found in named and lines[-1] == f"{len(named)} flags"
