"""The loop: plan, launch, settle. Requests and their text; no tensors and no scheduling decisions."""
