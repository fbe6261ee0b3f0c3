"""Systems in processes of their own that take turns.

OpenMP's threads wait for work by spinning, and two libraries in one process would slow each other down. Here every
system has a process with the same number of threads, one of them works at a time, and the others block on a pipe.
"""

import logging
import multiprocessing
import os
import time
import traceback

PAUSE = 0.3  # seconds until the threads of the system before have stopped spinning


def serve(pipe, make, system, settings):
    """In a worker: build the system, say so, then translate once for each request."""
    logging.disable(logging.INFO)
    try:
        worker = make(system, settings)
        pipe.send(("ready", None))
        while True:
            pipe.recv()
            start, used = time.perf_counter(), time.process_time()
            found = worker.translate()
            seconds, used = time.perf_counter() - start, time.process_time() - used
            pipe.send(("done", (seconds, used, worker.hypotheses(found))))
    except (EOFError, KeyboardInterrupt):  # no more requests
        return
    except SystemExit as error:
        pipe.send(("error", str(error)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{system}: {type(error).__name__}: {error}"))


class Turns:
    """Workers for *systems*, ``make(system, settings)`` in each; a context, at whose end they end.

    Raises:
        SystemExit: one of them could not be built, or failed
    """

    def __init__(self, make, systems, settings):
        self.make, self.systems, self.settings = make, systems, settings
        self.workers = {}

    def __enter__(self):
        os.environ["OMP_NUM_THREADS"] = str(self.settings.threads)
        context = multiprocessing.get_context("spawn")
        try:
            for system in self.systems:  # one after the other: what a system measures as it loads, it measures alone
                pipe, end = context.Pipe()
                process = context.Process(target=serve, args=(end, self.make, system, self.settings), daemon=True)
                process.start()
                end.close()
                self.workers[system] = (process, pipe)
                self._answer(system)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for process, pipe in self.workers.values():
            pipe.close()
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()

    def _answer(self, system):
        try:
            kind, content = self.workers[system][1].recv()
        except EOFError:
            raise SystemExit(f"{system}: its process ended without a word (too little memory?)") from None
        if kind == "error":
            raise SystemExit(content)
        return content

    def ask(self, system):
        """Let *system* translate: its seconds on the clock, those of its processor, its hypotheses."""
        time.sleep(PAUSE)
        self.workers[system][1].send("translate")
        return self._answer(system)
