"""Makes the committed files of tests/reference with transformers on the CPU, in float32.

    python3.11 -m venv ref && ref/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0
    PYTHONPATH=. ref/bin/python tools/make_references.py tiny
    PYTHONPATH=. ref/bin/python tools/make_references.py real --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    PYTHONPATH=. ref/bin/python tools/make_references.py golden --bench FOLDER

`tiny`: logits and greedy ids of the random models in tests/reference/tiny.py.  `real`:
log-probabilities of prompts and 64 greedy ids from the weights of the default model, dequantised
and un-permuted here, independently of the product's loader.  `golden`: the benchmark's W1 and W4
workloads with the outputs on which transformers and vLLM agree. Each file names the versions that
made it.
"""

import argparse
import hashlib
import json
import platform
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference import tiny

FOLDER = Path(__file__).parents[1] / "tests" / "reference"
NUM_GREEDY = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the committed reference files.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("tiny").set_defaults(run=lambda args: make_tiny())
    real = commands.add_parser("real")
    real.add_argument("--gguf", required=True, type=Path)
    real.set_defaults(run=lambda args: make_real(args.gguf))
    golden = commands.add_parser("golden")
    golden.add_argument("--bench", required=True, type=Path)
    golden.set_defaults(run=lambda args: make_golden(args.bench))
    args = parser.parse_args()
    args.run(args)


def versions() -> dict[str, str]:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


def make_tiny() -> None:
    """tiny.npz: `NAME.LENGTH` f32[T, V] logits; tiny.json: seeds, weight checksums, greedy ids,
    smallest gaps.
    """
    arrays, cases = {}, {}
    for name, config in tiny.CONFIGS.items():
        seed = zlib.crc32(name.encode()) % 1000
        weights = tiny.make_weights(config, seed)
        model = build(config, weights)
        prompts = {}
        for length in tiny.LENGTHS:
            prompt = tiny.make_prompt(length, seed + length)
            arrays[f"{name}.{length}"] = forward(model, prompt)
            ids, gaps = greedy_without_cache(model, prompt, 24)
            prompts[str(length)] = {"greedy": ids, "smallest_gap": round(min(gaps), 6)}
        cases[name] = {"seed": seed, "sha256": checksum(weights), "prompts": prompts}
    np.savez_compressed(FOLDER / "tiny.npz", **arrays)
    write_json(FOLDER / "tiny.json", {"versions": versions(), "cases": cases})


def make_real(gguf_path: Path) -> None:
    """real.json: ids and greedy ids; real.npz: per prompt the chosen log-probabilities and the
    greedy steps' gaps.
    """
    config, weights = read_gguf(gguf_path)
    model = build(config, weights)
    encode = load_encoder(gguf_path)
    arrays, prompts = {}, {}
    for name, text in json.loads((FOLDER / "real_prompts.json").read_text()).items():
        ids = encode(text)
        logits = forward(model, ids)
        greedy, gaps = greedy_with_cache(model, ids, NUM_GREEDY)
        arrays[f"{name}.logprobs"] = chosen_logprobs(logits, ids)
        arrays[f"{name}.gaps"] = np.asarray(gaps, np.float32)
        prompts[name] = {"ids": ids, "greedy": greedy}
    np.savez_compressed(FOLDER / "real.npz", **arrays)
    source = {"file": gguf_path.name, "sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest()}
    header = {"versions": versions(), "source": source, "config": config}
    write_json(FOLDER / "real.json", header | {"prompts": prompts})


def make_golden(bench: Path) -> None:
    """golden.json: per workload a list of {prompt, max_tokens, output}."""
    result = {}
    for name in ("W1", "W4"):
        lines = (bench / "workloads" / f"{name}.jsonl").read_text().splitlines()
        outputs = json.loads((bench / "golden" / f"{name}-float32.json").read_text())
        requests = [json.loads(line) for line in lines]
        assert len(requests) == len(outputs)
        result[name] = [
            {"prompt": request["prompt_token_ids"], "output": output}
            for request, output in zip(requests, outputs, strict=True)
        ]
        assert all(r["max_tokens"] == len(o) for r, o in zip(requests, outputs, strict=True))
    write_json(FOLDER / "golden.json", result)


def build(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    """A transformers model with exactly these weights; a missing or unknown name fails."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    known = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **known)
    model = AutoModelForCausalLM.from_config(
        made, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    state = {name: torch.from_numpy(w.copy()) for name, w in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def forward(model: Any, ids: list[int]) -> np.ndarray:
    """f32[T, V] logits of one call without a cache."""
    import torch  # pyright: ignore[reportMissingImports]

    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def chosen_logprobs(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """f32[T]: entry i is log p(ids[i] | ids[:i]); entry 0 is 0 and means nothing."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
    return np.concatenate(([0.0], chosen)).astype(np.float32)


def gap(logits: np.ndarray) -> float:
    """Distance between the two best logits: under about 1e-3 another float32 program may choose the
    second.
    """
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def greedy_without_cache(
    model: Any, prompt: list[int], count: int
) -> tuple[list[int], list[float]]:
    known, gaps = list(prompt), []
    for _ in range(count):
        last = forward(model, known)[-1]
        gaps.append(gap(last))
        known.append(int(last.argmax()))
    return known[len(prompt) :], gaps


def greedy_with_cache(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """End-of-sequence ids are ordinary tokens here."""
    import torch  # pyright: ignore[reportMissingImports]

    ids, gaps, cache, fed = [], [], None, prompt
    with torch.inference_mode():
        for _ in range(count):
            out = model(torch.tensor([fed]), cache=cache, use_cache=True)
            cache, last = out.cache, out.logits[0, -1].numpy()
            gaps.append(gap(last))
            ids.append(int(last.argmax()))
            fed = ids[-1:]
    return ids, gaps


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The config and the dequantised float32 weights of a llama GGUF, under their Hugging Face
    names.
    """
    import gguf

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config = {
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": value("rope.freq_base"),
        "tie_word_embeddings": True,
    }
    weights = {}
    for tensor in reader.tensors:
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name.endswith("attn_q.weight"):
            array = unpermute(array, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            array = unpermute(array, config["num_key_value_heads"])
        weights[hf_name(tensor.name)] = array
    config["vocab_size"] = len(weights["model.embed_tokens.weight"])
    return config, weights


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the rotary pair (i, i + H / 2) of a head in rows 2i and 2i + 1; put them back."""
    head_dim = weight.shape[0] // heads
    by_head = weight.reshape(heads, head_dim, -1)
    return np.concatenate((by_head[:, 0::2], by_head[:, 1::2]), axis=1).reshape(weight.shape)


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def load_encoder(path: Path) -> Any:
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return lambda text: tokenizer(text)["input_ids"]


def checksum(weights: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].astype("<f4").tobytes())
    return digest.hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
