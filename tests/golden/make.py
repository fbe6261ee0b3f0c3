"""Write a golden: ``python -m tests.golden.make NAME --arch ARCH FLAG ...``. Those that there are have their flags."""

import sys
import zlib

import torch

from tests.golden import FOLDER, NARROW, VOCAB, build, model_flags, outputs
from tests.helpers.flags import parse


def make(name, *flags):
    """Write the golden *name*, of a narrow model with these flags."""
    torch.manual_seed(zlib.crc32(name.encode()))
    flags = [*flags[:2], *NARROW, *flags[2:]]
    args = parse(*flags)
    resolved = model_flags(args)
    model = build(args)
    with torch.no_grad():  # so that norms, biases and closed gates are seen in the outputs, too
        for key, value in model.state_dict().items():
            if value.is_floating_point() and not key.endswith("version"):
                value.add_(torch.randn_like(value) * 0.2)
                value.copy_(value.bfloat16())
    source, target = torch.randint(4, VOCAB, (3, 5)), torch.randint(4, VOCAB, (3, 4))
    source[1, :2] = model.encoder.padding_idx
    target[:, 0], target[2, 3] = model.encoder.dictionary.eos(), model.encoder.padding_idx
    output, translations = outputs(model, source, target)
    weights = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    shapes = {key: tuple(value.shape) for key, value in weights.items()}
    golden = {
        "flags": flags,
        "resolved": resolved,
        "shapes": shapes,
        "weights": torch.cat([value.flatten() for value in weights.values()]),  # one tensor: a file of a few kB
        "source": source,
        "target": target,
        "output": output,
        "translations": translations,
    }
    torch.save(golden, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    if (FOLDER / f"{sys.argv[1]}.pt").exists():
        sys.exit(f"{sys.argv[1]}.pt is there already: goldens stay as an earlier version wrote them")
    make(*sys.argv[1:])
