"""All GPU checks in one command of at most 8 minutes: correctness, kernels, times and memory, and training on text.

    python benchmarks/gpu_acceptance.py --data DIR --source-lang de --target-lang en [--minutes 8]
    python benchmarks/gpu_acceptance.py --device cpu --small       # a trial of every step, some minutes

A step writes its results as it goes. A step that fails, or whose share of the minutes is over, does not stop the
others; the exit status is then 1. Time that a step leaves is for the later ones.

For a machine with torch, but without a package index, collect what it lacks here, with the same release of Python, and
carry it with the checkout:

    pip wheel --no-deps -w .whl . ./third_party/fairseq "hydra-core>=1.3.2,<1.4" "omegaconf>=2.3,<2.4" \\
        "antlr4-python3-runtime==4.9.*" bitarray cffi pycparser cython subword-nmt mock sacremoses tensorboardX
    pip install --no-index --no-deps --target /tmp/site .whl/*.whl        # there, and the rest of the same line:
    export PYTHONPATH=$PWD:/tmp/site PATH=/tmp/site/bin:$PATH
"""

import argparse
import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 64 --decoder-embed-dim 64 --encoder-attention-heads 4 "
    "--decoder-attention-heads 4"
)
SHARES = {"environment": 0.08, "correctness": 0.3, "steps": 0.3, "decoding": 0.14, "trainings": 0.18}
"""Part of the minutes of each step."""
STEPS = tuple(SHARES)
GRACE = 20  # seconds from SIGTERM to SIGKILL


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few updates: a trial of this command")
    parser.add_argument("--out", type=Path, default=ROOT / "exp/gpu-acceptance", metavar="DIR", help="the results")
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help="parallel text {train,valid,test}.{SRC,TGT}; without it, the built-in corpus")  # fmt: skip
    parser.add_argument("--source-lang", default="de")
    parser.add_argument("--target-lang", default="en")
    parser.add_argument("--updates", type=int, help="updates of each training (default: 300; 20 with --small)")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16", "amp"), default="fp16", help="of the trainings")
    parser.add_argument("--systems", nargs="+", default=["prenorm_6l", "lstm_6l", "prenorm_30l", "dlcl_30l"])
    parser.add_argument("--minutes", type=float, default=8.0, help="of all steps together (default: 8)")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="run only these steps")
    options = parser.parse_args(arguments)
    if options.data and not options.data.is_dir():
        parser.error(f"--data {options.data}: no such directory")
    return options


def steps(options):
    """Return the commands by step."""
    python, small = sys.executable, options.small
    check = [python, HERE / "gpu_check.py", "--device", options.device]
    if small:
        check += shlex.split("--layers 2 --width 32 --only 'plain pre-norm' layer_agg-dlcl layer_agg-lstm --compile")
    flags = f"--{options.precision}" if options.device == "cuda" and options.precision != "fp32" else ""
    systems = ["transformer_prenorm_6l", "transformer_dlcl_6l", "transformer_lstm_6l", "transformer_prenorm_30l",
               "transformer_dlcl_30l"]  # fmt: skip
    systems += [f"FAIRSEQ_DEEP_TRITON=0 {name}" for name in systems if "lstm_6l" in name or "dlcl_30l" in name]
    sizes = shlex.split("--vocabulary 200 --rounds 1") if small else shlex.split("--vocabulary 32768 --rounds 3")
    costs = [*sizes, "--device", options.device, "--systems"]
    searched = [f"ours --arch transformer_{name}_6l" for name in ("dlcl", "lstm", "matt")]
    return {
        "environment": [python, "-m", "fairseq_deep", "doctor"],
        "correctness": check,
        "steps": [python, HERE / "training.py", f"--flags={flags} {SMALL * small}", "--tokens", 64 if small else 4096,
                  "--batches", 1 if small else 4, *costs, *(systems[:3] if small else systems)],
        "decoding": [python, HERE / "decoding.py", "--dim", 64 if small else 512, "--layers", 2 if small else 6,
                     "--max-len-b", 5 if small else 26, "--max-len-a", 0, *costs, "stock", "ours", *searched],
        "trainings": comparison(options),
    }  # fmt: skip


def comparison(options):
    """Return the command that trains models on text."""
    updates = options.updates or (20 if options.small else 300)
    command = [ROOT / "examples/compare/run.sh", "--exp", options.out / "trainings", "--updates", updates,
               "--average", 1]  # fmt: skip
    command += ["--data", options.data] if options.data else ["--demo"]
    languages = (options.source_lang, options.target_lang) if options.data else ("en", "de")
    command += ["--source-lang", languages[0], "--target-lang", languages[1]]
    systems = options.systems
    if options.small:
        systems = ["prenorm_2l2l_tiny", "dlcl_2l2l_tiny"]
        command += ["--conf", "mini", "--width", 32, "--heads", 2]
    elif options.device == "cuda":
        command += ["--conf", "base"]
    command += ["--precision", options.precision] if options.device == "cuda" else ["--ngpu", 0]
    return [*command, *systems, "--", "--optimizer", "fused_adam"]


def stop(group, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def run(title, command, number, out, seconds):
    """Run a step for *seconds* at most; its output goes to the screen, to a file of its own and to ``RESULTS.txt``."""
    command, start = list(map(str, command)), time.monotonic()
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # of this environment
    environment = {**os.environ, "PATH": programs, "FAIRSEQ_DEEP_ENV": "current", "PYTHONUTF8": "1"}
    with open(out / "RESULTS.txt", "a", encoding="utf-8") as results, \
            open(out / f"{number:02}-{title}.txt", "w", encoding="utf-8") as own:  # fmt: skip

        def tell(line, *files):
            print(line, end="", flush=True)
            for file in (results, *files):
                file.write(line)
                file.flush()

        tell(f"\n== {title}\n$ {shlex.join(command)}\n")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        timers = [threading.Timer(max(seconds, 1) + delay, stop, (process.pid, sent))
                  for sent, delay in ((signal.SIGTERM, 0), (signal.SIGKILL, GRACE))]  # fmt: skip
        for timer in timers:
            timer.start()
        for line in process.stdout:
            tell(line, own)
        status = process.wait()
        for timer in timers:
            timer.cancel()
        tell(f"({time.monotonic() - start:.0f} s, exit status {status})\n")
    return status


def main(arguments=None):
    options = parse(arguments)
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("there is no GPU here that torch can use: use --device cpu --small for a trial")
    options.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    now = datetime.datetime.now(datetime.UTC)
    head = f"commit {commit.stdout.strip() or 'unknown (not a git checkout)'}, {now:%Y-%m-%d %H:%M} UTC\n"
    (options.out / "RESULTS.txt").write_text(head, encoding="utf-8")
    commands = steps(options)
    start, until, failed = time.monotonic(), 0.0, []
    for number, name in enumerate(STEPS, 1):
        if name in options.only:
            until += 60 * options.minutes * SHARES[name] / sum(SHARES[step] for step in options.only)
            if run(name, commands[name], number, options.out, until - (time.monotonic() - start)):
                failed.append(name)
    said = f", {len(failed)} failed: {', '.join(failed)}" if failed else ""
    print(f"\n{len(options.only)} steps{said}; results: {options.out / 'RESULTS.txt'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
