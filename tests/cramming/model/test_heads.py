"""The chunked loss is the plain loss; the heads see sequences, not rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cramming.model import heads
from cramming.model.attention import Packing
from cramming.model.classifier import SequenceClassifier
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.heads import MaskedLM, linear_cross_entropy
from cramming.model.init import INITS, initialize

CONFIG = ModelConfig(
    vocab_size=60, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_length=48
)
RAGGED = Packing(torch.tensor([0, 7, 7, 20, 48, 48], dtype=torch.int32), None, 28)
POSITIONS = torch.cat([torch.arange(n) for n in (7, 13, 28)])


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 7, 1000])
def test_chunked_loss_and_gradients_are_the_plain_ones(rows: int, with_bias: bool) -> None:
    inputs = [torch.randn(21, 16), torch.randn(60, 16), torch.randn(60)]
    targets = torch.randint(0, 60, (21,))
    targets[::4] = -100
    results = []
    for function in (plain, lambda *a: linear_cross_entropy(*a, torch.float32, rows * 60)):
        hidden, weight, bias = leaves = [x.clone().requires_grad_() for x in inputs]
        loss, correct, *_ = function(hidden, weight, bias if with_bias else None, targets)
        (loss * 0.37).backward()
        results.append([loss.detach(), correct] + [x.grad for x in leaves[: 3 if with_bias else 2]])
    for expected, actual in zip(*results):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [5, 1000])
def test_capped_loss_and_gradients_are_the_plain_ones(rows: int) -> None:
    """Also without gradients; a target of -100 has none."""
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((21, 16), (60, 16), (60,))]
    targets = torch.randint(-1, 60, (21,))
    capped = 3 * torch.tanh(F.linear(*leaves) / 3)
    expected = F.cross_entropy(capped, targets, ignore_index=-1, reduction="sum")
    hits = int((capped.argmax(-1) == targets).sum())
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            loss, actual, each = linear_cross_entropy(
                *leaves, targets, torch.float32, rows * 60, softcap=3.0
            )
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            each, F.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
        )
        assert int(actual) == hits
    for mine, plainly in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(mine, plainly, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_stay_near_fp32(dtype: torch.dtype) -> None:
    inputs = [torch.randn(40, 16), torch.randn(60, 16) * 0.3, torch.randn(60)]
    targets = torch.randint(0, 60, (40,))
    results = []
    for kind in (torch.float32, dtype):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss, *_ = linear_cross_entropy(*leaves, targets, kind)
        loss.backward()
        assert loss.dtype == torch.float32
        results.append([loss.detach(), *(x.grad for x in leaves)])
    for expected, actual in zip(*results):
        assert (actual - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("size", [3.0, 30.0])
@pytest.mark.parametrize("elements", [heads.CHUNK_ELEMENTS["cuda"], 60 * 500])
def test_a_frequent_target_does_not_overflow_fp16(
    share: float, size: float, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets in one chunk, as on a GPU: the weight's gradient is a sum over all that have that target. Or in three."""
    monkeypatch.setitem(heads.CHUNK_ELEMENTS, "cpu", elements)
    targets = torch.randint(0, 60, (1200,))
    targets[torch.rand(1200) < share] = 7
    hidden = torch.randn(1200, 8)
    hidden[:, 0] = size
    inputs = [hidden, torch.randn(60, 8) * 0.03]
    results = []
    for kind in (torch.float32, torch.float16):
        leaves = [x.clone().requires_grad_() for x in inputs]
        linear_cross_entropy(leaves[0], leaves[1], None, targets, kind)[0].backward()
        results.append([x.grad for x in leaves])
    for expected, actual in zip(*results, strict=True):
        assert actual.isfinite().all()
        assert (actual - expected).norm() < 0.02 * expected.norm()


def test_no_gradient_is_made_when_none_is_wanted() -> None:
    """Validation has parameters, which need gradients: the products for these are two thirds of the head."""
    inputs = [
        torch.randn(4, 8),
        torch.randn(9, 8, requires_grad=True),
        torch.randn(9, requires_grad=True),
    ]
    products = []
    for guard in (torch.enable_grad, torch.no_grad):
        with guard(), FlopCounterMode(display=False) as counter:
            loss, hits, _ = linear_cross_entropy(*inputs, torch.arange(4), torch.float32)
        products.append((counter.get_total_flops(), loss.item(), int(hits), loss.requires_grad))
    num_values = 2 * 4 * 8 * 9
    assert products == [
        (3 * num_values, *products[1][1:3], True),
        (num_values, *products[0][1:3], False),
    ]


