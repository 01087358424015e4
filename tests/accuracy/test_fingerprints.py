"""The differ names the block that differs, and whose bytes it has."""

from benchmarks.accuracy.fingerprints import Deviation, Held, Loaded, compare

BLOCK = 32


def held(num_tokens: int, name: str) -> Held:
    """A prompt of which group 0 keeps the window's last blocks and group 1 all blocks."""
    last = (num_tokens - 1) // BLOCK
    full = {position: f"{name} full {position}" for position in range(last + 1)}
    sliding = {position: f"{name} sliding {position}" for position in range(last - 3, last + 1)}
    return Held("text", num_tokens, [sliding, full])


def loaded(of: Held) -> Loaded:
    last = (of.num_tokens - 2) // BLOCK
    return Loaded("text", [[table[position] for position in table if position <= last] for table in of.groups])


def test_equal_blocks_do_not_differ():
    one = held(330, "a")
    found = compare([loaded(one)], [one], BLOCK)
    assert (found.num_compared, found.deviations) == (13, ())


def test_a_damaged_block_is_named():
    one = held(330, "a")
    ours = loaded(one)
    ours.groups[1][4] = "zero"
    (deviation,) = compare([ours], [one], BLOCK).deviations
    assert deviation == Deviation(0, 1, 4, "bytes that no block of the single engine has")
    assert "position 4 of group 1 (tokens 128 to 159)" in deviation.describe(BLOCK)


def test_a_sliding_group_s_positions_count_from_the_prompt_s_beginning():
    one = held(330, "a")
    ours = loaded(one)
    ours.groups[0][0] = "zero"
    (deviation,) = compare([ours], [one], BLOCK).deviations
    assert (deviation.group, deviation.position) == (0, 7)


def test_swapped_blocks_name_each_other():
    one, two = held(330, "a"), held(400, "b")
    ours = [loaded(one), loaded(two)]
    ours[0].groups[1][2], ours[1].groups[1][3] = ours[1].groups[1][3], ours[0].groups[1][2]
    found = compare(ours, [one, two], BLOCK).deviations
    assert [deviation.instead for deviation in found] == [
        "the bytes of prompt 1, group 1, position 3",
        "the bytes of prompt 0, group 1, position 2",
    ]


def test_a_block_that_the_prompt_does_not_fill_is_left_out():
    one = held(330, "a")
    ours = loaded(one)
    ours.groups[1][-1] = "whatever"
    assert compare([ours], [one], BLOCK).deviations == ()


def test_a_last_token_alone_in_its_block_leaves_the_others_comparable():
    one = held(321, "a")
    ours = loaded(one)
    ours.groups[1][-1] = "zero"
    (deviation,) = compare([ours], [one], BLOCK).deviations
    assert deviation.position == 9
