"""Bytes, descriptors and planning time for the geometries of real models. Starts no engine."""
