"""Step times from first principles: what a batch computes, reads and sends, over what the hardware can do.

    step = hypot-like(compute, weights read) of the dense layers, of the experts and of the head
         + KV read + prefill attention + collectives
         + fixed times per layer, per step, per sequence and per prompt token

The few efficiencies that say how much of a datasheet an engine reaches are fitted (fit.py); everything else is counted.
All formulas take numbers or numpy arrays alike, so that a fit evaluates a whole run at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from twostroke.errors import ConfigError
from twostroke.policy.step_model import StepModel
from twostroke.sim.perf.hardware import Hardware
from twostroke.sim.perf.model_shape import ModelShape

_ACTIVATION_BYTES = 2
_MOST_RESERVE_BYTES = 4e9


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element and operand types.

    dense_bytes, expert_bytes: of a weight outside and inside routed experts. dense_operand, expert_operand: what the
    matrix units multiply, "bf16", "fp8" or "fp4". kv_bytes: of a KV element.
    """

    name: str
    dense_bytes: float
    expert_bytes: float
    dense_operand: str
    expert_operand: str
    kv_bytes: float = 2.0


def precision(name: str, shape: ModelShape, hardware: Hardware, kv_bytes: float = 2.0) -> Precision:
    """A usual way of quantising: "bf16", "fp8", "fp8_block", "nvfp4", "mxfp4" or "int4". Raises ConfigError.

    4-bit formats quantise only the experts of a model that has experts. Where the hardware has no such matrix units the
    weights are widened first: bytes shrink, compute does not.
    """
    four_bits = {"nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.53125}
    if name == "bf16":
        return Precision(name, 2, 2, "bf16", "bf16", kv_bytes)
    if name in ("fp8", "fp8_block"):
        return Precision(name, 1, 1, "fp8", "fp8", kv_bytes)
    if name not in four_bits:
        raise ConfigError(f"no precision {name}; known are bf16, fp8, fp8_block, nvfp4, mxfp4 and int4")
    size = four_bits[name]
    operand = "fp4" if name == "nvfp4" and hardware.fp4_flops else "bf16"
    if name == "mxfp4" and hardware.fp4_flops:
        operand = "fp8"
    if shape.experts:
        return Precision(name, 2, size, "bf16", operand, kv_bytes)
    return Precision(name, size, size, operand, operand, kv_bytes)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a worker is spread over accelerators.

    tp: ranks that share each layer's attention. dp: attention replicas, each with its own sequences. ep: ranks over
    which whole experts are spread; the other tp * dp / ep ranks split each expert. pp: stages.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """Accelerators of the worker."""
        return self.tp * self.pp * self.dp

    @property
    def expert_shards(self) -> int:
        """Ranks among which one expert is split."""
        return max(self.tp * self.dp // self.ep, 1)


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What an engine makes of the hardware. Ratios of datasheet figures, and seconds.

    weights, expert_weights, kv: of memory bandwidth. expert_variety: share of the experts among which the
    tokens of one step choose. compute, expert_compute, attention: of matrix FLOP/s.
    link: of link bandwidth in collectives; hop_s: latency of one of them; second_shot_s: what one more costs that
    sends less (every rank a part instead of all).
    layer_s, expert_layer_s: per layer and step, further per layer with experts. step_s, sequence_s, token_s: per step,
    per decoding sequence, per new prompt token. prefill_layer_s: per layer of a step that has prefill, the
    time to launch it, which overlaps with what was launched before. first_token_s,
    first_token_per_token_s: of a request outside the engine's steps, before its first token.
    """

    weights: float = 0.75
    expert_weights: float = 0.6
    expert_variety: float = 0.7
    kv: float = 0.6
    compute: float = 0.6
    expert_compute: float = 0.4
    attention: float = 0.4
    link: float = 0.6
    hop_s: float = 8e-6
    second_shot_s: float = 1.5e-5
    layer_s: float = 20e-6
    expert_layer_s: float = 20e-6
    step_s: float = 5e-4
    sequence_s: float = 1e-5
    token_s: float = 1e-7
    prefill_layer_s: float = 1e-4
    first_token_s: float = 1.5e-2
    first_token_per_token_s: float = 1e-6


EFFICIENCY_NAMES = tuple(each.name for each in fields(Efficiencies))
RATIOS = frozenset(name for name in EFFICIENCY_NAMES if not name.endswith("_s"))
"""Efficiencies that are shares, between 0 and 1."""


@dataclass(frozen=True, slots=True)
class RooflineStepModel(StepModel):
    """StepModel of one worker. Its batches are the whole worker's and taken as spread evenly over dp and pp."""

    shape: ModelShape
    hardware: Hardware
    precision: Precision
    parallel: Parallel = Parallel()
    efficiencies: Efficiencies = Efficiencies()

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """See StepModel."""
        return self.base_s(sequences, 0, 0.0, 0), self.context_token_s()

    def batch_s(self, sequences: int, context_tokens: int, new_tokens: int, pairs: float, chunks: int = 1, /) -> float:
        """See StepModel."""
        if sequences + new_tokens == 0:
            return 0.0
        base_s = self.base_s(sequences, new_tokens, pairs, chunks)
        return float(base_s + self.context_token_s() * context_tokens)

    def context_token_s(self) -> float:
        """Seconds that one token of context adds to a decode step: reading its KV, or multiplying with it."""
        shape, hw, par, eff = self.shape, self.hardware, self.parallel, self.efficiencies
        # Latent KV has one head, so every rank of a tensor-parallel group reads all of it.
        split = 1 if shape.kv_rank else min(par.tp, shape.kv_heads)
        read = shape.full_layers * shape.kv_elements * self.precision.kv_bytes / split
        compute = shape.full_layers * shape.decode_pair_flops / par.tp
        index_s = shape.full_layers * shape.index_dim / (hw.memory_bytes_per_s * eff.kv)
        dense_s = _either(read / (hw.memory_bytes_per_s * eff.kv), compute / (hw.bf16_flops * eff.attention))
        # Sparse attention reads a fixed number of tokens (see base_s); only its index grows with the context.
        return (index_s if shape.sparse_top_k else dense_s + index_s) / par.dp

    def base_s(self, sequences: Any, prefill_tokens: Any, prefill_pairs: Any, prefill_chunks: Any) -> Any:
        """Seconds of a step but for its decode context. Numbers or arrays."""
        shape, hw, par, eff = self.shape, self.hardware, self.parallel, self.efficiencies
        local_sequences = sequences / (_spread(sequences, par.dp) * par.pp)
        chunk_ranks = _spread(prefill_chunks, par.dp) * par.pp
        local = local_sequences + prefill_tokens / chunk_ranks
        memory = hw.memory_bytes_per_s
        dense_s = _either(
            2 * shape.dense_parameters * local / (par.tp * hw.flops(self.precision.dense_operand) * eff.compute),
            shape.dense_parameters * self.precision.dense_bytes / (par.tp * memory * eff.weights),
        )
        sampled = local_sequences + prefill_chunks / chunk_ranks
        head_s = _either(
            2 * shape.head_parameters * sampled / (par.tp * hw.bf16_flops * eff.compute),
            shape.head_parameters * 2 / (par.tp * memory * eff.weights),
        )
        sequence_bytes = shape.kv_bytes_per_sequence(self.precision.kv_bytes)
        if shape.sparse_top_k:
            sequence_bytes += shape.full_layers * shape.kv_elements * self.precision.kv_bytes * shape.sparse_top_k
        split = 1 if shape.kv_rank else min(par.tp, max(shape.kv_heads, 1))
        state_s = local_sequences * sequence_bytes / (split * memory * eff.kv)
        pairs = shape.full_layers * prefill_pairs + shape.window_layers * prefill_tokens * shape.window_tokens
        attention_s = pairs * shape.pair_flops / (chunk_ranks * par.tp * hw.bf16_flops * eff.attention)
        fixed_s = shape.layers * eff.layer_s + eff.step_s + shape.moe_layers * eff.expert_layer_s
        per_item_s = eff.sequence_s * sequences / par.dp + eff.token_s * prefill_tokens / par.dp
        experts_s = self._experts_s((sequences + prefill_tokens) / par.pp)
        micro = dense_s + head_s + experts_s + state_s + attention_s + self._links_s(local) + fixed_s
        launch_s = (prefill_tokens > 0) * shape.layers * eff.prefill_layer_s
        return _either(micro * (2 * par.pp - 1) / par.pp, launch_s) + per_item_s

    def _experts_s(self, tokens: Any) -> Any:
        shape, hw, par, eff = self.shape, self.hardware, self.parallel, self.efficiencies
        if not shape.experts:
            return 0.0
        routed = shape.moe_layers * shape.expert_parameters
        chosen_among = shape.experts_per_token + eff.expert_variety * (shape.experts - shape.experts_per_token)
        missed = (1 - shape.experts_per_token / chosen_among) ** tokens
        touched = chosen_among * (1 - missed) / par.ep
        flops = 2 * routed * shape.experts_per_token * tokens / (par.ep * par.expert_shards)
        return _either(
            flops / (hw.flops(self.precision.expert_operand) * eff.expert_compute),
            routed * touched * self.precision.expert_bytes
            / (par.expert_shards * hw.memory_bytes_per_s * eff.expert_weights),
        )  # fmt: skip

    def _links_s(self, local: Any) -> Any:
        """Two all-reduces a layer within a tensor-parallel group; dispatch and combine where experts span groups."""
        shape, hw, par, eff = self.shape, self.hardware, self.parallel, self.efficiencies
        row = shape.hidden * _ACTIVATION_BYTES
        total: Any = 0.0
        if par.tp > 1:
            rate = hw.link_bytes_per_s if par.tp <= hw.node_size else hw.network_bytes_per_s
            to_each_s = (par.tp - 1) * row * local / (rate * eff.link)
            in_parts_s = to_each_s * 2 / par.tp + eff.second_shot_s
            quicker_s = 1 / _either(1 / to_each_s, 1 / in_parts_s)
            total = 2 * shape.layers * (quicker_s + eff.hop_s * _hops(par.tp))
        if par.dp > 1 and shape.experts:
            across = par.dp * par.tp
            rate = hw.link_bytes_per_s if across <= hw.node_size else hw.network_bytes_per_s
            copies = min(shape.experts_per_token, across - 1)
            moved = copies * (1 + _ACTIVATION_BYTES) * shape.hidden * local
            total = total + shape.moe_layers * (moved / (rate * eff.link) + 2 * eff.hop_s * _hops(across))
        if par.pp > 1:
            total = total + (par.pp - 1) * (row * local / (hw.network_bytes_per_s * eff.link) + eff.hop_s)
        return total

    def weight_bytes(self) -> float:
        """Of one accelerator."""
        shape, par = self.shape, self.parallel
        dense = (shape.dense_parameters * self.precision.dense_bytes) / par.tp
        ends = shape.head_parameters * 2 * (1 if shape.tied else 2) / par.tp
        experts = shape.routed_parameters * self.precision.expert_bytes / (par.ep * par.expert_shards)
        return (dense + ends + experts) / par.pp

    def kv_capacity_tokens(
        self, memory_share: float = 0.9, free_share: float = 1.0, reserve_bytes: float | None = None
    ) -> int:
        """Tokens of KV that the worker holds, all its ranks together; 0 when the weights do not fit.

        memory_share: of the memory that the engine may use; reserve_bytes: of it for activations, per accelerator, a
        twentieth of the memory and at most 4 GB when None; free_share: of what weights and activations leave.
        """
        memory = self.hardware.memory_bytes
        reserved = min(_MOST_RESERVE_BYTES, memory / 20) if reserve_bytes is None else reserve_bytes
        free = memory * memory_share - self.weight_bytes() - reserved
        split = 1 if self.shape.kv_rank else min(self.parallel.tp, max(self.shape.kv_heads, 1))
        per_token = self.shape.kv_bytes_per_token(self.precision.kv_bytes) / (split * self.parallel.pp)
        return max(int(free * free_share / per_token) * self.parallel.dp, 0)


def _either(first: Any, second: Any) -> Any:
    """Of two times that overlap: a little more than the larger, as kernels overlap imperfectly near the ridge."""
    first, second = first * first, second * second
    return ((first * first + second * second) ** 0.5) ** 0.5


def _spread(items: Any, ranks: int) -> Any:
    """Ranks among which items of equal size are spread: nearly the smaller of both, and at least one."""
    if ranks == 1:
        return 1
    return 1 / _either(1 / (items + (items == 0)), 1 / ranks)


def _hops(ranks: int) -> float:
    """Latency of a collective against that of a pair: it grows slowly with the ranks."""
    return float(1 + 0.25 * (ranks.bit_length() - 2)) if ranks > 1 else 0.0
