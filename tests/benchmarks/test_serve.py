"""The serving benchmark without engines: its conversations, its client's command, its tables."""

import json
import statistics
from itertools import pairwise

import pytest

from benchmarks.pairs import BUILT_IN, MODEL, OURS, UNPINNED
from benchmarks.serve import dataset
from benchmarks.serve.life import FIGURES, SINGLE, Life, Run, client_command
from benchmarks.serve.tables import COLUMNS, all_tables, ratios_table, serving_table


def test_lengths_are_like_the_ones_they_stand_for():
    drawn = dataset.draw(20_000, seed=1)
    assert statistics.mean(each.input for each in drawn) == pytest.approx(dataset.MEAN_INPUT_TOKENS, rel=0.05)
    assert statistics.mean(each.output for each in drawn) == pytest.approx(dataset.MEAN_OUTPUT_TOKENS, rel=0.05)
    assert min(map(min, drawn)) >= dataset.MIN_TOKENS
    assert max(each.input for each in drawn) <= dataset.MAX_INPUT_TOKENS
    assert max(map(sum, drawn)) <= dataset.MAX_TOKENS


def test_draws_repeat_and_scale():
    assert dataset.draw(50, seed=1) == dataset.draw(50, seed=1) != dataset.draw(50, seed=2)
    outputs = [statistics.mean(each.output for each in dataset.draw(5000, 1, scale)) for scale in (1.0, 0.5)]
    assert outputs[1] == pytest.approx(outputs[0] / 2, rel=0.1)


def test_a_word_is_a_token(tmp_path):
    from tokenizers import Tokenizer

    requests = dataset.draw(20, seed=3)
    dataset.write(tmp_path / "file.json", requests, dataset.words(MODEL), seed=3)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    entries = json.loads((tmp_path / "file.json").read_text())
    lengths = [tuple(len(tokenizer.encode(turn["value"]).ids) for turn in entry["conversations"]) for entry in entries]
    assert lengths == requests
    assert len({entry["conversations"][0]["value"] for entry in entries}) == len(entries)


@pytest.mark.vllm
def test_vllm_reads_all_conversations(tmp_path):
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import ShareGPTDataset

    requests = dataset.draw(30, seed=4)
    dataset.write(tmp_path / "file.json", requests, dataset.words(MODEL), seed=4)
    read = ShareGPTDataset(dataset_path=str(tmp_path / "file.json"), random_seed=0)
    found = read.sample(AutoTokenizer.from_pretrained(MODEL), 30)
    assert sorted((each.prompt_len, each.expected_output_len) for each in found) == sorted(requests)


def test_the_clients_command(tmp_path):
    command = client_command("http://proxy:1", tmp_path / "c.json", 100, 10, tmp_path / "out" / "r.json")
    given = dict(pairwise(command))
    assert given["--base-url"] == "http://proxy:1"
    assert (given["--num-prompts"], given["--max-concurrency"]) == ("100", "10")
    assert (given["--result-dir"], given["--result-filename"]) == (str(tmp_path / "out"), "r.json")


def life(name, throughput, ttft, number=0, concurrency=10):
    """Every figure is 1 but for those that a target looks at."""
    ones = dict.fromkeys(FIGURES, 1.0) | {"completed": 100, "failed": 0}
    figures = ones | {"request_throughput": throughput, "p99_ttft_ms": ttft}
    return Life(name, number, 40.0, [Run(concurrency, figures, 102)], 2.0)


@pytest.mark.parametrize(
    ("throughput", "ttft", "verdict"), [(10.5, 9.0, "met"), (10.4, 9.0, "missed"), (12.0, 10.0, "missed")]
)
def test_targets(throughput, ttft, verdict):
    (row,) = ratios_table([life(OURS.name, throughput, ttft), life(UNPINNED.name, 10.0, 10.0)]).rows
    assert row[-1] == verdict
    (row,) = ratios_table([life(each, 10.0, 10.0, concurrency=1) for each in (OURS.name, UNPINNED.name)]).rows
    assert row[-1] == ""


def test_medians_over_rounds():
    lives = [life(OURS.name, throughput, 1.0, number) for number, throughput in enumerate((3.0, 9.0, 4.0))]
    (row,) = serving_table(lives, 10).rows
    assert row[2] == 4.0
    assert row[-4:] == ("3 of 3", 306, 0, 306)


def test_a_run_that_did_not_end_has_no_figures():
    stopped = Life(BUILT_IN.name, 0, 40.0, [Run(10, None, 7)], 2.0)
    (ours, theirs) = serving_table([stopped, life(OURS.name, 1.0, 1.0)], 10).rows
    assert theirs[1 : 1 + len(COLUMNS)] == ("",) * len(COLUMNS)
    assert theirs[-4:] == ("0 of 1", 0, 0, 0)
    assert ours[-1] == 102
    assert ratios_table([stopped, life(OURS.name, 1.0, 1.0)]).rows == ()


def test_every_table_has_whole_rows():
    lives = [life(name, 1.0, 1.0) for name in (UNPINNED.name, SINGLE, OURS.name)]
    tables = all_tables(lives)
    for table in tables:
        assert table.rows, table.title
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [row[0].split(",")[0] for row in tables[1].rows] == ["single engine", "ours", "built-in"]
