"""What the end-to-end tests share: models, and engines that live as long as a fixture."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.models.random_models import write_models


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The random-weight models by name."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return {path.name: path for path in folder.iterdir() if path.is_dir()}
