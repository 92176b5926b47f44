"""One base model, and a LoRA adapter for some of the requests.

    python examples/lora.py ADAPTER [MODEL]

ADAPTER is a folder as PEFT writes it, with adapter_config.json and adapter_model.safetensors.
"""

import sys

from specrs import LLM, LoRARequest, SamplingParams

adapter = sys.argv[1]
llm = LLM(model=sys.argv[2] if len(sys.argv) > 2 else None, enable_lora=True, max_lora_rank=64, max_num_seqs=2)
prompts = ["def add(a, b):", "def add(a, b):"]
tuned = LoRARequest("tuned", 1, adapter)

outputs = llm.generate(
    prompts,
    SamplingParams(temperature=0.0, max_tokens=32),
    lora_request=[None, tuned],  # the base model, then the adapter
    use_tqdm=False,
)
for name, output in zip(("base", "tuned"), outputs, strict=True):
    print(f"--- {name}\n{output.outputs[0].text}\n")
