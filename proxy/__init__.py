"""A router in front of prefill and decode engines: every request is prefilled on one and decoded on another."""
