"""`python -m twostroke.launch.convert FILE.gguf FOLDER`: a GGUF file as a folder in the Hugging Face layout.

Prints one line per step. Ends when its stdin is closed, so that it never outlives the process that waits for it. The
weights become bfloat16, the tokenizer keeps its chat template.

Two things that the loader repeats are done once here, the same bytes coming out in 7 s instead of 20 s: it parses the
file three times, through numpy.memmap, whose slices cost several times those of an array; and it builds the table of
tensor names once per module of the model, 400 times.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from twostroke.config import set_environment


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    data: Any

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.data, np.memmap):
            self.data = np.asarray(self.data)
        return super()._get(*args, **kwargs)


def _step(name: str) -> None:
    sys.stdout.write(f"step: {name}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock a blocked reader would still hold at the end of the process.
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """Entry point."""
    source, target = Path(sys.argv[1]), sys.argv[2]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_environment(HF_HUB_OFFLINE="1")
    gguf.GGUFReader = functools.cache(_Reader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    _step("reading the file")
    # Kept for the loader below; and a file that cannot be read fails before the slow imports.
    gguf.GGUFReader(str(source))
    _step("importing transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _step("unpacking the weights")
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=unpacked)
    _step("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**place)
    _step("writing the model")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
