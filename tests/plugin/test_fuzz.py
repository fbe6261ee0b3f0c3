"""Files that are changed at random, in their own structure: every reader reads them, or rejects them in one line.

Checkpoints by the instructions of their pickle and by their values, archives by their members, other files by their
bytes: a few, always the same, and 15 times as many at night, or as FAIRSEQ_DEEP_FUZZ says.
"""

import contextlib
import copy
import multiprocessing
import os
import pickletools
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from fairseq import safe_files, safe_load
from fairseq.data import Dictionary, indexed_dataset
from fairseq.safe_exit import line_of
from hypothesis import assume
from hypothesis import strategies as st

import fairseq_deep  # noqa: F401 (registers its task)
from fairseq_deep.cli import main
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.text import corpus
from tests.helpers import hostile
from tests.helpers.fuzz import fuzzed
from tests.helpers.hostile import archive, everything, member
from tests.helpers.paths import STOCK
from tests.helpers.recipes import LANGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@contextlib.contextmanager
def nothing_runs():
    with hostile.seen() as events:
        yield
    assert [event for event in events if event.startswith("<")] == []


def test_the_watch_sees_what_runs():
    with pytest.raises(AssertionError), nothing_runs():
        os.system("true")


ODD = ("os", "system", "posix", "builtins", "eval", "exec", "getattr", "__class__", "collections", "OrderedDict",
       "torch", "load", "../x", "${oc.env:HOME}", "", "cpu", "0", "torch._utils", "_rebuild_tensor_v2", "model", "args",
       "_name", "touch MARK", "fairseq.tasks", "storage", "cfg", "bpe", "gpt2", "bpe_codes", "init_from", "data",
       "http://127.0.0.1:9/x", "/etc/passwd", "\nunusual  nothing\x1b[2J\u202e")  # fmt: skip


