"""Adding a model: a family in one temporary file runs, without a line changed elsewhere."""

import sys
from pathlib import Path

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
from jaxserve.request import SamplingParams
from model_zoo import registry
from tests.equivalence.rig import ONLY_GREEDY, generate, write_tokenizer
from tests.models.weight_files import write_folder
from tests.reference import tiny
from tests.reference.dense import Dense

TOY = '''
"""Toy: Llama whose file has other names, and whose norms lack 1."""

from model_zoo.family import Family
from model_zoo.hf_config import Fields


def config_from_hf(hf, *, dtype="float32", max_len=0):
    return Fields(hf, "toy", {}).decoder(dtype, max_len, norm_offset=1.0)


FAMILY = Family(
    model_type="toy",
    architectures=("ToyForCausalLM",),
    config_from_hf=config_from_hf,
    names={
        "attention.query": "q",
        "attention.key": "k",
        "attention.value": "v",
        "attention.mix": "out",
        "one": "norm1",
        "two": "norm2",
        "gate": "gate",
        "up": "up",
        "down": "down",
    },
)
'''
NAMES = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.mix",
    "input_layernorm": "one",
    "post_attention_layernorm": "two",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}


def toy_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def test_a_family_in_a_file_of_its_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_family.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register("toy", "toy_family")
    config = tiny.CONFIGS["untied"]
    weights = tiny.make_weights(config, seed=3)
    toy = {
        toy_name(name): array - np.float32(1) if "norm" in name else array
        for name, array in weights.items()
    }
    hf = config | {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    folder = write_folder(tmp_path / "model", hf, toy)
    write_tokenizer(folder)
    assembly = assemble(
        EngineConfig(
            model=ModelConfig(name=str(folder), dtype="float32", max_len=64),
            cache=CacheConfig(block_size=8, num_blocks=32),
            scheduler=SchedulerConfig(token_budget=16, max_seqs=2),
            buckets=BucketConfig(tokens=(16,), rows=(2,)),
            sampling=ONLY_GREEDY,
            runner=RunnerConfig(compile_cache="off", prove=False),
        )
    )
    prompt = tiny.make_prompt(21, 4)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (answer,) = generate(assembly.engine, [prompt], sampling)
    assembly.close()
    del sys.modules["toy_family"]
    assert answer.tokens == Dense(config, weights).greedy(prompt, 8)
