"""Fine-tuning: packed equals padded, the adapter equals the suite's encoder, the same seed the same bits; and it
learns.
"""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5EncoderModel,
)
from transformers.utils import logging

from cramming import progress
from cramming.config import UserError
from cramming.data.task_files import GLUE
from cramming.model import encoder
from cramming.model.attention import Packing
from cramming.model.classifier import SequenceClassifier
from cramming.model.config import ModelConfig
from cramming.model.encoder import Encoder
from cramming.model.export import save_pretrained
from cramming.model.heads import MaskedLM
from cramming.precision import Mode
from eval.finetune import loop as finetuning
from eval.finetune.config import Hyperparameters, Init
from eval.finetune.encode import Encoded, EncodedTask, encode_task, encode_tasks, load_encoder
from eval.finetune.loop import (
    PackedSplit,
    Predictions,
    TaskRun,
    by_length,
    finetune,
    shrink_vocabulary,
)
from eval.finetune.models import StockEncoder, _pretrained_state, build_classifier, open_model
from eval.finetune.workers import run_all
from eval.tasks.datasets import Split, TaskData

WORDS = [f"w{i}" for i in range(40)]
BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
SHAPE = {"vocab_size": 45, "num_attention_heads": 2, **BERT}
HYPER = Hyperparameters(
    epochs=3,
    batch_size=16,
    learning_rate=3e-3,
    schedule="linear",
    warmup=0.1,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.98,
    eps=1e-6,
    max_grad_norm=1.0,
    dropout=0.1,
    attention_dropout=0.0,
    pooling="mean",
    pooler=True,
    max_length=16,
)
FIRST_TOKEN = HYPER.replace(pooling="cls")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, write_bert: Callable[..., Path]) -> Path:
    """A tiny stock BERT folder."""
    return write_bert(tmp_path_factory.mktemp("bert"), 40, **BERT, initializer_range=0.1)


def make_data(name: str, examples: int, seed: int = 0) -> TaskData:
    """Random words; the label says whether the first text begins with (regression: how much of it is) late words."""
    task, random = GLUE[name], np.random.default_rng(seed)

    def split(source: object, size: int) -> Split:
        lengths = random.integers(1, 9, (len(task.text), size))
        texts = [
            [[int(w) for w in random.integers(0, 40, n)] for n in column] for column in lengths
        ]
        if task.regression:
            labels = np.array([np.mean([w >= 20 for w in t]) * 5 for t in texts[0]], np.float32)
        else:
            labels = np.array([int(t[0] >= 20) for t in texts[0]])
        columns = tuple([" ".join(WORDS[w] for w in t) for t in column] for column in texts)
        return Split(source, columns, labels)  # type: ignore[arg-type]

    return TaskData(task, split(task.train, examples), tuple(split(s, 100) for s in task.scored))


def encode(folder: Path, data: TaskData, max_length: int = 16) -> EncodedTask:
    return encode_task(data, load_encoder(folder, True, max_length, 45))