def tool(capsys, *words):
    """Exit code of fairseq-deep; what it refuses is one line."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert code in (0, 1, 2)
    assert words[0] != "check" or not {"\x1b", "\u202e"} & {*captured.out, *captured.err}
    if code and not captured.out:
        assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    return code


values = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
                   st.sampled_from(ODD), st.just([]), st.just({}), st.just({"x": [1, {"y": None}]}), st.just((1, "a")),
                   st.sampled_from([torch.zeros(0), torch.ones(2, 3), torch.tensor(float("nan")),
                                    torch.zeros(2, dtype=torch.int8), torch.zeros(3, device="meta"),
                                    torch.eye(2).to_sparse()]))  # fmt: skip


def nodes(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from nodes(value[key], (*path, key))
    elif isinstance(value, list):
        for key in range(len(value)):
            yield from nodes(value[key], (*path, key))


@pytest.fixture(scope="module")
def state():
    loaded = safe_load.load(STOCK)
    return loaded, list(nodes(loaded))


COMMANDS = [
    ("check",), ("average", "--output", "{folder}/mean.pt", "--inputs"), ("export", "--output", "{folder}/export.pt"),
]  # fmt: skip


@fuzzed(20, words=st.sampled_from(COMMANDS), data=st.data())
def test_values_of_a_checkpoint(state, folder, capsys, words, data):
    whole, paths = state
    odd = copy.deepcopy(whole)
    for path in data.draw(st.lists(st.sampled_from(paths[1:]), min_size=1, max_size=2)):
        place = odd
        try:
            for key in path[:-1]:
                place = place[key]
            if data.draw(st.booleans()):
                place[path[-1]] = data.draw(values)
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            assume(False)  # an earlier change took the place away
    torch.save(odd, folder / "odd.pt")
    Path(folder / "odd.tar").unlink(missing_ok=True)
    archive(folder / "odd.tar", member("m/odd.pt", (folder / "odd.pt").read_bytes()), mode="w:")
    with nothing_runs():
        assert words[0] != "check" or tool(capsys, "check", folder / "odd.tar") != 2
        tool(capsys, *(word.format(folder=folder) for word in words), folder / "odd.pt")


names = st.one_of(st.sampled_from(["m", "m/a", "m/a/b", "../x", "/x", "m/../../x", "..\\x", ".", "", "m//a", "~/x"]),
                  st.text("abäz/ .\\\n😀", max_size=6))  # fmt: skip
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"V"])


@fuzzed(20, listed=st.lists(st.tuples(names, kinds, names), max_size=5), cut=st.floats(0, 4),
        cached=st.booleans())  # fmt: skip
def test_members_of_an_archive(tmp_path_factory, listed, cut, cached):
    outer = tmp_path_factory.mktemp("archive")
    path = outer / "a/b/model.tar"
    path.parent.mkdir(parents=True)
    archive(path, *(member(name, "x", type=kind, linkname=link) for name, kind, link in listed), mode="w:")
    path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])  # three of four are not cut
    before, content = everything(outer), path.read_bytes()
    try:
        top = safe_files.unpack(str(path), replace=cached)
    except safe_load.CheckpointError as refusal:
        assert "\n" not in str(refusal) and everything(outer) == before and path.read_bytes() == content
    else:
        left = [name for name in everything(outer) if name not in before]
        assert all(name.startswith("a/b/model.tar/") for name in left) if cached else left == []
        assert Path(top).exists()


@pytest.fixture(scope="module")
def checkpoint(folder):
    """The entries of a zip that torch.save wrote, the name of its pickle, and the instructions in it, some hundreds."""
    state = torch.load(STOCK, weights_only=False)
    state["model"] = dict(list(state["model"].items())[:3])
    state.pop("last_optimizer_state")
    torch.save(state, folder / "whole.pt")
    with zipfile.ZipFile(folder / "whole.pt") as opened:
        entries = {entry.filename: opened.read(entry) for entry in opened.infolist()}
    name = next(name for name in entries if name.endswith("/data.pkl"))
    places = [place for _, _, place in pickletools.genops(entries[name])] + [len(entries[name])]
    return entries, name, [entries[name][start:end] for start, end in zip(places, places[1:])]


def read_checkpoint(path, capsys, checkpoint):
    """With *path* as the pickle."""
    (entries, pickle, _), whole = checkpoint, path.with_name("changed.pt")
    with zipfile.ZipFile(whole, "w") as opened:
        for name, content in entries.items():
            opened.writestr(name, path.read_bytes() if name == pickle else content)
    with nothing_runs():
        code = tool(capsys, "check", whole)
        try:
            safe_load.load(whole)
        except safe_load.CheckpointError as refusal:
            assert "\n" not in str(refusal)
            assert code or "contains" not in str(refusal) or "pickle instruction" in str(refusal), refusal
    assert not Path("MARK").exists()


def lengths(path):
    dataset = indexed_dataset.MMapIndexedDataset(str(path.with_suffix("")))
    return [len(dataset[at]) for at in range(min(len(dataset), 10))]


def read_index(path, capsys, _):
    """In a process of its own: a read beyond its memory would end it by a signal."""
    tool(capsys, "check", path.parent)
    fork = multiprocessing.get_context("fork").Process(target=lengths, args=(path,))
    fork.start()
    fork.join()
    assert fork.exitcode in (0, 1)


def read_dictionary(path, *_):
    try:
        dictionary = Dictionary.load(str(path))
    except Exception as error:
        assert line_of(error)
    else:
        assert len(dictionary) >= 4 and all(isinstance(dictionary[at], str) for at in range(len(dictionary)))


def read_text(path, *_):
    """The other side has three lines."""
    with contextlib.suppress(UsageError):
        paths, copies = ([f"{path.parent}/{name}.{lang}" for lang in LANGS] for name in ("in", "out"))
        assert corpus.write_rows(copies, corpus.read_rows(paths)) == 3


READERS = {"data.pkl": read_checkpoint, "train.a-b.a.idx": read_index, "dict.txt": read_dictionary,
           f"in.{LANGS[0]}": read_text}  # fmt: skip


@pytest.fixture(scope="module")
def files(folder, checkpoint):
    """{name: pieces} of a pickle, an index of three sentences, a dictionary and a text."""
    builder = indexed_dataset.make_builder(f"{folder}/train.a-b.a.bin", impl="mmap", vocab_size=100)
    for length in (3, 5, 1):
        builder.add_item(torch.arange(length))
    builder.finalize(f"{folder}/train.a-b.a.idx")
    assert lengths(folder / "train.a-b.a.idx") == [3, 5, 1]
    (folder / f"in.{LANGS[1]}").write_text("x\ny\nz\n")
    index = (folder / "train.a-b.a.idx").read_bytes()
    texts = (index, b"a 3\nb 2 #fairseq:overwrite\nc 1\n", "a b\nc \u2028\r\nä😀\n".encode())
    return dict(zip(READERS, [checkpoint[2], *([bytes([each]) for each in text] for text in texts)]))


PIECES = st.one_of(
    st.sampled_from([b"", b"\xff" * 8, b"\x00" * 8, b"\n", b"\r", b" ", b"\xef\xbb\xbf", b"\xed\xa0\x80"]),
    st.integers(0, 255).map(lambda number: bytes([number])),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: struct.pack("<q", number)),
    # instructions of a pickle: text, types, calls and the like, numbers
    st.sampled_from(ODD).map(lambda text: b"X" + struct.pack("<I", len(text.encode())) + text.encode()),
    st.sampled_from([f"c{module}\n{name}\n".encode() for module in ODD[:6] for name in ODD[1:7]]),
    st.sampled_from([b"R", b"b", b"\x81", b"Q", b"0", b"(", b"t", b"}", b"]", b")", b"N", b"\x88", b"2", b"."]),
    st.integers(-(2**31), 2**31 - 1).map(lambda number: b"J" + struct.pack("<i", number)),
)


@fuzzed(60, name=st.sampled_from([*READERS]), cut=st.floats(0, 4), changes=st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 1, 8]), PIECES), min_size=1, max_size=4,
))  # fmt: skip
def test_pieces_of_a_file(files, checkpoint, folder, capsys, name, changes, cut):
    """Replaced, inserted and cut: instructions of a checkpoint's pickle, and bytes of other files."""
    pieces = list(files[name])
    for place, count, piece in changes:
        at = int(place * len(pieces))
        pieces[at : at + count] = [piece]
    (folder / name).write_bytes(b"".join(pieces[: int(cut * len(pieces))]))  # three of four are not cut
    READERS[name](folder / name, capsys, checkpoint)
