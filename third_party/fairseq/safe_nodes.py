"""Distributed training: checks before training that the processes agree, and one-line errors if they fail."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import signal
import socket
import sys

import torch
from fairseq import safe_exit
from fairseq.safe_settings import settings

LOCAL = """
aim_repo aim_run_hash azureml_logging data data_buffer_size device_id distributed_init_method distributed_num_procs
distributed_rank log_file num_workers num_workers_valid plasma_path save_dir tensorboard_logdir user_dir wandb_project
""".split()
"""Settings that may differ between processes: their number, and paths of their machine."""

LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|Socket Timeout|Timed out waiting"
    r"|remote process exited|ncclRemoteError|[Ww]ait timeout|Connection refused"
)
"""Error messages of gloo, NCCL and torch's store after another process has exited."""


def check_gpus(wanted, flag):
    """Check that this machine has a GPU for each of the `wanted` processes that `flag` requests.

    Raises:
        SystemExit: it has fewer GPUs
    """
    seen = torch.cuda.device_count()
    if wanted > seen:
        cure = f"use {seen}" if seen else "on a CPU use torchrun, --cpu and --distributed-backend gloo"
        raise SystemExit(f"{flag} {wanted}: torch sees {seen} GPUs on {platform.node()}: {cure}")


def without_gpus(training, nodes):
    """Prepare a SLURM task, the only one of its machine, for a CPU; return its number of processes.

    Args:
        training: the settings of distributed training
        nodes: the number of machines
    """
    check_gpus(int(os.environ.get("SLURM_GPUS_ON_NODE", 0)), "SLURM_GPUS_ON_NODE")
    training.distributed_no_spawn = True
    if nodes == 1:
        training.distributed_init_method = None
    return 1


def free_port():
    """Return a port of this machine that is not in use."""
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def join(cfg, initialise):
    """Connect this process to the others, and return its rank.

    Args:
        cfg: fairseq's configuration
        initialise: fairseq's function that connects, called with `cfg`

    Raises:
        SystemExit: the connection failed
    """
    training = cfg.distributed_training
    end_with_launcher()
    if training.distributed_backend == "nccl" and not cfg.common.tpu:
        if cfg.common.cpu:
            raise SystemExit("several processes with --cpu require --distributed-backend gloo")
        check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 0)), "--nproc-per-node")
    try:
        return initialise(cfg)
    except (RuntimeError, OSError) as error:
        raise SystemExit(explain(str(error), training)) from None


def explain(error, training):
    """Return the reason of a failed connection in one line."""
    place = training.distributed_init_method
    if place == "env://":
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in error or "ddress already in use" in error:
        return f"{place}: the port is in use on {platform.node()}: use another port"
    reason = " ".join(error.split())[:200]
    return (
        f"process {training.distributed_rank} on {platform.node()} cannot connect to the others at {place} ({reason}): "
        "start all with the same address and number of processes, and open the port between the machines"
    )


def end_with_launcher():
    """Make Linux send SIGTERM when torchrun exits: a killed torchrun does not end its processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@safe_exit.command
def guarded(main, cfg, **options):
    """Compare this process with the others, then call `main`; exit with one line if another process is lost."""
    try:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            check_alike(cfg)
        return main(cfg, **options)
    except RuntimeError as error:
        if not torch.distributed.is_initialized() or not LOST.search(str(error)):
            raise
        reason = " ".join(str(error).split())[:200]
        print(
            f"process {torch.distributed.get_rank()} on {platform.node()} lost another process ({reason}): "
            "earlier checkpoints are complete; run the same command to resume",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        # sys.exit would join threads that are blocked on other processes
        os._exit(1)


def check_alike(cfg):
    """Check that all processes agree; otherwise all exit, and one per machine prints the reason.

    Raises:
        SystemExit: another process differs from process 0; the message names the first difference
    """
    mine = {"host": platform.node(), **facts(cfg)}
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    line = difference(found)
    if line:
        torch.distributed.barrier()  # no process exits before all have compared
        raise SystemExit(line if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def difference(found):
    """Return the first difference between process 0 and another in one line; empty if there is none."""
    cures = {
        "python": "use the same version on all machines",
        "torch": "install the same version on all machines",
        "fairseq": "install the same version on all machines",
        "--user-dir": "use the same files on all machines",
        "data": "prepare it once, and share or copy it",
        "checkpoint_last.pt": "use a --save-dir on a shared disk, or copy it to all machines",
    }
    first = found[0]
    for rank, other in enumerate(found):
        names = [name for name in cures if other[name] != first[name]]
        if names:
            name = names[0]
            ours, theirs, cure = first[name], other[name], cures[name]
        elif other["settings"] != first["settings"]:
            name = min(n for n in {**first["settings"], **other["settings"]}
                       if first["settings"].get(n) != other["settings"].get(n))  # fmt: skip
            ours, theirs = (facts["settings"].get(name, "nothing") for facts in (first, other))
            name, cure = f"--{name.replace('_', '-')}", "run the same command on all machines"
        else:
            continue
        return f"process {rank} on {other['host']} has {name} {theirs}, process 0 on {first['host']} {ours}: {cure}"
    return ""


def facts(cfg):
    """Return what all processes must share: versions, code, data, settings, and whether there is a checkpoint."""
    from fairseq.version import __version__

    everything = {}
    for name, value in settings(cfg):
        if name not in LOCAL:
            everything.setdefault(name, []).append(str(value))
    folder = getattr(getattr(cfg, "checkpoint", None), "save_dir", "")
    last = os.path.join(folder, "checkpoint_last.pt")
    task = getattr(cfg, "task", None)
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "fairseq": __version__,
        "--user-dir": sum_of_code(getattr(cfg.common, "user_dir", None)),
        "data": sum_of_data(getattr(task, "data", None)),
        "checkpoint_last.pt": "there" if os.path.exists(last) else "missing",
        "settings": {name: " ".join(sorted(set(values))) for name, values in everything.items()},
    }


def sum_of_code(folder):
    """Return a hash of the paths and contents of the Python files in `folder` and its subdirectories."""
    if not folder:
        return "none"
    total = hashlib.sha256()
    for place, folders, names in os.walk(os.path.realpath(folder)):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                total.update(os.path.relpath(os.path.join(place, name), os.path.realpath(folder)).encode())
                total.update(read(os.path.join(place, name)))
    return "with hash " + total.hexdigest()[:12]


def sum_of_data(folders):
    """Return a hash of the dictionaries in `folders` (separated by colons), and of names and sizes of data files."""
    if not isinstance(folders, str):
        return "none"
    total = hashlib.sha256()
    for folder in folders.split(os.pathsep):
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if name.startswith("dict."):
                total.update(name.encode() + read(path))
            elif name.endswith((".bin", ".idx")):
                total.update(f"{name} {os.path.getsize(path)}\n".encode())
    return "with hash " + total.hexdigest()[:12]


def read(path):
    with open(path, "rb") as opened:
        return opened.read()
