"""The adapter's tests: vLLM's real scheduler and KV cache layout, no weights, no engine process."""

import logging
import os

import pytest

# vLLM is chatty at start-up, and reads this when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def pytest_ignore_collect(collection_path, config):
    """Importing vLLM takes a quarter of a minute: not when the selection leaves all these tests out anyway."""
    is_test = collection_path.name.startswith("test_")
    return True if is_test and "not vllm" in config.getoption("markexpr") else None


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    from tests.adapter.geometry import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lab(model_folder):
    """A laboratory whose ledger is checked when the test is over."""
    from tests.adapter.geometry import Settings
    from tests.adapter.harness import Lab

    lab = Lab(Settings(model=model_folder))
    yield lab
    lab.close()


@pytest.fixture
def log(caplog):
    """Our log lines; the connector sends them where vLLM's go, which pytest does not see."""
    logger = logging.getLogger("pd_transfer")
    level, handlers = logger.level, list(logger.handlers)
    logger.handlers = [caplog.handler]
    logger.setLevel(logging.INFO)
    yield caplog
    logger.handlers = handlers
    logger.setLevel(level)
