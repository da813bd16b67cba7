"""The suite's model as a transformers class, for `from_pretrained(folder, trust_remote_code=True)`.

The files beside this one are copies of the suite's; they need torch and transformers only. The padded batch [B, L] of
transformers is turned into packed tokens [T] without padding for the encoder, in an exported graph (ONNX) into B L
tokens with the padding as sequences of its own. Hidden states of padding are 0.
Attention is the suite's, whatever `attn_implementation` says. Shapes: B rows, L positions in a row, T tokens, D
width.
"""

from contextlib import ExitStack
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

# transformers collects files by relative imports, transformers 4 by those of this file alone: hence the unused imports.
from .attention import attend  # noqa: F401
from .attention_kernels import KERNELS  # noqa: F401
from .classifier import POOLINGS
from .config import ModelConfig
from .convolution import Convolution  # noqa: F401
from .encoder import Encoder
from .flex import prepare  # noqa: F401
from .heads import HeadTransform, capped
from .init import initialize  # noqa: F401
from .layers import Rope
from .packing import Layout, Packing
from .relative_positions import biased


def _choice(name: str) -> Any:
    """Return a property that reads and writes a key of the configuration's `model` dict."""
    return property(
        lambda self: self.model.get(name), lambda self, value: self.model.update({name: value})
    )


class CrammingConfig(PretrainedConfig):
    """Configuration with the fields of `ModelConfig` in `model`; transformers' usual names read and write there too."""

    model_type = "cramming"
    vocab_size = _choice("vocab_size")
    hidden_size = _choice("hidden_size")
    num_hidden_layers = _choice("num_layers")
    num_attention_heads = _choice("num_heads")
    intermediate_size = _choice("intermediate_size")
    max_position_embeddings = _choice("max_length")
    type_vocab_size = _choice("token_types")
    initializer_range = _choice("init_std")
    hidden_dropout_prob = _choice("dropout")
    attention_probs_dropout_prob = _choice("attention_dropout")

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        classifier_pooling: str = "mean",  # mean, or cls: the first token
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        self.model = dict(model or {})
        self.classifier_pooling, self.classifier_dropout = classifier_pooling, classifier_dropout
        super().__init__(
            **{"tie_word_embeddings": self.model.get("tie_embeddings", True), **kwargs}
        )


# The encoder's output is first: sentence-transformers (6.2) treats the first class in the annotation of `forward` as a
# dataclass, which ModelOutput is not.
Output: TypeAlias = (
    BaseModelOutput
    | MaskedLMOutput
    | SequenceClassifierOutput
    | TokenClassifierOutput
    | QuestionAnsweringModelOutput
)
NOT_TAKEN = (
    "position_ids",
    "inputs_embeds",
    "head_mask",
    "output_attentions",
    "labels",
    "start_positions",
    "end_positions",
)


def is_exported() -> bool:
    """Return whether `torch.onnx.export`, `torch.export` or `torch.jit.trace` records the model as a graph.

    No number of the example batch may then shape the computation.
    """
    # not `torch.compiler.is_exporting`, which older versions of torch lack
    is_export = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return torch.jit.is_tracing() or is_export


