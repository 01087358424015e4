"""The sans-I/O core: events in, actions out, time as an argument."""
