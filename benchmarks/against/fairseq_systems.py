"""Stock fairseq and this package, each as `fairseq-generate` sets it up: its flags, its task, its generator."""

import os
import warnings
from dataclasses import dataclass

import decoding
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_deep  # noqa: F401  the task and the models, as --user-dir brings them
from fairseq_deep.plugin.architectures import build_architecture

LANGUAGES = ("source", "target")
ARCHITECTURES = {
    name: f"transformer_{layers}"
    for name, layers in (("dlcl", "dlcl_6l"), ("lstm", "lstm_6l"), ("modern", "modern_6l"), ("dlcl30", "dlcl_30l"))
}


@dataclass
class Work:
    """What is translated: batches as fairseq makes them, and the dictionaries of both sides."""

    batches: list
    source_dictionary: object
    target_dictionary: object


def longest(settings, sample) -> int:
    """Words of the longest hypotheses, as fairseq's generator has it: of the longest source with its </s>."""
    return int(settings.max_len_a * sample["net_input"]["src_tokens"].size(1) + settings.max_len_b)


def split_name(system):
    """Name of the model and its precision."""
    name, _, precision = system.partition("-")
    return name, precision or "fp32"


def configure(system, settings, data, path="-"):
    """The configuration of `fairseq-generate` for *system*."""
    name, precision = split_name(system)
    command = [data, "--path", path, "--cpu", "--beam", settings.beam, "--lenpen", settings.lenpen]
    command += ["--max-len-a", settings.max_len_a, "--max-len-b", settings.max_len_b, "--min-len", settings.min_len]
    command += ["--batch-size", settings.batch_size, "--gen-subset", settings.gen_subset, "--remove-bpe"]
    if not settings.checkpoint:
        command += ["--source-lang", LANGUAGES[0], "--target-lang", LANGUAGES[1]]
    if name != "stock":
        command += ["--task", "deep_translation", "--decode-precision", precision]
    parser = options.get_generation_parser()
    args = options.parse_args_and_arch(parser, [str(word) for word in command])
    return convert_namespace_to_omegaconf(args)


def read_corpus(config, settings, task, model=None):
    """The batches of a subset, in fairseq's order; of every so many only one if fewer sentences are wanted."""
    task.load_dataset(settings.gen_subset)
    dataset = task.dataset(settings.gen_subset)
    limits = utils.resolve_max_positions(task.max_positions(), *([model.max_positions()] if model else []))
    with warnings.catch_warnings():  # of the loader, that there is no GPU
        warnings.simplefilter("ignore")
        batches = task.get_batch_iterator(
            dataset=dataset,
            max_sentences=config.dataset.batch_size,
            max_positions=limits,
            ignore_invalid_inputs=config.dataset.skip_invalid_size_inputs_valid_test,
            required_batch_size_multiple=config.dataset.required_batch_size_multiple,
            seed=config.common.seed,
        ).next_epoch_itr(shuffle=False)
        stride = max(1, len(dataset) // settings.sentences) if settings.sentences else 1
        return [sample for index, sample in enumerate(batches) if index % stride == 0]


def make_random(settings, dictionary):
    """One batch of random sentences, always the same."""
    torch.manual_seed(2)
    sample = decoding.batch(dictionary, settings)
    return [{**sample, "id": torch.arange(settings.sentences)}]


def random_model(name, settings, dictionary):
    """A model with random weights: stock's, where it has the same structure."""
    stock, flags = decoding.build_stock(settings, dictionary)
    if name not in ARCHITECTURES:
        return decoding.build(name, stock, flags, dictionary)
    if name == "dlcl30":
        flags = {"share_all_embeddings": True}
    if name == "lstm":
        flags = {flag: value for flag, value in flags.items() if "ffn" not in flag}
    torch.manual_seed(1)
    return build_architecture(ARCHITECTURES[name], dictionary, **flags)


def load(system, settings):
    """Task, model and work of *system*, and the configuration that they were made with."""
    name, _ = split_name(system)
    if settings.checkpoint:
        path = settings.checkpoint[name]
        config = configure(system, settings, settings.data, path)
        task = tasks.setup_task(config.task)
        models, _ = checkpoint_utils.load_model_ensemble([path], task=task)
        model, batches = models[0], read_corpus(config, settings, task, models[0])
    else:
        config = configure(system, settings, settings.data)
        task = tasks.setup_task(config.task)
        model = random_model(name, settings, task.target_dictionary)
        batches = make_random(settings, task.target_dictionary)
    return task, model.eval(), Work(batches, task.source_dictionary, task.target_dictionary), config


def write_dictionaries(folder, size):
    """Dictionaries for random sentences, where fairseq's tasks look for them."""
    for language in LANGUAGES:
        decoding.make_dictionary(size).save(os.path.join(folder, f"dict.{language}.txt"))


class FairseqSystem:
    """Translates through the generator that the task builds, as `fairseq-generate` does."""

    def __init__(self, system, settings):
        torch.set_num_threads(settings.threads)
        self.task, model, self.work, config = load(system, settings)
        self.models = [model]
        model.prepare_for_inference_(config)
        self.generator = self.task.build_generator(self.models, config.generation)

    def translate(self):
        return [self.task.inference_step(self.generator, self.models, sample) for sample in self.work.batches]

    def hypotheses(self, found):
        """{sentence: its hypotheses as lists of words without </s>, best first} of what `translate` returned."""
        result = {}
        for sample, sentences in zip(self.work.batches, found):
            for index, sentence in zip(sample["id"].tolist(), sentences):
                result[index] = [hypothesis["tokens"].tolist()[:-1] for hypothesis in sentence]
        return result
