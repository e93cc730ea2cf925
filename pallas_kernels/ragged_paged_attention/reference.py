"""Ragged paged attention in plain numpy, one query at a time: the definition for every kernel."""

import numpy as np


def ragged_paged_attention(  # noqa: PLR0913  the signature of `api`
    q: np.ndarray,  # [T, N, H]
    k: np.ndarray,  # [blocks, block_size, K, H]  keys of one layer
    v: np.ndarray,  # [blocks, block_size, K, H]
    block_tables: np.ndarray,  # i32[B, P]
    query_starts: np.ndarray,  # i32[B + 1]
    kv_lens: np.ndarray,  # i32[B]
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    kv_scales: np.ndarray | None = None,  # f32[K, 2]  of the layer
) -> np.ndarray:
    """Attention output f64[T, N, H]; tokens of no row are zero.

    The queries of row b are its last positions: query j of n sits at kv_lens[b] - n + j, and sees
    the positions up to its own, of those only the last `window` (itself included).  Query head h
    reads kv head h // (N / K).  Scores are q . k * scale (H ** -0.5), then soft_cap * tanh(scores /
    soft_cap).  Keys are k * kv_scales[:, 0], values v * kv_scales[:, 1].
    """
    q = q.astype(np.float64)
    num_tokens, heads, width = q.shape
    kv_heads = k.shape[2]
    scale = width**-0.5 if scale is None else scale
    factors = np.ones((kv_heads, 2)) if kv_scales is None else kv_scales.astype(np.float64)
    out = np.zeros((num_tokens, heads, width))
    for row in range(len(kv_lens)):
        first, end = int(query_starts[row]), int(query_starts[row + 1])
        if first == end:
            continue
        length = int(kv_lens[row])
        row_k = k[block_tables[row]].reshape(-1, kv_heads, width)[:length].astype(np.float64)
        row_k = row_k * factors[:, :1]
        row_v = v[block_tables[row]].reshape(-1, kv_heads, width)[:length].astype(np.float64)
        row_v = row_v * factors[:, 1:]
        for token in range(first, end):
            position = length - (end - token)
            start = 0 if window is None else max(0, position + 1 - window)
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = row_k[start : position + 1, group] @ q[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ row_v[start : position + 1, group] / weights.sum()
    return out
