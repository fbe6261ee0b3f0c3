"""Console scripts run as a user runs them, on a small made-up language pair."""

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import torch
from fairseq import checkpoint_utils
from fairseq.safe_nodes import free_port

from tests.helpers.forkserver import BIN, SCRIPTS, in_fork
from tests.helpers.paths import PACKAGE


def run(*command, stdin="", check=True, cwd=None, env=None, prepare=None, processes=1):
    """Run a console script of this environment with one thread; on failure, show what it printed.

    The ended process that it returns has all output as ``text``. The command runs in a fork of a process that has
    imported what it needs; one that is named by its path is started as a user does. *prepare*: "module:function" and
    its arguments, called there before it. *processes*: of a training, that many; see :func:`run_together`.
    """
    line = [str(part) for part in command]
    if line[0] in (*SCRIPTS, "python3"):
        line = in_fork(line)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PREPARE": json.dumps(prepare),
        **(env or {}),
    }
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    if processes > 1:
        done = run_together(command, prepare, processes)
    else:
        done = subprocess.run(line, input=stdin, capture_output=True, text=True, errors="replace", env=env, cwd=cwd)
    done.text = done.stdout + done.stderr
    if check and done.returncode:
        raise AssertionError(f"{' '.join(line)} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def run_together(command, prepare, processes):
    """The ended processes of one training, placed as by torchrun, as one: the largest status, and all output."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}

    def start(rank):
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run(*command, check=False, env=env, prepare=prepare)

    with ThreadPoolExecutor(processes) as pool:
        done = list(pool.map(start, range(processes)))
    status = max((each.returncode for each in done), key=abs)
    out, err = ("".join(getattr(each, stream) for each in done) for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, status, out, err)


# for *prepare* of `run`: what the process cannot import
WITHOUT_PLUGIN = ("tests.helpers.forkserver:block", "fairseq_deep")
WITHOUT_FAIRSEQ = ("tests.helpers.forkserver:block", "fairseq", "omegaconf", "hydra")


def write_pairs(path, count, rng, longest=8):
    """Random strings of 3 to *longest* digits (path.src) and their reversals (path.tgt)."""
    with open(f"{path}.src", "w") as source, open(f"{path}.tgt", "w") as target:
        for _ in range(count):
            digits = " ".join(str(rng.randrange(10)) for _ in range(rng.randint(3, longest)))
            print(digits, file=source)
            print(digits[::-1], file=target)


def binarise(folder, splits, *flags):
    """Binarised form, in folder/bin, of the pairs folder/SPLIT.src and folder/SPLIT.tgt."""
    prefixes = [part for split in splits for part in (f"--{split}pref", folder / split)]
    run("fairseq-preprocess", "-s", "src", "-t", "tgt", *prefixes, "--destdir", folder / "bin",
        "--joined-dictionary", *flags)  # fmt: skip
    return folder / "bin"


NARROW = ["--encoder-embed-dim", "16", "--encoder-attention-heads", "2", "--decoder-attention-heads", "2",
          "--share-all-embeddings"]  # fmt: skip
FEED_FORWARD = ["--encoder-ffn-embed-dim", "32"]
EXACT = ("--dropout", "0", "--attention-dropout", "0", "--activation-dropout", "0")


def train_command(data, save_dir, *flags, arch="transformer_dlcl_2l2l_tiny", shares=True):
    """A command of a small training with the plugin; *shares*: one dictionary and one embedding."""
    narrow = NARROW if arch.startswith(("transformer_lstm", "transformer_rnn")) else NARROW + FEED_FORWARD
    narrow = narrow if shares else [flag for flag in narrow if flag != "--share-all-embeddings"]
    return [
        "fairseq-train", data,
        "--user-dir", PACKAGE, "--arch", arch, *narrow,
        "--optimizer", "adam", "--lr", "2e-3", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "4",
        "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1", "--max-tokens", "400", "--seed", "5",
        "--save-dir", save_dir, "--cpu", "--num-workers", "0", "--log-format", "json", "--log-interval", "1", *flags,
    ]  # fmt: skip


def refusal(done):
    """The last line of a command that must have ended with it, without a traceback and before the first update."""
    assert done.returncode == 1 and "Traceback" not in done.text and "train_inner" not in done.text, done.text[-2000:]
    return (done.stderr or done.stdout).strip().splitlines()[-1]


def entries(log, tag="train_inner"):
    """{update: {name: value}} of the json log of an ended process, or of its text, without what has no value there."""
    found = {}
    for text in re.findall(rf"\| {tag} \| (\{{.*\}})", getattr(log, "text", log)):
        entry = {name.replace(f"{tag}_", "", 1): value for name, value in json.loads(text).items()}
        found[int(entry["num_updates"])] = {name: float(value) for name, value in entry.items() if value is not None}
    return found


def losses(log):
    """The training loss after each update, {update: loss}, of an ended process or of its text."""
    return {update: entry["loss"] for update, entry in entries(log).items()}


def saved(folder, name="checkpoint_last.pt"):
    """A checkpoint, as fairseq stores it."""
    return torch.load(folder / name, weights_only=False)


def load_trained(path):
    """Model, settings and task of the checkpoint at *path*, and the batches of its first epoch in their order."""
    data = saved(path.parent, path.name)["cfg"]["task"]["data"]
    [model], cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": data})
    task.load_dataset("train")
    epoch = task.get_batch_iterator(
        task.dataset("train"), max_tokens=cfg.dataset.max_tokens, seed=cfg.common.seed, epoch=1,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
    )  # fmt: skip
    return model, cfg, task, list(epoch.next_epoch_itr(shuffle=True))


def hypotheses(done):
    """The translations that fairseq-generate printed, one for each beam."""
    return [line.split("\t")[2] for line in sorted(done.stdout.splitlines()) if re.match(r"H-\d+\t", line)]
