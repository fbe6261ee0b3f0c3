"""Translation by this package, stock fairseq and CTranslate2, in turns: speed, and whether they translate alike.

    python benchmarks/decoding.py [--dim 256 --layers 6 --vocabulary 8000]         random weights, random sentences
    python benchmarks/decoding.py --systems ours "ours --decoder-attn merged" "ours --arch transformer_dlcl_6l"
    python benchmarks/decoding.py --input news.en --references news.de --systems exp/a "exp/a --decode-precision int8" \
        "stock exp/a" "ctranslate2 exp/a"

A system is "ours" (or nothing), "stock" or "ctranslate2", then a model that `fairseq-deep translate` takes, or flags of
a random model. Random models have the sizes that the options say, unless flags change them; equal flags give equal
weights. Stock fairseq and CTranslate2 get a model by `fairseq-deep export`.

All of them work in `Translator`: the text is prepared in the same way, and batches are the same. Only the search
differs. Each system has a process of its own, and the first round only warms up. Seconds are medians, speeds are
medians of the ratios to the first system within the rounds; CPU seconds are the process's, on all threads. "equal" is
the share of sentences with the same translation as the first system; where they differ, the median difference of the
scores (nats / length^lenpen, in bits) follows.

What cannot be made equal: at the last step fairseq takes </s> whatever its probability, CTranslate2 the best words, so
hypotheses as long as allowed differ; docs/tools/export-ctranslate2.md has more.
"""

import argparse
import contextlib
import logging
import os
import shlex
import statistics
import tempfile

import sacrebleu
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from turns import Turns, describe_machine, median, speed

from fairseq_deep import cli
from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.tools.checkpoints import save_checkpoint
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.tables import format_table

KINDS = ("ours", "stock", "ctranslate2")
INT8 = "--decode-precision int8"
DEFAULT = ("stock", "ours", "ours --decode-precision bf16", f"ours {INT8}", "ctranslate2", f"ctranslate2 {INT8}")
HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 1}


class StockEngine:
    """fairseq's own model and search in place of the engine of a `Translator`."""

    def __init__(self, path, data, translator):
        found = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"data": data})
        self.models, config, self.task = found
        for name in ("beam", "lenpen", "max_len_a", "max_len_b"):
            setattr(config.generation, name, getattr(translator.options, name))
        for model in self.models:
            model.to(translator.device).prepare_for_inference_(config)
        self.generator = self.task.build_generator(self.models, config.generation)
        self.pad, self.device = translator.engine.pad, translator.device

    def translate(self, batches, nbest=1):
        """Yield the hypotheses of each batch, as the engines of `Translator` do."""
        for sentences in batches:
            source = self.pad(sentences).to(self.device)
            lengths = source.ne(self.task.source_dictionary.pad()).sum(1)
            sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
            yield self.task.inference_step(self.generator, self.models, sample)


