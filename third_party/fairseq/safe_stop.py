"""Stopping of a training by SIGTERM, SIGINT or SIGUSR1: the present update is finished and a checkpoint is saved.

Machines that are taken back (pre-emption, a time limit, Ctrl-C) send such a signal some time before they kill. With
several processes one of them may get it alone; all of them stop after the same update.
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
"""EX_TEMPFAIL of sysexits.h: not done, but the same command goes on."""
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
SAME = 3.0
"""Seconds within which another signal counts as the same one: a group of processes gets it in several ways."""


class Stop:
    """Whether this training has been told to stop."""

    def __init__(self):
        self.asked = None  # the first signal
        self.since = 0.0
        self.agreed = False
        self.before = {}

    def listen(self):
        """From here on a signal is noted. A second one, later than SAME, ends the process as if this was not here."""
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number, _):
        if self.asked is None:
            self.asked, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > SAME:
            for other, handler in self.before.items():
                signal.signal(other, handler)
            os.kill(os.getpid(), number)

    def is_due(self, trainer, done):
        """Whether any of the processes of `trainer` was told to stop; the same answer in all of them.

        Every process calls this once after each update; `done` says that the training ends by itself.
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
        """Where a signal has stopped the training: wait for the others, say what is saved, and exit."""
        if not self.agreed:
            return
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier()
        if trainer.data_parallel_rank == 0:
            update = trainer.get_num_updates()
            saved = f"saved checkpoint_last.pt at update {update}; the same command goes on from there"
            if checkpoint.no_save or checkpoint.no_last_checkpoints:
                saved = f"update {update} was not saved (--no-save or --no-last-checkpoints)"
            print(f"stopped by a signal: {saved}", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS)


STOP = Stop()


class DataLoader(torch.utils.data.DataLoader):
    """torch's DataLoader, whose processes outlive a signal to all the processes of a training.

    A scheduler, torchrun and Ctrl-C send theirs to each. Where it ended one that reads data, the training ended with
    it, before it could save. A thread hands the signals that it blocks on to the processes that it starts.
    """

    def __init__(self, *arguments, worker_init_fn=None, **options):
        begin = functools.partial(_begin_worker, worker_init_fn)
        super().__init__(*arguments, worker_init_fn=begin, **options)

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
    """The training itself ends its workers by a signal."""
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def spawn(fn, args, nprocs, join=True):
    """`torch.multiprocessing.spawn` whose processes get the signals that stop this one; exits as they do.

    Raises:
        SystemExit: one of them has exited, and has said why, or has been killed
    """

    def forward(number, _):
        for child in multiprocessing.active_children():
            os.kill(child.pid, number)

    for number in SIGNALS:
        signal.signal(number, forward)
    try:
        return torch.multiprocessing.spawn(fn, args=args, nprocs=nprocs, join=join)
    except torch.multiprocessing.ProcessExitedException as ended:
        if ended.exit_code >= 0:
            sys.exit(ended.exit_code)
        name = signal.Signals(-ended.exit_code).name
        sys.exit(
            f"process {ended.error_index} was ended by {name} (out of memory?): the checkpoints saved before are "
            "whole; the same command goes on from the last"
        )
