"""Several processes, on one machine or more: they are alike before they train, and what parts them is one line."""

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

OF_ITS_OWN = """
aim_repo aim_run_hash azureml_logging data data_buffer_size device_id distributed_init_method distributed_num_procs
distributed_rank log_file num_workers num_workers_valid plasma_path save_dir tensorboard_logdir user_dir wandb_project
""".split()
"""Settings that a process may have for itself: its number, where its machine has the files, where it writes."""

LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|Socket Timeout|Timed out waiting"
    r"|remote process exited|ncclRemoteError|[Ww]ait timeout|Connection refused"
)
"""What gloo, NCCL and torch's store say where another process has gone."""


def check_gpus(wanted, flag):
    """Refuse more processes, which `flag` asks for, than this machine has GPUs.

    Raises:
        SystemExit: there are fewer
    """
    seen = torch.cuda.device_count()
    if wanted > seen:
        cure = f"ask for {seen}" if seen else "on the CPU use torchrun, --cpu and --distributed-backend gloo"
        raise SystemExit(f"{flag} {wanted}: torch sees {seen} GPUs on {platform.node()}: {cure}")


def free_port():
    """A port that nobody uses on this machine now."""
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def join(cfg, initialise):
    """Let this process find the others; returns its number.

    Args:
        initialise: fairseq's function that does it, called with `cfg`

    Raises:
        SystemExit: the others cannot be found
    """
    training = cfg.distributed_training
    end_with_launcher()
    if training.distributed_backend == "nccl" and not cfg.common.tpu:
        if cfg.common.cpu:
            raise SystemExit("several processes with --cpu need --distributed-backend gloo")
        check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 0)), "--nproc-per-node")
    try:
        return initialise(cfg)
    except (RuntimeError, OSError) as error:
        raise SystemExit(explain(str(error), training)) from None


def explain(error, training):
    """Why processes did not find each other, in one line."""
    place = training.distributed_init_method
    if place == "env://":
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in error or "ddress already in use" in error:
        return f"{place}: the port is in use on {platform.node()}: wait for its end, or take another one"
    reason = " ".join(error.split())[:200]
    return (
        f"process {training.distributed_rank} on {platform.node()} did not find the others at {place} ({reason}): "
        "start all of them with the same address and number of processes, and open the port between the machines"
    )


def end_with_launcher():
    """Under torchrun, have Linux send SIGTERM when it is gone: it leaves its processes behind if it is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@safe_exit.command
def guarded(main, cfg, **options):
    """Compare this process with the others, then call `main`; where another has gone meanwhile, end with one line."""
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
            "the checkpoints saved before are whole; the same command goes on from the last",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        # the ordinary end waits for threads that wait for the others
        os._exit(1)


def check_alike(cfg):
    """Refuse to go on with processes that differ; all of them know it, one of each machine says it.

    Raises:
        SystemExit: the first difference, between process 0 and another
    """
    mine = {"host": platform.node(), **facts(cfg)}
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    line = difference(found)
    if line:
        torch.distributed.barrier()  # nobody is gone before all have seen it
        raise SystemExit(line if os.environ.get("LOCAL_RANK", "0") == "0" else 1)


def difference(found):
    """The first difference between the facts of process 0 and those of another, in one line; empty if there is none."""
    cures = {
        "python": "use the same on all machines",
        "torch": "install the same on all machines",
        "fairseq": "install the same on all machines",
        "--user-dir": "use the same files on all machines",
        "data": "prepare it once, and share it or copy it",
        "checkpoint_last.pt": "--save-dir has to be on a disk that all machines share, or a copy on each of them",
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
            name, cure = f"--{name.replace('_', '-')}", "give the same command on all machines"
        else:
            continue
        return f"process {rank} on {other['host']} has {name} {theirs}, process 0 on {first['host']} {ours}: {cure}"
    return ""


def facts(cfg):
    """What processes of one training have in common: versions, code, data, settings, and a checkpoint or none."""
    from fairseq.version import __version__

    everything = {}
    for name, value in settings(cfg):
        if name not in OF_ITS_OWN:
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
    """A sum over the Python files in `folder`, however deep, with their places."""
    if not folder:
        return "none"
    total = hashlib.sha256()
    for place, folders, names in os.walk(os.path.realpath(folder)):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                total.update(os.path.relpath(os.path.join(place, name), os.path.realpath(folder)).encode())
                total.update(read(os.path.join(place, name)))
    return "with the sum " + total.hexdigest()[:12]


def sum_of_data(folders):
    """A sum over the dictionaries in `folders` (separated by colons), and over names and sizes of all other files."""
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
    return "with the sum " + total.hexdigest()[:12]


def read(path):
    with open(path, "rb") as opened:
        return opened.read()