def test_hits_are_targets_whose_logit_is_the_largest() -> None:
    """Hits are those of `argmax`, except that all largest logits of a tie are hits."""
    hidden, weight = torch.randn(50, 8), torch.randn(30, 8)
    targets = torch.cat([(hidden[:20] @ weight.T).argmax(-1), torch.randint(0, 30, (30,))])
    targets[::7] = -100
    _, hits, _ = linear_cross_entropy(hidden, weight, None, targets, torch.float32)
    assert int(hits) == int(plain(hidden, weight, None, targets)[1]) > 0
    twice = torch.cat([weight, weight])
    for shift in (0, 30):
        _, tied, _ = linear_cross_entropy(
            hidden, twice, None, targets + shift * (targets >= 0), torch.float32
        )
        assert tied == hits
    _, undefined, _ = linear_cross_entropy(hidden * torch.nan, weight, None, targets, torch.float32)
    assert int(undefined) == 0


def test_a_large_card_has_fewer_and_larger_chunks() -> None:
    """At 2^18 tokens, a quarter of them targets, and a vocabulary of 32,768: 32 chunks in 2^26 elements, 8 in 2^28."""
    sizes = {
        gigabytes: heads.CHUNK_ELEMENTS[heads.cuda_chunks(gigabytes * 2**30)]
        for gigabytes in (11, 24, 39.4, 140)
    }
    assert sizes == {11: 2**26, 24: 2**26, 39.4: 2**28, 140: 2**28}


def test_very_unlikely_targets_have_a_finite_loss() -> None:
    hidden, weight = torch.tensor([[200.0]]), torch.tensor([[1.0], [-1.0]])
    loss, correct, _ = linear_cross_entropy(hidden, weight, None, torch.tensor([1]), torch.float32)
    assert (float(loss), int(correct)) == (400.0, 0)


@pytest.mark.parametrize("targets", [torch.full((4,), -100), torch.empty(0, dtype=torch.long)])
def test_without_targets_loss_and_gradient_are_zero(targets: Tensor) -> None:
    weight = torch.randn(9, 8, requires_grad=True)
    loss, hits, _ = linear_cross_entropy(
        torch.randn(len(targets), 8), weight, None, targets, torch.float32
    )
    loss.backward()
    assert weight.grad is not None
    assert (loss.item(), int(hits), weight.grad.abs().max().item()) == (0.0, 0, 0.0)


@pytest.mark.parametrize("tie", [True, False])
def test_masked_lm_loss_is_cross_entropy_of_its_logits(tie: bool) -> None:
    model = MaskedLM(replace(CONFIG, tie_embeddings=tie))
    ids, places = torch.randint(0, 60, (48,)), torch.tensor([3, 9, 9, 40, 0])
    targets = torch.tensor([5, 6, 7, 8, -100])
    loss, correct = model(ids, POSITIONS, RAGGED, places, targets)
    logits = model.logits(ids, POSITIONS, RAGGED, places)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="sum"))
    assert int(correct) == int((logits.argmax(-1) == targets).sum())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("last_window", "qk_norm", "late_layers", "kernel"),
    [
        (None, True, 1, "auto"),
        (6, False, 1, "auto"),
        (6, True, 3, "sdpa"),
        (6, False, 2, "products"),
    ],
)
def test_late_layers_at_the_targets_are_the_same_model(
    norm_order: str,
    documents: bool,
    last_window: int | None,
    qk_norm: bool,
    late_layers: int,
    kernel: str,
) -> None:
    config = replace(
        CONFIG, num_layers=4, late_layers=late_layers, positions="rope", norm_order=norm_order
    )
    config = replace(
        config, qk_norm=qk_norm, attention_bias=qk_norm, local_window=last_window, global_every=2
    )
    ids = torch.randint(0, 60, (48,))
    bounds = torch.tensor(
        [0, 5, 16, 32, 40, 48] if documents else [0, 16, 32, 48], dtype=torch.int32
    )
    packing = Packing(bounds, None if documents else 16, 16, 16)
    positions = torch.cat([torch.arange(n) for n in bounds.diff().tolist()])
    places = torch.tensor([0, 3, 15, 16, 17, 30, 33, 40, 47])
    results = []
    for last_layer in ("all", "targets"):
        torch.manual_seed(0)
        model = MaskedLM(config, kernel, last_layer)
        mlp_tokens: list[int] = []
        for block in model.encoder.blocks:
            block.mlp.register_forward_hook(
                lambda _, __, out, seen=mlp_tokens: seen.append(len(out))
            )
        loss, correct = model(ids, positions, packing, places, ids[places])
        loss.backward()
        late = 9 if last_layer == "targets" else 48
        assert mlp_tokens == [48] * (4 - late_layers) + [late] * late_layers
        results.append([loss, correct] + [p.grad for p in model.parameters() if p.grad is not None])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("positions", ["learned", "rope", "scaled_sinusoidal", "none"])
