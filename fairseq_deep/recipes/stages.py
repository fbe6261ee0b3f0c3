"""Dependencies of an experiment's stages, and markers of finished stages."""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import platform
import zlib
from typing import TYPE_CHECKING, Any

from fairseq_deep.runtime.language_codes import tokenizer_language
from fairseq_deep.runtime.records import CHECKPOINTS
from fairseq_deep.tools.input_text import text_of

from .options import EXAMPLES, ROOT

if TYPE_CHECKING:
    from .plan import Plan


def hypotheses_of(run: str, lang: str) -> str:
    """Return the translations of *run*, a directory or the file with the translations."""
    return os.path.join(run, f"test.hyp.{lang}") if os.path.isdir(run) else run


def crc(paths: Any) -> list[tuple[str, int]]:
    """Return names and checksums of the existing *paths*."""
    found = []
    for path in filter(os.path.isfile, paths):
        stat = os.stat(path)
        found.append((os.path.basename(path), _crc_of(path, stat.st_mtime_ns, stat.st_size)))
    return found


@functools.cache
def _crc_of(path: str, *_: int) -> int:
    """Return the checksum of a file; it is cached by time and size, since each seed needs it."""
    total = 0
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            total = zlib.crc32(block, total)
    return total


def _data(plan: Plan) -> list[Any]:
    """Return values that identify the raw text of an experiment."""
    options = plan.options
    if plan.route == "demo":
        return crc(sorted(glob.glob(os.path.join(EXAMPLES, "demo", "**", "*.py"), recursive=True)))
    if plan.route == "download":
        temperature = [options.temperature] * options.multilingual
        return [options.data_url, *temperature, *([options.corpus] if options.corpus != "corpus" else [])]
    if options.multilingual:
        pattern = os.path.join(glob.escape(options.data), "*", "*", "opus.*")
        return [options.temperature, *((path, os.path.getsize(path)) for path in sorted(glob.glob(pattern)))]
    names = [f"{split}.{lang}" for split in ("train", "valid", "test", "test[1-9]*") for lang in plan.langs]
    names += [f"test*.{options.target_lang}.ref[0-9]*"]
    found = {path for name in names for end in ("", ".gz")
             for path in glob.glob(os.path.join(glob.escape(options.data), name + end))}  # fmt: skip
    return crc(sorted(found))


def _parts(plan: Plan, stage: int) -> list[Any]:
    """Return the inputs of a stage, in addition to earlier stages."""
    options = plan.options
    if stage == 0:
        requirements = crc([os.path.join(ROOT, "requirements.txt")])
        return [ROOT, platform.node(), options.ngpu, os.environ.get("FAIRSEQ_DEEP_ENV", ""), requirements]
    if stage == 4:
        names = ("arch", "max_tokens", "update_freq", "precision", "seed")
        flags = [plan.share_flag, *plan.conf_flags, *options.extra, *plan.save_flags]
        flags += [f"--start-from={os.path.realpath(options.start_from)}"] * bool(options.start_from)
        return [plan.devices, *(getattr(options, name) for name in names), flags]
    if stage == 7:
        path = hypotheses_of(options.against, options.target_lang)
        own = tokenizer_language(options.target_lang)  # runs of other languages keep their keys
        return [options.against, crc([path]), *([own] if own else [])]
    names = {1: ("source_lang", "target_lang"),
             2: ("bpe_merges", "max_words", "lowercase", "bpe", "max_subwords"), 3: ("vocab_threshold",),
             5: ("average",), 6: ("beam", "lenpen", "gen_batch", "max_len_a", "max_len_b", "subsets",
                                  "decode_precision", "gnmt_lenpen")}  # fmt: skip
    own = [getattr(options, name) for name in names[stage]]
    if stage == 1:
        own += ["", "", "train=4400000-4600000,valid=3000,test=3003"]  # of a removed option: earlier runs resume
    if stage == 1 and options.teacher:
        files = [os.path.join(options.teacher, name).rstrip("/") for name in ("", *CHECKPOINTS)]
        package = [os.path.join(options.teacher, name) for name in ("config.json", "model.safetensors")]
        own.append(crc([*filter(os.path.isfile, files)][:1] + package))  # the one that find_bundle chooses
    return [plan.route, *own, _data(plan)] if stage == 1 else own


def compute_keys(plan: Plan) -> list[str]:
    """Return a hash of all inputs per stage; no other stage depends on stage 0."""
    keys, previous = [], ""
    for stage in range(8):
        keys.append(hashlib.sha256(repr((previous, _parts(plan, stage))).encode()).hexdigest())
        previous = keys[stage] if stage else ""
    return keys


class Markers:
    """Marker files of finished stages."""

    def __init__(self, plan: Plan) -> None:
        self.exp, self.keys = plan.exp, plan.keys

    def path(self, stage: int) -> str:
        """Return the marker file of a stage."""
        return os.path.join(self.exp, f".done.{stage}")

    def is_done(self, stage: int) -> bool:
        """Return whether the stage is finished with the same settings."""
        return text_of(self.path(stage)).strip() == self.keys[stage]

    def set(self, stage: int) -> None:
        """Mark the stage as finished."""
        with open(self.path(stage), "w", encoding="utf-8") as stream:
            stream.write(self.keys[stage] + "\n")

    def forget(self, stage: int) -> None:
        """Remove the markers of a stage and of all later stages; no stage depends on stage 0."""
        for each in range(stage, 8 if stage else 1):
            if os.path.exists(self.path(each)):
                os.remove(self.path(each))
