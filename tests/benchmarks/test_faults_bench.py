"""The comparison of faults, without engines: cases on a bed in name only, verdicts, tables, what is kept of a run."""

import contextlib
import queue
import threading
from dataclasses import dataclass, field, replace

import pytest
import zmq

from benchmarks.accuracy.tasks import vocabulary
from benchmarks.faults import bench
from benchmarks.faults.bed import ANSWER_TOKENS, Connector, SidedBed, counted, engine_settings, named, puzzle_prompt
from benchmarks.faults.cases import CASES, JUNK, NotPlayedError, send_junk, shifted
from benchmarks.faults.play import Answer, Kind, Result, judged, off_by, only_choice, run_case
from benchmarks.faults.tables import NOT_PLAYED, cases_table, counters_table, is_bad, told, totals_table
from tests.faults.bed import Question
from tests.faults.verdicts import Oracle, Reply, Verdict
from tests.stack.engines import PREFILL_ROLE, completion_body


def choice(words, logprobs):
    return {"finish_reason": "length", "logprobs": {"tokens": words, "top_logprobs": logprobs}}


def answer_to(question, off=0.0, word="right"):
    """The answer that a single engine gives, or one that is off."""
    words = [word] * question.max_tokens
    return choice(words, [{name: value + off for name, value in top.items()} for top in question.oracle.logprobs])


def oracle_of(num_tokens):
    tops = [{"right": -0.5, "left": -1.5}] * num_tokens
    return Oracle(["right"] * num_tokens, tops, [{"right": -0.25, "left": -1.75}])


@dataclass
class FakeBed:
    """What a case can do to it leaves a line in ``deeds``; decode answers as ``reply`` says."""

    reply: str = "exact"
    side_channel: tuple[str, int] = ("127.0.0.1", 1)
    has_greeted: bool = False
    is_broken: bool = False
    num_held: int = 0
    died: tuple[str, ...] = ()
    held: dict[str, int] = field(default_factory=dict)
    recovery: str = ""
    reads: int = 0
    deeds: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    asked: dict[tuple, Question] = field(default_factory=dict)

    def question(self, num_tokens=200, seed=0):
        prompt = (num_tokens, seed)
        return self.asked.setdefault(prompt, Question(prompt, f"question {len(self.asked)}", 4, oracle_of(4)))

    def hand_off(self, question):
        return {
            "remote_block_ids": [[1, 2], [3]],
            "remote_host": "here",
            "remote_port": 1,
            "remote_engine_id": "prefill",
        }

    def ask_prefill(self, prompts, salt):
        return {"prompts": len(prompts), "salt": salt}

    def ask(self, body):
        self.has_greeted = True
        self.bodies.append(body)
        if self.reply == "hang":
            return Reply(None, trouble="no answer", timed_out=True)
        if self.reply == "error":
            return Reply(500, {"error": {"message": "broken", "type": "it", "code": 500}})
        self.reads += 1
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        off, word = (0.5, "wrong") if self.reply == "wrong" else (0.0, "right")
        choices = [answer_to(self.asked[tuple(p)], off, word) for p in prompts for _ in range(body.get("n", 1))]
        return Reply(200, {"choices": choices})

    def ask_and_leave(self, body):
        self.deeds.append("left")

    def wait_free(self, name, seconds=0.0):
        return 6.5, self.num_held

    def counts(self):
        return {"prefill": (1, {"lease_expired": 0}, 0), "decode": (2, {"grant_used": self.reads}, self.reads)}

    def churn(self):
        self.deeds.append("churned")

    def forget(self, name):
        self.deeds.append(f"{name} forgot")

    def kill(self, name):
        self.deeds.append(f"{name} killed")

    @contextlib.contextmanager
    def paused(self, name):
        self.deeds.append(f"{name} stopped")
        yield
        self.deeds.append(f"{name} continued")

    def restart(self, name):
        self.deeds.append(f"{name} restarted")

    def restart_with_same_id(self, name):
        self.deeds.append(f"{name} restarted with its id")

    def heal(self, except_for=()):
        self.deeds.append(f"healed but {list(except_for)}")

    def dead(self, patience_seconds=0.0):
        return list(self.died)

    def still_held(self):
        return self.held

    def why_no_recovery(self):
        return self.recovery


