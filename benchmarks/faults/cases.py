"""The cases: each is what clients, routers, processes and strangers do, and knows nothing of the connector."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from benchmarks.faults.play import Case, Kind, NotPlayedError, Play
from tests.faults.bed import NUM_BLOCKS
from tests.stack.engines import free_port

CASES: dict[str, Case] = {}
BOUNDARY_LENGTHS = (159, 191, 223, 319, 511)
"""n % 32 == 31: the window of the last token, 128 tokens, begins with a block."""
OTHER_LENGTHS = (64, 130, 160, 200, 333)
PLAIN_SEEDS = range(101, 105)


def case(kind: Kind, **options: Any) -> Callable[[Callable[[Play], None]], Callable[[Play], None]]:
    """Register a function; its name and docstring are the case's. Cases are played in the order of this page."""

    def register(act: Callable[[Play], None]) -> Callable[[Play], None]:
        CASES[act.__name__] = Case(act.__name__, (act.__doc__ or "").strip(), kind, act, **options)
        return act

    return register


@case(Kind.NONE)
def plain(play: Play) -> None:
    """Hand-offs as they should be, at prompt lengths n with n % 32 != 31 (blocks of 32, window of 128)."""
    _hand_over(play, OTHER_LENGTHS)


@case(Kind.NONE)
def window_begins_with_a_block(play: Play) -> None:
    """Hand-offs as they should be, at prompt lengths n with n % 32 == 31."""
    _hand_over(play, BOUNDARY_LENGTHS)


def _hand_over(play: Play, lengths: tuple[int, ...]) -> None:
    for num_tokens in lengths:
        for seed in PLAIN_SEEDS:
            question = play.bed.question(num_tokens, seed)
            play.ask(question, play.bed.hand_off(question))


@case(Kind.NONE)
def three_samples(play: Play) -> None:
    """One request asks for n=3 samples, which share its params."""
    question = play.bed.question(seed=2)
    # vLLM refuses several greedy samples; so cold, the likeliest token is chosen all the same.
    body = question.body(play.bed.hand_off(question), n=3, temperature=0.01)
    play.ask_in_company(body, [question.oracle] * 3)


@case(Kind.NONE)
def list_of_prompts(play: Play) -> None:
    """One completion request with two prompts; prefill answers it with one set of params."""
    first = play.bed.question(seed=3)
    second = replace(play.bed.question(seed=4), salt=first.salt)
    prompts = [list(first.prompt), list(second.prompt)]
    params = play.bed.ask_prefill(prompts, first.salt)
    play.ask_in_company({**first.body(params), "prompt": prompts}, [first.oracle, second.oracle])


@case(Kind.ORDINARY)
def client_never_asks_decode(play: Play) -> None:
    """The client leaves between prefill and decode, and the router asks nobody."""
    play.bed.hand_off(play.bed.question(seed=5))
    play.result.facts.append(f"prefill held the blocks for {play.is_released('prefill'):.1f} s")


@case(Kind.ORDINARY)
def client_leaves_at_once(play: Play) -> None:
    """The router asks decode, and the client hangs up before decode has heard it."""
    question = play.bed.question(seed=6)
    params = play.bed.hand_off(question)
    play.bed.ask_and_leave(question.body(params))
    play.result.facts.append(f"prefill held the blocks for {play.is_released('prefill'):.1f} s")


@case(Kind.ORDINARY)
def too_late(play: Play) -> None:
    """The request waits in a queue until its lease is over and prefill's blocks belong to other prompts."""
    question = play.bed.question(seed=7)
    params = play.bed.hand_off(question)
    play.is_released("prefill")
    play.bed.churn()
    play.ask(question, params)


@case(Kind.ORDINARY)
def asked_again(play: Play) -> None:
    """The router repeats a request that decode has answered; meanwhile both engines have served other prompts."""
    question = play.bed.question(seed=8)
    params = play.bed.hand_off(question)
    play.works(question, params)
    play.bed.churn()
    play.bed.forget("decode")
    play.ask(question, params)


@case(Kind.ROUTER)
def params_swapped(play: Play) -> None:
    """Two requests come with each other's params."""
    questions = [play.bed.question(seed=9), play.bed.question(seed=10)]
    params = [play.bed.hand_off(question) for question in questions]
    for question, others in zip(questions, reversed(params), strict=True):
        play.ask(question, others)


@case(Kind.ORDINARY)
def nobody_listens(play: Play) -> None:
    """The params name a prefill engine that is not there."""
    question = play.bed.question(seed=11)
    play.ask(question, play.bed.hand_off(question) | _elsewhere(free_port()))


@case(Kind.ORDINARY)
def silence(play: Play) -> None:
    """The params name a prefill engine whose port takes connections and says nothing."""
    question = play.bed.question(seed=12)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        play.ask(question, play.bed.hand_off(question) | _elsewhere(silent.getsockname()[1]))


def _elsewhere(port: int) -> dict[str, Any]:
    return {"remote_engine_id": f"nobody at {port}", "remote_host": "127.0.0.1", "remote_port": port}


