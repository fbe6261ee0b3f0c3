"""Source edits that make fairseq 0.12.2 run with present releases of Python, torch and numpy.

Each edit has the number of times its text must occur. Another number means another source: the build then stops and
names the edit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Edit(NamedTuple):
    """Replace `old` by `new` exactly `count` times in `file`; with `regex`, both are `re.sub` patterns."""

    file: str
    old: str
    new: str
    count: int
    why: str
    regex: bool = False


class EditError(Exception):
    """An edit does not match the required number of times."""


HYDRA_WARNINGS = "hydra 1.3 prints 24 lines at every start about calls that it still supports"
HYDRA_HELP = "argparse of Python 3.14 formats each help text at once; one of hydra 1.3.8 is no string"
LONG = "numpy 2 has no np.compat.long"
MUTABLE = "Python 3.11 rejects dataclass instances as defaults"
IMPORT_TORCH = "\nimport torch\n"
IMPORT_SAFE_LOAD = "\nimport torch\nfrom fairseq import safe_load\n"
SAFE_LOAD = "torch 2.6 and newer reject these files; older torch runs code in them"
ARCHIVE = "an archive could write anywhere; a directory replaced a local archive"
WHOLE = "a full disk or a kill replaced a complete checkpoint by a truncated one"
NUMBERS = "a NaN printed 175 lines, the last one StopIteration; the detector failed on the encoder's dictionary"
STOP = "a signal ended training without saving"
FORK = "under forkserver, the default of Python 3.14, every worker imported fairseq again and the data workers hung"
TYPES = "Python 3.14 prints optional types in another form"
NODES = "failed connections, different settings and lost processes ended in tracebacks, or hung"
SLURM = "a SLURM task without GPUs ended at once with status 0, without training"
SHELL = "the path reached a shell, and a file name can contain commands"
OTHER_METRIC = "a resumed run with another metric compared it with the old one"
ONE_LINE = "a mistake in the input was a traceback, or another message hid it"
SHARDS = "--num-shards and --shard-id had no effect, so each shard translated everything"
NO_EFFECT = "flags without effect were accepted"
TEXT = "a lone CR ended a line, which shifted pairs; a byte order mark became an unknown word"
SIDES = "sides with different numbers of sentences were paired, or a traceback"
UNKNOWN = "an unknown name printed 250 lines of help, or a traceback"
REQUIREMENTS = "present releases; audio is not used"

# Shadows `eval` in files whose options can come from a checkpoint.
FIRST_IMPORT = r"\A((?:(?!import |from ).*\n)*)(?=import |from )"
SAFE_EVAL = r"\1from fairseq.safe_load import evaluate as eval\n"
EVAL_FILES = """
criterions/ctc.py data/audio/raw_audio_dataset.py models/fconv.py models/fconv_lm.py models/fconv_self_att.py
models/hubert/hubert.py models/lightconv_lm.py models/speech_to_text/s2t_wav_transformer.py models/transformer_lm.py
models/wav2vec/wav2vec.py models/wav2vec/wav2vec2.py optim/adafactor.py optim/adam.py optim/adamax.py
optim/cpu_adam.py optim/fused_lamb.py utils.py
""".split()

EDITS = [
    Edit(
        "fairseq/dataclass/configs.py",
        r"^(    \w+: (\w+Config) = )\2\(\)$",
        r"\1field(default_factory=\2)",
        11,
        MUTABLE,
        regex=True,
    ),
    Edit(
        "fairseq/models/transformer/transformer_config.py",
        r"^(    \w+: (\w+Config) = )\2\(\)$",
        r"\1field(default_factory=\2)",
        2,
        MUTABLE,
        regex=True,
    ),
    Edit(
        "fairseq/models/transformer/transformer_config.py",
        "field(default=QuantNoiseConfig())",
        "field(default_factory=QuantNoiseConfig)",
        1,
        MUTABLE,
    ),
    Edit(
        "fairseq/dataclass/initialize.py",
        "v = FairseqConfig.__dataclass_fields__[k].default",
        "v = getattr(FairseqConfig(), k)",
        1,
        "a field with a factory has no default",
    ),
    Edit(
        "fairseq/dataclass/configs.py",
        "import _MISSING_TYPE, dataclass, field\n",
        "import MISSING as NO_DEFAULT, dataclass, field\n\n_MISSING_TYPE = type(NO_DEFAULT)\n",
        1,
        "Python 3.15 has no _MISSING_TYPE",
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        "import _MISSING_TYPE, MISSING, is_dataclass\n",
        "import MISSING, is_dataclass\n\n_MISSING_TYPE = type(MISSING)\n",
        1,
        "Python 3.15 has no _MISSING_TYPE",
    ),
    Edit("fairseq/dataclass/utils.py", "\nimport re\n", "\nimport types\nimport warnings\n", 1, HYDRA_WARNINGS),
    Edit(
        "fairseq/dataclass/utils.py",
        "    with initialize(",
        "    with warnings.catch_warnings(record=True), initialize(",
        1,
        HYDRA_WARNINGS,
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        "import Any, Dict, List, Optional, Tuple, Type\n",
        "import Any, Dict, List, Optional, Tuple, Type, Union, get_args, get_origin\n",
        1,
        TYPES,
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        r"^    typestring = (?:.*\n)*?        return field_type.__args__\[0\]\n",
        "    kinds = get_args(field_type)\n"
        "    if type(None) in kinds and get_origin(field_type) in (Union, types.UnionType):\n"
        "        return next(kind for kind in kinds if kind is not type(None))\n",
        1,
        TYPES,
        regex=True,
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        '("List" in str(inter_type) or "Tuple" in str(inter_type))',
        "get_origin(inter_type) in (list, tuple)",
        1,
        TYPES,
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        r'"(int|float|str)" in str\(inter_type\)',
        r"\1 in get_args(inter_type)",
        3,
        TYPES,
        regex=True,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        IMPORT_TORCH,
        "\nimport torch\nfrom fairseq import safe_load, safe_save\n",
        1,
        SAFE_LOAD,
    ),
    Edit("fairseq/checkpoint_utils.py", "torch.load(", "safe_load.load(", 2, SAFE_LOAD),
    Edit(
        "fairseq/checkpoint_utils.py",
        r"assert PathManager\.copy\(\n\s+checkpoints\[0\], cp, overwrite=True\n\s+\), .*\n",
        "safe_save.copy(checkpoints[0], cp)\n",
        1,
        WHOLE,
        regex=True,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "os.remove(old_chk)",
        "safe_save.remove(old_chk)",
        3,
        "an old checkpoint that could not be removed ended training",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        r"^            with PathManager.open\(filename \+ \"\.tmp\", \"wb\"\) as f:\n.*\n.*\n",
        "            safe_save.write(filename, lambda f: torch.save(obj, f))\n",
        1,
        WHOLE,
        regex=True,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "        first_launch = not PathManager.exists(checkpoint_path)\n",
        "        checkpoint_path = safe_save.to_restore(checkpoint_path, cfg.no_last_checkpoints)\n"
        "        first_launch = not PathManager.exists(checkpoint_path)\n",
        1,
        "resuming found no checkpoint or a truncated one, next to complete ones",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "    if (\n        extra_state is not None\n        and \"best\" in extra_state\n",
        "    if extra_state is None:\n        safe_save.check_may_be_missing(cfg, checkpoint_path)\n\n"
        "    if (\n        extra_state is not None\n        and \"best\" in extra_state\n",
        1,
        "a --restore-file that does not exist trained from scratch",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "] = worst_best is None or is_better(",
        "] = len(chkpts) < cfg.keep_best_checkpoints or is_better(",
        1,
        "--keep-best-checkpoints N kept fewer than N",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        r"(\d+\.?\d*){}\.pt",
        r"(-?\d+\.?\d*){}\.pt",
        2,
        "--keep-best-checkpoints kept every checkpoint with a metric below 0",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "rand_sfx = np.random.randint(0, cfg.keep_best_checkpoints)\n",
        "rand_sfx = np.random.randint(0, cfg.keep_best_checkpoints)\n"
        "        rand_sfx = safe_save.free_digit(cfg, val_loss, suffix, rand_sfx)\n",
        1,
        "the best checkpoints with equal values replaced each other",
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        'extra_state.update({"best": save_checkpoint.best})',
        'extra_state.update({"best": save_checkpoint.best, "best_metric": cfg.best_checkpoint_metric})',
        1,
        OTHER_METRIC,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        '        and "best" in extra_state\n',
        '        and "best" in extra_state\n        and safe_save.same_metric(cfg, extra_state)\n',
        1,
        OTHER_METRIC,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        r"raise ValueError\((?=\n +f?\"--finetune-from-model)",
        "raise safe_load.CheckpointError(",
        3,
        ONE_LINE,
        regex=True,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        '"can not be specified together: " + str(cfg)',
        '"exclude each other; omit one of them"',
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        "{cfg.finetune_from_model} does not exist",
        "{cfg.finetune_from_model}: no such file; correct the path",
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/checkpoint_utils.py",
        r"can not be set together with either --reset-optimizer\"\n +\" or .*\"",
        'implies all --reset flags; omit them"',
        1,
        ONE_LINE,
        regex=True,
    ),
    Edit(
        "fairseq_cli/generate.py",
        '    assert cfg.common_eval.path is not None, "--path required for generation!"\n',
        '    assert cfg.common_eval.path is not None, "--path required for generation!"\n'
        "    safe_flags.check_generation(cfg)\n",
        1,
        NO_EFFECT,
    ),
    Edit(
        "fairseq_cli/interactive.py",
        "    start_time = time.time()\n    total_translate_time = 0\n",
        "    safe_flags.check_generation(cfg)\n    safe_flags.refuse_shards(cfg, 'fairseq-interactive')\n"
        "    start_time = time.time()\n    total_translate_time = 0\n",
        1,
        NO_EFFECT,
    ),
    Edit(
        "fairseq_cli/train.py",
        "    metrics.reset()\n\n    if cfg.common.log_file",
        "    metrics.reset()\n    safe_flags.check_training(cfg)\n\n    if cfg.common.log_file",
        1,
        NO_EFFECT,
    ),
    Edit(
        "fairseq_cli/generate.py",
        "scoring.build_scorer(cfg.scoring, tgt_dict)",
        "scoring.build_scorer('sacrebleu' if cfg.generation.sacrebleu else cfg.scoring, tgt_dict)",
        1,
        "--sacrebleu had no effect",
    ),
    Edit("fairseq_cli/generate.py", "es / gen_timer.sum,", "es / (gen_timer.sum or 1),", 1, SHARDS),
    Edit(
        "fairseq_cli/generate.py",
        "    if has_target:\n        if cfg.bpe",
        "    if has_target and num_sentences:\n        if cfg.bpe",
        1,
        SHARDS,
    ),
    Edit("fairseq_cli/generate.py", "1.0 / gen_timer.avg,", "1.0 / (gen_timer.avg or 1),", 1, SHARDS),
    Edit(
        "fairseq_cli/generate.py",
        r"(num_shards|shard_id)=(cfg\.distributed_training\.distributed_\w+),",
        r"\1=max(cfg.dataset.\1, \2),",
        2,
        SHARDS,
        regex=True,
    ),
    Edit(
        "fairseq_cli/validate.py",
        r"(num_shards|shard_id)=(data_parallel_\w+),",
        r"\1=max(cfg.dataset.\1, \2),",
        2,
        SHARDS,
        regex=True,
    ),
    Edit(
        "fairseq_cli/validate.py",
        "        for i, sample in enumerate(progress):\n",
        "        for i, sample in enumerate(progress):\n            if not sample:  # a shard of fewer batches\n"
        "                continue\n",
        1,
        SHARDS,
    ),
    Edit(
        "fairseq_cli/validate.py",
        "            task.reduce_metrics(log_outputs, criterion)\n",
        "            if log_outputs:\n                task.reduce_metrics(log_outputs, criterion)\n",
        1,
        SHARDS,
    ),
    Edit(
        "fairseq/data/iterators.py",
        'raise ValueError("shard_id must be between 0 and num_shards")',
        "raise safe_exit.OneLineError(f'--shard-id {shard_id} must be 0 or more, and less than --num-shards')",
        1,
        SHARDS,
    ),
    Edit(
        "fairseq/trainer.py",
        '                        state["model"], build_fp32_params',
        "                        self.get_model().state_dict(), build_fp32_params",
        1,
        "--store-ema with a checkpoint that has no EMA: KeyError, since its weights were deleted before",
    ),
    Edit(
        "fairseq_cli/train.py",
        "checkpoint_utils.verify_checkpoint_directory(cfg.checkpoint.save_dir)",
        "safe_save.make_folder(cfg.checkpoint.save_dir, cfg.checkpoint.no_save)",
        1,
        "a directory without write permission was a traceback",
    ),
    Edit(
        "fairseq/dataclass/configs.py",
        "    no_save: bool = field(\n",
        '    on_divergence: ChoiceEnum(["stop", "rewind"]) = field(\n'
        '        default="stop",\n'
        '        metadata={"help": "if the gradient is not finite: stop, or rewind to the last checkpoint"},\n'
        "    )\n"
        "    no_save: bool = field(\n",
        1,
        NUMBERS,
    ),
    Edit(
        "fairseq/dataclass/configs.py",
        "from fairseq.dataclass.constants import (\n",
        "from fairseq.dataclass.constants import (\n    ChoiceEnum,\n",
        1,
        NUMBERS,
    ),
    Edit(
        "fairseq/trainer.py",
        "        except FloatingPointError:\n",
        "        except FloatingPointError as error:\n",
        1,
        NUMBERS,
    ),
    Edit(
        "fairseq/trainer.py",
        r"^            # re-run the forward and backward pass with hooks.*\n(?:.*\n)*?            raise\n",
        "            from fairseq import safe_numbers\n\n"
        "            raise safe_numbers.explain(self, samples, error, extra_kwargs) from None\n",
        1,
        NUMBERS,
        regex=True,
    ),
    Edit(
        "fairseq/trainer.py",
        "torch.tensor(0.0).cuda()",
        "torch.tensor(0.0, device=self.device)",
        1,
        "the first fp16 overflow ended training on a CPU",
    ),
    Edit(
        "fairseq/trainer.py",
        "            except Exception:\n                self.consolidate_optimizer()\n",
        "            except Exception as error:\n                if hasattr(error, 'one_line'):\n"
        "                    raise\n                self.consolidate_optimizer()\n",
        1,
        "a mistake in the settings left a crash.pt",
    ),
    Edit(
        "fairseq_cli/train.py",
        "            log_output = trainer.train_step(samples)\n",
        "            log_output = safe_numbers.step(cfg.checkpoint, trainer, samples)\n",
        1,
        NUMBERS,
    ),
    Edit(
        "fairseq_cli/train.py",
        IMPORT_TORCH,
        "\nimport torch\nfrom fairseq import safe_flags, safe_metric, safe_numbers, safe_save, safe_stop\n",
        1,
        STOP,
    ),
    Edit(
        "fairseq_cli/train.py",
        "    train_meter.start()\n",
        "    train_meter.start()\n    safe_stop.STOP.listen()\n",
        1,
        STOP,
    ),
    Edit(
        "fairseq_cli/train.py",
        "    max_epoch = cfg.optimization.max_epoch or math.inf\n",
        "    for subset in [] if cfg.dataset.disable_validation else cfg.dataset.valid_subset.split(','):\n"
        "        try:\n"
        "            trainer.get_valid_iterator(subset)\n"
        "        except Exception as error:\n"
        "            raise SystemExit(f'{subset}: {error}') from None\n"
        "    safe_metric.check(cfg, task, trainer)\n\n"
        "    max_epoch = cfg.optimization.max_epoch or math.inf\n",
        1,
        "a validation line that was too long ended training after the first epoch, unsaved",
    ),
    Edit(
        "fairseq/tasks/translation.py",
        "            if max(totals) > 0:\n",
        "            if any('_bleu_sys_len' in log for log in logging_outputs):\n",
        1,
        "a validation with only empty hypotheses had no BLEU, which ended the run",
    ),
    Edit(
        "fairseq/options.py",
        "choices=ARCH_MODEL_REGISTRY.keys(),",
        "type=safe_settings.architecture,",
        1,
        UNKNOWN,
    ),
    Edit(
        "fairseq/options.py",
        "    from fairseq.models import ARCH_MODEL_REGISTRY\n",
        "    from fairseq import safe_settings\n",
        1,
        UNKNOWN,
    ),
    Edit(
        "fairseq/utils.py",
        "                    raise FileNotFoundError(module_path)\n",
        "                    from fairseq.safe_settings import UnknownError\n\n"
        "                    raise UnknownError(f'--user-dir {args.user_dir}: no such directory; correct the path')\n",
        1,
        UNKNOWN,
    ),
    Edit(
        "fairseq/utils.py",
        "        # ensure that user modules are only imported once\n",
        "        from fairseq import safe_settings\n\n"
        "        safe_settings.check_user_dir(module_path, args.user_dir)\n"
        "        # ensure that user modules are only imported once\n",
        1,
        UNKNOWN,
    ),
    Edit(
        "fairseq/models/__init__.py",
        "    assert model is not None, (\n",
        "    if model is None:\n"
        "        from fairseq.safe_settings import UnknownError\n\n"
        "        raise UnknownError(f'fairseq knows no model {model_type}: add the --user-dir of its package')\n"
        "    assert model is not None, (\n",
        1,
        UNKNOWN,
    ),
    Edit(
        "fairseq_cli/train.py",
        "    while epoch_itr.next_epoch_idx <= max_epoch:\n",
        "    max_update = cfg.optimization.max_update or math.inf\n"
        "    while epoch_itr.next_epoch_idx <= max_epoch and trainer.get_num_updates() < max_update:\n",
        1,
        "each start of a finished run made one more update",
    ),
    Edit(
        "fairseq_cli/train.py",
        "\n    do_save = (\n",
        "\n    stopped = safe_stop.STOP.is_due(trainer, should_stop)\n    do_save = (\n",
        1,
        STOP,
    ),
    Edit(
        "fairseq_cli/train.py",
        "    # Validate\n    valid_losses = [None]\n",
        "    do_save |= stopped\n    should_stop |= stopped\n\n    # Validate\n    valid_losses = [None]\n",
        1,
        STOP,
    ),
    Edit(
        "fairseq_cli/train.py",
        '        logger.info("ioPath PathManager finished waiting.")\n',
        '        logger.info("ioPath PathManager finished waiting.")\n'
        "    safe_stop.STOP.finish(trainer, cfg.checkpoint)\n",
        1,
        STOP,
    ),
    Edit("fairseq/data/iterators.py", "itr = torch.utils.data.DataLoader(", "itr = safe_stop.DataLoader(", 3, STOP),
    Edit(
        "fairseq/data/iterators.py",
        IMPORT_TORCH,
        "\nimport torch\nfrom fairseq import safe_exit, safe_stop\n",
        1,
        STOP,
    ),
    Edit("fairseq/binarizer.py", "from multiprocessing import Pool\n", "from fairseq.safe_stop import Pool\n", 1, FORK),
    Edit(
        "fairseq/data/dictionary.py",
        "from multiprocessing import Pool\n",
        "from fairseq.safe_stop import Pool\n",
        1,
        FORK,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        "            torch.multiprocessing.spawn(\n",
        "            from fairseq import safe_stop\n\n            safe_stop.spawn(\n",
        1,
        STOP,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        r"^    assert \(\n        cfg.distributed_world_size <= torch.cuda.device_count\(\)\n.*\n"
        r"    port = random.randint\(10000, 20000\)\n",
        "    safe_nodes.check_gpus(cfg.distributed_world_size, '--distributed-world-size')\n"
        "    port = safe_nodes.free_port()\n",
        1,
        NODES,
        regex=True,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        "                gpus_per_node = torch.cuda.device_count()\n                node_id",
        "                gpus_per_node = torch.cuda.device_count() or safe_nodes.without_gpus(cfg, nnodes)\n"
        "                node_id",
        1,
        SLURM,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        "    cfg.distributed_training.distributed_rank = distributed_init(cfg)\n",
        "    cfg.distributed_training.distributed_rank = safe_nodes.join(cfg, distributed_init)\n",
        1,
        NODES,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        "    main(cfg, **kwargs)\n\n    if torch.distributed",
        "    safe_nodes.guarded(main, cfg, **kwargs)\n\n    if torch.distributed",
        1,
        NODES,
    ),
    Edit(
        "fairseq/distributed/utils.py",
        IMPORT_TORCH,
        "\nimport torch\nfrom fairseq import safe_load, safe_nodes\n",
        1,
        SAFE_LOAD,
    ),
    Edit(
        "fairseq/trainer.py",
        "            # load model parameters\n            try:\n",
        '            self.task.load_state_dict(state.get("task_state") or {})\n'
        "            # load model parameters\n            try:\n",
        1,
        "a resumed run did not load the saved state of its task",
    ),
    Edit(
        "fairseq/trainer.py",
        '                    state["model"], strict=True, model_cfg=self.cfg.model\n                )\n',
        '                    state["model"], strict=True, model_cfg=self.cfg.model\n                )\n'
        '                if hasattr(self.model, "check_settings"):\n'
        "                    resumes = last_optim_state is not None and not reset_optimizer\n"
        "                    self.model.check_settings(self.cfg.model, state, resumes)\n",
        1,
        "weights were loaded into a model that computes another function",
    ),
    Edit(
        "fairseq/trainer.py",
        "            except Exception:\n                raise Exception(\n",
        "            except Exception as error:\n"
        "                if hasattr(error, 'one_line'):\n                    raise\n                raise Exception(\n",
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/file_chunker_utils.py",
        r"(?s)\A.*\Z",
        "from fairseq.safe_text import Chunker, find_offsets  # noqa: F401\n",
        1,
        TEXT,
        regex=True,
    ),
    Edit(
        "fairseq/data/dictionary.py",
        'open(PathManager.get_local_path(f), "r", encoding="utf-8")',
        r'open(PathManager.get_local_path(f), encoding="utf-8-sig", newline="\n")',
        1,
        TEXT,
    ),
    Edit(
        "fairseq/data/indexed_dataset.py",
        'with open(path, "r", encoding="utf-8") as f:',
        "with Chunker(path) as f:",
        1,
        TEXT,
    ),
    Edit("fairseq/utils.py", 'with open(replace_unk, "r") as f:', "with Chunker(replace_unk) as f:", 1, TEXT),
    Edit("fairseq/utils.py", "with open(embed_path) as f_embed:", "with Chunker(embed_path) as f_embed:", 1, TEXT),
    Edit("fairseq_cli/interactive.py", r"fileinput\.input\(.*\) as h", "Chunker(input) as h", 1, TEXT, regex=True),
    Edit(
        "fairseq_cli/preprocess.py",
        r'open\(([\w.]+), "r", encoding="utf-8"\)',
        r"safe_text.Chunker(\1)",
        3,
        TEXT,
        regex=True,
    ),
    Edit(
        "fairseq_cli/preprocess.py",
        "    os.makedirs(args.destdir, exist_ok=True)\n",
        "    safe_text.check_texts(args)\n    os.makedirs(args.destdir, exist_ok=True)\n",
        1,
        SIDES,
    ),
    Edit(
        "fairseq/tasks/translation.py",
        "            tgt_datasets.append(tgt_dataset)\n",
        "            tgt_datasets.append(tgt_dataset)\n"
        "            safe_text.check_same({prefix + src: len(src_datasets[-1]), prefix + tgt: len(tgt_dataset)})\n",
        1,
        SIDES,
    ),
    Edit(
        "fairseq/data/language_pair_dataset.py",
        r"assert len\(src\) == len\(\n +tgt\n +\), .*",
        "sides = {'source': src, 'target': tgt, 'alignments': align_dataset or tgt}\n"
        "            safe_text.check_same({name: len(side) for name, side in sides.items()})",
        1,
        SIDES,
        regex=True,
    ),
    Edit("fairseq_cli/score.py", "with open(args.ref) as", "with safe_text.Chunker(args.ref) as", 3, TEXT),
    Edit("fairseq_cli/score.py", "in fd.readlines():", "in fd:", 1, TEXT),
    Edit(
        "fairseq_cli/score.py",
        r'^    if args\.sys == "-":\n(?:.*\n)*?            score\(f\)\n',
        "    score(safe_text.read_system(args.sys, args.ref))\n",
        1,
        SIDES,
        regex=True,
    ),
    Edit("fairseq_cli/score.py", r"^    assert args\.sys == (?:.*\n)*?    assert .*\n", "", 1, SIDES, regex=True),
    Edit(
        "fairseq_cli/hydra_train.py",
        "    _hydra_main(cfg)\n",
        "    from fairseq import safe_exit\n\n    safe_exit.command(_hydra_main)(cfg)\n",
        1,
        ONE_LINE,
    ),
    Edit("fairseq_cli/hydra_train.py", "\nimport hydra\n", "\nimport argparse\n\nimport hydra\n", 1, HYDRA_HELP),
    Edit(
        "fairseq_cli/hydra_train.py",
        "\n\n@hydra.main(",
        "argparse.ArgumentParser._check_help = lambda parser, action: None\n\n\n@hydra.main(",
        1,
        HYDRA_HELP,
    ),
    Edit("fairseq/distributed/utils.py", "torch.load(", "safe_load.load(", 1, SAFE_LOAD),
    Edit(
        "fairseq/file_utils.py",
        r"^    # Extract archive to temp dir .*\n(?:.*\n)*?        shutil.rmtree\(tempdir\)\n",
        "    if not os.path.isdir(resolved_archive_file):\n"
        "        from fairseq import safe_files\n\n"
        "        return safe_files.unpack(resolved_archive_file, replace=resolved_archive_file != archive_file)\n",
        1,
        ARCHIVE,
        regex=True,
    ),
    Edit(
        "fairseq/data/fasta_dataset.py",
        r"^        # Use grep and awk .*\n(?:.*\n)*?        return bytes_np, sizes_np\n",
        "        from fairseq import safe_files\n\n        return safe_files.fasta_index(fasta_file_path(path))\n",
        1,
        SHELL,
        regex=True,
    ),
    Edit("fairseq/data/fasta_dataset.py", "import subprocess\n", "", 1, SHELL),
    Edit(
        "fairseq/modules/transformer_layer.py",
        "self.can_use_fastpath = (\n",
        "self.can_use_fastpath = False and (\n",
        1,
        "the fast path of post-norm layers fails with left padding and expects batch-first input",
    ),
    Edit(
        "fairseq_cli/score.py",
        "corpus_bleu(fdsys, [fdref])",
        "BLEU(args.ignore_case, max_ngram_order=args.order).corpus_score(fdsys, [list(fdref)])",
        1,
        "sacrebleu >= 2 takes lists, not open files; it ignored --ignore-case and --order",
    ),
    Edit(
        "fairseq_cli/score.py",
        "bleu.Scorer(dict.pad(), dict.eos(), dict.unk())",
        "bleu.Scorer(bleu.BleuConfig(pad=dict.pad(), eos=dict.eos(), unk=dict.unk()))",
        1,
        "--sentence-bleu passed arguments that the scorer no longer accepts",
    ),
    Edit("fairseq/data/token_block_dataset.py", "np.compat.long", "np.int64", 1, LONG),
    Edit("fairseq/data/language_pair_dataset.py", "np.compat.long", "np.int64", 1, LONG),
    Edit("fairseq/data/data_utils.py", r"\bnp\.int\b", "int", 1, "numpy >= 1.24 has no np.int", regex=True),
    Edit("fairseq/modules/dynamic_crf_layer.py", 'np.float("inf")', 'float("inf")', 1, "numpy >= 1.24 has no np.float"),
    Edit(
        "fairseq/models/distributed_fairseq_model.py",
        "device_ids=[args.device_id],\n            output_device=args.device_id,",
        'device_ids=[args.device_id] if device.type == "cuda" else None,\n'
        '            output_device=args.device_id if device.type == "cuda" else None,',
        1,
        "DistributedDataParallel rejects device ids on a CPU",
    ),
    Edit(
        "fairseq/options.py",
        "    if args.bf16:\n        args.tpu = True\n",
        "",
        1,
        "--bf16 treated every machine as a TPU",
    ),
    Edit(
        "fairseq/tasks/fairseq_task.py",
        "torch.cuda.amp.autocast(enabled",
        'torch.amp.autocast("cuda", enabled',
        1,
        "torch warned about the old name in every run",
    ),
    Edit(
        "fairseq/data/iterators.py",
        "pin_memory=True,",
        "pin_memory=torch.cuda.is_available(),",
        2,
        "torch warned about it in every command on a CPU",
    ),
    Edit(
        "fairseq/options.py",
        "def get_validation_parser(default_task=None):",
        'def get_validation_parser(default_task="translation"):',
        1,
        "fairseq-validate without --task: KeyError: None; the checkpoint names its task",
    ),
    Edit(
        "fairseq/options.py",
        "    # parse a second time after adding the *-specific arguments.\n"
        "    # If input_args is given, we will parse those args instead of sys.argv.\n"
        "    args, _ = parser.parse_known_args(input_args)\n",
        "    # parse a second time after adding the *-specific arguments.\n"
        "    # If input_args is given, we will parse those args instead of sys.argv.\n"
        "    from fairseq import safe_settings\n\n"
        "    args, _ = safe_settings.parse_components(parser, input_args)\n",
        1,
        "--help did not show the flags of the architecture, the task and other components",
    ),
    Edit(
        "fairseq/data/data_utils.py",
        'interpolation="lower",',
        'method="lower",',
        1,
        "numpy 2.4 has no interpolation= (--num-batch-buckets)",
    ),
    Edit(
        "fairseq/data/indexed_dataset.py",
        "        return MMapIndexedDataset(path)\n    elif",
        "        from fairseq import safe_files\n\n"
        "        safe_files.check_sentences(data_file_path(path))\n"
        "        return MMapIndexedDataset(path)\n    elif",
        1,
        "a split without sentences was a traceback",
    ),
    Edit(
        "fairseq/data/indexed_dataset.py",
        "    else:\n        return IndexedDataset.exists(path)\n",
        '    else:\n        return impl != "fasta" and IndexedDataset.exists(path)\n',
        1,
        "--dataset-impl fasta with other data was a traceback",
    ),
    Edit(
        "fairseq/dataclass/utils.py",
        "        field_type = interpret_dc_type(v.type)\n        if (\n",
        "        if val is None and str(v.default).startswith('${'):\n"
        "            val = v.default\n\n"
        "        field_type = interpret_dc_type(v.type)\n        if (\n",
        1,
        "polynomial_decay without --total-num-update did not use --max-update",
    ),
    Edit(
        "fairseq/optim/lr_scheduler/polynomial_decay_schedule.py",
        "        assert cfg.total_num_update > 0\n",
        "        assert cfg.total_num_update > 0, (\n"
        '            "--lr-scheduler polynomial_decay requires a length; add --max-update or --total-num-update"\n'
        "        )\n",
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/optim/lr_scheduler/inverse_square_root_schedule.py",
        "        warmup_end_lr = cfg.lr[0]",
        "        if cfg.warmup_updates < 1:\n"
        "            raise ValueError(\n"
        '                "--warmup-updates must be at least 1 with --lr-scheduler inverse_sqrt: "\n'
        '                "raise it, or use another schedule"\n'
        "            )\n"
        "        warmup_end_lr = cfg.lr[0]",
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq_cli/generate.py",
        "    safe_flags.check_generation(cfg)\n",
        "    safe_flags.check_generation(cfg)\n    if cfg.generation.constraints:\n"
        '        raise ValueError("--constraints is only supported by fairseq-interactive: use it")\n',
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/utils.py",
        "isinstance(replace_unk, str) and len(replace_unk) > 0:",
        'isinstance(replace_unk, str) and replace_unk not in ("", "@@ "):',
        1,
        "--replace-unk without a file opened a file called @@",
    ),
    Edit(
        "fairseq/utils.py",
        '        src_idx, tgt_idx = alignment.split("-")\n',
        '        src_idx, _, tgt_idx = alignment.partition("-")\n'
        "        if not (src_idx.isdecimal() and tgt_idx.isdecimal()):\n"
        "            from fairseq.safe_exit import OneLineError\n\n"
        '            raise OneLineError(f"alignment {alignment}: must be SOURCE-TARGET, indices from 0; correct it")\n',
        1,
        ONE_LINE,
    ),
    Edit(
        "fairseq/tasks/translation.py",
        "sample_ratios[0] = upsample_primary",
        "sample_ratios[0] = max(1, upsample_primary)",
        1,
        "several files of a split (--combine-valid-subsets) repeated the first of them -1 times",
    ),
    Edit(
        "fairseq/tasks/translation_from_pretrained_bart.py",
        '        self.langs = args.langs.split(",")\n',
        "        if not args.langs:\n"
        '            raise ValueError("--task translation_from_pretrained_bart requires --langs: name the languages")\n'
        '        self.args = args\n        self.langs = args.langs.split(",")\n',
        1,
        "the task read an attribute that its base class no longer has",
    ),
    Edit(
        "fairseq/data/iterators.py",
        "            return self.collate_fn([self.dataset[i] for i in self.frozen_batches[0]])",
        "            if self._supports_prefetch:\n                self.dataset.prefetch(self.frozen_batches[0])\n"
        "            return self.collate_fn([self.dataset[i] for i in self.frozen_batches[0]])",
        1,
        "--dataset-impl cached read a batch that it had not loaded",
    ),
    Edit("setup.py", "= write_version_py()", '= write_version_py() + "+deep9"', 1, "mark the edited version"),
    Edit("setup.py", "from torch.utils import cpp_extension", "raise ImportError", 1, "the sources are not published"),
    Edit("setup.py", r"^        setup_requires=\[[^]]*\],\n", "", 1, "pyproject.toml names them", regex=True),
    Edit("setup.py", r"^        (dependency_links|test_suite)=.*\n", "", 2, "setuptools dropped them", regex=True),
    Edit(
        "setup.py",
        '"hydra-core>=1.0.7,<1.1",\n            "omegaconf<2.1",',
        '"hydra-core>=1.3.2,<1.4",\n            "omegaconf>=2.2,<2.4",',
        1,
        REQUIREMENTS,
    ),
    Edit("setup.py", '"sacrebleu>=1.4.12"', '"sacrebleu>=2"', 1, REQUIREMENTS),
    Edit("setup.py", '"torch",', '"torch>=1.13",', 1, REQUIREMENTS),
    Edit("setup.py", '            "torchaudio>=0.8.0",\n', "", 1, REQUIREMENTS),
    Edit("setup.py", "zip_safe=False,", 'zip_safe=False,\n        python_requires=">=3.11",', 1, REQUIREMENTS),
]
# Speech and quantisation have their own loaders.
LOADS = {
    "data/codedataset.py": 3,
    "models/speech_to_text/xm_transformer.py": 1,
    "models/text_to_speech/vocoder.py": 2,
    "modules/quantization/pq/em.py": 3,
}
for file, count in LOADS.items():
    EDITS.append(Edit(f"fairseq/{file}", IMPORT_TORCH, IMPORT_SAFE_LOAD, 1, SAFE_LOAD))
    EDITS.append(Edit(f"fairseq/{file}", "torch.load(", "safe_load.load(", count, SAFE_LOAD))
EDITS += [
    Edit(
        f"fairseq_cli/{name}.py",
        "\ndef cli_main(",
        "\nfrom fairseq import safe_exit, safe_flags  # noqa: E402, F401\n\n\n@safe_exit.command\ndef cli_main(",
        1,
        ONE_LINE,
    )
    for name in ("train", "generate", "interactive", "validate", "eval_lm", "preprocess", "score")
]
EDITS += [
    Edit(file, FIRST_IMPORT, r"\1from fairseq.safe_text import Chunker\n", 1, TEXT, regex=True)
    for file in ("fairseq/data/indexed_dataset.py", "fairseq/utils.py", "fairseq_cli/interactive.py")
]
EDITS += [
    Edit(file, FIRST_IMPORT, r"\1from fairseq import safe_text\n", 1, SIDES, regex=True)
    for file in (
        "fairseq/data/language_pair_dataset.py",
        "fairseq/tasks/translation.py",
        "fairseq_cli/preprocess.py",
        "fairseq_cli/score.py",
    )
]
EDITS += [
    Edit(
        f"fairseq_cli/{name}.py",
        "        if cfg.common.fp16:\n            model.half()\n",
        "        if cfg.common.fp16:\n            model.half()\n"
        "        elif cfg.common.bf16:\n            model.bfloat16()\n",
        1,
        "--bf16 had no effect",
    )
    for name in ("generate", "interactive")
]
EDITS += [
    Edit(f"fairseq/{file}", FIRST_IMPORT, SAFE_EVAL, 1, "eval would run code in a checkpoint's options", regex=True)
    for file in EVAL_FILES
]


def apply_edits(root: Path, edits: list[Edit] = EDITS) -> None:
    """Apply `edits` to the source tree `root`; no file is written unless all edits match.

    Raises:
        EditError: a file is missing, or an edit does not match the required number of times
    """
    texts: dict[str, str] = {}
    for number, edit in enumerate(edits, 1):
        if edit.file not in texts:
            try:
                texts[edit.file] = (root / edit.file).read_text(encoding="utf-8")
            except OSError:
                raise EditError(f"edit {number}: {edit.file} is missing") from None
        pattern = re.compile(edit.old if edit.regex else re.escape(edit.old), re.MULTILINE)
        found = len(pattern.findall(texts[edit.file]))
        if found != edit.count:
            raise EditError(
                f"edit {number} ({edit.why}) must match {edit.count} times in {edit.file} but matches {found} times"
            )
        new = edit.new
        texts[edit.file] = pattern.sub(new if edit.regex else lambda match, new=new: new, texts[edit.file])
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
