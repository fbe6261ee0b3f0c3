"""Trainings with two processes that are killed again and again: do they end as one that was left alone?

    python benchmarks/random_kills.py DATA_BIN --minutes 60

A training is run once without harm. Then the same command is started in a new folder, and after some random seconds a
process of it (the launcher, one worker, or all at once) gets SIGKILL, SIGTERM, SIGINT or SIGUSR1; and so on until a
start comes to the end. Its losses and weights are compared with those of the first, bit for bit. Then the next round.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fairseq import safe_save

from fairseq_deep.tools.tables import format_table

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
VICTIMS = ("launcher", "worker", "all")
FAULTS = ("had to be killed", "torn checkpoints", "updates with another loss", "weights that differ")
BIN = Path(sys.executable).parent


def command(args, folder):
    plugin = Path(__file__).parents[1] / "fairseq_deep"
    return [
        BIN / "torchrun", "--standalone", "--nproc_per_node", str(args.processes), BIN / "fairseq-train", args.data,
        "--user-dir", plugin, "--arch", "transformer_dlcl_6l", "--encoder-embed-dim", "64", "--decoder-embed-dim", "64",
        "--encoder-ffn-embed-dim", "128", "--decoder-ffn-embed-dim", "128", "--encoder-attention-heads", "4",
        "--decoder-attention-heads", "4", "--share-all-embeddings", "--dropout", "0.1", "--optimizer", "adam", "--lr",
        "1e-3", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "50", "--criterion",
        "label_smoothed_cross_entropy", "--label-smoothing", "0.1", "--max-tokens", "1000", "--cpu", "--seed", "3",
        "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--max-update", str(args.updates),
        "--save-interval-updates", str(args.save_every), "--keep-interval-updates", "2", "--no-epoch-checkpoints",
        "--log-format", "json", "--log-interval", "1", "--save-dir", folder,
    ]  # fmt: skip


def start(args, folder, log):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(list(map(str, command(args, folder))), stdout=log, stderr=subprocess.STDOUT,
                            env=environment, start_new_session=True)  # fmt: skip


def losses(log):
    """The loss after each update, as it was printed; an update that was made twice must have the same."""
    found = {}
    for text in re.findall(r"train_inner \| (\{.*\})", Path(log).read_text()):
        entry = json.loads(text)
        found.setdefault(int(entry["num_updates"]), set()).add(entry["loss"])
    return found


def weights(folder):
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
    return {name: value for name, value in state.items() if not name.endswith("_float_tensor")}  # never initialised


def harm(child, victim, number):
    """Send the signal, and wait until all have ended; returns whether they had to be killed after two minutes."""
    workers = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True).stdout.split()
    one = random.sample(workers, min(1, len(workers)))
    targets = {"launcher": [child.pid], "worker": one, "all": [child.pid, *workers]}
    for pid in targets[victim]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
    if victim == "launcher" and number in (signal.SIGKILL, signal.SIGUSR1):
        # it ends without a word to its workers, which would go on to the end
        time.sleep(random.uniform(0, 5))
        stop(workers)
    deadline = time.time() + 120
    while any(map(lives, [child.pid, *workers])) and time.time() < deadline:
        child.poll()
        time.sleep(0.1)
    left = [pid for pid in (child.pid, *workers) if lives(pid)]
    stop(left)
    child.wait()
    return bool(left)


def lives(pid):
    """Whether the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def round_of_kills(args, folder, seen):
    """Start and kill until a start comes to the end."""
    while True:
        with open(folder.with_suffix(".log"), "a") as log:
            child = start(args, folder, log)
            seen["starts"] += 1
            try:
                status = child.wait(random.uniform(0, args.longest))
            except subprocess.TimeoutExpired:
                victim, number = random.choice(VICTIMS), random.choice(SIGNALS)
                seen[f"{number.name} to {victim}"] += 1
                print(f"{time.strftime('%H:%M:%S')} {number.name} to {victim}", file=log, flush=True)
                seen["had to be killed"] += harm(child, victim, number)
            else:
                if status == 0:
                    return
                raise SystemExit(f"ended with {status} by itself: see {log.name}")
        seen["torn checkpoints"] += sum(not safe_save.is_whole(path) for path in folder.glob("*.pt"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", help="data of fairseq-preprocess with a joint dictionary")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--longest", type=float, default=40, help="seconds that a start may last")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=tempfile.mkdtemp(), help="folder for checkpoints and logs")
    args = parser.parse_args()
    random.seed(args.seed)
    out, seen, began = Path(args.out), collections.Counter(), time.time()
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "alone.log", "w") as log:
        if start(args, out / "alone", log).wait():
            raise SystemExit(f"the training that nothing was done to failed: see {log.name}")
    expected, final = losses(out / "alone.log"), weights(out / "alone")
    print(f"alone: {len(expected)} updates in {time.time() - began:.0f} s", flush=True)
    while time.time() - began < 60 * args.minutes:
        seen["trainings"] += 1
        folder = out / f"round{seen['trainings']}"
        round_of_kills(args, folder, seen)
        found, last = losses(folder.with_suffix(".log")), weights(folder)
        seen["updates"] += len(expected)
        # what a kill took with it is not in the log; what is, must be the same
        seen["updates with another loss"] += sum(found[update] != expected[update] for update in found)
        seen["weights that differ"] += sum(not torch.equal(last[name], final[name]) for name in final)
        kills = sum(count for what, count in seen.items() if what.startswith("SIG"))
        faults = {what: seen[what] for what in FAULTS}
        minutes = (time.time() - began) / 60
        print(f"{minutes:5.1f} min: {seen['trainings']} trainings, {kills} kills; {faults}", flush=True)
    rows = sorted((what, count) for what, count in seen.items() if what not in FAULTS)
    print(format_table([("what", "number"), *((what, f"{count:,}") for what, count in [*rows, *faults.items()])]))


if __name__ == "__main__":
    main()
