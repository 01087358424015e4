"""pd_transfer: exact prefill/decode KV transfer for vLLM, aware of the hybrid memory allocator."""

__version__ = "0.1.0"
