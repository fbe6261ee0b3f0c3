"""Files that are changed at random, in their own structure: every reader reads them, or rejects them in one line.

Checkpoints by the instructions of their pickle and by their values, archives by their members, indices by their
numbers, text by its lines: a few, always the same, and many at night, 20 times as many with FAIRSEQ_DEEP_FUZZ=20.
"""

import contextlib
import copy
import os
import pickletools
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from fairseq import safe_files, safe_load
from fairseq.data import Dictionary, indexed_dataset
from hypothesis import assume
from hypothesis import strategies as st

import fairseq_deep  # noqa: F401 (registers its task)
from fairseq_deep.cli import main
from fairseq_deep.errors import UsageError
from fairseq_deep.recipes.text import corpus
from tests.helpers.commands import run
from tests.helpers.fuzz import fuzzed
from tests.helpers.hostile import archive, everything, member
from tests.helpers.paths import STOCK
from tests.helpers.recipes import LANGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


HARM = ("os.", "subprocess.", "socket.", "shutil.", "exec", "pty.", "webbrowser.", "ctypes.")
HARMLESS = ("os.listdir", "os.scandir", "os.remove", "os.mkdir", "os.rename", "shutil.rmtree")
WATCH = []


@pytest.fixture(scope="module", autouse=True)
def watched():
    """What a loaded file sets off, as Python itself sees it."""

    def hook(event, arguments):
        if WATCH and event.startswith(HARM) and event not in HARMLESS:
            if event != "exec" or arguments[0].co_filename == "<string>" and not importing():
                WATCH.append(event)

    sys.addaudithook(hook)


def importing():
    """Whether a module is being imported, which may make classes by exec."""
    frame = sys._getframe()
    while frame and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def nothing_runs():
    WATCH[:] = ["on"]
    yield
    set_off, WATCH[:] = WATCH[1:], []
    assert set_off == []


def test_the_watch_sees_what_runs():
    for harm in (lambda: os.system("true"), lambda: exec("1")):
        with pytest.raises(AssertionError), nothing_runs():
            harm()


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


@fuzzed(20, 400, changes=changes())
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


@fuzzed(20, 300, words=st.sampled_from(COMMANDS), data=st.data())
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
                  st.text(max_size=6).filter(lambda name: "\0" not in name))  # fmt: skip
kinds = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, b"V"])


@fuzzed(20, 150, listed=st.lists(st.tuples(names, kinds, names), max_size=5),
        cut=st.one_of(st.none(), st.floats(0, 1)), cached=st.booleans())  # fmt: skip
def test_members_of_an_archive(listed, cut, cached):
    with tempfile.TemporaryDirectory() as outer:
        path = Path(outer, "a/b/model.tar")
        path.parent.mkdir(parents=True)
        try:
            archive(path, *(member(name, "x", type=kind, linkname=link) for name, kind, link in listed), mode="w:")
        except UnicodeEncodeError:
            assume(False)
        if cut is not None:
            path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
        before, content = everything(Path(outer)), path.read_bytes()
        try:
            top = safe_files.unpack(str(path), replace=cached)
        except safe_load.CheckpointError as refusal:
            assert "\n" not in str(refusal) and everything(Path(outer)) == before and path.read_bytes() == content
        else:
            left = [name for name in everything(Path(outer)) if name not in before]
            assert all(name.startswith("a/b/model.tar/") for name in left) if cached else left == []
            assert Path(top).exists()


@pytest.fixture(scope="module")
def indexed(folder):
    """An index of three sentences and its data."""
    prefix = folder / "train.a-b.a"
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=100)
    for length in (3, 5, 1):
        builder.add_item(torch.arange(length))
    builder.finalize(f"{prefix}.idx")
    return prefix, Path(f"{prefix}.idx").read_bytes()


READER = """
import sys
from fairseq.data.indexed_dataset import MMapIndexedDataset
dataset = MMapIndexedDataset(sys.argv[1])
print(sum(len(dataset[at]) >= 0 for at in range(min(len(dataset), 10))))
"""


def read(prefix):
    """Read an index in a process of its own: a read beyond its memory would end it by a signal."""
    done = run(sys.executable, "-c", READER, prefix, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


numbers = st.one_of(st.integers(0, 255).map(lambda n: bytes([n])), st.sampled_from([b"", b"\xff" * 8, b"\x00" * 8]),
                    st.integers(-(2**63), 2**63 - 1).map(lambda n: struct.pack("<q", n)))  # fmt: skip


def test_a_whole_index_is_read(indexed):
    assert read(indexed[0]) == "3\n"


@fuzzed(20, 100, changes=st.lists(st.tuples(st.integers(0, 61), numbers), min_size=1, max_size=3),
        length=st.integers(0, 61))  # fmt: skip
def test_numbers_of_an_index(indexed, capsys, changes, length):
    prefix, whole = indexed
    content = bytearray(whole)
    for place, number in changes:
        content[place : place + len(number)] = number
    Path(f"{prefix}.idx").write_bytes(content[:length] if length % 3 == 0 else content)
    tool(capsys, "check", prefix.parent)
    read(prefix)


LINES = ["a 3", "b 2 #fairseq:overwrite", "a", "x 1e9"]


@fuzzed(20, 100, lines=st.lists(st.one_of(st.text(max_size=12), st.sampled_from(LINES))))
def test_lines_of_a_dictionary(folder, lines):
    path = folder / "dict.txt"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    try:
        dictionary = Dictionary.load(str(path))
    except (ValueError, RuntimeError):  # fairseq's own refusals
        return
    assert len(dictionary) >= 4 and all(isinstance(dictionary[at], str) for at in range(len(dictionary)))


white = "a \t\r\x0b\x0c\x1c\x1e\x85\u2028\u2029\u00a0\u200b\ufeffä😀'\"$`\\"
line = st.one_of(st.text(white, max_size=8).map(str.encode), st.text(white, max_size=8).map(str.encode),
                 st.binary(max_size=3).map(lambda some: some.replace(b"\n", b"")))  # fmt: skip


@fuzzed(30, 300, pairs=st.lists(st.tuples(line, line), max_size=6), more=st.lists(line, max_size=1),
        mark=st.booleans(), end=st.booleans())  # fmt: skip
def test_pairs_of_a_text(folder, pairs, more, mark, end):
    """Those that are copied are those of a reading that knows line feeds alone, in order; or it is one line."""
    sides = [[*(pair[side] for pair in pairs), *(more if side else [])] for side in range(2)]
    for lang, side in zip(LANGS, sides):
        content = b"\n".join(side) + (b"\n" if side and (end or not side[-1]) else b"")
        (folder / f"in.{lang}").write_bytes((b"\xef\xbb\xbf" if mark and side else b"") + content)
    paths, targets = ([str(folder / f"{name}.{lang}") for lang in LANGS] for name in ("in", "out"))
    try:
        written, dropped = corpus.copy_pairs(paths, targets, keep_empty=False)
    except UsageError:
        return
    assert more == [] and written + dropped == len(pairs)
    first = "utf-8" if mark else "utf-8-sig"  # a mark is taken once
    plain = [[" ".join(raw.decode(first if at == 0 else "utf-8").split()) for raw in pair]
             for at, pair in enumerate(pairs)]  # fmt: skip
    copied = [Path(target).read_text(encoding="utf-8").splitlines() for target in targets]
    assert list(map(list, zip(*copied))) == [pair for pair in plain if all(pair)]