class System:
    """A worker: the search of one system over all sentences."""

    def __init__(self, system, settings):
        model, precision, stock, parts = settings.models[system]
        search = {name: getattr(settings, name) for name in ("beam", "lenpen", "max_len_a", "max_len_b")}
        bundle = find_bundle(model, **parts)
        cpu = settings.device == "cpu"
        self.translator = Translator(bundle, precision, settings.batch_size, 10**6, cpu, **search)
        if stock:
            self.translator.engine = StockEngine(stock, bundle.data, self.translator)
        self.lines = read_lines(settings.input)[: settings.sentences]

    def translate(self):
        """Text and score of the best translation of each sentence."""
        found = self.translator.translate_nbest(self.lines)
        return [(each[0].text, each[0].score) if each else ("", 0.0) for each in found]


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", default=DEFAULT)
    parser.add_argument("--input", metavar="FILE", help="raw text, one sentence per line (default: random sentences)")
    parser.add_argument("--references", metavar="FILE", help="for BLEU")
    numbers = {"dim": 256, "layers": 6, "vocabulary": 8000, "sentences": 32, "length": 26, "beam": 4, "batch-size": 32,
               "rounds": 5, "threads": 1, "max-len-b": 50}  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for side in ("encoder", "decoder"):
        parser.add_argument(f"--{side}-layers", type=int, metavar="N", help=f"layers of the {side} (default: --layers)")
    parser.add_argument("--lenpen", type=float, default=0.6)
    parser.add_argument("--max-len-a", type=float, default=1.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args(words)


def model_flags(settings, flags):
    """Flags of ``fairseq-train`` for a random model: the sizes of *settings*, then *flags*."""
    line = ["--arch", "transformer_postnorm_6l", "--share-all-embeddings"]
    for side in ("encoder", "decoder"):
        depth = getattr(settings, f"{side}_layers") or settings.layers
        line += [f"--{side}-layers", str(depth), f"--{side}-attention-heads", str(max(1, settings.dim // 64))]
        line += [f"--{side}-embed-dim", str(settings.dim)]
        if not any("lstm" in flag or "rnn" in flag for flag in flags):  # which have no feed-forward sub-layers
            line += [f"--{side}-ffn-embed-dim", str(4 * settings.dim)]
    return [*line, *flags]


def write_random(flags, folder):
    """Write an untrained model, always the same for the same *flags*, to a checkpoint."""
    words = [folder, "--task", "translation", "--source-lang", "src", "--target-lang", "tgt", *flags]
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    torch.manual_seed(1)
    model = tasks.setup_task(config.task).build_model(config.model)
    path = os.path.join(folder, f"model{len(os.listdir(folder))}.pt")
    state = {"cfg": config, "args": None, "model": model.state_dict(), "optimizer_history": [HISTORY],
             "extra_state": {"train_iterator": {}}}  # fmt: skip
    save_checkpoint(state, path)
    return path


def write_text(settings, folder):
    """Write a dictionary, of which the last entry is a language tag, and random sentences."""
    dictionary = Dictionary()
    names = [f"w{index}" for index in range(settings.vocabulary - len(dictionary) - 1)]
    for name in (*names, "<2l>"):
        dictionary.add_symbol(name)
    for side in ("src", "tgt"):
        dictionary.save(os.path.join(folder, f"dict.{side}.txt"))
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(2 * settings.length // 3, settings.length, (settings.sentences,), generator=draw)
    settings.input = os.path.join(folder, "text")
    with open(settings.input, "w", encoding="utf-8") as stream:
        for length in lengths.tolist():
            words = torch.randint(len(names), (length,), generator=draw).tolist()
            stream.write(" ".join(names[word] for word in words) + "\n")


def prepare(system, settings, folder):
    """Return a system's model, precision, export for stock fairseq and options of `find_bundle`; write what lacks."""
    parser = argparse.ArgumentParser(prog=f"system {system}", allow_abbrev=False)
    parser.add_argument("--decode-precision", choices=("fp32", "bf16", "int8"), default="fp32")
    chosen, words = parser.parse_known_args(shlex.split(system))
    kind = words.pop(0) if words[:1] and words[0] in KINDS else "ours"
    parts = {}
    if words and not words[0].startswith("-"):
        model = words[0]
    elif settings.random:
        model = write_random(model_flags(settings, words), folder)
        parts = {"data": folder, "tokenizer": "none"}
    else:
        raise UsageError(f"{system}: text of --input requires a trained model; add its path")
    if kind == "ours":
        return model, chosen.decode_precision, "", parts
    output = os.path.join(folder, f"export{len(os.listdir(folder))}{'.pt' * (kind == 'stock')}")
    line = ["export", model, "--output", output]
    if kind == "ctranslate2":
        quantization = "float32" if chosen.decode_precision == "fp32" else chosen.decode_precision
        line += ["--format", kind, "--quantization", quantization.replace("bf16", "bfloat16")]
        line += [word for name, value in parts.items() for word in (f"--{name}", value)]
    arguments = cli.parse(line)
    arguments.run(arguments)
    return (output, "fp32", "", {}) if kind == "ctranslate2" else (model, "fp32", output, parts)


def report(turns, references):
    """The table: a row per system, compared with the first."""
    first = next(iter(turns))
    head = ["system", "seconds", "CPU seconds", "sentences/s", "speed", "equal", "scores of others by"]
    rows = [head + ["BLEU"] * bool(references)]
    for system, rounds in turns.items():
        expected, found = turns[first][-1][2], rounds[-1][2]
        gaps = [abs(a[1] - b[1]) for a, b in zip(expected, found) if a[0] != b[0]]
        row = [system, f"{median(rounds):.3f}", f"{median(rounds, 1):.3f}", f"{len(found) / median(rounds):.1f}",
               f"{speed(turns[first], rounds):.3f}", f"{(len(found) - len(gaps)) / len(found):.1%}",
               f"{statistics.median(gaps):.1e}" if gaps else "-"]  # fmt: skip
        if references:
            row.append(f"{sacrebleu.corpus_bleu([text for text, _ in found], [references]).score:.2f}")
        rows.append(row)
    return format_table(rows, right=range(1, len(rows[0])))


def measure(settings):
    """Return {system: its rounds}, and the failures; the result of a round is that of `System.translate`."""
    settings.random = settings.input is None
    with tempfile.TemporaryDirectory() as folder:
        if settings.random:
            write_text(settings, folder)
        with contextlib.redirect_stdout(None):
            settings.models = {system: prepare(system, settings, folder) for system in settings.systems}
        with Turns(System, settings.systems, settings) as turns:
            return turns.measure("translate", settings.rounds), turns.problems


def main(words=None):
    settings = read_arguments(words)
    logging.disable(logging.INFO)
    print(describe_machine(), flush=True)
    references = read_lines(settings.references)[: settings.sentences] if settings.references else []
    try:
        turns, problems = measure(settings)
        print(report(turns, references))
        if problems:
            raise SystemExit("\n".join(problems))
    except UsageError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
