"""The vLLM adapter: the only package that imports vLLM, and the only one that speaks its spellings."""
