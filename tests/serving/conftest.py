"""Random models in this process, and a client of the application that serves them."""

import pytest

from fairseq_deep.runtime import Translator, find_bundle
from fairseq_deep.serving.service import ServedModel
from tests.helpers.serving import DE, EN, random_lines, service_of, write_package


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """Random models for both directions."""
    folder = tmp_path_factory.mktemp("packages")
    return [write_package(folder / "there", *EN, 1), write_package(folder / "back", *DE, 2)]


@pytest.fixture(scope="session")
def models(packages):
    """The models in double precision: batches do not change their choices."""
    found = []
    for path in map(str, packages):
        translator = Translator(path, cpu=True, beam=3, nbest=3, max_len_a=0.5, max_len_b=3, limit_each=True)
        for model in translator.models:
            model.double()
        found.append(ServedModel(translator, find_bundle(path)))
    return found


@pytest.fixture(scope="session")
def client(models):
    from starlette.testclient import TestClient

    from fairseq_deep.serving.app import make_app

    with TestClient(make_app(service_of(models))) as client:
        yield client


@pytest.fixture(scope="session")
def expected(models):
    """Lines, and their hypotheses by pair."""
    lines = random_lines(300)
    return lines, {model.pair: [[each.text for each in found] for found in model.translator.translate_nbest(lines)]
                   for model in models}  # fmt: skip
