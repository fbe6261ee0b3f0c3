"""Files from strangers: what hides a call, archives of any content, settings of checkpoints."""

import contextlib
import io
import sys
import tarfile

import torch

import fairseq_deep  # noqa: F401 (registers its task)


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def member(name, content="", **fields):
    content = content if isinstance(content, bytes) else content.encode()
    info = tarfile.TarInfo(name)
    for field, value in {"size": len(content), **fields}.items():
        setattr(info, field, value)
    return info, content


def archive(path, *members, mode="w:gz"):
    with tarfile.open(path, mode) as opened:
        for info, content in members:
            opened.addfile(info, io.BytesIO(content))
    return path


def write_dictionaries(folder, *languages):
    """As large as those of STOCK."""
    for language in languages:
        (folder / f"dict.{language}.txt").write_text("".join(f"{letter} 1\n" for letter in "abcdefgh"))


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def checkpoint(**settings):
    cfg = {"task": {"_name": "translation", "data": "x"}, "model": {"_name": "transformer"}, "common": {"seed": 1}}
    for name, value in settings.items():
        section, _, key = name.partition("__")
        cfg.setdefault(section, {})[key or "_name"] = value
    return {"cfg": cfg, "model": {"w": torch.ones(1)}}


HARM = ("os.", "subprocess.", "socket.", "shutil.", "pty.", "webbrowser.", "ctypes.")
HARMLESS = ("os.listdir", "os.scandir", "os.remove", "os.mkdir", "os.rename", "shutil.rmtree")
SEEN = []


def note(event, arguments):
    if SEEN and (event == "open" or event.startswith(HARM) and event not in HARMLESS):
        SEEN[-1].append(str(arguments[0]) if event == "open" else f"<{event}>")


sys.addaudithook(note)  # which nothing can remove


@contextlib.contextmanager
def seen():
    """A list of the files that are opened within it and, such as <os.system>, of what no file is to set off."""
    SEEN.append([])
    try:
        yield SEEN[-1]
    finally:
        SEEN.pop()
