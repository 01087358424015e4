"""The hand-off benchmark without engines: what it notes, sees, keeps and concludes."""

import enum
import json
import os
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from benchmarks.handoff import client
from benchmarks.handoff.connectors import (
    IDLE_SECONDS,
    SCHEDULER_HOOKS,
    STEP_HOOK,
    WORKER_HOOKS,
    Calls,
    Note,
    Notebook,
    affinity_kept,
    read_notes,
    watch,
    watched,
)
from benchmarks.handoff.life import Life, Recorder, Sample
from benchmarks.handoff.tables import all_tables, figures, notes, own_targets_table, ratios_table
from benchmarks.pairs import BUILT_IN, CONTENDERS, OURS, UNPINNED, Lives, OtherWork, Turn

PARAMS = {"do_remote_prefill": True, "grant": "sealed"}


# ------------------------------------------------------------------------------------------------------- the notebook


class Clock:
    """Moves when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clocks():
    return SimpleNamespace(wall=Clock(), cpu=Clock())


@pytest.fixture
def notebook(clocks, tmp_path):
    return Notebook(tmp_path / "notes", "scheduler", clocks.wall, clocks.cpu)


def test_a_pull_lasts_from_its_allocation_to_its_end(notebook, clocks, tmp_path):
    notebook.allocated("a")
    clocks.wall.now += 0.25
    notebook.allocated("b")
    clocks.wall.now += 0.5
    notebook.filled(["b"])
    notebook.filled(["a"])
    assert read_notes(tmp_path / "notes") == [Note("scheduler", "b", 0.5, {}), Note("scheduler", "a", 0.75, {})]


def test_hooks_add_up_until_the_engine_is_idle(notebook, clocks, tmp_path):
    def call(seconds, hook="start_load_kv"):
        with notebook.inside(hook):
            clocks.cpu.now += seconds
            clocks.wall.now += seconds

    call(5.0)
    clocks.wall.now += 2 * IDLE_SECONDS
    call(1.0)
    clocks.wall.now += IDLE_SECONDS / 2
    call(2.0)
    call(4.0, "on_new_request")
    notebook.filled(["a"])
    (note,) = read_notes(tmp_path / "notes")
    assert note.hooks == {"start_load_kv": Calls(2, 3.0), "on_new_request": Calls(1, 4.0)}


def test_no_notes_where_nobody_wrote(tmp_path):
    assert read_notes(tmp_path / "nothing") == []


class Role(enum.Enum):
    SCHEDULER = enum.auto()
    WORKER = enum.auto()


class Parent:
    """A connector whose hooks say what they got."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.made_of = (vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, {vllm_config})

    def __getattr__(self, name):
        assert name in SCHEDULER_HOOKS + WORKER_HOOKS, name
        return lambda *arguments: arguments


def results(finished, failed=()):
    return SimpleNamespace(finished_recving=set(finished), failed_recving=set(failed))


def test_a_scheduler_that_is_watched(notebook, clocks, tmp_path):
    connector = SimpleNamespace(**{name: lambda *arguments: arguments for name in SCHEDULER_HOOKS})
    watch(connector, "scheduler", notebook)
    pulled, cached = SimpleNamespace(request_id="pulled"), SimpleNamespace(request_id="cached")
    assert connector.update_state_after_alloc(pulled, "blocks", 64) == (pulled, "blocks", 64)
    connector.update_state_after_alloc(cached, "blocks", 0)
    clocks.wall.now += 0.125
    clocks.cpu.now += 9.0
    connector.update_connector_output(results(["pulled", "bad"], failed=["bad"]))
    connector.update_connector_output(SimpleNamespace(finished_recving=None, failed_recving=None))
    (note,) = read_notes(tmp_path / "notes")
    assert (note.half, note.request, note.seconds) == ("scheduler", "pulled", 0.125)
    assert note.hooks == {"update_connector_output": Calls(1, 0.0)}


def test_a_worker_that_is_watched(tmp_path):
    connector = SimpleNamespace(**{name: lambda *arguments: arguments for name in WORKER_HOOKS})
    connector.get_transfer_results = lambda _: results(["pulled"])
    watch(connector, "worker", Notebook(tmp_path / "notes", "worker"))
    assert connector.get_transfer_results(set()).finished_recving == {"pulled"}
    assert connector.start_load_kv("context") == ("context",)
    assert [(note.half, note.request, note.seconds) for note in read_notes(tmp_path / "notes")] == [
        ("worker", "pulled", 0.0)
    ]


