"""A stopped training saves a checkpoint and exits with status 75; the same command resumes it with equal results.

Also from checkpoints in --save-dir as an older fairseq, a disk or a user may leave them.
"""

import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import fairseq.binarizer
import pytest
import torch
from fairseq import safe_save, safe_stop

from tests.helpers.commands import BIN, PACKAGE, losses, run, train_command
from tests.helpers.forkserver import stand_in
from tests.helpers.processes import children, live, until
from tests.helpers.recipes import write_program

FLAGS = ("--max-epoch", "2", "--num-workers", "0", "--max-tokens", "150")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True, scope="module")
def forkserver(tmp_path_factory):
    """Start the processes of real commands as Python 3.14 does."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text("import multiprocessing as m\nm.set_start_method('forkserver')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield


def start(small, folder, *flags, fault=None, prepare=None):
    """Exit status and log of a training of two epochs."""
    prepare = ["tests.helpers.faults:send", *fault] if fault else prepare
    done = run(*train_command(small, folder, *FLAGS, *flags), check=False, prepare=prepare)
    return done.returncode, done.text


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "save"
    status, log = start(small, folder)
    assert status == 0, log[-2000:]
    found = losses(log)
    assert len(found) >= 6 and len(found) % 2 == 0
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    status, log = start(small, folder)
    assert status == 0 and losses(log) == {}, "it is done"
    assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before
    return found, folder


def assert_equal(folder, other):
    """The same files, models and moments."""
    assert sorted(p.name for p in folder.glob("*")) == sorted(p.name for p in other.glob("*"))
    for path in folder.glob("checkpoint*.pt"):
        mine, theirs = (torch.load(place / path.name, weights_only=False) for place in (folder, other))
        for name, value in theirs["model"].items():
            assert name.endswith("_float_tensor") or torch.equal(mine["model"][name], value), (path.name, name)
        for key, moments in theirs["last_optimizer_state"]["state"].items():
            assert torch.equal(mine["last_optimizer_state"]["state"][key]["exp_avg"], moments["exp_avg"])
        assert mine["extra_state"]["val_loss"] == theirs["extra_state"]["val_loss"], path.name


@pytest.mark.parametrize("number, epochs", [(signal.SIGTERM, 0), (signal.SIGINT, 1), (signal.SIGUSR1, 2)],
                         ids=["within an epoch", "at the end of an epoch", "at the end of all"])  # fmt: skip
def test_a_stopped_training_goes_on_bit_for_bit(small, whole, tmp_path, number, epochs):
    expected, reference = whole
    folder, update = tmp_path / "save", epochs * len(expected) // 2 or 1
    status, log = start(small, folder, fault=(number, update - 1))
    first = losses(log)
    assert status == safe_stop.EXIT_STATUS == 75 and max(first) == update, log[-1500:]
    last = log.strip().splitlines()
    assert f"stopped by a signal: saved checkpoint_last.pt at update {update}; run the same command to" in last[-1]
    assert f"due to {number.name}" in log
    status, log = start(small, folder)
    assert status == 0, log[-1500:]
    second = losses(log)
    assert {**first, **second} == expected and len(first) + len(second) == len(expected)
    assert_equal(folder, reference)


@pytest.mark.parametrize("flag", ["--no-save", "--no-last-checkpoints"])
def test_it_says_so_where_nothing_is_saved(small, tmp_path, flag):
    folder = tmp_path / "save"
    status, log = start(small, folder, flag, fault=(signal.SIGTERM, 0))
    assert status == 75 and "update 1 was not saved" in log
    assert (folder / ".lock").exists() == (flag != "--no-save"), "where nothing is saved, others may be at work"


@pytest.fixture
def handlers():
    """Handlers of signals are put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Blocked(torch.utils.data.Dataset):
    """What the process that reads it has blocked."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])


class TestSignals:
    """The object that notes them."""

    @pytest.fixture
    def stop(self, handlers):
        return safe_stop.Stop()

    trainer = SimpleNamespace(data_parallel_world_size=1)

    def test_the_same_one_again_is_ignored_and_a_later_one_ends_it(self, stop, monkeypatch):
        ended = []
        signal.signal(signal.SIGUSR1, lambda number, _: ended.append(number))
        stop.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.is_due(self.trainer, done=False) and ended == []
        monkeypatch.setattr(safe_stop, "SAME", 0.0)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended == [signal.SIGUSR1]

    def test_a_worker_has_them_blocked_from_its_birth(self, stop, monkeypatch):
        """Nothing is left between its start and its first line; the training itself hears them."""
        monkeypatch.setattr(safe_stop, "STOP", stop)
        stop.listen()
        own = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        monkeypatch.setattr(safe_stop, "_begin_worker", lambda *_: None)
        assert [*safe_stop.DataLoader(Blocked(), num_workers=1, batch_size=None)] == [{*own, *SIGNALS}]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == own

    def test_a_training_without_a_signal_or_at_its_end_is_not_stopped(self, stop):
        stop.listen()
        assert not stop.is_due(self.trainer, done=False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.is_due(self.trainer, done=True)
        stop.finish(self.trainer, None)


def begin(command, update, **variables):
    """A real command that has come to *update*, and what it has printed until then."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment.update(variables)
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, env=environment)  # fmt: skip
    said = ""
    for line in child.stdout:
        said += line
        if f'"num_updates": "{update}"' in line:
            return child, said
    raise AssertionError(said[-3000:])


