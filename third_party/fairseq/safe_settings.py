"""Checks the settings in a checkpoint: only names of text tasks and their components, and no references.

fairseq builds the task, criterion, BPE and tokenizer that a checkpoint names. The components in these lists only read
text and compute. A name that fairseq does not know can only come from the user's `--user-dir`. Settings that name a
file or a URL are ignored: the files of a model are next to its checkpoint, or the user names them. Unknown
architectures on the command line are one-line errors.
"""

import argparse
import dataclasses
import difflib
import os
import re
import sys

import torch
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

FILES = """
baseline_model bpe_codes bpe_merges bpe_vocab bpe_vocab_file config_yaml decoder_embed_path embed_path
encoder_embed_path ema_seed_model extra_data fixed_dictionary gpt2_encoder_json gpt2_vocab_bpe init_from label_dir
lang_dict lang_to_offline_shard_ratio lm_path load_pretrained_decoder_from load_pretrained_encoder_from
load_pretrained_mbart_encoder_from load_pretrained_mbart_decoder_from multitask_config_yaml pretrained_checkpoint
pretrained_mlm_checkpoint pretrained_xlm_checkpoint quantization_config_path replace_unk sampling_weights_from_file
save_predictions sentencepiece_model sentencepiece_model_path source_dict target_dict vocoder w2v_path wer_args
wer_kenlm_model wer_lexicon
""".split()
"""Settings with files that fairseq opens when a checkpoint is used; it writes the file of save_predictions."""
OF_THE_RUN = """
aim_repo data distributed_init_method finetune_from_model input local_cache_path log_file path plasma_path
restore_file results_path save_dir tensorboard_logdir user_dir wandb_project
""".split()
"""Settings of the run that wrote the checkpoint; fairseq opens only `data` of them later, see `drop`."""
LANGUAGES = re.compile(r"(\w+_)?(lang|langs|lang_pairs)")
"""Settings with values that become parts of file names."""
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
"""Outputs of Hydra's logging configuration."""
FETCHED = {
    "bert": {"bpe_vocab_file": "vocab.txt"},
    "gpt2": {"gpt2_encoder_json": "encoder.json", "gpt2_vocab_bpe": "vocab.bpe"},
}
"""BPEs whose files fairseq downloads if no setting names them, with the file names next to a checkpoint."""
RANGES = (
    (re.compile(r"(en|de)coder_(attention_heads|embed_dim|input_dim|output_dim)"), 1, 1_000_000),
    (re.compile(r"(en|de)coder_ffn_embed_dim"), 0, 1_000_000),  # 0: no feed-forward sub-layer
    (re.compile(r"(\w+_)?(dropout|layerdrop)"), 0, 1),
)
"""Settings with their least and greatest value; fairseq cannot build or use a model with others."""
DEEPEST = 50
"""Maximum nesting depth of settings; fairseq's have four levels."""


class UnknownError(OneLineError, LookupError):
    """A name is unknown; the message is one line."""


