"""docs/proxy.md says what the code says: metrics, outcomes, fields of the log, options."""

import contextlib
import io
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.admission import Admission
from proxy.command_line import configuration
from proxy.config import Limits
from proxy.errors import FailureKind
from proxy.health import Standing
from proxy.journal import Record
from proxy.metrics import BROKEN_STREAM, CLIENT_GONE, ERROR_EVENT, Metrics, outcome_of
from proxy.registry import Registry
from proxy.routing import POLICIES, Role, least_tokens
from proxy.story import LegStory, Mode, Story

PAGE = Path(__file__).parents[2] / "docs" / "proxy.md"


def section(heading):
    return PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def names_in(text):
    """Every name in a text that is set as code."""
    return set(re.findall(r"`([a-z_]+)`", text))


def row(text, name):
    """What a table says of a name."""
    return next(line for line in text.splitlines() if line.startswith("|") and f"`{name}" in line.split("|")[1])


def shown_metrics():
    """Name -> labels of every metric, as a scrape shows them once everything has happened."""
    metrics, registry = Metrics(), Registry(dict.fromkeys(Role, least_tokens))
    registry.add(Role.DECODE, ["d"])
    metrics.watch(registry, Admission(Limits()))
    metrics.request_ended("chat", "ok", 1.0, 1.0)
    metrics.leg_seconds(Role.DECODE, 1.0)
    metrics.engine_failed(Role.DECODE, FailureKind.LOST)
    metrics.releases.labels("released")
    shown = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.endswith("_created"):
            shown[name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    return shown


def test_every_metric_is_listed_with_its_labels():
    listed = {}
    for line in section("Metrics").splitlines():
        for name, labels in re.findall(r"`(pd_proxy_\w+)(?:\{([\w,]+)\})?`", line.split("|")[1] if "|" in line else ""):
            listed[name] = set(filter(None, labels.split(",")))
    expected = shown_metrics()
    for name in ("pd_proxy_engine_requests", "pd_proxy_engine_tokens"):
        # Their row says in words whose they are.
        assert expected[name] == {"role", "engine"}
        expected[name] = set()
    assert listed == expected


def test_every_outcome_and_every_kind_of_failure_is_listed():
    outcomes = {outcome_of(status) for status in (200, 400, 500, 503, 504)} | {BROKEN_STREAM, ERROR_EVENT, CLIENT_GONE}
    assert names_in(row(section("Metrics"), "pd_proxy_requests_total").split("|")[2]) == outcomes
    kinds = {kind.value for kind in FailureKind}
    assert names_in(row(section("Metrics"), "pd_proxy_engine_failures_total").split("|")[2]) == kinds


def test_every_field_of_a_line_in_the_log_is_explained():
    fields = {field.name for kind in (Record, Story, LegStory) for field in msgspec.inspect.type_info(kind).fields}
    told = section("Sight").split("\n\n")[1]
    assert names_in("\n".join(line.split("|")[1] for line in told.splitlines() if line.startswith("|"))) | names_in(
        row(told, "legs")
    ) == fields | set(Role)
    assert names_in(row(told, "mode").split("|")[2]) == set(Mode)


def test_every_standing_is_listed():
    standings = [
        line.split("|")[1].strip(" `") for line in section("Which engines are trusted").splitlines() if "|" in line
    ]
    assert standings[2:] == list(Standing)


def test_every_policy_is_listed():
    policies = [line.split("|")[1].strip(" `") for line in section("Which engine").splitlines() if "|" in line]
    assert set(policies[2:]) == set(POLICIES)


@pytest.fixture(scope="module")
def options():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        configuration(["--help"])
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", printed.getvalue(), re.MULTILINE))


def test_the_page_names_no_option_that_does_not_exist(options):
    # These are vLLM's.
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text())) - {
        "--shutdown-timeout",
        "--kv-transfer-config",
        "--api-key",
    }
    assert named - options == set()
    assert {"--config", "--policy"} <= named


@pytest.mark.parametrize("name", ["proxy.yaml", "proxy.toml"])
def test_the_files_on_the_page_work(tmp_path, name):
    path = tmp_path / name
    path.write_text(PAGE.read_text().split(f"```\n# {name}\n")[1].split("```")[0])
    config = configuration(["--config", str(path)])
    assert config.prefill_urls == ("http://P1:8100", "http://P2:8100")
    assert (config.routing.prefill_policy, config.timeouts.idle_seconds) == ("prefix-affinity", 60)