@pytest.fixture
def side_channel():
    """Takes what is sent to it, and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        listener.setsockopt(zmq.RCVTIMEO, 5000)
        yield ("127.0.0.1", port), listener


# -------------------------------------------------------------------------------------------------------- the two beds


def test_the_two_beds_differ_in_the_connector_alone():
    builtin, ours = (
        engine_settings(connector, "tcp", PREFILL_ROLE, "0", 17) for connector in (Connector.BUILTIN, Connector.OURS)
    )
    assert replace(builtin, port=0, kv_transfer_config=None) == replace(ours, port=0, kv_transfer_config=None)
    assert builtin.environment["UCX_TLS"] == "tcp"
    assert builtin.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "17"
    theirs, mine = builtin.kv_transfer_config, ours.kv_transfer_config
    assert (theirs["kv_connector"], theirs["kv_connector_module_path"]) == (
        "NixlConnector",
        "benchmarks.faults.unpinned",
    )
    assert mine["kv_connector"] == "PdConnector"
    assert (
        theirs["kv_connector_extra_config"]["kv_lease_duration"]
        == (mine["kv_connector_extra_config"]["lease_unclaimed_seconds"])
    )
    for same in ("kv_role", "kv_load_failure_policy"):
        assert theirs[same] == mine[same]


@pytest.mark.parametrize("connector", Connector)
def test_a_bed_takes_its_settings_from_here(connector):
    """The bed is the fault matrix's, with its settings replaced."""
    bed = SidedBed(connector, "tcp")
    for name in ("prefill", "decode"):
        settings = bed._settings[name]
        assert settings.environment["UCX_TLS"] == "tcp"
        assert (settings.kv_transfer_config["kv_connector"] == "PdConnector") is (connector is Connector.OURS)
    assert bed._settings["prefill"].environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(bed.side_channel[1])
    assert bed.answer_seconds == 30.0


def test_each_life_may_have_an_id():
    settings = engine_settings(Connector.OURS, "cma", PREFILL_ROLE, "0", 17)
    config = named(settings, "prefill-life-2").kv_transfer_config
    assert config == {**settings.kv_transfer_config, "engine_id": "prefill-life-2"}


def test_puzzles_ask_for_all_of_their_kv():
    prompts = [puzzle_prompt(*which) for which in ((64, 1), (64, 1), (64, 2), (511, 1))]
    assert [len(prompt) for prompt in prompts] == [64, 64, 64, 511]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(vocabulary().units["mix"]) == ANSWER_TOKENS


def test_counters_have_short_names():
    metrics = {
        "vllm:nixl_num_failed_transfers_total": 2.0,
        "pd_transfer:outcomes_total/grant_used": 3.0,
        "pd_transfer:outcomes_total/hello_welcomed": 1.0,
        "pd_transfer:outcomes_total/lease_expired": 1.0,
    }
    assert counted(Connector.OURS, metrics) == {"grant_used": 3, "lease_expired": 1}
    assert counted(Connector.BUILTIN, metrics)["failed transfers"] == 2


# ----------------------------------------------------------------------------------------------------------- the cases

