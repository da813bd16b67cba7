"""The stages that a task passes its documents through, in this order.

    source -> normalise -> filters -> decontamination -> signatures -> tokens

They are pure functions of a document and the settings, so it does not matter which task has it. What depends on other
documents (duplicates, the hold-out) is decided when all tasks are done, in data_prep/selection.py. Reasons of the stage
`filters` are rows of the table `FilterConfig` in data_prep/filters/quality.py. `cramming inspect` counts what each
stage drops, and corpus_card.md shows examples.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from cramming.data.manifest import SpecialIds
from data_prep.dedup.decontaminate import Decontaminator
from data_prep.dedup.exact import content_numbers
from data_prep.dedup.near import Signer
from data_prep.filters import normalise, quality
from data_prep.filters.quality import Filter
from data_prep.filters.text import Text
from data_prep.grouping import grouped
from data_prep.parts import PartWriter, label_of
from data_prep.readers.source import ESCAPED_BYTE, DataConfig, Document, Task
from data_prep.stats import Example, Stage, excerpt, matches, measured, text_bytes
from data_prep.tokenizer.encode import TextEncoder, text_encoder
from data_prep.tokenizer.load import stripped_characters, strips_accents

GROUP_DOCUMENTS = 512
GROUP_SIZE = 1 << 20  # characters that pass a stage together
TEMPLATES_LOST = "templates_without_text"  # a note of the stage `source`
END_OF_TEXT = (
    "<|endoftext|>"  # between documents in dumps for GPT-2; counted in the notes of `normalise`
)
BROKEN = "broken_characters"  # the filter that reads the text before and after normalisation
NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
STRIPPED = "without their accents"  # characters by script, in the notes of the stage `tokens`
_VISIBLE = {
    code: f"\\x{code:02x}" for code in (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0))
}  # control characters


class Piece(NamedTuple):
    """A normalised document, or a part of a long one."""

    document: Document
    piece: int  # among the `pieces` that the document was cut into
    pieces: int
    text: str
    size_bytes: int
    key: int
    split_number: int
    is_broken: bool  # a filter removes it for what normalisation has taken away
    match_words: int = 0  # of the longest match of decontamination
    match: str = ""  # in words
    cut_bytes: int = 0  # that decontamination cut out

    def example(self, shown: str) -> Example:
        """Return what is shown of a piece that was dropped."""
        document = self.document
        label = label_of(document.part, self.piece, self.pieces)
        return Example(self.key, document.origin, document.number, label, shown)


@dataclass(frozen=True)
class Stages:
    """All stages with what they need. `decontaminator` and `signer` are None where switched off."""

    data: DataConfig
    tokenizer: Tokenizer
    special_ids: SpecialIds
    vocab_size: int
    dtype: np.dtype[Any]
    decontaminator: Decontaminator | None = None
    signer: Signer | None = None

    def __call__(self, task: Task, folder: Path) -> None:
        """Write the part of a task."""
        part = PartWriter(folder, self.vocab_size, self.data.list_dropped)
        parts_of_last = Counter[str]()
        documents = task.documents()
        for group in grouped(
            documents, GROUP_DOCUMENTS, lambda document: document.size, GROUP_SIZE
        ):
            readable = drop_damaged(group, part, self.data.seed)
            pieces = self.normalised(readable, part.stats["normalise"], parts_of_last)
            passed = self.filtered(pieces, part.stats["filters"])
            passed = self.decontaminated(passed, part)
            if self.signer and passed:
                part.add_signatures(*self.signer([piece.text for piece in passed]))
            self.count_stripped(passed, part.stats["tokens"])
            self.write_tokens(passed, part)
            part.lines.add([piece.key for piece in passed], [piece.text for piece in passed])
            part.flush()
        part.finish(task.name, task.relative)

    def normalised(
        self, documents: list[Document], stage: Stage, made: Counter[str]
    ) -> list[Piece]:
        """Return documents in normal form, those above `clean.max_characters` or `filters.max_words` in pieces.

        `made` counts the pieces of each origin's last document, which its next part may go on with. Token ids pass as
        they are.
        """
        pieces: list[Piece] = []
        deleted = Counter[str]()
        markers = 0
        stage.notes.setdefault("long_documents_cut", 0)
        stage.notes.setdefault("their_parts", 0)
        for document in documents:
            texts = self._pieces(document, deleted)
            markers += document.text.count(END_OF_TEXT)
            is_broken = quality.is_broken(document.text, self.data.filters)
            for number, text in enumerate(texts):
                data = text.encode() if document.ids is None else document.ids.tobytes()
                numbers = content_numbers(data, self.data.seed)
                size_bytes = len(data) if document.ids is None else 0
                place = (document, number, len(texts))
                pieces.append(Piece(*place, text.strip(), size_bytes, *numbers, is_broken))
            before = made[document.origin] if document.part else 0
            made[document.origin] = before + len(texts)
            if made[document.origin] > 1:
                stage.notes["long_documents_cut"] += before <= 1
                stage.notes["their_parts"] += len(texts) if before > 1 else before + len(texts)
            stage.count_in(document.part == 0, text_bytes(document.text))
        stage.count_out(len(pieces), sum(piece.size_bytes for piece in pieces))
        kinds = normalise.deleted_by_kind(deleted)
        if kinds:
            stage.merge(Stage(notes={"deleted_characters": kinds}))
        if markers:
            stage.merge(Stage(notes={END_OF_TEXT: markers}))
        return pieces

    def _pieces(self, document: Document, deleted: Counter[str]) -> list[str]:
        if document.ids is not None:
            return [""]
        text = normalise.normalize(document.text, self.data.clean, deleted)
        pieces: list[str] = []
        for long in normalise.split_evenly(text, self.data.clean.max_characters):
            pieces += normalise.split_by_words(long, self.data.filters.max_words)
        return pieces

    def filtered(self, pieces: list[Piece], stage: Stage) -> list[Piece]:
        """Return the pieces that are text worth learning from."""
        stage.count_in(len(pieces), sum(piece.size_bytes for piece in pieces))
        passed: list[Piece] = []
        for piece in pieces:
            filter = self._violated(piece)
            if filter is None:
                passed.append(piece)
                continue
            reason, examples = filter.rule.reason, list[Example]()
            if stage.wants_example(reason, piece.key):
                examples.append(piece.example(_explain(piece, filter)))
            stage.drop(reason, 1, piece.size_bytes, examples)
        stage.count_out(len(passed), sum(piece.size_bytes for piece in passed))
        return passed

    def _violated(self, piece: Piece) -> Filter | None:
        """Return the first filter that removes the piece."""
        if piece.document.ids is not None and len(piece.document.ids):
            return None
        violated = quality.first_violated(piece.text, self._always_on)
        if violated is None and piece.is_broken:
            return self._optional[BROKEN]
        return violated or quality.first_violated(piece.text, self._optional.values())

    @cached_property
    def _always_on(self) -> list[Filter]:
        return quality.always_on(self.data.clean)

    @cached_property
    def _optional(self) -> dict[str, Filter]:
        active = quality.active_filters(self.data.filters)
        return {filter.rule.reason: filter for filter in active}

    def decontaminated(self, pieces: list[Piece], part: PartWriter) -> list[Piece]:
        """Return the pieces with what was found in them, and without it where it is to be cut."""
        if self.decontaminator is None:
            return pieces
        overlaps = self.decontaminator.overlaps([piece.text for piece in pieces])
        part.add_matches([overlap.texts for overlap in overlaps])
        marked: list[Piece] = []
        for piece, overlap in zip(pieces, overlaps):
            if overlap.words:
                match = self.decontaminator.explain(piece.text)
                piece = piece._replace(match_words=overlap.words, match=match)
                if self.data.decontaminate.action == "cut":
                    piece = self._cut(piece, self.decontaminator)
            marked.append(piece)
        return marked

    def _cut(self, piece: Piece, search: Decontaminator) -> Piece:
        """Return a piece without the tasks' text; as it is, so that it is dropped, where filters refuse the rest."""
        text = search.cut(piece.text)
        data = text.encode()
        numbers = content_numbers(data, self.data.seed)
        cut = piece._replace(
            text=text,
            size_bytes=len(data),
            key=numbers[0],
            split_number=numbers[1],
            cut_bytes=piece.size_bytes - len(data),
        )
        if self._violated(cut) or search.overlaps([text])[0].words:
            return piece
        return cut

    def count_stripped(self, pieces: list[Piece], stage: Stage) -> None:
        """Count the characters that the tokenizer makes the same as others by taking their accents."""
        if not strips_accents(self.tokenizer):
            return
        not_ascii = "".join("".join(NOT_ASCII.findall(piece.text)) for piece in pieces)
        codes, counts = np.unique(
            np.frombuffer(not_ascii.encode("utf-32-le"), dtype=np.uint32), return_counts=True
        )
        characters = dict(zip(map(chr, codes.tolist()), counts.tolist()))
        stripped = stripped_characters(self.tokenizer, characters)
        stage.merge(Stage(notes={STRIPPED: stripped}))

    def write_tokens(self, pieces: list[Piece], part: PartWriter) -> None:
        """Write the pieces as tokens, with [CLS] and [SEP] around each."""
        encoded = self._encode(piece.text for piece in pieces if piece.document.ids is None)
        for piece in pieces:
            document, text = piece.document, piece.text
            ids = document.ids
            if ids is None:
                ids = next(encoded)
            tokens = np.empty(len(ids) + 2, dtype=self.dtype)
            tokens[0], tokens[1:-1], tokens[-1] = self.special_ids.cls, ids, self.special_ids.sep
            shown = excerpt(text)
            if piece.match:
                shown = piece.match
            place = (document.number, document.part, piece.piece, piece.pieces)
            measures = (piece.key, piece.split_number, piece.size_bytes, *measured(text))
            marks = (piece.match_words, piece.cut_bytes)
            part.add_document(
                document.origin, document.source, place, measures, marks, shown, tokens
            )

    @cached_property
    def _encode(self) -> TextEncoder:
        return text_encoder(self.tokenizer, self.dtype)


