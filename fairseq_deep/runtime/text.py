"""From raw text to sub-words and back, as in the recipes: sacremoses, jieba (Chinese), subword-nmt, SentencePiece."""

import contextlib
import io
import re

from fairseq_deep.core.registry import UsageError
from fairseq_deep.errors import one_line

SEPARATOR = "@@"
TAG = re.compile(r"<2[^\s>]+> ?")  # of the target language, before a source: no sub-word model has seen it


class TextSteps:
    """The steps before and after a model.

    Args:
        codes: file with the merges of subword-nmt, or a model of SentencePiece (.model); None: no sub-words
        tokenizer: "moses" or "none"
        lowercase: whether the source is lowercased first

    Raises:
        UsageError: a package is missing, or the merges cannot be read
    """

    def __init__(
        self, source_lang: str, target_lang: str, codes: str | None, tokenizer: str = "moses", lowercase=False
    ):
        self.lowercase, self.tokenizer, self.segmenter, self.cut = lowercase, None, None, None
        self.pieces = codes is not None and codes.endswith(".model")
        try:
            if tokenizer == "moses":
                from sacremoses import MosesDetokenizer, MosesTokenizer

                self.tokenizer, self.detokenizer = MosesTokenizer(source_lang), MosesDetokenizer(target_lang)
                if source_lang == "zh":
                    import jieba

                    jieba.setLogLevel("WARNING")
                    self.segmenter = jieba.cut
            if codes is not None:
                self.cut = _read_pieces(codes) if self.pieces else _read_merges(codes)
        except ImportError as error:
            raise UsageError(f"{error.name} is missing: pip install {error.name.replace('_', '-')}") from error

    @property
    def kind(self) -> str | None:
        """Whose sub-words these are; None: words are units."""
        if self.cut is None:
            return None
        return "sentencepiece" if self.pieces else "subword-nmt"

    def prepare(self, line: str) -> str:
        """The units of a raw line, with blanks between them."""
        if self.lowercase:
            line = line.lower()
        if self.segmenter is not None:
            line = " ".join(self.segmenter(line))
        if self.tokenizer is not None:
            line = self.tokenizer.tokenize(line, return_str=True)
        line = " ".join(line.split())
        if self.cut is None:
            return line
        tag = TAG.match(line)
        return tag[0] + self.cut(line[tag.end() :]) if tag and self.pieces else self.cut(line)

    def finish(self, line: str) -> str:
        """Raw text of the units in *line*, as fairseq's ``--remove-bpe`` joins them."""
        if self.kind == "sentencepiece":
            line = line.replace(" ", "").replace("\u2581", " ").strip()
        elif self.kind == "subword-nmt":
            line = (line + " ").replace(f"{SEPARATOR} ", "").rstrip()
        return line if self.tokenizer is None else self.detokenizer.detokenize(line.split())


def _read_merges(path: str):
    from subword_nmt.apply_bpe import BPE

    said = io.StringIO()
    try:
        with open(path, encoding="utf-8") as stream, contextlib.redirect_stderr(said):
            merges = BPE(stream, separator=SEPARATOR)
    except (OSError, ValueError, IndexError, SystemExit) as error:  # it prints and exits where a line is no merge
        problem = " ".join((said.getvalue() or str(error)).split())
        raise UsageError(f"{path} has no merges of subword-nmt: {problem}") from error
    if merges.version not in ((0, 1), (0, 2)):  # the library would say so at the first word
        version = ".".join(map(str, merges.version))
        raise UsageError(f"{path} has merges of version {version}; subword-nmt supports 0.1 and 0.2: learn them again")
    return merges.process_line


def _read_pieces(path: str):
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} is no model of SentencePiece: {one_line(error)}") from error
    return lambda line: " ".join(model.encode(line, out_type=str))
