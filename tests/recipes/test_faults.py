"""Each write of a save fails in turn, or is the last one: complete checkpoints are left, and the next save succeeds.

``test_stops.py`` has what the next start does with them, and a real full disk.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, safe_load, safe_save
from fairseq.dataclass.configs import CheckpointConfig

from tests.helpers import faults


@pytest.fixture
def save(tmp_path, monkeypatch):
    """save(epoch): begin in the folder as a training does, and save the checkpoints of an epoch."""
    monkeypatch.setattr(safe_save, "LOCKS", [])
    monkeypatch.setattr(checkpoint_utils.save_checkpoint, "best", 9.0, raising=False)
    cfg = CheckpointConfig(save_dir=str(tmp_path / "save"), keep_last_epochs=1)

    def save(epoch):
        def write(path, extra):
            checkpoint_utils.torch_persistent_save({"model": torch.full((50_000,), epoch), "extra_state": extra}, path)

        safe_save.make_folder(cfg.save_dir, no_save=False)
        trainer = SimpleNamespace(data_parallel_rank=0, consolidate_optimizer=lambda: None, save_checkpoint=write,
                                  should_save_checkpoint_on_current_rank=True, checkpoint_suffix="",
                                  get_num_updates=lambda: 10 * epoch)  # fmt: skip
        iterator = SimpleNamespace(epoch=epoch, end_of_epoch=lambda: True, state_dict=lambda: {"epoch": epoch + 1})
        checkpoint_utils.save_checkpoint(cfg, trainer, iterator, 9.0 - epoch)

    return save


def epochs(folder):
    """{checkpoint: its epoch}; each is complete, and all of it is of this epoch."""
    found = {}
    for path in folder.glob("*.pt"):
        state = torch.load(path)
        found[path.name] = int(state["model"][0])
        assert safe_save.is_whole(path) and (state["model"] == found[path.name]).all(), path
        assert state["extra_state"]["train_iterator"]["epoch"] == found[path.name] + 1, path
    return found


def test_a_write_that_fails_loses_nothing(save, tmp_path):
    folder, cases = tmp_path / "save", []
    save(1)
    assert epochs(folder) == dict.fromkeys(("checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"), 1)
    for kind, error in faults.each_fault(folder, lambda: save(2)):
        left = epochs(folder)
        assert {"checkpoint_best.pt", "checkpoint_last.pt"} <= {*left}, kind
        if isinstance(error, safe_load.CheckpointError):
            assert kind != "kill" and "cannot" in str(error) and "save" in str(error) and "\n" not in str(error)
        else:  # a kill, an old checkpoint that cannot be removed, or room that was not needed any more
            assert error is None and (kind == "kill" or left["checkpoint_last.pt"] == 2)
        assert safe_save.to_restore(str(folder / "checkpoint_last.pt"), no_last=False).endswith("checkpoint_last.pt")
        save(2)
        assert epochs(folder) == dict.fromkeys(("checkpoint2.pt", "checkpoint_best.pt", "checkpoint_last.pt"), 2)
        cases.append((kind, error is None))
    counts = {kind: len([case for case in cases if case[0] == kind]) for kind in faults.KINDS}
    assert {*counts.values()} == {counts["kill"]} and counts["kill"] > 15, "each write, with each fault"
    assert ("EIO", False) in cases and ("ENOSPC", False) in cases


def test_data_are_on_the_disk_before_the_file_has_its_name(save, monkeypatch, tmp_path):
    """Without it, a power failure can leave a partial file in place of a complete one."""
    synced, renamed, fsync, replace = set(), [], os.fsync, os.replace

    def rename(old, new):
        renamed.append(os.stat(old).st_ino in synced)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino) or fsync(file))
    monkeypatch.setattr(os, "replace", rename)
    save(1)
    assert renamed == [True] * 3 and os.stat(tmp_path / "save").st_ino in synced
