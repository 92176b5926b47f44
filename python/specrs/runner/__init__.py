"""How an iteration executes: row state, uploads, prefill, the three iteration functions, runners. Decides nothing."""
