"""Models, batch and measurements of ``fairseq-deep diagnose``."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from fairseq_deep.core.diagnostics import layer_gradient_norms, source_gain, stream_statistics, sublayer_ratios
from fairseq_deep.errors import UsageError, one_line

SIDES = ("encoder", "decoder")
RATIOS = ("variance", "beta_ln", "beta_rc", "beta")
# these options would run a layer twice, or not at all
_WHOLE = {"checkpoint_activations": False, "offload_activations": False, "encoder_layerdrop": 0, "decoder_layerdrop": 0}


class Subject(NamedTuple):
    """A model to measure; `build` returns it, as a new model per call unless it is trained."""

    name: str
    task: Any
    build: Callable[[], Any]
    cpu: bool


def measure(subject: Subject, split: str, tokens: int, seeds: int, train: bool) -> dict[str, Any]:
    """Return the batch, the results per seed 1 ... `seeds`, and their mean.

    Raises:
        UsageError: the data cannot be read, or the model cannot be built, is not of this package, or does not fit into
            memory
    """
    from fairseq_deep.plugin.models.deep_transformer import DeepTransformerModel

    try:
        sample = _batch(subject.task, split, tokens)
        runs = []
        for seed in range(1, seeds + 1):
            if sys.stderr.isatty():
                print(f"{subject.name}, seed {seed} of {seeds}", file=sys.stderr)
            torch.manual_seed(seed)
            model = subject.build()
            if not isinstance(model, DeepTransformerModel):
                raise UsageError(f"{subject.name} is a {type(model).__name__}: give a model of this package")
            model.train(train)
            runs.append({"seed": seed, **_measure_once(model, sample, subject.cpu)})
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise UsageError(f"{subject.name} does not fit into memory: use fewer --tokens, or --cpu") from error
        raise
    batch = {"sentences": len(sample["target"]), "target_tokens": int(sample["ntokens"])}
    mean = mean_of([{key: value for key, value in run.items() if key != "seed"} for run in runs])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"name": subject.name, "parameters": parameters, "batch": batch, "mean": mean, "seeds": runs}


def _measure_once(model: Any, sample: dict[str, Any], cpu: bool) -> dict[str, Any]:
    from fairseq.utils import move_to_cuda

    if getattr(model.decoder, "adaptive_softmax", None) is not None:
        raise UsageError("--adaptive-softmax-cutoff is not supported, since fairseq has no gradient for it: give "
                         "another model")  # fmt: skip
    if torch.cuda.is_available() and not cpu:
        model, sample = model.cuda(), move_to_cuda(sample)
    inputs, pad = sample["net_input"], model.encoder.padding_idx
    losses = []

    def loss() -> Any:
        output = model(**inputs)
        scores = model.get_normalized_probs(output, log_probs=True, sample=sample)
        target = model.get_targets(sample, output)
        value = torch.nn.functional.nll_loss(scores.flatten(0, 1).float(), target.flatten(), ignore_index=pad)
        losses.append(float(value.detach()))
        return value

    model.zero_grad()
    sublayers = None
    if any(hasattr(layer, "residual") for side in SIDES for layer in getattr(model, side).layers):
        padding = {"encoder": inputs["src_tokens"].eq(pad), "decoder": inputs["prev_output_tokens"].eq(pad)}
        ratios = sublayer_ratios(model, padding, loss)
        fields = ("layer", "part", *RATIOS)
        sublayers = {side: [{name: getattr(r, name) for name in fields} for r in ratios[side]] for side in SIDES}
    else:
        loss().backward()
    norms, streams = layer_gradient_norms(model), stream_statistics(model, inputs, pad)
    return {
        "loss": losses[0],
        "source_gain": source_gain(model, sample, pad) if len(sample["target"]) > 1 else None,
        "gradient_norm": {part: values if part in SIDES else values[0] for part, values in norms.items()},
        "sublayers": sublayers,
        **{f"stream_{name}": values for name, values in streams.items()},
    }


def fresh(name: str, data: str, flags: Sequence[str]) -> Subject:
    """Return the initial model of ``fairseq-train DATA FLAGS --arch NAME``; `name` may include flags.

    Raises:
        UsageError: an argument is invalid
    """
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    arch, *own = _or_user_error(f"wrong flags in {name}", lambda: shlex.split(name)) or [""]
    parser = options.get_training_parser()
    parser.error = _refuse_flag
    line = [data, "--arch", arch, *flags, *own]
    args = _or_user_error("wrong flags", lambda: options.parse_args_and_arch(parser, line))
    vars(args).update(_WHOLE)
    cfg = convert_namespace_to_omegaconf(args)
    task = _or_user_error(f"cannot read {data}", lambda: tasks.setup_task(cfg.task))

    def build() -> Any:
        return _or_user_error(f"cannot build {arch}", lambda: task.build_model(cfg.model))

    return Subject(name, task, build, args.cpu)


def trained(path: str, data: str, cpu: bool) -> Subject:
    """Return the model of the checkpoint at `path`.

    Raises:
        UsageError: the checkpoint cannot be loaded
    """
    from fairseq.checkpoint_utils import load_model_ensemble_and_task

    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such checkpoint; correct the path")
    overrides = {"data": data, **_WHOLE}
    (model,), _, task = _or_user_error(
        f"cannot load {path}", lambda: load_model_ensemble_and_task([path], arg_overrides=overrides)
    )
    return Subject(path, task, lambda: model, cpu)


def _refuse_flag(message: str) -> None:
    raise UsageError(f"{message} (not a flag of this command or fairseq-train, or an invalid value)")


def _or_user_error(problem: str, action: Callable[[], Any]) -> Any:
    """Call `action` and return its result; exceptions of fairseq become `UsageError`."""
    try:
        return action()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{problem}: {one_line(error)}") from error


def _batch(task: Any, split: str, tokens: int) -> dict[str, Any]:
    """Return a batch of about `tokens` target tokens of `split`, identical at each call.

    The sentences are neighbours in fairseq's order by length, from the middle: shorter and longer sentences of the
    split have equally many target tokens. This resembles a training batch; sentences of arbitrary lengths would be
    mostly padding.
    """
    from fairseq.data.data_utils import numpy_seed

    _or_user_error(f"cannot read the split {split}", lambda: task.load_dataset(split))
    dataset = task.dataset(split)
    if getattr(dataset, "tgt_sizes", None) is None or len(dataset) == 0:
        raise UsageError(f"the split {split} has no sentence pairs: give data of --task translation")
    with numpy_seed(1):  # the order of sentences with equal lengths is random
        order = dataset.ordered_indices()
    lengths = numpy.asarray(dataset.tgt_sizes)[order]
    sums = numpy.cumsum(lengths)
    first = int(numpy.searchsorted(sums, max(0, sums[-1] - tokens) / 2))
    last = int(numpy.searchsorted(sums, sums[first] - lengths[first] + tokens))
    return dataset.collater([dataset[int(index)] for index in order[first : last + 1]])


def mean_of(values: list[Any]) -> Any:
    """Return the elementwise mean of results with the same structure; equal values are not changed."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(group)) for group in zip(*values)]
    return first if all(value == first for value in values) else sum(values) / len(values)
