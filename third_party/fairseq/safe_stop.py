"""Stops training at SIGTERM, SIGINT or SIGUSR1: the current update is completed and a checkpoint is saved.

Pre-emption, a scheduler's time limit and Ctrl-C send such a signal before the process is killed. If only one of several
processes receives it, all stop after the same update.
"""

import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch
from fairseq.distributed import utils as distributed_utils

logger = logging.getLogger(__name__)

EXIT_STATUS = 75
"""EX_TEMPFAIL of sysexits.h: training is not complete, and the same command resumes it."""
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
SAME = 3.0
"""Seconds within which further signals count as the same one: a process group can receive it several times."""


class Stop:
    """Signals received by this training run.

    Attributes:
        asked: number of the first signal; None before it
        since: time of the first signal
        agreed: the processes have agreed to stop
        before: previous handlers, by signal
    """

    def __init__(self):
        self.asked = None
        self.since = 0.0
        self.agreed = False
        self.before = {}

    def listen(self):
        """Install the handlers. A second signal, more than `SAME` seconds later, has its previous effect."""
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number, _):
        if self.asked is None:
            self.asked, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > SAME:
            for other, handler in self.before.items():
                signal.signal(other, handler)
            os.kill(os.getpid(), number)

    def is_due(self, trainer, done):
        """Return whether training must stop now; all processes get the same answer.

        Every process calls this once after each update.

        Args:
            done: training ends after this update in any case
        """
        asked = self.asked is not None
        if trainer.data_parallel_world_size > 1:
            flag = torch.tensor([float(asked)], device=trainer.device)
            distributed_utils.all_reduce(flag, group=trainer.data_parallel_process_group)
            asked = flag.item() > 0
        self.agreed = asked and not done
        if self.agreed:
            name = signal.Signals(self.asked).name if self.asked else "a signal to another process"
            logger.info(f"Stopping training due to {name}")
        return self.agreed

    def finish(self, trainer, checkpoint):
        """If a signal has stopped training, synchronise the processes, print what was saved, and exit."""
        if not self.agreed:
            return
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier()
        if trainer.data_parallel_rank == 0:
            update = trainer.get_num_updates()
            saved = f"saved checkpoint_last.pt at update {update}; run the same command to resume"
            if checkpoint.no_save or checkpoint.no_last_checkpoints:
                saved = f"update {update} was not saved (--no-save or --no-last-checkpoints)"
            print(f"stopped by a signal: {saved}", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS)


STOP = Stop()


def _start_method():
    """Return "fork" where the default start method is "forkserver", else None (the default).

    Workers of a fork server import fairseq again, copy the data, and are not children of this process.
    """
    return "fork" if multiprocessing.get_start_method() == "forkserver" else None


def Pool(processes):
    """Return a pool of worker processes."""
    return multiprocessing.get_context(_start_method()).Pool(processes)


class DataLoader(torch.utils.data.DataLoader):
    """torch's DataLoader with workers that survive signals to the whole process group.

    Schedulers, torchrun and Ctrl-C signal all processes. A worker that ended would end training before it could save.
    Workers inherit the blocked signals of the thread that starts them.
    """

    def __init__(self, *arguments, num_workers=0, worker_init_fn=None, **options):
        begin = functools.partial(_begin_worker, worker_init_fn)
        method = _start_method() if num_workers else None
        super().__init__(
            *arguments, num_workers=num_workers, worker_init_fn=begin, multiprocessing_context=method, **options
        )

    def __iter__(self):
        if not STOP.before or not hasattr(signal, "sigwaitinfo"):  # not a training, or macOS
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(initialise, number):
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        threading.Thread(target=_await_parent, daemon=True).start()
    if initialise is not None:
        initialise(number)


def _await_parent():
    """Exit when the parent process sends a signal, and ignore signals of other processes."""
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def spawn(fn, args, nprocs, join=True):
    """Call `torch.multiprocessing.spawn`, and forward signals of this process to its children.

    A signal before the first child exists has its previous effect.

    Raises:
        SystemExit: a child has exited with an error, which it has printed, or has been killed
    """

    def forward(number, _):
        children = multiprocessing.active_children()
        for child in children:
            os.kill(child.pid, number)
        if not children:
            signal.signal(number, before[number])
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        return torch.multiprocessing.spawn(fn, args=args, nprocs=nprocs, join=join)
    except torch.multiprocessing.ProcessExitedException as ended:
        if ended.exit_code >= 0:
            sys.exit(ended.exit_code)
        name = signal.Signals(-ended.exit_code).name
        sys.exit(
            f"process {ended.error_index} was ended by {name} (out of memory?): earlier checkpoints are complete; run "
            "the same command to resume"
        )