LONG = ("--max-epoch", "40", "--max-tokens", "150", "--num-workers", "1", "--no-epoch-checkpoints")


def in_forks(folder, command):
    """*command*, a training, as a program in *folder* that hands its signals on to a fork; see ``in_fork.py``."""
    program = folder / "fairseq-train"
    write_program(program, stand_in("fairseq-train"))
    return [program, *command[1:]]


def test_workers_that_read_data_outlive_a_signal_to_the_whole_group(small, tmp_path):
    """As torchrun, a scheduler and Ctrl-C send it; `TestSignals` has all signals."""
    command = train_command(small, tmp_path / "save", *LONG, "--batch-size", "1")
    child, _ = begin(in_forks(tmp_path, command), 3, PIDS=str(tmp_path))
    workers = children((tmp_path / "fairseq-train.").read_text())
    for worker in workers:
        os.kill(int(worker), signal.SIGINT)
    for line in child.stdout:  # longer than what has been read ahead
        if '"num_updates": "30"' in line:
            break
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=300)[0]
    assert child.returncode == 75 and "Traceback" not in rest, rest[-2000:]
    assert workers and not live(*workers)


def test_commands_with_workers_end(small, tmp_path):
    last, common = tmp_path / "checkpoint_last.pt", ("--user-dir", PACKAGE, "--cpu", "--max-tokens", "400")
    for command in (
        train_command(small, tmp_path, "--max-update", "3"),
        ["fairseq-validate", small, "--path", last, *common],
        ["fairseq-generate", small, "--path", last, "--gen-subset", "valid", *common],
    ):
        run(*command, "--num-workers", "2", prepare=("multiprocessing:set_start_method", "forkserver", True))


@pytest.mark.parametrize("module", [safe_stop, fairseq.binarizer, fairseq.data.dictionary])
def test_workers_of_pools_are_forks(monkeypatch, module):
    started = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", started)
    with module.Pool(processes=1) as pool:
        assert pool.apply(os.getppid) == os.getpid()


def test_a_signal_to_one_of_two_processes_stops_both(small, tmp_path):
    flags = ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
    command = in_forks(tmp_path, train_command(small, tmp_path / "save", *LONG, *flags))
    command = ["torchrun", "--standalone", "--nproc_per_node", "2", "--no_python", *command]
    child, _ = begin(command, 3)
    workers = children(child.pid)
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGUSR1)
    rest = child.communicate(timeout=300)[0]
    assert child.returncode == 1 and rest.count("exitcode  : 75") >= 1, rest[-3000:]  # torchrun's own way to say it
    update = int(re.search(r"saved checkpoint_last.pt at update (\d+)", rest)[1])
    state = torch.load(tmp_path / "save/checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] == update
    again, _ = begin(command, update + 1)
    again.send_signal(signal.SIGTERM)  # to all of them, by torchrun
    rest = again.communicate(timeout=300)[0]
    assert re.search(r"saved checkpoint_last.pt at update (\d+)", rest), rest[-3000:]


def wait_and_stop(rank, folder):
    stop = safe_stop.Stop()
    stop.listen()
    (folder / f"{rank}").touch()
    until(lambda: stop.asked is not None)
    (folder / f"{rank}.stopped").touch()
    raise SystemExit(safe_stop.EXIT_STATUS)


def test_processes_that_fairseq_starts_itself_get_the_signal(tmp_path):
    """As on a machine with several GPUs without torchrun."""
    pid = os.fork()
    if pid == 0:
        try:
            safe_stop.spawn(wait_and_stop, (tmp_path,), 2)
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(1)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    os.kill(pid, signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert (tmp_path / "0.stopped").exists() and (tmp_path / "1.stopped").exists()


def test_a_signal_before_fairseq_starts_a_process_is_not_lost(handlers, monkeypatch):
    came = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR1))
    safe_stop.spawn(wait_and_stop, (), 2)
    assert came == [signal.SIGUSR1]


