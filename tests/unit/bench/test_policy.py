from twostroke.bench.policy import WORKERS, Filled, run


def test_a_small_run_has_every_row_and_check() -> None:
    record = run(3, 4000, "python -m twostroke.bench.policy")
    assert [check.name for check in record.checks] == [
        "lookup of a 32k-token prompt, CPU median",
        "decision for 256 workers and a 32k-token prompt, CPU median",
        "the same, CPU p99",
        "memory of an index of a million blocks",
    ]
    for check in record.checks:
        assert check.value is not None
        assert check.value > 0, check.name
    assert len(record.rows) == 6


def test_the_prompts_that_are_looked_up_are_known_in_part() -> None:
    filled = Filled(1, 5, 1000)
    for prompt in filled.prompts:
        hits = filled.index.hits(prompt)
        assert len(hits) == WORKERS, "everybody has the system prompt"
        assert 64 < max(hits.values()) < len(prompt) == 2048
    assert len({prompt[-1] for prompt in filled.prompts}) == 5
