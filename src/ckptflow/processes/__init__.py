"""Other processes and threads: questions to transformers, local servers, pools, the garbage collector."""
