"""What the sampler must do, in numpy with explicit sorts, float64 and one row at a time."""

import itertools

import numpy as np

from jaxserve.batch.step import SampleInputs

SLACK = 3e-6  # of probability: borders closer than this may fall either way


def sample_inputs(rows: int, vocab: int, **options) -> SampleInputs:
    """Neutral inputs, every row with its own seed; `options` replace fields and are broadcast."""
    neutral = {
        "token_index": np.arange(rows, dtype=np.int32),
        "seats": np.arange(rows, dtype=np.int32),
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.full(rows, vocab, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        "repetition": np.ones(rows, np.float32),
        "seed": np.stack([np.arange(rows), np.arange(rows) + 7], axis=1).astype(np.uint32),
        "sample": np.zeros(rows, np.int32),
        "position": np.arange(rows, dtype=np.int32),
        "suppress_stops": np.zeros(rows, bool),
        "stop_ids": np.full((rows, 4), vocab, np.int32),
        "bias_ids": np.full((rows, 6), vocab, np.int32),
        "bias": np.zeros((rows, 6), np.float32),
    }
    for name, value in options.items():
        field = neutral[name]
        neutral[name] = np.broadcast_to(np.asarray(value, field.dtype), field.shape).copy()
    return SampleInputs(**neutral)


def take_rows(x: SampleInputs, rows) -> SampleInputs:
    return SampleInputs(*(np.asarray(field)[rows] for field in x))


def adjusted(logits: np.ndarray, counts: np.ndarray, x: SampleInputs, row: int) -> np.ndarray:
    """float64[V]: penalties, then bias, then suppressed stop ids."""
    values = logits.astype(np.float64).copy()
    for token in range(len(values)):
        if counts[token]:
            factor = float(x.repetition[row])
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        times = counts[token] >> 1
        values[token] -= float(x.frequency[row]) * times
        values[token] -= float(x.presence[row]) * (times > 0)
    for token, bias in zip(x.bias_ids[row], x.bias[row], strict=True):
        if token < len(values):
            values[token] += bias
    if x.suppress_stops[row]:
        values[[token for token in x.stop_ids[row] if token < len(values)]] = -np.inf
    return values


def probabilities(values: np.ndarray, x: SampleInputs, row: int) -> np.ndarray:
    """float64[V]: what the filters leave of one row of adjusted logits."""
    weights = np.exp((values - values.max()) / float(x.temperature[row]))
    by_value = np.lexsort((np.arange(len(values)), -values))
    k = int(x.top_k[row])
    if 0 < k < len(values):
        weights[by_value[k:]] = 0
    if x.top_p[row] < 1:
        order = np.lexsort((np.arange(len(values)), -weights))
        before = np.cumsum(weights[order]) - weights[order]
        dropped = before >= max(float(x.top_p[row]), 1e-12) * weights.sum()
        weights[order[dropped]] = 0
    weights[weights < min(float(x.min_p[row]), 1.0)] = 0
    return weights / weights.sum()


def draw(values: np.ndarray, x: SampleInputs, row: int, u: float) -> int:
    """The token that `u` in [0, 1) selects."""
    if x.temperature[row] < 1e-4:
        return int(np.argmax(values))
    share = probabilities(values, x, row)
    return int(np.searchsorted(np.cumsum(share), u * share.sum(), side="right"))


def possible(values: np.ndarray, x: SampleInputs, row: int, u: float) -> set[int]:
    """The tokens `draw` may give when u and the borders move by SLACK: rounding may decide between
    them.
    """
    tokens = set()
    for du, dp, dm in itertools.product((0, -SLACK, SLACK), repeat=3):
        near = x._replace(
            top_p=x.top_p + np.float32(dp) * (x.top_p < 1), min_p=x.min_p * np.float32(1 + dm)
        )
        tokens.add(draw(values, near, row, min(max(u + du, 0.0), 1 - 1e-12)))
    return tokens