def architecture(name):
    """Return `name` if it is a registered architecture; the type of --arch."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    if name not in ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(name, ARCH_MODEL_REGISTRY, n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}? Otherwise " if near else ""
        raise UnknownError(f"unknown architecture {name}: {hint}add the --user-dir of its package")
    return name


def check_user_dir(path, given):
    """Check that the directory `path` (--user-dir `given`) is a package or has tasks or models.

    Raises:
        UnknownError: importing it would register nothing
    """
    if not any(os.path.exists(os.path.join(path, name)) for name in ("__init__.py", "tasks", "models")):
        raise UnknownError(f"--user-dir {given}: has no __init__.py; give the directory of a package")


def parse_components(parser, words):
    """Parse the arguments that choose components (task, architecture, ...); the rest is left for the second parse.

    With --help, the second parse prints the flags of these components, too.

    Raises:
        UnknownError: the command needs an architecture
    """
    words = sys.argv[1:] if words is None else list(words)
    known = [word for word in words if word not in ("-h", "--help")]
    required = [action for action in parser._actions if action.required] if known != words else []
    for action in required:
        action.required = False
    try:
        args, rest = parser.parse_known_args(known)
    finally:
        for action in required:
            action.required = True
    if getattr(args, "arch", "") is None:
        if known == words:
            raise UnknownError("--arch is missing: name an architecture")
        del args.arch
    return args, rest


def refused(state):
    """Return descriptions of the settings of a checkpoint that are not allowed.

    Args:
        state: the loaded checkpoint; its entries "cfg" and "args" are settings
    """
    if not isinstance(state, dict):
        return []
    known = references()
    found = set()
    try:
        for key, value in settings([state.get("cfg"), state.get("args")]):
            if not is_allowed(key, value, known):
                found.add(f"{shown(key or 'settings')} = {shown(value)}")
    except RecursionError:
        found.add(f"more than {DEEPEST} levels of containers")
    return sorted(found)


def is_allowed(key, value, known):
    if isinstance(value, torch.Tensor):  # fairseq uses the truth value of settings, which tensors lack
        return False
    if key in ALLOWED:
        return isinstance(value, str) and (value in ALLOWED[key] or is_of_a_user(key, value))
    if LANGUAGES.fullmatch(key):
        return not (isinstance(value, str) and ("/" in value or "${" in value)) or value in known
    for pattern, least, most in RANGES:
        if pattern.fullmatch(key):
            return isinstance(value, (int, float)) and least <= value <= most
    return not (isinstance(value, str) and "${" in value) or value in known


def shown(value):
    """Return `value` as one short line without control characters."""
    try:
        text = str(value)
    except ValueError:
        text = f"an {type(value).__name__} that cannot be printed"
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text[:100]) + "..." * (len(text) > 100)


def drop(state, folder):
    """Empty the settings of the checkpoint `state` that name a file or a URL, and set its data to `folder`.

    Returns:
        descriptions of the emptied settings, without the data, which every checkpoint has
    """
    found = set()
    for part in ("cfg", "args"):
        if isinstance(state, dict) and state.get(part) is not None:
            state[part] = emptied(state[part], folder, found, {})
    return sorted(found)


def named(key, value):
    """Return whether a setting names a file or a URL to open."""
    if value is None or value is False or isinstance(value, (str, list, tuple, dict)) and not value:
        return False
    address = isinstance(value, str) and "://" in value and value not in STREAMS
    return key in FILES or key not in OF_THE_RUN and address


def emptied(content, folder, found, seen, key=""):
    """Return `content` without the settings that `drop` empties; containers are changed in place."""
    content = plain(content)
    address = isinstance(content, str) and "://" in content
    if named(key, content) or key == "data" and address:
        found.add(f"{shown(key)} = {shown(content)}")
    if key == "data" and isinstance(content, str):
        return folder
    if named(key, content):
        return None if key == "init_from" else ""  # most are strings in fairseq's configurations
    if key == "bpe" and isinstance(content, str) and content in FETCHED:
        return {"_name": content, **own_files(content, folder)}
    if isinstance(content, (list, tuple)):
        return type(content)(emptied(value, folder, found, seen, key) for value in content)
    if id(content) in seen or not is_container(content):
        return content
    seen[id(content)] = content  # kept, so that its id stays its own
    fields = content if isinstance(content, dict) else vars(content)
    flags = isinstance(content, argparse.Namespace)  # flags of all components; bpe is then only a name
    for each, value in list(fields.items()):
        if not (flags and each == "bpe"):
            fields[each] = emptied(value, folder, found, seen, str(each))
    for name in (fields.get("_name"), fields.get("bpe") if flags else None):
        for each, own in own_files(name, folder).items():
            fields[each] = fields.get(each) or own
    return content


def own_files(bpe, folder):
    """Return the settings of `bpe` with local files, so that fairseq does not download them."""
    names = FETCHED.get(bpe, {}) if isinstance(bpe, str) else {}
    return {key: f"{folder}/{name}" for key, name in names.items()}


def plain(content):
    """Return `content`, or the value of an omegaconf node."""
    if isinstance(content, ValueNode):
        return content._value()
    return OmegaConf.to_container(content, resolve=False) if OmegaConf.is_config(content) else content


def is_container(content):
    return isinstance(content, (dict, list, tuple, argparse.Namespace)) or is_dataclass(content)


def is_dataclass(content):
    return dataclasses.is_dataclass(content) and not isinstance(content, type)


def settings(content, key="", seen=None, depth=0):
    """Yield the key and value of each setting that is not a container; a component has its key and `_name`.

    Raises:
        RecursionError: more than `DEEPEST` levels
    """
    if depth > DEEPEST:
        raise RecursionError
    seen = {} if seen is None else seen
    if id(content) in seen:
        return
    if not isinstance(content, (str, int, float)):
        seen[id(content)] = content  # kept, so that its id stays its own
    content = plain(content)
    if isinstance(content, argparse.Namespace) or is_dataclass(content):
        content = vars(content)
    if isinstance(content, dict):
        for name, value in content.items():
            yield from settings(value, key if name == "_name" else str(name), seen, depth + 1)
    elif isinstance(content, (list, tuple, set)):
        for value in content:
            yield from settings(value, key, seen, depth + 1)
    elif content is not None and not (isinstance(content, str) and content == ""):
        yield key, content


def is_of_a_user(kind, name):
    """Return whether `name` is not a component of fairseq."""
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
    """Return the references in the defaults of fairseq's settings, such as ${optimization.lr}."""
    from fairseq.dataclass import FairseqDataclass

    found, waiting = set(), [FairseqDataclass]
    while waiting:
        config = waiting.pop()
        waiting += config.__subclasses__()
        defaults = [field.default for field in dataclasses.fields(config)]
        found.update(value for value in defaults if isinstance(value, str) and value.startswith("${"))
    return found
