"""Whether models compute on a device what they compute on a CPU: outputs, every gradient, translations, updates.

Each check prints a line as it is done; the exit status is 1 if one fails.

    python benchmarks/gpu_check.py [--device cuda] [--layers 3] [--width 64]
"""

import argparse
import copy
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from fairseq import optim
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from fairseq_deep.errors import one_line
from fairseq_deep.plugin.architectures import build_architecture

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.methods import METHODS, OPTIONS  # noqa: E402
from tests.helpers.models import POSTNORM, PRENORM, make_batch, make_dictionary  # noqa: E402

WIDE = {"encoder_embed_dim": 520, "decoder_embed_dim": 520}  # no power of two
MODELS = {  # those with kernels of their own come first
    "DLCL, wide": ("transformer_dlcl_6l", WIDE),
    "LSTM, wide": ("transformer_lstm_6l", WIDE),
    "DLCL, deep": ("transformer_dlcl_6l", {"encoder_layers": 14}),
    "recomputation": ("transformer_dlcl_6l", {"checkpoint_activations": True}),
    "layer_agg-lstm": METHODS["layer_agg-lstm"],
    "plain pre-norm": (PRENORM, {}),
    "plain post-norm": (POSTNORM, {}),
    **METHODS,
    **OPTIONS,
}
COMPILED = ("plain pre-norm", "layer_agg-dlcl", "layer_agg-lstm")
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


def step(model, batch):
    """The output of a batch, and the gradient of each parameter, both in fp64.

    The output of padding is zeroed: no loss has it, and the decoder masks padding on the right only on a CPU.
    """
    source, lengths, target = (part.to(next(model.parameters()).device) for part in batch)
    model.zero_grad(set_to_none=True)
    output = model(source, lengths, target)[0].masked_fill(target.eq(1).unsqueeze(-1), 0.0)
    output.float().sin().mean().backward() if output.dtype != torch.float64 else output.sin().mean().backward()
    gradients = {name: part.grad.detach().double().cpu() for name, part in model.named_parameters()}
    return output.detach().double().cpu(), gradients


def distance(ours, theirs):
    """The largest difference of outputs and gradients, as a share of the largest value of its tensor."""
    pairs = [(ours[0], theirs[0])] + [(ours[1][name], theirs[1][name]) for name in theirs[1]]
    floor = max(part.abs().max().item() for part in theirs[1].values()) * 1e-3
    return max(((a - b).abs().max() / max(b.abs().max().item(), floor)).item() for a, b in pairs)


def translations(model, batch, dictionary, compiles=False):
    """The words of all hypotheses; *compiles*: with decoding steps that are compiled."""
    model = copy.deepcopy(model).eval()
    model.prepare_for_inference_(OmegaConf.create({"generation": {"beam": 4, "print_alignment": None}}))
    if compiles:
        model.decoder.compile_steps(dynamic=True)
    source, lengths = (part.to(next(model.parameters()).device) for part in batch[:2])
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=12)
    found = generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
    return [[hypothesis["tokens"].tolist() for hypothesis in sentence] for sentence in found]


def updated(model, batch, name, device):
    """The parameters after three updates with the optimizer *name*."""
    model = copy.deepcopy(model).float().to(device)
    flags = {"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.01, "lr": [0.01],
             "use_old_adam": False, "fp16_adam_stats": False, "tpu": False}  # fmt: skip
    optimizer = optim.build_optimizer(OmegaConf.create(flags), list(model.parameters()))
    for _ in range(3):
        step(model, batch)
        optimizer.step()
    return torch.cat([part.detach().cpu().flatten() for part in model.parameters()])


