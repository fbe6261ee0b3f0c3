"""Initial weights (--deep-init): published constants, sides, tables, what stays.

Those of all methods and rules are in ``tests/snapshots/initial.txt``, the equations in ``test_whole_models.py``.
"""

import pytest

from fairseq_deep.core.inits import INITS
from fairseq_deep.core.inits import MatrixLocation as Place
from fairseq_deep.core.inits.admin import omega
from fairseq_deep.core.inits.deepnet import DeepNet
from fairseq_deep.core.inits.ds import DepthScaled
from fairseq_deep.core.inits.tfixup import TFixup
from fairseq_deep.core.registry import UsageError
from fairseq_deep.core.stack import Stack
from tests.helpers.inits import SIDES, initial_values
from tests.helpers.models import POSTNORM as POST

C = 16
INITIALISATIONS = INITS.names()
DEPTH = {"encoder_layers": 2, "decoder_layers": 3}


@pytest.fixture
def make(build):
    """make(arch, **flags): a narrow model, and the initial values of its parameters by name."""
    return lambda arch, **flags: initial_values(lambda: build(arch, **flags))


@pytest.mark.parametrize("side, other", [SIDES, SIDES[::-1]])
@pytest.mark.parametrize("method", INITIALISATIONS)
def test_each_stack_can_have_its_own_method(method, side, other, make):
    """As in a model where both have it; with a table of both, which has the rule of the encoder."""
    rest = "lipschitz" if method == "fairseq" else "fairseq"
    of = {stack: make(POST, **DEPTH, deep_init=init)[1] for stack, init in ((side, method), (other, rest))}
    flags = {"deep_init": rest, f"{side}_deep_init": method}
    values = make(POST, **DEPTH, **flags)[1]
    assert values == {name: value for stack in SIDES for name, value in of[stack].items() if name.startswith(stack)}
    model, shared = make(POST, **DEPTH, **flags, share_all_embeddings=True)
    assert shared["encoder.embed_tokens.weight"] == values["encoder.embed_tokens.weight"]
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight
    model, tied = make(POST, **DEPTH, **flags, share_decoder_input_output_embed=True)
    assert tied == {name: value for name, value in values.items() if "output_projection" not in name}


def stack(side, n, m):
    """One of the stacks of a model with n encoder and m decoder layers."""
    layers, other = (n, m) if side == "encoder" else (m, n)
    return Stack(layers, C, pre_norm=False, side=side, other_layers=other)


def test_constants_are_the_published_ones():
    """To four decimals."""
    deepnet = [(6, 6, "encoder", 1.4179, 0.4970), (6, 6, "decoder", 2.0598, 0.3433)]
    deepnet += [(30, 6, "encoder", 2.1203, 0.3324), (100, 100, "decoder", 4.1618, 0.1699)]
    for n, m, side, alpha, beta in deepnet:
        init = DeepNet(stack(side, n, m))
        assert (init.alpha, init.beta) == (pytest.approx(alpha, abs=5e-5), pytest.approx(beta, abs=5e-5))
    for connections, value in ((12, 2.0170), (18, 2.3351), (36, 3.0408), (90, 4.3788)):
        assert omega("logn", connections) == pytest.approx(value, abs=5e-5)
    for n, m, side, factor in ((6, 6, "encoder", 0.4281), (6, 6, "decoder", 0.3689), (30, 6, "encoder", 0.2863)):
        assert TFixup(stack(side, n, m)).gain(Place(1, "self_attn", "v_proj")) == pytest.approx(factor, abs=5e-5)
    for options, value in (({}, 0.6389), ({"exponent": 0.5}, 0.4082)):
        init = DepthScaled(stack("decoder", 6, 6), **options)
        assert init.gain(Place(6, "ffn", "fc1")) == pytest.approx(value, abs=5e-5)


@pytest.mark.parametrize("sides", [("encoder",), SIDES], ids="+".join)
def test_pretrained_embeddings_stay(sides, build, dictionary, tmp_path):
    path = tmp_path / "vectors.txt"
    lines = [f"{word} " + " ".join(["7.0"] * 16) for word in dictionary.symbols]
    path.write_text(f"{len(lines)} 16\n" + "\n".join(lines) + "\n")
    model = build(POST, deep_init="lipschitz", **{f"{side}_embed_path": str(path) for side in sides})
    for side in SIDES:
        weight = getattr(model, side).embed_tokens.weight
        assert bool((weight[dictionary.nspecial :] == 7.0).all()) == (side in sides)
        assert float(getattr(model, side).layers[0].fc1.bias.abs().max()) == 0.0


@pytest.mark.parametrize("method", INITIALISATIONS)
@pytest.mark.parametrize("flags", [{"encoder_ffn_embed_dim": 0}, {"encoder_layers": 0}, {"decoder_layers": 0}], ids=str)
def test_what_is_empty_is_built_or_refused(method, flags, build, batch):
    """fairseq builds it; some constants have a depth or a width in the denominator."""
    try:
        model = build(POST, deep_init=method, **flags)
    except UsageError as error:
        assert "-layers 1 or more" in str(error) and "\n" not in str(error)
    else:
        assert model(*batch)[0].isfinite().all()


def test_the_start_of_admin_may_be_a_number(make):
    """As in a configuration file."""
    number, word = (make(POST, deep_init="admin", admin_start=start)[1] for start in (1, "1"))
    assert number == word
