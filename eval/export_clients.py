"""Clients that load an exported folder, each compared with what the suite's engine computed.

    python export_clients.py <client> <folder> <reference.pt>

Imports nothing of the suite, so that it runs in any environment: `cramming export --test` starts a copy of this file
for each client. Prints one JSON object. A new client is one row of `CLIENTS`.
"""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 1e-4  # of the largest absolute value, if that is above 1
LEAST_COSINE = 0.9  # of 8-bit weights


class Exported:
    """Exported folder and the reference for its texts.

    The reference has `texts`, `ids` and `mask` [B, L], `hidden` [B, L, D], `pooled` [B, D], `logits` [B, L, V] of a
    model with a masked-LM head, and `max_length`.
    """

    def __init__(self, folder: Path, reference_file: Path) -> None:
        import torch

        self.folder = folder
        self.reference: dict[str, Any] = torch.load(reference_file, weights_only=True)
        self.inputs = {
            "input_ids": self.reference["ids"],
            "attention_mask": self.reference["mask"],
        }
        self.options = {}
        if (folder / "hf_adapter.py").is_file():
            self.options["trust_remote_code"] = True

    def compare(self, **outputs: Any) -> str:
        """Return whether outputs equal those of the same names in the reference at all tokens, in words."""
        largest = 0.0
        for name, output in outputs.items():
            expected = self.reference[name]
            difference = (output - expected).abs()
            if expected.dim() == 3:
                difference = difference[self.reference["mask"].bool()]
            share = difference.max().item() / max(1.0, expected.abs().max().item())
            if not share <= TOLERANCE:
                return f"not equal: {NAMES[name]} differ by {share:.1e}"
            largest = max(largest, share)
        names = ", ".join(NAMES[name] for name in outputs)
        return f"equal to 1e-4: {names} (largest difference {largest:.0e})"

    def load(self, auto_class: str) -> Any:
        """Return the model that an automatic class of transformers loads."""
        import transformers

        loader = getattr(transformers, auto_class)
        return loader.from_pretrained(self.folder, **self.options).eval()

    def sentence_transformer(self) -> Any:
        """Return the model of sentence-transformers, which pools as the folder says."""
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self.folder), device="cpu", **self.options)


NAMES = {"hidden": "hidden states", "logits": "logits", "pooled": "sentence vectors"}


def check_transformers(exported: Exported) -> str:
    """Compare token ids, hidden states and logits."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported.folder, **exported.options)
    texts = exported.reference["texts"]
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    for name, expected in exported.inputs.items():
        if not torch.equal(encoded[name], expected):
            return f"not equal: {name} of the tokenizer"
    with torch.no_grad():
        outputs = {"hidden": exported.load("AutoModel")(**encoded).last_hidden_state}
        if "logits" in exported.reference:
            outputs["logits"] = exported.load("AutoModelForMaskedLM")(**encoded).logits
    return exported.compare(**outputs)


def check_sentence_transformers(exported: Exported) -> str:
    """Compare sentence vectors, and the length at which texts are cut."""
    model = exported.sentence_transformer()
    expected_length = exported.reference["max_length"]
    if model.max_seq_length != expected_length:
        return f"not equal: max_seq_length {model.max_seq_length}, expected {expected_length}"
    vectors = model.encode(exported.reference["texts"], convert_to_tensor=True)
    return exported.compare(pooled=vectors)


def write_onnx(exported: Exported) -> Path:
    """Write the encoder as ONNX for any number and length of texts, and return the file."""
    import torch

    class Encoder(torch.nn.Module):
        """Encoder that returns a tensor."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask)
            return output.last_hidden_state

    file = Path("model.onnx")
    if file.is_file():  # written by the client before
        return file
    example = {name: tensor[:2, :7].contiguous() for name, tensor in exported.inputs.items()}
    with torch.no_grad():
        torch.onnx.export(
            Encoder(exported.load("AutoModel")),
            (),
            str(file),
            kwargs=example,
            input_names=list(example),
            output_names=["hidden"],
            dynamic_shapes={name: {0: "batch", 1: "length"} for name in example},
            dynamo=True,
            external_data=False,
        )
    return file


def run_onnx(exported: Exported, file: Path) -> Any:
    """Return the hidden states that ONNX Runtime computes."""
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs = {name: tensor.numpy() for name, tensor in exported.inputs.items()}
    return torch.from_numpy(session.run(["hidden"], inputs)[0])