class GraphEncoder(Encoder):
    """Encoder whose attention, in an exported graph, takes rows of any number and length with padding inside."""

    def _shared(
        self, window: int | None, positions_T: Tensor, packing: Packing, hidden_TD: Tensor
    ) -> tuple[Rope | None, Layout]:
        if not is_exported():
            return super()._shared(window, positions_T, packing, hidden_TD)
        # rows of one token have no mask, which would depend on the example; only the rotary tables are used
        one_token_each = Packing(packing.bounds_S, 1, 1)
        rope, _ = super()._shared(window, positions_T, one_token_each, hidden_TD)
        length = packing.max_length
        tokens_T = torch.arange(hidden_TD.shape[0], device=hidden_TD.device)
        # not `sequence_ids`: ONNX lacks `searchsorted`
        ids_BL = (tokens_T[:, None] >= packing.bounds_S[1:]).sum(1).view(-1, length)
        mask_BLL = ids_BL[:, :, None] == ids_BL[:, None, :]
        if window is not None:
            columns_L = torch.arange(length, device=hidden_TD.device)
            mask_BLL = mask_BLL & ((columns_L[:, None] - columns_L).abs() <= window)
        mask = mask_BLL[:, None]
        if self.relative_positions is not None:
            places_BL = torch.arange(length, device=hidden_TD.device)[None]
            table_RH = self.relative_positions.weight
            mask = biased(mask, table_RH, places_BL, length, table_RH.dtype)
        groups = ((hidden_TD.shape[0] // length, length),)
        return rope, Layout("sdpa", packing, window, groups, (mask,))


class CrammingPreTrainedModel(PreTrainedModel):
    """Encoder.

    A subclass with a head overrides `_build`, its layers, and `_head`: hidden states and labels to the output.
    """

    config_class = CrammingConfig
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self, config: CrammingConfig) -> None:
        super().__init__(config)
        self.choices = ModelConfig(**config.model)
        self.encoder = GraphEncoder(self.choices)
        self._build(config)
        self.post_init()

    def _build(self, config: CrammingConfig) -> None:
        pass

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embeddings.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.embeddings.tokens = value

    def resize_token_embeddings(self, *arguments: Any, **settings: Any) -> nn.Embedding:
        """Resize the input embeddings and the tables of value embeddings, which transformers does not know."""
        embeddings = super().resize_token_embeddings(*arguments, **settings)
        if self.encoder.value_tokens is not None:
            resized = self._get_resized_embeddings(
                self.encoder.value_tokens, embeddings.num_embeddings
            )
            self.encoder.value_tokens = resized
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,  # what callers pass to any model, such as output_hidden_states=True
    ) -> Output | tuple[Any, ...]:
        """Return the model's output.

        `attention_mask` [B, L] is 1 for tokens and 0 for padding, which may be on either side.
        """
        return self._run(input_ids, attention_mask, token_type_ids, labels, **others)

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        targets: Any,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Output | tuple[Any, ...]:
        """Return the output, with `hidden_states` if wanted: the input of each block, and the last hidden state.

        Raises ValueError for an unknown argument that would change the result.
        """
        for name in NOT_TAKEN:
            if others.get(name) is not None and others[name] is not False:
                raise ValueError(
                    f"{name}: this model does not take it. Pass input_ids and attention_mask alone."
                )
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask_BL = attention_mask.bool()
        columns_L = torch.arange(input_ids.shape[1], device=input_ids.device)
        first_columns_B1 = mask_BL.int().argmax(dim=1, keepdim=True)
        positions_T = _packed((columns_L - first_columns_B1) * mask_BL, mask_BL)
        types_T = None if token_type_ids is None else _packed(token_type_ids, mask_BL)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: list[Tensor] = []
        with ExitStack() as hooks:
            if output_hidden_states:
                for block in self.encoder.blocks:
                    hook = block.register_forward_pre_hook(
                        lambda _, inputs: states.append(inputs[0])
                    )
                    hooks.enter_context(hook)
            ids_T = _packed(input_ids, mask_BL)
            hidden_TD = self.encoder(ids_T, positions_T, _packing(mask_BL), types_T)
        output = self._head(hidden_TD, mask_BL, targets)
        if output_hidden_states:
            output["hidden_states"] = tuple(_padded(x_TD, mask_BL) for x_TD in (*states, hidden_TD))
        return output.to_tuple() if return_dict is False else output

    def _head(self, hidden_TD: Tensor, mask_BL: Tensor, targets: Any) -> Output:
        return BaseModelOutput(last_hidden_state=_padded(hidden_TD, mask_BL))


