"""One plain vLLM engine, as the truth: `python single_engine.py MODEL answers.json < cases.json`.

Cases: {"name": {"prompt": text or token ids, "tokens": n, "max_tokens": n, ...sampling}}. Knows nothing of twostroke.
"""

import json
import os
import sys

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> None:
    from vllm import LLM, SamplingParams

    cases = json.load(sys.stdin)
    engine = LLM(
        sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        generation_config="vllm",
        disable_log_stats=True,
    )
    answers = {}
    for name, case in cases.items():
        prompt = case.pop("prompt")
        if isinstance(prompt, str):
            prompt = engine.get_tokenizer().encode(prompt)
        prompt = prompt[: case.pop("tokens", None)]
        output = engine.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, **case), use_tqdm=False)[
            0
        ].outputs[0]
        answers[name] = {
            "prompt": prompt,
            "token_ids": list(output.token_ids),
            "text": output.text,
            "finish_reason": output.finish_reason,
        }
    with open(sys.argv[2], "w") as file:  # noqa: PTH123 no imports before vLLM
        json.dump(answers, file)


if __name__ == "__main__":
    main()
