"""Child processes for work on untrusted input: started and asked (`child`), and what bounds them (`limits`)."""
