"""Traces and made-up arrivals."""

from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.sim.scenario import TrafficSpec, parse_failure
from twostroke.sim.traffic_files import read
from twostroke.sim.traffic_made import Lengths, closed_loop, parse_lengths, rescaled, sine, steady


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 1000, "input_length": 600, "output_length": 0, "hash_ids": [7, 8]}\n'
    )
    traffic = read(written(tmp_path, "mooncake.jsonl", lines))
    assert list(traffic.arrival_s) == [0.0, 2.0]
    assert list(traffic.prompt_tokens) == [600, 1100]
    assert list(traffic.output_tokens) == [1, 5]
    # A hash of a unit that the prompt does not fill names no cacheable block.
    assert [list(keys) for keys in traffic.hashes] == [[7], [7, 8]]
    assert traffic.unit_tokens == 512


def test_azure(tmp_path: Path) -> None:
    lines = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,110,27\n"
    )
    traffic = read(written(tmp_path, "azure.csv", lines))
    assert list(traffic.arrival_s) == pytest.approx([0.0, 0.5])
    assert list(traffic.prompt_tokens) == [4808, 110]
    assert not traffic.hashes


def test_plain_files(tmp_path: Path) -> None:
    table = read(written(tmp_path, "a.csv", "arrival_s,prompt_tokens,output_tokens\n5,10,2\n7.5,20,3\n"))
    assert (list(table.arrival_s), list(table.prompt_tokens)) == ([0.0, 2.5], [10, 20])
    lines = '{"arrival_s": 1, "prompt_tokens": 64, "output_tokens": 2, "hashes": [1, 2]}\n'
    assert [list(keys) for keys in read(written(tmp_path, "a.jsonl", lines), unit_tokens=32).hashes] == [[1, 2]]


def test_servegen(tmp_path: Path) -> None:
    written(tmp_path, "chunk-0-trace.csv", "0,2.0,1.0,Gamma,1,1\n600,0,0,,0,0\n1200,4.0,3.0,Gamma,1,1\n")
    histogram = '{"0": {"input_tokens": "{100: 1.0}", "output_tokens": "{10: 0.5, 20: 0.5}"}}'
    written(tmp_path, "chunk-0-dataset.json", histogram)
    traffic = read(tmp_path)
    times = np.asarray(traffic.arrival_s)
    assert 1000 < (times < 600).sum() < 1400
    assert ((times > 600) & (times < 1190)).sum() == 0
    assert 1700 < (times > 1190).sum() < 3100
    assert set(traffic.prompt_tokens) == {100}
    assert set(traffic.output_tokens) == {10, 20}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "x,y\n1,2\n", "names no lengths"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,two,3\n", "a.csv:2"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5}\n', "a.jsonl:1: field 'output_length' is missing"),
        ("a.jsonl", "\n", "has no requests"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(written(tmp_path, name, text))


def test_a_missing_file_says_where_traces_come_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no trace .*docs/simulator.md"):
        read(tmp_path / "none.csv")


def test_rates_and_variation() -> None:
    for cv in (0.5, 1.0, 3.0):
        gaps = np.diff(steady(Lengths(10, 10), 20.0, 2000, cv=cv).arrival_s)
        assert 1 / gaps.mean() == pytest.approx(20, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_a_sine_swings_between_its_ends() -> None:
    times = np.asarray(sine(Lengths(10, 10), 1, 24, 900, 9000).arrival_s)
    phases = times % 900
    low = ((phases < 45) | (phases > 855)).sum() / 10 / 90
    high = ((phases > 405) & (phases < 495)).sum() / 10 / 90
    assert low == pytest.approx(1.2, abs=0.3)
    assert high == pytest.approx(23.8, abs=1.5)
    assert len(times) / 9000 == pytest.approx(12.5, rel=0.03)


def test_lengths() -> None:
    assert parse_lengths("8192/256") == Lengths(8192, 256)
    drawn = closed_loop(parse_lengths("1000/100/0.5"), 4, 4000)
    prompts = np.asarray(drawn.prompt_tokens, dtype=float)
    assert prompts.mean() == pytest.approx(1000, rel=0.05)
    assert prompts.std() / prompts.mean() == pytest.approx(0.5, rel=0.1)
    for bad in ("8192", "a/b", "0/5", "1/2/3/4"):
        with pytest.raises(ConfigError, match="lengths"):
            parse_lengths(bad)


def test_rescaled() -> None:
    made = rescaled(steady(Lengths(10, 10), 5.0, 100), 2.0, 50)
    assert len(made) == 50
    assert 50 / made.arrival_s[-1] == pytest.approx(10, rel=0.4)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TrafficSpec(), "no traffic"),
        (TrafficSpec(lengths="10/10"), "needs --rate"),
        (TrafficSpec(lengths="10/10", rate="fast"), "--rate fast"),
    ],
)
def test_what_is_missing_is_named(spec: TrafficSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec.make()


def test_a_trace_s_rate_may_be_set(tmp_path: Path) -> None:
    lines = "num_prefill_tokens,num_decode_tokens\n" + "100,10\n" * 400
    path = written(tmp_path, "lengths.csv", lines)
    with pytest.raises(ConfigError, match="lengths only"):
        TrafficSpec(trace=path).make()
    paced = TrafficSpec(trace=path, rate="4").make()
    assert len(paced) == 400
    assert 400 / paced.span_s == pytest.approx(4, rel=0.2)


def test_failures() -> None:
    assert (parse_failure("2@60+30").down_s, parse_failure("2@60").down_s) == (30, -1)
    with pytest.raises(ConfigError, match="--fail"):
        parse_failure("two@60")
