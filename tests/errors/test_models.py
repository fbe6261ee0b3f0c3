"""Methods and options that do not go together, or have no such value: one line with the problem and the fix.

The tables are in the modules beside this one: (architecture, flags of the model, words of the message).
"""

import importlib
from pathlib import Path

import pytest

from fairseq_deep.core.registry import UsageError

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("models_*.py"))
REFUSED = [
    pytest.param(*row, id=f"{table[len('models_'):]} {' '.join(f'{name}={value}' for name, value in row[1].items())}")
    for table in TABLES
    for row in importlib.import_module(f"tests.errors.{table}").REFUSED
]


@pytest.mark.parametrize("arch, flags, words", REFUSED)
def test_a_model_is_refused_in_one_line(arch, flags, words, build):
    with pytest.raises(UsageError) as error:
        build(arch, **flags)
    message = str(error.value)
    assert words in message and "\n" not in message, message
