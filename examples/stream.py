"""Prints text while it is generated, and the acceptance of its drafts.

python examples/stream.py [MODEL]
"""

import sys

from specrs import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else None
drafts = {} if model is None else {"method": "suffix"}
llm = LLM(model=model, max_num_seqs=1, speculative_config=drafts)

for output in llm.stream("class Stack:", SamplingParams(temperature=0.0, max_tokens=96)):
    print(output.outputs[0].delta, end="", flush=True)

metrics = output.metrics
print(f"\n\n{metrics.num_generated_tokens} tokens, {metrics.accepted_tokens} of them drafted and accepted")