def test_packed_documents_equal_separate_ones(positions: str) -> None:
    config = replace(CONFIG, positions=positions, local_window=8, global_every=2)
    model, ids = MaskedLM(config).eval(), torch.randint(0, 60, (48,))
    together = model.encoder(ids, POSITIONS, RAGGED)
    for first, last in ((0, 7), (7, 20), (20, 48)):
        size = last - first
        alone = Packing(torch.tensor([0, size], dtype=torch.int32), size, size)
        torch.testing.assert_close(
            model.encoder(ids[first:last], torch.arange(size), alone),
            together[first:last],
            atol=1e-5,
            rtol=1e-4,
        )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize(("labels", "pooler_size"), [(1, None), (3, 12)])
def test_classifier_gives_one_row_per_sequence(
    pooling: str, labels: int, pooler_size: int | None
) -> None:
    model = SequenceClassifier(Encoder(CONFIG), labels, pooling, pooler_size).eval()  # type: ignore[arg-type]
    ids = torch.randint(0, 60, (48,))
    logits = model(ids, POSITIONS, RAGGED)
    assert logits.shape == (5, labels)
    hidden = model.encoder(ids, POSITIONS, RAGGED)
    for row, (first, last) in {0: (0, 7), 2: (7, 20), 3: (20, 48)}.items():
        pooled = hidden[first:last].mean(0) if pooling == "mean" else hidden[first]
        pooled = pooled if model.pooler is None else model.pooler(pooled).tanh()
        torch.testing.assert_close(logits[row], model.classifier(pooled))
    torch.testing.assert_close(logits[1], logits[4])  # the empty ones
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_pairs_are_the_means_of_both_texts_and_what_compares_them() -> None:
    model = SequenceClassifier(Encoder(CONFIG), 2, "pairs").eval()
    ids, types = torch.randint(0, 60, (48,)), (POSITIONS >= 4).long()
    types[20:] = 0  # one text
    hidden = model.encoder(ids, POSITIONS, RAGGED, types)
    logits = model(ids, POSITIONS, RAGGED, types)
    nothing = torch.zeros(hidden.shape[1])
    texts = {
        2: (hidden[7:11].mean(0), hidden[11:20].mean(0)),
        3: (hidden[20:].mean(0), nothing),
        4: (nothing, nothing),
    }
    for row, (first, second) in texts.items():
        compared = torch.cat([first, second, (first - second).abs(), first * second])
        torch.testing.assert_close(logits[row], model.classifier(compared))


def test_classifier_on_first_tokens_computes_the_last_block_for_them_alone() -> None:
    model = SequenceClassifier(Encoder(CONFIG), 2, "cls", 12).eval()
    ids, ragged = (
        torch.randint(0, 60, (48,)),
        Packing(torch.tensor([0, 7, 20, 48], dtype=torch.int32), None, 28),
    )
    seen: list[int] = []
    model.encoder.blocks[-1].mlp.register_forward_hook(
        lambda module, inputs, output: seen.append(len(output))
    )
    results = []
    alone = model(ids, POSITIONS, ragged)
    first = model.encoder(ids, POSITIONS, ragged)[ragged.bounds_S[:-1].long()]
    assert model.pooler is not None
    for logits in (alone, model.classifier(model.pooler(first).tanh())):
        model.zero_grad()
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert seen == [3, 48]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_classifier_leaves_the_encoder_as_it_was() -> None:
    encoder = Encoder(CONFIG)
    before = {name: p.clone() for name, p in encoder.named_parameters()}
    SequenceClassifier(encoder, 2)
    assert all(torch.equal(p, before[name]) for name, p in encoder.named_parameters())


def test_dropout_acts_in_training_only() -> None:
    model = SequenceClassifier(
        Encoder(replace(CONFIG, dropout=0.3, attention_dropout=0.3)), 2, dropout=0.3
    )
    ids = torch.randint(0, 60, (48,))
    run = [model(ids, POSITIONS, RAGGED) for _ in range(2)]
    assert not torch.equal(*run)
    run = [model.eval()(ids, POSITIONS, RAGGED) for _ in range(2)]
    assert torch.equal(*run)


