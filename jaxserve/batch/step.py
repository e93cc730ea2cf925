"""The values that pass between engine and runner in one step.  No jax, no decisions."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxserve.costs import StepShape
from model_zoo.step_inputs import StepInputs

Array = Any  # numpy on the host, jax.Array inside the step


class SampleInputs(NamedTuple):
    """Everything the sampler needs for R rows; every option has a neutral value (in brackets).

    `A` is the largest number of stop ids, `E` the largest number of bias entries of a request.
    """

    token_index: Array  # i32[R]  index in T of the hidden state to sample from; >= T for padding
    seats: Array  # i32[R]        seat that receives the token; >= seats for padding
    temperature: Array  # f32[R]  0: greedy
    top_k: Array  # i32[R]        [V]
    top_p: Array  # f32[R]        [1]
    min_p: Array  # f32[R]        [0]
    presence: Array  # f32[R]     [0]
    frequency: Array  # f32[R]    [0]
    repetition: Array  # f32[R]   [1]
    seed: Array  # u32[R, 2]      low and high half of the request's seed
    sample: Array  # i32[R]       which of the request's n samples this is
    position: Array  # i32[R]     position the new token will have in its request
    suppress_stops: Array  # bool[R]  True while min_tokens is not reached: stop ids cannot be drawn
    stop_ids: Array  # i32[R, A]  >= V for unused
    bias_ids: Array  # i32[R, E]  >= V for unused
    bias: Array  # f32[R, E]      [0]


class ScoreInputs(NamedTuple):
    """Prompt tokens whose log-probability is asked for, R at a time."""

    token_index: (
        Array  # i32[R]  index in T of the hidden state that predicts the target; >= T for padding
    )
    targets: Array  # i32[R]      token id that follows it


class Logprobs(NamedTuple):
    """Raw log-softmax of the model in float32, before any option; ties: the lower id first."""

    chosen: np.ndarray  # f32[R]       of the sampled (or target) token
    rank: np.ndarray  # i32[R]         1 for the most likely token
    top_ids: np.ndarray  # i32[R, 20]  most likely tokens, best first
    top: np.ndarray  # f32[R, 20]


class SeatReset(NamedTuple):
    """Token counts of a seat start afresh from `tokens`.

    Sent with the first step of a request with penalties; counts before it has run.
    """

    seat: int
    tokens: np.ndarray  # i32[n]  prompt, then output so far
    num_prompt: int


class Batch(NamedTuple):
    """One step as handed to the runner.  Its arrays are fresh and are never edited afterwards.

    `sampler` names the sampling program: "none" (no row samples), "greedy" (temperature 0 and no
    other option), "random" (temperature, top-k, top-p, min-p), "full" (everything).
    """

    packed: np.ndarray  # i32[packed_size]  StepInputs of bucket T
    inputs: StepInputs  # numpy views of `packed`
    num_tokens: int  # real tokens, <= T
    num_samples: int  # real rows of `samples`
    sampler: str
    samples: SampleInputs | None
    logprobs: bool  # some row asks for logprobs of its sampled token
    scores: tuple[ScoreInputs, ...]
    resets: tuple[SeatReset, ...]
    shape: StepShape  # what the time of the step depends on

    @property
    def token_bucket(self) -> int:
        return len(self.inputs.tokens)

    @property
    def row_bucket(self) -> int:
        return 0 if self.samples is None else len(self.samples.seats)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the device returns: row i belongs to row i of `Batch.samples` (real rows first)."""

    tokens: np.ndarray  # i32[R]
    bad: np.ndarray  # bool[R]  the row's logits were not finite: its token means nothing
    logprobs: Logprobs | None  # when Batch.logprobs
    scores: tuple[Logprobs, ...]  # one for each of Batch.scores
    device_s: float  # seconds the device was busy with this step, as far as the host can see
