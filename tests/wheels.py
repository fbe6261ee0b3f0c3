"""Whether the installed fairseq and fairseq_deep train and translate, on any system: ``python tests/wheels.py``.

``.github/workflows/wheels.yml`` runs this with the wheels of a release, which need no compiler and no clone. It calls
the commands as a user does, and fairseq's compiled parts: batches, blocks of tokens, and its own BLEU.
"""

import os
import shutil
import subprocess
import sys
import tempfile

CORPUS = os.path.join(os.path.dirname(__file__), "../examples/demo/make_corpus.py")


def run(*command):
    """Run a command of the environment of this interpreter; return its output."""
    program = shutil.which(command[0], path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    if program is None:
        sys.exit(f"wheels: there is no {command[0]}; install fairseq_deep[train] first")
    done = subprocess.run([program, *command[1:]], text=True, encoding="utf-8", errors="replace", capture_output=True)
    if done.returncode:
        sys.exit(f"wheels: {' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    print(f"wheels: {command[0]} works", flush=True)
    return done.stdout


def main():
    """Train a small DLCL on the CPU, translate with it, and score."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        text, data, save = (os.path.join(folder, name) for name in ("text", "data", "checkpoints"))
        run(sys.executable, CORPUS, "--out", text, "--train", "200", "--valid", "20", "--test", "20")
        prefixes = ["--trainpref", os.path.join(text, "train"), "--validpref", os.path.join(text, "valid")]
        run("fairseq-preprocess", "-s", "en", "-t", "de", *prefixes, "--destdir", data)
        plugin = run("fairseq-deep", "path").strip()
        run("fairseq-train", data, "--user-dir", plugin, "--arch", "transformer_dlcl_2l2l_tiny", "--cpu", "--lr",
            "1e-3", "--optimizer", "adam", "--criterion", "label_smoothed_cross_entropy", "--max-tokens", "400",
            "--max-update", "20", "--save-dir", save, "--num-workers", "0", "--no-epoch-checkpoints")  # fmt: skip
        checkpoint = os.path.join(save, "checkpoint_last.pt")
        output = run("fairseq-generate", data, "--user-dir", plugin, "--path", checkpoint, "--gen-subset", "valid",
                     "--cpu", "--num-workers", "0")  # fmt: skip
        assert output.count("\nD-") == 20, output
        source, found = os.path.join(text, "valid.en"), os.path.join(folder, "found.de")
        run("fairseq-deep", "translate", checkpoint, "--data", data, "--tokenizer", "none", "--input", source,
            "--output", found)  # fmt: skip
        with open(found, encoding="utf-8") as file:
            assert len(file.readlines()) == 20
        target = os.path.join(text, "valid.de")
        score = run("fairseq-score", "--sys", target, "--ref", target)
        assert "BLEU4 = 100.00" in score, score
    print("wheels: everything works")


if __name__ == "__main__":
    main()