def _explain(piece: Piece, filter: Filter) -> str:
    """Return what is shown of a piece that a filter removes."""
    violation = filter.judge(Text(piece.text))
    text = piece.text
    if filter.rule.reason == BROKEN and piece.is_broken:
        text = piece.document.text
        violation = filter.judge(Text(text))
    assert violation, f"{filter.setting} does not remove this text"
    return violation.explain(text, filter.setting).translate(_VISIBLE)


def drop_damaged(documents: list[Document], part: PartWriter, seed: int) -> list[Document]:
    """Return the documents that could be read; count all."""
    stage, readable = part.stats["source"], list[Document]()
    for document in documents:
        is_new = document.part == 0
        part.begun[document.origin] += is_new
        if document.lost:
            stage.merge(Stage(notes={TEMPLATES_LOST: dict(document.lost)}))
        if document.damage is None:
            size = text_bytes(document.text)
            stage.count_in(is_new, size)
            stage.count_out(is_new, size)
            readable.append(document)
            continue
        reason, size = document.damage
        stage.count_in(is_new, size)
        data = document.text.encode(errors="surrogateescape")
        key = content_numbers(data, seed)[0]
        shown = excerpt(document.text, matches(ESCAPED_BYTE, document.text))
        label = label_of(document.part, 0, 1)
        example = Example(key, document.origin, document.number, label, shown)
        stage.drop(reason, is_new, size, [example])
    return readable