def _packed(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the tokens without padding; in an exported graph with it, because shapes may not depend on numbers."""
    return x_BL.flatten() if is_exported() else x_BL[mask_BL]


def _bounds(mask_BL: Tensor) -> Tensor:
    """Return the bounds of the sequences; in an exported graph those of left padding, text and right padding."""
    if not is_exported():
        return nn.functional.pad(mask_BL.sum(dim=1).cumsum(0), (1, 0)).int()
    lefts_B = mask_BL.int().argmax(dim=1)
    texts_B = mask_BL.int().sum(dim=1)
    rights_B = mask_BL.shape[1] - lefts_B - texts_B
    lengths_S = torch.stack([lefts_B, texts_B, rights_B], dim=1).flatten()
    return nn.functional.pad(lengths_S.cumsum(0), (1, 0)).int()


def _packing(mask_BL: Tensor) -> Packing:
    """Return the packing of the tokens: equal rows where nothing is padded, else ragged sequences."""
    length = mask_BL.shape[1]
    if is_exported():
        return Packing(_bounds(mask_BL), None, length)
    if mask_BL.all():
        return Packing(_bounds(mask_BL), length, length)
    return Packing(_bounds(mask_BL), None, int(mask_BL.sum(dim=1).max()))


def _padded(x_TX: Tensor, mask_BL: Tensor) -> Tensor:
    if is_exported():
        return x_TX.view(*mask_BL.shape, x_TX.shape[1]) * mask_BL[:, :, None]
    out_BLX = x_TX.new_zeros((*mask_BL.shape, x_TX.shape[1]))
    out_BLX[mask_BL] = x_TX
    return out_BLX


class CrammingModel(CrammingPreTrainedModel):
    """Encoder from token ids to hidden states."""


class CrammingForMaskedLM(CrammingPreTrainedModel):
    """Encoder and scores over the vocabulary; `labels` are -100 where there is no target."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {
        "decoder.weight": "encoder.embeddings.tokens.weight"
    }

    def _build(self, config: CrammingConfig) -> None:
        self.transform = (
            HeadTransform(self.choices) if self.choices.head_transform else nn.Identity()
        )
        self.decoder = nn.Linear(
            config.hidden_size, config.vocab_size, bias=self.choices.decoder_bias
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def _head(self, hidden_TD: Tensor, mask_BL: Tensor, targets: Any) -> Output:
        logits_TV = self.decoder(self.transform(hidden_TD))
        logits = _padded(capped(logits_TV, self.choices.logit_softcap), mask_BL)
        loss = None
        if targets is not None:
            loss = self.loss_function(logits, targets, vocab_size=logits.shape[-1])
        return MaskedLMOutput(loss=loss, logits=logits)


class CrammingForSequenceClassification(CrammingPreTrainedModel):
    """One vector per row (mean of its tokens, or its first), dense and tanh, dropout, `num_labels` scores.

    `labels` are class numbers, real numbers for one label (regression), or a row of 0.0 and 1.0 for several at once.
    """

    def _build(self, config: CrammingConfig) -> None:
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def _head(self, hidden_TD: Tensor, mask_BL: Tensor, targets: Any) -> Output:
        pooling = POOLINGS[self.config.classifier_pooling]
        pooled_BD = pooling(hidden_TD, _bounds(mask_BL))
        if is_exported():  # the text is the second of each row's three sequences
            pooled_BD = pooled_BD[1::3]
        pooled_BD = self.pooler(pooled_BD).tanh()
        logits = self.classifier(self.dropout(pooled_BD))
        loss = None
        if targets is not None:
            loss = self.loss_function(labels=targets, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class CrammingForTokenClassification(CrammingPreTrainedModel):
    """Encoder and `num_labels` scores for every token; `labels` are -100 where a token has none."""

    def _build(self, config: CrammingConfig) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def _head(self, hidden_TD: Tensor, mask_BL: Tensor, targets: Any) -> Output:
        logits = _padded(self.classifier(self.dropout(hidden_TD)), mask_BL)
        loss = None if targets is None else self.loss_function(logits, targets, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits)


class CrammingForQuestionAnswering(CrammingPreTrainedModel):
    """Encoder and scores of every token as the first and as the last of the answer."""

    def _build(self, config: CrammingConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    def forward(  # type: ignore[override]  # transformers' Trainer takes the names of labels from this signature
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **others: Any,
    ) -> Output | tuple[Any, ...]:
        """Return the output, with a loss if both positions are given, each [B]."""
        answers = None
        if start_positions is not None and end_positions is not None:
            answers = (start_positions, end_positions)
        return self._run(input_ids, attention_mask, token_type_ids, answers, **others)

    def _head(self, hidden_TD: Tensor, mask_BL: Tensor, targets: Any) -> Output:
        starts, ends = _padded(self.qa_outputs(hidden_TD), mask_BL).unbind(-1)
        loss = None if targets is None else self.loss_function(starts, ends, *targets)
        return QuestionAnsweringModelOutput(loss=loss, start_logits=starts, end_logits=ends)
