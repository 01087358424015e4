"""From prefill's answer to decode's first token, with real engines: ours beside vLLM's built-in connector."""