def checks(reference, batch, dictionary, device, label):
    """(what is compared, the difference, the largest that is right) one by one; *reference* is on the CPU in fp64."""
    expected = step(reference, batch)
    exact = 1e-6 if "geglu" in label else 1e-9  # fairseq's gelu is in fp32
    yield "fp64: output, all gradients", distance(step(copy.deepcopy(reference).to(device), batch), expected), exact
    if "routing" in label:  # its votes amplify rounding
        return
    for dtype, limit in ((torch.float32, 2e-3), (torch.bfloat16, 0.5), (torch.float16, 0.2)):
        if dtype == torch.bfloat16 and device == "cuda" and not torch.cuda.is_bf16_supported():
            continue
        name = str(dtype).split(".")[1]
        yield name, distance(step(copy.deepcopy(reference).to(device, dtype), batch), expected), limit
    same = translations(reference, batch, dictionary) == translations(
        copy.deepcopy(reference).to(device), batch, dictionary
    )
    yield "beam search, token for token", 0.0 if same else 1.0, 0.0
    adam, fused = (updated(reference, batch, name, device) for name in ("adam", "fused_adam"))
    yield "fused_adam = adam", (adam - fused).abs().max().item(), 1e-3


def compiled_checks(reference, batch, dictionary, device, label):
    """Training and decoding through torch.compile against both without it, in fp32 on the device."""
    model = copy.deepcopy(reference).float().to(device)
    expected, plain = step(model, batch), translations(model, batch, dictionary)
    trained = copy.deepcopy(model)
    trained.compiles = True
    trained.set_num_updates(0)
    if trained.compiler is None:
        yield "--compile: no compiler here", 0.0, 0.0
        return
    yield "--compile: output, gradients", distance(step(trained, batch), expected), 2e-3
    same = translations(model, batch, dictionary, compiles=True) == plain
    yield "--decode-compile: same words", 0.0 if same else 1.0, 0.0


def build(name, flags, dictionary, options):
    torch.manual_seed(1)
    sizes = {}
    for side in ("encoder", "decoder"):
        sizes.update({f"{side}_layers": options.layers, f"{side}_embed_dim": options.width,
                      f"{side}_attention_heads": 4})  # fmt: skip
        if "lstm" not in name:
            sizes[f"{side}_ffn_embed_dim"] = 2 * options.width
    off = dict.fromkeys((flag for flag in flags if flag.endswith("dropout")), 0.0)
    if flags.get("decoder_memory") == "transparent":
        off["transparent_dropout"] = 0.0
    flags = {"share_all_embeddings": True, **sizes, **flags, **NO_DROPOUT, **off}
    return build_architecture(name, dictionary, **flags).double()


def count_failures(found):
    """Print a line for each check in *found* as it is done, and for an error, which ends them; count the failures."""
    start, failures = time.perf_counter(), 0
    try:
        for what, difference, limit in found:
            good = difference <= limit  # a NaN is not
            failures += not good
            now = time.perf_counter()
            line = f"  {what:<32}{difference:>12.1e}{limit:>10.0e}{now - start:>9.1f}"
            print(line if good else f"{line}  WRONG", flush=True)
            start = now
    except Exception as error:
        print(f"  WRONG: {type(error).__name__}: {one_line(error, 500)}", flush=True)
        failures += 1
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--compile", nargs="*", choices=list(MODELS), default=list(COMPILED), metavar="MODEL",
                        help="models that are also compiled, which takes a minute each")  # fmt: skip
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: use --device cpu")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}; against fp64 on the CPU\n")
    print(f"  {'what':<32}{'difference':>12}{'at most':>10}{'seconds':>9}")
    dictionary, failures = make_dictionary(200), 0
    work = [(label, checks) for label in options.only]
    work += [(label, compiled_checks) for label in options.compile if label in options.only]
    for label, function in work:
        print(label, flush=True)
        model = build(*MODELS[label], dictionary, options).train()
        batch = make_batch(dictionary, (11, 9, 8, 7, 6, 5), (11, 10, 9, 8, 7, 6))
        failures += count_failures(function(model, batch, dictionary, options.device, label))
    print(f"\n{failures} checks failed" if failures else "\nall checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
