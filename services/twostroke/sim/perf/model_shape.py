"""What a transformer's shape costs: parameters, FLOPs and bytes, from the fields of a Hugging Face config.json.

Covers dense and mixture-of-experts layers (with shared experts and leading dense layers), multi-head, grouped-query and
latent attention, sliding windows, linear attention with a constant state, and sparse attention with an index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostroke.errors import ConfigError

_STATE_BYTES = 4  # linear layers keep their state in float32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's dimensions. Zero where a feature is absent.

    kv_rank, rope_dim: of latent attention (MLA), whose KV is one vector of kv_rank + rope_dim a token, for all heads.
    dense_layers: leading layers that have no experts though the model has.
    window_layers, window_tokens: layers whose attention looks back only so far.
    linear_layers, linear_state: layers without KV, and the elements of state each keeps per sequence.
    sparse_top_k, index_dim: tokens that sparse attention reads, and elements per token of the index that finds them.
    gated: whether the MLP has three matrices instead of two.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    window_layers: int = 0
    window_tokens: int = 0
    linear_layers: int = 0
    linear_state: int = 0
    linear_width: int = 0
    sparse_top_k: int = 0
    index_dim: int = 0
    gated: bool = True
    tied: bool = False

    @property
    def family(self) -> str:
        """The architecture's kind: "dense", "moe", "mla" (latent attention with experts) or "hybrid"."""
        if self.linear_layers or self.window_layers:
            return "hybrid"
        return "mla" if self.kv_rank else "moe" if self.experts else "dense"

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def full_layers(self) -> int:
        """Layers whose attention reads the whole context."""
        return self.layers - self.window_layers - self.linear_layers

    def attention_parameters(self) -> float:
        """Of one attention layer."""
        h, heads = self.hidden, self.heads
        if self.kv_rank:
            query = h * self.q_rank + self.q_rank * heads * self.head_dim if self.q_rank else h * heads * self.head_dim
            nope = self.head_dim - self.rope_dim
            latent = h * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (nope + self.value_dim)
            return query + latent + heads * self.value_dim * h
        return h * self.head_dim * (heads + 2 * self.kv_heads) + heads * self.head_dim * h

    def mlp_parameters(self, intermediate: int) -> float:
        """Of one MLP of that width."""
        return (3 if self.gated else 2) * self.hidden * intermediate

    @property
    def expert_parameters(self) -> float:
        """Of one routed expert of one layer."""
        return self.mlp_parameters(self.expert_intermediate)

    @property
    def dense_parameters(self) -> float:
        """That every token passes, without embeddings and head: attention, dense MLPs, shared experts, routers."""
        attention = (self.layers - self.linear_layers) * self.attention_parameters()
        linear = self.linear_layers * self.hidden * self.linear_width
        dense = (self.layers - self.moe_layers) * self.mlp_parameters(self.intermediate)
        shared = self.moe_layers * (self.mlp_parameters(self.shared_intermediate) + self.hidden * self.experts)
        return attention + linear + dense + shared

    @property
    def head_parameters(self) -> float:
        """Of the output head."""
        return self.hidden * self.vocab

    @property
    def routed_parameters(self) -> float:
        """Of all routed experts."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def total_parameters(self) -> float:
        """All."""
        return self.dense_parameters + self.routed_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> float:
        """That one token passes, with the head."""
        return (
            self.dense_parameters
            + self.head_parameters
            + self.moe_layers * self.experts_per_token * (self.expert_parameters)
        )

    @property
    def kv_elements(self) -> int:
        """KV elements that one token adds to each layer with KV."""
        if self.kv_rank:
            return self.kv_rank + self.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_bytes: float) -> float:
        """KV bytes that a token adds in the layers that keep all; kv_bytes: of one element."""
        return self.full_layers * (self.kv_elements * kv_bytes + self.index_dim)

    def kv_bytes_per_sequence(self, kv_bytes: float) -> float:
        """KV bytes of a long sequence in its windows, and its linear layers' state."""
        window = self.window_layers * self.window_tokens * self.kv_elements * kv_bytes
        return window + self.linear_layers * self.linear_state * _STATE_BYTES

    @property
    def pair_flops(self) -> float:
        """FLOPs of one (query, key) pair in one layer, all heads, in prefill."""
        return 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def decode_pair_flops(self) -> float:
        """The same in decode: latent attention then works on the latent vectors themselves."""
        if self.kv_rank:
            return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)
        return self.pair_flops

    def prefill_flops(self, tokens: int) -> float:
        """Of a prompt that is computed as a whole; the head is computed for its last token only."""
        linear = 2 * (self.active_parameters - self.head_parameters) * tokens
        pairs = self.full_layers * tokens * tokens / 2
        pairs += self.window_layers * tokens * min(self.window_tokens, tokens / 2)
        return linear + pairs * self.pair_flops


def from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape that a config.json describes. Raises ConfigError, naming the field that is needed and absent."""
    text = config.get("text_config", config)

    def get(*names: str, default: int | None = None) -> int:
        for each in names:
            if text.get(each) is not None:
                return int(text[each])
        if default is None:
            raise ConfigError(f"config of {name} has no {names[0]}")
        return default

    layers = get("num_hidden_layers", "n_layer")
    hidden = get("hidden_size", "n_embed", "d_model")
    heads = get("num_attention_heads", "n_head")
    experts = get("num_experts", "n_routed_experts", "num_local_experts", default=0)
    kv_rank = get("kv_lora_rank", default=0)
    rope = get("qk_rope_head_dim", default=0)
    intermediate = get("intermediate_size", "ffn_dim", default=4 * hidden)
    expert_intermediate = get("moe_intermediate_size", default=intermediate) if experts else 0
    shared = get("shared_expert_intermediate_size", default=0)
    shared = shared or expert_intermediate * get("n_shared_experts", default=0)
    types = list(text.get("layer_types") or [])
    window, linear = types.count("sliding_attention"), types.count("linear_attention")
    key_width = get("linear_num_key_heads", default=0) * get("linear_key_head_dim", default=0)
    value_width = get("linear_num_value_heads", default=0) * get("linear_value_head_dim", default=0)
    activation = str(text.get("hidden_act", text.get("activation_function", "gelu" if "n_layer" in text else "silu")))
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", default=heads),
        head_dim=get("qk_nope_head_dim", default=0) + rope if kv_rank else get("head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=get("vocab_size"),
        value_dim=get("v_head_dim", default=0) if kv_rank else 0,
        q_rank=get("q_lora_rank", default=0),
        kv_rank=kv_rank,
        rope_dim=rope if kv_rank else 0,
        experts=experts,
        experts_per_token=get("num_experts_per_tok", default=0),
        expert_intermediate=expert_intermediate,
        shared_intermediate=shared,
        dense_layers=get("first_k_dense_replace", default=0) if experts else 0,
        window_layers=window,
        window_tokens=get("sliding_window", default=0) if window else 0,
        linear_layers=linear,
        linear_state=value_width * get("linear_key_head_dim", default=0),
        linear_width=2 * key_width + 3 * value_width,
        sparse_top_k=get("index_topk", default=0),
        index_dim=get("index_head_dim", default=0),
        gated=activation not in ("relu", "gelu", "gelu_new"),
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )
