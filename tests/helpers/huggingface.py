"""Small models of transformers' class with every method, each with the core's model of the same weights."""

import argparse

from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_deep.runtime import packaged
from fairseq_deep.runtime.dictionary import Dictionary
from fairseq_deep.runtime.model import untrained
from tests.helpers.models import strengthen, tiny_flags

TASK = {"source_lang": "src", "target_lang": "tgt", "left_pad_source": True, "left_pad_target": False,
        "max_source_positions": 1024, "max_target_positions": 1024, "truncate_source": False}  # fmt: skip
SEARCH = {"beam": 4, "lenpen": 1.0, "max_len_a": 0.0, "max_len_b": 12, "gnmt_lenpen": False}
WORDS = {"src": [f"s{index}" for index in range(36)], "tgt": [f"t{index}" for index in range(32)]}


def make_model(name, flags, **search):
    """A model of the architecture *name* with random weights, and the core's model of the same weights."""
    from fairseq_deep.huggingface import FairseqDeepConfig, FairseqDeepForConditionalGeneration

    resolved = argparse.Namespace(arch=name, **{**tiny_flags(name), **flags})
    ARCH_CONFIG_REGISTRY[name](resolved)
    words = {**WORDS, "tgt": WORDS["src"]} if flags.get("share_all_embeddings") else WORDS
    source, target = map(Dictionary, words.values())
    text = {"tokenizer": "none", "lowercase": False, "sub_words": None}
    content = packaged.make_config("a model", "MIT", resolved, {}, task=TASK, text=text, search={**SEARCH, **search},
                                   criterion={"label_smoothing": 0.1}, made_with={})  # fmt: skip
    config = FairseqDeepConfig(package=content, source_vocab_size=len(source), vocab_size=len(target))
    model = FairseqDeepForConditionalGeneration(config).eval()
    model.files = {f"dict.{side}.txt": "".join(f"{word} 1\n" for word in words[side]).encode() for side in words}
    strengthen(model)
    if model.encoder.language_index is not None:
        model.encoder.language_index.set_tags(range(4, 4 + flags["num_languages"]))
    core = untrained(resolved, source, target).eval()
    core.load_state_dict(model.state_dict())
    return model, core
