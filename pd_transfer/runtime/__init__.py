"""Where the core meets threads, clocks and I/O: one thread per worker, one lock and one thread per scheduler."""
