"""A start from the run's own text: word vectors counted from neighbouring tokens (`start=cooccurrence`).

Counting is part of training: it reads the training split only, on the budget's clock. Positive pointwise mutual
information and a truncated singular value decomposition give what a skip-gram model learns with many passes (Levy &
Goldberg 2014; Levy, Goldberg & Dagan 2015, section 3). Ten million tokens take half a minute on two cores.
Shapes: V vocabulary, D width of the vectors, N tokens.
"""

from collections.abc import Iterator

import numpy as np
import torch
from scipy import sparse
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from cramming.checks import Config, CooccurrenceStart
from cramming.data.corpus import Corpus, TokenStream
from cramming.engine import Engine
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.parallel.offload import HostOptimizer

CHUNK = 1 << 22  # tokens counted at a time: bounds the memory for sorting pairs
SMOOTHING = 0.75  # power of the neighbours' frequencies: rare neighbours say less than their counts
EIGENVALUE_POWER = 0.25
ITERATIONS = 2  # of the randomised decomposition's power iteration (Halko et al. 2011, section 4.5)


def start_engine_from_text(engine: Engine, corpus: Corpus, config: Config, start: CooccurrenceStart) -> None:
    """Weights counted from the corpus; all processes get those of the first."""
    model, given = engine.whole_model(config), (corpus.stream("train"), tuple(corpus.special_ids), start, config.seed)
    if isinstance(model, PretrainedModel):  # rank 0's
        start_from_text(model, *given)
    if engine.spread:
        engine.spread.load_weights(model.state_dict() if model else {})
    if isinstance(engine.optimizer, HostOptimizer):
        engine.optimizer.take_weights()


def start_from_text(
    model: PretrainedModel, stream: TokenStream, special_ids: tuple[int, ...], config: CooccurrenceStart, seed: int
) -> None:
    """Set the token embeddings, and an untied decoder with its bias, from the text.

    Entries that never occur beside another, special tokens among them, keep their random vectors, scaled to the same
    size, as are token types.
    """
    embeddings = model.encoder.embeddings
    vocab_size, width = embeddings.tokens.weight.shape
    pairs = count_pairs(stream, vocab_size, special_ids, config.window, config.max_tokens)
    vectors_VD, known_V = (torch.from_numpy(a) for a in word_vectors(pairs, width, seed))
    with torch.no_grad():
        _fill(embeddings.tokens.weight, vectors_VD, known_V, config.embedding_std)
        if embeddings.token_types is not None:
            _resize(embeddings.token_types.weight, config.embedding_std)
        if isinstance(model, MaskedLM) and model.decoder_weight is not None:
            _fill(model.decoder_weight, vectors_VD, known_V, config.decoder_std)
            if model.decoder_bias is not None:
                counts_V = torch.from_numpy(pairs.sum(axis=1)).clamp(min=1.0)
                model.decoder_bias.copy_((counts_V / counts_V.sum()).log())  # the best guess without context


def _fill(weight_VD: Tensor, vectors_VD: Tensor, known_V: Tensor, std: float) -> None:
    _resize(weight_VD, std)
    weight_VD[known_V] = (std * vectors_VD[known_V]).to(weight_VD)


def _resize(weight: Tensor, std: float) -> None:
    """Bring the root mean square of the entries to `std`."""
    weight.mul_(std / weight.square().mean().sqrt())


def count_pairs(
    stream: TokenStream, vocab_size: int, special_ids: tuple[int, ...], window: int, max_tokens: int
) -> sparse.csr_array:
    """Symmetric counts [V, V] of tokens at most `window` apart; a pair at distance d counts (window + 1 - d) / window.

    Pairs with a special token do not count. At most `max_tokens` tokens are read, evenly from the whole stream.
    """
    special_V = np.zeros(vocab_size, dtype=bool)
    special_V[list(special_ids)] = True
    pairs = sparse.csr_array((vocab_size, vocab_size), dtype=np.float32)
    for ids_N in _chunks(stream, max_tokens):
        regular_N = ~special_V[ids_N]
        for distance in range(1, window + 1):
            both_N = regular_N[:-distance] & regular_N[distance:]
            keys_N = (ids_N[:-distance] * vocab_size + ids_N[distance:])[both_N]
            found, counts = np.unique(keys_N, return_counts=True)
            rows, columns = np.divmod(found, vocab_size)
            weights = counts.astype(np.float32) * ((window + 1 - distance) / window)
            pairs = pairs + sparse.csr_array((weights, (rows, columns)), shape=pairs.shape)
    return sparse.csr_array(pairs + pairs.T)


def _chunks(stream: TokenStream, max_tokens: int) -> Iterator[np.ndarray]:
    """Stretches of the stream, evenly spread where not all of it is wanted."""
    wanted = min(max_tokens, stream.num_tokens)
    count = -(-wanted // CHUNK)
    length = wanted // count
    for i in range(count):
        yield stream.gather(np.array([i * stream.num_tokens // count]), length)[0]


def word_vectors(pairs: sparse.csr_array, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors fp32 [V, D] of mean square 1, and which entries have one (bool [V]); the others are zero.

    Positive pointwise mutual information, factorised; the mean of all vectors is taken off (Mu & Viswanath 2018), so
    that unrelated words are at right angles, and every vector is given the same length.
    """
    totals_V = pairs.sum(axis=1)
    smooth_V = totals_V**SMOOTHING
    neighbour_V = np.maximum(smooth_V / max(smooth_V.sum(), 1e-30), 1e-30)
    rows = np.repeat(np.arange(pairs.shape[0]), np.diff(pairs.indptr))
    information = np.log(pairs.data / (totals_V[rows] * neighbour_V[pairs.indices]))
    keep = information > 0
    positive = sparse.csr_array((information[keep], (rows[keep], pairs.indices[keep])), shape=pairs.shape)
    vectors_VD = _decompose(positive, width, seed)
    known_V = np.linalg.norm(vectors_VD, axis=1) > 1e-6
    if known_V.any():
        vectors_VD = vectors_VD - vectors_VD[known_V].mean(axis=0)
        vectors_VD *= width**0.5 / np.maximum(np.linalg.norm(vectors_VD, axis=1, keepdims=True), 1e-12)
    return (vectors_VD * known_V[:, None]).astype(np.float32), known_V


def _decompose(matrix: sparse.csr_array, width: int, seed: int) -> np.ndarray:
    """U S^p of the leading `width` singular values, [V, D]; where the matrix has fewer, the other columns are zero."""
    rank = min(width, matrix.shape[0])
    # Any integer seeds a run (negative, 64 bits), but scikit-learn takes [0, 2^32) only.
    left_VR, values_R, _ = randomized_svd(matrix, rank, n_iter=ITERATIONS, random_state=seed % 2**32)
    return np.pad(left_VR * values_R**EIGENVALUE_POWER, ((0, 0), (0, width - rank)))