@case(Kind.BAD_PARAMS)
def blocks_just_out_of_range(play: Play) -> None:
    """Every block id in the params is as much too high as prefill has blocks."""
    _ask_shifted(play, 12, NUM_BLOCKS)


@case(Kind.BAD_PARAMS)
def blocks_far_out_of_range(play: Play) -> None:
    """Every block id in the params is a million too high."""
    _ask_shifted(play, 13, 1_000_000)


def _ask_shifted(play: Play, seed: int, distance: int) -> None:
    question = play.bed.question(seed=seed)
    params = play.bed.hand_off(question)
    play.ask(question, params | {"remote_block_ids": shifted(params["remote_block_ids"], distance)})


def shifted(groups: Sequence[Sequence[int]], distance: int) -> list[list[int]]:
    """The block ids of each KV group, moved by a distance."""
    return [[block_id + distance for block_id in group] for group in groups]


@case(Kind.BAD_PARAMS)
def params_without_an_address(play: Play) -> None:
    """The params lack remote_host."""
    question = play.bed.question(seed=14)
    params = play.bed.hand_off(question)
    del params["remote_host"]
    play.ask(question, params)


@case(Kind.BAD_PARAMS)
def bare_params(play: Play) -> None:
    """The params are {"do_remote_prefill": true} and nothing else."""
    play.ask(play.bed.question(seed=15), {"do_remote_prefill": True})


@case(Kind.BAD_PARAMS)
def engine_id_is_a_list(play: Play) -> None:
    """remote_engine_id is a list with the right id in it."""
    _ask_changed(play, 16, lambda params: {"remote_engine_id": [params["remote_engine_id"]]})


@case(Kind.BAD_PARAMS)
def request_id_is_a_number(play: Play) -> None:
    """remote_request_id is a number."""
    _ask_changed(play, 17, lambda _: {"remote_request_id": 7})


def _ask_changed(play: Play, seed: int, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    question = play.bed.question(seed=seed)
    params = play.bed.hand_off(question)
    play.ask(question, {**params, **change(params)})


@case(Kind.ORDINARY, ends=("prefill",))
def prefill_killed(play: Play) -> None:
    """Prefill is killed between its answer and decode's request."""
    question = play.bed.question(seed=18)
    params = play.bed.hand_off(question)
    play.bed.kill("prefill")
    play.ask(question, params)


@case(Kind.ORDINARY, restarts=("prefill",))
def prefill_restarted_with_the_same_id(play: Play) -> None:
    """Prefill comes back under the engine_id and address that its operator configured; three new hand-offs."""
    if not play.bed.has_greeted:
        question = play.bed.question(seed=19)
        play.works(question, play.bed.hand_off(question))
    play.bed.restart_with_same_id("prefill")
    for seed in (20, 21, 22):
        question = play.bed.question(seed=seed)
        play.ask(question, play.bed.hand_off(question))


@case(Kind.STRANGER, needs_new_pair=True)
def junk_to_the_side_channel(play: Play) -> None:
    """Somebody sends three malformed messages to prefill's side channel; then decode asks for the first time."""
    num_taken = send_junk(play.bed.side_channel)
    if num_taken < len(JUNK):
        play.result.facts.append(f"the side channel's port was closed after {num_taken} of {len(JUNK)}")
    question = play.bed.question(seed=23)
    play.ask(question, play.bed.hand_off(question))


JUNK: tuple[list[bytes], ...] = (
    [b"one frame"],
    [b"", b"\xc1 is no msgpack"],
    [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 7))],
)
"""A message of one frame, one that is not msgpack, and one for a rank that there is not."""


def send_junk(address: tuple[str, int], patience_seconds: float = 5.0) -> int:
    """Send each from a connection of its own; how many were taken. Raises NotPlayedError when none was."""
    num_taken = 0
    with zmq.Context() as context:
        for parts in JUNK:
            with context.socket(zmq.DEALER) as sender:
                sender.setsockopt(zmq.LINGER, 1000)
                # Only with a connection can a message be sent, so that its loss is noticed.
                sender.setsockopt(zmq.IMMEDIATE, 1)
                sender.setsockopt(zmq.SNDTIMEO, int(1000 * patience_seconds))
                sender.connect("tcp://{}:{}".format(*address))
                with contextlib.suppress(zmq.Again):
                    sender.send_multipart(parts)
                    num_taken += 1
                time.sleep(0.2)
    if not num_taken:
        raise NotPlayedError(f"nobody takes anything at {address}")
    return num_taken


@case(Kind.ORDINARY, patience_seconds=6.0)
def prefill_stopped(play: Play) -> None:
    """Prefill is stopped (SIGSTOP, as a host that hangs) while decode asks, until the answer or the deadline."""
    if not play.bed.has_greeted:
        question = play.bed.question(seed=24)
        play.works(question, play.bed.hand_off(question))
    question = play.bed.question(seed=25)
    params = play.bed.hand_off(question)
    with play.bed.paused("prefill"):
        play.ask(question, params)
