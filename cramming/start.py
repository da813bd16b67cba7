"""Embedding initialisation from the run's text: word vectors from co-occurrence counts (`start=cooccurrence`).

Counting is part of training: it reads the training split only, on the budget's clock. Positive pointwise mutual
information and a truncated singular value decomposition give vectors like those that a skip-gram model learns in many
passes (Levy & Goldberg 2014; Levy, Goldberg & Dagan 2015, section 3). With ten million tokens, 32,768 entries and a
width of 448 it takes half a minute of one core. Shapes: V vocabulary, D width of the vectors, R excerpts of L tokens.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from cramming.data.corpus import Corpus, TokenStream
from cramming.engine import Engine
from cramming.model.heads import MaskedLM, PretrainedModel
from cramming.precision import float32_products
from cramming.recipe import Config, CooccurrenceStart

CHUNK = 1 << 22  # tokens counted at a time: bounds the memory for sorting pairs
# A text that is not read whole is sampled in this many excerpts, fewer if they would be shorter than EXCERPT_TOKENS.
EXCERPTS, EXCERPT_TOKENS = 64, 1024
SMOOTHING = 0.75  # power of the neighbours' frequencies, which lowers the weight of rare neighbours
EIGENVALUE_POWER = 0.25
ITERATIONS = (
    2  # power iterations of the randomised decomposition (Halko et al. 2011, algorithm 4.4)
)
OVERSAMPLES = 10  # columns of its basis beyond the wanted ones


def start_engine_from_text(
    engine: Engine, corpus: Corpus, config: Config, start: CooccurrenceStart
) -> None:
    """Set the embeddings of the engine's model from the corpus; rank 0 computes them for all processes."""
    model, special_ids = engine.whole_model(config), tuple(corpus.special_ids)
    if isinstance(model, PretrainedModel):  # on rank 0 alone
        start_from_text(
            model, corpus.stream("train"), special_ids, start, config.training_seed, engine.device
        )
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(engine.device)  # the record's peak is that of training
    if engine.strategy:
        engine.strategy.load_weights(model.state_dict() if model else {})


def start_from_text(
    model: PretrainedModel,
    stream: TokenStream,
    special_ids: tuple[int, ...],
    config: CooccurrenceStart,
    seed: int,
    device: torch.device,
) -> None:
    """Set the token embeddings, and an untied decoder with its bias, from the text; `device` factorises.

    Entries that never occur beside another, special tokens among them, keep their random vectors, scaled to the same
    size, as are token types.
    """
    embeddings = model.encoder.embeddings
    vocab_size, width = embeddings.tokens.weight.shape
    pairs = count_pairs(stream, vocab_size, special_ids, config.window, config.max_tokens)
    vectors_VD, known_V = word_vectors(pairs, width, seed, device)
    vectors_VD = vectors_VD.to(embeddings.tokens.weight.device)
    known_V = known_V.to(embeddings.tokens.weight.device)
    with torch.no_grad():
        _fill(embeddings.tokens.weight, vectors_VD, known_V, config.embedding_std)
        if embeddings.token_types is not None:
            _resize(embeddings.token_types.weight, config.embedding_std)
        if isinstance(model, MaskedLM) and model.decoder_weight is not None:
            _fill(model.decoder_weight, vectors_VD, known_V, config.decoder_std)
            if model.decoder_bias is not None:
                counts_V = torch.from_numpy(pairs.sum(axis=1)).clamp(min=1.0)
                # log frequencies, the best prediction without context
                model.decoder_bias.copy_((counts_V / counts_V.sum()).log())


def _fill(weight_VD: Tensor, vectors_VD: Tensor, known_V: Tensor, std: float) -> None:
    _resize(weight_VD, std)
    weight_VD[known_V] = (std * vectors_VD[known_V]).to(weight_VD)


def _resize(weight: Tensor, std: float) -> None:
    """Scale the entries to the root mean square `std`."""
    weight.mul_(std / weight.square().mean().sqrt())


def count_pairs(
    stream: TokenStream, vocab_size: int, special_ids: tuple[int, ...], window: int, max_tokens: int
) -> sparse.csr_array:
    """Return symmetric counts [V, V] of tokens at most `window` apart.

    A pair at distance d counts (window + 1 - d) / window. Pairs with a special token do not count. At most
    `max_tokens` tokens are read, evenly from the whole stream.
    """
    special_V = np.zeros(vocab_size, dtype=bool)
    special_V[list(special_ids)] = True
    pairs = sparse.csr_array((vocab_size, vocab_size), dtype=np.float32)
    for ids_RL in _excerpts(stream, max_tokens):
        regular_RL = ~special_V[ids_RL]
        for distance in range(1, window + 1):
            both_RL = regular_RL[:, :-distance] & regular_RL[:, distance:]
            keys_N = (ids_RL[:, :-distance] * vocab_size + ids_RL[:, distance:])[both_RL]
            pair_keys, counts = np.unique(keys_N, return_counts=True)
            rows, columns = np.divmod(pair_keys, vocab_size)
            weights = counts.astype(np.float32) * ((window + 1 - distance) / window)
            pairs = pairs + sparse.csr_array((weights, (rows, columns)), shape=pairs.shape)
    return sparse.csr_array(pairs + pairs.T)