@pytest.mark.parametrize("status, said", [(1, 1), (75, 75), (-9, "process 1 was ended by SIGKILL (out of memory?)")])
def test_a_process_that_fairseq_has_started_and_that_ends_is_no_traceback(handlers, monkeypatch, status, said):
    def spawn(fn, args, nprocs, join):
        raise torch.multiprocessing.ProcessExitedException("", 1, error_pid=5, exit_code=status)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    with pytest.raises(SystemExit) as end:
        safe_stop.spawn(wait_and_stop, (), 2)
    assert end.value.code == said or end.value.code.startswith(said)


def test_two_trainings_do_not_share_a_folder_and_a_kill_leaves_neither_workers_nor_a_lock(small, tmp_path):
    child, _ = begin(train_command(small, tmp_path / "save", *LONG, "--batch-size", "1"), 3)
    workers, before = children(child.pid), {path.name for path in (tmp_path / "save").iterdir()}
    status, log = start(small, tmp_path / "save")
    last = log.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in log and losses(log) == {}
    assert re.fullmatch(rf"\S+/save is in use by process {child.pid} on \S+, since .*: try again .*--save-dir", last)
    new = {path.name.replace(".tmp", "") for path in (tmp_path / "save").iterdir()} - before
    assert new <= {"checkpoint_last.pt", "checkpoint_best.pt"}, "only the first one saves"
    assert live(*workers)
    child.kill()
    child.communicate(timeout=300)
    assert start(small, tmp_path / "save", "--reset-dataloader")[0] == 0
    until(lambda: not live(*workers))  # each looks every 5 seconds


@pytest.fixture
def stopped(whole, tmp_path):
    """A folder as the first epoch leaves it."""
    folder = shutil.copytree(whole[1], tmp_path / "save")
    (folder / "checkpoint2.pt").unlink()
    for name in ("last", "best"):
        shutil.copy(folder / "checkpoint1.pt", folder / f"checkpoint_{name}.pt")
    return folder


def second_epoch(whole):
    return {update: loss for update, loss in whole[0].items() if update > len(whole[0]) // 2}


@pytest.mark.parametrize("damage", ["torn", "empty", "missing"])
def test_the_newest_whole_one_is_taken(small, whole, stopped, damage):
    last = stopped / "checkpoint_last.pt"
    if damage == "missing":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[: 20_000 if damage == "torn" else 0])
    (stopped / "checkpoint_best.pt").unlink()
    status, text = start(small, stopped)
    assert status == 0 and f"resuming from {stopped / 'checkpoint1.pt'}" in text, text[-1500:]
    assert losses(text) == second_epoch(whole)


def test_a_full_disk_ends_in_one_line_and_the_next_start_loses_nothing(small, whole, stopped):
    full = ["resource:setrlimit", resource.RLIMIT_FSIZE, [20_000, 20_000]]
    status, text = start(small, stopped, prepare=full)
    last = text.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in text and losses(text) == second_epoch(whole)
    assert ".pt: cannot be saved (File too large); earlier checkpoints are complete: check the disk and run " in last
    status, text = start(small, stopped)
    assert status == 0 and losses(text) == second_epoch(whole)


def test_without_a_whole_one_it_is_one_line_and_nothing_is_trained(small, stopped):
    for path in stopped.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:20_000])
    status, text = start(small, stopped)
    assert status == 1 and "Traceback" not in text and losses(text) == {}
    assert "checkpoint_last.pt: truncated, without a complete checkpoint next to" in text.strip().splitlines()[-1]


def test_where_none_is_written_none_is_missing(stopped, tmp_path):
    last = stopped / "checkpoint_last.pt"
    last.unlink()
    for path, no_last in ((last, True), (tmp_path / "new/checkpoint_last.pt", False)):
        assert safe_save.to_restore(str(path), no_last) == str(path)


def test_newest_by_time_of_writing_with_the_same_suffix(tmp_path):
    whole = ["checkpoint10.pt", "checkpoint_9_80.pt", "checkpoint9.pt"]  # in no order of names
    names = [*whole, "checkpoint1-shard0.pt", "checkpoint.best_1.pt"]
    for age, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    for suffix, found in (("", whole), ("-shard0", ["checkpoint1-shard0.pt"])):
        paths = safe_save.numbered(str(tmp_path / f"checkpoint_last{suffix}.pt"))
        assert [os.path.basename(path) for path in paths] == found
