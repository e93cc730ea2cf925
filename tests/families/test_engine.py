"""Every family through the whole engine: 64 greedy ids of transformers, whatever the chunks, with
requests preempted and prefixes cached.

The default run takes a few families; all of them: python -m pytest -m slow tests/families
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.build import assemble
from jaxserve.config import (
    BucketConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from jaxserve.engine import Engine, ModelLimits
from jaxserve.kv.groups import row_blocks
from jaxserve.request import SamplingParams
from model_zoo.weights import open_checkpoint
from tests.equivalence.rig import (
    EOS,
    ONLY_GREEDY,
    Answer,
    Poisoner,
    generate,
    refuse_growth,
    rounded_to_int8,
    write_tokenizer,
)
from tests.families.cases import LENGTH, NAMES, NUM_GREEDY, SHORT, VOCAB, Case, case
from tests.models.weight_files import write_folder

BLOCK = 8
MAX_LEN = LENGTH + NUM_GREEDY + 2
CHUNKS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 13, MAX_LEN)
TIGHT, ROOMY = 1.5, 4  # pool to what the longest of three requests (17 + 13 + 13 blocks) needs
REFUSED = (4, 9, 25)  # wishes for a block: where a window lets blocks go, TIGHT may be enough
FEW = ("gemma3", "mistral", "qwen3_moe")
OFF = 4e-3  # of log-probabilities with int8 weights: activations have 16 bits where rows are few
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True, logprobs=1, prompt_logprobs=1
)


class FamilyRig:
    """One family's committed checkpoint behind the real engine and runner."""

    def __init__(self, folder: Path, case: Case, quantize: str = "none") -> None:
        shutil.copytree(case.folder, folder, dirs_exist_ok=True)
        write_tokenizer(folder)
        config = EngineConfig(
            model=ModelConfig(str(folder), "float32", quantize, max_len=MAX_LEN),
            cache=CacheConfig(block_size=BLOCK, num_blocks=256),
            scheduler=SchedulerConfig(
                token_budget=MAX_LEN, max_seqs=3, chunk_size=MAX_LEN, watermark=0.0
            ),
            buckets=BucketConfig(tokens=(16, MAX_LEN), rows=(3,)),
            sampling=ONLY_GREEDY,
            runner=RunnerConfig(compile_cache="off", prove=True),
        )
        self.assembly = assemble(config)

    def engine(self, chunk: int, share: float) -> Engine:
        """A fresh engine on a cache full of NaN, also where blocks were let go; nothing reserved:
        with a tight pool it preempts.

        The pool is the first part of the one that was compiled.
        """
        runner = self.assembly.runner

        def nan(array: jax.Array) -> jax.Array:
            return jax.device_put(np.full(array.shape, np.nan, array.dtype), array.sharding)

        runner.state.kv = jax.tree.map(nan, runner.state.kv)
        scheduler = dataclasses.replace(
            self.assembly.config.scheduler,
            mode="fixed",
            chunk_size=chunk,
            reserve_full_prompt=False,
        )
        windows = self.assembly.engine.limits.windows
        num_blocks = int(share * row_blocks(windows, MAX_LEN, BLOCK, chunk))
        cache = dataclasses.replace(self.assembly.config.cache, num_blocks=num_blocks)
        config = dataclasses.replace(self.assembly.config, scheduler=scheduler, cache=cache)
        engine = Engine(config, runner, ModelLimits(VOCAB, frozenset({EOS}), windows))
        Poisoner(engine, runner)
        return engine


def check(rig: FamilyRig, expected: Case, chunk: int) -> None:
    engine = rig.engine(chunk, TIGHT)
    refuse_growth(engine, REFUSED)
    prompts = [expected.prompts[length] for length in (LENGTH, SHORT, SHORT)]
    unscored = dataclasses.replace(GREEDY, prompt_logprobs=None)  # takes prefix hits
    sampling = [GREEDY, GREEDY, unscored]
    for _ in range(2):
        answers = generate(engine, prompts, sampling)
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.tokens == expected.greedy[len(prompt)], f"chunks of {chunk}"
    assert engine.stats.preemptions >= 1
    logits = expected.logits.astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    scores: Any = answers[0].prompt_logprobs
    found = [entry.logprob for entry in scores[1:]]
    wanted = logprobs[np.arange(LENGTH - 1), prompts[0][1:]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    engine = rig.engine(chunk, ROOMY)
    for hit in (0, SHORT - 1):
        (answer,) = generate(engine, prompts[1:2], unscored)
        assert answer.tokens == expected.greedy[SHORT], f"chunks of {chunk}"
        assert answer.request.num_cached == hit // BLOCK * BLOCK


@pytest.mark.parametrize("name", FEW)
def test_greedy_ids_equal_transformers(tmp_path: Path, name: str) -> None:
    rig = FamilyRig(tmp_path, case(name))
    check(rig, case(name), BLOCK + 1)
    rig.assembly.close()


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_int8_experts_answer_as_float32_ones_of_the_same_values(tmp_path: Path, name: str) -> None:
    """Weights that int8 holds exactly; chunks in the bucket whose dense weights are converted, and
    in the one of integers."""
    weights = {key: np.float32(w) for key, w in open_checkpoint(case(name).folder).tensors()}
    matrices = {key: w for key, w in weights.items() if not key.endswith(".gate.weight")}
    exact = weights | rounded_to_int8(matrices)
    rounded = case(name)._replace(
        folder=write_folder(tmp_path / "rounded", case(name).config, exact)
    )
    found = []
    for quantize, chunks in (("none", (MAX_LEN,)), ("int8", (13, MAX_LEN))):
        rig = FamilyRig(tmp_path / quantize, rounded, quantize)
        types = {array.dtype.name for array in jax.tree.leaves(rig.assembly.runner.weights)}
        assert ("int8" in types) == (quantize == "int8")
        prompts = list(rounded.prompts.values())
        found += [generate(rig.engine(chunk, ROOMY), prompts, GREEDY) for chunk in chunks]
        rig.assembly.close()
    expected, *others = found
    for answers in others:
        for answer, wanted in zip(answers, expected, strict=True):
            assert answer.tokens == wanted.tokens
            np.testing.assert_allclose(_logprobs(answer), _logprobs(wanted), rtol=0, atol=OFF)


def _logprobs(answer: Answer) -> list[float]:
    entries = [*(answer.prompt_logprobs or ())[1:], *answer.logprobs]
    return [entry.logprob for entry in entries if entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_matrix(tmp_path: Path, name: str) -> None:
    """Families times chunk sizes, each with preemption, prefix hits and overlap."""
    rig = FamilyRig(tmp_path, case(name))
    for chunk in CHUNKS:
        check(rig, case(name), chunk)
    rig.assembly.close()