def _excerpts(stream: TokenStream, max_tokens: int) -> Iterator[np.ndarray]:
    """Yield excerpts of the stream [R, L], about CHUNK tokens at a time.

    They are evenly spread if the stream is not read whole.
    """
    wanted = min(max_tokens, stream.num_tokens)
    count = -(-wanted // CHUNK)
    if wanted < stream.num_tokens:
        count = max(count, min(EXCERPTS, wanted // EXCERPT_TOKENS))
    length = wanted // count
    begins = np.arange(count) * stream.num_tokens // count
    rows = max(1, CHUNK // max(1, length))
    for i in range(0, count, rows):
        yield stream.gather(begins[i : i + rows], length)


def word_vectors(
    pairs: sparse.csr_array, width: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return vectors fp32 [V, D] of mean square 1, and which entries have one, bool [V]; the other vectors are zero.

    Both are on `device`, which factorises the positive pointwise mutual information. The mean of all vectors is
    subtracted (Mu & Viswanath 2018), so that unrelated words are orthogonal, and every vector is scaled to the same
    length.
    """
    totals_V = pairs.sum(axis=1)
    smooth_V = totals_V**SMOOTHING
    neighbour_V = np.maximum(smooth_V / max(smooth_V.sum(), 1e-30), 1e-30)
    rows = np.repeat(np.arange(pairs.shape[0]), np.diff(pairs.indptr))
    information = np.log(pairs.data / (totals_V[rows] * neighbour_V[pairs.indices]))
    is_positive = information > 0
    positive = sparse.csr_array(
        (information[is_positive], (rows[is_positive], pairs.indices[is_positive])),
        shape=pairs.shape,
    )
    known_V = torch.from_numpy(np.diff(positive.indptr) > 0).to(device)
    with float32_products(tf32=False):
        vectors_VD = _decompose(positive, width, seed, device)
    if known_V.any():
        vectors_VD -= vectors_VD[known_V].mean(0)
        vectors_VD *= width**0.5 / vectors_VD.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return vectors_VD * known_V[:, None], known_V


def _decompose(matrix: sparse.csr_array, width: int, seed: int, device: torch.device) -> Tensor:
    """Return U S^p of the leading `width` singular values, [V, D]; missing columns of a smaller matrix are zero.

    The range is determined from random vectors (Halko et al. 2011, algorithms 4.4 and 5.1). The result is bitwise
    reproducible on a CPU with as many threads; on a GPU sparse products may add in another order each time.
    """
    size = matrix.shape[0]
    rank = min(width, size)
    rows, columns = _to_device(device, matrix), _to_device(device, matrix.T)
    generator = torch.Generator().manual_seed(seed)
    basis_VR = torch.randn(size, min(rank + OVERSAMPLES, size), generator=generator).to(device)
    for _ in range(ITERATIONS):
        basis_VR = _orthonormal(columns @ _orthonormal(rows @ basis_VR))
    basis_VR = _orthonormal(rows @ basis_VR)
    _, values_R, right_RR = torch.linalg.svd(torch.linalg.qr(columns @ basis_VR, mode="r").R)
    vectors_VR = basis_VR @ right_RR.T * values_R**EIGENVALUE_POWER
    largest_1R = vectors_VR.abs().argmax(0, keepdim=True)
    # The signs of singular vectors are arbitrary and depend on the device: make the largest entry positive.
    vectors_VR *= vectors_VR.gather(0, largest_1R).sign()
    return nn.functional.pad(vectors_VR[:, :rank], (0, width - rank))


def _orthonormal(vectors_VR: Tensor) -> Tensor:
    return torch.linalg.qr(vectors_VR).Q


def _to_device(device: torch.device, matrix: sparse.sparray) -> Tensor:
    """Return a sparse matrix as a tensor on `device`."""
    rows = sparse.csr_array(matrix)
    begins = torch.from_numpy(rows.indptr)
    columns = torch.from_numpy(rows.indices)
    values = torch.from_numpy(rows.data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        tensor = torch.sparse_csr_tensor(
            begins, columns, values, rows.shape, check_invariants=False
        )
    return tensor.to(device)
