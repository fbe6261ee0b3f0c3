"""Translate with a file of ``fairseq-deep export --format torch`` in plain PyTorch, without fairseq_deep.

The file has two programs, and the beam search around them is here:

    python examples/translate_pt2.py model.pt2 < text.en > text.de

PyTorch 2.8 or newer is enough for tokens. Raw text requires what the model was trained with: sacremoses, subword-nmt,
SentencePiece or jieba. Loading a file runs its code: load only files that you trust.
"""

import base64
import io
import json
import re
import sys
import zipfile
from collections.abc import Container

import torch
from torch import Tensor
from torch.export.pt2_archive._package import load_pt2

BATCH = 64  # sentences


class Model:
    """The programs of a file with their settings and dictionaries."""

    def __init__(self, path: str):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch compares no checksums
        if damaged is not None:
            raise ValueError(f"{damaged} is damaged")
        with open(path, "rb") as file:
            content = load_pt2(file)
        self.encoder, self.step = (content.exported_programs[name].module() for name in ("encoder", "step"))
        self.files = content.extra_files
        self.settings = json.loads(self.files["model.json"])
        self.source, self.target = (self.files[f"{side}.txt"].split("\n")[:-1] for side in ("source", "target"))

    @torch.no_grad()
    def search(self, src_tokens: Tensor) -> list[list[tuple[float, list[int]]]]:
        """Return the hypotheses of each sentence (B x S, padded), the best first: score and tokens."""
        found, special = self.settings["search"], self.settings["special"]
        beam, pad, eos = found["beam"], special["pad"], special["eos"]
        source, caches = self.encoder(src_tokens)
        words = torch.full((len(src_tokens), beam), eos)  # which the decoder reads first
        order, history = torch.zeros_like(words), words.unsqueeze(2)[:, :, 1:]
        scores = torch.full(words.shape, -torch.inf)
        scores[:, 0] = 0  # all hypotheses of a sentence start alike
        ended: list[list[tuple[float, list[int]]]] = [[] for _ in src_tokens]
        longest = min(int(found["max_len_a"] * src_tokens.size(1) + found["max_len_b"]), self.settings["capacity"] - 1)
        for position in range(longest + 1):
            logits, caches = self.step(words, order, torch.tensor([position]), source, caches)
            logs = logits.float().log_softmax(-1)
            logs[:, :, pad] = -torch.inf
            if position == 0:
                logs[:, :, eos] = -torch.inf
            if position == longest:
                logs[:, :, :eos] = logs[:, :, eos + 1 :] = -torch.inf
            best, places = (scores.unsqueeze(2) + logs).flatten(1).topk(2 * beam)
            ranks, tokens = places // logs.size(2), places % logs.size(2)
            ends = tokens.eq(eos) & best.isfinite()
            for sentence, place in ends[:, :beam].nonzero().tolist():
                if len(ended[sentence]) < beam:
                    score = float(best[sentence, place]) / self.penalty(position + 1)
                    ended[sentence].append((score, history[sentence, ranks[sentence, place]].tolist()))
            if all(len(hypotheses) == beam for hypotheses in ended):
                break
            going = ends.int().argsort(dim=1, stable=True)[:, :beam]  # those that do not end, the best first
            scores, order, words = (each.gather(1, going) for each in (best, ranks, tokens))
            history = history.gather(1, order.unsqueeze(2).expand(-1, -1, position))
            history = torch.cat([history, words.unsqueeze(2)], 2)
        return [sorted(hypotheses, key=lambda each: -each[0]) for hypotheses in ended]

    def penalty(self, length: int) -> float:
        """What the log-probability of a hypothesis is divided by; *length* counts the end of the sentence."""
        found = self.settings["search"]
        return ((5 + length) / 6 if found["gnmt_lenpen"] else length) ** found["lenpen"]

    def translate(self, lines: list[str]) -> list[str]:
        """Return the translations of tokenised *lines*; those without any token are empty."""
        special, index = self.settings["special"], {word: number for number, word in enumerate(self.source)}
        rows = [[*(index.get(word, special["unk"]) for word in line.split()), special["eos"]] for line in lines]
        width = max(2, *map(len, rows))
        found = self.search(torch.tensor([row + [special["pad"]] * (width - len(row)) for row in rows]))
        best = (
            " ".join(self.target[word] for word in hypotheses[0][1] if word != special["bos"]) for hypotheses in found
        )
        return [text if line.strip() else "" for text, line in zip(best, lines)]

    def text_steps(self):
        """Return the functions from raw text to tokens, and back."""
        text, before, after = self.settings["text"], [], []
        if text["lowercase"]:
            before.append(str.lower)
        if text["tokenizer"] == "moses":
            from sacremoses import MosesDetokenizer, MosesTokenizer

            if self.settings["source_lang"] == "zh":
                import jieba

                before.append(lambda line: " ".join(jieba.cut(line)))
            moses, undo = MosesTokenizer(self.settings["source_lang"]), MosesDetokenizer(self.settings["target_lang"])
            before.append(lambda line: moses.tokenize(line, return_str=True))
            after.append(lambda line: undo.detokenize(line.split()))
        if text["sub_words"] == "subword-nmt":
            from subword_nmt.apply_bpe import BPE

            before.append(BPE(io.StringIO(self.files["codes"])).process_line)
            after.insert(0, lambda line: (line + " ").replace("@@ ", "").rstrip())
        elif text["sub_words"] == "sentencepiece":
            from sentencepiece import SentencePieceProcessor

            pieces = SentencePieceProcessor(model_proto=base64.b64decode(self.files["spm.model.base64"]))
            before.append(lambda line: " ".join(pieces.encode(line, out_type=str)))
            after.insert(0, join_pieces)
        return before, after


