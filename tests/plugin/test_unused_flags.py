"""Flags of generation without an effect are rejected, and shards are a partition of the data.

``test_generator.py`` compares the flags of searches with fairseq's search.
"""

import re

import pytest
from fairseq import safe_flags
from fairseq.dataclass.configs import GenerationConfig
from omegaconf import OmegaConf

from tests.helpers.commands import run, train_command
from tests.helpers.paths import PACKAGE

REFUSED = {
    **{name: "has no effect with --task translation" for name in safe_flags.OTHER_TASKS},
    **{name: f"requires --{other.replace('_', '-')}" for name, other in safe_flags.REQUIRED["generation"].items()},
}
VALUES = {"decoding_format": "vote", "eos_token": "a", "retain_dropout_modules": ["a"]}


@pytest.mark.parametrize("name", REFUSED)
def test_flags_without_effect_are_rejected(name):
    usual = vars(GenerationConfig())
    flags = {**usual, name: VALUES[name] if usual[name] is None else usual[name] + 2}
    cfg = OmegaConf.create({"generation": flags, "common": {"amp": False}, "task": {"_name": "translation"}})
    with pytest.raises(safe_flags.FlagError, match=f"^--{name.replace('_', '-')} {REFUSED[name]}"):
        safe_flags.check_generation(cfg)


def test_shards_are_a_partition(small, tmp_path):
    """Of four batches, five shards: the last is empty."""
    run(*train_command(small, tmp_path, "--max-update", "2"))
    usual = ("--path", tmp_path / "checkpoint_last.pt", "--user-dir", PACKAGE, "--cpu", "--batch-size", "2",
             "--required-batch-size-multiple", "1")  # fmt: skip
    shards = [(), *(("--num-shards", "5", "--shard-id", str(shard)) for shard in range(5))]
    whole, *parts = (sum(map(int, re.findall(r"\| wpb (\d+)", run("fairseq-validate", small, *usual, *flags).text)))
                     for flags in shards)  # fmt: skip
    assert parts[4] == 0 and all(parts[:4]) and sum(parts) == whole
    generate = ("fairseq-generate", small, *usual, "--gen-subset", "valid", "--beam", "1", "--max-len-b", "9")
    whole, *parts = (re.findall(r"(?m)^H-.*", run(*generate, *flags).stdout) for flags in shards)
    assert parts[4] == [] and all(parts[:4]) and sorted(sum(parts, [])) == sorted(whole)
