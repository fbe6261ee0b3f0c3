"""Rejects flags that would have no effect in a command, before it loads anything."""

from fairseq.dataclass.configs import FairseqConfig
from fairseq.safe_exit import OneLineError

OTHER_TASKS = """
iter_decode_eos_penalty iter_decode_max_iter iter_decode_force_max_iter iter_decode_with_beam
iter_decode_with_external_reranker retain_iter_history print_step decoding_format eos_token
""".split()  # of translation_lev and of speech
TASKS = ("translation", "deep_translation")
REQUIRED = {
    "generation": {
        "sampling_topk": "sampling",
        "sampling_topp": "sampling",
        "diverse_beam_strength": "diverse_beam_groups",
        "lm_weight": "lm_path",
        "retain_dropout_modules": "retain_dropout",
    },
    "ema": dict.fromkeys(
        ("ema_decay", "ema_start_update", "ema_seed_model", "ema_update_freq", "ema_fp32"), "store_ema"
    ),
    "checkpoint": {
        "keep_interval_updates": "save_interval_updates",
        "keep_interval_updates_pattern": "keep_interval_updates",
    },
}


SCALES = ("fp16_init_scale", "fp16_scale_window", "fp16_scale_tolerance", "threshold_loss_scale", "min_loss_scale")
EVAL_BLEU = {"eval_bleu_args": "{}", "eval_bleu_detok": "space", "eval_bleu_detok_args": "{}",
             "eval_tokenized_bleu": False, "eval_bleu_remove_bpe": None, "eval_bleu_print_samples": False}  # fmt: skip


class FlagError(OneLineError):
    """A flag without effect."""


def check_generation(cfg):
    """Check the flags of a command that translates.

    Raises:
        FlagError: a flag has no effect
    """
    _check_required(cfg, "generation")
    if cfg.common.amp:
        raise FlagError("--amp has no effect in translation; use --fp16 or --bf16, or omit it")
    for name in OTHER_TASKS if cfg.task._name in TASKS else ():
        if _is_set(cfg, "generation", name):
            raise FlagError(f"{_flag(name)} has no effect with --task {cfg.task._name}; omit it")


def check_training(cfg):
    """Check the flags of training.

    Raises:
        FlagError: a flag has no effect
    """
    _check_required(cfg, "ema")
    _check_required(cfg, "checkpoint")
    refuse_shards(cfg, "fairseq-train")
    scaled = cfg.common.fp16 or cfg.common.memory_efficient_fp16 or cfg.common.amp
    for name in () if scaled else SCALES:
        if _is_set(cfg, "common", name):
            raise FlagError(f"{_flag(name)} requires --fp16: add it, or omit this flag")
    for name, default in EVAL_BLEU.items() if cfg.task._name in TASKS and not cfg.task.eval_bleu else ():
        if getattr(cfg.task, name, default) != default:
            raise FlagError(f"{_flag(name)} requires --eval-bleu: add it, or omit this flag")


def refuse_shards(cfg, command):
    """Reject the flags of shards in a command that does not divide its input."""
    for name in ("num_shards", "shard_id"):
        if _is_set(cfg, "dataset", name):
            raise FlagError(f"{_flag(name)} is not supported by {command}; omit it")


def _check_required(cfg, part):
    for name, other in REQUIRED[part].items():
        if _is_set(cfg, part, name) and not _is_set(cfg, part, other):
            raise FlagError(f"{_flag(name)} requires {_flag(other)}: add it, or omit this flag")


def _is_set(cfg, part, name):
    return cfg[part][name] != getattr(getattr(FairseqConfig(), part), name)


def _flag(name):
    return f"--{name.replace('_', '-')}"