def join_pieces(line: str) -> str:
    """Return the text of SentencePiece's pieces; <0x..> are bytes of characters that the pieces lack."""

    def character(units: re.Match[str]) -> str:
        return bytes(int(unit[1:-1], 16) for unit in units[0].split()).decode(errors="replace")

    line = re.sub(r"(?<!\S)<0x[0-9A-F]{2}>( <0x[0-9A-F]{2}>)*(?!\S)", character, line)
    return re.sub(r"[\r\n]+", " ", line.replace(" ", "").replace("\u2581", " ")).strip()


def apply(steps, line: str, tags: Container[str] = ()) -> str:
    """Return what *steps* make of *line*, one after the other; a tag at its beginning stays whole."""
    tag, _, rest = line.strip().partition(" ")
    if tag in tags:
        return f"{tag} {apply(steps, rest)}".rstrip(" ")
    for step in steps:
        line = step(line)
    return line


def main() -> None:
    """Translate standard input, one sentence per line."""
    if len(sys.argv) != 2:
        sys.exit("usage: translate_pt2.py model.pt2 < source > translations")
    try:
        model = Model(sys.argv[1])
        before, after = model.text_steps()
    except ModuleNotFoundError as error:
        package = str(error.name).replace("_", "-")
        sys.exit(f"the text of {sys.argv[1]} requires a package that is missing; run: pip install {package}")
    except Exception as error:  # damaged files raise any exception
        sys.exit(f"cannot load {sys.argv[1]}: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
    tags = model.settings["text"].get("tags", ())  # older files have none
    texts = (line.decode("utf-8-sig").rstrip("\r\n") for line in sys.stdin.buffer)  # split at LF only
    lines = [apply(before, line, tags) for line in texts]
    longest = max((len(line.split()) for line in lines), default=0)
    if longest >= model.settings["max_source"]:
        sys.exit(f"a line has {longest} tokens, and the model has {model.settings['max_source']} positions: split it")
    for start in range(0, len(lines), BATCH):
        for line in model.translate(lines[start : start + BATCH]):
            print(apply(after, line))


if __name__ == "__main__":
    main()