NUM_ANSWERS = {
    "plain": 20,
    "window_begins_with_a_block": 20,
    "three_samples": 3,
    "list_of_prompts": 2,
    "client_never_asks_decode": 0,
    "client_leaves_at_once": 0,
    "params_swapped": 2,
    "prefill_restarted_with_the_same_id": 3,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("reply", ["exact", "wrong", "hang", "error"])
def test_every_case_judges_what_decode_answers(case, reply, side_channel):
    address, _ = side_channel
    bed = FakeBed(side_channel=address, has_greeted=True)
    if case.name != "asked_again":
        bed.reply = reply
    result = run_case(bed, case)
    assert result.problem == ""
    expected = Verdict.EXACT if case.name == "asked_again" else Verdict(reply)
    assert [answer.verdict for answer in result.answers] == [expected] * NUM_ANSWERS.get(case.name, 1)
    assert case.about.endswith(".")


def test_a_case_that_builds_on_a_hand_off_needs_it():
    result = run_case(FakeBed("wrong"), CASES["asked_again"])
    assert "before the fault" in result.problem
    assert result.answers == []


def test_what_a_case_builds_on_is_not_counted():
    result = run_case(FakeBed(), CASES["asked_again"])
    assert (result.num_reads, len(result.answers)) == (1, 1)


def test_too_late_is_after_the_lease():
    result = run_case(FakeBed(num_held=9), CASES["too_late"])
    assert "still holds 9 blocks" in result.problem
    bed = FakeBed()
    run_case(bed, CASES["too_late"])
    assert bed.deeds[-1] == "churned"


def test_block_ids_are_moved_out_of_range():
    bed = FakeBed()
    run_case(bed, CASES["blocks_just_out_of_range"])
    assert bed.bodies[0]["kv_transfer_params"]["remote_block_ids"] == [[301, 302], [303]]
    assert shifted([[1], []], 5) == [[6], []]


def test_swapped_params_change_places():
    class Own(FakeBed):
        def hand_off(self, question):
            return {"of": list(question.prompt)}

    bed = Own()
    run_case(bed, CASES["params_swapped"])
    first, second = [list(question.prompt) for question in bed.asked.values()]
    asked = [(list(body["prompt"]), body["kv_transfer_params"]["of"]) for body in bed.bodies]
    assert asked == [(first, second), (second, first)]


def test_prefill_is_stopped_while_decode_answers():
    bed = FakeBed("hang", has_greeted=True)
    result = run_case(bed, CASES["prefill_stopped"])
    assert bed.deeds == ["healed but []", "prefill stopped", "prefill continued"]
    assert told(result) == "**1 hang**"


@pytest.mark.parametrize(("has_greeted", "num_restarts"), [(True, 1), (False, 0)])
def test_junk_comes_before_decode_has_met_prefill(has_greeted, num_restarts, side_channel):
    address, listener = side_channel
    bed = FakeBed(side_channel=address, has_greeted=has_greeted)
    assert run_case(bed, CASES["junk_to_the_side_channel"]).problem == ""
    assert bed.deeds.count("prefill restarted") == num_restarts
    assert [listener.recv_multipart()[1:] for _ in JUNK] == list(JUNK)


def test_junk_that_closes_the_port():
    """The built-in connector's listener takes one message and is gone."""

    def listen(context, address):
        with context.socket(zmq.ROUTER) as listener:
            address.put(listener.bind_to_random_port("tcp://127.0.0.1"))
            listener.recv_multipart()

    with zmq.Context() as context:
        address = queue.Queue()
        thread = threading.Thread(target=listen, args=(context, address))
        thread.start()
        num_taken = send_junk(("127.0.0.1", address.get(timeout=10)), patience_seconds=0.5)
        thread.join(10)
    assert num_taken == 1


def test_junk_that_nobody_takes():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(NotPlayedError):
        send_junk(("127.0.0.1", port), patience_seconds=0.2)


# ----------------------------------------------------------------------------------------------------------- aftermath


def test_what_is_found_afterwards():
    bed = FakeBed(died=("decode",), held={"prefill": 32})
    result = run_case(bed, CASES["bare_params"])
    assert (result.deaths, result.held, result.aftermath) == (["decode"], {"prefill": 32}, "")
    assert result.counted == {"decode: grant_used": 1}
    assert result.num_reads == 1


def test_a_pair_that_moves_nothing_is_started_anew():
    bed = FakeBed(recovery="no KV is moved any more")
    result = run_case(bed, CASES["silence"])
    assert bed.is_broken
    assert "until a restart" in told(result)


def test_an_engine_that_the_case_killed_has_not_died_of_it():
    bed = FakeBed(died=("prefill",), recovery="not asked")
    result = run_case(bed, CASES["prefill_killed"])
    assert (result.deaths, result.aftermath) == ([], "")


# ------------------------------------------------------------------------------------------------------------ verdicts

QUESTION = Question((1, 2), "salt", 2, oracle_of(2))


def test_how_far_off_a_first_token_is():
    """The nearer of the two ways to compute it counts."""
    near = Reply(200, {"choices": [answer_to(QUESTION, off=0.125)]})
    assert off_by(near, QUESTION.oracle) == pytest.approx(0.125)
    same_history = choice(["right"] * 2, [{"right": -0.25, "left": -1.75}] * 2)
    assert judged(Reply(200, {"choices": [same_history]}), QUESTION.oracle, 0.1).off_by == 0.0
    assert judged(near, QUESTION.oracle, 0.1).verdict == "wrong"
    assert judged(near, QUESTION.oracle, 0.1, alone=False).verdict == "exact"
    assert off_by(Reply(200, {"choices": []}), QUESTION.oracle) is None
    assert off_by(Reply(None), QUESTION.oracle) is None


def test_choices_are_judged_one_by_one():
    reply = Reply(200, {"choices": [answer_to(QUESTION), answer_to(QUESTION, word="wrong")]})
    verdicts = [judged(only_choice(reply, i), QUESTION.oracle, 0.1, alone=False).verdict for i in range(3)]
    assert verdicts == ["exact", "wrong", "exact"]
    assert only_choice(Reply(500, {"error": {}}), 1).status == 500


# -------------------------------------------------------------------------------------------------------------- tables


def exact(seconds=0.1):
    return Answer("exact", "", seconds, 0.0)


WRONG = Answer("wrong", "choice 0: token 3 is token_id:9, not token_id:8", 0.1, 0.0234)
HANG = Answer("hang", "no answer within 30 s", 30.0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(answers=[exact()], num_reads=1), "1 exact (KV moved)"),
        (Result(answers=[exact(5.2)], num_reads=0), "1 exact (computed by decode), after 5 s"),
        (Result(answers=[exact()] * 3, num_reads=1), "3 exact (KV moved for 1)"),
        (
            Result(answers=[WRONG, exact(), Answer("wrong", "differ by 0.03", 0.1, 0.03)], num_reads=3),
            "1 exact, **2 wrong** (1 with another text; first token off by up to 0.03)",
        ),
        (
            Result(answers=[Answer("wrong", "differ by 0.03", 0.1, 0.03)]),
            "**1 wrong** (none with another text; first token off by up to 0.03)",
        ),
        (Result(answers=[HANG], held={"decode": 32}), "**1 hang**; **decode held 32 blocks for good**"),
        (Result(answers=[Answer("error", "500", 0.1)], deaths=["decode"]), "1 error; **decode died**"),
        (Result(facts=["prefill held the blocks for 6.0 s"]), "prefill held the blocks for 6.0 s"),
        (Result(answers=[exact()], problem="nobody took it"), "could not be played: nobody took it"),
        (Result(), "nothing amiss"),
    ],
)
def test_a_case_in_one_cell(result, text):
    assert told(result) == text


