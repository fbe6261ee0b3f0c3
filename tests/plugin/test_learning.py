"""A small model really learns: it reverses digit strings that it has never seen."""

import random
import re

import pytest

from tests.helpers.commands import EXACT, PACKAGE, binarise, run, train_command, write_pairs


@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.nightly)])
def test_reversal_is_learned(tmp_path, seed):
    """Through the command line, at night with any seed; ``test_source.py`` has every method."""
    updates = 200 if seed else 400
    seed = seed or random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    seen = {*write_pairs(tmp_path / "train", 2000, rng, longest=5)}
    write_pairs(tmp_path / "valid", 100, rng, leave_out=seen, longest=5)
    data = binarise(tmp_path, ("train", "valid"))
    flags = ["--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4",
             "--decoder-attention-heads", "4", *EXACT, "--label-smoothing", "0", "--adam-betas", "(0.9, 0.98)",
             "--lr", "3e-3", "--warmup-updates", "50", "--max-tokens", "1000", "--max-update", updates, "--seed", seed,
             "--log-interval", "100"]  # fmt: skip
    run(*train_command(data, tmp_path / "model", *flags, arch="transformer_dlcl_postnorm_2l2l_tiny"))
    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--gen-subset", "valid", "--beam", "1", "--cpu",
               "--path", tmp_path / "model/checkpoint_best.pt")  # fmt: skip
    pairs = {kind: dict(re.findall(rf"^{kind}-(\d+)\t(?:.*\t)?(.*)$", done.stdout, re.M)) for kind in "TH"}
    assert len(pairs["T"]) == 100
    assert sum(pairs["H"][key] == pairs["T"][key] for key in pairs["T"]) >= 80
