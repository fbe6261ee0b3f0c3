"""What the settings in a checkpoint may ask for: the names of text tasks and their parts, and no references.

fairseq builds the task, criterion, BPE and tokenizer that a checkpoint names, and reads data as it says. Those of this
list do nothing but read text and compute. A name that fairseq does not know can only be of a user's `--user-dir`.
Names on the command line that nothing has registered are told in one line.
"""

import argparse
import dataclasses
import difflib

from fairseq.safe_exit import OneLineError
from omegaconf import OmegaConf, ValueNode

CRITERIA = """
adaptive_loss composite_loss cross_entropy label_smoothed_cross_entropy label_smoothed_cross_entropy_with_alignment
latency_augmented_label_smoothed_cross_entropy legacy_masked_lm_loss masked_lm model nat_loss sentence_prediction
sentence_prediction_adapters sentence_ranking vocab_parallel_cross_entropy
"""
TASKS = """
cross_lingual_lm denoising dummy_lm dummy_masked_lm dummy_mt language_modeling legacy_masked_lm masked_lm
multilingual_denoising multilingual_language_modeling multilingual_masked_lm multilingual_translation
online_backtranslation semisupervised_translation sentence_prediction sentence_prediction_adapters sentence_ranking
simul_text_to_text translation translation_from_pretrained_bart translation_from_pretrained_xlm translation_lev
translation_multi_simple_epoch
"""
BPES = "bert byte_bpe bytes characters fastbpe gpt2 hf_byte_bpe sentencepiece subword_nmt"
TOKENIZERS = "moses nltk space"

ALLOWED = {
    "task": TASKS.split(),
    "criterion": CRITERIA.split(),
    "bpe": BPES.split(),
    "tokenizer": TOKENIZERS.split(),
    "eval_bleu_detok": TOKENIZERS.split(),
    "dataset_impl": "cached huffman lazy mmap raw ${dataset.dataset_impl}".split(),
}


class UnknownError(OneLineError, LookupError):
    """Something that was named does not exist; the message is one line."""


def architecture(name):
    """The type of --arch: the name, if something has registered it."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    if name not in ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(name, ARCH_MODEL_REGISTRY, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}, or " if near else ""
        raise UnknownError(f"there is no architecture {name}: {hint}is the --user-dir of its package missing?")
    return name


def refused(state):
    """What in the settings of the checkpoint `state` is out of the list, in words; empty if nothing is.

    Args:
        state: what was loaded; only its entries "cfg" and "args" are settings
    """
    if not isinstance(state, dict):
        return []
    known = references()
    found = set()
    for key, value in settings([state.get("cfg"), state.get("args")]):
        if key in ALLOWED:
            allowed = isinstance(value, str) and (value in ALLOWED[key] or is_of_a_user(key, value))
        else:
            allowed = not (isinstance(value, str) and "${" in value) or value in known
        if not allowed:
            found.add(f"{key} = {value}")
    return sorted(found)


def settings(content, key="", seen=None):
    """Each key and value, however deep, that is not itself a container; a part is told by its `_name`."""
    seen = {} if seen is None else seen
    if id(content) in seen:
        return
    if isinstance(content, ValueNode):
        content = content._value()
    if not isinstance(content, (str, int, float)):
        seen[id(content)] = content  # kept, so that its id stays its own
    if OmegaConf.is_config(content):
        content = OmegaConf.to_container(content, resolve=False)
    elif isinstance(content, argparse.Namespace):
        content = vars(content)
    elif dataclasses.is_dataclass(content) and not isinstance(content, type):
        content = content.__dict__
    if isinstance(content, dict):
        for name, value in content.items():
            yield from settings(value, key if name == "_name" else str(name), seen)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from settings(value, key, seen)
    elif content is not None and not (isinstance(content, str) and content == ""):
        yield key, content


def is_of_a_user(kind, name):
    """Whether `name` is none of fairseq's own."""
    if kind == "dataset_impl" or "${" in name:
        return False
    from fairseq import criterions, tasks
    from fairseq.data import encoders

    registries = {
        "task": tasks.TASK_REGISTRY,
        "criterion": criterions.CRITERION_REGISTRY,
        "bpe": encoders.BPE_REGISTRY,
    }
    registry = registries.get(kind, encoders.TOKENIZER_REGISTRY)
    return name not in registry or not registry[name].__module__.startswith("fairseq.")


def references():
    """The references that the defaults of fairseq's own settings hold, such as ${optimization.lr}."""
    from fairseq.dataclass import FairseqDataclass

    found, waiting = set(), [FairseqDataclass]
    while waiting:
        config = waiting.pop()
        waiting += config.__subclasses__()
        defaults = [field.default for field in dataclasses.fields(config)]
        found.update(value for value in defaults if isinstance(value, str) and value.startswith("${"))
    return found
