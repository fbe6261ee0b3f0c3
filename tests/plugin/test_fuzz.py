"""Files that are changed at random, in their own structure: every reader reads them, or rejects them in one line.

Checkpoints by the instructions of their pickle and by their values, archives by their members, indices by their
bytes, text by its lines: a few, always the same, and 15 times as many at night, or as FAIRSEQ_DEEP_FUZZ says.
"""

import contextlib
import copy
import os
import pickletools
import struct
import sys
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
from tests.helpers.commands import run
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


def pieces(pickled):
    """The instructions of a pickle, as bytes."""
    places = [place for _, _, place in pickletools.genops(pickled)] + [len(pickled)]
    return [pickled[start:end] for start, end in zip(places, places[1:])]


def text_piece(text):
    return b"X" + struct.pack("<I", len(text)) + text.encode()


@st.composite
def changes(draw):
    """A few changes of a list of instructions: (place, how many are replaced, by what)."""
    what = st.one_of(
        st.just(b""),
        st.sampled_from(ODD).map(text_piece),
        st.sampled_from([b"c" + f"{module}\n{name}\n".encode() for module in ODD[:6] for name in ODD[1:7]]),
        st.sampled_from([b"R", b"b", b"\x81", b"Q", b"0", b"(", b"t", b"}", b"]", b")", b"N", b"\x88", b"2", b"."]),
        st.integers(-(2**31), 2**31 - 1).map(lambda number: b"J" + struct.pack("<i", number)),
    )
    return draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 1), what), min_size=1, max_size=4))


def changed(instructions, list_of_changes):
    result = list(instructions)
    for place, count, what in list_of_changes:
        at = int(place * (len(result) - 1))
        result[at : at + count] = [what]
    return b"".join(result)


@pytest.fixture(scope="module")
def parts(folder):
    """The entries of a zip that torch.save wrote, and the instructions of its pickle, which are some hundreds."""
    state = torch.load(STOCK, weights_only=False)
    state["model"] = dict(list(state["model"].items())[:3])
    state.pop("last_optimizer_state")
    torch.save(state, folder / "whole.pt")
    with zipfile.ZipFile(folder / "whole.pt") as opened:
        entries = {entry.filename: opened.read(entry) for entry in opened.infolist()}
    key = next(name for name in entries if name.endswith("/data.pkl"))
    return entries, key, pieces(entries[key])


def tool(capsys, *words):
    """Exit code of fairseq-deep; what it refuses is one line."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert code in (0, 1, 2)
    assert words[0] != "check" or not {"\x1b", "\u202e"} & {*captured.out, *captured.err}
    if code and not captured.out:
        assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    return code


@fuzzed(20, changes=changes())
def test_instructions_of_a_checkpoint(parts, folder, capsys, changes):
    entries, key, instructions = parts
    path = folder / "changed.pt"
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in entries.items():
            opened.writestr(name, changed(instructions, changes) if name == key else content)
    with nothing_runs():
        code = tool(capsys, "check", path)
        try:
            safe_load.load(path)
        except safe_load.CheckpointError as refusal:
            assert "\n" not in str(refusal)
            assert code or "contains" not in str(refusal) or "pickle instruction" in str(refusal), refusal
    assert not Path("MARK").exists()


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


READ_INDEX = """
import sys
from fairseq.data.indexed_dataset import MMapIndexedDataset
dataset = MMapIndexedDataset(sys.argv[1])
print(sum(len(dataset[at]) >= 0 for at in range(min(len(dataset), 10))))
"""


def read_index(path, capsys):
    """In a process of its own: a read beyond its memory would end it by a signal."""
    tool(capsys, "check", path.parent)
    done = run(sys.executable, "-c", READ_INDEX, path.with_suffix(""), check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def read_dictionary(path, capsys):
    try:
        dictionary = Dictionary.load(str(path))
    except Exception as error:
        assert line_of(error)
    else:
        assert len(dictionary) >= 4 and all(isinstance(dictionary[at], str) for at in range(len(dictionary)))


def read_text(path, capsys):
    """The other side has three lines."""
    with contextlib.suppress(UsageError):
        paths, copies = ([f"{path.parent}/{name}.{lang}" for lang in LANGS] for name in ("in", "out"))
        assert corpus.write_rows(copies, corpus.read_rows(paths)) == 3


@pytest.fixture(scope="module")
def files(folder):
    """{name: (content, what reads it)} of an index of three sentences, a dictionary and a text."""
    builder = indexed_dataset.make_builder(f"{folder}/train.a-b.a.bin", impl="mmap", vocab_size=100)
    for length in (3, 5, 1):
        builder.add_item(torch.arange(length))
    builder.finalize(f"{folder}/train.a-b.a.idx")
    (folder / f"in.{LANGS[1]}").write_text("x\ny\nz\n")
    return {
        "train.a-b.a.idx": ((folder / "train.a-b.a.idx").read_bytes(), read_index),
        "dict.txt": (b"a 3\nb 2 #fairseq:overwrite\nc 1\n", read_dictionary),
        f"in.{LANGS[0]}": ("a b\nc \u2028\r\nä😀\n".encode(), read_text),
    }


def test_a_whole_index_is_read(files, folder, capsys):
    assert read_index(folder / "train.a-b.a.idx", capsys) == "3\n"


ODD_BYTES = [b"", b"\xff" * 8, b"\x00" * 8, b"\n", b"\r", b" ", b"\xef\xbb\xbf", b"\xed\xa0\x80"]
pieces_of_bytes = st.one_of(st.integers(0, 255).map(lambda n: bytes([n])), st.sampled_from(ODD_BYTES),
                            st.integers(-(2**63), 2**63 - 1).map(lambda n: struct.pack("<q", n)))  # fmt: skip


@fuzzed(40, kind=st.integers(0, 2), cut=st.floats(0, 4),
        changes=st.lists(st.tuples(st.floats(0, 1), pieces_of_bytes), min_size=1, max_size=3))  # fmt: skip
def test_bytes_of_a_file(files, folder, capsys, kind, changes, cut):
    name, (whole, reader) = [*files.items()][kind]
    content = bytearray(whole)
    for place, piece in changes:
        at = int(place * len(content))
        content[at : at + len(piece)] = piece
    (folder / name).write_bytes(content[: int(cut * len(content))])  # three of four are not cut
    reader(folder / name, capsys)
