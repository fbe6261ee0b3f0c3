"""Each flag of generation has an effect on translations, is rejected, or is listed with the reason."""

import argparse
import contextlib
import copy
import dataclasses
import io
import re

import pytest
from fairseq import options
from fairseq.dataclass.configs import CommonConfig, CommonEvalConfig, DatasetConfig, GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf, gen_parser_from_dataclass
from fairseq.safe_exit import OneLineError
from fairseq.safe_flags import OTHER_TASKS, REQUIRED
from fairseq_cli import generate

from tests.helpers.commands import run, train_command
from tests.helpers.paths import PACKAGE

LONG = ("--min-len", "6", "--lenpen", "4", "--max-len-b", "9", "--batch-size", "4")
# flags, and what is compared with them instead of a call without flags
CHANGES = {
    **dict.fromkeys("""
        --beam 2|--nbest 3|--max-len-a 0.7|--max-len-b 7|--min-len 1 --match-source-len|--unnormalized|--lenpen -2
        --unkpen -50|--sacrebleu|--score-reference|--prefix-size 2|--no-repeat-ngram-size 1|--sampling --nbest 5
        --temperature 3|--diverse-beam-groups 5|--diversity-rate 3|--print-alignment|--retain-dropout
        --gen-subset train|--num-shards 2|--bf16|--quiet
    """.strip().replace("\n        ", "|").split("|"), ""),
    "--lenpen -2 --min-len 8": "--lenpen -2",
    "--min-len 1 --match-source-len": "--min-len 1",
    "--sampling --sampling-topk 2 --nbest 5": "--sampling --nbest 5",
    "--sampling --sampling-topp 0.4 --nbest 5": "--sampling --nbest 5",
    "--diverse-beam-groups 5 --nbest 5 --diverse-beam-strength 9": "--diverse-beam-groups 5 --nbest 5",
    "--retain-dropout --retain-dropout-modules TransformerEncoder": "--retain-dropout",
}  # fmt: skip
NO_CHANGE = {
    "no_early_stop": "fairseq keeps the name for old scripts; there is no early stop",
    "no_beamable_mm": "fairseq keeps the name for old scripts; there is no BeamableMM",
    "no_seed_provided": "fairseq sets it; it only leaves the seed unset",
    "replace_unk": "requires --dataset-impl raw",
    "constraints": "only fairseq-interactive reads constraints",
    "lm_path": "requires a language model",
}
REFUSED = {
    **{name: "has no effect with --task translation" for name in OTHER_TASKS},
    **{name: f"requires --{other.replace('_', '-')}" for name, other in REQUIRED["generation"].items()},
}
VALUES = {"decoding_format": ["vote"], "eos_token": ["a"], "retain_dropout_modules": ["a"]}


@pytest.fixture(scope="module")
def translate(data, tmp_path_factory):
    """translate(flag, ...): the lines that fairseq-generate prints on the translations."""
    folder = tmp_path_factory.mktemp("model")
    run(*train_command(data, folder, "--max-update", "30", "--dropout", "0.3"))
    command = [data, "--path", folder / "checkpoint_last.pt", "--cpu", "--num-workers", "0", *LONG]

    args = options.parse_args_and_arch(options.get_generation_parser(), list(map(str, command)))
    usual, found = convert_namespace_to_omegaconf(args), {}  # takes seconds, so it is done once
    parser = argparse.ArgumentParser()
    for part in (GenerationConfig(), CommonConfig(), CommonEvalConfig(), DatasetConfig()):
        gen_parser_from_dataclass(parser, part)

    def translate(*flags):
        if flags not in found:
            args, cfg = parser.parse_args(list(map(str, command[1:] + list(flags)))), copy.deepcopy(usual)
            for part in (cfg.generation, cfg.common, cfg.common_eval, cfg.dataset):
                part.update({name: value for name, value in vars(args).items() if name in part})
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                generate.main(cfg)
            found[flags] = re.findall(r"^(?:[HPA]-\d+\t|Generate).*", printed.getvalue(), re.MULTILINE)
        return found[flags]

    return translate


def test_every_flag_of_generation_is_listed():
    changes = {flag.lstrip("-").replace("-", "_") for line in CHANGES for flag in re.findall(r"--[a-z-]+", line)}
    assert {field.name for field in dataclasses.fields(GenerationConfig)} - {"_name", *NO_CHANGE, *REFUSED} <= changes


@pytest.mark.parametrize("flags", CHANGES)
def test_flags_change_translations(flags, translate):
    assert translate(*flags.split()) != translate(*CHANGES[flags].split())


@pytest.mark.parametrize("name", REFUSED)
def test_flags_without_effect_are_rejected(name, translate):
    value = getattr(GenerationConfig(), name)
    more = VALUES[name] if value is None else [] if isinstance(value, bool) else [value + 2]
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(OneLineError, match=f"^{flag} {REFUSED[name]}"):
        translate(flag, *more)


def test_shards_are_a_partition(translate):
    parts = [translate("--num-shards", 3, "--shard-id", shard)[:-1] for shard in range(3)]
    assert all(parts) and sorted(sum(parts, [])) == sorted(translate()[:-1])
    assert len(translate("--num-shards", 99, "--shard-id", 98)) <= 1  # more shards than batches
    with pytest.raises(OneLineError, match="^--shard-id 3 must be 0 or more, and less than --num-shards$"):
        translate("--num-shards", 3, "--shard-id", 3)


def test_shards_of_validation_are_a_partition(small, tmp_path):
    run(*train_command(small, tmp_path, "--max-update", "2"))
    usual = ("fairseq-validate", small, "--path", tmp_path / "checkpoint_last.pt", "--user-dir", PACKAGE, "--cpu",
             "--batch-size", "2", "--required-batch-size-multiple", "1")  # fmt: skip

    def tokens(*flags):
        return sum(map(int, re.findall(r"\| wpb (\d+)", run(*usual, *flags).text)))

    parts = [tokens("--num-shards", "5", "--shard-id", str(shard)) for shard in range(5)]  # of 4 batches
    assert parts[4] == 0 and all(parts[:4]) and sum(parts) == tokens()
