"""Decoding: ours against stock fairseq's transformer with the same weights, merged attention against self-attention.

The systems take turns in fairseq's beam search with a fixed number of steps. Stock and ours have the same weights, and
must give the same hypotheses. What has a precision in its name is as --task deep_translation builds it. For speed by
depth of one stack (Wang et al. 2019, Fig. 4 and Table 5) there are pre-norm and DLCL, with random weights;
value-residual is pre-norm with that option.

    python benchmarks/decoding.py [--dim 256 --layers 6 --vocabulary 8000] [--sentences 32 --length 26] [--rounds 5]
    python benchmarks/decoding.py --device cuda --dtype float16 --systems stock ours merged
    python benchmarks/decoding.py --encoder-layers 30 --decoder-layers 6 --systems prenorm dlcl
"""

import argparse
import copy
import statistics
import time
import types

import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from fairseq_deep.core.decoding import reduce_precision
from fairseq_deep.plugin.architectures import build_architecture
from fairseq_deep.plugin.generator import Generator
from fairseq_deep.tools.tables import format_table

DEFAULT_SYSTEMS = ("stock", "ours", "ours-fp32", "ours-bf16", "ours-int8", "merged", "merged-fp32", "merged-int8")
DEPTHS = ("prenorm", "dlcl")
OPTIONS = {"value-residual": {"value_residual": True}}  # of pre-norm
LANGUAGES = {"laln": "language_norm", "lalt": "language_transform"}
SYSTEMS = (*DEFAULT_SYSTEMS, "merged-self", "merged-average", "average", "ssru", "luna", *LANGUAGES, *DEPTHS, *OPTIONS)


def make_dictionary(size):
    """A dictionary of that size, of which the last entry is a language tag."""
    dictionary = Dictionary()
    for index in range(size - len(dictionary) - 1):
        dictionary.add_symbol(str(index))
    dictionary.add_symbol("<2l>")
    return dictionary


def build_stock(options, dictionary):
    """fairseq's own model with random weights, always the same; and its flags."""
    depths = {name: getattr(options, name, None) for name in ("encoder_layers", "decoder_layers")}
    flags = {name: depth for name, depth in depths.items() if depth}  # other benchmarks have no such options
    for side in ("encoder", "decoder"):
        flags.update({f"{side}_embed_dim": options.dim, f"{side}_ffn_embed_dim": 4 * options.dim})
        flags[f"{side}_attention_heads"] = options.dim // 64
    flags["share_all_embeddings"] = True
    torch.manual_seed(1)
    args = argparse.Namespace(**flags)
    base_architecture(args)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return TransformerModel.build_model(args, task), flags


def build(system, stock, flags, dictionary):
    name, _, precision = system.partition("-")
    if system == "stock":
        return copy.deepcopy(stock)
    if system in DEPTHS or system in OPTIONS:
        torch.manual_seed(1)
        structure = system if system in DEPTHS else "prenorm"
        return build_architecture(f"transformer_{structure}_6l", dictionary, **flags, **OPTIONS.get(system, {}))
    attention = system if system.startswith("merged") and precision in ("self", "average") else name
    more = {LANGUAGES[name]: True} if name in LANGUAGES else {}
    attention = "self" if more else {"ours": "self"}.get(attention, attention)
    if attention == "luna":
        flags = {**flags, "encoder_attn": "luna"}
    torch.manual_seed(1)
    model = build_architecture("transformer_postnorm_6l", dictionary, decoder_attn=attention, **more, **flags)
    if attention == "self" and not more:
        model.load_state_dict(stock.state_dict())
    return model


def prepare(model, system, options):
    model = model.to(options.device, getattr(torch, options.dtype)).eval()
    model.prepare_for_inference_(OmegaConf.create({"generation": {"beam": options.beam, "print_alignment": None}}))
    for precision in ("bf16", "int8"):
        if system.endswith(precision):
            reduce_precision(model.decoder, precision)
    return model


def batch(dictionary, options):
    """Sentences of a third to all of the length, with padding on the left."""
    source = torch.randint(dictionary.nspecial, len(dictionary), (options.sentences, options.length))
    source[:, -1] = dictionary.eos()
    for row, pad in enumerate(torch.randint(0, max(options.length // 3, 1), (options.sentences,)).tolist()):
        source[row, :pad] = dictionary.pad()
    source = source.to(options.device)
    lengths = source.ne(dictionary.pad()).sum(1)
    return {"net_input": {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": source}}


def timed(generate, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = generate()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, [hypothesis["tokens"].tolist() for sentence in result for hypothesis in sentence]


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = {"dim": 256, "layers": 6, "vocabulary": 8000, "sentences": 32, "length": 26, "beam": 4, "rounds": 5}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for side in ("encoder", "decoder"):
        parser.add_argument(f"--{side}-layers", type=int, metavar="N", help=f"layers of the {side} (default: --layers)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT_SYSTEMS)
    options = parser.parse_args(words)
    for side in ("encoder_layers", "decoder_layers"):
        if getattr(options, side) is None:
            setattr(options, side, options.layers)
    return options


def main(words=None):
    options = read_arguments(words)
    torch.set_num_threads(options.threads)
    dictionary = make_dictionary(options.vocabulary)
    stock, flags = build_stock(options, dictionary)
    models = {name: prepare(build(name, stock, flags, dictionary), name, options) for name in options.systems}
    search = {"beam_size": options.beam, "max_len_a": 0, "max_len_b": options.length, "min_len": options.length}
    generators = {}
    for name, model in models.items():
        kind = Generator if name.endswith(("fp32", "bf16", "int8")) else SequenceGenerator
        generators[name] = kind([model], dictionary, **search)
    sample = batch(dictionary, options)
    times, outputs = {name: [] for name in models}, {}
    for round in range(options.rounds + 1):
        for name, generator in generators.items():
            seconds, outputs[name] = timed(lambda g=generator, m=models[name]: g.generate([m], sample), options.device)
            if round:  # the first warms up
                times[name].append(seconds)
    report(times, outputs, options)


def report(times, outputs, options):
    first = next(iter(times))
    rows = [("system", "seconds", "ms a step", f"speed, {first} = 1", f"hypotheses of {first}")]
    for name, values in times.items():
        median = statistics.median(values)
        speed = statistics.median(base / value for base, value in zip(times[first], values))
        same = sum(a == b for a, b in zip(outputs[first], outputs[name])) / len(outputs[first])
        rows.append((name, f"{median:.3f}", f"{1000 * median / options.length:.1f}", f"{speed:.3f}", f"{same:.1%}"))
    print(format_table(rows, right=range(1, 5)))


if __name__ == "__main__":
    main()