def test_the_affinity_is_kept_while_an_unpinned_connector_starts():
    before = os.sched_getaffinity(0)
    other = {max(before)} if len(before) > 1 else before
    real = os.sched_setaffinity
    made = watched(Parent, "Unpinned", affinity_kept)(max(before), Role.WORKER, "cache")
    assert made.made_of == (max(before), Role.WORKER, "cache")
    assert os.sched_getaffinity(0) == before
    assert os.sched_setaffinity is real
    try:
        watched(Parent, "AsShipped")(max(before), Role.WORKER, "cache")
        assert os.sched_getaffinity(0) == other
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.vllm
@pytest.mark.parametrize("contender", CONTENDERS.values(), ids=CONTENDERS)
def test_vllm_finds_what_a_pair_names(contender):
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(**contender.transfer_config("kv_consumer"))
    found = KVConnectorFactory.get_connector_class(config)
    assert found.__name__ == contender.connector
    assert found is KVConnectorFactory.get_connector_class(config)
    assert KVConnectorFactory.supports_hma_config(config)
    hooks = WORKER_HOOKS if contender is OURS else SCHEDULER_HOOKS + WORKER_HOOKS
    assert all(callable(getattr(found, name)) for name in hooks)


# ----------------------------------------------------------------------------------------------------------- the client


