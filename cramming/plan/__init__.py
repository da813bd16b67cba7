"""Memory and speed of a configuration, foretold by simulated steps."""
