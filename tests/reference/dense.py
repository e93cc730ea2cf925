"""An independent dense numpy implementation of Llama-architecture models: no cache, no chunks, no
padding.

It reads a Hugging Face config and weights under their Hugging Face names, computes full causal
attention for every call, and shares no code with the product.  T tokens, D model, N query heads, K
kv heads, H head dim, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.reference.dense_rope import frequencies


class Dense:
    """`length` is the request length that the rope frequencies are made for; None: the tokens of
    each call, which is what transformers does when it computes without a cache.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: Mapping[str, np.ndarray],
        *,
        dtype: Any = np.float32,
        length: int | None = None,
        window: int | None = None,  # a token sees itself and the window - 1 tokens before it
        soft_cap: float | None = None,  # scores become cap * tanh(scores / cap)
    ) -> None:
        self.config, self.dtype = config, dtype
        self.weights = {name: np.asarray(w, dtype) for name, w in weights.items()}
        self.length, self.window, self.soft_cap = length, window, soft_cap
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads") or self.num_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V] next-token logits after each token."""
        table = self.weights["model.embed_tokens.weight"]
        hidden = table[np.asarray(tokens)]
        cos, sin = self._rope(len(tokens))
        mask = self._mask(len(tokens))
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            hidden = hidden + self._attention(normed, prefix + "self_attn.", cos, sin, mask)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            hidden = hidden + self._mlp(normed, prefix + "mlp.")
        head = table if self.config.get("tie_word_embeddings") else self.weights["lm_head.weight"]
        return self._norm(hidden, "model.norm.weight") @ head.T

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V] log-softmax of `logits`, in float64."""
        return log_softmax(self.logits(tokens))

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` most likely continuations, one after another; of equals the lower id."""
        known = list(tokens)
        for _ in range(count):
            known.append(int(np.argmax(self.logits(known)[-1])))
        return known[len(tokens) :]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        variance = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(variance + self.dtype(self.config["rms_norm_eps"])) * self.weights[name]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate = self._linear(x, prefix + "gate_proj")
        with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, 0
            activated = gate / (1 + np.exp(-gate))
        return self._linear(activated * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _rope(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, each [T, 1, H / 2]."""
        inv_freq, magnitude = frequencies(self.config, self.head_dim, self.length or count)
        angles = np.arange(count)[:, None, None] * inv_freq
        return (
            (magnitude * np.cos(angles)).astype(self.dtype),
            (magnitude * np.sin(angles)).astype(self.dtype),
        )

    def _mask(self, count: int) -> np.ndarray:
        """bool[T, T]: query (first axis) sees key."""
        distance = np.arange(count)[:, None] - np.arange(count)[None, :]
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def _attention(
        self, x: np.ndarray, prefix: str, cos: np.ndarray, sin: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        count, H = len(x), self.head_dim
        q = self._linear(x, prefix + "q_proj").reshape(count, self.num_heads, H)
        k = self._linear(x, prefix + "k_proj").reshape(count, self.num_kv_heads, H)
        v = self._linear(x, prefix + "v_proj").reshape(count, self.num_kv_heads, H)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        group = self.num_heads // self.num_kv_heads
        out = np.empty_like(q)
        for head in range(self.num_heads):
            scores = q[:, head] @ k[:, head // group].T * self.dtype(H**-0.5)
            if self.soft_cap is not None:
                scores = self.dtype(self.soft_cap) * np.tanh(scores / self.dtype(self.soft_cap))
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
        return self._linear(out.reshape(count, self.num_heads * H), prefix + "o_proj")


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates the pairs (i, i + H / 2) of [T, heads, H], the order of Hugging Face checkpoints."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
