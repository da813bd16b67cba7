"""Published rows: their averages are what their task scores give, and none is without a source."""

import pytest

from cramming.data.suites import AVERAGES
from cramming.scores import mean_of
from eval.report.references import NINE, OTHER_PROTOCOLS, REFERENCES


def test_nine_entries_are_those_of_the_suites_average() -> None:
    assert set(NINE) == set(AVERAGES["glue"]["avg9"].entries)


def test_published_averages_are_those_of_the_published_scores() -> None:
    """Scores and averages are each rounded to one decimal; one row is published without decimals."""
    for row in REFERENCES:
        assert set(row.scores) in (set(NINE), set()) and (row.avg8 is None) == (not row.scores)
        assert not row.scores or mean_of([row.scores[entry] for entry in NINE]) == pytest.approx(
            row.avg9, abs=0.1
        )
    for other in OTHER_PROTOCOLS:
        whole = all(score == round(score) for score in other.scores.values())
        assert not other.scores or sum(other.scores.values()) / 8 == pytest.approx(
            other.avg8, abs=1.0 if whole else 0.1
        )


def test_avg8_is_computed_with_one_mnli_entry() -> None:
    by_title = {row.title: row.avg8 for row in REFERENCES}
    assert by_title["BERT-base, fully trained"] == pytest.approx(80.65, abs=0.06)
    assert by_title["RoBERTa-base"] == pytest.approx(85.0, abs=0.06)


def test_every_row_has_a_source() -> None:
    assert all(row.source for row in (*REFERENCES, *OTHER_PROTOCOLS))