class Handler(BaseHTTPRequestHandler):
    """Answers like an engine: params for a hand-off, a stream for everything else."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers["X-Request-Id"], body))
        if body.get("stream"):
            self._answer("text/event-stream", self.server.stream)
        else:
            self._answer("application/json", json.dumps({"kv_transfer_params": self.server.params}).encode())

    def _answer(self, kind, content):
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


STREAM = b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"choices":[{"index":0,"text":"b"}]}\n\ndata: [DONE]\n\n'


@pytest.fixture
def engine() -> Iterator[SimpleNamespace]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.params, server.stream, server.status = [], PARAMS, STREAM, 200
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", server=server)
        server.shutdown()
        thread.join()


def test_a_hand_off_carries_the_params(engine):
    begin = time.perf_counter()
    handed = client.hand_off(engine.url, engine.url, [5, 6, 7], "idle-1")
    assert 0 < handed.seconds + handed.prefill_seconds < time.perf_counter() - begin
    (first, prefill), (second, decode) = engine.server.asked
    assert first == second == "idle-1"
    assert (prefill["kv_transfer_params"]["do_remote_decode"], prefill["max_tokens"]) == (True, 1)
    assert (decode["kv_transfer_params"], decode["prompt"], decode["stream"]) == (PARAMS, [5, 6, 7], True)


def test_a_floor_is_the_same_request_without_params(engine):
    client.hand_off(engine.url, engine.url, [5, 6, 7], "a")
    assert client.local(engine.url, [5, 6, 7], "b") > 0
    (_, decode), (_, floor) = engine.server.asked[1:]
    assert {**floor, "kv_transfer_params": PARAMS} == decode


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"params": None}, "without a hand-off"),
        ({"status": 500}, "HTTP 500"),
        ({"stream": b"data: [DONE]\n\n"}, "without a token"),
        ({"stream": b'data: {"error":{"message":"lost"}}\n\n'}, "lost"),
    ],
)
def test_what_is_no_hand_off(engine, changes, words):
    vars(engine.server).update(changes)
    with pytest.raises(client.RequestError, match=words):
        client.hand_off(engine.url, engine.url, [5, 6, 7], "a")


def test_a_long_stream(engine):
    with client.LongStream(engine.url, [5], "stream", 2) as stream:
        while not stream.has_ended:
            time.sleep(0.01)
    assert len(stream.arrivals) == 2


def test_gaps_belong_to_the_event_before_them():
    assert client.gaps([1.0, 1.5, 2.5, 4.0], 1.5, 2.5) == [1.0]
    assert client.gaps([1.0, 1.5, 2.5, 4.0], 0.0, 9.0) == [0.5, 1.0, 1.5]
    assert client.gaps([1.0], 0.0, 9.0) == []


# ------------------------------------------------------------------------------------------------------------ the lives


def test_only_pulls_become_samples(engine):
    recorder = Recorder(seed=0)
    engines = (engine, engine)
    for _ in range(2):
        recorder.hand_off(engines, "idle", 33)
    engine.server.params = None
    recorder.hand_off(engines, "idle", 33)
    noted = [
        Note("scheduler", "cmpl-idle-0-0-af", 0.5, {STEP_HOOK: Calls(3, 0.25)}),
        Note("worker", "cmpl-idle-0-0-af", 0.0, {"start_load_kv": Calls(3, 0.125)}),
        Note("scheduler", "cmpl-idle-10-0-af", 1, {}),
    ]
    (sample,) = recorder.samples(noted)
    assert (sample.pull, sample.steps, sample.num_tokens) == (0.5, 3, 33)
    assert sample.hooks == {STEP_HOOK: 0.25, "start_load_kv": 0.125}
    assert sample.floor > 0
    assert [text.split(":")[0] for text in recorder.failures] == ["idle-2", "idle-1"]


def test_no_prompt_comes_twice():
    prompts = [tuple(Recorder(seed).prompt(40)) for seed in (0, 1)]
    recorder = Recorder(0)
    prompts += [tuple(recorder.prompt(40)) for _ in range(50)][1:]
    assert len(set(prompts)) == len(prompts)


def life(contender, milliseconds, number=0, gap=10.0, hooks=5e-5):
    """Every hand-off takes as long as it is told, above a floor of a millisecond."""
    spent = {"start_load_kv": hooks, "on_new_request": hooks}
    samples = [
        Sample(kind, num_tokens, milliseconds / 1e3, 1e-3, milliseconds / 2e3, 2, spent)
        for kind in ("idle", "loaded", "contact")
        for num_tokens in (129, 2049)
        for _ in range(3)
    ]
    gaps = {"alone": [0.01] * 3, "local": [0.01] * 3, "pull": [gap / 1e3] * 3}
    return Life(contender.name, number, 40.0, samples, gaps, ["a-1: lost"], 3.0)


def test_turns_alternate_and_go_on_where_they_ended(tmp_path):
    kept = Lives(tmp_path / "lives", Life)
    assert kept.missing(["a", "b"], 2) == [Turn(0, "a"), Turn(0, "b"), Turn(1, "a"), Turn(1, "b")]
    for contender, number in ((UNPINNED, 0), (OURS, 0)):
        kept.store(Turn(number, contender.name), life(contender, 5, number))
    assert kept.missing([OURS.name, UNPINNED.name], 2) == [Turn(1, OURS.name), Turn(1, UNPINNED.name)]
    assert [each.contender for each in Lives(tmp_path / "lives", Life).stored()] == [UNPINNED.name, OURS.name]
    kept.forget()
    assert kept.stored() == []


@pytest.mark.parametrize(("ours", "verdicts"), [(2.0, {"met"}), (4.6, {"missed"})])
def test_targets_are_ratios(ours, verdicts):
    table = ratios_table([life(OURS, ours), life(UNPINNED, 10), life(BUILT_IN, 100)])
    unpinned = [row for row in table.rows if row[2] == UNPINNED.title]
    judged = [row for row in unpinned if row[-1]]
    assert {row[-1] for row in judged if row[0] != "first contact"} == verdicts
    assert {row[3] for row in unpinned if row[0].startswith("hand-off, steady")} == {round(ours / 10, 3)}
    assert {row[3] for row in unpinned if row[0] == "the same above its floor"} == {round((ours - 1) / 9, 3)}
    assert {row[-1] for row in table.rows if row[2] == BUILT_IN.title} <= {"met", ""}


@pytest.mark.parametrize(
    ("changes", "verdicts"), [({}, ["met"] * 3), ({"hooks": 1e-3}, ["missed"] * 2 + ["met"]), ({"gap": 11.0}, None)]
)
def test_targets_without_a_rival(changes, verdicts):
    rows = own_targets_table([life(OURS, 5, **changes)]).rows
    found = [row[-1] for row in rows if not row[1].startswith("the same, all hooks")]
    assert found == (verdicts or ["met", "met", "missed"])
    assert len(rows) == len(found) + 2


def test_every_table_has_whole_rows():
    lives = [life(OURS, 2), life(BUILT_IN, 20), life(OURS, 3, number=1)]
    for table in all_tables(lives):
        assert table.rows, table.title
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert any("a-1: lost" in said for said in notes(lives))
    assert all_tables([])[0].rows == ()


def test_figures_of_milliseconds():
    assert figures([]) is None
    assert figures([0.001, 0.002, 0.009]) == (3, 2.0, pytest.approx(8.86))


def test_other_work_is_the_niced_share():
    assert OtherWork().percent() >= 0
