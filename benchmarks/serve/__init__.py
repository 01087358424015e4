"""``vllm bench serve`` through the proxy: a single engine, vLLM's built-in connector, and ours."""