def run(
    folder: Path, name: str, seed: int = 0, hyper: Hyperparameters = HYPER, examples: int = 300
) -> Predictions:
    data = encode(folder, make_data(name, examples))
    return finetune(
        TaskRun(GLUE[name], seed, "pretrained", data, open_model(folder), hyper, "fp32", "cpu")
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logits(model: SequenceClassifier, split: PackedSplit, chosen: list[int]) -> torch.Tensor:
    batch = split.batch(torch.tensor(chosen))
    with torch.no_grad():
        return model(batch.ids_T, batch.positions_T, batch.packing, batch.types_T)


def classifier(folder: Path, stock: bool = False) -> SequenceClassifier:
    source = replace(open_model(folder), is_native=not stock)
    torch.manual_seed(0)
    return build_classifier(source, "pretrained", 2, FIRST_TOKEN).eval()


@pytest.mark.parametrize("stock", [False, True])
def test_packed_batch_equals_single_examples(bert: Path, stock: bool) -> None:
    model = classifier(bert, stock)
    split = PackedSplit(encode(bert, make_data("rte", 30)).train, CPU)
    together = logits(model, split, list(range(20)))
    alone = torch.cat([logits(model, split, [i]) for i in range(20)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert together.std(0).min() > 1e-3


def test_a_batch_is_the_chosen_examples_end_to_end_and_asks_the_device_for_nothing(
    bert: Path,
) -> None:
    """The device `meta` has shapes but no values: reading one from it would raise."""
    data, chosen = encode(bert, make_data("stsb", 30)).train, [7, 3, 29, 0]
    here, on_meta = (PackedSplit(data, torch.device(kind)) for kind in ("cpu", "meta"))
    assert on_meta.ids_T.is_meta and on_meta.starts_N.is_meta and not on_meta.lengths_N.is_meta
    batch, shapes = (split.batch(torch.tensor(chosen)) for split in (here, on_meta))
    parts = [slice(data.starts_N[i], data.starts_N[i + 1]) for i in chosen]
    lengths = [part.stop - part.start for part in parts]
    assert batch.ids_T.tolist() == np.concatenate([data.ids_T[part] for part in parts]).tolist()
    assert batch.types_T.tolist() == np.concatenate([data.types_T[part] for part in parts]).tolist()
    assert batch.positions_T.tolist() == [place for length in lengths for place in range(length)]
    assert batch.packing == Packing(
        batch.packing.bounds_S, None, max(lengths), lengths=tuple(lengths)
    )
    assert batch.packing.bounds_S.tolist() == [0, *itertools.accumulate(lengths)]
    assert batch.labels_S is not None and data.labels_N is not None and shapes.labels_S is not None
    assert batch.labels_S.tolist() == data.labels_N[chosen].tolist()
    for actual, shape in ((batch.ids_T, shapes.ids_T), (batch.labels_S, shapes.labels_S)):
        assert shape.is_meta and (shape.shape, shape.dtype) == (actual.shape, actual.dtype)


@pytest.mark.parametrize("pooling", ["mean", "cls", "pairs"])
def test_no_layer_of_a_classifier_asks_the_device_for_anything(
    bert: Path, monkeypatch: pytest.MonkeyPatch, pooling: Any
) -> None:
    """With dropout of attention, for which sequences are padded in groups."""
    monkeypatch.setattr(encoder, "compute_dtype", lambda like: like.dtype)  # meta has no autocast
    split = PackedSplit(encode(bert, make_data("rte", 30)).train, torch.device("meta"))
    hyper = HYPER.replace(pooling=pooling, attention_dropout=0.1)
    model = build_classifier(open_model(bert), "pretrained", 2, hyper).to("meta").train()
    batch = split.batch(torch.tensor([7, 3, 29, 0]))
    logits = model(batch.ids_T, batch.positions_T, batch.packing, batch.types_T)
    assert logits.is_meta and logits.shape == (4, 2)


def test_adapter_equals_the_suites_encoder(bert: Path) -> None:
    native, stock = classifier(bert), classifier(bert, stock=True)
    assert isinstance(stock.encoder, StockEncoder)
    for part in ("pooler", "classifier"):
        getattr(stock, part).load_state_dict(getattr(native, part).state_dict())
    split = PackedSplit(encode(bert, make_data("rte", 30)).train, CPU)
    torch.testing.assert_close(
        logits(native, split, list(range(30))),
        logits(stock, split, list(range(30))),
        atol=1e-5,
        rtol=0,
    )


def test_encoding_is_shown_before_the_first_example_is_trained(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    encode_tasks([make_data("rte", 30), make_data("cola", 20)], open_model(bert), 16, {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("encode: ") and lines[0].endswith(", rte")
    assert lines[-1].startswith("encode: 250 examples of 250 examples (100%)") and lines[
        -1
    ].endswith(", cola")


def test_what_a_mac_leaves_in_every_folder_belongs_to_no_model(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "model")
    (tmp_path / "model" / ".DS_Store").write_bytes(b"")
    assert open_model(tmp_path / "model").files == open_model(bert).files


def as_torch_wrote(folder: Path) -> None:
    """The folder's weights in the file that transformers wrote before safetensors."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_shards(folder: Path) -> None:
    BertModel.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    (folder / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize("form", [lambda folder: None, as_torch_wrote, in_shards])
def test_a_pretrained_pooler_is_where_fine_tuning_starts(
    bert: Path, tmp_path: Path, form: Callable[[Path], None]
) -> None:
    shutil.copytree(bert, tmp_path, dirs_exist_ok=True)
    model = BertModel(BertConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    form(tmp_path)
    assert open_model(tmp_path).is_native == (form is not in_shards)
    expected: list[tuple[Init, bool]] = [("pretrained", True), ("random", False)]
    for init, equal in expected:
        loaded = build_classifier(open_model(tmp_path), init, 2, FIRST_TOKEN).pooler
        assert loaded is not None and torch.equal(loaded.weight, model.pooler.dense.weight) == equal
    assert build_classifier(open_model(bert), "pretrained", 2, FIRST_TOKEN).pooler is not None


def test_the_training_loss_is_the_mean_over_all_examples(bert: Path) -> None:
    """With 17 examples in batches of 16 the last one has no more weight than any other.

    With a learning rate of 0 all losses are those of one model.
    """
    still = HYPER.replace(learning_rate=1e-30, dropout=0.0, epochs=1)
    whole = run(bert, "stsb", hyper=still.replace(batch_size=17), examples=17).train_loss
    assert run(bert, "stsb", hyper=still, examples=17).train_loss == pytest.approx(whole, rel=1e-5)


def test_the_same_seed_gives_the_same_bits(bert: Path) -> None:
    _pretrained_state.cache_clear()  # the first run of a process reads the weights, the others do not
    first, repeated, other = (run(bert, "stsb", seed, examples=64) for seed in (0, 0, 1))
    assert (
        np.array_equal(first.scored["stsb"], repeated.scored["stsb"])
        and first.train_loss == repeated.train_loss
    )
    assert not np.array_equal(first.scored["stsb"], other.scored["stsb"])


@pytest.mark.parametrize(("mode", "during"), [("fp32", "highest"), ("bf16", "high")])
def test_fp32_is_without_tf32_and_the_setting_does_not_outlive_the_run(
    bert: Path, mode: Mode, during: str
) -> None:
    data, hyper, source = (
        encode(bert, make_data("sst2", 4)),
        HYPER.replace(epochs=1),
        open_model(bert),
    )
    task_run = TaskRun(GLUE["sst2"], 0, "pretrained", data, source, hyper, mode, "cpu")
    seen: set[str] = set()
    for before in ("high", "highest"):
        torch.set_float32_matmul_precision(before)
        list(run_all([task_run], 1, lambda count: seen.add(torch.get_float32_matmul_precision())))
        assert seen == {during} and torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_training_with_a_part_of_the_vocabulary_changes_no_bit(
    bert: Path, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data("stsb", 64)
    rare = [" ".join(w for w in text.split() if w < "w2") or "w1" for text in data.train.texts[0]]
    data = replace(
        data, train=replace(data.train, texts=(rare, rare))
    )  # the dev set has words that training lacks
    hyper = HYPER.replace(weight_decay=0.0, max_grad_norm=None)

    def predictions() -> np.ndarray:
        encoded = encode(bert, data)
        return finetune(
            TaskRun(GLUE["stsb"], 0, init, encoded, open_model(bert), hyper, "fp32", "cpu")
        ).scored["stsb"]

    part = predictions()
    monkeypatch.setattr(finetuning, "shrink_vocabulary", lambda encoder, train: (train, None))
    assert np.array_equal(part, predictions()) and part.std() > 0


@torch.no_grad()
def test_with_a_part_of_the_vocabulary_every_table_is_read_by_the_same_tokens() -> None:
    encoder = Encoder(
        ModelConfig(vocab_size=60, hidden_size=32, num_layers=2, num_heads=2, value_embeddings=1)
    )
    ids = np.array([7, 50, 7, 31], np.int32)
    split = Encoded(ids, np.zeros(4, np.uint8), np.array([0, 4]), None)
    positions, packing = torch.arange(4), Packing(torch.tensor([0, 4], dtype=torch.int32), None, 4)

    def states(ids_T: np.ndarray) -> torch.Tensor:
        hidden: torch.Tensor = encoder(torch.from_numpy(ids_T).long(), positions, packing)
        return hidden

    before = states(ids)
    renumbered, restore = shrink_vocabulary(encoder, split)
    assert encoder.value_tokens is not None and encoder.value_tokens.num_embeddings == 3
    torch.testing.assert_close(states(renumbered.ids_T), before, atol=0.0, rtol=0.0)
    restore()
    torch.testing.assert_close(states(ids), before, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("name", ["sst2", "stsb"])
def test_an_easy_task_is_learned(bert: Path, name: str) -> None:
    labels = make_data(name, 800).scored[0].labels
    predictions = run(bert, name, examples=800).scored[name]
    assert labels is not None
    if name == "stsb":
        assert np.corrcoef(predictions, labels)[0, 1] > 0.3
    else:
        assert (predictions == labels).mean() > 0.75
        assert set(predictions) == {0.0, 1.0}


def test_another_architecture_is_fine_tuned(
    tmp_path: Path, write_tokenizer: Callable[..., None]
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 34}
    MPNetModel(MPNetConfig(vocab_size=45, **sizes)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 40)
    source = open_model(tmp_path)
    assert not source.is_native
    data = make_data("sst2", 64)
    encoded = encode_task(data, load_encoder(tmp_path, source.is_native, 16, source.vocab_size))
    for init in get_args(Init):
        predictions = finetune(
            TaskRun(GLUE["sst2"], 0, init, encoded, source, HYPER.replace(epochs=1), "fp32", "cpu")
        )
        assert np.isfinite(predictions.scored["sst2"]).all()


def test_t5s_encoder_is_fine_tuned_without_a_decoder(
    tmp_path: Path, write_tokenizer: Callable[..., None]
) -> None:
    T5EncoderModel(
        T5Config(vocab_size=45, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 40)
    encoder = classifier(tmp_path, stock=True).encoder
    assert isinstance(encoder, StockEncoder) and isinstance(encoder.model, T5EncoderModel)
    split = PackedSplit(encode(tmp_path, make_data("rte", 30)).train, CPU)
    batch = split.batch(torch.arange(5))
    assert encoder(batch.ids_T, batch.positions_T, batch.packing).shape == (len(batch.ids_T), 16)
    rates = {module.p for module in encoder.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {HYPER.dropout}


@pytest.mark.parametrize(
    ("error", "autocast", "raised", "says"),
    [
        (
            RuntimeError("dtypes differ\n!"),
            True,
            UserError,
            r"16 bits \(dtypes differ !\).*eval\.precision=fp32",
        ),
        (RuntimeError("dtypes differ\n!"), False, RuntimeError, "dtypes differ"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            True,
            RuntimeError,
            "allocate",
        ),
        (
            ValueError("Input language\nunknown"),
            False,
            UserError,
            r"refuses its input \(Input language unknown\)$",
        ),
    ],
)
def test_what_transformers_cannot_do_is_no_traceback(
    bert: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    autocast: bool,
    raised: type[Exception],
    says: str,
) -> None:
    model = classifier(bert, stock=True)
    split = PackedSplit(encode(bert, make_data("rte", 30)).train, CPU)

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(model.encoder, "model", torch.nn.Module())
    monkeypatch.setattr(model.encoder.model, "forward", fail)
    monkeypatch.setattr(model.encoder.model, "config", BertConfig(), raising=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(raised, match=says):
        logits(model, split, [0])


def test_transformers_reports_nothing_of_what_is_not_used(
    bert: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """BertForMaskedLM's weights have no pooler. What the user set of transformers is as before."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    classifier(bert, stock=True)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_diverged_run_has_no_predictions(bert: Path) -> None:
    predictions = run(
        bert,
        "stsb",
        hyper=HYPER.replace(learning_rate=1e30, max_grad_norm=None, epochs=1),
        examples=64,
    )
    assert np.isnan(predictions.scored["stsb"]).all() and np.isnan(predictions.train_loss)


def test_random_initialisation_ignores_the_weights_of_the_folder(
    bert: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    config = BertConfig(**SHAPE)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    states = []
    for folder in (bert, tmp_path):
        torch.manual_seed(5)
        states.append(
            build_classifier(
                open_model(folder), "random", 2, HYPER.replace(pooler=False)
            ).state_dict()
        )
    # The folders differ in initializer_range, which scales the weights and changes nothing else.
    for a, b in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.allclose(a / (a.std() + 1e-9), b / (b.std() + 1e-9), atol=1e-3) or a.ndim == 1


def test_random_weights_have_no_attention_init_of_the_run(bert: Path, tmp_path: Path) -> None:
    plain = ModelConfig(
        45, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_length=32
    )
    states = []
    for attention_init in ("mimetic", "random"):
        folder = tmp_path / attention_init
        save_pretrained(
            MaskedLM(replace(plain, attention_init=attention_init)), folder, bert / "tokenizer.json"
        )  # type: ignore[arg-type]
        torch.manual_seed(5)
        states.append(build_classifier(open_model(folder), "random", 2, HYPER).encoder.state_dict())
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_sequences_have_berts_layout_and_lose_from_the_longer_text(bert: Path) -> None:
    data = make_data("rte", 50)
    encoded = encode(bert, data, max_length=10).train
    tokenizer = AutoTokenizer.from_pretrained(bert)
    for i in range(50):
        ids = encoded.ids_T[encoded.starts_N[i] : encoded.starts_N[i + 1]].tolist()
        types = encoded.types_T[encoded.starts_N[i] : encoded.starts_N[i + 1]].tolist()
        first, second = (
            tokenizer.encode(column[i], add_special_tokens=False) for column in data.train.texts
        )
        a, b = types.count(0) - 2, types.count(1) - 1
        assert ids == [2, *first[:a], 3, *second[:b], 3] and types == sorted(types)
        assert a + b == min(7, len(first) + len(second)) and min(a, b) >= min(
            len(first), len(second), 3
        )


def test_a_tokenizer_that_does_not_fit_is_refused(bert: Path) -> None:
    for is_native in (True, False):
        with pytest.raises(UserError, match="tokenizer has 45 entries, its model's embedding 44"):
            load_encoder(bert, is_native, 16, 44)


def test_evaluation_covers_every_example_once_in_full_groups() -> None:
    lengths = torch.randint(1, 128, (500,), generator=torch.Generator().manual_seed(0))
    groups = list(by_length(lengths, 1024))
    assert sorted(itertools.chain.from_iterable(g.tolist() for g in groups)) == list(range(500))
    assert all(lengths[g].sum() < 1024 + 128 for g in groups)


def test_learning_rate_rises_and_falls_to_zero() -> None:
    for schedule in ("linear", "cosine"):
        hyper = HYPER.replace(schedule=schedule, learning_rate=1.0)  # type: ignore[arg-type]
        rates = [hyper.learning_rate_at(p / 100) for p in range(101)]
        assert (
            rates[0] == 0
            and max(rates) == rates[10] == 1
            and rates[-1] == pytest.approx(0, abs=1e-12)
        )
        assert rates[10:] == sorted(rates[10:], reverse=True)
