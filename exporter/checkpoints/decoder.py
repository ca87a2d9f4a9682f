"""Decoder layers as configurations describe them, and the tensors they must come with."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat

from dspark.configs import model_defaults
from dspark.exporter.checkpoints.description import Backbone, Layer
from dspark.exporter.checkpoints.rope import resolve_rope
from dspark.exporter.checkpoints.tensors import LazyTensor
from dspark.exporter.checkpoints.validation import ConfigModel, validated
from dspark.exporter.errors import CheckpointError

__all__ = ["Decoder", "LayerForm", "check_tensors", "layer_shapes", "read_decoder", "with_defaults"]

SHOWN_NAMES = 4

Size = Annotated[int, Field(gt=0, lt=2**24)]  # keeps products of sizes far from overflow
Switch = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]  # null means off


class Decoder(ConfigModel):
    """The keys of a Hugging Face configuration that describe decoder layers (Llama, Mistral, Qwen2, Qwen3)."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: Annotated[Literal["silu"], BeforeValidator(lambda name: "silu" if name == "swish" else name)]
    rms_norm_eps: PositiveFloat
    tie_word_embeddings: Switch = False
    attention_bias: Switch = False
    mlp_bias: Switch = False
    use_sliding_window: Switch = False
    sliding_window: Size | None = None
    max_window_layers: NonNegativeInt | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    @property
    def kv_head_count(self) -> int:
        """Key and value heads; all heads have their own unless told otherwise."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Dimensions of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def windows(self, where: str) -> tuple[int | None, ...]:
        """Each layer's sliding window by Qwen's rules; None sees everything.

        ``layer_types`` says it layer by layer; without it ``use_sliding_window`` gives one to the layers from
        ``max_window_layers`` on.

        Raises:
            CheckpointError: If ``layer_types`` has the wrong length, or a window is needed that is not there.
        """
        count = self.num_hidden_layers
        if self.layer_types is None:
            first = (self.max_window_layers or 0) if self.use_sliding_window else count
            return tuple(self.sliding_window if index >= first else None for index in range(count))
        if len(self.layer_types) != count:
            raise CheckpointError(f"{where}: layer_types has {len(self.layer_types)} entries for {count} layers.")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise CheckpointError(f"{where}: layer_types has sliding_attention, but sliding_window is null.")
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def backbone(self, config: Mapping[str, Any], layers: tuple[Layer, ...], where: str) -> Backbone:
        """The description of these layers.

        Args:
            config: What this was read from, for the rotary embedding.
            layers: What each layer may see.
            where: What to call the configuration in messages.
        """
        return Backbone(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            head_count=self.num_attention_heads,
            kv_head_count=self.kv_head_count,
            head_dim=self.head_width,
            norm_epsilon=self.rms_norm_eps,
            rope=resolve_rope(config, self.head_width, where),
            layers=layers,
        )


@dataclass(frozen=True)
class LayerForm:
    """Which tensors a decoder layer has besides its projections and two norms.

    Attributes:
        qk_norm: Norms of query and key heads.
        qkv_bias: Biases of the query, key and value projections.
        output_bias: Bias of the attention's output projection.
        mlp_bias: Biases of the feed-forward projections.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


def with_defaults(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """``config`` with the missing keys as transformers fills them in for ``model_type``."""
    return {**model_defaults()[model_type], **config}


def read_decoder(config: Mapping[str, Any], where: str) -> Decoder:
    """Reads the description of decoder layers.

    Args:
        config: A configuration with its defaults filled in.
        where: What to call it in messages.

    Raises:
        CheckpointError: If a value is missing or wrong.
    """
    decoder = validated(Decoder, config, where)
    if decoder.num_attention_heads % decoder.kv_head_count:
        raise CheckpointError(
            f"{where}: num_attention_heads = {decoder.num_attention_heads} is no multiple of num_key_value_heads = "
            f"{decoder.kv_head_count}."
        )
    return decoder


def layer_shapes(
    decoder: Decoder, index: int, form: LayerForm, attention_inputs: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's tensors.

    Args:
        decoder: Sizes.
        index: Which layer.
        form: Which tensors it has.
        attention_inputs: Width of what query, key and value projections read, if it is not the hidden size.
    """
    hidden, inner, head = decoder.hidden_size, decoder.intermediate_size, decoder.head_width
    queries, keys = decoder.num_attention_heads * head, decoder.kv_head_count * head
    inputs = attention_inputs or hidden
    projections = {
        "self_attn.q_proj": (queries, inputs, form.qkv_bias),
        "self_attn.k_proj": (keys, inputs, form.qkv_bias),
        "self_attn.v_proj": (keys, inputs, form.qkv_bias),
        "self_attn.o_proj": (hidden, queries, form.output_bias),
        "mlp.gate_proj": (inner, hidden, form.mlp_bias),
        "mlp.up_proj": (inner, hidden, form.mlp_bias),
        "mlp.down_proj": (hidden, inner, form.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (outputs, width, bias) in projections.items():
        shapes[f"{name}.weight"] = (outputs, width)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if form.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return {f"layers.{index}.{name}": shape for name, shape in shapes.items()}


def check_tensors(
    tensors: Mapping[str, LazyTensor],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    kind: str,
    borrowed: Collection[str] = (),
) -> None:
    """Checks that a checkpoint has exactly the tensors its configuration describes.

    Args:
        tensors: What it has.
        shapes: What it must have.
        where: The checkpoint, for messages.
        kind: What the configuration describes, for messages (``a qwen3 model with attention_bias = False``).
        borrowed: Tensors that may be missing, because the target's take their place.

    Raises:
        CheckpointError: Names the tensors that are missing, unexpected or of another shape.
    """
    missing = [name for name in shapes if name not in tensors and name not in borrowed]
    if missing:
        raise CheckpointError(f"{where} lacks {_listed(missing)}, needed for {kind}.")
    unexpected = [name for name in tensors if name not in shapes]
    if unexpected:
        raise CheckpointError(f"{where} has the unexpected {_listed(unexpected)}, not part of {kind}.")
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {list(tensors[name].shape)}; {list(shape)} is needed for {kind}."
            )


def _listed(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - SHOWN_NAMES} more" if len(every) > SHOWN_NAMES else ""
    return ", ".join(every[:SHOWN_NAMES]) + more
