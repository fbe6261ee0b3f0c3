"""The estimate of a recipe reads the training text before the stage that checks it."""

import gzip
from types import SimpleNamespace

import pytest

from fairseq_deep.recipes import estimate


def damaged(content):
    packed = bytearray(gzip.compress(content))
    packed[10:30] = b"\xff" * 20  # no valid type of a block
    return bytes(packed)


@pytest.mark.parametrize(
    "content, count",
    [(gzip.compress(b"a b\n" * 7), 7), (damaged(bytes(range(256)) * 40), 10**5), (b"none", 10**5), (None, 10**5)],
    ids=["whole", "damaged", "other", "missing"],
)  # fmt: skip
def test_a_text_that_cannot_be_read_is_left_to_its_stage(content, count, tmp_path):
    if content is not None:
        (tmp_path / "train.de.gz").write_bytes(content)
    options = SimpleNamespace(data=str(tmp_path), target_lang="de", multilingual=None)
    assert estimate._count_pairs(SimpleNamespace(options=options)) == count
