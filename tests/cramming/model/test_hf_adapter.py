"""Our model in transformers computes, on padded batches, what it computes on packed tokens.

Each case is a combination of choices that stock transformers lacks. The adapter is imported here as a module of the
package; that it loads from a folder without this package is shown in tests/end_to_end/test_export_process.py.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.utils import find_labels

from cramming.model import hf_adapter
from cramming.model.config import ModelConfig
from cramming.model.export import AUTO_CLASSES, CODE
from cramming.model.heads import MaskedLM
from cramming.model.hf_adapter import (
    CrammingConfig,
    CrammingForMaskedLM,
    CrammingForQuestionAnswering,
    CrammingForSequenceClassification,
    CrammingForTokenClassification,
    CrammingModel,
)
from cramming.model.load import load_encoder, load_masked_lm
from cramming.model.stock import stock_family

from .conftest import BERT, CRAMMED, PARTS, own_logits, padded, perturbed

Save = Callable[[MaskedLM, Path], None]
ROPE = replace(CRAMMED, positions="rope", local_window=6, global_every=2, rope_theta_local=500.0)
CASES = {
    "crammed": CRAMMED,
    "crammed with BERT's head": replace(
        CRAMMED, head_transform=True, head_bias=True, decoder_bias=True
    ),
    "windows": ROPE,
    "windows, learned positions": replace(
        ROPE, positions="learned", local_window=7, global_every=3
    ),
    "no positions": replace(CRAMMED, positions="none", tie_embeddings=False, decoder_bias=True),
    "query-key norms": replace(
        ROPE, qk_norm=True, norm_eps=1e-5, first_attn_norm=False, token_types=3
    ),
    "RMS norm": replace(
        CRAMMED, norm="rmsnorm", norm_bias=False, embedding_norm=False, activation="silu"
    ),
    "post-norm": replace(
        CRAMMED, norm_order="post", final_norm=False, mlp="plain", activation="relu", token_types=2
    ),
    "positions behind the padding's": replace(CRAMMED, positions="learned", position_offset=2),
    "BERT, untied": replace(BERT, tie_embeddings=False, activation="gelu_tanh"),
    **{name: replace(CRAMMED, **part) for name, part in PARTS.items()},
}


def saved(config: ModelConfig, folder: Path, save: Save) -> MaskedLM:
    assert stock_family(config) is None
    model: MaskedLM = perturbed(MaskedLM(config))
    save(model, folder)
    return model


def documents() -> list[Tensor]:
    return [torch.randint(5, 128, (length,)) for length in (40, 3, 17, 1)]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_our_model(case: str, tmp_path: Path, save: Save) -> None:
    native = saved(CASES[case], tmp_path / "final", save)
    theirs, info = CrammingForMaskedLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info.values()), info
    texts = documents()
    expected = own_logits(native, texts)
    for side in ("right", "left"):
        inputs = padded(texts, side)
        logits = theirs(**inputs).logits
        for row, mine in enumerate(expected):
            torch.testing.assert_close(
                logits[row][inputs["attention_mask"][row] == 1], mine, atol=1e-4, rtol=0
            )
    torch.testing.assert_close(
        theirs(input_ids=texts[0][None]).logits[0], expected[0], atol=1e-4, rtol=0
    )


class Graph(nn.Module):
    """Logits alone, of positional arguments, as `torch.jit.trace` takes them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids, attention_mask).logits
        return logits


def trace(model: nn.Module, example: dict[str, Tensor]) -> Callable[..., Tensor]:
    traced: Callable[..., Tensor] = torch.jit.trace(
        Graph(model), example_kwarg_inputs=example, check_trace=False
    )
    return traced


def export(model: nn.Module, example: dict[str, Tensor]) -> Callable[..., Tensor]:
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(example, axes)
    return torch.export.export(Graph(model), (), example, dynamic_shapes=shapes).module()


def classifier(pooling: str) -> Callable[[CrammingConfig], nn.Module]:
    def make(config: CrammingConfig) -> nn.Module:
        config.classifier_pooling = pooling
        return CrammingForSequenceClassification(config)

    return make