@pytest.mark.parametrize(
    ("result", "bad"),
    [
        (Result(answers=[exact(), Answer("error", "500", 0.1)]), False),
        (Result(answers=[WRONG]), True),
        (Result(answers=[HANG]), True),
        (Result(deaths=["decode"]), True),
        (Result(held={"decode": 1}), True),
        (Result(aftermath="no KV is moved any more"), True),
    ],
)
def test_what_does_harm(result, bad):
    assert is_bad(result) is bad


RESULTS = {
    Connector.BUILTIN: {
        "silence": Result(answers=[WRONG, exact()], counted={"decode: failed transfers": 2}),
        "bare_params": Result(answers=[HANG], deaths=["decode"]),
        "asked_again": Result(problem="nothing to see", answers=[WRONG]),
    }
}


def test_sums_are_of_what_was_played():
    rows = {row[0]: row[1:] for row in totals_table(RESULTS).rows}
    assert rows["cases"] == (2, NOT_PLAYED)
    assert rows["exact answers"] == (1, NOT_PLAYED)
    assert rows["wrong answers, with status 200"] == (1, NOT_PLAYED)
    assert rows["no answer within 30 s"] == (1, NOT_PLAYED)
    assert rows["cases with any of the last five"] == (2, NOT_PLAYED)


