"""Published rows: their averages are what their task scores give, and none is without a source."""

import pytest

from eval.report.references import NINE, OTHER_PROTOCOLS, REFERENCES, OtherProtocol, Reference
from eval.rules.evidence import mean_of
from eval.tasks.suites import AVERAGES


def test_nine_entries_are_those_of_the_suites_average() -> None:
    assert set(NINE) == set(AVERAGES["glue"]["avg9"].entries)


@pytest.mark.parametrize("row", REFERENCES, ids=lambda row: row.title)
def test_published_avg9_is_the_mean_of_the_published_scores(row: Reference) -> None:
    if not row.scores:
        assert row.avg8 is None
        return
    assert set(row.scores) == set(NINE)
    # Scores and average are each rounded to one decimal.
    assert mean_of([row.scores[entry] for entry in NINE]) == pytest.approx(row.avg9, abs=0.1)


def test_avg8_is_computed_with_one_mnli_entry() -> None:
    by_title = {row.title: row.avg8 for row in REFERENCES}
    assert by_title["BERT-base, fully trained"] == pytest.approx(80.65, abs=0.06)
    assert by_title["RoBERTa-base"] == pytest.approx(85.0, abs=0.06)


@pytest.mark.parametrize("row", [r for r in OTHER_PROTOCOLS if r.scores], ids=lambda row: row.title)
def test_other_protocols_averages_match_their_scores(row: OtherProtocol) -> None:
    whole = all(score == round(score) for score in row.scores.values())  # published without decimals
    assert sum(row.scores.values()) / 8 == pytest.approx(row.avg8, abs=1.0 if whole else 0.1)


def test_every_row_has_a_source() -> None:
    assert all(row.source for row in (*REFERENCES, *OTHER_PROTOCOLS))
