"""Models of every structure with the files that an export needs, and tokenised text with its sub-words."""

import argparse
import io
import random

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_deep.plugin.architectures import get_architecture
from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel
from tests.helpers.models import task_of, tiny_flags

SIZES = {"encoder_layers": 2, "decoder_layers": 3, "max_source_positions": 32, "max_target_positions": 32}


def write_model(folder, name, dictionaries, languages=("src", "tgt"), **flags):
    """Save a model with random norms and biases as folder/model.pt, its dictionaries beside it; return the model.

    Args:
        name: of the architecture, without ``transformer_``
        dictionaries, languages: of source and target
    """
    arch = f"transformer_{name}"
    flags = {**tiny_flags(arch), **SIZES, **flags}
    for language, dictionary in zip(languages, dictionaries):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    langs = dict(zip(("source_lang", "target_lang"), languages))
    args = argparse.Namespace(arch=arch, task="translation", **langs, **flags)
    get_architecture(arch).apply(args)
    model = DeepTransformerModel.build_model(args, task_of(*dictionaries)).eval()
    with torch.no_grad():
        layers = [*model.encoder.layers.named_parameters(), *model.decoder.layers.named_parameters()]
        for part, value in layers:
            varies = value.dim() == 1 or "layer_norm" in part  # which may have a row for each language
            value.copy_(value + 0.3 * torch.randn_like(value) if varies else 2 * value)
        if model.encoder.language_transform is not None:
            matrices = model.encoder.language_transform.weight
            matrices.add_(0.3 * torch.randn_like(matrices))
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 1}
    state = {"cfg": convert_namespace_to_omegaconf(args), "args": None, "model": model.state_dict(),
             "optimizer_history": [history], "extra_state": {"train_iterator": {}}}  # fmt: skip
    torch.save(state, folder / "model.pt")
    return model


SCRIPTS = ("abcdefghijklmnop", "äöüßéñ", "абвгд", "αβγ", "漢字仮名", "0123456789", "@&;#'-.,!?", "😀🎉", "e\u0301",
           "אבג", "ქართ", "हिन्दी")  # fmt: skip


def tokenised_lines(count, scripts, seed):
    """Lines of tokenised text: words of one script each, with words that come back often."""
    draws = random.Random(seed)
    letters = [draws.choice(SCRIPTS[:scripts]) for _ in range(60)]
    common = ["".join(draws.choices(script, k=draws.randint(1, 7))) for script in letters]
    lines = []
    for _ in range(count):
        words = draws.choices(common, k=draws.randint(1, 9))
        words += ["".join(draws.choices(draws.choice(SCRIPTS[:scripts]), k=draws.randint(1, 9)))]
        draws.shuffle(words)
        lines.append(" ".join(words))
    return lines


def learn_merges(path, lines, merges):
    """Write *merges* of subword-nmt, learned from *lines*, to *path*; return the function that cuts a line."""
    from subword_nmt.apply_bpe import BPE
    from subword_nmt.learn_bpe import learn_bpe

    with open(path, "w", encoding="utf-8") as stream:
        learn_bpe(io.StringIO("\n".join(lines) + "\n"), stream, merges)
    with open(path, encoding="utf-8") as stream:
        return BPE(stream).process_line


def dictionary_of(lines, threshold=0):
    """fairseq's dictionary of the units in *lines* that occur that often."""
    dictionary = Dictionary()
    for line in lines:
        for word in line.split():
            dictionary.add_symbol(word)
    dictionary.finalize(threshold=threshold, padding_factor=1)
    return dictionary


def learn_pieces(path, lines, **options):
    """Write a model of SentencePiece, in which some characters are unknown, to *path*."""
    import sentencepiece as spm

    settings = {"vocab_size": 500, "character_coverage": 0.999, "hard_vocab_limit": False, "minloglevel": 2, **options}
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(path)[: -len(".model")], **settings)