def check_onnx(exported: Exported) -> str:
    """Compare hidden states of the ONNX file for texts of another number and length than its example."""
    return exported.compare(hidden=run_onnx(exported, write_onnx(exported)))


def check_onnx_int8(exported: Exported) -> str:
    """Compare the directions of hidden states with those of 8-bit weights."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = Path("int8.onnx")
    quantize_dynamic(str(write_onnx(exported)), str(file), weight_type=QuantType.QInt8)
    operators = [node.op_type for node in onnx.load(str(file)).graph.node]
    products = operators.count("MatMulInteger")
    mask = exported.reference["mask"].bool()
    hidden = run_onnx(exported, file)[mask]
    cosines = torch.cosine_similarity(hidden, exported.reference["hidden"][mask], dim=-1)
    least = cosines.min().item()
    text = f"hidden states: least cosine {least:.5f}, {products} matrix products in 8 bits"
    is_close = products > 0 and least >= LEAST_COSINE
    return text if is_close else f"not close: {text}"


def check_faiss(exported: Exported) -> str:
    """Return whether the nearest of all sentence vectors to each is that vector."""
    import faiss

    vectors = exported.sentence_transformer().encode(
        exported.reference["texts"], normalize_embeddings=True
    )
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    nearest = index.search(vectors, 1)[1][:, 0].tolist()
    if nearest != list(range(len(vectors))):
        return f"not equal: the nearest neighbours are {nearest}"
    return "the nearest neighbour of each sentence is that sentence"


def check_setfit(exported: Exported) -> str:
    """Fit a classifier on eight examples."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(str(exported.folder), device="cpu", **exported.options)
    texts = [f"apples number {number}" for number in range(4)]
    texts += [f"stars number {number}" for number in range(4)]
    labels = [0] * 4 + [1] * 4
    arguments = TrainingArguments(
        output_dir="setfit", batch_size=4, num_epochs=1, report_to="none", save_strategy="no"
    )
    examples = Dataset.from_dict({"text": texts, "label": labels})
    Trainer(model, arguments, train_dataset=examples).train()
    answers = [int(answer) for answer in model.predict(texts)]
    right = sum(answer == label for answer, label in zip(answers, labels))
    return f"{'fits' if right > 4 else 'not fitted to'} 8 examples, {right} of them right"


class Client(NamedTuple):
    """Client: packages (module -> name on PyPI), the first of which names its version, and the check."""

    packages: dict[str, str]
    check: Callable[[Exported], str]


_TRANSFORMERS = {"transformers": "transformers", "torch": "torch"}
_SENTENCES = {"sentence_transformers": "sentence-transformers"}
_ONNX = {"onnxruntime": "onnxruntime", "onnx": "onnx", "onnxscript": "onnxscript"} | _TRANSFORMERS
CLIENTS = {
    "transformers": Client(_TRANSFORMERS, check_transformers),
    "sentence-transformers": Client(_SENTENCES, check_sentence_transformers),
    "ONNX Runtime, fp32": Client(_ONNX, check_onnx),
    "ONNX Runtime, int8": Client(_ONNX, check_onnx_int8),
    "faiss": Client({"faiss": "faiss-cpu"} | _SENTENCES, check_faiss),
    "SetFit": Client({"setfit": "setfit"} | _SENTENCES, check_setfit),
}


def main(name: str, folder: Path, reference_file: Path) -> dict[str, str]:
    """Return the client's version and the result in words; those of failures start with "not"."""
    client = CLIENTS[name]
    missing = [
        package
        for module, package in client.packages.items()
        if not importlib.util.find_spec(module)
    ]
    if missing:
        return {"text": f"not installed (pip install {' '.join(missing)})"}
    version = importlib.metadata.version(next(iter(client.packages.values())))
    try:
        text = client.check(Exported(folder, reference_file))
    except Exception as error:  # any error of a client is a result
        root: BaseException = error
        while root.__cause__:
            root = root.__cause__
        lines = str(root).strip().splitlines() or [""]
        text = f"not loadable: {type(root).__name__}: {lines[0][:200]}"
    return {"version": version, "text": text}


if __name__ == "__main__":
    result = main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(result), flush=True)