EXPORTED = [
    *((case, trace, CrammingForMaskedLM) for case in CASES),
    *(
        (case, export, CrammingForMaskedLM)
        for case in ("windows", "convolution", "relative positions")
    ),
    *(("crammed", trace, classifier(pooling)) for pooling in ("mean", "cls")),
    ("crammed", export, classifier("mean")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("case", "record", "make"), EXPORTED)
@torch.no_grad()
def test_a_graph_computes_other_shapes_than_its_example(
    case: str, record: Callable[..., Any], make: Callable[..., Any]
) -> None:
    """What `torch.onnx.export` writes, by either exporter; the example is shorter than the window."""
    config = CrammingConfig(model=asdict(CASES[case]))
    model = perturbed(make(config))
    graph = record(model, padded([torch.randint(5, 128, (length,)) for length in (5, 2, 4)]))
    texts = documents()
    for batch in (padded(texts), padded(texts, "left"), padded(texts[:1])):
        torch.testing.assert_close(graph(**batch), model(**batch).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "arguments", [{"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, {"output_attentions": True}]
)
def test_an_argument_that_would_change_the_result_is_refused(
    arguments: dict[str, Any], tmp_path: Path, save: Save
) -> None:
    """Positions that restart, as flattened batches have, would otherwise let texts attend to each other."""
    saved(CRAMMED, tmp_path / "final", save)
    model = CrammingModel.from_pretrained(tmp_path / "final")
    model(input_ids=documents()[0][None], position_ids=None, output_attentions=False)
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: this model does not take it"):
        model(input_ids=torch.randint(5, 128, (1, 5)), **arguments)


@pytest.mark.parametrize("case", CASES)
def test_saved_by_transformers_and_read_again_is_the_same_model(
    case: str, tmp_path: Path, save: Save
) -> None:
    native = saved(CASES[case], tmp_path / "final", save)
    CrammingForMaskedLM.from_pretrained(tmp_path / "final").save_pretrained(tmp_path / "again")
    reloaded = load_masked_lm(tmp_path / "again")
    assert reloaded.config == native.config
    assert all(
        torch.equal(tensor, native.state_dict()[name])
        for name, tensor in reloaded.state_dict().items()
    )
    CrammingModel.from_pretrained(tmp_path / "final").save_pretrained(tmp_path / "bare")  # no head
    bare = load_encoder(tmp_path / "bare").state_dict()
    assert all(
        torch.equal(tensor, bare[name]) for name, tensor in native.encoder.state_dict().items()
    )


def test_every_choice_of_an_architecture_has_a_case() -> None:
    """A field of ModelConfig that no case changes would be one that the folder's code may ignore."""
    trained_only = {
        "dropout",
        "attention_dropout",
        "init",
        "init_std",
        "zero_residual",
        "attention_init",
    }
    sizes = {
        "vocab_size",
        "hidden_size",
        "num_heads",
        "intermediate_size",
        "max_length",
        "rope_theta_global",
    }
    for field in fields(ModelConfig):
        if field.name not in trained_only | sizes:
            assert len({getattr(config, field.name) for config in CASES.values()}) > 1, field.name


HEADS = {
    CrammingForMaskedLM: lambda tokens: {
        "labels": torch.randint(5, 128, (4, 40)).where(tokens, -100)
    },
    CrammingForSequenceClassification: lambda tokens: {"labels": torch.randint(0, 5, (4,))},
    CrammingForTokenClassification: lambda tokens: {
        "labels": torch.randint(0, 5, (4, 40)).where(tokens, -100)
    },
    CrammingForQuestionAnswering: lambda tokens: {
        "start_positions": torch.tensor([3, 0, 9, 0]),
        "end_positions": torch.tensor([8, 1, 9, 0]),
    },
}


@pytest.mark.parametrize("head", HEADS)
def test_trainers_find_each_heads_labels(head: type) -> None:
    """transformers' Trainer computes no loss in an evaluation if labels are missing."""
    like = getattr(transformers, head.__name__.replace("Cramming", "Bert"))
    assert set(find_labels(head)) == set(find_labels(like)) - {"next_sentence_label"}


@pytest.mark.parametrize("head", HEADS)
def test_heads_learn_and_honour_the_number_of_labels(
    head: type, tmp_path: Path, save: Save
) -> None:
    saved(ROPE, tmp_path / "final", save)
    model, info = head.from_pretrained(tmp_path / "final", num_labels=5, output_loading_info=True)  # type: ignore[attr-defined]
    assert not info["unexpected_keys"] - {"decoder.weight"}
    assert all(
        name.startswith(("pooler", "classifier", "qa_outputs")) for name in info["missing_keys"]
    )
    expected = load_encoder(tmp_path / "final").state_dict()
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in model.encoder.state_dict().items()
    )
    inputs = padded(documents())
    inputs |= HEADS[head](inputs["attention_mask"] == 1)
    output = model(**inputs)
    if "logits" in output and head is not CrammingForMaskedLM:
        assert output.logits.shape[-1] == 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss.item() < 0.7 * output.loss.item()


@pytest.mark.parametrize(
    ("labels", "targets", "problem"),
    [
        (1, torch.tensor([0.5, 1.0, -2.0, 3.0]), "regression"),
        (3, torch.tensor([[0.0, 1.0, 1.0]] * 4), "multi_label_classification"),
    ],
)
def test_the_classifier_takes_other_kinds_of_labels(
    labels: int, targets: Tensor, problem: str, tmp_path: Path, save: Save
) -> None:
    saved(CRAMMED, tmp_path / "final", save)
    model = CrammingForSequenceClassification.from_pretrained(tmp_path / "final", num_labels=labels)
    assert model(**padded(documents()), labels=targets).loss.isfinite()
    assert model.config.problem_type == problem


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@torch.no_grad()
def test_pooling_sees_no_padding(pooling: str, tmp_path: Path, save: Save) -> None:
    saved(CRAMMED, tmp_path / "final", save)
    texts = documents()
    classifier = CrammingForSequenceClassification.from_pretrained(
        tmp_path / "final", classifier_pooling=pooling
    )
    right, left = (classifier(**padded(texts, side)).logits for side in ("right", "left"))
    torch.testing.assert_close(right, left, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        right[1], classifier(input_ids=texts[1][None]).logits[0], atol=1e-5, rtol=0
    )


def test_what_users_of_transformers_do_to_a_model(tmp_path: Path, save: Save) -> None:
    """Resize the vocabulary, change the dropout, take tuples or 16 bits, make one with random weights."""
    saved(replace(CASES["crammed with BERT's head"], value_embeddings=1), tmp_path / "final", save)
    model = CrammingForMaskedLM.from_pretrained(tmp_path / "final", hidden_dropout_prob=0.5)
    assert model.encoder.blocks[0].dropout.p == 0.5
    model.resize_token_embeddings(131)
    assert model(input_ids=torch.tensor([[5, 130]])).logits.shape == (1, 2, 131)
    assert (
        model.config.model["vocab_size"] == 131
        and model.decoder.weight is model.get_input_embeddings().weight
    )
    assert (
        model.to(torch.bfloat16)(torch.tensor([[5, 130]]), return_dict=False)[0].dtype
        == torch.bfloat16
    )
    assert all(
        parameter.isfinite().all() for parameter in CrammingForMaskedLM(model.config).parameters()
    )


@torch.no_grad()
def test_hidden_states_are_the_blocks_inputs_and_the_last(tmp_path: Path, save: Save) -> None:
    saved(CASES["crammed with BERT's head"], tmp_path / "final", save)
    model = CrammingModel.from_pretrained(tmp_path / "final").eval()
    batch = padded(documents(), "left")
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == len(model.encoder.blocks) + 1
    torch.testing.assert_close(states[-1], model(**batch).last_hidden_state)
    mask = batch["attention_mask"].bool()
    positions = torch.cat([torch.arange(int(n)) for n in mask.sum(1)])
    expected = model.encoder.embeddings(batch["input_ids"][mask], positions, None)
    torch.testing.assert_close(states[0][mask], expected)
    assert "hidden_states" not in model(**batch)


def test_the_folder_has_all_files_and_classes_that_it_names() -> None:
    """transformers 4 copies only what the first file imports itself."""
    folder, (adapter, *others) = Path(hf_adapter.__file__).parent, CODE
    direct = set(re.findall(r"^from \.(\w+) import", (folder / adapter).read_text(), re.MULTILINE))
    needed = {Path(file).name for file in get_relative_import_files(folder / adapter)}
    assert needed == {f"{name}.py" for name in direct} == set(others)
    assert all(hasattr(hf_adapter, name) for name in AUTO_CLASSES.values())
    packages = {package for name in CODE for package in get_imports(folder / name)}
    assert packages - sys.stdlib_module_names == {
        "torch",
        "transformers",
        "numpy",
    }  # which transformers needs itself
