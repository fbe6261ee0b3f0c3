"""Supervised alignments on the real command line: preprocess, train, translate with alignments."""

import json
import random

from tests.helpers.commands import PACKAGE, binarise, run, train_command, write_pairs


def test_a_run_learns_the_alignments_that_it_is_given(tmp_path):
    """The target is the reversed source, so the last source word is aligned to the first target word."""
    rng = random.Random(5)
    for split, count in (("train", 300), ("valid", 20), ("test", 10)):
        sources = write_pairs(tmp_path / split, count, rng)
        links = [[f"{len(s) - 1 - t}-{t}" for t in range(len(s))] for s in (source.split() for source in sources)]
        (tmp_path / f"{split}.align").write_text("".join(" ".join(line) + "\n" for line in links))
    data = binarise(tmp_path, ("train", "valid", "test"), "--align-suffix", "align")
    save = tmp_path / "checkpoints"
    flags = ["--load-alignments", "--criterion", "label_smoothed_cross_entropy_with_alignment", "--alignment-layer", 1,
             "--alignment-lambda", 1.0, "--full-context-alignment", "--lr", "1e-2", "--max-epoch", 14]  # fmt: skip
    done = run(*train_command(data, save, *flags, arch="transformer_dlcl_2l2l_tiny"))
    lines = (done.stdout + done.stderr).splitlines()
    records = [json.loads(line[line.index("{") :]) for line in lines if '"valid_loss"' in line]
    losses = [float(record["valid_alignment_loss"]) for record in records]
    assert losses[-1] < 0.8 * losses[0]
    done = run("fairseq-generate", data, "--user-dir", PACKAGE, "--path", save / "checkpoint_last.pt", "--cpu",
               "--print-alignment", "--beam", 2)  # fmt: skip
    assert sum(line.startswith("A-") for line in done.stdout.splitlines()) == 10
