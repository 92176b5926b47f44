"""Child processes for work on untrusted input: `child` starts and asks them, `limits` restrains them."""
