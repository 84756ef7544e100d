"""`day0 init`: the two files that a new port starts from. Knows the user's folder; must not know how a port is run."""

from __future__ import annotations

from pathlib import Path

from harness.errors import UsageError

CONFIG_NAME, PORT_NAME = "day0.toml", "port.py"

CONFIG = """\
# How `day0 verify` judges this port. Every key is optional; a line that starts with `# key` shows the default.
# Paths are relative to this file. `--set section.key=value` goes over flags, flags over this file.

[reference]                       # the side that is believed
spec = "builtin:reference"        # a transformers folder: "hf:/models/NAME"
# dtype = "float32"               # one precision above the port unless set
# options = { attn = "eager" }    # what the adapter takes, as text; the same as "?attn=eager" in the spec; a folder
                                  # that is larger than memory: { stream = "1" }

[accel]                           # your port
spec = "port.py:port"             # FILE.py:function, package.module:function, hf:PATH, openai:URL, serve:COMMAND
# dtype = "bfloat16"              # the precision that it declares: its noise floor is measured in it
# precision = { weights = "float8_e4m3fn:128x128", activations = "int8:token", cache = "float8_e4m3fn:tensor" }
                                  # what it rounds to beside its dtype: the floor then does the same
# python = "/opt/vendor/bin/python"   # another interpreter, for a vendor's own environment
# options = { device = "cpu" }

[run]
# checkpoint = "/models/NAME"     # where neither spec names one (two of your own functions)
# layers = "0-3,47,92"            # these layers alone, at true width: a cut checkpoint for both sides
# random_weights = false          # make weights up, where there is only a configuration yet
# stage = "all"                   # load, startup, text, image, multi_card, long_context; earlier ones run too
# out = "day0-run"
# profile = "quick"               # or "full": more cases, tails, longer ladders
# require = ["image"]             # refuse the run if one of these is skipped
# keep_going = false              # run later stages although an earlier one was refused
# checklists = "checklists"       # your own limits, instead of the shipped ones
# goldens = "goldens"             # recorded reference traces, to carry between machines

[scope]                           # what the port claims; nothing here leaves its own claim
# image = false
# layouts = ["single", "tp2"]     # several cards: tp, ep, pp, sp and their degrees
# max_length_tokens = 1024
# off = { chat = "no tokenizer on this device" }        # a feature that is absent, with the reason
# unobservable = { "layers.*.attn.*" = "fused kernel" } # taps that cannot be shown, with the reason

[watchdog]                        # seconds without a sign of life before the port counts as hung
# load_s = 600
# run_s = 300
# startup_s = 300
"""

PORT = '''\
"""The port under test. day0 calls `port(checkpoint, setup)` in a process of its own and judges what it returns.

As it stands it returns the built-in port of the built-in model, so that `day0 verify` runs at once. Replace the body by
your own model. What day0 accepts, the least work first:

1. A torch.nn.Module that is called like a transformers model (`input_ids`, and `position_ids`, `past_key_values` or
   `cache` where it has them) and gives `.logits`. Nothing else is needed: places to look are found by structure.

       from transformers import AutoModelForCausalLM
       model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, setup.dtype))
       return model.to(setup.device).eval()

2. An Adapter (harness/adapter.py): five methods, for engines that are no nn.Module. Inside, call `record(tap, tensor)`
   at each place worth looking at, and go on with what it returns: that is how each unit is judged by itself.

       h = record(f"layers.{i}.attn", self.attention(i, h), dims="batch token feature")

Name the reference and the checkpoint in day0.toml: `[reference] spec = "hf:/models/NAME"`.
"""

from __future__ import annotations

from pathlib import Path


def port(checkpoint: Path, setup):
    """Return the port. `setup.dtype`, `setup.device`, `setup.options` (text) and `setup.layout` say how to run."""
    from accel_impl import adapter  # the built-in port: replace by your own

    return adapter(checkpoint, setup)
'''


def scaffold(folder: Path) -> list[Path]:
    """Write `day0.toml` and `port.py` into a folder. Raises UsageError rather than overwrite a file."""
    files = {folder / CONFIG_NAME: CONFIG, folder / PORT_NAME: PORT}
    taken = [str(path) for path in files if path.exists()]
    if taken:
        raise UsageError(
            f"{' and '.join(taken)} already there; name another folder, or remove them: nothing was written"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error}") from None
    return list(files)
