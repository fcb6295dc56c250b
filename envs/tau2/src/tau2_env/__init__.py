"""The benchmark tau2 as an environment: its state, its simulated user and its evaluation."""
