"""Makes the committed files of tests/reference with transformers on the CPU, in float32.

    python3.11 -m venv ref && ref/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0
    PYTHONPATH=. ref/bin/python tools/make_references.py tiny
    PYTHONPATH=. ref/bin/python tools/make_references.py real --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    PYTHONPATH=. ref/bin/python tools/make_references.py real --gguf gemma3-270m.gguf
    PYTHONPATH=. ref/bin/python tools/make_references.py long --gguf A.gguf B.gguf
    PYTHONPATH=. ref/bin/python tools/make_references.py golden --bench FOLDER

`tiny`: logits and greedy ids of the random models in tests/reference/tiny.py.  `real`:
log-probabilities of prompts and 64 greedy ids from the weights of a model that can be fetched by
name, dequantised and put in order by reference_weights.py, independently of the product's loader.
`long`: log-probabilities of long_text.txt, of both such models.  `golden`: the benchmark's W1 and
W4 workloads with the outputs on which transformers and vLLM agree. Each file names the versions
that made it.
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
from tools.reference_weights import read_gguf

FOLDER = Path(__file__).parents[1] / "tests" / "reference"
NUM_GREEDY = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the committed reference files.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("tiny").set_defaults(run=lambda args: make_tiny())
    real = commands.add_parser("real")
    real.add_argument("--gguf", required=True, type=Path)
    real.set_defaults(run=lambda args: make_real(args.gguf))
    long = commands.add_parser("long")
    long.add_argument("--gguf", required=True, type=Path, nargs="+")
    long.set_defaults(run=lambda args: make_long(args.gguf))
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
    greedy steps' gaps.  Of Gemma 3: real_gemma3.
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
    stem = {"llama": "real", "gemma3_text": "real_gemma3"}[config["model_type"]]
    np.savez_compressed(FOLDER / f"{stem}.npz", **arrays)
    header = {"versions": versions(), "source": source_of(gguf_path), "config": config}
    write_json(FOLDER / f"{stem}.json", header | {"prompts": prompts})


def make_long(gguf_paths: list[Path]) -> None:
    """long.json and long.npz: by model_type the ids of long_text.txt and what each is given."""
    text = (FOLDER / "long_text.txt").read_text()
    arrays, models = {}, {}
    for path in gguf_paths:
        config, weights = read_gguf(path)
        ids = load_encoder(path)(text)
        logprobs = chosen_logprobs(forward(build(config, weights), ids), ids)
        arrays[config["model_type"]] = logprobs
        perplexity = float(np.exp(-logprobs[1:].mean(dtype=np.float64)))
        found = {"source": source_of(path), "perplexity": perplexity, "ids": ids}
        models[config["model_type"]] = found
    np.savez_compressed(FOLDER / "long.npz", **arrays)
    write_json(FOLDER / "long.json", {"versions": versions(), "models": models})


def source_of(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


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
    chosen = [0.0]
    for row, token in zip(logits[:-1], ids[1:], strict=True):  # in float64 a row at a time
        shifted = row.astype(np.float64) - row.max()
        chosen.append(shifted[token] - np.log(np.exp(shifted).sum()))
    return np.asarray(chosen, np.float32)


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
