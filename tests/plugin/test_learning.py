"""A small model really learns: it reverses digit strings that it has never seen."""

import random
import re

from tests.helpers.commands import PACKAGE, binarise, run, train_command, write_pairs


def test_reversal_is_learned_whatever_the_seed(tmp_path):
    """Through the command line; `test_source.py` has every method."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    seen = set(write_pairs(tmp_path / "train", 4000, rng, longest=6))
    write_pairs(tmp_path / "valid", 100, rng, leave_out=seen, longest=6)
    data = binarise(tmp_path, ("train", "valid"))
    flags = ["--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4"]
    flags += ["--decoder-attention-heads", "4", "--dropout", "0", "--attention-dropout", "0"]
    flags += ["--activation-dropout", "0", "--criterion", "cross_entropy", "--adam-betas", "(0.9, 0.98)"]
    flags += ["--lr", "3e-3", "--warmup-updates", "100"]
    flags += ["--max-tokens", "1000", "--max-update", "400", "--seed", seed, "--log-interval", "100"]
    flags += ["--validate-interval", "3", "--save-interval", "3"]
    command = train_command(data, tmp_path / "model", *flags, arch="transformer_dlcl_postnorm_2l2l_tiny")
    del command[command.index("--label-smoothing") : command.index("--label-smoothing") + 2]
    log = run(*command).stdout
    assert min(float(value) for value in re.findall(r'"valid_ppl": "([0-9.]+)"', log)) <= 1.1

    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--gen-subset", "valid", "--beam", "1", "--cpu",
               "--path", tmp_path / "model" / "checkpoint_best.pt")  # fmt: skip
    pairs = {kind: dict(re.findall(rf"^{kind}-(\d+)\t(?:.*\t)?(.*)$", done.stdout, re.M)) for kind in "TH"}
    assert len(pairs["T"]) == 100
    assert sum(pairs["H"][key] == pairs["T"][key] for key in pairs["T"]) >= 80
