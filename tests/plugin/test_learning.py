"""A small model really learns: it reverses digit strings that it has never seen, and aligns their digits."""

import random
import re

import pytest

from tests.helpers.commands import EXACT, PACKAGE, binarise, entries, run, train_command, write_pairs


@pytest.mark.parametrize("seed", [1, pytest.param(None, marks=pytest.mark.nightly)])
def test_reversal_is_learned(tmp_path, seed):
    """Through the command line, with supervised alignments, at night with any seed.

    The last source word is aligned to the first target word. ``test_source.py`` has every method.
    """
    updates = 200 if seed else 400
    seed = seed or random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    for split, count in (("train", 2000), ("valid", 100)):
        write_pairs(tmp_path / split, count, rng, longest=5)
        targets = (tmp_path / f"{split}.tgt").read_text().splitlines()
        links = [[f"{len(s) - 1 - t}-{t}" for t in range(len(s))] for s in map(str.split, targets)]
        (tmp_path / f"{split}.align").write_text("".join(" ".join(line) + "\n" for line in links))
    data = binarise(tmp_path, ("train", "valid"), "--align-suffix", "align")
    flags = ["--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4",
             "--decoder-attention-heads", "4", *EXACT, "--label-smoothing", "0", "--adam-betas", "(0.9, 0.98)",
             "--lr", "3e-3", "--warmup-updates", "50", "--max-tokens", "1000", "--max-update", updates, "--seed", seed,
             "--no-epoch-checkpoints", "--validate-interval", "2", "--load-alignments", "--alignment-layer", 1,
             "--criterion", "label_smoothed_cross_entropy_with_alignment", "--full-context-alignment",
             "--alignment-lambda", 1.0]  # fmt: skip
    done = run(*train_command(data, tmp_path / "model", *flags, arch="transformer_dlcl_postnorm_2l2l_tiny"))
    first, *_, last = [entry["alignment_loss"] for entry in entries(done, "valid").values()]
    assert last < 0.8 * first
    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--gen-subset", "valid", "--beam", "1", "--cpu",
               "--path", tmp_path / "model/checkpoint_best.pt", "--print-alignment")  # fmt: skip
    pairs = {kind: dict(re.findall(rf"^{kind}-(\d+)\t(?:.*\t)?(.*)$", done.stdout, re.M)) for kind in "THA"}
    assert len(pairs["T"]) == len(pairs["A"]) == 100
    seen = {*(tmp_path / "train.tgt").read_text().splitlines()}
    found = [pairs["H"][key] == target for key, target in pairs["T"].items() if target not in seen]
    assert sum(found) >= 0.8 * len(found) > 40
