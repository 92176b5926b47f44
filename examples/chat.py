"""Two turns of a conversation.

    python examples/chat.py [MODEL]

MODEL is a checkpoint folder, a GGUF file or a hub id. Without it the bundled pair answers, which continues Python code.
"""

import sys

from specrs import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else None
drafts = {} if model is None else {"method": "suffix"}  # the bundled draft model, or drafts from the text
llm = LLM(model=model, max_num_seqs=1, speculative_config=drafts)
greedy = SamplingParams(temperature=0.0, max_tokens=64)

messages = []
for question in ("def mean(values):", "def median(values):"):
    messages.append({"role": "user", "content": question})
    (output,) = llm.chat(messages, greedy, use_tqdm=False)
    answer = output.outputs[0].text
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}\n")