def test_every_case_has_a_row():
    rows = {row[0]: row[1:] for row in cases_table(CASES.values(), RESULTS).rows}
    assert len(rows) == len(CASES)
    kind, builtin, ours = rows[CASES["silence"].about]
    assert kind in set(Kind)
    assert "wrong" in builtin
    assert ours == NOT_PLAYED
    counters = {row[0]: row[1:] for row in counters_table(CASES.values(), RESULTS).rows}
    assert counters["silence"] == ("decode: failed transfers 2", NOT_PLAYED)


# --------------------------------------------------------------------------------------------------------- the command


def test_a_run_keeps_what_others_have_found(tmp_path):
    assert bench.earlier(tmp_path, "tcp") == {}
    bench.write(bench.made(["--only", "silence"], RESULTS, "tcp"), tmp_path)
    book = bench.earlier(tmp_path, "tcp")
    assert book == RESULTS
    book[Connector.OURS] = {"silence": Result(answers=[exact()], num_reads=0)}
    bench.write(bench.made([], book, "tcp"), tmp_path)
    assert bench.earlier(tmp_path, "tcp") == book
    assert bench.earlier(tmp_path, "cma") == {}
    text = (tmp_path / "faults.md").read_text()
    assert "1 exact (computed by decode)" in text
    (tmp_path / "faults.json").write_text('{"name": "of another shape"}')
    assert bench.earlier(tmp_path, "tcp") == {}


def test_cases_that_are_gone_are_not_reported():
    report = bench.made([], {Connector.OURS: {"gone": Result()}}, "tcp")
    assert report.data["results"] == {"ours": {}}


def test_nothing_is_played_again_that_is_not_missing(tmp_path, capsys):
    book = {connector: {"silence": Result(answers=[exact()])} for connector in Connector}
    bench.write(bench.made([], book, "tcp"), tmp_path)
    assert bench.main(["--only", "silence", "--missing", "--out", str(tmp_path)]) == 0
    assert "starting" not in capsys.readouterr().out
    assert bench.earlier(tmp_path, "tcp") == book


def test_what_was_played_in_vain_is_missing():
    results = {"silence": Result(), "plain": Result(problem="no engine")}
    assert [case.name for case in bench.missing(bench.chosen(["silence", "plain", "bare"]), results)] == [
        "plain",
        "bare_params",
    ]


def test_the_command_lists_its_cases(capsys):
    assert bench.main(["--list", "--only", "prefill_", "silence"]) == 0
    out = capsys.readouterr().out
    names = ("prefill_killed", "prefill_restarted_with_the_same_id", "prefill_stopped", "silence")
    assert all(f"{name}: " in out for name in names)
    assert "bare_params" not in out


def test_bodies_carry_the_params():
    body = QUESTION.body({"grant": "x"})
    assert body["kv_transfer_params"] == {"grant": "x"}
    assert body.keys() >= completion_body([1]).keys()