@pytest.mark.parametrize("scheme", INITS)
def test_initialisation_covers_every_parameter_and_repeats(scheme: str) -> None:
    config = replace(
        CONFIG, init=scheme, qk_norm=True, positions="scaled_sinusoidal", tie_embeddings=False
    )  # type: ignore[arg-type]
    model = SequenceClassifier(Encoder(config), 2, pooler_size=8)
    for part in (model, MaskedLM(config)):
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.fill_(torch.nan)
        torch.manual_seed(3)
        initialize(part, config)
        first = [p.clone() for p in part.parameters()]
        assert all(p.isfinite().all() for p in first)
        torch.manual_seed(3)
        initialize(part, config)
        assert all(torch.equal(a, b) for a, b in zip(first, part.parameters()))


@pytest.mark.parametrize("attention_init", ["random", "mimetic"])
def test_blocks_may_begin_by_adding_nothing(attention_init: str) -> None:
    """But for mimetic attention: its output and values are one product."""
    config = replace(CONFIG, zero_residual=True, norm_order="pre", attention_init=attention_init)  # type: ignore[arg-type]
    model, plain = (MaskedLM(c) for c in (config, replace(config, zero_residual=False)))
    changed = {
        n
        for (n, a), b in zip(model.named_parameters(), plain.parameters())
        if not a.any() and b.any()
    }
    ends = (
        ("attn.out.weight", "mlp.down.weight")
        if attention_init == "random"
        else ("mlp.down.weight",)
    )
    assert changed == {f"encoder.blocks.{layer}.{end}" for layer in range(2) for end in ends}


def test_depth_scaled_shrinks_what_enters_the_residual_stream() -> None:
    config = replace(
        CONFIG, init="depth_scaled", num_layers=8, hidden_size=128, intermediate_size=256
    )
    block = MaskedLM(config).encoder.blocks[0]
    ratio = block.attn.out.weight.std() / block.attn.qkv.weight.std()
    assert float(ratio) == pytest.approx(16**-0.5, rel=0.05)


def test_mimetic_attention_attends_to_its_like_and_takes_it_off() -> None:
    """The product is identity and noise in the shares of the paper, as far as the rank of a head allows."""
    config = replace(CONFIG, hidden_size=64, num_heads=2, attention_init="mimetic")
    model = MaskedLM(config)
    for block in model.encoder.blocks:
        q, k, v = block.attn.qkv.weight.view(3, 64, 64)
        head = q[:32].T @ k[:32]
        assert torch.linalg.matrix_rank(head) == 32 and 0.35 < head.diagonal().mean() < 0.7
        assert (head - head.diagonal().diag()).std() < 0.2
        product = block.attn.out.weight @ v
        assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.03)
        assert (product - product.diagonal().diag()).std().item() == pytest.approx(0.4 / 8, rel=0.1)
    with torch.device("meta"):
        MaskedLM(config)  # a plan has no numbers


def test_unknown_parameters_are_not_left_uninitialised() -> None:
    with pytest.raises(AssertionError, match="no initialisation"):
        initialize(torch.nn.ParameterDict({"mystery": torch.nn.Parameter(torch.zeros(2))}), CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_compiled_loss(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 gives a compiled autograd function zero gradients if its forward adds to what it returns in place."""
    monkeypatch.setitem(
        heads.CHUNK_ELEMENTS, "cpu", 7 * 16
    )  # several chunks, the last one not full
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((20, 8), (16, 8), (16,))]
    targets, gradients = torch.randint(0, 16, (20,)), []

    def mean(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        loss, *_ = heads.linear_cross_entropy(hidden, weight, bias, targets, dtype)
        return loss / 20

    for function in (mean, torch.compile(mean, backend="aot_eager", fullgraph=True)):
        gradients.append(torch.autograd.grad(function(*inputs), inputs))
    assert all(gradient.abs().max() > 0 for gradient in gradients[1])
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        sums = heads._sums(*(x.to(dtype) for x in inputs), targets, None)
    assert [x._version for x in sums] == [0, 0, 0], "nothing was added in place"


@torch.no_grad()
def test_a_lone_token_type_is_that_of_both_texts_of_a_pair() -> None:
    """A pair's second text has type 1, whatever the model knows of types."""
    torch.manual_seed(0)
    model = SequenceClassifier(Encoder(replace(CONFIG, token_types=1)), 3).eval()
    ids = torch.randint(0, 60, (48,))
    logits = model(ids, POSITIONS, RAGGED, (POSITIONS > 3).long())
    assert torch.equal(logits, model(ids, POSITIONS, RAGGED, None))
