"""Published results, each with its source, to hang beneath one's own rows.

Only numbers that stand in a paper, a model card or a public repository's thread are here; a number that somebody else
quotes is marked as second-hand. The first table follows this suite's protocol (at most 5 epochs, one hyperparameter set
for all tasks, development set), so its rows may stand under a run's own row. The second table does not (tuning per
task, intermediate MNLI training, test set, or another average), and is printed apart, for orientation only.

A row's avg-9 is the published number. Where all task scores are published it must be what this suite's definition gives
(a test recomputes it); avg-8 is not published for these rows and is computed here, by this suite's definition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eval.rules.reading import mean_of
from eval.tasks.suites import AVERAGES

# The entries of avg-9 in the order in which the cramming paper prints them.
NINE = ("mnli_matched", "mnli_mismatched", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")

PROTOCOL = "GLUE dev, at most 5 epochs, one hyperparameter set for all tasks"


@dataclass(frozen=True)
class Reference:
    """A published row of the same protocol, in percent; `scores` is empty where only the average is published."""

    title: str
    source: str
    avg9: float
    scores: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None  # published standard deviation of avg-9
    note: str = ""

    @property
    def avg8(self) -> float | None:
        """The average with one MNLI entry, computed from the task scores; None where they are not published."""
        return mean_of(AVERAGES["glue"]["avg8"].entries, self.scores)


@dataclass(frozen=True)
class OtherProtocol:
    """A published row of another protocol: an average over 8 tasks that cannot be compared with the table above."""

    title: str
    parameters: str
    cost: str
    avg8: float
    source: str
    scores: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def _nine(*scores: float) -> dict[str, float]:
    return dict(zip(NINE, scores, strict=True))


_PAPER_V1 = "Geiping & Goldstein 2022 (arXiv 2212.14034v1), table of results"

REFERENCES: tuple[Reference, ...] = (
    Reference(
        "RoBERTa-base",
        _PAPER_V1,
        85.1,
        _nine(86.6, 86.4, 88.3, 92.1, 93.7, 60.2, 90.4, 91.4, 77.3),
        note="fully trained model, fine-tuned under this protocol",
    ),
    Reference(
        "BERT-base, fully trained",
        _PAPER_V1,
        80.9,
        _nine(83.2, 83.4, 87.7, 90.6, 91.9, 56.5, 86.7, 89.3, 59.2),
        note="fully trained model, fine-tuned under this protocol",
    ),
    Reference(
        "Crammed BERT v2, A6000, 24 h",
        "JonasGeiping/cramming model_card.md",
        80.7,
        _nine(84.1, 84.6, 87.5, 90.2, 92.0, 53.3, 87.4, 88.9, 58.5),
        note="the best of 5 pretraining runs, each the median of 5 fine-tunings",
    ),
    Reference(
        "Crammed BERT v2, A6000, 24 h, paper",
        "second-hand: the paper's number as quoted in JonasGeiping/cramming issue 45",
        80.4,
    ),
    Reference(
        "Crammed BERT v2, A5500, 24 h",
        "a user's reproduction, JonasGeiping/cramming issue 45",
        80.3,
        note="final MLM loss 1.971",
    ),
    Reference(
        "Crammed BERT v2, A4000, 24 h, paper",
        "second-hand: the paper's number as quoted in JonasGeiping/cramming issue 45",
        79.2,
    ),
    Reference(
        "Crammed BERT v2 setup, 2080 Ti, 24 h",
        "He & Hofmann, Simplifying Transformer Blocks (arXiv 2311.01906), table 2",
        78.9,
        _nine(81.2, 81.6, 87.1, 88.9, 89.9, 49.4, 87.6, 88.3, 56.3),
        spread=0.7,
        note="third party, 3 seeds, its own global setting: batch 32, learning rate 1.5e-4",
    ),
    Reference(
        "Crammed BERT v1, A6000, 24 h",
        f"{_PAPER_V1}; v1 model card",
        78.6,
        _nine(83.9, 84.1, 87.3, 89.5, 92.2, 44.5, 84.6, 87.5, 53.8),
    ),
    Reference(
        "BERT-base, no pretraining",
        _PAPER_V1,
        45.5,
        _nine(34.1, 34.1, 68.6, 50.0, 79.9, 0.0, 17.8, 77.9, 47.3),
    ),
)

_EIGHT = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli_matched", "qnli", "rte")


def _eight(*scores: float) -> dict[str, float]:
    return dict(zip(_EIGHT, scores, strict=True))


OTHER_PROTOCOLS: tuple[OtherProtocol, ...] = (
    OtherProtocol(
        "ModernBERT-large",
        "395M",
        "8 H100 x 527.7 h",
        90.4,
        "ModernBERT paper, tables 1, 3, 5",
        _eight(71.4, 97.1, 91.7, 92.8, 92.7, 90.8, 95.2, 92.1),
        note="tuned per task; RTE, MRPC, STS-B start from the MNLI model",
    ),
    OtherProtocol(
        "NeoBERT-4096",
        "250M",
        "2.1T tokens",
        89.0,
        "NeoBERT paper, table 3",
        _eight(66.2, 95.6, 93.4, 91.8, 90.7, 89.0, 93.7, 91.3),
        note="tuned per task, with transfer between related tasks",
    ),
    OtherProtocol(
        "ModernBERT-base",
        "149M",
        "8 H100 x 245.6 h, 2T tokens",
        88.4,
        "ModernBERT paper, tables 1, 3, 5",
        _eight(65.1, 96.0, 92.2, 91.8, 92.1, 89.1, 93.9, 87.4),
        note="tuned per task; RTE, MRPC, STS-B start from the MNLI model",
    ),
    OtherProtocol(
        "MosaicBERT-base, final",
        "137M",
        "70k steps of 4096 x 128, 36.7B tokens",
        84.3,
        "MosaicBERT model card",
        _eight(55.1, 92.5, 90.0, 89.3, 90.3, 85.0, 90.7, 81.4),
        note="mean of 5 pretraining seeds; RTE, MRPC, STS-B start from the MNLI model",
    ),
    OtherProtocol(
        "NomicBERT-2048",
        "137M",
        "not given",
        84.0,
        "ModernBERT paper, table 5",
        _eight(50.0, 93.0, 88.0, 90.0, 92.0, 86.0, 92.0, 82.0),
        note="published without decimals",
    ),
    OtherProtocol(
        "ELECTRA-small-OWT",
        "14M",
        "about 4 days, 1 V100",
        80.4,
        "google-research/electra README",
        _eight(56.8, 88.3, 87.4, 86.8, 88.3, 78.9, 87.9, 68.5),
        note="average computed from the published task scores",
    ),
    OtherProtocol("MosaicBERT-base, 1.13 h", "137M", "8 A100 x 1.13 h", 79.6, "MosaicBERT abstract"),
    OtherProtocol("ELECTRA-small, 24 h", "14M", "1 V100 x 24 h", 77.7, "ELECTRA paper"),
)
