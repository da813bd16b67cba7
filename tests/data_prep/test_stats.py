"""Counts are the same in any order; what is shown of a document fits on a line."""

import random

from data_prep.stats import EXAMPLES, EXCERPT_CHARACTERS, Example, Stage


def test_examples_and_counts_do_not_depend_on_the_order_or_the_task() -> None:
    dropped = [(key, "word " * (key % 90 + 1)) for key in range(200)]
    lines = []
    for seed in range(3):
        tasks = [Stage() for _ in range(1 + 3 * seed)]
        for key, text in random.Random(seed).sample(dropped, len(dropped)):
            stage = tasks[key % len(tasks)]
            stage.count_in(1, len(text))
            reason = "too_short" if len(text) < 100 else "other"
            stage.drop(reason, 1, len(text), [Example(key, "file", key, "", text)])
            stage.merge(Stage(notes={"cut": 1, "kinds": {reason: 2}}))
        total = Stage()
        for stage in tasks:
            total.merge(stage)
        lines.append(total.line("filters"))
    assert lines[0] == lines[1] == lines[2]
    assert lines[0].documents_in == sum(row.documents for row in lines[0].dropped.values()) == 200
    assert all(len(row.examples) == EXAMPLES for row in lines[0].dropped.values())
    assert lines[0].notes["cut"] == 200 and sum(lines[0].notes["kinds"].values()) == 400


def test_an_example_is_one_short_printable_line() -> None:
    shown = "\udcff\x00\x1b[31m | line\nnext " + "x" * EXCERPT_CHARACTERS
    line = Example(0, "a", 0, " part 2 of 3", shown).line()
    assert line.startswith("a:0 part 2 of 3: ")
    assert line.isprintable() and len(line) < EXCERPT_CHARACTERS + 60
    line.encode()
